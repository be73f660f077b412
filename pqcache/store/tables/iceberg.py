"""Iceberg tables: the data files of one snapshot, their paths in a cache, and their deleted rows."""

from __future__ import annotations

import io
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.avro.file
from pyiceberg import types
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.avro.file import AvroFile
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, index_by_id, index_name_by_id
from pyiceberg.table import FileScanTask
from pyiceberg.table import Table as ScannedTable
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import MappedField, parse_mapping_from_json
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from pqcache.errors import (
    CHECK_TABLE,
    ParquetError,
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.parquet.projection import ColumnKind, TableColumn
from pqcache.store.drivers.base import FileShape, RangedFile
from pqcache.store.drivers.remote import censored, known_cause
from pqcache.store.manifest import Identity, TableVersion, committed_tag
from pqcache.store.partition_paths import NULL
from pqcache.store.tables.base import (
    Commit,
    StoreFiles,
    TableFile,
    TableListing,
    VersionRule,
    cache_paths,
    digest,
    iso_time,
    partition_path,
    usual_url,
)
from pqcache.store.tables.deletion_vector import FRAME, DeletionVector, Positions
from pqcache.store.urls import url_scheme
from pqcache.units import printable

_ID = re.compile(r"-?[0-9]{1,20}")
_PUFFIN = "PUFFIN"
_STATUS, _DATA_FILE = 0, 2  # field IDs in manifests
_OF_VECTORS = 100, 103, 143, 144, 145  # path, number of rows, data file, offset, size
_DELETED = 2
_MAX_CACHED = 16 << 20  # positions, of 8 bytes each
_BATCH = 1 << 16  # rows
_NONE: Positions = np.empty(0, np.int64)
NAME_MAPPING = "schema.name-mapping.default"
_ARROW: Mapping[type[types.IcebergType], pa.DataType] = {
    types.BooleanType: pa.bool_(),
    types.IntegerType: pa.int32(),
    types.LongType: pa.int64(),
    types.FloatType: pa.float32(),
    types.DoubleType: pa.float64(),
    types.DateType: pa.date32(),
    types.TimeType: pa.time64("us"),
    types.TimestampType: pa.timestamp("us"),
    types.TimestamptzType: pa.timestamp("us", "UTC"),
    types.TimestampNanoType: pa.timestamp("ns"),
    types.TimestamptzNanoType: pa.timestamp("ns", "UTC"),
    types.StringType: pa.string(),
    types.BinaryType: pa.binary(),
    types.UUIDType: pa.uuid(),
    types.UnknownType: pa.null(),
}
_IN_PATHS = (
    types.BooleanType, types.DateType, types.DecimalType, types.IntegerType, types.LongType, types.StringType,
    types.TimestampType, types.TimestamptzType,
)  # fmt: skip
_MAX_NAME = 255  # bytes, of most file systems


def listing_of(metadata: TableMetadata, access: TableAccess, rule: VersionRule, url: str) -> TableListing:
    """List the files of the wanted version of a table, with the errors of `Table.read_table`."""
    with iceberg_errors(url):
        snapshot = _wanted(metadata, rule, url)
        if snapshot is None:
            return TableListing(files={})
        schema = _schema_of(metadata, snapshot, rule)
        check_defaults(metadata, schema, url)
        version = TableVersion(
            format="Iceberg",
            version=str(snapshot.snapshot_id),
            time=_time_of(snapshot),
            schema=arrow_schema(schema).serialize().to_pybytes(),
        )
        planned = planned_files(metadata, snapshot, access, url)
        files = _files(metadata, access, schema, planned, url)
        return TableListing(
            files=files, version=version, commits_since=partial(_commits, metadata, access, snapshot, url)
        )


def _commits(
    metadata: TableMetadata, access: TableAccess, snapshot: Snapshot, url: str, before: str
) -> list[Commit] | None:
    """The commits after the snapshot ``before`` that led to ``snapshot``."""
    found, at = [], snapshot
    with iceberg_errors(url):
        while str(at.snapshot_id) != before:
            found.append(_commit(at, access))
            parent = None if at.parent_snapshot_id is None else metadata.snapshot_by_id(at.parent_snapshot_id)
            if parent is None:
                return None
            at = parent
    return found[::-1]


def _commit(snapshot: Snapshot, access: TableAccess) -> Commit:
    file_io = StoreFileIO({ACCESS: access})
    written: dict[str, str] = {}
    removed: dict[str, str] = {}
    for manifest in snapshot.manifests(file_io):
        if manifest.content == ManifestContent.DATA and manifest.added_snapshot_id == snapshot.snapshot_id:
            for entry in manifest.fetch_manifest_entry(file_io, discard_deleted=False):
                if entry.snapshot_id == snapshot.snapshot_id and entry.status != ManifestEntryStatus.EXISTING:
                    file = entry.data_file
                    files = written if entry.status == ManifestEntryStatus.ADDED else removed
                    files[access.url_of(file.file_path)] = f"{file.spec_id} {file.partition}"
    if snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE:
        return Commit(added=(), rewritten=written, removed=removed)
    return Commit(added=tuple(written), rewritten={}, removed=removed)


def _files(
    metadata: TableMetadata, access: TableAccess, schema: Schema, planned: Sequence[PlannedFile], url: str
) -> dict[str, TableFile]:
    uris = [one.file.file_path for one in planned]
    if len(set(uris)) < len(uris):
        twice = next(uri for uri in uris if uris.count(uri) > 1)
        reason = f"has the file {printable(twice)} twice"
        raise UsageError(url, reason, "rewrite the table with its engine")
    location = metadata.location.rstrip("/") + "/"
    table = metadata.table_uuid if "table_uuid" in metadata.model_fields_set else ""
    columns = table_columns(metadata, schema)
    mapping = "" if columns is None else digest(columns)
    partitioning, deletes = Partitioning(metadata, schema), Deletes(access)
    directories = [partitioning.directory(one.file) for one in planned]
    names = [uri.removeprefix(location) for uri in uris]
    files = {}
    for path, name, one in zip(cache_paths(zip(directories, names, strict=True)), names, planned, strict=True):
        shape = None
        if columns is not None or one.deletes:
            rows = partial(deletes.rows_of, one.file.file_path, one.deletes) if one.deletes else None
            shape = FileShape(columns=columns, deleted_rows=rows)
        deleting = [
            delete.removeprefix(location)
            if isinstance(delete, str)
            else astuple(replace(delete, place=delete.place.removeprefix(location)))
            for delete in one.deletes
        ]
        tag = committed_tag(digest(table, name, deleting, mapping), shape is not None)
        url_of_file = access.url_of(one.file.file_path)
        files[path] = TableFile(
            path=path, url=url_of_file, identity=Identity(one.file.file_size_in_bytes, 0, tag), shape=shape
        )
    return files


def _wanted(metadata: TableMetadata, rule: VersionRule, url: str) -> Snapshot | None:
    """The wanted snapshot; None if the newest is wanted and there is none."""
    if rule.version is not None:
        ref = metadata.refs.get(rule.version)
        is_number = _ID.fullmatch(rule.version) is not None
        number = int(rule.version) if is_number else None
        if ref is not None and (number is None or metadata.snapshot_by_id(number) is None):
            number = ref.snapshot_id
        what = f"snapshot {rule.version}" if is_number else f"branch or tag {rule.version!r}"
        advice = "list its snapshots with the engine that wrote it; expired ones are gone"
    elif rule.time_ns is not None:
        moment = rule.time_ns // 1_000_000
        past = [entry.snapshot_id for entry in metadata.snapshot_log if entry.timestamp_ms <= moment]
        number = past[-1] if past else None
        what, advice = f"snapshot at {rule.as_of}", "name a later time; expired snapshots are gone"
    elif metadata.current_snapshot_id is None:
        return None
    else:
        number = metadata.current_snapshot_id
        what, advice = f"snapshot {number}, its current one", CHECK_TABLE
    found = None if number is None else metadata.snapshot_by_id(number)
    if found is None:
        newest = metadata.current_snapshot()
        has = "" if newest is None else f" (the newest is {newest.snapshot_id} of {_time_of(newest)})"
        raise SourceNotFound(url, f"has no {what}{has}", advice)
    return found


def _time_of(snapshot: Snapshot) -> str:
    return iso_time(snapshot.timestamp_ms * 1_000_000)


def _schema_of(metadata: TableMetadata, snapshot: Snapshot, rule: VersionRule) -> Schema:
    """The schema of the rows: the table's for the newest version, else the snapshot's."""
    if not rule.is_newest and snapshot.schema_id is not None:
        schema = metadata.schema_by_id(snapshot.schema_id)
        if schema is not None:
            return schema
    return metadata.schema()


@dataclass(frozen=True)
class PlannedFile:
    """A data file, the URIs of its delete files, and its deletion vector."""

    file: DataFile
    deletes: tuple[str | DeletionVector, ...]


def planned_files(metadata: TableMetadata, snapshot: Snapshot, access: TableAccess, url: str) -> list[PlannedFile]:
    """Plan the data files of a snapshot; raises UsageError if pqcache cannot read one or its deletes correctly.

    Errors of pyiceberg about damaged metadata are not translated.
    """
    file_io = StoreFileIO({ACCESS: access})
    table = ScannedTable(
        identifier=("table",), metadata=metadata, metadata_location="", io=file_io, catalog=NoopCatalog("none")
    )  # without a catalog, which might plan by itself
    try:
        tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())
    except ValueError:
        _refuse_equality_deletes(_deleting(snapshot, file_io), file_io, url)
        raise
    has_vectors = any(_format(delete) == _PUFFIN for task in tasks for delete in task.delete_files)
    vectors = _deletion_vectors(_deleting(snapshot, file_io), file_io) if has_vectors else {}
    return [_planned(task, vectors) for task in tasks]


def _deleting(snapshot: Snapshot, file_io: StoreFileIO) -> list[ManifestFile]:
    return [manifest for manifest in snapshot.manifests(file_io) if manifest.content == ManifestContent.DELETES]


def _planned(task: FileScanTask, vectors: Mapping[tuple[str, str], DeletionVector]) -> PlannedFile:
    file = task.file
    _check_parquet("data file", file)
    paths, found = [], []
    for delete in task.delete_files:
        if _format(delete) == _PUFFIN:  # which has vectors of several data files
            if (vector := vectors.get((delete.file_path, file.file_path))) is not None:
                found.append(vector)
        else:
            _check_parquet("delete file", delete)
            paths.append(delete.file_path)
    for one in (file, *task.delete_files):
        if one.key_metadata is not None:
            reason = "is an encrypted file of an Iceberg table, which cannot be read"
            raise UsageError(printable(one.file_path), reason, "write the table without encryption")
    return PlannedFile(file, (*sorted(paths), *found))


def _format(file: DataFile) -> str:
    return str(getattr(file.file_format, "value", file.file_format)).upper()


def _check_parquet(what: str, file: DataFile) -> None:
    if _format(file) != "PARQUET":
        raise UsageError(
            printable(file.file_path),
            f"is a {what} of an Iceberg table in {_format(file)}, and pqcache reads Parquet",
            "write the table again with write.format.default=parquet (Spark: rewrite_data_files)",
        )


def _refuse_equality_deletes(manifests: Iterable[ManifestFile], file_io: StoreFileIO, url: str) -> None:
    """Raise UsageError if a manifest has equality deletes, which pyiceberg does not apply."""
    for manifest in manifests:
        for entry in manifest.fetch_manifest_entry(file_io):
            if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                raise UsageError(
                    url,
                    f"deletes rows by their values (equality deletes: {printable(entry.data_file.file_path)}), which "
                    "pqcache cannot apply",
                    "write its files again with Spark: CALL CATALOG.system.rewrite_data_files(table => 'NAME', options "
                    "=> map('delete-file-threshold', '1', 'remove-dangling-deletes', 'true'))",
                )


def _deletion_vectors(manifests: Sequence[ManifestFile], file_io: StoreFileIO) -> dict[tuple[str, str], DeletionVector]:
    """The locations of deletion vectors, by Puffin file and data file, which pyiceberg does not expose."""
    found = {}
    for manifest in manifests:
        with AvroFile[Record](file_io.new_input(manifest.manifest_path)) as reader:
            struct = reader.schema.find_type(_DATA_FILE)
            assert isinstance(struct, types.StructType)
            top = {field.field_id: position for position, field in enumerate(reader.schema.fields)}
            inside = {field.field_id: position for position, field in enumerate(struct.fields)}
            if not inside.keys() >= set(_OF_VECTORS):
                continue  # written before there were any
            for entry in reader:
                file = entry[top[_DATA_FILE]]
                path, rows, referenced, offset, size = (file[inside[key]] for key in _OF_VECTORS)
                if entry[top[_STATUS]] != _DELETED and size:
                    vector = DeletionVector(rows=rows, size=size - FRAME, place=path, offset=offset)
                    found[path, referenced] = vector
    return found


class Deletes:
    """Reads the delete files of one version of a table; threads may share it.

    The last used ones stay in memory, for the next data files that need them.
    """

    def __init__(self, access: TableAccess) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, Mapping[str, Positions]] = OrderedDict()

    def rows_of(self, data_file: str, deletes: Sequence[str | DeletionVector]) -> Positions:
        """Read the positions of the deleted rows of a data file, ascending. ``data_file`` is its URI in the table.

        Raises SourceError if a vector or a delete file cannot be read, ParquetError if a delete file is damaged.
        """
        found = [
            self._positions(one, data_file)
            if isinstance(one, str)
            else one.read(printable(data_file), self._access.read)
            for one in deletes
        ]
        return np.unique(np.concatenate([_NONE, *found]))

    def _positions(self, uri: str, data_file: str) -> Positions:
        with self._lock:  # so that threads do not read the same file twice
            if uri in self._cached:
                self._cached.move_to_end(uri)
            else:
                with self._access.open(uri) as stream:
                    try:
                        file = pq.ParquetFile(stream)
                        if file.metadata.num_rows > _MAX_CACHED:
                            return _grouped(file, _groups_of(file, data_file), data_file).get(data_file, _NONE)
                        self._cached[uri] = _grouped(file, range(file.num_row_groups))
                    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                        reason = f"this delete file cannot be read ({first_line(error)})"
                        raise ParquetError(printable(uri), reason, CHECK_TABLE) from error
                self._shrink()
            return self._cached[uri].get(data_file, _NONE)

    def _shrink(self) -> None:
        """Forget the least recently used delete files until the others fit in memory."""
        sizes = {uri: sum(map(len, positions.values())) for uri, positions in self._cached.items()}
        while len(self._cached) > 1 and sum(sizes.values()) > _MAX_CACHED:
            del sizes[self._cached.popitem(last=False)[0]]


def _grouped(file: pq.ParquetFile, groups: Sequence[int], only: str | None = None) -> Mapping[str, Positions]:
    """Read positions in some row groups of a delete file, by data file; with ``only``, those of that data file."""
    parts: dict[str, list[Positions]] = {}
    columns = ["file_path", "pos"]
    for batch in file.iter_batches(_BATCH, row_groups=groups, columns=columns, use_threads=False):
        for path, positions in _by_path(batch):
            if only is None or path == only:
                parts.setdefault(path, []).append(positions)
    return {path: np.concatenate(found) for path, found in parts.items()}


def _by_path(batch: pa.RecordBatch) -> Iterator[tuple[str, Positions]]:
    kinds = batch.schema.field("file_path").type, batch.schema.field("pos").type
    if kinds != (pa.string(), pa.int64()):
        raise ValueError(f"its columns are {kinds[0]} and {kinds[1]}")
    if batch["file_path"].null_count or batch["pos"].null_count:
        raise ValueError("it has nulls")
    paths = batch["file_path"].dictionary_encode()
    codes, positions = paths.indices.to_numpy(), batch["pos"].to_numpy()
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(paths.dictionary) + 1))
    for code, path in enumerate(paths.dictionary.to_pylist()):
        yield path, positions[order[starts[code] : starts[code + 1]]]


def _groups_of(file: pq.ParquetFile, data_file: str) -> list[int]:
    """The row groups with positions of a data file, by their statistics: delete files are sorted by data file."""
    column = file.schema_arrow.names.index("file_path")
    found = []
    for group in range(file.num_row_groups):
        known = file.metadata.row_group(group).column(column).statistics
        if known is None or not known.has_min_max or known.min <= data_file <= known.max:
            found.append(group)
    return found


def arrow_schema(schema: Schema) -> pa.Schema:
    return pa.schema([_arrow_field(field) for field in schema.fields])


def arrow_type(kind: types.IcebergType) -> pa.DataType:
    """The type in which Arrow reads a column; binary if Arrow does not know it."""
    if isinstance(kind, types.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, types.FixedType):
        return pa.binary(len(kind))
    if isinstance(kind, types.StructType):
        return pa.struct([_arrow_field(field) for field in kind.fields])
    if isinstance(kind, types.ListType):
        return pa.list_(_arrow_field(kind.element_field))
    if isinstance(kind, types.MapType):
        return pa.map_(arrow_type(kind.key_type), _arrow_field(kind.value_field))
    return _ARROW.get(type(kind), pa.binary())


def table_columns(metadata: TableMetadata, schema: Schema) -> tuple[TableColumn, ...] | None:
    """How files identify the columns of ``schema``; None if all files certainly have its names.

    They do if the table has kept all its schemas, and none has a column that ``schema`` lacks or names differently.
    Files of version 3 may have more columns, and tables of version 1 may have lost schemas.
    """
    mapping = metadata.properties.get(NAME_MAPPING)
    names = index_name_by_id(schema)
    kept = sorted(known.schema_id for known in metadata.schemas) == list(range(len(metadata.schemas)))
    same = all(index_name_by_id(known).items() <= names.items() for known in metadata.schemas)
    if metadata.format_version == 2 and mapping is None and kept and same:
        return None
    stored = {} if mapping is None else dict(_names(parse_mapping_from_json(mapping).root))
    return tuple(_column(field, stored) for field in schema.fields)


def check_defaults(metadata: TableMetadata, schema: Schema, url: str) -> None:
    """Raise UsageError if a file may lack a column with a default other than null."""
    known = [index_by_id(other) for other in metadata.schemas]
    first = min(other.schema_id for other in metadata.schemas) == 0
    for number, column in index_by_id(schema).items():
        if column.initial_default is not None and not (first and all(number in other for other in known)):
            raise UsageError(
                url,
                f"column {schema.find_column_name(number)!r} was added with a default value for rows that lack it "
                "(initial-default), and pqcache has nulls there",
                "have the engine write the table's files again, or take them as they are with --as-files",
            )


def _arrow_field(field: types.NestedField) -> pa.Field:
    return pa.field(field.name, arrow_type(field.field_type), field.optional)


def _names(fields: Iterable[MappedField]) -> Iterable[tuple[int, frozenset[str]]]:
    """Yield the IDs of fields and their names in files without IDs, also of nested fields."""
    for mapped in fields:
        if mapped.field_id is not None:
            yield mapped.field_id, frozenset(mapped.names)
        yield from _names(mapped.fields)


def _column(field: types.NestedField, stored: Mapping[int, frozenset[str]]) -> TableColumn:
    kind, inside = ColumnKind.LEAF, tuple[types.NestedField, ...]()
    if isinstance(field.field_type, types.StructType):
        kind, inside = ColumnKind.STRUCT, field.field_type.fields
    elif isinstance(field.field_type, types.ListType):
        kind, inside = ColumnKind.LIST, (field.field_type.element_field,)
    elif isinstance(field.field_type, types.MapType):
        kind, inside = ColumnKind.MAP, (field.field_type.key_field, field.field_type.value_field)
    return TableColumn(
        name=field.name,
        field_id=field.field_id,
        stored=stored.get(field.field_id, frozenset()),
        kind=kind,
        fields=tuple(_column(of, stored) for of in inside),
    )


@dataclass(frozen=True, kw_only=True)
class _PartitionColumn:
    """A column whose values are partitions; ``position`` is its index among the partition values of a file.

    ``type`` is its type in paths, None if paths cannot hold its values.
    """

    name: str
    field_id: int
    position: int
    type: pa.DataType | None


class Partitioning:
    """The partition directories of a table's files, each by the spec with which the file was written.

    Columns with an identity transform become directories. Hidden partitions remain in the files only, and so do values
    that a path cannot represent exactly: empty or very long texts, inexact numbers. A new spec does not change the
    paths of older files.
    """

    def __init__(self, metadata: TableMetadata, schema: Schema) -> None:
        self._columns = {spec.spec_id: _columns_of(spec, metadata, schema) for spec in metadata.partition_specs}

    def directory(self, file: DataFile) -> str:
        """The directory of a data file; empty if it has none.

        Raises UsageError if a value may only be in the metadata: engines that add Hive's files to a table leave the
        partition columns out of them.
        """
        values: dict[str, str | None] = {}
        for column in self._columns.get(file.spec_id, ()):
            value = file.partition[column.position]
            text = None if value is None else _text(value, column.type)
            if text != "" and column.type is not None and _is_name(column.name, text):
                values[column.name] = text
            elif value is not None and not _has(file, column.field_id):
                raise UsageError(
                    printable(file.file_path),
                    f"may lack the column {column.name!r}, whose value in it ({printable(str(value))[:80]}) cannot be "
                    "in a path, and its table's metadata have no statistics of it",
                    "have the engine write the table's files again (Spark: rewrite_data_files)",
                )
        return partition_path(values)


def _columns_of(spec: PartitionSpec, metadata: TableMetadata, schema: Schema) -> list[_PartitionColumn]:
    fields, top = index_by_id(schema), {field.field_id for field in schema.fields}
    return [
        _PartitionColumn(
            name=str(schema.find_column_name(source.field_id)),
            field_id=source.field_id,
            position=position,
            type=_path_type(source, metadata) if source.field_id in top else None,
        )
        for position, field in enumerate(spec.fields)
        if isinstance(field.transform, IdentityTransform) and (source := fields.get(field.source_id)) is not None
    ]


def _path_type(column: types.NestedField, metadata: TableMetadata) -> pa.DataType | None:
    """A column's type in paths; None if paths cannot hold it, or if it once had a type that reads them differently."""
    kinds: set[type[types.IcebergType]] = set()
    for schema in metadata.schemas:
        kinds |= {type(field.field_type) for field in schema.fields if field.field_id == column.field_id}
    stable = len(kinds) == 1 or kinds == {types.IntegerType, types.LongType}
    return arrow_type(column.field_type) if stable and isinstance(column.field_type, _IN_PATHS) else None


def _is_name(column: str, text: str | None) -> bool:
    return len(partition_path({column: text}).encode(errors="surrogatepass")) <= _MAX_NAME


def _has(file: DataFile, field_id: int) -> bool:
    """Whether the metadata proves that the column is in the file."""
    return any(known is not None and field_id in known for known in (file.value_counts, file.column_sizes))


@lru_cache(1 << 14)
def _text(value: Any, kind: pa.DataType | None) -> str:
    """Write a partition's value as text that Arrow parses to the same value; empty if there is no such text."""
    if kind is None:
        return ""
    if pa.types.is_string(kind):
        return "" if value == NULL else str(value)
    try:
        typed = pa.scalar(value, kind)
        text = typed.cast(pa.string())
        return str(text) if text.cast(kind) == typed else ""
    except (pa.ArrowException, ValueError, OverflowError):
        return ""


# ---- pyiceberg's FileIO over the drivers, checks of manifests, and errors

ACCESS = "pqcache.access"  # the property of a FileIO that holds its TableAccess
CLASS = f"{__name__}.StoreFileIO"
_BUFFER = 1 << 20


# The compiled decoder does not know where damaged data end: it reads on into other memory, or crashes the process.
pyiceberg.avro.file.new_decoder = StreamingBinaryDecoder  # type: ignore[assignment,attr-defined]
_MAGIC = b"Obj\x01"
_CODEC = b"avro.codec"
_MAX_BLOCKS = 1 << 30  # bytes of all blocks, decompressed
_SYNC = 16  # bytes of the marker behind the header and each block
_MISSING = {"NoSuchTableError", "NoSuchIcebergTableError", "NoSuchNamespaceError", "NoSuchIdentifierError"}
_DENIED = {"UnauthorizedError", "ForbiddenError", "OAuthError"}
_PASSING = {"ServiceUnavailableError", "ServerError", "TooManyRequestsError"}
_AS_FILES = "take its files as they are with --as-files (as_files=True)"


@dataclass(frozen=True, kw_only=True)
class TableAccess:
    """Reads the files of a table by the URIs in its metadata; ``prefixes`` maps their directories to real ones."""

    files: StoreFiles
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def url_of(self, uri: str) -> str:
        url = plain_url(uri)
        for named, place in self.prefixes.items():
            if url == named or url.startswith(f"{named}/"):
                return place + url[len(named) :]
        return url

    def size_of(self, uri: str) -> int:
        return self.files.size_of(self.url_of(uri))

    def read(self, uri: str, offset: int, length: int) -> bytes:
        return self.files.read(self.url_of(uri), offset, length)

    def read_all(self, uri: str) -> bytes:
        return self.read(uri, 0, self.size_of(uri))

    def open(self, uri: str) -> io.BufferedReader:
        return io.BufferedReader(RangedFile(partial(self.read, uri), self.size_of(uri)), _BUFFER)


def plain_url(uri: str) -> str:
    """Normalize a URI from a table's metadata to the spelling of sources. Nothing in it is percent-encoded."""
    if not uri.startswith("file:"):
        return usual_url(uri) if url_scheme(uri) or uri.startswith("hdfs:") else os.path.normpath(uri)
    path = uri.removeprefix("file:")
    return os.path.normpath("/" + path[2:].partition("/")[2] if path.startswith("//") else path)


class StoreFileIO(FileIO):
    """A read-only FileIO over the `TableAccess` in its properties; threads may share it."""

    def new_input(self, location: str) -> InputFile:
        return _StoreInput(location, self.access)

    def new_output(self, location: str) -> OutputFile:
        _refuse(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        _refuse(location if isinstance(location, str) else location.location)

    @property
    def access(self) -> TableAccess:
        access: TableAccess = self.properties[ACCESS]
        return access


class _StoreInput(InputFile):
    def __init__(self, location: str, access: TableAccess) -> None:
        super().__init__(location)
        self._access = access

    def __len__(self) -> int:
        return self._access.size_of(self.location)

    def exists(self) -> bool:
        try:
            self._access.size_of(self.location)
        except SourceNotFound:
            return False
        return True

    def open(self, seekable: bool = True) -> Any:
        data = self._access.read_all(self.location)
        if ".json" not in self.location.rpartition("/")[2]:  # all but the metadata file are Avro
            try:
                check_avro(data)
            except ValueError as error:
                reason = f"this manifest is damaged: {error}"
                raise SourceError(printable(self.location), reason, CHECK_TABLE) from error
        return io.BytesIO(data)


def _refuse(location: str) -> NoReturn:
    raise UsageError(location, "is a file of a table, and pqcache does not write tables")


def check_avro(data: bytes) -> None:
    """Raise ValueError unless ``data`` is a complete Avro file: a header and blocks, each followed by its marker."""
    position = 0

    def take(count: int) -> bytes:
        nonlocal position
        start, position = position, position + count
        if not start <= position <= len(data):
            raise ValueError(f"it ends after {len(data):,} bytes")
        return data[start:position]

    def number() -> int:
        """Read a number, which Avro writes 7 bits at a time and in zigzag."""
        value = 0
        for shift in range(0, 70, 7):
            byte = take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
        raise ValueError("a number in it is too long")

    if take(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is not an Avro file")
    codec = b""
    while count := number():
        if count < 0:
            number()
        for _ in range(abs(count)):
            key, value = take(number()), take(number())
            codec = value if key == _CODEC else codec
    marker = take(_SYNC)
    left = _MAX_BLOCKS
    while position < len(data):
        count = number()
        size = _size_of(take(number()), codec, left)
        if not 0 < count <= size:  # an entry of a manifest has a byte at least
            raise ValueError(f"a block of {size:,} bytes cannot have {count:,} entries")
        left -= size
        if take(_SYNC) != marker:
            raise ValueError("a block of it is damaged")


def _size_of(block: bytes, codec: bytes, limit: int) -> int:
    """The decompressed size of a block; ``limit`` for other codecs than deflate."""
    if codec != b"deflate":
        return len(block) if codec in (b"", b"null") else limit
    inflate = zlib.decompressobj(-15)
    try:
        size = len(inflate.decompress(block, limit))
    except zlib.error:
        raise ValueError("a block of it is damaged") from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it has more than {_MAX_BLOCKS:,} bytes")
    return size


@contextmanager
def iceberg_errors(subject: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Translate pyiceberg's errors inside the block to errors about ``subject``, a table or a catalog."""
    try:
        yield
    except PqcacheError:
        raise
    except Exception as error:  # noqa: BLE001  from any of its dependencies; chained below
        shown = censored(_error(subject, error), secrets, error)
        raise shown from shown.__cause__


def _error(subject: str, error: Exception) -> PqcacheError:
    if (known := known_cause(subject, error)) is not None:
        return known
    names = {kind.__name__ for kind in type(error).__mro__}
    said = _said(error)
    if names & _MISSING:
        return SourceNotFound(subject, f"no such table ({said})", "check the names of the namespace and the table")
    if names & _DENIED:
        advice = "check the catalog's credentials in ~/.pyiceberg.yaml or PYICEBERG_CATALOG__NAME__..."
        return SourceDenied(subject, f"access denied ({said})", advice)
    if names & _PASSING or type(error).__module__.startswith("requests."):
        return SourceUnavailable(subject, f"its catalog does not answer ({said})", "check the catalog's uri, try again")
    if "NotInstalledError" in names:
        return UsageError(subject, f"its catalog needs another package ({said})", "install it")
    if type(error).__module__.startswith("sqlalchemy."):
        return SourceError(subject, f"its catalog's database cannot be read ({said})", "check the catalog's uri")
    advice = f"{CHECK_TABLE}, or {_AS_FILES}"
    return SourceError(subject, f"pyiceberg cannot read it ({said})", advice)


def _said(error: Exception) -> str:
    text = first_line(error)
    if "ValidationError" in type(error).__name__:  # pydantic's: the first line is the number of errors
        lines = [line.partition(" [")[0].strip() for line in str(error).splitlines()[1:3]]
        text = ": ".join(line for line in lines if not line.startswith("For further information")) or text
    return printable(text)
