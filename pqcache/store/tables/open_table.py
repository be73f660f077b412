"""Opens a URL as a table if it has a table's log, else as the files of a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

from pqcache.errors import SourceError, SourceNotFound, UsageError
from pqcache.store.drivers.base import PARQUET_SUFFIXES, Source
from pqcache.store.drivers.registry import installed
from pqcache.store.manifest import Identity, SourceFile, TableVersion
from pqcache.store.tables.base import (
    MOVED,
    LogTable,
    OpenOptions,
    ReadLog,
    StoreFiles,
    Table,
    TableListing,
    TableLog,
)
from pqcache.store.tables.data_files import LOGS, METADATA_SUFFIXES, is_log, refuse_part
from pqcache.store.urls import check_url, is_local, redact, url_scheme, with_usual_scheme

_ICEBERG_LOG = "metadata"

OpenUrl = Callable[[str, OpenOptions], Source]


def open_table(url: str, options: OpenOptions) -> Source:
    """Open ``url``: a table of a catalog, a directory with the log of a table, or else files.

    With ``options.as_files`` a directory is never a table.

    Raises:
        UsageError: an unknown scheme or option, a missing extra, or a version of something without versions.
        SourceError: the store cannot be reached.
    """
    url = with_usual_scheme(url)
    open_catalog = _CATALOGS.get(url_scheme(url))
    if open_catalog is not None:
        check_url(url)
        return _with_version(open_catalog(url, options), url, options)
    if url.lower().endswith(METADATA_SUFFIXES) and not options.as_files:
        return _iceberg_file(url, options)
    source = options.open_files(url, url)
    if not (options.as_files or source.capabilities.lists_only_data_files or url.lower().endswith(PARQUET_SUFFIXES)):
        try:
            table = _table_at(url, source, options)
        except BaseException:
            source.close()
            raise
        if table is not None:
            return table
    source = _with_version(source, url, options)
    return source if options.keys is None else OneSpelling(source, options.keys)


def _with_version(source: Source, url: str, options: OpenOptions) -> Source:
    """Raise UsageError if the options name a version or a location, and ``source`` has none."""
    if isinstance(source, Table) and source.capabilities.lists_one_version:
        return source
    if MOVED in options.store:
        source.close()
        raise UsageError(redact(url), f"is not an Iceberg table, for -o {MOVED}", f"leave -o {MOVED} out")
    if not options.rule.is_newest:
        source.close()
        given = "--version" if options.rule.version is not None else "--as-of"
        raise UsageError(redact(url), f"has no versions, for {given}", f"leave {given} out")
    return source


def _table_at(url: str, source: Source, options: OpenOptions) -> Table | None:
    """Open the table in the directory of ``source``; None if it has no log."""
    for directory, read_log in _LOGS.items():
        log = options.open_files(f"{url.rstrip('/')}/{directory}", url)
        try:
            entries = _listed(log, options)
        except SourceError as error:
            log.close()
            subject = error.subject.removesuffix(f"/{directory}")  # nobody has asked for the log
            raise type(error)(subject, error.reason, error.advice) from error
        if not any(is_log(directory, file.path) for file in entries):
            log.close()
            continue
        if MOVED in options.store and directory != _ICEBERG_LOG:
            log.close()
            break
        files = StoreFiles(source, partial(options.open_files, of=url), options)
        return LogTable(TableLog(url=source.url, source=log, files=files, options=options), entries, read_log)
    _check_not_part(url, options)
    return None


def _read_delta(log: TableLog, entries: Sequence[SourceFile]) -> TableListing:
    with installed(log.url, "deltalake", "delta", "a Delta table"):
        from pqcache.store.tables.delta import read_delta
    return read_delta(log, entries)


def _open_hive(url: str, options: OpenOptions) -> Source:
    with installed(url, "thrift", "hive"):
        from pqcache.store.tables.hive_metastore import HiveTable
    return HiveTable(url, options)


_has_pyiceberg = partial(installed, libraries="pyiceberg", extra="iceberg", table="an Iceberg table")


def _read_iceberg(log: TableLog, entries: Sequence[SourceFile]) -> TableListing:
    with _has_pyiceberg(log.url):
        from pqcache.store.tables.iceberg_open import read_directory
    return read_directory(log, entries)


def _iceberg_file(url: str, options: OpenOptions) -> Source:
    with _has_pyiceberg(url):
        from pqcache.store.tables.iceberg_open import MetadataFile
    return MetadataFile(url, options)


def _iceberg_catalog(url: str, options: OpenOptions) -> Source:
    with _has_pyiceberg(url):
        from pqcache.store.tables.iceberg_open import CatalogTable
    return CatalogTable(url, options)


_LOGS: Mapping[str, ReadLog] = {"_delta_log": _read_delta, _ICEBERG_LOG: _read_iceberg}  # by the log's directory
_CATALOGS: Mapping[str, OpenUrl] = {"hive": _open_hive, "iceberg": _iceberg_catalog}  # by the scheme of the URL


def _check_not_part(url: str, options: OpenOptions) -> None:
    """Raise UsageError if ``url`` is a partition of a table; `check_above` does so for a local one."""
    if is_local(url):
        return
    above = url.rstrip("/")
    while "=" in above.rpartition("/")[2]:
        above = above.rpartition("/")[0]
    for directory in _LOGS:
        root = above.removesuffix("/data") if directory == _ICEBERG_LOG else above  # where Iceberg's files are
        if root == url.rstrip("/"):
            continue
        with closing(options.open_files(f"{root}/{directory}", url)) as log:
            entries = _listed(log, options)
        shown = next((file.path for file in entries if is_log(directory, file.path)), None)
        if shown is not None:
            refuse_part(url, LOGS[directory], f"{root}/{directory}/{shown}")


def _listed(log: Source, options: OpenOptions) -> list[SourceFile]:
    """The files in a directory; empty if it does not exist."""
    try:
        return options.listed(log)
    except SourceNotFound:
        return []


class OneSpelling(Source):
    """A source whose partition keys have one spelling: ``DT=1/`` is listed, and read, as ``dt=1/`` beside ``dt=2/``.

    Keys keep their ``known`` spelling, or else that of the first path. The wrapped source is a directory, as a table's
    log spells keys itself.
    """

    def __init__(self, source: Source, known: Iterable[str]) -> None:
        self.url = source.url
        self.capabilities, self.is_local = source.capabilities, source.is_local
        self._source = source
        self._keys = {key.lower(): key for key in known}
        self._place: dict[str, str] = {}  # of paths that are other ones at the source
        self._path: dict[str, str] = {}
        self._is_listed = False

    def list(self) -> Iterator[SourceFile]:
        places: dict[str, str] = {}
        self._source.odd = self.odd
        for file in sorted(self._source.list(), key=lambda file: file.path):
            path = self._spelled(file.path)
            if (other := places.setdefault(path, file.path)) != file.path:
                reason = f"differs only in case from {other}"
                raise SourceError(f"{self.url}/{file.path}", reason, "rename one of them")
            if path != file.path:
                self._place[path], self._path[file.path] = file.path, path
            yield replace(file, path=path)
        self._is_listed = True

    def stat(self, path: str) -> Identity:
        return self._source.stat(self._place_of(path))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        yield from self._source.read(self._place_of(path), offset, length, tag)

    def close(self) -> None:
        self._source.close()

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        yield from self._source.read_into(buffer, self._place_of(path), offset, length, tag)

    def url_of(self, path: str) -> str:
        return self._source.url_of(self._place_of(path))

    def copy_mode(self, path: str, group: int) -> int:
        return self._source.copy_mode(self._place_of(path), group)

    def private_modes(self, paths: Sequence[str], group: int) -> Mapping[str, int]:
        found = self._source.private_modes([self._place_of(path) for path in paths], group)
        return {self._path.get(place, place): mode for place, mode in found.items()}

    def note_modes(self, paths: Sequence[str]) -> None:
        self._source.note_modes([self._place_of(path) for path in paths])

    def second_names(self, paths: Sequence[str]) -> dict[str, str]:
        found = self._source.second_names([self._place_of(path) for path in paths])
        return {self._path.get(link, link): self._path.get(place, place) for link, place in found.items()}

    @property
    def table_version(self) -> TableVersion | None:
        return self._source.table_version

    def pinned_url(self, url: str) -> str:
        return self._source.pinned_url(url)

    def _place_of(self, path: str) -> str:
        if not self._is_listed:  # a repair lists nothing
            deque(self.list(), maxlen=0)
        return self._place.get(path, path)

    def _spelled(self, path: str) -> str:
        directory, slash, name = path.rpartition("/")
        segments = []
        for segment in directory.split("/"):
            key, equals, value = segment.partition("=")
            if equals and key and not key.startswith("."):
                known = self._keys.setdefault(unquote(key).lower(), key)
                segment = f"{key if unquote(known) == unquote(key) else known}={value}"
            segments.append(segment)
        return f"{'/'.join(segments)}{slash}{name}"
