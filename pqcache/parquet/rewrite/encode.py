"""Row groups put together from column chunks that were encoded separately.

A column chunk is a row of pages, and a page depends on nothing but the chunk's dictionary. So a chunk without one may
be the pages of several writers, one after the other; its metadata is theirs, added up. Pages with a dictionary have to
come from one writer; plain ones may follow. Fields are those of parquet.thrift in
https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

import pyarrow as pa

from pqcache.parquet.binary_views import without_views
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.thrift import I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.footer.thrift_fields import (
    COLUMN_INDEX,
    COMPRESSED,
    DATA,
    DICTIONARY,
    ENCODINGS,
    OFFSET_INDEX,
    PAGES,
    SIZES,
    STATISTICS,
    UNCOMPRESSED,
    VALUES,
)
from pqcache.parquet.nested import leaves_in
from pqcache.parquet.page_index import boundary_order
from pqcache.parquet.pages.write_binary import EncodedColumn, is_direct, pages_of
from pqcache.parquet.pages.write_lists import length_of, pages_of_lists
from pqcache.parquet.pages.write_numbers import is_plain, pages_of_numbers
from pqcache.system.buffer_pool import BufferPool

log = logging.getLogger("pqcache.parquet")

_OLD_MAX, _OLD_MIN, _NULLS, _MAX, _MIN = 1, 2, 3, 5, 6  # of Statistics

Order = Callable[[bytes], Any]
"""Returns for a minimum or maximum, as stored, a value that compares as the column's values do."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A column chunk as a writer of its own has left it; offsets count from the beginning of ``data``.

    ``columns`` is its ColumnIndex, which may be encoded.
    """

    fields: Struct
    data: list[memoryview]
    size: int
    offsets: Struct | None
    columns: bytes | Struct | None


@dataclass(frozen=True)
class EncodedRows:
    """Some rows of some columns, encoded: one chunk for each leaf column."""

    rows: int
    chunks: list[Chunk]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(chunk.size for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A row group in memory, with offsets as in a file of its own."""

    rows: int
    fields: Struct
    data: list[memoryview]
    size: int
    offsets: Mapping[int, Struct]
    columns: Mapping[int, bytes]


def encode_rows(table: pa.Table, encodings: Encodings, name: str, memory: BufferPool | None = None) -> EncodedRows:
    """Return ``table`` as one row group would hold it, in a block of ``memory``; ``name`` is the file to blame."""
    memory, apart = memory or BufferPool(), dict[int, EncodedColumn]()
    for n, (field, column) in enumerate(zip(table.schema, table.columns, strict=True)):
        if is_direct(field.name, column, encodings):
            apart[n] = pages_of(field, column)
        elif is_plain(field.name, column, encodings):
            if (numbers := pages_of_numbers(field, column)) is not None:
                apart[n] = numbers
            else:
                log.debug("column %s: pyarrow encodes it, as some values are NaN", field.name)
        elif length := length_of(field, column, encodings):
            apart[n] = pages_of_lists(field, column, length, encodings, memory)
    if not apart:
        return EncodedRows(table.num_rows, _chunks(without_views(table), encodings, name, memory))
    rest = [n for n in range(table.num_columns) if n not in apart]
    leaves = [sum(1 for _ in leaves_in(table.schema.field(n).type)) for n in rest]
    chunks = iter(_chunks(without_views(table.select(rest)), encodings, name, memory) if rest else [])
    found = {n: list(islice(chunks, count)) for n, count in zip(rest, leaves, strict=True)}
    for n, pages in apart.items():
        found[n] = [
            Chunk(fields=pages.fields, data=pages.data, size=pages.size, offsets=pages.offsets, columns=pages.columns)
        ]
    return EncodedRows(table.num_rows, [chunk for n in range(table.num_columns) for chunk in found[n]])


def _chunks(table: pa.Table, encodings: Encodings, name: str, memory: BufferPool) -> list[Chunk]:
    data = encodings.file(table, memory, page_index=True)
    end = len(data) - 8
    length = int.from_bytes(data[end : end + 4], "little")
    (group,) = footer.row_groups_of(thrift.decode(bytes(data[end - length : end]), name), name)

    def index(chunk: Struct, place: tuple[int, int]) -> bytes | None:
        start = chunk[place[0]][1] if place[0] in chunk else 0
        return bytes(data[start : start + chunk[place[1]][1]]) if start else None

    chunks = []
    for chunk in group[1][1].values:
        meta = chunk[3][1]
        start = min(meta[field][1] for field in (DATA, DICTIONARY) if field in meta)
        size = meta[COMPRESSED][1]
        stored = index(chunk, OFFSET_INDEX)
        offsets = None if stored is None else thrift.decode(stored, name)
        for page in () if offsets is None else offsets[1][1].values:
            page[1] = (I64, page[1][1] - start)
        fields = {**chunk, 3: (STRUCT, _moved(meta, -start))}
        chunks.append(
            Chunk(
                fields=fields,
                data=[data[start : start + size]],
                size=size,
                offsets=offsets,
                columns=index(chunk, COLUMN_INDEX),
            )
        )
    return chunks


def _moved(meta: Struct, delta: int) -> Struct:
    found = dict(meta)
    for field in (DATA, DICTIONARY):
        if field in found:
            found[field] = (I64, found[field][1] + delta)
    return found


def concatenate_chunks(
    counts: Sequence[Sequence[int]], chunks_of_leaves: Sequence[Sequence[Chunk]], orders: Sequence[Order]
) -> RowGroup:
    """Return the row group that holds, for each leaf column, the chunks of ``chunks_of_leaves``, one after the other.

    Args:
        counts: for each leaf column the rows of its chunks.
        chunks_of_leaves: for each leaf column of the row group its chunks, in the order of the rows; only
            the first can have a dictionary.
        orders: for each leaf column how its minima and maxima compare.
    """
    rows = sum(counts[0])
    chunks: list[Struct] = []
    data: list[memoryview] = []
    offsets: dict[int, Struct] = {}
    columns: dict[int, bytes] = {}
    begin = at = len(footer.MAGIC)
    uncompressed = 0
    for number, (some, rows_of, order) in enumerate(zip(chunks_of_leaves, counts, orders, strict=True)):
        meta = _moved(_added([chunk.fields[3][1] for chunk in some], order), at)
        fields = {field: value for field, value in some[0].fields.items() if field not in (4, 5, 6, 7)}
        chunks.append({**fields, 2: (I64, 0), 3: (STRUCT, meta)})
        if (found := _offsets(some, rows_of, at)) is not None:
            offsets[number] = found
        if (index := _columns(some, order)) is not None and number in offsets:
            columns[number] = index
        at += sum(chunk.size for chunk in some)
        uncompressed += meta[UNCOMPRESSED][1]
        for chunk in some:
            data.extend(chunk.data)
    if all(len(index[1][1].values) == 1 for index in offsets.values()):
        offsets, columns = {}, {}  # each chunk is one page: its statistics say the same
    group: Struct = {
        1: (LIST, Items(STRUCT, chunks)),
        2: (I64, uncompressed),
        3: (I64, rows),
        5: (I64, begin),
        6: (I64, at - begin),
    }
    return RowGroup(rows=rows, fields=group, data=data, size=at - begin, offsets=offsets, columns=columns)


def as_row_group(part: EncodedRows) -> RowGroup:
    """Return the row group that is one part."""
    count = len(part.chunks)
    return concatenate_chunks([[part.rows]] * count, [[chunk] for chunk in part.chunks], [bytes] * count)


def _added(metas: Sequence[Struct], order: Order) -> Struct:
    """Return the metadata of chunks that follow one another; where the data begins is that of the first."""
    first = metas[0]
    if len(metas) == 1:
        return first
    found = dict(first)
    found[ENCODINGS] = (LIST, Items(thrift.I32, list(dict.fromkeys(_each(metas, ENCODINGS)))))
    for field in (VALUES, UNCOMPRESSED, COMPRESSED):
        found[field] = (I64, sum(meta[field][1] for meta in metas))
    found.pop(STATISTICS, None)
    if (statistics := _statistics(metas, order)) is not None:
        found[STATISTICS] = (STRUCT, statistics)
    found.pop(PAGES, None)
    if all(PAGES in meta for meta in metas):
        counts: dict[tuple[int, int], int] = {}
        for page in _each(metas, PAGES):
            kind = page[1][1], page[2][1]
            counts[kind] = counts.get(kind, 0) + page[3][1]
        pages = [{1: (thrift.I32, a), 2: (thrift.I32, b), 3: (thrift.I32, n)} for (a, b), n in counts.items()]
        found[PAGES] = (LIST, Items(STRUCT, pages))
    found.pop(SIZES, None)
    if all(SIZES in meta for meta in metas):
        found[SIZES] = (STRUCT, reduce(_sizes, (meta[SIZES][1] for meta in metas)))
    return dict(sorted(found.items()))


def _each(structs: Iterable[Struct], field: int) -> Iterable[Any]:
    for fields in structs:
        yield from fields[field][1].values


def _sizes(a: Struct, b: Struct) -> Struct:
    """Return two SizeStatistics, bytes and histograms, added up; a field that one lacks is left out."""
    found: Struct = {}
    for field, (kind, value) in a.items():
        if field in b:
            other = b[field][1]
            if kind == LIST:
                value = Items(value.kind, [x + y for x, y in zip(value.values, other.values, strict=True)])
            else:
                value += other
            found[field] = (kind, value)
    return found


def _statistics(metas: Sequence[Struct], order: Order) -> Struct | None:
    """Return statistics that hold for all chunks: what one of them does not say is not known of all."""
    if not all(STATISTICS in meta for meta in metas):
        return None
    known = [(meta[STATISTICS][1], meta[VALUES][1]) for meta in metas]
    found: Struct = {}
    if all(_NULLS in fields for fields, _ in known):
        found[_NULLS] = (I64, sum(fields[_NULLS][1] for fields, _ in known))
    # A chunk of nulls has no minimum and keeps no other's; one that has none for another reason does.
    valued = [fields for fields, values in known if _NULLS not in fields or fields[_NULLS][1] < values]
    for low, high in ((_OLD_MIN, _OLD_MAX), (_MIN, _MAX)):
        if valued and all(low in fields and high in fields for fields in valued):
            least = min(valued, key=lambda fields: order(fields[low][1]))
            most = max(valued, key=lambda fields: order(fields[high][1]))
            found[low], found[high] = least[low], most[high]
            if low == _MIN:
                found |= {field: most[field] for field in (7,) if field in most}  # whether it is exact
                found |= {field: least[field] for field in (8,) if field in least}
    return dict(sorted(found.items()))


def _offsets(chunks: Sequence[Chunk], rows: Sequence[int], at: int) -> Struct | None:
    """Return one OffsetIndex for chunks of so many ``rows`` that lie one after the other from ``at`` on."""
    found = [chunk.offsets for chunk in chunks if chunk.offsets is not None]
    if len(found) < len(chunks):
        log.debug("no page index: pyarrow wrote no OffsetIndex for some of the column's pages")
        return None
    pages: list[Struct] = []
    first = 0
    for chunk, index, count in zip(chunks, found, rows, strict=True):
        for page in index[1][1].values:
            pages.append({**page, 1: (I64, page[1][1] + at), 3: (I64, page[3][1] + first)})
        at += chunk.size
        first += count
    result: Struct = {1: (LIST, Items(STRUCT, pages))}
    if all(2 in index for index in found):
        result[2] = (LIST, Items(I64, list(_each(found, 2))))
    return result


def _columns(chunks: Sequence[Chunk], order: Order) -> bytes | None:
    """Return one ColumnIndex, encoded, for chunks that follow one another."""
    stored = [chunk.columns for chunk in chunks if chunk.columns is not None]
    if len(stored) < len(chunks):
        return None
    if len(stored) == 1:
        return stored[0] if isinstance(stored[0], bytes) else thrift.encode(stored[0])
    found = [thrift.decode(index, "a page index") if isinstance(index, bytes) else index for index in stored]
    result: Struct = {}
    for field, (kind, value) in found[0].items():
        if kind == LIST and all(field in index for index in found):
            result[field] = (LIST, Items(value.kind, list(_each(found, field))))
    bounds = (
        (order(low), order(high))
        for index in found
        for empty, low, high in zip(*(index[field][1].values for field in (1, 2, 3)), strict=True)
        if empty != thrift.BOOL
    )
    result[4] = (thrift.I32, boundary_order(bounds))
    return thrift.encode(dict(sorted(result.items())))


_UNSIGNED = range(11, 15)  # ConvertedType: UINT_8 to UINT_64


def orders_of(template: Struct, name: str) -> list[Order]:
    """Return how minima and maxima compare, for each leaf column of a footer's schema."""
    schema = footer.schema_of(template, name)
    return [_order_of(schema[leaf.element]) for leaf in footer.leaves_of(schema, name)]


def _order_of(element: Struct) -> Order:
    physical = element[1][1]
    converted = element.get(6, (0, -1))[1]
    logical = element.get(10, (0, {}))[1]
    if physical == 0:  # BOOLEAN
        return lambda value: value[0]
    if physical in (1, 2):  # INT32, INT64
        signed = converted not in _UNSIGNED and not (10 in logical and logical[10][1].get(2, (0, True))[1] is False)
        return lambda value: int.from_bytes(value, "little", signed=signed)
    if physical in (4, 5):  # FLOAT, DOUBLE
        return lambda value: struct.unpack("<f" if physical == 4 else "<d", value)[0]
    if physical in (6, 7) and (5 in logical or converted == 5):  # DECIMAL
        return lambda value: int.from_bytes(value, "big", signed=True)
    if physical == 7 and 15 in logical:  # FLOAT16
        return lambda value: struct.unpack("<e", value)[0]
    return bytes  # INT96 has no minima and maxima
