"""A dataset on HDFS, through hdfs-native: no JVM, with HA nameservices and Kerberos.

``HADOOP_CONF_DIR`` and ``HADOOP_USER_NAME`` work as everywhere; any Hadoop key can be given with ``-o``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from urllib.parse import urlsplit

from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.stall import Stalled, watched
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.source import FIRST, TIMEOUT, redact, userinfo

try:
    import hdfs_native
except ImportError as error:
    raise UsageError("hdfs:// needs hdfs-native; install it with: pip install 'pqcache[hdfs]'") from error

_CHUNK = 1 << 20  # packets of 64 KiB are joined: fewer writes
_BATCH = 512  # files handed on at once while listing


class HdfsSource:
    """A Source over hdfs-native; see ``pqcache.store.source.Source``.

    Built in the process that uses it: hdfs-native hangs in a child forked after a client was built.
    """

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        user, _ = userinfo(url)
        if user:
            os.environ.setdefault("HADOOP_USER_NAME", user)  # hdfs-native takes the user from nowhere else
        self.url = redact(url).rstrip("/")
        self._host = parts.netloc.rpartition("@")[2]
        self._root = "/" + url.partition("://")[2].partition("/")[2].strip("/")
        self._only = ""
        _check_name(self.url, self._root)
        # a NameNode that does not answer fails in seconds instead of three minutes
        self._timeout = timeout
        attempts = "1" if ":" in self._host else "4"
        config = {"dfs.client.failover.max.attempts": attempts, **options}
        try:
            self._client = hdfs_native.Client(f"hdfs://{self._host}" if self._host else None, config)
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                f"{self.url}: {_first_line(error)}; write hdfs://HOST:PORT/PATH or set HADOOP_CONF_DIR"
            ) from error

    def list(self) -> Iterator[SourceFile]:
        with self._errors(self._root):
            if self._only:
                yield SourceFile(self._only, self.stat(self._only))
                return
            info = self._info(self._root, min(FIRST, self._timeout))
            if not info.isdir:
                self._root, _, self._only = self._root.rpartition("/")
                yield SourceFile(self._only, _identity(info), info.blocksize or 0)
                return
            start = len(self._root.rstrip("/")) + 1
            for batch in watched(lambda: self._list(self._root), self._timeout):
                for status in batch:
                    if not status.isdir:
                        yield SourceFile(status.path[start:], _identity(status), status.blocksize or 0)

    def stat(self, path: str) -> Identity:
        name = self._name(path)
        with self._errors(name):
            return _identity(self._info(name))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        name = self._name(path)
        with self._errors(name):
            yield from watched(lambda: self._read(name, offset, length), self._timeout)

    def close(self) -> None:
        pass

    def _info(self, name: str, seconds: float | None = None) -> hdfs_native.FileStatus:
        return next(watched(lambda: iter([self._client.get_file_info(name)]), seconds or self._timeout))

    def _list(self, name: str) -> Iterator[Sequence[hdfs_native.FileStatus]]:
        found = iter(self._client.list_status(name, recursive=True))
        while batch := tuple(islice(found, _BATCH)):
            yield batch

    def _read(self, name: str, offset: int, length: int) -> Iterator[bytes]:
        reader = self._client.read(name)
        length = min(length, max(0, len(reader) - offset))  # hdfs-native panics beyond the end
        packets: list[bytes] = []
        size = 0
        for packet in reader.read_range_stream(offset, length) if length else ():
            packets.append(packet)
            size += len(packet)
            if size >= _CHUNK:
                yield b"".join(packets)
                packets, size = [], 0
        yield b"".join(packets)

    def _name(self, path: str) -> str:
        name = f"{self._root.rstrip('/')}/{path}"
        _check_name(self._show(name), name)
        return name

    def _show(self, name: str) -> str:
        return f"hdfs://{self._host}{name}"

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn what hdfs-native raises into pqcache's errors; it panics with a BaseException of its own."""
        try:
            yield
        except SourceError:
            raise
        except Exception as error:
            raise self._error(name, error) from error
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                raise self._error(name, error) from error
            raise

    def _error(self, name: str, error: BaseException) -> SourceError:
        text, show = str(error), self._show(name)
        if isinstance(error, Stalled):
            return SourceUnavailable(f"{show}: no answer in time; check the host, the port and the cluster's health")
        if isinstance(error, FileNotFoundError) or "FileNotFoundException" in text:
            return SourceNotFound(f"{show}: no such file or directory; check the URL")
        if isinstance(error, PermissionError) or "AccessControl" in text or "ermission denied" in text:
            if inode := re.search(r'inode=\\?"([^"\\]+)', text):  # the very directory, not the dataset
                show = self._show(inode[1])
            return SourceDenied(
                f"{show}: permission denied; check HADOOP_USER_NAME, the Kerberos ticket (klist) "
                "and the directory's permissions"
            )
        if not isinstance(error, Exception):
            return SourceError(f"{show}: the HDFS client failed ({_first_line(error)})")
        return SourceUnavailable(
            f"{show}: {_first_line(error)}; check that the NameNode runs and that the port is its RPC port"
        )


def _identity(status: hdfs_native.FileStatus) -> Identity:
    return Identity(status.length, status.modification_time * 1_000_000)


def _check_name(show: str, name: str) -> None:
    if "?" in name or "#" in name:
        raise UsageError(f"{show}: hdfs-native cuts paths at '?' and '#'; use webhdfs:// for this source")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
