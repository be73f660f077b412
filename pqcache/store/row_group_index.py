"""The row-group index: one row per row group of a snapshot.

Stored as ``_pqcache/row_groups.arrow`` (Arrow IPC, memory-mapped, so opening it does not read it). Its columns:

==================== ========= ==========================================================================
file                 int32     position of the file in path order; in the file a dictionary of the paths
row_group            int32     position of the row group in its file
rows                 int64     number of rows
offset               int64     offset of its first page in the file, in bytes
bytes                int64     compressed size on disk, as limited by ``--row-group-size``
uncompressed         int64     size of its pages after decompression
offset_index         bool      whether the file has an offset index for every column
``C:bytes``          int64     bytes on disk and after decompression, for each top-level column ``C`` of the schema
``C:uncompressed``   int64
``C:codec``          string    ``SNAPPY``; several joined by ``+`` if the leaves of ``C`` differ
``C:nulls``          int64     number of nulls, if known
``C:values``         int64     for lists only: number of items, with one for an empty list; null if there are null lists
``C:decoded``        int64     if rows differ in size: estimated bytes in Arrow; null if unknown
``C:most``           int64     an upper bound of the same, equal if the size is known; null if unknown
``C:min``, ``C:max`` type of C by the file's statistics; null if unknown or unsound. ``C.x:field_min`` of structs
==================== ========= ==========================================================================

The schema's metadata holds the Arrow schemas of the dataset and of its table: the latter has the types of partition
columns, and columns that no file has yet. Partition values aren't stored, as the paths have them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import MALFORMED, CacheError, DamagedError, ParquetError, TypeClash, first_line
from pqcache.parquet.arrow import leaves_in, rows_at, top_level_names
from pqcache.parquet.decoded_size import DECODED, Read, decoded_columns, reading
from pqcache.parquet.dense import is_alike
from pqcache.parquet.schema import (
    TimeUnits,
    always_fits,
    cast_exactly,
    check_names,
    differing_in_case,
    joined_type,
    merge_schemas,
    unfit_reason,
    with_table_columns,
    with_time_zones,
)
from pqcache.parquet.statistics import BASE, EXTREMES, columns_table, index_schema, row_group_columns
from pqcache.parquet.validation import read_footer
from pqcache.store.partition_paths import parent, partition_keys, partition_values, partitions_of
from pqcache.system.disk import check_regular
from pqcache.system.threads import ForkSafeThreadPool

OpenFile = Callable[[str], AbstractContextManager[tuple[pq.FileMetaData, pa.Schema, Read]]]

FORMAT = 2  # 1 had no decoded sizes
NO_SCHEMA = pa.schema([])
log = logging.getLogger("pqcache.store")

_BATCH = 8_192  # files, or row groups, handled at once
_DICTIONARIES = 32  # row groups whose dictionaries are looked at before the files are here
NO_UNITS = TimeUnits()
IndexColumns = dict[str, list[Any]]  # of the row groups of a file, by name
_NUMBERS = (":bytes", ":uncompressed", ":nulls", ":values", ":decoded", ":most")  # of a column, behind its name
_ALWAYS = ("bytes", "uncompressed", "codec", "nulls")  # of every column, also if only files without rows have it
_PLACES = ("file", "row_group", "rows")  # columns needed for each row group that is read


@dataclass(frozen=True, kw_only=True)
class Index:
    """Every row group of a dataset, in path order and then in file order.

    ``table`` has one row per row group; see the module's docstring for its columns. ``data_schema`` is the schema of
    the columns in the files, and ``uniform`` says that every file is known to have exactly this one. ``table_schema``
    is the schema of their Delta or Iceberg table, else without columns. ``clashes`` has the errors about columns left
    out of the schema because their types don't fit together.
    """

    paths: tuple[str, ...]
    table: pa.Table
    data_schema: pa.Schema
    table_schema: pa.Schema = NO_SCHEMA
    uniform: bool = False
    clashes: tuple[TypeClash, ...] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def partitions(self) -> pa.Table:
        """One row per file, and a column for each partition column except those in `path_values`."""
        return self._partitions.drop_columns(self.path_values.column_names)

    @cached_property
    def path_values(self) -> pa.Table:
        """One row per file, with the values in paths of columns that some files contain; null if a path has none.

        This happens if a table's partitioning has changed. As for all partitions, the value in the path wins.
        """
        names = self._partitions.column_names
        mixed = [name for name in names if name in self.data_schema.names and self._is_mixed(name)]
        if not mixed:
            return self._partitions.select([])
        found = partitions_of(self.paths, pa.schema([(name, pa.string()) for name in mixed])).select(mixed)
        for position, name in enumerate(found.column_names):
            kind = self.data_schema.field(name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            try:
                found = found.set_column(position, name, found[name].cast(kind))
            except pa.ArrowException as error:
                raise ParquetError(
                    f"column {name!r}",
                    f"is {kind} in some files, and its values in the paths of others are not ({first_line(error)})",
                    "make the files and the paths agree at the source",
                ) from error
        return found

    @cached_property
    def statistics(self) -> pa.Table:
        """The ``table`` without statistics of columns whose values are in the paths of some files."""
        names = self.path_values.column_names
        gone = {f"{name}:{what}" for name in names for what in ("min", "max", "nulls")}
        return self.table.drop_columns(sorted(gone & self.recorded)) if gone else self.table

    @cached_property
    def _partitions(self) -> pa.Table:
        return partitions_of(self.paths, self.table_schema)

    def _is_mixed(self, name: str) -> bool:
        """Whether some files contain the partition column, as their paths lack it."""
        without = {d for d in map(parent, self.paths) if name not in partition_values(d)}
        if not without:
            return False
        here = np.array([parent(path) in without for path in self.paths], np.bool_)[self.numbers("file")]
        return bool((here & self.table[f"{name}:bytes"].is_valid().to_numpy()).any())

    @cached_property
    def schema(self) -> pa.Schema:
        """The dataset's columns: those of files and table, then the partition columns, which win."""
        columns = with_table_columns(self.data_schema, self.table_schema)
        fields = [field for field in columns if field.name not in self.partitions.column_names]
        return pa.schema([*fields, *self.partitions.schema], self.data_schema.metadata)

    @cached_property
    def recorded(self) -> frozenset[str]:
        """Names of the columns of ``table``; a wide dataset has thousands."""
        return frozenset(self.table.column_names)

    def numbers(self, column: str) -> npt.NDArray[np.int64]:
        """A read-only integer column of ``table``; one item per row group."""
        return self._places[column] if column in _PLACES else _int64(self.table[column])

    @cached_property
    def _places(self) -> dict[str, npt.NDArray[np.int64]]:
        return {name: _int64(self.table[name]) for name in _PLACES}

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return self.numbers("rows")

    @property
    def varying(self) -> list[str]:
        """Columns whose rows differ in decoded size."""
        return [name.removesuffix(":decoded") for name in self.table.column_names if name.endswith(":decoded")]

    def optional(self, column: str) -> npt.NDArray[np.int64]:
        """A writable integer column of ``table``; -1 for unknown values."""
        if column not in self.recorded:
            return np.full(len(self), -1, np.int64)
        return np.array(self.table[column].fill_null(-1).to_numpy(), np.int64)

    def stored(self, columns: Sequence[str]) -> npt.NDArray[np.int64]:
        """Bytes of each row group's ``columns`` in its file; unknown sizes count as 0."""
        return self._sum(columns, "bytes")

    def uncompressed(self, columns: Sequence[str]) -> npt.NDArray[np.int64]:
        """Bytes of each row group's ``columns`` after decompression; unknown sizes count as 0."""
        return self._sum(columns, "uncompressed")

    def _sum(self, columns: Sequence[str], number: str) -> npt.NDArray[np.int64]:
        total = np.zeros(len(self), np.int64)
        for column in columns:
            total += np.maximum(self.optional(f"{column}:{number}"), 0)
        return total

    def decoded(self, number: int, columns: Sequence[str]) -> int:
        """Estimated decoded bytes of columns of row group ``number``; unknown sizes count as stored."""
        total = 0
        for column in columns:
            names = [name for name in (f"{column}:decoded", f"{column}:uncompressed") if name in self.recorded]
            sizes = (self.table[name][number].as_py() for name in names)
            total += next((size for size in sizes if size is not None), 0)
        return total


def _int64(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    found = np.asarray(column.to_numpy(), dtype=np.int64)
    found.flags.writeable = False
    return found


def build_index(
    root: Path,
    paths: Sequence[str],
    jobs: int = 8,
    table_schema: pa.Schema = NO_SCHEMA,
    clashes: dict[str, TypeClash] | None = None,
    units: TimeUnits = NO_UNITS,
    dictionaries: bool = True,
) -> Index:
    """Build the index of the Parquet files ``paths`` below ``root`` by reading their footers.

    If a footer doesn't tell the decoded size of a column, its ``dictionaries`` are examined.
    """
    builder = IndexBuilder(table_schema, clashes, units)
    ordered = sorted(paths)

    def read(path: str) -> tuple[pq.FileMetaData, pa.Schema, IndexColumns]:
        metadata, schema = read_footer(root / path)
        return metadata, schema, index_columns(path, metadata, schema, root / path if dictionaries else None)

    with ForkSafeThreadPool(jobs) as pool:
        for path, found in zip(ordered, pool.map(read, ordered), strict=True):
            builder.add(path, *found)
    return builder.finish(ordered)


def index_columns(path: str, metadata: pq.FileMetaData, schema: pa.Schema, file: Path | None = None) -> IndexColumns:
    """Index columns of a file at ``path`` in its dataset.

    ``file`` is its local path, if its dictionaries can be examined.
    """
    check_names(path, schema)
    try:
        columns: IndexColumns = row_group_columns(metadata, schema)
        with reading(file) if file is not None else nullcontext() as read:
            return columns | decoded_columns(metadata, schema, read=read)
    except (LookupError, ValueError) as error:
        raise ParquetError(
            path,
            f"its footer contradicts itself ({type(error).__name__}: {first_line(error)})",
            "write it again at the source, or move it away",
        ) from error


def with_dictionaries(index: Index, open_file: OpenFile, follow: bool = True, jobs: int = 8) -> Index:
    """Estimate decoded sizes from the dictionaries of 32 row groups.

    ``open_file`` opens a file by its path in the index; for ``follow`` see `decoded_columns`.
    """
    sizes = {f"{name}:{what}": index.optional(f"{name}:{what}") for name in index.varying for what in DECODED}
    unknown = {name: (sizes[f"{name}:decoded"] < 0) & (index.optional(f"{name}:bytes") > 0) for name in index.varying}
    unknown = {name: missing for name, missing in unknown.items() if missing.any()}
    if not unknown:
        return index
    largest = sum(np.where(missing, index.uncompressed([name]), 0) for name, missing in unknown.items())
    chosen = _spread(np.flatnonzero(largest), largest * index.rows, _DICTIONARIES)

    def look(row: int) -> dict[str, list[int | None]]:
        with open_file(index.paths[int(index.numbers("file")[row])]) as (metadata, schema, read):
            names = [field for field in schema if field.name in unknown and unknown[field.name][row]]
            return decoded_columns(metadata, schema, names, read, [int(index.numbers("row_group")[row])], follow)

    with ForkSafeThreadPool(jobs) as pool:
        for row, found in zip(chosen.tolist(), pool.map(look, chosen.tolist()), strict=True):
            for name, (size,) in found.items():
                sizes[name][row] = -1 if size is None else size
    table = index.table
    for name in (f"{column}:{what}" for column in unknown for what in DECODED):
        column = pa.array(sizes[name], mask=sizes[name] < 0)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return replace(index, table=table.combine_chunks())


def local_files(root: Path) -> OpenFile:
    @contextmanager
    def opened(path: str) -> Iterator[tuple[pq.FileMetaData, pa.Schema, Read]]:
        with reading(root / path) as read:
            yield *read_footer(root / path), read

    return opened


def _spread(rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Select ``most`` rows, in ascending order: half of them evenly spaced, half with the largest sizes."""
    if len(rows) <= most:
        return rows
    apart = rows[np.arange(most // 2) * len(rows) // (most // 2)]
    others = np.setdiff1d(rows, apart)
    largest = others[np.argsort(-sizes[others].astype(np.float64), kind="stable")[: most - len(apart)]]
    return np.sort(np.concatenate([apart, largest]))


class IndexBuilder:
    """Collects files in any order and makes an index of them.

    Rows are collected in lists by schema and packed into Arrow tables every few thousand row groups, so there are few
    tables even for many files. ``table_schema`` is the schema of the files' table. ``clashes`` collects errors about
    columns whose types don't fit together; without it they are raised. Columns of times get the ``units``.
    """

    def __init__(
        self,
        table_schema: pa.Schema = NO_SCHEMA,
        clashes: dict[str, TypeClash] | None = None,
        units: TimeUnits = NO_UNITS,
    ) -> None:
        self._table_schema, self._clashes, self._units = table_schema, clashes, units
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._schemas: list[tuple[str, pa.Schema]] = []
        self._schema_of: list[int] = []  # of each file, in the order of their numbers
        self._waiting: list[dict[str, list[Any]]] = []
        self._tables: dict[int, list[pa.Table]] = {}  # by schema

    def add(self, path: str, metadata: pq.FileMetaData, schema: pa.Schema, columns: IndexColumns | None = None) -> None:
        """Add a file by its footer, Arrow schema and `index_columns`; thread-safe."""
        columns = index_columns(path, metadata, schema) if columns is None else columns
        with self._lock:
            self._add(path, metadata, schema, columns)

    def _add(self, path: str, metadata: pq.FileMetaData, schema: pa.Schema, columns: IndexColumns) -> None:
        schema = with_time_zones(schema, self._table_schema)
        self._units.check(path, schema, partial(_int96_columns, metadata, schema))
        position = self._schema_position(path, schema)
        file = self._ids.setdefault(path, len(self._ids))
        if file == len(self._schema_of):
            self._schema_of.append(position)
        waiting = self._waiting[position]
        for name, values in {**columns, "file": [file] * metadata.num_row_groups}.items():
            waiting.setdefault(name, []).extend(values)
        if len(waiting["file"]) >= 4096:
            self._pack(position)

    def finish(self, paths: Sequence[str], previous: Index | None = None) -> Index:
        """Index the sorted ``paths``; those not added come from ``previous``."""
        uniform = self.is_uniform(paths, previous)
        parts, schema, columns = self._gather(paths, previous)
        blocks = merged_parts([part for _, part in parts], len(paths), columns)
        table = pa.concat_tables([columns.empty_table(), *blocks])
        return Index(
            paths=tuple(paths),
            table=table.combine_chunks(),
            data_schema=schema,
            table_schema=self._table_schema,
            uniform=uniform,
            clashes=tuple(dict.fromkeys((self._clashes or {}).values())),
        )

    def is_uniform(self, paths: Sequence[str], previous: Index | None) -> bool:
        """Whether all files that ``finish`` would cover have one schema, as far as known."""
        schemas = [schema for _, schema in self._schemas]
        if previous is not None and not self._ids.keys() >= set(paths):
            if not previous.uniform:
                return False
            schemas.append(previous.data_schema)
        return all(is_alike(schema, schemas[0]) for schema in schemas)

    def write(self, paths: Sequence[str], previous: Index | None, path: Path, root: Path | None = None) -> pa.Schema:
        """Write ``finish``'s result to ``path``, a few files at a time; the caller makes it durable.

        Return the schema of the files. ``root`` is their local directory, if they are present: see `check_values`.
        """
        uniform = self.is_uniform(paths, previous)
        parts, schema, columns = self._gather(paths, previous)
        if root is not None:
            self._check_values(parts, schema, root, paths)
        with _writer(path, paths, columns, _about(uniform, schema, self._table_schema)) as write:
            for block in merged_parts([part for _, part in parts], len(paths), columns):
                write(block)
        return schema

    def check_values(self, paths: Sequence[str], previous: Index | None, root: Path, schema: pa.Schema) -> None:
        """Raise TypeClash about files below ``root`` whose values don't fit the common ``schema``.

        Columns are decoded unless minima and maxima show that all values fit.
        """
        self._check_values(self._parts(paths, previous), schema, root, paths)

    def _parts(self, paths: Sequence[str], previous: Index | None) -> list[tuple[pa.Schema, IndexPart]]:
        """Parts of one schema each; those kept from ``previous`` come last."""
        for position in range(len(self._schemas)):
            self._pack(position)
        position_of = {path: position for position, path in enumerate(paths)}
        added = np.array([position_of.get(path, -1) for path in self._ids], np.int32)
        parts = []
        for position, tables in self._tables.items():
            table = pa.concat_tables(tables, promote_options="default")
            parts.append((self._schemas[position][1], index_part(table, added)))
        if previous is not None:
            kept = [-1 if path in self._ids else position_of.get(path, -1) for path in previous.paths]
            part = index_part(previous.table, np.array(kept, np.int32))
            parts.append((_schema_of_kept(previous, part), part))
        return parts

    def _gather(
        self, paths: Sequence[str], previous: Index | None
    ) -> tuple[list[tuple[pa.Schema, IndexPart]], pa.Schema, pa.Schema]:
        """The parts of the index, the schema of the dataset, and that of the index."""
        if previous is not None and all(path in self._ids for path in paths):
            previous = None
        parts = self._parts(paths, previous)
        if previous is None:
            schema = self._merged(self._schemas)
        else:
            kept, part = parts[-1]
            first = next(path for path in reversed(paths) if path not in self._ids)
            schema = self._merged([(first, kept), *self._schemas], partial(_kept_with_column, previous, part))
        schema = self._without_keys(schema, paths, parts)
        names = dict.fromkeys(name for _, part in parts for name in part.table.column_names)
        names |= dict.fromkeys(f"{name}:{what}" for name in schema.names for what in _ALWAYS)
        columns = pa.schema([*schema, *(pa.field(name, pa.null()) for name in self._clashes or ())])
        return parts, schema, index_schema(names, columns)

    def _without_keys(
        self, schema: pa.Schema, paths: Sequence[str], parts: Sequence[tuple[pa.Schema, IndexPart]]
    ) -> pa.Schema:
        """Drop columns whose names differ from those of partition columns only in case."""
        keys = partition_keys(paths)
        while names := differing_in_case(schema.names, keys):
            column, key = names
            files = (n for of, part in parts if column in of.names for n in part.files.tolist() if n >= 0)
            file = paths[next(files, 0)]
            clash = TypeClash(
                file,
                f"column {column!r} differs only in case from the partition column {key!r} in {keys[key]}",
                "rename one of them, or merge them with 'pqcache sync --ignore-case'",
                column=column,
                files=(file, keys[key]),
                types=(schema.field(column).type, pa.string()),
                others=tuple(name for name in schema.names if name != column),
                names=(column,),
            )
            if self._clashes is None:
                raise clash
            self._clashes[column] = clash
            schema = schema.remove(schema.get_field_index(column))
        return schema

    def _merged(self, named: list[tuple[str, pa.Schema]], owner: Callable[[str], str] | None = None) -> pa.Schema:
        """Merge schemas; a TypeClash names all added files of a conflicting type."""
        try:
            return self._units.of(merge_schemas(named, owner, self._clashes))
        except TypeClash as clash:
            number = next((n for n, (path, _) in enumerate(self._schemas) if path == clash.files[0]), None)
            alike = [path for path, of in zip(self._ids, self._schema_of, strict=True) if of == number]
            clash.files = (*alike, clash.files[-1])
            raise

    def _check_values(
        self, parts: Sequence[tuple[pa.Schema, IndexPart]], schema: pa.Schema, root: Path, paths: Sequence[str]
    ) -> None:
        for field in schema:
            kinds = [(of.field(field.name).type, part) for of, part in parts if field.name in of.names]
            for kind, part in kinds:
                if always_fits(kind, field.type):
                    continue
                doubtful = np.unique(part.files[may_not_fit(part.table, field) & (part.files >= 0)])
                found = {path: unfit_in_file(root / path, [field]) for path in (paths[n] for n in doubtful.tolist())}
                bad = {path: reason for path, reason in found.items() if reason is not None}
                if bad:
                    others = [
                        (t, [paths[n] for n in np.unique(of.files[of.files >= 0]).tolist()])
                        for t, of in kinds
                        if (both := joined_type(kind, t)) is not None and not always_fits(kind, both)
                    ]
                    raise self._value_clash(bad, field, kind, others, root)

    def _value_clash(
        self,
        bad: Mapping[str, str],
        field: pa.Field,
        kind: pa.DataType,
        others: Sequence[tuple[pa.DataType, Sequence[str]]],
        root: Path,
    ) -> TypeClash:
        """The error about ``bad`` files, whose values of type ``kind`` don't fit ``others``."""
        path, reason = next(iter(bad.items()))
        if not others:  # the unit is that of earlier times, or chosen
            advice = "choose a unit that holds all times with --time-units"
            return TypeClash(path, reason, advice, column=field.name, files=(*bad, ""), types=(kind, field.type))
        other, files = others[0]
        if path in self._ids:
            place = next((p for p in files if _type_in(root / p, field.name) == other), files[0])
            clash = TypeClash(path, f"{reason} in {place}", column=field.name, files=(*bad, place), types=(kind, other))
        else:
            added = [p for _, found in others for p in found if p in self._ids]
            reason = f"column {field.name!r} is {other}, beside {path}, where {reason}"
            clash = TypeClash(added[0], reason, column=field.name, files=(*added, path), types=(other, kind))
        clash.others = tuple(dict.fromkeys(n for _, of in self._schemas for n in of.names if n != field.name))
        return clash

    def _schema_position(self, path: str, schema: pa.Schema) -> int:
        for position, (_, known) in enumerate(self._schemas):
            if is_alike(known, schema):
                return position
        self._schemas.append((path, schema))
        self._waiting.append({})
        return len(self._schemas) - 1

    def _pack(self, position: int) -> None:
        if self._waiting[position].get("file"):
            table = columns_table(self._waiting[position], self._schemas[position][1])
            self._tables.setdefault(position, []).append(table)
            self._waiting[position] = {}


def _schema_of_kept(previous: Index, part: IndexPart) -> pa.Schema:
    here = part.files >= 0
    if not here.any():
        return previous.data_schema
    fields = []
    for field in previous.data_schema:
        sizes = previous.table[f"{field.name}:bytes"]
        if not sizes.null_count or (sizes.is_valid().to_numpy() & here).any():
            fields.append(field)
    return pa.schema(fields, previous.data_schema.metadata)


def may_not_fit(table: pa.Table, field: pa.Field) -> npt.NDArray[np.bool_]:
    """For each row group, whether its statistics allow a value that doesn't fit ``field``."""
    size, low, high = (f"{field.name}:{what}" for what in ("bytes", "min", "max"))
    nulls = np.nan_to_num(table[f"{field.name}:nulls"].to_numpy(), nan=-1)
    all_null = nulls == table["rows"].to_numpy()
    open_groups = np.asarray(table[size].is_valid(), np.bool_) & ~all_null
    if low not in table.column_names:
        return np.asarray(open_groups)
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    ends = [table[name] for name in (low, high)]
    try:
        known = [np.asarray(cast_exactly(end, kind).is_valid(), np.bool_) for end in ends]
        fits = known[0] & known[1]
    except pa.ArrowException:
        fits = np.array([all(_fits(value, kind) for value in pair) for pair in zip(*ends, strict=True)], np.bool_)
    return np.asarray(open_groups & ~fits)


def _fits(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        return bool(value.is_valid and value.cast(kind).is_valid)
    except pa.ArrowException:
        return False


def unfit_in_file(path: Path, fields: Sequence[pa.Field]) -> str | None:
    """The first value in a file that doesn't fit the joined types in ``fields``."""
    try:
        with pq.ParquetFile(path) as file:
            known = file.schema_arrow
            for field in fields:
                if field.name not in known.names or always_fits(known.field(field.name).type, field.type):
                    continue
                for batch in file.iter_batches(_BATCH, columns=[field.name], use_threads=False):
                    if (reason := unfit_reason(field.name, batch.column(0), field.type)) is not None:
                        return reason
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be decoded ({first_line(error)})", "write it again at the source") from error
    return None


def doubtful_columns(index: Index) -> dict[int, list[pa.Field]]:
    """By file, the columns whose statistics allow a value that doesn't fit the joined type."""
    found: dict[int, list[pa.Field]] = {}
    for column in index.data_schema if not index.uniform else ():
        if any(map(_may_be_rounded, leaves_in(column.type))):
            for file in np.unique(index.numbers("file")[may_not_fit(index.table, column)]).tolist():
                found.setdefault(file, []).append(column)
    return found


def _may_be_rounded(kind: pa.DataType) -> bool:
    return not all(always_fits(other, kind) for other in (pa.int64(), pa.timestamp("s"), pa.duration("s")))


def _int96_columns(metadata: pq.FileMetaData, schema: pa.Schema) -> set[str]:
    if not metadata.num_row_groups:
        return set()
    first, names = metadata.row_group(0), top_level_names(metadata, schema)
    return {name for leaf, name in enumerate(names) if first.column(leaf).physical_type == "INT96"}


def _type_in(path: Path, name: str) -> pa.DataType | None:
    schema = read_footer(path)[1]
    return schema.field(name).type if name in schema.names else None


def _kept_with_column(previous: Index, part: IndexPart, column: str) -> str:
    here = previous.table[f"{column}:bytes"].is_valid().to_numpy() & (part.files >= 0)
    return previous.paths[int(previous.numbers("file")[int(np.argmax(here))])]


def write_index(index: Index, path: Path) -> None:
    """Write an index; the caller makes it durable."""
    about = _about(index.uniform, index.data_schema, index.table_schema)
    with _writer(path, index.paths, index.table.schema, about) as write:
        for first in range(0, len(index), _BATCH):
            write(index.table.slice(first, _BATCH))


def _about(uniform: bool, schema: pa.Schema, table_schema: pa.Schema) -> dict[str, str | bytes]:
    return {
        "pqcache": json.dumps({"format": FORMAT, "uniform": uniform}),
        "pqcache.schema": schema.serialize().to_pybytes(),
        "pqcache.table_schema": table_schema.serialize().to_pybytes(),
    }


@contextmanager
def _writer(
    path: Path, paths: Sequence[str], columns: pa.Schema, about: Mapping[str, str | bytes]
) -> Iterator[Callable[[pa.Table], None]]:
    """Yields a function that appends rows; file numbers become codes into a dictionary of the paths."""
    names = pa.array(paths, pa.string())
    field = pa.field("file", pa.dictionary(pa.int32(), pa.string()))
    schema = columns.set(0, field).with_metadata(about)
    written = 0

    def write(table: pa.Table) -> None:
        nonlocal written
        codes = pa.DictionaryArray.from_arrays(table["file"].combine_chunks(), names)
        writer.write_table(table.set_column(0, field, codes).combine_chunks())
        written += table.num_rows

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        yield write
        if not written:  # a table without rows makes no batch, and only batches write the dictionary
            codes = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), names)
            empty = [pa.array([], column.type) for column in columns]
            writer.write_batch(pa.RecordBatch.from_arrays([codes, *empty[1:]], schema=schema))


def read_index(path: Path) -> Index:
    """Memory-map an index."""
    try:
        check_regular(path)
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
            dictionary = reader.get_batch(0).column("file").dictionary  # the table has no chunk where it has no row
        metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
        about = json.loads(metadata.get(b"pqcache", b"{}"))
        if (found := about.get("format")) != FORMAT:
            newer = isinstance(found, int) and found > FORMAT
            advice = "upgrade pqcache, or sync into a new directory" if newer else "sync into a new directory"
            raise CacheError(path, f"written in format {found}, this pqcache reads format {FORMAT}", advice)
        schema = pa.ipc.read_schema(pa.py_buffer(metadata[b"pqcache.schema"]))
        table_schema = pa.ipc.read_schema(pa.py_buffer(metadata[b"pqcache.table_schema"]))
        wrong = [field.name for field in list(BASE)[1:] if not table.schema.field(field.name).equals(field)]
        wrong += [field.name for field in table.schema if field.name.endswith(_NUMBERS) and field.type != pa.int64()]
        needed = [f"{name}:{what}" for name in schema.names for what in _ALWAYS]
        wrong += sorted(set(needed).difference(table.column_names))
        if wrong or any(table[name].null_count for name in _PLACES):
            raise TypeError(f"columns of it are missing or of other types: {', '.join(wrong or _PLACES)}")
        codes = pa.chunked_array([chunk.indices for chunk in table["file"].chunks], pa.int32())
        paths = tuple(dictionary.to_pylist())
    except PermissionError as error:
        raise CacheError(path, "permission denied", "make it readable for this user") from error
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        raise DamagedError(
            path, f"the row-group index cannot be read ({error})", "the next sync builds it again"
        ) from error
    numbered = table.set_column(0, BASE.field("file"), codes).replace_schema_metadata(None)
    return Index(
        paths=paths,
        table=numbered,
        data_schema=schema,
        table_schema=table_schema,
        uniform=about.get("uniform") is True,
    )


def with_columns(table: pa.Table, columns: pa.Schema) -> pa.Table:
    """Cast an index to other columns; minima and maxima that don't fit their new type become unknown."""
    arrays: dict[str, pa.Array | pa.ChunkedArray | None] = {}
    unknown: set[str] = set()
    for field in columns:
        found = table.schema.get_field_index(field.name)
        array = table.column(found) if found >= 0 else None
        try:
            arrays[field.name] = array if array is None or array.type == field.type else array.cast(field.type)
        except pa.ArrowException as error:
            log.debug("%s does not fit %s, and prunes nothing: %s", field.name, field.type, error)
            arrays[field.name] = None
            unknown.add(field.name.rpartition(":")[0])
    for name, array in arrays.items():
        column, _, what = name.rpartition(":")
        if array is None or (column in unknown and what in EXTREMES):
            arrays[name] = pa.nulls(table.num_rows, columns.field(name).type)
    return pa.table([arrays[name] for name in columns.names], schema=columns)


@dataclass(frozen=True)
class IndexPart:
    """Rows of an index, and the present position of each row's file in path order, -1 if it is gone."""

    table: pa.Table
    files: npt.NDArray[np.int32]


def index_part(table: pa.Table, position_of: npt.NDArray[np.int32]) -> IndexPart:
    return IndexPart(table, position_of[table["file"].to_numpy()])


def merged_parts(parts: Sequence[IndexPart], files: int, columns: pa.Schema) -> Iterator[pa.Table]:
    """Yield rows in the order of files and row groups, a few thousand files at a time."""
    for first in range(0, files, _BATCH):
        pieces = [columns.empty_table()]
        for part in parts:
            inside = np.nonzero((part.files >= first) & (part.files < first + _BATCH))[0]
            if len(inside):
                low, high = int(inside[0]), int(inside[-1]) + 1
                piece = part.table.slice(low, high - low)
                files = pa.py_buffer(part.files[inside])
                numbers = pa.Array.from_buffers(pa.int32(), len(inside), [None, files])
                piece = rows_at(piece, inside - low).set_column(0, BASE.field("file"), numbers)
                pieces.append(with_columns(piece, columns))
        block = pa.concat_tables(pieces)
        order = np.lexsort((block["row_group"].to_numpy(), block["file"].to_numpy()))
        yield rows_at(block, order).combine_chunks()
