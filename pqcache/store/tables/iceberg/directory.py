"""An Iceberg table without a catalog: the directory of one, or one of its metadata files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pqcache.errors import SourceNotFound, UsageError
from pqcache.store.drivers.base import read_range
from pqcache.store.drivers.retries import with_retries
from pqcache.store.manifest import SourceFile
from pqcache.store.tables.iceberg.file_io import TableAccess, plain_url
from pqcache.store.tables.iceberg.metadata_files import HINT, newest_metadata, read_metadata
from pqcache.store.tables.iceberg.table import IcebergTable, LoadedTable
from pqcache.store.tables.store_files import StoreFiles, usual_url
from pqcache.store.tables.table_log import MOVED, OpenOptions, TableLog, log_state
from pqcache.store.tables.table_source import TableSource, table_source
from pqcache.store.urls import redact, url_scheme

_METADATA = "metadata"  # the directory of metadata files in that of a table
_TRIES = 3  # writers may remove a metadata file after the directory was listed


def open_directory(log: TableLog) -> IcebergTable:
    """Return the table whose directory ``log`` is of; its newest metadata file is found again for each reading."""
    return IcebergTable(log.url, _Directory(log).load, log.options.rule, log.source.close)


def open_metadata_file(url: str, options: OpenOptions) -> TableSource:
    """Return the table as the metadata file ``url`` has it, whatever other metadata files there are."""
    place = usual_url(url) if url_scheme(url) else os.path.abspath(os.path.expanduser(url))
    files = StoreFiles(None, partial(options.open_files, of=place))
    access = TableAccess(files=files, options=options)
    directory = place.rpartition("/")[0]
    root, _, last = directory.rpartition("/")
    table = IcebergTable(
        redact(place),
        lambda: _loaded(place, root if last == _METADATA else None, access),
        options.rule,
        lambda: None,
    )
    return table_source(place, table, files, options.rule)


class _Directory:
    """Finds the newest metadata file of a table's directory, and reads it."""

    def __init__(self, log: TableLog) -> None:
        self._log = log
        self._access = TableAccess(files=log.files, options=log.options)
        self._entries: list[SourceFile] | None = log.entries

    def load(self) -> LoadedTable:
        """Return the table as it is now."""
        for attempt in range(1, _TRIES + 1):
            entries, self._entries = self._entries or self._listed(), None
            sizes = {file.path: file.identity.size for file in entries}
            try:
                hint = self._hint(sizes[HINT]) if HINT in sizes else None
                name = newest_metadata([*sizes], hint, f"{self._log.url}/{_METADATA}")
                found = _loaded(f"{self._log.url}/{_METADATA}/{name}", self._log.url, self._access)
                return replace(found, log=log_state(entries))
            except SourceNotFound:
                if attempt == _TRIES:
                    raise
        raise AssertionError("unreachable")

    def _listed(self) -> list[SourceFile]:
        source, options = self._log.source, self._log.options
        return with_retries(lambda: list(source.list()), source.url, options.patience, options.on_event)

    def _hint(self, size: int) -> str:
        source, options = self._log.source, self._log.options
        data = with_retries(lambda: read_range(source, HINT, 0, size), HINT, options.patience, options.on_event)
        return data.decode(errors="replace")


def _loaded(uri: str, root: str | None, access: TableAccess) -> LoadedTable:
    """Return the table of a metadata file; it lies in ``root``, or where its metadata say."""
    metadata = read_metadata(access, uri)
    if root is None:
        return LoadedTable(metadata=metadata, access=access)
    prefixes = _prefixes(metadata.location, root, access.options)
    return LoadedTable(metadata=metadata, access=replace(access, prefixes=prefixes))


def _prefixes(location: str, root: str, options: OpenOptions) -> Mapping[str, str]:
    """Return where the directory is that metadata call ``location``, if it is not there."""
    named = plain_url(location).rstrip("/")
    if named == root:
        return {}
    moved = options.store.get(MOVED)
    if moved == "true" or (moved is None and _place(named) == _place(root)):
        return {named: root}
    if moved == "false":
        return {}
    raise UsageError(
        redact(root),
        f"lies elsewhere than its metadata say: {redact(named)}",
        f"name that, or give -o {MOVED}=true to read all its files here, or -o {MOVED}=false to read them there",
    )


def _place(url: str) -> str:
    """Return what is equal for two URLs of one directory: without the user, and without symbolic links."""
    if not url_scheme(url):
        return os.path.realpath(url)
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
