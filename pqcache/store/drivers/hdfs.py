"""A source and a target on HDFS, through hdfs-native: no JVM, with HA nameservices and Kerberos.

``HADOOP_CONF_DIR`` and ``HADOOP_USER_NAME`` work as usual; a user in the URL overrides the latter. Any Hadoop key can
be given with ``-o``. The other HDFS drivers read their configuration through this module too, so hdfs-native is
imported only by a source or target.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from xml.etree import ElementInclude, ElementTree

from pqcache.errors import (
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import HIDDEN, STAGING, DirectoryLimit, StagedFile, StoreTarget, root_of
from pqcache.store.drivers.remote import RemoteSource
from pqcache.store.drivers.timeouts import Stalled, with_time_limit
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import userinfo

if TYPE_CHECKING:
    import hdfs_native

log = logging.getLogger("pqcache.store")

_VARIABLE = re.compile(r"\$\{([^${}\s]+)\}")


def site_configuration() -> dict[str, str]:
    """Properties in core-site.xml and hdfs-site.xml, with variables replaced; the last value counts.

    The files are in HADOOP_CONF_DIR, else in HADOOP_HOME/etc/hadoop; without either there are no properties.
    """
    return with_variables_replaced(site_files())


def site_files() -> dict[str, str]:
    """Properties in the site's files, with ``${variables}`` as written."""
    home = os.environ.get("HADOOP_HOME")
    directory = os.environ.get("HADOOP_CONF_DIR") or (os.path.join(home, "etc", "hadoop") if home else "")
    values: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml") if directory else ():
        values.update(read_xml(os.path.join(directory, name)))
    return values


def with_variables_replaced(values: dict[str, str]) -> dict[str, str]:
    """Replace ``${variables}`` by other properties, or by ``${env.NAME}``."""
    found = dict(values)

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        return os.environ.get(name[4:], "") if name.startswith("env.") else found.get(name, match[0])

    for name in found:
        for _ in range(20):  # as deep as Hadoop goes
            found[name] = _VARIABLE.sub(value_of, before := found[name])
            if found[name] == before:
                break
    return found


def read_xml(path: str, *, strict: bool = False, missing: str = "") -> dict[str, str]:
    """Properties in a Hadoop configuration file; none if there is no such file.

    ``strict`` refuses files that libhdfs3's own reader cannot parse. With ``missing``, a missing file raises UsageError
    with that advice. A file that is unreadable or not one of Hadoop's raises UsageError.
    """
    try:
        root = ElementTree.parse(path).getroot()
        if not strict:
            ElementInclude.include(root, base_url=path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if missing:
            raise UsageError(path, "no such file", missing) from error
        return {}
    except (OSError, SyntaxError, ValueError, LookupError) as error:
        raise UsageError(path, str(error), "make it readable, valid XML") from error
    if root.tag != "configuration" or (
        strict and any(item.tag != "property" or not item.findtext("name") for item in root)
    ):
        raise UsageError(path, "not a Hadoop configuration file: <configuration> with <property> in it")
    return {
        name: (item.findtext("value") or "").strip()
        for item in root.iter("property")
        if (name := (item.findtext("name") or "").strip())
    }


# hdfs-native reads this whenever it connects, also when it connects again. So all its clients that a process has open
# at one time have to be one user.
_USER_VARIABLE = "HADOOP_USER_NAME"


@dataclass(kw_only=True)
class _Clients:
    """The open clients of a process: their number and user, and the user in the environment before the first."""

    count: int = 0
    user: str = ""
    url: str = ""
    before: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_open = _Clients()


def open_clients() -> int:
    return _open.count


def environment_user() -> str:
    """The user in the environment as it is without open clients."""
    with _open.lock:
        return (_open.before if _open.count else os.environ.get(_USER_VARIABLE)) or ""


def act_as(user: str, url: str, client: object) -> weakref.finalize[[_Clients], object]:
    """Be ``user`` on HDFS until the returned function is called or ``client`` is freed.

    An empty ``user`` is the environment's, else the login. Raises UsageError about ``url`` if a client of another user
    is open.
    """
    with _open.lock:
        before = _open.before if _open.count else os.environ.get(_USER_VARIABLE)
        wanted = user or before or _login()
        if _open.count and wanted != _open.user:
            raise UsageError(
                url,
                f"cannot be opened as {wanted} while {_open.url} is open as {_open.user}: "
                "hdfs-native has one user in a process",
                "use one user for both, webhdfs:// for one of them, or separate runs",
            )
        if not _open.count:
            _open.user, _open.url, _open.before = wanted, url, before
            if user:
                os.environ[_USER_VARIABLE] = user
        _open.count += 1
    close = weakref.finalize(client, _close, _open)
    close.atexit = False
    return close


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container
        return str(os.geteuid())


def _close(clients: _Clients) -> None:
    with clients.lock:
        clients.count -= 1
        if clients.count:
            return
        if clients.before is None:
            os.environ.pop(_USER_VARIABLE, None)
        else:
            os.environ[_USER_VARIABLE] = clients.before


_CHUNK = 1 << 20  # bytes of a write
_LISTED_AT_ONCE = 512  # files that a listing passes between threads


class HdfsSource(RemoteSource):
    """A RemoteSource over hdfs-native.

    Use it only in the process that created it: hdfs-native hangs in a child forked after a client was created.
    """

    at_once = 16  # packets of 64 KiB
    network_advice = "check the host, the port and the cluster's health"

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        super().__init__(url, root_of(url), options, timeout)
        self._host = urlsplit(url).netloc.rpartition("@")[2]
        _check_name(self.url, self._root)
        # more attempts take minutes with a NameNode that does not answer
        attempts = "1" if ":" in self._host else "4"
        # the site's configuration is in it, as hdfs-native reads the files without replacing ${variables}
        self._config = {**site_configuration(), "dfs.client.failover.max.attempts": attempts, **options}
        self._orders = _namenode_orders(self._host, self._config)
        self._use_next_namenode()
        self._leave_user = act_as(userinfo(url)[0], self.url, self)

    def _list(self) -> Iterator[SourceFile]:
        info = self._first_info()
        if not info.isdir:
            yield SourceFile(self.take_only_file(), _identity(info), info.blocksize or 0)
            return
        start, limit = len(self._root.rstrip("/")) + 1, DirectoryLimit(self.url)
        found = partial(self.client.list_status, self._root, recursive=True)
        for status in with_time_limit(lambda: iter(found()), self.timeout, at_once=_LISTED_AT_ONCE):
            if status.isdir:
                limit.enter(status.path)
            else:
                yield SourceFile(status.path[start:], _identity(status), status.blocksize or 0)

    def _stat(self, path: str) -> Identity:
        return _identity(self.client.get_file_info(self.key_of(path)))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        received = False
        try:
            for chunk in super().read(path, offset, length, tag):
                received = True
                yield chunk
        except SourceUnavailable as error:
            if isinstance(error.__cause__, Stalled) and not received:
                self._use_next_namenode()  # which may be why: the next try asks another one
            raise

    def close(self) -> None:
        self._leave_user()

    def _use_next_namenode(self) -> None:
        """Build a client that asks the next NameNode first.

        hdfs-native fails over if a NameNode refuses, but waits forever if one accepts the connection and does not
        answer.
        """
        import hdfs_native

        config = {**self._config, **self._orders[0]}
        self._orders.rotate(-1)
        try:
            self.client = hdfs_native.Client(f"hdfs://{self._host}" if self._host else None, config)
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                self.url, first_line(error), "write hdfs://HOST:PORT/PATH or set HADOOP_CONF_DIR"
            ) from error

    def _first_info(self) -> hdfs_native.FileStatus:
        """Status of the root; each NameNode has a few seconds to answer."""
        for others in reversed(range(len(self._orders))):
            try:
                return self.within(lambda: self.client.get_file_info(self._root), self.first_timeout)
            except Stalled:
                self._use_next_namenode()
                if not others:
                    raise
                log.debug("hdfs: no answer from a NameNode of %s; asking the next one", self._host)
        raise AssertionError

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        reader = self.client.read(self.key_of(path))
        length = min(length, max(0, len(reader) - offset))  # hdfs-native panics beyond the end
        if length:
            yield from reader.read_range_stream(offset, length)

    def key_of(self, path: str) -> str:
        name = super().key_of(path)
        _check_name(self._show(name), name)
        return name

    def _show(self, name: str) -> str:
        return f"hdfs://{self._host}{name}"

    def explain(self, name: str, error: BaseException) -> PqcacheError:
        text = re.split(r"(\\n|\n)(\\t|\t)at ", str(error))[0]  # without Java's stack, which names many classes
        if isinstance(error, FileNotFoundError) or "FileNotFoundException" in text:
            return SourceNotFound(name, "no such file or directory", "check the URL")
        if isinstance(error, PermissionError) or "AccessControl" in text or "ermission denied" in text:
            if inode := re.search(r'inode=\\?"([^"\\]+)', text):  # the directory that is denied, not the dataset
                name = self._show(inode[1])
            return SourceDenied(
                name,
                "permission denied",
                "check HADOOP_USER_NAME, the Kerberos ticket (klist) and the directory's permissions",
            )
        if re.search(r"SASL|GSSAPI|Kerberos", text):
            return SourceDenied(name, first_line(text), "check the Kerberos ticket (klist) and the keytab")
        if "min-block-size" in text or "not a multiple of" in text:
            return UsageError(name, _reason(text), "give another --block-size")
        if "QuotaExceeded" in text or "NSQuota" in text or "DSQuota" in text:
            return SourceError(name, _reason(text), "free some space or have the quota raised, then run again")
        if "SafeMode" in text:
            return SourceUnavailable(name, "the NameNode is in safe mode and takes no writes", "try again later")
        if isinstance(error, FileExistsError) or "ParentNotDirectory" in text or "not empty" in text:
            return SourceError(name, _reason(text), "check the path")
        if not isinstance(error, Exception):
            return SourceError(name, f"the HDFS client failed ({first_line(error)})")
        return SourceUnavailable(
            name, first_line(error), "check that the NameNode runs and that the port is its RPC port"
        )


class HdfsTarget(StoreTarget):
    """A Target over hdfs-native.

    Files of an attempt are staged in their own directory in ``_pqcache/tmp``; one rename makes it the partition.
    """

    _source: HdfsSource

    def __init__(self, url: str, options: Mapping[str, str], block_size: int | None, timeout: float = TIMEOUT) -> None:
        super().__init__(HdfsSource(url, options, timeout))
        self._block_size = block_size

    def list(self) -> Iterator[SourceFile]:
        with suppress(SourceNotFound):
            yield from super().list()

    def begin(self) -> None:
        self._call("", lambda name: self._source.client.mkdirs(name, create_parent=True))
        self._delete(STAGING)

    def write(self, path: str, data: bytes) -> None:
        staged = f"{STAGING}/{os.urandom(8).hex()}"
        self._write(staged, [data])
        self._make_directory(path.rpartition("/")[0])
        self._rename(staged, path)

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._delete(path)

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        name = f"{STAGING}/{token}/{path.rpartition('/')[2]}"
        with file.open("rb") as data:
            size = self._write(name, iter(lambda: data.read(_CHUNK), b""))
        return StagedFile(path, file, size, name)

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        try:
            if exclusive:
                self._make_directory(directory.rpartition("/")[0])
                self._rename(f"{STAGING}/{token}", directory)  # takes the place of an empty directory
            else:
                self._make_directory(directory)
                for item in staged:
                    self._rename(item.handle, item.path)
                self._delete(f"{STAGING}/{token}")
        except SourceError:
            if not self._is_published(staged):  # by another process, or by this call, whose answer was lost
                raise
            self.discard(token, staged)

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        with suppress(SourceError):
            self._delete(f"{STAGING}/{token}")

    def finish(self) -> None:
        self._delete(HIDDEN)

    def abandon(self) -> None:
        self._delete(HIDDEN)

    def _write(self, path: str, data: Iterable[bytes]) -> int:
        """Write a new file; return its size, confirmed by the NameNode."""
        with self._source.errors(path):
            size = sum(with_time_limit(lambda: self._write_chunks(path, data), self._source.timeout))
        if (stored := self._source.stat(path).size) != size:
            raise SourceUnavailable(self._source.name_of(path), f"has {stored:,} bytes of {size:,} that were written")
        return size

    def _write_chunks(self, path: str, data: Iterable[bytes]) -> Iterator[int]:
        from hdfs_native import WriteOptions

        options = WriteOptions(block_size=self._block_size, overwrite=True, create_parent=True)
        with self._source.client.create(self._source.key_of(path), options) as file:
            for chunk in data:
                file.write(chunk)
                yield len(chunk)

    def _make_directory(self, path: str) -> None:
        self._call(path, lambda name: self._source.client.mkdirs(name, create_parent=True))

    def _rename(self, path: str, to: str) -> None:
        target = self._source.key_of(to)
        self._call(path, lambda name: self._source.client.rename(name, target, overwrite=True))

    def _delete(self, path: str) -> None:
        self._call(path, lambda name: self._source.client.delete(name, recursive=True))

    def _is_published(self, staged: Sequence[StagedFile]) -> bool:
        try:
            return all(self._source.stat(item.path).size == item.size for item in staged)
        except SourceError:
            return False

    def _call(self, path: str, call: Callable[[str], object]) -> None:
        with self._source.errors(path):
            self._source.within(partial(call, self._source.key_of(path)))


def _namenode_orders(host: str, configuration: Mapping[str, str]) -> deque[dict[str, str]]:
    """For each NameNode of an HA nameservice, the option to put it first; one empty dict without HA."""
    service = host or urlsplit(configuration.get("fs.defaultFS", "")).netloc
    key = f"dfs.ha.namenodes.{service}"
    names = [name.strip() for name in configuration.get(key, "").split(",") if name.strip()]
    return deque([{key: ",".join(names[first:] + names[:first])} for first in range(len(names))] or [{}])


def _identity(status: hdfs_native.FileStatus) -> Identity:
    return Identity(status.length, status.modification_time * 1_000_000)


def _check_name(show: str, name: str) -> None:
    if "?" in name or "#" in name:
        raise UsageError(
            show, "hdfs-native cuts paths at '?' and '#'", "read it through webhdfs://, write to another name"
        )


def _reason(text: str) -> str:
    """Drop the name of Java's exception."""
    match = re.match(r'RPCError\("[\w.$]+", "(.*)', text)
    return (match[1] if match else text).strip()
