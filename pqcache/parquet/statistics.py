"""Statistics of row groups from Parquet footers, as columns of the row-group index.

**Minima and maxima.** Statistics have two pairs of fields. ``column_orders`` defines the order of ``min_value`` and
``max_value``; without it, they mean nothing. ``min`` and ``max`` are deprecated: writers compared binary values and
decimals byte by byte as signed numbers, unsigned numbers as signed ones, and parquet-mr before 1.8 got those of binary
values wrong altogether (PARQUET-251). pyarrow returns either pair without saying which, and rejects only known bugs.
Here the deprecated pair is used for signed numbers only.

**Nulls.** Arrow before 5.0 did not count nulls in dictionaries.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.arrow import leaves_in, top_level_names, without_views
from pqcache.parquet.footer import MAGIC
from pqcache.parquet.thrift import (
    COLUMN_ORDERS,
    LIST,
    STRUCT,
    items_at,
    key,
    put_varint,
    skip_value,
    walk_struct,
)

log = logging.getLogger("pqcache.parquet")

_MAX_STATISTIC = 256  # bytes; longer strings prune no better
EXTREMES = ("min", "max", "field_min", "field_max")
BASE = pa.schema(
    [
        ("file", pa.int32()),
        ("row_group", pa.int32()),
        ("rows", pa.int64()),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("uncompressed", pa.int64()),
        ("offset_index", pa.bool_()),
    ]
)


def row_group_columns(metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, list[Any]]:
    """The index columns of a file's row groups, except ``file``; ``schema`` is the file's."""
    names = [field.name for field in schema]
    top = top_level_names(metadata, schema)
    plain = {f.name for f in schema if not pa.types.is_nested(f.type)}
    flat = {f.name: f.type for f in schema if f.name in plain and _has_order(f.type)}
    fields = _struct_fields(metadata, schema) if metadata.num_row_groups else {}
    ordered = type_ordered(metadata) if (flat or fields) and metadata.num_row_groups else []
    lists = {f.name for f in schema if _is_flat_list(f.type)}
    columns: dict[str, list[Any]] = {name: [] for name in (*BASE.names[1:], *(f"{name}:values" for name in lists))}
    for name in names:
        for what in ("bytes", "uncompressed", "codec", "nulls"):
            columns[f"{name}:{what}"] = []
        if name in flat:
            columns[f"{name}:min"], columns[f"{name}:max"] = [], []
    columns |= _field_columns(metadata, fields, ordered)
    dictionaries = counts_dictionaries(metadata.created_by)
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        chunk_bytes = dict.fromkeys(names, 0)
        chunk_uncompressed = dict.fromkeys(names, 0)
        nulls: dict[str, int | None] = dict.fromkeys(names)
        extremes: dict[str, tuple[Any, Any]] = dict.fromkeys(flat, (None, None))
        start, paged = None, True
        codecs: dict[str, set[str]] = {name: set() for name in names}
        for c in range(metadata.num_columns):
            chunk = group.column(c)
            name = top[c]
            chunk_bytes[name] += chunk.total_compressed_size
            chunk_uncompressed[name] += chunk.total_uncompressed_size
            if name in lists:
                columns[f"{name}:values"].append(None if null_count(chunk, dictionaries) else chunk.num_values)
            codecs[name].add(chunk.compression)
            paged = paged and chunk.has_offset_index
            first = first_page(chunk)
            start = first if start is None else min(start, first)
            if name in plain and (statistics := chunk.statistics) is not None:
                nulls[name] = null_count(chunk, dictionaries)
                if name in flat:
                    extremes[name] = _extremes(statistics, is_sound(chunk, flat[name], ordered[c]))
        columns["row_group"].append(g)
        columns["rows"].append(group.num_rows)
        columns["offset"].append(start or 0)
        columns["bytes"].append(sum(chunk_bytes.values()))
        columns["uncompressed"].append(sum(chunk_uncompressed.values()))
        columns["offset_index"].append(paged)
        for name in names:
            columns[f"{name}:bytes"].append(chunk_bytes[name])
            columns[f"{name}:uncompressed"].append(chunk_uncompressed[name])
            columns[f"{name}:codec"].append("+".join(sorted(codecs[name])))
            columns[f"{name}:nulls"].append(nulls[name])
        for name, (low, high) in extremes.items():
            columns[f"{name}:min"].append(low)
            columns[f"{name}:max"].append(high)
    return columns


def first_page(chunk: pq.ColumnChunkMetaData) -> int:
    offset = int(chunk.data_page_offset)
    return min(offset, chunk.dictionary_page_offset or offset) if chunk.has_dictionary_page else offset


def columns_table(columns: dict[str, list[Any]], schema: pa.Schema) -> pa.Table:
    typed = index_schema(columns, schema)
    return pa.table([_array(columns[field.name], field.type) for field in typed], schema=typed)


def index_schema(names: Iterable[str], schema: pa.Schema) -> pa.Schema:
    """Types of the index columns ``names``, given the files' ``schema``."""
    leaves = (leaf for field in schema for leaf in _leaves((field.name,), field.type))
    fields = {field_key(path): kind for path, kind in leaves if len(path) > 1}
    columns = {field.name: field.type for field in schema}
    found = {name: _column_type(name, columns, fields) for name in names if name not in BASE.names}
    return pa.schema([*BASE, *((name, kind) for name, kind in found.items() if kind is not None)])


def field_key(path: Sequence[str]) -> str:
    """The index's name for a field of a struct: names joined by dots, quoted if they contain dots.

    >>> field_key(["user", "age"]), field_key(["user", "e.mail"])
    ('user.age', 'user."e.mail"')
    """
    return ".".join(json.dumps(name) if "." in name or '"' in name else name for name in path)


def _struct_fields(metadata: pq.FileMetaData, schema: pa.Schema) -> dict[int, tuple[str, pa.DataType]]:
    """Key and type of each ordered leaf of a struct outside lists and maps.

    Their null counts aren't used, as not every writer counts null structs.
    """
    if not any(pa.types.is_struct(field.type) for field in schema):
        return {}
    leaves = [leaf for field in schema for leaf in _leaves((field.name,), field.type)]
    found = {number: (path, kind) for number, (path, kind) in enumerate(leaves) if len(path) > 1 and _has_order(kind)}
    first = metadata.row_group(0)
    if len(leaves) != metadata.num_columns or any(
        first.column(leaf).path_in_schema != ".".join(path) for leaf, (path, _) in found.items()
    ):
        log.debug("minima and maxima of fields of structs are not used: an Arrow type is stored as several leaves")
        return {}
    times = Counter(path for path, _ in found.values())
    return {leaf: (field_key(path), kind) for leaf, (path, kind) in found.items() if times[path] == 1}


def _field_columns(
    metadata: pq.FileMetaData, fields: Mapping[int, tuple[str, pa.DataType]], ordered: Sequence[bool]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for leaf, (name, kind) in fields.items():
        chunks = [metadata.row_group(g).column(leaf) for g in range(metadata.num_row_groups)]
        found = [_extremes(chunk.statistics, is_sound(chunk, kind, ordered[leaf])) for chunk in chunks]
        columns[f"{name}:field_min"], columns[f"{name}:field_max"] = (list(side) for side in zip(*found, strict=True))
    return columns


def _leaves(path: tuple[str, ...], kind: pa.DataType) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Paths are empty inside lists and maps."""
    if pa.types.is_struct(kind):
        for field in kind.fields:
            yield from _leaves((*path, field.name), field.type)
    elif pa.types.is_nested(kind):
        yield from (((), leaf) for leaf in leaves_in(kind))
    else:
        yield path, kind


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
        or pa.types.is_string_view(kind)
    ) and not pa.types.is_duration(kind)


def _is_flat_list(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and not pa.types.is_nested(kind.value_type)


def _extremes(statistics: pq.Statistics | None, sound: bool) -> tuple[Any, Any]:
    if statistics is None or not (statistics.has_min_max and sound):
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


def _column_type(
    name: str, columns: Mapping[str, pa.DataType], fields: Mapping[str, pa.DataType]
) -> pa.DataType | None:
    """None if the column is gone, or for the minima and maxima of a type without an order."""
    column, _, what = name.rpartition(":")
    kinds = fields if what in ("field_min", "field_max") else columns
    if column not in kinds:
        return None
    if what == "codec":
        return pa.string()
    if what not in EXTREMES:
        return pa.int64()
    kind = kinds[column]
    return without_views(kind.value_type if pa.types.is_dictionary(kind) else kind) if _has_order(kind) else None


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        log.debug("minima or maxima that are not %s prune nothing: %s", kind, error)  # as old writers have them
        return pa.nulls(len(values), kind)


# ---- Which statistics can be trusted

_TYPE_DEFINED = b"\x1c\0\0"  # a ColumnOrder: the order that the column's type has
_SIGNED = frozenset(("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE"))
_ARROW = re.compile(r"parquet-cpp(-arrow)? version (\d+)")
_COUNTS_DICTIONARIES = 5  # Arrow's first version that does (ARROW-12513)


def serialized(metadata: pq.FileMetaData) -> bytes:
    """The footer that pyarrow parsed, with fields that it doesn't expose."""
    sink = pa.BufferOutputStream()
    metadata.write_metadata_file(sink)
    return bytes(sink.getvalue()[len(MAGIC) : -8].to_pybytes())


def type_ordered(metadata: pq.FileMetaData) -> Sequence[bool]:
    """Whether the minima and maxima of each leaf are in the order of its type.

    pyarrow doesn't expose the column orders, which are at the end of the footer.
    """
    data, leaves = serialized(metadata), metadata.num_columns
    size = bytearray(((min(leaves, 15) << 4) | STRUCT,))
    if leaves >= 15:
        put_varint(size, leaves)
    if data.endswith(bytes(size) + _TYPE_DEFINED * leaves + b"\0"):  # as nearly all files have it
        return [True] * leaves
    found: list[bool] = []
    walk_struct(data, 0, {key(COLUMN_ORDERS, LIST): _orders}, found)
    return found if len(found) == leaves else [False] * leaves


def _orders(data: bytes, at: int, found: list[bool]) -> int:
    count, kind, at = items_at(data, at)
    for _ in range(count):
        end = skip_value(data, at, kind, 0)
        found.append(data[at:end] == _TYPE_DEFINED)
        at = end
    return at


def is_sound(chunk: pq.ColumnChunkMetaData, kind: pa.DataType, ordered: bool) -> bool:
    """Whether pyarrow's minimum and maximum of a chunk can be trusted.

    ``kind`` is the Arrow type of the column, ``ordered`` its entry in `type_ordered`.
    """
    if ordered:
        return not pa.types.is_timestamp(kind) or bool(chunk.physical_type != "INT96")  # which has no order
    return chunk.physical_type in _SIGNED and not pa.types.is_unsigned_integer(kind)


def counts_dictionaries(created_by: str | None) -> bool:
    """Whether a writer counts the nulls of dictionary columns; Arrow before 5.0 wrote 0.

    >>> counts_dictionaries("parquet-cpp-arrow version 4.0.1"), counts_dictionaries("parquet-mr version 1.12.0")
    (False, True)
    """
    match = _ARROW.match(created_by or "")
    if match is None:
        return True
    return match[1] is not None and int(match[2]) >= _COUNTS_DICTIONARIES  # older ones were parquet-cpp 1.5


def stated_nulls(chunk: pq.ColumnChunkMetaData) -> int | None:
    """The null count in a chunk's statistics; None without one."""
    statistics = chunk.statistics
    return int(statistics.null_count) if statistics is not None and statistics.has_null_count else None


def null_count(chunk: pq.ColumnChunkMetaData, dictionaries: bool) -> int | None:
    """The nulls of a chunk, None if unknown; ``dictionaries`` comes from `counts_dictionaries`."""
    nulls = stated_nulls(chunk)
    doubtful = nulls == 0 and not dictionaries and chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page
    return None if doubtful else nulls
