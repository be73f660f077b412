"""A stand-in for libhdfs3.so: C callbacks with the signatures that ``hdfs3/lib.py`` declares, over a tree in memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

MODIFIED = 1_795_208_851
PERMISSION = 'Permission denied: user=me, access=READ_EXECUTE, inode="{}":root:supergroup:drwx------\n\tat org.apache'
DEAD = (
    'Hdfs::HdfsRpcException: Timeout when wait for response from RPC channel "nn:8020"\tCaused by: '
    'Hdfs::HdfsTimeoutException: Timeout when wait for response from RPC channel "nn:8020"'
)
DATANODE = (
    "HdfsIOException: InputStreamImpl: cannot read file: {}, from position 0, size: 100.\tCaused by: "
    "HdfsNetworkConnectException: Connect to 127.0.0.1:9866 failed"
)


class FakeLibhdfs3:
    """The library; ``tree`` maps a path to a file's bytes, or to None for a directory."""

    def __init__(self) -> None:
        self.tree: dict[str, bytes | None] = {"/": None}
        self.denied: set[str] = set()
        self.dead = False  # the NameNode
        self.unreadable: set[str] = set()  # no DataNode has them
        self.most = 1 << 16  # bytes that one call of hdfsRead returns
        self.configured: dict[str, str] = {}
        self.address: tuple[str, int | None, str | None] = ("", None, None)
        self.connections = 0
        self.allocated: dict[int, Any] = {}  # what was allocated and not freed
        self.readers: dict[int, tuple[str, list[int], int]] = {}  # path, position and thread of open files
        self.opened = 0
        self.crashes: list[str] = []  # what would have ended the process
        self._error = threading.local()
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a C function, as a loaded library does; those that reading does not need always fail."""
        if not name.startswith("hdfs"):
            raise AttributeError(name)
        if name not in self._functions:
            body, result, arguments = self._bodies().get(name, (lambda *_: -1, ctypes.c_int, ()))
            self._functions[name] = ctypes.CFUNCTYPE(result, *arguments)(body)
        return self._functions[name]

    def put(self, path: str, data: bytes) -> None:
        self.tree[path] = data
        while (path := path.rpartition("/")[0]) and path not in self.tree:
            self.tree[path] = None

    def _bodies(self) -> dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...]]]:
        address, text, number, big = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
        return {
            "hdfsGetLastError": (self._last_error, address, ()),
            "hdfsNewBuilder": (lambda: 1, address, ()),
            "hdfsFreeBuilder": (lambda builder: None, None, (address,)),
            "hdfsBuilderSetNameNode": (self._set_host, None, (address, text)),
            "hdfsBuilderSetNameNodePort": (self._set_port, None, (address, ctypes.c_uint16)),
            "hdfsBuilderSetUserName": (self._set_user, None, (address, text)),
            "hdfsBuilderConfSetStr": (self._set, number, (address, text, text)),
            "hdfsBuilderConnect": (self._connect, address, (address, text)),
            "hdfsDisconnect": (self._disconnect, number, (address,)),
            "hdfsExists": (lambda fs, path: -1 if self._refused(path, False) else 0, number, (address, text)),
            "hdfsGetPathInfo": (self._path_info, address, (address, text)),
            "hdfsListDirectory": (self._list, address, (address, text, ctypes.POINTER(number))),
            "hdfsFreeFileInfo": (
                lambda found, count: self.allocated.pop(found, None) and None,
                None,
                (address, number),
            ),
            "hdfsOpenFile": (self._open, address, (address, text, number, number, ctypes.c_short, big)),
            "hdfsSeek": (self._seek, number, (address, address, big)),
            "hdfsRead": (self._read, ctypes.c_int32, (address, address, address, ctypes.c_int32)),
            "hdfsCloseFile": (lambda fs, file: 0 if self.readers.pop(file, None) else -1, number, (address, address)),
        }

    def _last_error(self) -> int:
        return ctypes.addressof(self._error.text)

    def _fail(self, why: str) -> None:
        self._error.text = ctypes.create_string_buffer(why.encode())

    def _refused(self, path: bytes, listing: bool) -> bool:
        name = path.decode("utf-8", "surrogateescape").rstrip("/") or "/"
        parents = [name[:position] for position in range(1, len(name)) if name[position] == "/"]
        above = next((parent for parent in parents if parent in self.denied), None)
        file_above = next((parent for parent in parents if self.tree.get(parent) is not None), None)
        if self.dead:
            self._fail(DEAD)
        elif above or (listing and name in self.denied):
            self._fail(PERMISSION.format(above or name))
        elif file_above:
            self._fail(f"{file_above} (is not a directory)\n\tat org.apache.hadoop")
        elif name not in self.tree:
            missing = f"{name} not found." if listing else f"Path {name} does not exist."
            self._fail(f"FileNotFoundException: {missing}")
        else:
            return False
        return True

    def _set_host(self, builder: int, host: bytes) -> None:
        self.configured, self.address = {}, (host.decode(), None, None)

    def _set_port(self, builder: int, port: int) -> None:
        self.address = (self.address[0], port, self.address[2])

    def _set_user(self, builder: int, user: bytes) -> None:
        self.address = (*self.address[:2], user.decode())

    def _set(self, builder: int, key: bytes, value: bytes) -> int:
        self.configured[key.decode()] = value.decode()
        return 0 if key and value else -1

    def _connect(self, builder: int, effective_user: bytes) -> int | None:
        for name, value in self.configured.items():
            if ("timeout" in name or "retry" in name) and not value.lstrip("-").isdigit():
                self.crashes.append(f"{name}={value}")
        if self.dead:
            self._fail(DEAD)
            return None
        self.connections += 1
        handle = ctypes.create_string_buffer(8)
        self.allocated[ctypes.addressof(handle)] = handle
        return ctypes.addressof(handle)

    def _disconnect(self, handle: int) -> int:
        self.connections -= 1
        self.allocated.pop(handle)
        return 0

    def _infos(self, entries: list[tuple[str, str]]) -> int:
        """Return the address of records of (path, name shown)."""
        record = sys.modules["hdfs3.lib"].FileInfo
        found = (record * (len(entries) or 1))()
        for info, (path, shown) in zip(found, entries, strict=False):
            data = self.tree[path]
            info.kind = ord("D") if data is None else ord("F")
            info.name = shown.encode("utf-8", "surrogateescape")
            info.size, info.block_size = (0, 0) if data is None else (len(data), 128 << 20)
            info.last_mod = MODIFIED
            info.owner = info.group = b"root"
        self.allocated[ctypes.addressof(found)] = found
        return ctypes.addressof(found)

    def _path_info(self, fs: int, path: bytes) -> int | None:
        if self._refused(path, False):
            return None
        name = path.decode("utf-8", "surrogateescape").rstrip("/") or "/"
        return self._infos([(name, name)])

    def _list(self, fs: int, path: bytes, count: Any) -> int | None:
        if self._refused(path, True):
            return None
        name = path.decode("utf-8", "surrogateescape").rstrip("/") or "/"
        prefix = "/" if name == "/" else f"{name}/"
        inside = [p for p in self.tree if p.startswith(prefix) and p != "/" and "/" not in p[len(prefix) :]]
        entries = [(p, f"/{p}" if name == "/" else p) for p in sorted(inside)]
        if self.tree[name] is not None:
            entries = [(name, f"{name}/")]
        count[0] = len(entries)
        return self._infos(entries)

    def _open(self, fs: int, path: bytes, *how: int) -> int | None:
        name = path.decode("utf-8", "surrogateescape")
        if name in self.denied:
            self._fail(f"HdfsIOException: InputStreamImpl: cannot open file: {name}.\tCaused by: {PERMISSION}")
            return None
        if self._refused(path, False):
            if not self.dead:
                self._fail(f"File does not exist: {name}\n\tat org.apache.hadoop")
            return None
        if self.tree[name] is None:
            self._fail(f"Path is not a file: {name}\n\tat org.apache.hadoop")
            return None
        self.opened += 1
        self.readers[self.opened] = (name, [0], threading.get_ident())
        return self.opened

    def _seek(self, fs: int, file: int, offset: int) -> int:
        name, position, _ = self.readers[file]
        if offset > len(self.tree[name] or b""):
            self._fail(f"HdfsEndOfStream: InputStreamImpl: seek over EOF, current position: 0, in file: {name}")
            return -1
        position[0] = offset
        return 0

    def _read(self, fs: int, file: int, buffer: int, size: int) -> int:
        name, position, thread = self.readers[file]
        if thread != threading.get_ident():
            self.crashes.append(f"{name} was read from two threads")
        if name in self.unreadable:
            self._fail(DATANODE.format(name))
            return -1
        piece = (self.tree[name] or b"")[position[0] :][: min(size, self.most)]
        ctypes.memmove(buffer, piece, len(piece))
        position[0] += len(piece)
        return len(piece)
