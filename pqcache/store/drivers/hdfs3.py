"""A source on HDFS, through hdfs3 0.3.1 and the C++ library libhdfs3, for sites that have them.

hdfs3's Python layer mistakes a denied directory or a dead NameNode for a missing file. So it is only used to connect;
listing, stat and reading call the library's own functions, and get the reason of a failure from it.

``HADOOP_CONF_DIR`` and ``HADOOP_USER_NAME`` work as usual; any Hadoop key can be given with ``-o``. libhdfs3 ends the
process over a value that it cannot parse, and hdfs3's own reader of configuration files fails on valid ones. So the
files are read and checked here. Modification times have a resolution of one second here, so a cache downloads its files
again after a change of driver.
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
from functools import partial
from typing import Any, NamedTuple

from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import root_of
from pqcache.store.drivers.hdfs import environment_user, read_xml, site_files, with_variables_replaced
from pqcache.store.drivers.remote import RemoteSource
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact, userinfo

OPTIONS = {
    "user": "user name, as in hdfs://USER@HOST:PORT",
    "effective_user": "user to act for, as a proxy user",
    "ticket_cache": "path of the Kerberos ticket cache",
    "token": "delegation token",
}

# Keys whose values libhdfs3 parses:
# https://github.com/ContinuumIO/libhdfs3-downstream, src/common/SessionConfig.cpp
_TRUE_OR_FALSE = """rpc.client.connect.tcpnodelay dfs.client.read.shortcircuit output.replace-datanode-on-failure
    output.replace-datanode-on-failure.best-effort input.notretry-another-node input.localread.mappedfile
    dfs.client.use.legacy.blockreader.local dfs.encrypt.data.transfer input.read.default.verify
    dfs.block.access.token.enable"""
_AT_LEAST = {  # the smallest number that is allowed
    -(1 << 31): """rpc.client.ping.interval rpc.client.connect.timeout rpc.client.read.timeout
    rpc.client.write.timeout rpc.client.socekt.linger.timeout rpc.client.timeout input.connect.timeout
    input.read.timeout input.write.timeout output.default.packetsize output.connect.timeout
    output.read.timeout output.write.timeout output.close.timeout output.packetpool.size
    output.heeartbeat.interval hadoop.security.crypto.buffer.size kms.send.request.retry.times
    kms.send.request.timeout""",
    0: """dfs.client.failover.max.attempts dfs.client.read.shortcircuit.streams.cache.size
    dfs.client.socketcache.expiryMsec dfs.client.socketcache.capacity""",
    1: """rpc.client.max.idle rpc.client.connect.retry dfs.default.replica input.localread.default.buffersize
    dfs.prefetchsize input.read.getblockinfo.retry input.localread.blockinfo.cachesize input.read.max.retry
    output.default.write.retry""",
    512: "output.default.chunksize dfs.default.blocksize",
}
_BOOLEANS = frozenset(_TRUE_OR_FALSE.split())
_NUMBERS = {name: least for least, names in _AT_LEAST.items() for name in names.split()}
_WORDS = {
    "dfs.client.log.severity": ("FATAL", "ERROR", "WARNING", "INFO", "DEBUG1", "DEBUG2", "DEBUG3"),
    "hadoop.rpc.protection": ("authentication", "integrity", "privacy"),
    "dfs.data.transfer.protection": ("authentication", "integrity", "privacy"),
}
_HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(?::(\d{1,5}))?", re.ASCII)


def settings(url: str, options: Mapping[str, str], timeout: float) -> dict[str, str]:
    """Hadoop's keys and values for libhdfs3: pqcache's override the site's, and ``options`` override both.

    An unknown option, or a value that libhdfs3 cannot parse, raises UsageError.
    """
    for name, value in options.items():
        if name not in OPTIONS and "." not in name:
            choices = ", ".join(sorted(OPTIONS))
            raise UsageError(f"-o {name}=...", "hdfs3 has no such option", f"it has: {choices}, and Hadoop's keys")
        if "\0" in value or not value:
            raise UsageError(f"-o {name}=...", "has no value, or one with a NUL character")
    site = _site_configuration()
    milliseconds = max(2, int(timeout * 1000))
    limits = {
        # its own limits allow for an hour of tries; an RPC takes twice its timeout
        **dict.fromkeys(
            ("rpc.client.timeout", "rpc.client.connect.timeout", "rpc.client.write.timeout"),
            str(milliseconds // 2),
        ),
        **dict.fromkeys(("input.connect.timeout", "input.read.timeout", "input.write.timeout"), str(milliseconds)),
        "rpc.client.connect.retry": "1",
        "input.read.max.retry": "1",
        "dfs.client.failover.max.attempts": "4",
        "dfs.client.read.shortcircuit": "false",
        "dfs.client.log.severity": "FATAL",  # else it writes to standard error
    }
    chosen = {name: value for name, value in options.items() if name not in OPTIONS}
    merged = {**site, **limits, **chosen}
    return {name: _checked(url, name, value) for name, value in merged.items() if _is_needed(name, value)}


def _is_needed(name: str, value: str) -> bool:
    return "." in name and (value != "" or name in _BOOLEANS or name in _NUMBERS or name in _WORDS)


def _checked(url: str, name: str, value: str) -> str:
    """Raises UsageError for a value over which libhdfs3 would end the process."""
    if name in _BOOLEANS:
        if value.lower() not in ("true", "false", "1", "0"):
            raise UsageError(url, f"{name}={value!r} is neither true nor false", f"correct it, or use -o {name}=")
        return value.lower()
    if name in _NUMBERS:
        least, most = _NUMBERS[name], (1 << 31) - 1
        number = int(value) if re.fullmatch(r"[+-]?\d{1,10}", value, re.ASCII) else None
        if number is None or not least <= number <= most or (least == 512 and number % 512):
            what = "a multiple of 512" if least == 512 else f"a whole number from {least} to {most}"
            raise UsageError(url, f"{name}={value!r} is not {what}", f"correct it, or use -o {name}=")
        return str(number)
    if name in _WORDS:
        word = value.partition(",")[0].strip()  # Hadoop allows several; libhdfs3 takes one
        if word.lower() not in map(str.lower, _WORDS[name]):
            raise UsageError(url, f"{name}={value!r} is none of {', '.join(_WORDS[name])}")
        return word
    return value


def login(url: str, options: Mapping[str, str], configuration: Mapping[str, str]) -> dict[str, str]:
    """User, ticket or token under the names of hdfs3's parameters."""
    parameters = {name: value for name, value in options.items() if name in OPTIONS}
    if "token" in parameters and "ticket_cache" in parameters:
        raise UsageError(redact(url), "has a token and a ticket cache", "give -o token= or -o ticket_cache=, not both")
    user = parameters.get("user") or userinfo(url)[0]
    if not user and configuration.get("hadoop.security.authentication", "simple").lower() == "simple":
        user = environment_user()
    if user and "token" not in parameters:
        parameters["user"] = user
    return parameters


def name_node(url: str, host: str, configuration: Mapping[str, str]) -> tuple[str, int | None]:
    default = configuration.get("fs.defaultFS") or configuration.get("fs.default.name") or ""
    if not host and default.startswith("hdfs://"):
        host = default.removeprefix("hdfs://").partition("/")[0]
    match = _HOST.fullmatch(host)
    if match is None:
        raise UsageError(url, "no host", "write hdfs://HOST:PORT/PATH or set HADOOP_CONF_DIR")
    services = [name.strip() for name in configuration.get("dfs.nameservices", "").split(",")]
    if match[2] is None and match[1] in services:
        return match[1], None
    port = int(match[2] or 8020)
    if not 0 < port < 65536:
        raise UsageError(url, f"{port} is not a port", "write hdfs://HOST:PORT/PATH")
    return match[1], port


def _site_configuration() -> dict[str, str]:
    """Properties of the site's files, else of libhdfs3's own."""
    file = os.environ.get("LIBHDFS3_CONF", "")  # libhdfs3 reads this one by itself, from after a '='
    file = file.partition("=")[2] or file
    values = read_xml(file or "hdfs-client.xml", strict=True, missing="correct LIBHDFS3_CONF" if file else "")
    return with_variables_replaced({**values, **site_files()})


_NEEDS = "--hdfs-driver hdfs3 needs hdfs3 and libhdfs3 (conda install -c conda-forge hdfs3)"
_CHUNK = 1 << 20
_DIRECTORY = ord("D")
_importing = threading.Lock()


class _LibraryError(Exception):
    """The string form omits the path, which may contain arbitrary words."""

    def __init__(self, name: str, reason: str) -> None:
        self.text = _first_line(reason)
        super().__init__(self.text.replace(name, ""))


class Hdfs3Source(RemoteSource):
    """A RemoteSource over libhdfs3.

    Use it only in the process that created it: after a fork, libhdfs3 mixes up the answers of both processes.
    """

    has_time_limit = True
    raises = (_LibraryError,)

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        super().__init__(url, root_of(url), options, timeout)
        self._host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
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

    def _list(self) -> Iterator[SourceFile]:
        with self._connected(self._root) as handle:
            top = self._info(handle, self._root)
            if top.is_directory:
                yield from self.walk(partial(self._entries, handle))
            else:
                yield SourceFile(self.take_only_file(), top.identity, top.block_size)

    def _stat(self, path: str) -> Identity:
        name = self.key_of(path)
        with self._connected(name) as handle:
            return self._info(handle, name).identity

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        name = self.key_of(path)
        with self._connected(name) as handle:
            # a file handle per call: two threads on one crash, and one that failed once keeps failing
            file = self._lib.hdfsOpenFile(handle, self._encoded(name), os.O_RDONLY, 0, 0, 0)
            if not file:
                raise self._failure(name)
            try:
                if offset and self._lib.hdfsSeek(handle, file, offset) != 0:
                    error = self._failure(name)
                    if error.text.startswith("HdfsEndOfStream"):
                        return  # the file is shorter now
                    raise error
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
        """Read ``size`` bytes, or up to the end of the file; return how many."""
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

    def _entries(self, handle: Any, directory: str) -> Iterator[tuple[str, SourceFile | None]]:
        for item in self._infos(handle, self.key_of(directory)):
            path = f"{directory}/{item.name}" if directory else item.name
            yield path, None if item.is_directory else SourceFile(path, item.identity, item.block_size)

    def _infos(self, handle: Any, directory: str) -> Sequence[_PathInfo]:
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
        """Connect on first use; ``close`` does not free the connection inside the block."""
        if os.getpid() != self._pid:
            raise self._forked()
        with self._lock:
            if self._fs._handle is None:
                try:
                    self._fs.connect()
                except OSError as error:
                    raise _LibraryError(name, str(error)) from error
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

    def _failure(self, name: str) -> _LibraryError:
        """Why the last call failed; only valid right after it, on the same thread."""
        return _LibraryError(name, bytes(self._lib.hdfsGetLastError() or b"").decode("utf-8", "replace"))

    def explain(self, name: str, error: BaseException) -> SourceError:
        assert isinstance(error, _LibraryError)
        kind = str(error)
        missing = re.match(r"FileNotFoundException|File does not exist|Path is not a file", kind)
        if missing or kind.endswith("(is not a directory)"):
            return SourceNotFound(name, "no such file or directory", "check the URL")
        if re.search(r"Permission denied|AccessControl|Sasl|Kerberos|GSS|principal|InvalidToken", kind):
            return SourceDenied(
                name,
                "permission denied",
                "check HADOOP_USER_NAME, the Kerberos ticket (klist) and the directory's permissions",
            )
        if "Timeout" in kind:
            return SourceUnavailable(name, f"no answer for {self.timeout:.0f} s", "check the cluster's health")
        return SourceUnavailable(name, error.text, "check that the NameNode runs and that the port is its RPC port")


class _PathInfo(NamedTuple):
    """The library's record of a path; ``name`` is empty for the requested path itself."""

    name: str
    is_directory: bool
    identity: Identity
    block_size: int


def _path_info(info: Any, asked: str) -> _PathInfo:
    """Copy the library's record, which is freed right after.

    The library writes ``//name`` below the root, and ``name/`` for a file that is listed like a directory.
    """
    full = info.name.decode("utf-8", "surrogateescape")
    name = "" if full.rstrip("/") == asked.rstrip("/") else full.rstrip("/").rpartition("/")[2]
    identity = Identity(info.size, info.last_mod * 1_000_000_000)
    return _PathInfo(name, info.kind == _DIRECTORY, identity, info.block_size)


def _load(url: str) -> Any:
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
    """Restore names that Python 3.10 removed, and hide Hadoop's files: hdfs3 fails on valid ones."""
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
    """libhdfs3's message without C++ name spaces, causes and Java's stack."""
    line = text.strip().partition("\n")[0]
    return line.replace("Hdfs::", "").replace("\t", " ").strip() or "no reason given"
