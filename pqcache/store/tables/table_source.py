"""A source that is a table: its listing is what the table says, and its files may lie anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

from pqcache.errors import SourceError, SourceNotFound
from pqcache.store.drivers.base import Capabilities, FileShape, LocalModes, Source
from pqcache.store.manifest import Identity, SourceFile, TableVersion
from pqcache.store.tables.base import StoreFiles, Table, TableFile, TableListing, VersionRule
from pqcache.store.urls import url_scheme


class TableSource(Source):
    """A Source over a table; see ``pqcache.store.drivers.base.Source``.

    A version of a table is one state of it, so it is read once and listed again as it was, until ``take_newer``. A
    table without versions is read for each listing, which has everything in its directories. ``state`` is that of the
    table's log as it was when the table was opened, where it is known without reading it.
    """

    def __init__(self, table: Table, files: StoreFiles, rule: VersionRule, state: str | None = None) -> None:
        self.url = table.url
        if table.has_versions:  # one version until `take_newer`
            self.capabilities = Capabilities(reads_versions=True, lists_only_data_files=True, lists_one_version=True)
        self._table, self._files, self._rule, self._state = table, files, rule, state
        self._listing: TableListing | None = None
        self._lock = Lock()

    @property
    def table_version(self) -> TableVersion | None:
        """The version that is listed, or what is known of a table without versions."""
        return self._known().version

    @property
    def state(self) -> str | None:
        """What is equal as long as the next listing is: of the log that was listed, else of the one to be listed."""
        with self._lock:
            return self._state if self._listing is None else self._listing.log

    def list(self) -> Iterator[SourceFile]:
        with self._lock:
            if self._listing is None or not self._table.has_versions:
                self._listing = self._table.read()
            listing = self._listing
        for file in listing.files.values():
            yield SourceFile(file.path, file.identity)

    def narrow(self, where: str | None) -> None:
        self._table.narrow(where)

    def take_newer(self) -> bool:
        """Have the next listing look for a newer version; false where another one than the newest was asked for."""
        with self._lock:
            if not self._rule.is_newest:
                return False
            self._listing = self._state = None
            return True

    def stat(self, path: str) -> Identity:
        file = self._file(path)
        source, place = self._files.locate(file.url)
        now = source.stat(place)
        if not self._table.has_versions:
            return now
        if now.size != file.identity.size:
            reason = f"has {now.size:,} bytes, and {file.identity.size:,} in the log of its table"
            raise SourceError(source.url_of(place), reason, "check the table with the engine that wrote it")
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
        self._table.close()
        self._files.close()

    def _known(self) -> TableListing:
        with self._lock:
            if self._listing is None:
                self._listing = self._table.read()
            return self._listing

    def _file(self, path: str) -> TableFile:
        try:
            return self._known().files[path]
        except KeyError:
            raise SourceNotFound(f"{self.url}/{path}", "is no file of the table", "sync again") from None

    def _located(self, path: str, tag: str) -> tuple[Source, str, str]:
        """Return the source of a file, its path there, and the tag that it has there."""
        source, place = self._files.locate(self._file(path).url)
        return source, place, "" if self._table.has_versions else tag


class LocalTableSource(TableSource, LocalModes):
    """A table whose files are on this machine, where modes say who can read them; see `LocalModes`."""

    @property
    def local_modes(self) -> LocalModes:
        return self

    def copy_mode(self, path: str, group: int, known: dict[str, os.stat_result] | None = None) -> int:
        source, place = self._files.locate(self._file(path).url)
        modes = source.local_modes
        return 0o444 if modes is None else modes.copy_mode(place, group)

    def private_modes(self, paths: Sequence[str], group: int) -> Mapping[str, int]:
        files = self._known().files
        by_source: dict[int, tuple[LocalModes, dict[str, str]]] = {}
        for path in paths:
            if path not in files:  # a newer version has been read since
                continue
            source, place = self._files.locate(files[path].url)
            if source.local_modes is not None:
                by_source.setdefault(id(source), (source.local_modes, {}))[1][place] = path
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
            if source.local_modes is not None:
                found.setdefault(source.url, []).append(place)
        return found


def table_source(url: str, table: Table, files: StoreFiles, rule: VersionRule, state: str | None = None) -> TableSource:
    """Return the source of a table whose files are, for the greater part, at ``url``."""
    kind = LocalTableSource if url_scheme(url) in ("", "file") else TableSource
    return kind(table, files, rule, state)
