"""The hdfs3 driver: nothing is swallowed, nothing unparsable reaches the C++ library.

No package registry ships libhdfs3.so, so most tests run the real hdfs3 0.3.1 on a stand-in for that library:
C callbacks with the signatures that ``hdfs3/lib.py`` declares, over a tree in memory. Its answers and error
texts, quirks included, are those of libhdfs3 (conda's sources, compiled by hand) against Hadoop 3.3.6. The
tests at the end use the real library and a real HDFS, where libhdfs3.so can be loaded.
"""

from __future__ import annotations

import collections
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pqcache
from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.hdfs3 import Hdfs3Source
from pqcache.store.drivers.hdfs3_config import settings
from pqcache.store.manifest import Identity
from tests import ROOT
from tests.datasets import files_of, rows_of, write_shop

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

needs_hdfs3 = pytest.mark.skipif(find_spec("hdfs3") is None, reason="hdfs3 is not installed")
URL = "hdfs://nn:8020"
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


class Library:
    """A stand-in for libhdfs3.so; ``tree`` maps a path to a file's bytes, or to None for a directory."""

    def __init__(self) -> None:
        self.tree: dict[str, bytes | None] = {"/": None}
        self.denied: set[str] = set()
        self.dead = False  # the NameNode
        self.unreadable: set[str] = set()  # no DataNode has them
        self.most = 1 << 16  # bytes that one call of hdfsRead brings
        self.told: dict[str, str] = {}
        self.address: tuple[str, int | None, str | None] = ("", None, None)
        self.connections = 0
        self.lent: dict[int, Any] = {}  # what was allocated and not freed
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
            "hdfsFreeFileInfo": (lambda found, count: self.lent.pop(found, None) and None, None, (address, number)),
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
        self.told, self.address = {}, (host.decode(), None, None)

    def _set_port(self, builder: int, port: int) -> None:
        self.address = (self.address[0], port, self.address[2])

    def _set_user(self, builder: int, user: bytes) -> None:
        self.address = (*self.address[:2], user.decode())

    def _set(self, builder: int, key: bytes, value: bytes) -> int:
        self.told[key.decode()] = value.decode()
        return 0 if key and value else -1

    def _connect(self, builder: int, effective_user: bytes) -> int | None:
        for name, value in self.told.items():
            if ("timeout" in name or "retry" in name) and not value.lstrip("-").isdigit():
                self.crashes.append(f"{name}={value}")
        if self.dead:
            self._fail(DEAD)
            return None
        self.connections += 1
        handle = ctypes.create_string_buffer(8)
        self.lent[ctypes.addressof(handle)] = handle
        return ctypes.addressof(handle)

    def _disconnect(self, handle: int) -> int:
        self.connections -= 1
        self.lent.pop(handle)
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
        self.lent[ctypes.addressof(found)] = found
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


def forget_hdfs3() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "hdfs3"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep hdfs3, which remembers the library it loaded, and the user's Hadoop out of the other tests."""
    for name in [n for n in os.environ if n.startswith(("HADOOP_", "LIBHDFS3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    forget_hdfs3()
    yield
    forget_hdfs3()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The stand-in, loaded whenever hdfs3 asks for libhdfs3; at the end nothing was leaked or crashed."""
    if find_spec("hdfs3") is None:
        pytest.skip("hdfs3 is not installed")
    stand_in = Library()
    monkeypatch.setattr(ctypes.cdll, "LoadLibrary", lambda name: stand_in)
    yield stand_in
    assert stand_in.crashes == []
    assert stand_in.readers == {}
    assert len(stand_in.lent) == stand_in.connections


def paths(source: Hdfs3Source) -> list[str]:
    return sorted(file.path for file in source.list())


def test_lists_every_file_with_its_identity(library: Library) -> None:
    for name in ("dt=1/a.parquet", "dt=1/h=2/b c%20?#é.parquet", "_SUCCESS", "dt=1/.x.crc"):
        library.put(f"/wh/{name}", b"x" * len(name))
    library.tree["/wh/empty"] = None
    source = Hdfs3Source(f"{URL}/wh/", {})
    assert library.connections == 0  # nothing is contacted before it is used
    found = {file.path: file for file in source.list()}
    assert sorted(found) == ["_SUCCESS", "dt=1/.x.crc", "dt=1/a.parquet", "dt=1/h=2/b c%20?#é.parquet"]
    file = found["dt=1/a.parquet"]
    assert (file.identity, file.block_size) == (Identity(14, MODIFIED * 10**9), 128 << 20)
    assert source.stat("dt=1/a.parquet") == file.identity
    assert source.url == f"{URL}/wh"
    source.close()
    assert library.connections == 0


def test_the_root_directory_and_names_that_are_no_utf8(library: Library) -> None:
    strange = b"dt=\xff/a".decode("utf-8", "surrogateescape")
    library.put(f"/{strange}", b"1")
    source = Hdfs3Source(URL, {})
    assert paths(source) == [strange]
    assert b"".join(source.read(strange, 0, 1)) == b"1"
    source.close()


def test_one_file(library: Library) -> None:
    library.put("/wh/a.parquet", b"abc")
    library.put("/wh/b.parquet", b"def")
    source = Hdfs3Source(f"{URL}/wh/a.parquet", {})
    for _ in range(2):
        assert paths(source) == ["a.parquet"]
    assert b"".join(source.read("a.parquet", 1, 2)) == b"bc"
    source.close()


def test_an_empty_directory_is_empty_and_a_missing_one_is_not(library: Library) -> None:
    library.tree["/wh"] = None
    assert paths(Hdfs3Source(f"{URL}/wh", {})) == []
    for missing in ("/nope", "/wh/x/y"):
        with pytest.raises(SourceNotFound, match=f"nn:8020{missing}: no such file"):
            paths(Hdfs3Source(URL + missing, {}))


def test_a_file_in_place_of_a_directory_is_that_file(library: Library) -> None:
    """The library lists a file as 'name/': what was a directory when its parent was listed may be one by now."""
    library.put("/wh/dt=1", b"now a file")
    source = Hdfs3Source(f"{URL}/wh", {})
    with source._connected("/wh") as handle:
        (entry,) = source._entries(handle, "/wh/dt=1")
    assert (entry.name, entry.is_directory) == ("", False)
    with pytest.raises(SourceNotFound):
        source.stat("dt=1/a.parquet")
    source.close()


@pytest.mark.parametrize("denied", ["/wh", "/wh/dt=1", "/wh/dt=3", "/wh/dt=2/h=1"])
def test_a_denied_directory_is_an_error_where_hdfs3_sees_nothing(denied: str, library: Library) -> None:
    for day in (1, 2, 3):
        library.put(f"/wh/dt={day}/h=1/a.parquet", b"x")
    library.denied.add(denied)
    source = Hdfs3Source(f"{URL}/wh", {})
    with pytest.raises(SourceDenied, match=f"hdfs://nn:8020{denied}: permission denied") as error:
        paths(source)
    assert "\n" not in str(error.value)
    assert source._fs.ls(denied) == []  # what an adapter over hdfs3's own functions would have believed
    source.close()


def test_a_path_with_an_error_in_its_name_is_no_such_error(library: Library) -> None:
    library.put("/Permission denied/FileNotFoundException/Kerberos", b"x")
    library.unreadable.add("/Permission denied/FileNotFoundException/Kerberos")
    source = Hdfs3Source(f"{URL}/Permission denied", {})
    with pytest.raises(SourceUnavailable, match="cannot read file"):
        list(source.read("FileNotFoundException/Kerberos", 0, 1))
    with pytest.raises(SourceNotFound):
        source.stat("nope")
    source.close()


def test_a_dead_namenode_is_never_an_empty_directory(library: Library) -> None:
    library.put("/wh/a.parquet", b"abc")
    source = Hdfs3Source(f"{URL}/wh", {}, 7)
    library.dead = True
    calls: list[Callable[[], object]] = [
        lambda: paths(source),
        lambda: source.stat("a.parquet"),
        lambda: list(source.read("a.parquet", 0, 3)),
    ]
    for connected in (False, True):
        for call in calls:
            with pytest.raises(SourceUnavailable, match=r"hdfs://nn:8020/wh.*: no answer for 7 s") as error:
                call()
            assert "\n" not in str(error.value)
        library.dead = connected
        assert connected or paths(source) == ["a.parquet"]
        library.dead = True
    library.dead = False
    assert paths(source) == ["a.parquet"]
    source.close()


def test_reads_ranges_in_pieces(library: Library) -> None:
    data = os.urandom((2 << 20) + 12_345)
    library.put("/wh/a", data)
    source = Hdfs3Source(f"{URL}/wh", {})
    pieces = list(source.read("a", 0, len(data)))
    assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, 12_345]
    assert b"".join(pieces) == data
    assert b"".join(source.read("a", 1000, 300)) == data[1000:1300]
    assert list(source.read("a", 5, 0)) == []
    # a file that has become shorter gives what it has: transfer.py asks for its identity then
    assert b"".join(source.read("a", len(data) - 5, 100)) == data[-5:]
    assert b"".join(source.read("a", len(data) + 5, 100)) == b""
    source.close()


def test_what_cannot_be_read_is_told_apart(library: Library) -> None:
    for name in ("lost", "secret"):
        library.put(f"/wh/{name}", b"abc")
    library.unreadable.add("/wh/lost")
    library.denied.add("/wh/secret")
    source = Hdfs3Source(f"{URL}/wh", {})
    with pytest.raises(SourceUnavailable, match=r"wh/lost: .*Connect to 127.0.0.1:9866 failed"):
        list(source.read("lost", 0, 3))
    with pytest.raises(SourceDenied, match="wh/secret: permission denied"):
        list(source.read("secret", 0, 3))
    with pytest.raises(SourceNotFound, match="wh/gone: no such file"):
        list(source.read("gone", 0, 3))
    source.close()


def test_every_thread_has_a_reader_of_its_own(library: Library) -> None:
    contents = {f"f{number}": os.urandom(300_000 + number) for number in range(16)}
    for name, data in contents.items():
        library.put(f"/wh/{name}", data)
    source = Hdfs3Source(f"{URL}/wh", {})
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda n: b"".join(source.read(n, 0, 400_000)), list(contents) * 2)
        assert list(read) == list(contents.values()) * 2
    assert library.opened == 32
    assert library.connections == 1
    source.close()


def test_close_leaves_a_connection_in_use_alone(library: Library) -> None:
    library.put("/wh/a", bytes(3 << 20))
    source = Hdfs3Source(f"{URL}/wh", {})
    reader = source.read("a", 0, 3 << 20)
    next(reader)
    source.close()
    assert library.connections == 1
    assert len(b"".join(reader)) == 2 << 20


def test_a_forked_process_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("/wh/a", b"x")
    source = Hdfs3Source(f"{URL}/wh", {})
    assert paths(source) == ["a"]
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    for call in (lambda: paths(source), lambda: source.stat("a"), lambda: list(source.read("a", 0, 1))):
        with pytest.raises(SourceError, match=r"forked.*spawn"):
            call()
    with pytest.raises(SourceError, match="forked"):
        Hdfs3Source(f"{URL}/wh", {})  # a new connection gives wrong answers as well
    source.close()
    assert library.connections == 1  # the parent's


@pytest.mark.parametrize("path", ["a\0b", "\0"])
def test_a_nul_in_a_path_is_refused(path: str, library: Library) -> None:
    library.put("/wh/a", b"x")
    with pytest.raises(UsageError, match="NUL"):
        Hdfs3Source(f"{URL}/wh/{path}", {})
    source = Hdfs3Source(f"{URL}/wh", {})
    with pytest.raises(UsageError, match="NUL"):
        source.stat(path)
    with pytest.raises(UsageError, match="NUL"):
        list(source.read(path, 0, 1))


def test_sync(library: Library, tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    for file in shop.rglob("*"):
        if file.is_file():
            library.put(f"/wh/shop/{file.relative_to(shop)}", file.read_bytes())
    report = pqcache.sync(f"{URL}/wh/shop", cache, hdfs_driver="hdfs3")
    assert report.published
    assert files_of(cache / "current") == files_of(shop)
    assert rows_of(cache / "current") == rows_of(shop)
    assert not pqcache.sync(cache).published
    before = os.readlink(cache / "current")
    library.denied.add("/wh/shop/dt=2026-11-02")
    with pytest.raises(SourceDenied, match="dt=2026-11-02: permission denied"):
        pqcache.sync(cache)
    library.denied.clear()
    library.dead = True
    with pytest.raises(SourceUnavailable, match="no answer"):
        pqcache.sync(cache, retries=0)
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows_of(shop)


def test_what_the_library_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("/wh/a", b"x")
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    given = {"input.read.max.retry": "007", "dfs.my.own": "Some Thing"}
    source = Hdfs3Source("hdfs://nn/wh", given, 12)
    assert paths(source) == ["a"]
    assert library.address == ("nn", 8020, "me")
    expected = {
        "rpc.client.timeout": "6000",  # an RPC takes twice its timeout
        "rpc.client.connect.timeout": "6000",
        "rpc.client.connect.retry": "1",
        "input.read.timeout": "12000",
        "input.read.max.retry": "7",
        "dfs.client.read.shortcircuit": "false",
        "dfs.client.log.severity": "FATAL",
        "dfs.my.own": "Some Thing",
    }
    assert {name: library.told.get(name) for name in expected} == expected
    source.close()
    source = Hdfs3Source("hdfs://you:pw@nn:9000/wh", {})
    assert paths(source) == ["a"]
    assert library.address == ("nn", 9000, "you")
    assert "pw" not in source.url
    source.close()


BAD = [
    ("rpc.client.timeout", "abc"),
    ("rpc.client.timeout", ""),
    ("rpc.client.timeout", "30s"),
    ("rpc.client.timeout", "1.5"),
    ("rpc.client.timeout", "٣"),
    ("rpc.client.timeout", "99999999999"),
    ("rpc.client.connect.retry", "0"),
    ("input.read.max.retry", "-1"),
    ("dfs.client.failover.max.attempts", "-1"),
    ("dfs.default.blocksize", "128m"),
    ("dfs.default.blocksize", "1000"),
    ("dfs.client.read.shortcircuit", "yes"),
    ("dfs.client.log.severity", "LOUD"),
    ("hadoop.rpc.protection", "perhaps"),
    ("some.key", "a\0b"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_values_that_would_end_the_process_are_refused(name: str, value: str, library: Library) -> None:
    with pytest.raises(UsageError, match=name) as error:
        Hdfs3Source(f"{URL}/wh", {name: value})
    assert "\n" not in str(error.value)
    assert library.told == {}


@pytest.mark.parametrize("options", [{"colour": "red"}, {"host": "x"}, {"token": "a", "ticket_cache": "b"}])
def test_options_that_make_no_sense(options: dict[str, str], library: Library) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Hdfs3Source(f"{URL}/wh", options)


@pytest.mark.parametrize("url", ["hdfs:///x", "hdfs://a b/x", "hdfs://nn:x/y", "hdfs://nn:99999/y", "hdfs://:1/y"])
def test_a_url_without_a_usable_host(url: str, library: Library) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        Hdfs3Source(url, {})


def write_xml(path: Path, properties: dict[str, str], more: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    lines = "".join(
        f"<property>\n <name>{name}</name>\n <!-- why --><value>\n{value}\n</value>\n</property>"
        for name, value in properties.items()
    )
    head = '<?xml version="1.0"?>\n<configuration xmlns:xi="http://www.w3.org/2001/XInclude">'
    path.write_text(f"{head}{lines}{more}</configuration>")


def test_ha_from_the_site_configuration(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    write_xml(conf / "core-site.xml", {"fs.defaultFS": "hdfs://${dfs.nameservices}", "rpc.client.timeout": "1"})
    names = {"dfs.nameservices": "Lake", "dfs.ha.namenodes.Lake": "n1,n2", "empty.one": "", "user": "evil"}
    write_xml(conf / "hdfs-site.xml", names, '<xi:include href="more.xml"/>')
    write_xml(conf / "more.xml", {f"dfs.namenode.rpc-address.Lake.n{n}": f"h{n}.${{env.SITE}}:8020" for n in (1, 2)})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(conf))
    monkeypatch.setenv("SITE", "example.com")
    library.put("/wh/a", b"x")
    for url in ("hdfs:///wh", "hdfs://Lake/wh"):
        source = Hdfs3Source(url, {}, 10)
        assert paths(source) == ["a"]
        assert library.address[:2] == ("Lake", None)
        assert library.told["dfs.namenode.rpc-address.Lake.n2"] == "h2.example.com:8020"
        assert library.told["rpc.client.timeout"] == "5000"  # --timeout means what it says
        assert "empty.one" not in library.told
        assert library.address[2] is None
        source.close()
    assert os.environ["HADOOP_CONF_DIR"] == str(conf)
    assert "LIBHDFS3_CONF" not in os.environ


def test_kerberos_is_no_place_for_hadoop_user_name(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.tree["/wh"] = None
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    source = Hdfs3Source(f"{URL}/wh", {"hadoop.security.authentication": "kerberos"})
    assert paths(source) == []
    assert library.address[2] is None
    source.close()


@pytest.mark.parametrize("text", ["<configuration><property>", "", "<other/>"])
def test_a_broken_configuration_file_is_named(
    text: str, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hdfs-site.xml").write_text(text)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"hdfs-site\.xml"):
        Hdfs3Source(f"{URL}/wh", {})


def test_the_librarys_own_configuration_is_checked_before_it_reads_it(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBHDFS3_CONF", str(tmp_path / "mine.xml"))
    with pytest.raises(UsageError, match=r"mine\.xml.*LIBHDFS3_CONF"):
        Hdfs3Source(f"{URL}/wh", {})
    write_xml(tmp_path / "mine.xml", {"rpc.client.max.idle": "soon"})
    with pytest.raises(UsageError, match=r"rpc\.client\.max\.idle"):
        Hdfs3Source(f"{URL}/wh", {})
    write_xml(tmp_path / "mine.xml", {}, "<what/>")
    with pytest.raises(UsageError, match=r"mine\.xml"):
        Hdfs3Source(f"{URL}/wh", {})
    monkeypatch.delenv("LIBHDFS3_CONF")
    (tmp_path / "hdfs-client.xml").write_text("no XML")  # it takes this one from the working directory
    with pytest.raises(UsageError, match=r"hdfs-client\.xml"):
        Hdfs3Source(f"{URL}/wh", {})


def test_words_that_hadoop_takes_several_of(tmp_path: Path) -> None:
    told = settings(URL, {"hadoop.rpc.protection": "privacy,authentication"}, 30)
    assert told["hadoop.rpc.protection"] == "privacy"


def test_importing_leaves_no_trace(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name>\n<value>hdfs://nn:8020/</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))  # hdfs3 itself fails on the slash in it
    before = dict(os.environ)
    Hdfs3Source(f"{URL}/wh", {})
    assert not hasattr(collections, "MutableMapping")
    assert dict(os.environ) == before
    assert "hdfs3.mapping" in sys.modules


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs3", None)
    with pytest.raises(UsageError, match=r"--hdfs-driver hdfs3 needs hdfs3 and libhdfs3 .conda install -c conda-forge"):
        Hdfs3Source(f"{URL}/wh", {})
    monkeypatch.undo()


@needs_hdfs3
def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes.cdll, "LoadLibrary", fail)
    with pytest.raises(UsageError, match=r"needs hdfs3 and libhdfs3 .conda.*Can not find.*libhdfs3\.so") as error:
        Hdfs3Source(f"{URL}/wh", {})
    assert "\n" not in str(error.value)


@needs_hdfs3
def test_a_library_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.cdll, "LoadLibrary", lambda name: ctypes.CDLL(None))
    with pytest.raises(UsageError, match=r"needs hdfs3 and libhdfs3 .conda.*undefined symbol: hdfs"):
        Hdfs3Source(f"{URL}/wh", {})


@pytest.fixture
def real(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> tuple[str, Path]:
    """The URL of a dataset on a real HDFS, and its local twin, where the real library can be loaded."""
    try:
        ctypes.CDLL("libhdfs3.so")
    except OSError:
        pytest.skip("libhdfs3.so is not installed (conda-forge has it)")
    shop = write_shop(tmp_path / "shop")
    hdfs.upload_tree(shop, f"{hdfs_dir}/shop")
    return f"{hdfs_dir}/shop", shop


@needs_hdfs3
@pytest.mark.hdfs
@pytest.mark.slow
def test_the_real_library(real: tuple[str, Path], hdfs: Hdfs, tmp_path: Path) -> None:
    """Sync, denied, paused and dead, each in a process of its own as libhdfs3 may end it."""
    url, shop = real
    cache = tmp_path / "cache"

    def run(*more: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pqcache", "sync", url, str(cache), "--hdfs-driver", "hdfs3", *more]
        env = {**os.environ, **({"HADOOP_USER_NAME": user} if user else {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)

    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert rows_of(cache / "current") == rows_of(shop)
    assert "nothing" in run().stdout or "unchanged" in run().stdout
    before = os.readlink(cache / "current")
    hdfs.chmod(f"{url}/dt=2026-11-02", 0o700)
    denied = run(user="nobody2")
    assert denied.returncode == 1
    assert denied.stderr.startswith(f"pqcache: error: {url}/dt=2026-11-02: permission denied")
    for wrong in ("rpc.client.timeout=abc", "dfs.client.read.shortcircuit=perhaps"):
        assert run("-o", wrong).returncode == 2
    with hdfs.paused("namenode"):
        start = time.monotonic()
        stalled = run("--timeout", "2", "--retries", "0")
        assert time.monotonic() - start < 20
    assert stalled.returncode == 1
    assert "no answer for 2 s" in stalled.stderr
    hdfs.kill_namenode()
    try:
        dead = run("--timeout", "2", "--retries", "0")
    finally:
        hdfs.restart_namenode()
    assert dead.returncode == 1
    assert "check that the NameNode runs" in dead.stderr
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows_of(shop)


@needs_hdfs3
@pytest.mark.hdfs
def test_the_real_library_reads_from_threads_and_refuses_a_fork(real: tuple[str, Path]) -> None:
    code = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pqcache.errors import SourceError
from pqcache.store.drivers.hdfs3 import Hdfs3Source
source, shop = Hdfs3Source(sys.argv[1], {}, 10), Path(sys.argv[2])
files = [file for file in source.list()] * 5
with ThreadPoolExecutor(8) as pool:
    for file, data in zip(files, pool.map(lambda f: b"".join(source.read(f.path, 0, f.identity.size)), files)):
        assert data == (shop / file.path).read_bytes(), file
pid = os.fork()
if not pid:
    try:
        source.stat(files[0].path)
    except SourceError:
        source.close()
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert source.stat(files[0].path) == files[0].identity
source.close()
"""
    command = [sys.executable, "-c", code, real[0], str(real[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
