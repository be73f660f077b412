"""Some columns and row groups of a Parquet file as a file of their own, worked out on footers alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from pqcache.errors import MALFORMED, ParquetError
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.footer import MAGIC
from pqcache.parquet.footer.thrift import BINARY, I16, I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.key_values import ARROW_SCHEMA, SPARK, decode_schema, encode_schema

# PARQUET-816: they left the dictionary's page header out of a chunk's size, so readers read a bit more.
_SHORT_CHUNKS = re.compile(rb"parquet-mr version 1\.([01]\b|2\.[0-8]\b)")
_SHORT_BY = 100


class ByteRange(NamedTuple):
    """Bytes of a file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Projection:
    """Some columns and row groups of a file as a file of their own.

    Attributes:
        ranges: the bytes to copy from the file, in order.
        size: the offset of the new file's footer.
        fields: the new file's footer.
    """

    ranges: tuple[ByteRange, ...]
    size: int
    fields: Struct


def project(
    fields: Struct,
    wanted: Sequence[bool],
    groups: Sequence[int],
    limit: int,
    name: str,
    start: int = len(MAGIC),
    ordinal: int = 0,
) -> Projection:
    """Return the ``wanted`` top-level columns of the row groups ``groups`` as a file of their own.

    Args:
        fields: the file's footer.
        wanted: whether to keep each top-level column.
        groups: positions of the row groups to keep, ascending.
        limit: the offset of the footer, which no page may pass.
        name: the file to blame.
        start: the offset of the first page in the new file.
        ordinal: the position of the first row group in the new file.

    Raises:
        ParquetError: the footer contradicts itself.
    """
    schema = footer.schema_of(fields, name)
    all_leaves = footer.leaves_of(schema, name)
    columns = footer.trees(schema)
    elements: list[Struct] = [schema[0] | {5: (I32, sum(wanted))}]
    for keep, column in zip(wanted, columns, strict=False):
        elements += column if keep else []
    leaves = [number for number, leaf in enumerate(all_leaves) if wanted[leaf.column]]
    extra = bytes_after_chunks(_bytes(fields, 6) or b"")
    all_groups = footer.row_groups_of(fields, name)
    ranges: list[ByteRange] = []
    placed: list[bytes] = []
    position = start
    rows = 0
    for number in groups:
        if len(footer.columns_of(all_groups[number], name)) != len(all_leaves):
            raise _damaged(name, f"row group {number} has not one chunk for each column")
        group, more = _place_row_group(all_groups[number], leaves, position, ordinal + len(placed), limit, extra, name)
        rows += number_of(group, 3, name)
        placed.append(thrift.encode(group))
        ranges += more
        position += sum(byte_range.length for byte_range in more)
        if position - start > limit + extra * len(ranges):
            raise _damaged(name, "its column chunks overlap")
    template = with_orders_of(fields, leaves, len(all_leaves))
    keyvalues = _keyvalues(fields, wanted, [_bytes(column[0], 4) or b"" for column in columns])
    return Projection(tuple(ranges), position, footer.make_footer(template, elements, placed, rows, keyvalues))


def bytes_after_chunks(created_by: bytes) -> int:
    """How many bytes past the end of a chunk readers also read, for files of this writer."""
    return _SHORT_BY if _SHORT_CHUNKS.match(created_by) else 0


def with_orders_of(fields: Struct, leaves: Sequence[int], count: int) -> Struct:
    """Keep the column_orders of these leaves, or none unless there are ``count``."""
    orders = _structs(fields, 7)
    found = {field: entry for field, entry in fields.items() if field != 7}
    return found | ({7: (LIST, Items(STRUCT, [orders[leaf] for leaf in leaves]))} if len(orders) == count else {})


def _place_row_group(
    group: Struct, leaves: Sequence[int], position: int, ordinal: int, limit: int, extra: int, name: str
) -> tuple[Struct, list[ByteRange]]:
    """Move the pages of some leaves to ``position``; also return where they are now."""
    chunks, metas = group[1][1].values, footer.columns_of(group, name)
    ranges = {leaf: _byte_range(metas[leaf], limit, extra, name) for leaf in leaves}
    ordered = sorted(leaves, key=lambda leaf: ranges[leaf].offset)
    moved: dict[int, Struct] = {}
    at = position
    for leaf in ordered:
        moved[leaf] = footer.shift_chunk(chunks[leaf], at - ranges[leaf].offset, None, name)
        at += ranges[leaf].length
    result = with_chunks(group, leaves, [moved[leaf] for leaf in leaves], name)
    if 5 in result:
        result[5] = (I64, position)
    if 6 in result:
        result[6] = (I64, at - position)
    result = footer.with_ordinal(result, ordinal)
    return dict(sorted(result.items())), [ranges[leaf] for leaf in ordered]


def _byte_range(meta: Struct, limit: int, extra: int, name: str) -> ByteRange:
    """The dictionary is included."""
    size = number_of(meta, 7, name)
    offsets = [number_of(meta, field, name) for field in (9, 11) if field == 9 or field in meta]
    starts = [offset for offset in offsets if offset > 0]  # 0 has been seen to mean "no dictionary"
    if size < 0 or (size and (not starts or min(starts) < len(MAGIC))):
        raise _damaged(name, "a column chunk has no place")
    start = min(starts, default=len(MAGIC))
    if start + size > limit:
        raise _damaged(name, f"a column chunk ends at {start + size:,}, behind the footer's start at {limit:,}")
    return ByteRange(start, min(size + extra, limit - start) if size else 0)


def with_chunks(group: Struct, leaves: Sequence[int], chunks: Sequence[Struct], name: str) -> Struct:
    """Keep only ``chunks`` (those of the leaves that stay), at their old offsets."""
    metas = footer.columns_of(group, name)
    result = {field: entry for field, entry in group.items() if field != 4}
    result[1] = (LIST, Items(STRUCT, list(chunks)))
    result[2] = (I64, sum(number_of(metas[leaf], 6, name) for leaf in leaves))
    if sorting := _kept_sorting(group, leaves):
        result[4] = (LIST, Items(STRUCT, sorting))
    return dict(sorted(result.items()))


def _kept_sorting(group: Struct, leaves: Sequence[int]) -> list[Struct]:
    position_of = {leaf: position for position, leaf in enumerate(leaves)}
    kept: list[Struct] = []
    for sorting in _structs(group, 4):
        position = position_of.get(sorting.get(1, (I32, -1))[1])
        if position is None:
            break
        kept.append({**sorting, 1: (I32, position)})
    return kept


def keyvalues_of(fields: Struct) -> dict[bytes, bytes | None]:
    return {_bytes(pair, 1) or b"": _bytes(pair, 2) for pair in _structs(fields, 5)}


def _keyvalues(fields: Struct, wanted: Sequence[bool], names: Sequence[bytes]) -> dict[bytes, bytes | None]:
    """Key-values whose schemas are cut to the wanted columns."""
    result = keyvalues_of(fields)
    for key, cut in ((ARROW_SCHEMA, _cut_arrow_schema), (SPARK, _cut_spark_schema)):
        value = result.get(key)
        if value is not None:
            result[key] = cut(value, wanted, names)
            if result[key] is None:
                del result[key]
    return result


def _cut_arrow_schema(value: bytes, wanted: Sequence[bool], names: Sequence[bytes]) -> bytes | None:
    schema = decode_schema(value)
    if schema is None or [name.encode() for name in schema.names] != list(names):
        return None  # of another schema than Parquet's own: no reader can have used it
    fields = [field for field, keep in zip(schema, wanted, strict=True) if keep]
    return encode_schema(pa.schema(fields, metadata=schema.metadata))


def _cut_spark_schema(value: bytes, wanted: Sequence[bool], names: Sequence[bytes]) -> bytes | None:
    """Spark believes this one: a column that is in it but not in the file would come out as nulls."""
    kept = {name.decode("utf-8", "replace") for name, keep in zip(names, wanted, strict=True) if keep}
    try:
        schema: dict[str, Any] = json.loads(value)
        schema["fields"] = [field for field in schema["fields"] if field["name"] in kept]
        return json.dumps(schema, separators=(",", ":")).encode()
    except MALFORMED:
        return value


def number_of(fields: Struct, field: int, name: str) -> int:
    """An integer field that must be there."""
    kind, value = fields.get(field, (0, None))
    if kind not in (I16, I32, I64):
        raise _damaged(name, f"field {field} is missing or no number")
    return int(value)


def _bytes(fields: Struct, field: int) -> bytes | None:
    kind, value = fields.get(field, (0, None))
    return bytes(value) if kind == BINARY else None


def _structs(fields: Struct, field: int) -> list[Struct]:
    kind, value = fields.get(field, (0, None))
    return list(value.values) if kind == LIST and value.kind == STRUCT else []


def _damaged(name: str, what: str) -> ParquetError:
    return ParquetError(name, f"the Parquet footer is damaged ({what})", "fetch the file again")
