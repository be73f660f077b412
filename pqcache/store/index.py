"""The row-group index: one line per row group of a snapshot.

Stored as ``_pqcache/row_groups.arrow`` (Arrow IPC, memory-mapped, so opening it takes milliseconds whatever
its size). Its columns:

==================== ========= ==========================================================================
file                 int32     position of the file in path order
row_group            int32     position of the row group in its file
rows                 int64     number of rows
offset               int64     where its first page begins in the file, in bytes
bytes                int64     compressed size on disk: what counts against ``--row-group-size``
uncompressed         int64     size of its pages after decompression
``C:bytes``          int64     the same two for each top-level column ``C`` of the schema
``C:uncompressed``   int64
``C:nulls``          int64     number of nulls, where the file says so
``C:min``, ``C:max`` type of C from the file's statistics; only for flat columns, null where unknown
==================== ========= ==========================================================================

The schema's metadata holds the paths, the dataset's Arrow schema and the partition columns. Partition values
are not repeated: they are in the path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import CacheError, ParquetError
from pqcache.store.hive import parent, partition_table

FORMAT = 1
_MAX_STATISTIC = 256  # bytes; longer strings prune nothing that a prefix would not
_BASE = pa.schema(
    [
        ("file", pa.int32()),
        ("row_group", pa.int32()),
        ("rows", pa.int64()),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("uncompressed", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Index:
    """Every row group of a dataset, in path order and then in file order.

    ``table`` has one row per row group; see the module's docstring for its columns. ``data_schema`` is the
    schema of the columns in the files; ``partitions`` has one row per file and a column per partition column.
    """

    paths: tuple[str, ...]
    table: pa.Table
    data_schema: pa.Schema
    partitions: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def schema(self) -> pa.Schema:
        """The dataset's columns: those in the files, then the partition columns, whose path value wins."""
        fields = [f for f in self.data_schema if f.name not in self.partitions.column_names]
        return pa.schema([*fields, *self.partitions.schema], self.data_schema.metadata)

    def numbers(self, column: str) -> npt.NDArray[np.int64]:
        """Return an integer column of ``table`` as an array of int64, one item per row group."""
        return np.asarray(self.table[column].to_numpy(), dtype=np.int64)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Rows of each row group."""
        return self.numbers("rows")

    def uncompressed(self, columns: Sequence[str] | None = None) -> npt.NDArray[np.int64]:
        """Return each row group's size in memory after decompression, in bytes, for the named columns."""
        if columns is None:
            return self.numbers("uncompressed")
        names = [f"{name}:uncompressed" for name in columns]
        present = [name for name in names if name in self.table.column_names]
        total = np.zeros(len(self), np.int64)
        for name in present:
            total += np.nan_to_num(self.table[name].to_numpy()).astype(np.int64)
        return total


def row_group_columns(metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, list[Any]]:
    """Return the index columns of one file's row groups, without ``file``.

    ``schema`` is the file's Arrow schema.
    """
    names = [field.name for field in schema]
    top = [metadata.schema.column(i).path.split(".")[0] for i in range(metadata.num_columns)]
    if any("." in name for name in names):
        top = _top_level_names(metadata, schema)
    flat = {f.name for f in schema if not pa.types.is_nested(f.type) and _has_order(f.type)}
    columns: dict[str, list[Any]] = {name: [] for name in _BASE.names[1:]}
    for name in names:
        for what in ("bytes", "uncompressed", "nulls"):
            columns[f"{name}:{what}"] = []
        if name in flat:
            columns[f"{name}:min"], columns[f"{name}:max"] = [], []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        chunk_bytes = dict.fromkeys(names, 0)
        chunk_uncompressed = dict.fromkeys(names, 0)
        nulls: dict[str, int | None] = dict.fromkeys(names)
        extremes: dict[str, tuple[Any, Any]] = dict.fromkeys(flat, (None, None))
        start = None
        for c in range(metadata.num_columns):
            chunk = group.column(c)
            name = top[c]
            chunk_bytes[name] += chunk.total_compressed_size
            chunk_uncompressed[name] += chunk.total_uncompressed_size
            first = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                first = min(first, chunk.dictionary_page_offset)
            start = first if start is None else min(start, first)
            statistics = chunk.statistics if name in flat else None
            if statistics is not None:
                if statistics.has_null_count:
                    nulls[name] = statistics.null_count
                extremes[name] = _extremes(statistics)
        columns["row_group"].append(g)
        columns["rows"].append(group.num_rows)
        columns["offset"].append(start or 0)
        columns["bytes"].append(sum(chunk_bytes.values()))
        columns["uncompressed"].append(sum(chunk_uncompressed.values()))
        for name in names:
            columns[f"{name}:bytes"].append(chunk_bytes[name])
            columns[f"{name}:uncompressed"].append(chunk_uncompressed[name])
            columns[f"{name}:nulls"].append(nulls[name])
            if name in flat:
                low, high = extremes[name]
                columns[f"{name}:min"].append(low)
                columns[f"{name}:max"].append(high)
    return columns


def file_table(metadata: pq.FileMetaData, schema: pa.Schema, file: int = 0) -> pa.Table:
    """Return the index rows of one file as a table; ``file`` is its position in path order."""
    columns = row_group_columns(metadata, schema)
    fields, arrays = [], []
    for name, values in {"file": [file] * metadata.num_row_groups, **columns}.items():
        kind = _column_type(name, schema)
        fields.append(pa.field(name, kind))
        arrays.append(_array(values, kind))
    return pa.table(arrays, schema=pa.schema(fields))


def read_footer(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    """Return a local file's footer and Arrow schema; what is not Parquet raises ParquetError by name."""
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise not_parquet(str(path), error) from error


def not_parquet(name: str, error: BaseException) -> ParquetError:
    """Return the error for a file whose footer cannot be read."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ParquetError(
        f"{name}: not a Parquet file, or truncated ({reason}); write it again at the source, or move it away"
    )


def build_index(root: Path, paths: Sequence[str], jobs: int = 8) -> Index:
    """Build the index of the Parquet files ``paths`` below ``root`` by reading their footers."""
    ordered = sorted(paths)
    with ThreadPoolExecutor(jobs) as pool:
        footers = pool.map(lambda path: read_footer(root / path), ordered)
        tables = []
        schemas: dict[str, tuple[str, pa.Schema]] = {}
        for position, (path, (metadata, schema)) in enumerate(zip(ordered, footers, strict=True)):
            tables.append(file_table(metadata, schema, position))
            schemas.setdefault(schema.remove_metadata().to_string(), (path, schema))
    return assemble(ordered, tables, schemas.values())


def assemble(
    paths: Sequence[str], tables: Sequence[pa.Table], schemas: Iterable[tuple[str, pa.Schema]]
) -> Index:
    """Join per-file tables (whose ``file`` is already right) into an index.

    ``schemas`` names one file for each distinct schema among the files.
    """
    data_schema = unify(schemas)
    empty = pa.table({f.name: pa.array([], f.type) for f in _BASE}, schema=_BASE)
    try:
        table = pa.concat_tables([empty, *tables], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise ParquetError(f"statistics of two files do not fit together: {error}") from error
    partitions = partition_table([parent(path) for path in paths])
    return Index(tuple(paths), table.combine_chunks(), data_schema, partitions)


def unify(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return one schema for all files; types that do not widen without loss raise ParquetError by file."""
    result: pa.Schema | None = None
    first = ""
    for path, schema in schemas:
        if result is None:
            result, first = schema, path
            continue
        try:
            result = pa.unify_schemas([result, schema], promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise ParquetError(
                f"{path}: its schema does not fit {first} ({error}); "
                "rewrite one of them with the other's types"
            ) from error
    return result if result is not None else pa.schema([])


def write_index(index: Index, path: Path) -> None:
    """Write ``index`` to ``path``; the caller makes it durable."""
    about = {
        "pqcache": json.dumps({"format": FORMAT, "paths": list(index.paths)}),
        "pqcache.schema": index.data_schema.serialize().to_pybytes(),
    }
    with pa.OSFile(str(path), "wb") as sink:
        table = index.table.replace_schema_metadata(about)
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=65_536)


def read_index(path: Path) -> Index:
    """Open an index by memory-mapping it."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
        about = json.loads(metadata.get(b"pqcache", b"{}"))
        if about.get("format") != FORMAT:
            raise CacheError(
                f"{path}: written in format {about.get('format')}, this pqcache reads format {FORMAT}; "
                "upgrade pqcache, or sync into a new directory"
            )
        schema = pa.ipc.read_schema(pa.py_buffer(metadata[b"pqcache.schema"]))
    except (pa.ArrowInvalid, OSError, ValueError, KeyError) as error:
        raise CacheError(
            f"{path}: the row-group index cannot be read ({error}); sync again to rebuild it"
        ) from error
    paths = tuple(about["paths"])
    partitions = partition_table([parent(p) for p in paths])
    return Index(paths, table.replace_schema_metadata(None), schema, partitions)


def rows_by_file(index: Index) -> Iterator[tuple[str, pa.Table]]:
    """Yield each file's path and its rows of the index, zero-copy."""
    files = index.numbers("file")
    starts = np.searchsorted(files, np.arange(len(index.paths)))
    ends = np.searchsorted(files, np.arange(len(index.paths)), side="right")
    for position, path in enumerate(index.paths):
        start, end = int(starts[position]), int(ends[position])
        yield path, index.table.slice(start, end - start)


def _top_level_names(metadata: pq.FileMetaData, schema: pa.Schema) -> list[str]:
    """Return each leaf's top-level column where names hold dots: leaves come in schema order."""
    names: list[str] = []
    for field in schema:
        leaves = sum(1 for _ in _leaves(field.type))
        names.extend([field.name] * leaves)
    if len(names) != metadata.num_columns:
        return [metadata.schema.column(i).path.split(".")[0] for i in range(metadata.num_columns)]
    return names


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            yield from _leaves(kind.field(i).type)
    elif pa.types.is_map(kind):
        yield from _leaves(kind.key_type)
        yield from _leaves(kind.item_type)
    elif pa.types.is_nested(kind):
        yield from _leaves(kind.value_type)
    else:
        yield kind


def _has_order(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_temporal(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    ) and not pa.types.is_duration(kind)


def _extremes(statistics: pq.Statistics) -> tuple[Any, Any]:
    if not statistics.has_min_max:
        return None, None
    try:
        low, high = statistics.min, statistics.max
    except (ValueError, OverflowError, pa.ArrowException):  # a date or time that Python's types cannot hold
        return None, None
    if any(isinstance(v, str | bytes) and len(v) > _MAX_STATISTIC for v in (low, high)):
        return None, None
    if low != low or high != high:  # NaN says nothing
        return None, None
    return low, high


def _column_type(name: str, schema: pa.Schema) -> pa.DataType:
    if name in _BASE.names:
        return _BASE.field(name).type
    column, _, what = name.rpartition(":")
    if what not in ("min", "max"):
        return pa.int64()
    kind = schema.field(column).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.nulls(len(values), kind)  # statistics in a type of their own (old writers): prune nothing
