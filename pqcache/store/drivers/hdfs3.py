"""A source on HDFS, through hdfs3 0.3.1 and the C++ library libhdfs3, for sites that have them.

hdfs3's Python layer takes a denied directory or a dead NameNode for a missing file. So it only connects; listing, stat
and reading call the library's own functions, and ask for the reason when one fails.

``HADOOP_CONF_DIR`` and ``HADOOP_USER_NAME`` work as everywhere; any Hadoop key can be given with ``-o``. Times of
modification have a resolution of one second here, so a cache that changes its driver downloads its files once more.
"""

from __future__ import annotations

import collections
import collections.abc
import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.base import TIMEOUT, DirectoryLimit, Source, path_below, root_of
from pqcache.store.drivers.hdfs3_config import login, name_node, settings
from pqcache.store.drivers.network_errors import known_cause
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact

_NEEDS = "--hdfs-driver hdfs3 needs hdfs3 and libhdfs3 (conda install -c conda-forge hdfs3)"
_CHUNK = 1 << 20
_DIRECTORY = ord("D")
_importing = threading.Lock()


class Hdfs3Source(Source):
    """A Source over libhdfs3; see ``pqcache.store.drivers.base.Source``.

    It belongs to the process that built it: after a fork, libhdfs3 mixes up the answers of both processes.
    """

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        self.url = redact(url).rstrip("/")
        self._host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
        self._root = root_of(url)
        self._only = ""
        self._timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._users = 0
        self._encoded(self._root)
        core = _load(self.url)
        first = core.HDFileSystem._first_pid
        if first not in (None, self._pid):
            raise self._forked()
        known = settings(self.url, options, timeout)
        host, port = name_node(self.url, self._host, known)
        self._fs = core.HDFileSystem(
            host=host, port=port, connect=False, autoconf=False, pars={**known, **login(url, options, known)}
        )
        self._lib = core._lib

    def list(self) -> Iterator[SourceFile]:
        with self._connected(self._root) as handle:
            top = self._info(handle, path_below(self._root, self._only) if self._only else self._root)
            if not top.is_directory:
                if not self._only:
                    self._root, _, self._only = self._root.rpartition("/")
                yield SourceFile(self._only, top.identity, top.block_size)
                return
            pending, limit = [""], DirectoryLimit(self.url)
            while pending:
                directory = pending.pop()
                for item in self._entries(handle, path_below(self._root, directory).rstrip("/") or "/"):
                    path = "/".join(filter(None, (directory, item.name)))
                    if item.is_directory:
                        pending.append(limit.enter(path))
                    else:
                        yield SourceFile(path, item.identity, item.block_size)

    def stat(self, path: str) -> Identity:
        name = path_below(self._root, path)
        with self._connected(name) as handle:
            return self._info(handle, name).identity

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        name = path_below(self._root, path)
        encoded = self._encoded(name)
        if length <= 0:
            return
        with self._connected(name) as handle:
            # a file handle per call: two threads on one crash, and one that failed once keeps failing
            file = self._lib.hdfsOpenFile(handle, encoded, os.O_RDONLY, 0, 0, 0)
            if not file:
                raise self._failure(name)
            try:
                if offset and self._lib.hdfsSeek(handle, file, offset) != 0:
                    error = self._reason()
                    if error.startswith("HdfsEndOfStream"):
                        return  # the file is shorter now
                    raise self._error(name, error)
                buffer = ctypes.create_string_buffer(min(_CHUNK, length))
                while length > 0:
                    count = self._fill(handle, file, buffer, min(_CHUNK, length), name)
                    if not count:
                        return
                    yield ctypes.string_at(buffer, count)
                    length -= count
            finally:
                self._lib.hdfsCloseFile(handle, file)

    def close(self) -> None:
        if os.getpid() != self._pid:
            self._fs._handle = None  # the connection is the parent's
            return
        with self._lock:
            if self._users:
                self._fs._handle = None  # a call is still using it; it ends with the process
            else:
                self._fs.disconnect()

    def _fill(self, handle: Any, file: Any, buffer: Any, size: int, name: str) -> int:
        """Read ``size`` bytes, or up to the end of the file, into ``buffer``; return how many."""
        filled = 0
        while filled < size:
            got = self._lib.hdfsRead(handle, file, ctypes.byref(buffer, filled), size - filled)
            if got < 0:
                raise self._failure(name)
            if got == 0:
                break
            filled += got
        return filled

    def _info(self, handle: Any, name: str) -> _PathInfo:
        found = self._lib.hdfsGetPathInfo(handle, self._encoded(name))
        if not found:
            raise self._failure(name)
        try:
            return _path_info(found[0], name)
        finally:
            self._lib.hdfsFreeFileInfo(found, 1)

    def _entries(self, handle: Any, directory: str) -> Sequence[_PathInfo]:
        count = ctypes.c_int(0)
        found = self._lib.hdfsListDirectory(handle, self._encoded(directory), ctypes.byref(count))
        if not found:  # an empty directory is not NULL
            raise self._failure(directory)
        try:
            return [_path_info(found[position], directory) for position in range(count.value)]
        finally:
            self._lib.hdfsFreeFileInfo(found, count.value)

    @contextmanager
    def _connected(self, name: str) -> Iterator[Any]:
        """Give the connection, which is made on first use; ``close`` does not free it inside the block."""
        if os.getpid() != self._pid:
            raise self._forked()
        with self._lock:
            if self._fs._handle is None:
                try:
                    self._fs.connect()
                except OSError as error:
                    raise self._error(name, str(error)) from error
            handle = self._fs._handle
            self._users += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._users -= 1

    def _encoded(self, name: str) -> bytes:
        if "\0" in name:
            raise UsageError(self.url, "a path cannot hold a NUL character")  # C would cut it there
        return name.encode("utf-8", "surrogateescape")

    def _forked(self) -> SourceError:
        return SourceError(
            self.url,
            "hdfs3 was used before this process was forked, and gives wrong answers after a fork",
            "start processes with 'spawn', or use --hdfs-driver hdfs-native",
        )

    def _reason(self) -> str:
        """Return why the last call failed; valid right after it, on the same thread."""
        return bytes(self._lib.hdfsGetLastError() or b"").decode("utf-8", "replace")

    def _failure(self, name: str) -> SourceError:
        return self._error(name, self._reason())

    def _error(self, name: str, reason: str) -> SourceError:
        show = f"hdfs://{self._host}{name}"
        text = _first_line(reason)
        if (known := known_cause(show, text.replace(name, ""))) is not None:
            return known
        kind = text.replace(name, "")  # a path may hold any of the words below
        missing = re.match(r"FileNotFoundException|File does not exist|Path is not a file", kind)
        if missing or kind.endswith("(is not a directory)"):
            return SourceNotFound(show, "no such file or directory", "check the URL")
        if re.search(r"Permission denied|AccessControl|Sasl|Kerberos|GSS|principal|InvalidToken", kind):
            return SourceDenied(
                show,
                "permission denied",
                "check HADOOP_USER_NAME, the Kerberos ticket (klist) and the directory's permissions",
            )
        if "Timeout" in kind:
            return SourceUnavailable(show, f"no answer for {self._timeout:.0f} s", "check the cluster's health")
        return SourceUnavailable(show, text, "check that the NameNode runs and that the port is its RPC port")


class _PathInfo(NamedTuple):
    """The library's record of one path; ``name`` is empty for the path that was asked for."""

    name: str
    is_directory: bool
    identity: Identity
    block_size: int


def _path_info(info: Any, asked: str) -> _PathInfo:
    """Return a copy of the library's record, which is freed right after.

    The library writes ``//name`` below the root, and ``name/`` for a file that is listed like a directory.
    """
    full = info.name.decode("utf-8", "surrogateescape")
    name = "" if full.rstrip("/") == asked.rstrip("/") else full.rstrip("/").rpartition("/")[2]
    identity = Identity(info.size, info.last_mod * 1_000_000_000)
    return _PathInfo(name, info.kind == _DIRECTORY, identity, info.block_size)


def _load(url: str) -> Any:
    """Import hdfs3 and load libhdfs3; return the module ``hdfs3.core``."""
    with _importing:
        try:
            with _as_hdfs3_expects():
                import hdfs3.core
        except ImportError as error:
            raise UsageError(url, _NEEDS, _first_line(str(error))) from error
        try:
            hdfs3.core.get_lib()
        except (ImportError, OSError, AttributeError) as error:  # AttributeError: it is too old
            why = _first_line(str(error))
            raise UsageError(url, _NEEDS, f"the library cannot be loaded: {why}") from error
    return hdfs3.core


@contextmanager
def _as_hdfs3_expects() -> Iterator[None]:
    """Let hdfs3 find names that Python 3.10 removed, and no Hadoop configuration: its parser fails on valid ones."""
    if "hdfs3" in sys.modules:
        yield
        return
    patched = not hasattr(collections, "MutableMapping")
    if patched:
        collections.MutableMapping = collections.abc.MutableMapping  # type: ignore[attr-defined]
    before = {name: os.environ.pop(name, None) for name in ("LIBHDFS3_CONF", "HADOOP_CONF_DIR")}
    try:
        with tempfile.TemporaryDirectory() as empty:
            os.environ["HADOOP_CONF_DIR"] = empty
            yield
    finally:
        if patched:
            del collections.MutableMapping  # type: ignore[attr-defined]
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _first_line(text: str) -> str:
    """Return libhdfs3's message without C++ name spaces, causes and Java's stack."""
    line = text.strip().partition("\n")[0]
    return line.replace("Hdfs::", "").replace("\t", " ").strip() or "no reason given"
