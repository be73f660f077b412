"""Tables as sources: the files of one committed version, wherever they are stored, by their cache paths.

A Delta table and an Iceberg table in its directory are a `LogTable`; other Iceberg tables and those of a Hive metastore
have a `Table` of their own. The rest of pqcache does not distinguish kinds of tables.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import blake2b
from threading import Lock
from typing import TypeVar
from urllib.parse import quote, urlsplit

from pqcache.errors import CHECK_TABLE, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.events import OnEvent, ignore
from pqcache.options import HDFS_NATIVE, TIMEOUT
from pqcache.store.drivers.base import (
    PARQUET_SUFFIXES,
    Capabilities,
    FileShape,
    Source,
    read_range,
)
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.timeouts import FEW_TRIES, Patience, with_retries
from pqcache.store.manifest import Identity, SourceFile, TableVersion, digest_of_sources
from pqcache.store.partition_paths import NULL, is_hidden, parent
from pqcache.store.urls import local_path, url_scheme, with_usual_scheme
from pqcache.units import printable

T = TypeVar("T")

_UNSAFE = "".join(map(chr, range(0x20))) + "\"#%'*/:=?\\\x7f{[]^"  # what Hive encodes in a partition's path
_TRIES = 3  # of a log that changes while it is read
METASTORE_OPTIONS = frozenset({"auth", "principal", "transport", "user", "password"})  # store options of hive://
MOVED = "moved"  # a store option that is the table's: whether it lies elsewhere than its metadata say


@dataclass(frozen=True, kw_only=True)
class VersionRule:
    """The wanted version of a table: the newest, or one by number, snapshot ID or time (ISO 8601)."""

    version: str | None = None
    as_of: str | None = None

    @property
    def is_newest(self) -> bool:
        return self.version is None and self.as_of is None

    @property
    def time_ns(self) -> int | None:
        """The wanted time in nanoseconds since 1970, in UTC if it has no offset; raises UsageError."""
        if self.as_of is None:
            return None
        try:
            time = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", self.as_of.strip()))
        except ValueError as error:
            advice = "write it as 2026-11-20T03:55:10+00:00, or 2026-11-20"
            raise UsageError(f"--as-of {self.as_of}", "is not an ISO 8601 time", advice) from error
        time = time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)
        return round(time.timestamp() * 1e6) * 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A data file of a table.

    Attributes:
        path: its path in a cache: partition directories and a name.
        url: its URL, or absolute local path.
        identity: from the log of its table, with the tag of `committed_tag`, or as listed by its store.
        shape: how the table reads its columns and rows; None if the file is taken unchanged.
    """

    path: str
    url: str
    identity: Identity
    shape: FileShape | None = None


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The changes of a commit to data files, each by URL and with a key of its partition.

    ``rewritten`` files have only rows of the ``removed`` ones, as compaction writes them; ``added`` ones have new rows.
    """

    added: Collection[str]
    rewritten: Mapping[str, str]
    removed: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TableListing:
    """The files of a table by path, and its version.

    A table without versions lists every file in its directories, and its version has only the types of the partition
    columns, or is None without such columns. ``commits_since`` reads the commits after an older version, oldest first,
    or returns None if the log lacks some.
    """

    files: Mapping[str, TableFile]
    version: TableVersion | None = None
    commits_since: Callable[[str], Iterable[Commit] | None] | None = None


def partition_path(values: Mapping[str, str | None]) -> str:
    """The Hive directory of partition values, outermost first, encoded as Hive does; empty without any.

    >>> partition_path({"dt": "2026/11", "region": None})
    'dt=2026%2F11/region=__HIVE_DEFAULT_PARTITION__'
    """
    return "/".join(f"{_encoded(name)}={_encoded(value) if value else NULL}" for name, value in values.items())


def cache_paths(files: Iterable[tuple[str, str]]) -> list[str]:
    """Choose a path in the cache for each file, given as its partition directory and its URL.

    A name that readers would skip, or not recognize as Parquet, gets a prefix or a suffix. Files with the same name and
    directory get a part of their URL's digest.
    """
    files = list(files)
    paths = [f"{directory}/{_name(url)}" if directory else _name(url) for directory, url in files]
    taken: dict[str, int] = {}
    for path in paths:
        taken[path.lower()] = taken.get(path.lower(), 0) + 1
    return [
        path if taken[path.lower()] == 1 else _distinct(path, url) for path, (_, url) in zip(paths, files, strict=True)
    ]


def iso_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")


def digest(*parts: object) -> str:
    return blake2b("\0".join(map(str, parts)).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _sources_of(commits: Iterable[Commit]) -> dict[str, Collection[str]]:
    """For each file written by one of the commits, the earlier files with its rows; none if unknown."""
    found: dict[str, Collection[str]] = {}
    for commit in commits:
        merged: dict[str, list[Collection[str]]] = {}
        for url, partition in commit.removed.items():
            merged.setdefault(partition, []).append(found.get(url, [url]))
        for url, partition in commit.rewritten.items():
            parts = merged.get(partition, [])
            found[url] = {name for part in parts for name in part} if all(parts) else ()
        found.update(dict.fromkeys(commit.added, ()))
    return found


def _name(url: str) -> str:
    name = url.rpartition("/")[2]
    name = name if name.lower().endswith(PARQUET_SUFFIXES) else f"{name}.parquet"
    return f"part-{name.lstrip('._')}" if is_hidden(name) else name


def _distinct(path: str, url: str) -> str:
    directory, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return f"{directory}{slash}{stem}-{digest(url)[:12]}{dot}{suffix}"


def _encoded(text: str) -> str:
    if text == NULL:  # as text
        return f"%5F{text[1:]}"
    return "".join(quote(character, safe="") if character in _UNSAFE else character for character in text)


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a source is opened.

    Attributes:
        store: the options of its store (``-o key=value``).
        timeout: seconds after which a silent server counts as unavailable.
        hdfs_driver: the driver of ``hdfs://``.
        as_files: take a table's directory as files.
        rule: the wanted version of a table.
        patience: when to stop retrying.
        on_event: called with events.
        keys: known spellings of partition keys; those that differ only in case are the same. If None, case matters.
    """

    store: Mapping[str, str] = field(default_factory=dict)
    timeout: float = TIMEOUT
    hdfs_driver: str = HDFS_NATIVE
    as_files: bool = False
    rule: VersionRule = field(default_factory=VersionRule)
    patience: Patience = FEW_TRIES
    on_event: OnEvent = ignore
    keys: Collection[str] | None = None

    def open_files(self, url: str, of: str) -> Source:
        """Open the files at ``url``, with the store options of ``of`` if both have the same scheme."""
        same = url_scheme(url) == url_scheme(of)
        store = {name: value for name, value in self.store.items() if same and name != MOVED}
        return open_source(url, store, self.timeout, self.hdfs_driver)

    def tried(self, call: Callable[[], T], subject: str) -> T:
        return with_retries(call, subject, self.patience, self.on_event)

    def listed(self, source: Source) -> list[SourceFile]:
        return self.tried(lambda: list(source.list()), source.url)


def store_options(options: Mapping[str, str], scheme: str) -> Mapping[str, str]:
    """The options of a metastore's URL for the store of a location; names with a dot are Hadoop's."""
    if scheme in ("", "file"):
        return {}
    return {
        name: value
        for name, value in options.items()
        if name not in METASTORE_OPTIONS and ("." in name) == (scheme == "hdfs")
    }


@dataclass(frozen=True, kw_only=True)
class TableLog:
    """The opened directory with the log or the metadata of the table at ``url``."""

    url: str
    source: Source
    files: StoreFiles
    options: OpenOptions

    def listed(self) -> list[SourceFile]:
        return self.options.listed(self.source)

    def read(self, file: SourceFile) -> bytes:
        return self.options.tried(lambda: read_range(self.source, file.path, 0, file.identity.size), file.path)


def log_state(entries: Iterable[SourceFile]) -> str | None:
    """A text that is equal for equal logs; ``entries`` are all files of one.

    None if the store only has sizes, as another log may have files of the same names and sizes.
    """
    entries = list(entries)
    known = all(file.identity.tag or file.identity.mtime_ns for file in entries)
    return digest_of_sources(entries) if known else None


class StoreFiles:
    """Opens the stores of files on first use.

    Args:
        base: an opened source for files below ``base.url``, or None.
        open_source: opens the source at a URL.
        options: how often to retry.
    """

    def __init__(self, base: Source | None, open_source: Callable[[str], Source], options: OpenOptions) -> None:
        self._base, self._open, self._options = base, open_source, options
        self._prefix = "" if base is None else f"{base.url}/"
        self._opened: dict[str, Source] = {}
        self._lock = Lock()

    def locate(self, url: str) -> tuple[Source, str]:
        """The source of a file, opened if necessary, and the file's path there."""
        try:
            url.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            is_name = False
        else:
            is_name = "\0" not in url
        if not is_name:
            reason = "the table has a file with this name, which is invalid"
            raise SourceError(printable(url), reason, CHECK_TABLE)
        found = self._in_base(url) or self._in_base(url := usual_url(url))
        if found is not None:
            return found
        root, path = _root_and_path(url)
        return self._root(root), path

    def _in_base(self, url: str) -> tuple[Source, str] | None:
        if self._base is None or not url.startswith(self._prefix):
            return None
        return self._base, url[len(self._prefix) :]

    def size_of(self, url: str) -> int:
        source, place = self.locate(url)
        return self._options.tried(lambda: source.stat(place).size, url)

    def read(self, url: str, offset: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``offset`` on."""
        source, place = self.locate(url)

        def received() -> bytes:
            data = read_range(source, place, offset, length)
            if len(data) == length:
                return data
            name, size = source.url_of(place), source.stat(place).size
            if size < offset + length:
                reason = f"has {size:,} bytes, and its table needs at least {offset + length:,}"
                raise SourceError(name, reason, CHECK_TABLE)
            raise SourceUnavailable(name, f"the connection ended after {len(data):,} of {length:,} bytes")

        return self._options.tried(received, url) if length else b""

    def source_at(self, url: str) -> Source:
        """Open the directory ``url`` as a separate source, which the caller closes."""
        url = usual_url(url)
        if url_scheme(url) == "s3":  # its clients take long to make
            root, path = _root_and_path(url)
            found = self._root(root).below(path.strip("/")) if path.strip("/") else None
            if found is not None:
                return found
        return self._open(url)

    def _root(self, url: str) -> Source:
        with self._lock:
            if url not in self._opened:
                self._opened[url] = self._open(url)
            return self._opened[url]

    def rebase(self, url: str) -> None:
        """Read files below the directory ``url`` from one source, so that the modes of all directories apply."""
        if self._base is None or self._base.url != url:
            self._base = self._open(url)
            self._prefix = f"{self._base.url}/"

    def close(self) -> None:
        """Close all opened sources, and the base."""
        for source in (*self._opened.values(), *([] if self._base is None else [self._base])):
            source.close()


class Table(Source):
    """A source with the files that a table names, wherever they are stored.

    A version of a table never changes, so it is read once, and later listings are the same until `take_newer`. A table
    without versions is read for each listing. For files on this machine, modes apply.

    Args:
        url: the table's URL without secrets.
        files: reads its files.
        options: how it is opened.
        state: its `Source.state`, if known before the log is read.
    """

    capabilities = Capabilities(reads_versions=True, lists_only_data_files=True, lists_one_version=True)

    def __init__(self, url: str, files: StoreFiles, options: OpenOptions, state: str | None = None) -> None:
        self.url = url
        self._files, self._options, self._state = files, options, state
        self._listing: TableListing | None = None
        self._lock = Lock()

    @abstractmethod
    def read_table(self) -> TableListing:
        """List the files of the wanted version.

        Raises SourceError if the table cannot be read, SourceNotFound if there is none or no such version, and
        UsageError if it uses a feature with which its rows would be wrong.
        """

    def take_newer(self) -> None:
        """Have the next listing look for a newer version, unless a fixed version was requested."""
        if self._options.rule.is_newest:
            with self._lock:
                self._listing = self._state = None

    @property
    def table_version(self) -> TableVersion | None:
        return self._known().version

    @property
    def state(self) -> str | None:
        return self._state

    def list(self) -> Iterator[SourceFile]:
        for file in self._known(again=not self.capabilities.lists_one_version).files.values():
            yield SourceFile(file.path, file.identity)

    def made_from(self, before: TableVersion | None) -> Mapping[str, Sequence[str]] | None:
        """For each file, the files of the version ``before`` that had its rows, by cache path.

        Files with new rows are left out. None if the log does not reach back.
        """
        listing = self._known()
        now = listing.version
        if before is None or now is None or now.format != before.format or listing.commits_since is None:
            return {}
        try:
            commits = listing.commits_since(before.version)
            sources = None if commits is None else _sources_of(commits)
        except SourceError as error:
            import logging  # a sync with nothing to do does not need it

            logging.getLogger("pqcache.sync").debug("commits since version %s: %s", before.version, error)
            sources = None
        if sources is None:
            return None
        return {
            path: [f"{parent(path)}/{_name(url)}".lstrip("/") for url in sources.get(file.url, [file.url])]
            for path, file in listing.files.items()
            if sources.get(file.url, [file.url])
        }

    def stat(self, path: str) -> Identity:
        file = self._file(path)
        source, place = self._files.locate(file.url)
        now = source.stat(place)
        if not self.capabilities.reads_versions:
            return now
        if now.size != file.identity.size:
            reason = f"has {now.size:,} bytes, and {file.identity.size:,} in the log of its table"
            raise SourceError(source.url_of(place), reason, CHECK_TABLE)
        return file.identity

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        source, place, tag = self._located(path, tag)
        yield from source.read(place, offset, length, tag)

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        source, place, tag = self._located(path, tag)
        yield from source.read_into(buffer, place, offset, length, tag)

    def shape_of(self, path: str) -> FileShape | None:
        return self._file(path).shape

    def url_of(self, path: str) -> str:
        return self._file(path).url

    def close(self) -> None:
        self._files.close()

    def _known(self, again: bool = False) -> TableListing:
        with self._lock:
            if self._listing is None or again:
                self._listing = self.read_table()
            return self._listing

    def _file(self, path: str) -> TableFile:
        try:
            return self._known().files[path]
        except KeyError:
            raise SourceNotFound(f"{self.url}/{path}", "is not a file of the table", "sync again") from None

    def _located(self, path: str, tag: str) -> tuple[Source, str, str]:
        source, place = self._files.locate(self._file(path).url)
        return source, place, "" if self.capabilities.reads_versions else tag

    def copy_mode(self, path: str, group: int) -> int:
        source, place = self._files.locate(self._file(path).url)
        return source.copy_mode(place, group)

    def private_modes(self, paths: Sequence[str], group: int) -> Mapping[str, int]:
        files = self._known().files
        by_source: dict[int, tuple[Source, dict[str, str]]] = {}
        for path in paths:
            if path not in files:  # a newer version has been read since
                continue
            source, place = self._files.locate(files[path].url)
            if source.is_local:
                by_source.setdefault(id(source), (source, {}))[1][place] = path
        modes: dict[str, int] = {}
        for local, found in by_source.values():
            places = list(found)
            local.note_modes(places)
            known = local.private_modes(places, group)
            modes |= {found[place]: known.get(place, 0o444) for place in places} if known else {}
        return {path: modes.get(path, 0o444) for path in paths} if modes else {}

    def local_places(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for file in self._known().files.values():
            source, place = self._files.locate(file.url)
            if source.is_local:
                found.setdefault(source.url, []).append(place)
        return found


ReadLog = Callable[[TableLog, Sequence[SourceFile]], TableListing]


class LogTable(Table):
    """A table with its log in its directory; the log is read again if a writer removed or completed files meanwhile.

    Args:
        log: the directory of the log.
        entries: its files, as listed when it was found.
        read_log: reads the wanted version. It imports the library: a sync with nothing to do never calls it.
    """

    def __init__(self, log: TableLog, entries: Iterable[SourceFile], read_log: ReadLog) -> None:
        self._log, self._read_log = log, read_log
        self._unread: Sequence[SourceFile] | None = list(entries)
        super().__init__(log.url, log.files, log.options, log_state(self._unread))

    def read_table(self) -> TableListing:
        entries, self._unread = self._unread or self._log.listed(), None
        for tries_left in reversed(range(_TRIES)):
            try:
                listing = self._read_log(self._log, entries)
            except SourceUnavailable:
                raise
            except SourceError:
                before, entries = entries, self._log.listed()
                if not tries_left or set(before) == set(entries):
                    raise
            else:
                self._state = log_state(entries)
                return listing
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        self._log.source.close()
        super().close()


def usual_url(url: str) -> str:
    """Normalize a URL from a log or from metadata to the spelling of sources."""
    scheme = url_scheme(url)
    if not scheme and url.startswith("hdfs:/"):  # as Hadoop writes one without a host
        return f"hdfs://{url.removeprefix('hdfs:')}"
    if scheme == "file" or url.startswith("file:/"):
        return os.path.abspath(local_path(url if scheme else "file://" + url.removeprefix("file:")))
    return with_usual_scheme(url)


def _root_and_path(url: str) -> tuple[str, str]:
    """Split a file's URL into the directory or host to open, and the path there."""
    if not url_scheme(url):
        directory, name = os.path.split(url)
        return directory, name
    authority = urlsplit(url.partition("?")[0]).netloc
    root = f"{url.partition('://')[0]}://{authority}"
    return root, url[len(root) :].lstrip("/")
