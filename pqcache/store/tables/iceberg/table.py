"""An Iceberg table as pqcache's other sources see it: the data files of one snapshot and their places in a cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial

from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from pqcache.errors import SourceNotFound, UsageError
from pqcache.store.drivers.base import FileShape
from pqcache.store.manifest import Identity, TableVersion, committed_tag
from pqcache.store.tables.iceberg.columns import arrow_schema, check_defaults, table_columns
from pqcache.store.tables.iceberg.deletes import Deletes
from pqcache.store.tables.iceberg.errors import iceberg_errors
from pqcache.store.tables.iceberg.file_io import TableAccess
from pqcache.store.tables.iceberg.partitions import Partitioning
from pqcache.store.tables.iceberg.plan import PlannedFile, planned_files
from pqcache.store.tables.table import TableFile, TableListing, VersionRule, cache_paths, digest
from pqcache.store.urls import printable

_ID = re.compile(r"-?[0-9]{1,20}")


@dataclass(frozen=True, kw_only=True)
class LoadedTable:
    """The metadata of a table as they are now, and how its files are read; ``log`` is as in `TableListing`."""

    metadata: TableMetadata
    access: TableAccess
    log: str | None = None


class IcebergTable:
    """An Iceberg table; see ``pqcache.store.tables.table.Table``.

    Args:
        url: its URL, fit to be shown.
        load: returns its metadata as they are now.
        rule: the version that is wanted: the ID of a snapshot, or the name of a branch or a tag.
        on_close: called when the table is closed.
    """

    has_versions = True

    def __init__(
        self, url: str, load: Callable[[], LoadedTable], rule: VersionRule, on_close: Callable[[], None]
    ) -> None:
        self.url = url
        self._load, self._rule, self._on_close = load, rule, on_close

    def read(self) -> TableListing:
        loaded = self._load()
        with iceberg_errors(self.url):
            return replace(_listing(loaded, self._rule, self.url), log=loaded.log)

    def close(self) -> None:
        self._on_close()


def _listing(loaded: LoadedTable, rule: VersionRule, url: str) -> TableListing:
    metadata = loaded.metadata
    snapshot = _wanted(metadata, rule, url)
    if snapshot is None:
        return TableListing(files={})
    schema = _schema_of(metadata, snapshot, rule)
    check_defaults(metadata, schema, url)
    columns = table_columns(metadata, schema)
    files = _Files(loaded, schema, FileShape(columns=columns))
    version = TableVersion(
        format="Iceberg",
        version=str(snapshot.snapshot_id),
        time=_iso(snapshot.timestamp_ms),
        schema=arrow_schema(schema).serialize().to_pybytes(),
    )
    planned = planned_files(metadata, snapshot, loaded.access, url)
    return TableListing(files=files.by_path(planned, url), version=version)


class _Files:
    """Makes the files of a listing of those that were planned."""

    def __init__(self, loaded: LoadedTable, schema: Schema, shape: FileShape) -> None:
        metadata = loaded.metadata
        self._access, self._columns = loaded.access, shape.columns
        self._partitions = Partitioning(metadata, schema)
        self._deletes = Deletes(loaded.access)
        self._location = metadata.location.rstrip("/") + "/"
        self._table = metadata.table_uuid if "table_uuid" in metadata.model_fields_set else ""
        self._mapping = "" if shape.columns is None else digest(shape.columns)

    def by_path(self, planned: list[PlannedFile], url: str) -> dict[str, TableFile]:
        """Return the files by their paths in a cache."""
        uris = [one.file.file_path for one in planned]
        if len(set(uris)) < len(uris):
            twice = next(uri for uri in uris if uris.count(uri) > 1)
            reason = f"has the file {printable(twice)} twice"
            raise UsageError(url, reason, "write the table again with the engine that it is from")
        directories = [self._partitions.directory(one.file) for one in planned]
        paths = cache_paths(zip(directories, map(self._relative, uris), strict=True))
        return {path: self._table_file(path, one) for path, one in zip(paths, planned, strict=True)}

    def _table_file(self, path: str, planned: PlannedFile) -> TableFile:
        file, deletes = planned.file, planned.deletes
        shape = None
        if self._columns is not None or deletes:
            rows = partial(self._deletes.rows_of, file.file_path, deletes) if deletes else None
            shape = FileShape(columns=self._columns, deleted_rows=rows)
        deleting = [(self._relative(delete.uri), delete.offset, delete.size) for delete in deletes]
        identity = digest(self._table, self._relative(file.file_path), deleting, self._mapping)
        return TableFile(
            path=path,
            url=self._access.url_of(file.file_path),
            identity=Identity(file.file_size_in_bytes, 0, committed_tag(identity, shape is not None)),
            shape=shape,
        )

    def _relative(self, uri: str) -> str:
        return uri.removeprefix(self._location)


def _wanted(metadata: TableMetadata, rule: VersionRule, url: str) -> Snapshot | None:
    """Return the snapshot that is wanted; None where the newest of a table without any is."""
    if rule.version is not None:
        ref = metadata.refs.get(rule.version)
        is_number = _ID.fullmatch(rule.version) is not None
        number = int(rule.version) if is_number else None if ref is None else ref.snapshot_id
        what = f"snapshot {rule.version}" if is_number else f"branch or tag {rule.version!r}"
        advice = "list its snapshots with the engine that wrote it; expired ones are gone"
    elif rule.as_of is not None:
        moment = _milliseconds(rule.as_of)
        past = [entry.snapshot_id for entry in metadata.snapshot_log if entry.timestamp_ms <= moment]
        number = past[-1] if past else None
        what, advice = f"snapshot at {rule.as_of}", "name a later time; expired snapshots are gone"
    elif metadata.current_snapshot_id is None:
        return None
    else:
        number = metadata.current_snapshot_id
        what, advice = f"snapshot {number}, its current one", "check the table with the engine that wrote it"
    found = None if number is None else metadata.snapshot_by_id(number)
    if found is None:
        newest = metadata.current_snapshot()
        has = "" if newest is None else f" (the newest is {newest.snapshot_id} of {_iso(newest.timestamp_ms)})"
        raise SourceNotFound(url, f"has no {what}{has}", advice)
    return found


def _schema_of(metadata: TableMetadata, snapshot: Snapshot, rule: VersionRule) -> Schema:
    """Return the schema that rows are read in: the table's for its newest version, else the snapshot's."""
    if not rule.is_newest and snapshot.schema_id is not None:
        schema = metadata.schema_by_id(snapshot.schema_id)
        if schema is not None:
            return schema
    return metadata.schema()


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).isoformat(timespec="milliseconds")


def _milliseconds(moment: str) -> int:
    """Return an ISO 8601 time, without an offset in UTC, in milliseconds since 1970."""
    try:
        parsed = datetime.fromisoformat(moment.strip().replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(f"--as-of {moment}", "is no time", "write it as 2026-11-01T12:00:00") from None
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=timezone.utc)
    return int(parsed.timestamp() * 1000)
