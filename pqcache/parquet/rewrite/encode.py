"""Encodes rows as column chunks, and joins chunks that were encoded separately to row groups.

A column chunk is a sequence of pages, which depend on nothing but the chunk's dictionary. So a chunk without one may
join the pages of several writers and add up their metadata. Pages with a dictionary have to come from one writer, and
plain ones may follow. Fields are those of parquet.thrift in https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import reduce
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import Floats, bytes_in, in_one_piece, leaves_in
from pqcache.parquet.pages import Chunk
from pqcache.parquet.rewrite.decode import RowBatch
from pqcache.parquet.rewrite.encodings import Encodings
from pqcache.parquet.rewrite.fast_encode import (
    boundary_order,
    is_direct,
    is_plain,
    length_of,
    pages_of,
    pages_of_lists,
    pages_of_numbers,
)
from pqcache.parquet.thrift import (
    COLUMN_INDEX,
    COMPRESSED,
    DATA,
    DICTIONARY,
    ENCODINGS,
    I64,
    LIST,
    OFFSET_INDEX,
    PAGES,
    SIZES,
    STATISTICS,
    STRUCT,
    UNCOMPRESSED,
    VALUES,
    Items,
    Struct,
)
from pqcache.system.buffers import BufferPool

log = logging.getLogger("pqcache.parquet")

THREADS = 2  # for encoding
_WORTH_A_THREAD = 1 << 20  # Arrow bytes
_UNEVEN = 0.6  # of all costs: if one thread had more, rows are divided instead of columns
_OLD_MAX, _OLD_MIN, _NULLS, _MAX, _MIN = 1, 2, 3, 5, 6  # of Statistics

Encoded = Mapping[int, Sequence[Chunk]]
"""Encoded rows: the chunks of each leaf column, in row order."""

Order = Callable[[bytes], Any]
"""Turns a stored minimum or maximum into a value that compares like the column's values."""


def size_of(encoded: Encoded) -> int:
    return sum(chunk.size for chunks in encoded.values() for chunk in chunks)


@dataclass(frozen=True, kw_only=True)
class FooterSchema:
    """The layout of row groups in a footer.

    Attributes:
        template: the footer of a file with the same columns, written by pyarrow.
        schema: the schema elements of the footer.
        paths: path_in_schema of each leaf.
        names: each leaf's path as `Encodings` name it.
        tops: the top-level column of each leaf.
        orders: how minima and maxima of each leaf compare.
    """

    template: Struct
    schema: list[Struct]
    paths: list[tuple[bytes, ...]]
    names: list[str]
    tops: npt.NDArray[np.int64]
    orders: list[Order]


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A row group in memory, with the offsets it would have in a file of its own."""

    rows: int
    fields: Struct
    data: list[memoryview]
    size: int
    offsets: Mapping[int, Struct]
    columns: Mapping[int, bytes]


class Encoder:
    """Encodes rows with ``encodings``, which may change between row groups; errors blame ``name``.

    Attributes:
        columns: how many top-level columns there are.
        dictionaries: the size of the largest dictionary of each column that arrives with one.
        encoded: compressed bytes.
        again: compressed bytes encoded more than once.
    """

    def __init__(self, footer_schema: FooterSchema, plain: Encodings, name: str, executor: Executor) -> None:
        self.encodings, self.name, self.executor = plain, name, executor
        self.footer_schema = footer_schema
        self.columns = int(footer_schema.tops[-1]) + 1
        self.dictionaries: dict[str, int] = {}
        self.encoded = self.again = 0
        self._memory = BufferPool()
        self._leaves = [np.flatnonzero(footer_schema.tops == column).tolist() for column in range(self.columns)]

    def leaves(self, columns: Iterable[int]) -> list[int]:
        return [leaf for column in columns for leaf in self._leaves[column]]

    def dictionary_columns(self) -> list[int]:
        """Columns with a dictionary, which are encoded in one go for all rows."""
        coded = set(self.encodings.dictionary)
        names = self.footer_schema.names
        return [n for n, leaves in enumerate(self._leaves) if any(names[leaf] in coded for leaf in leaves)]

    def encode(self, batches: Sequence[RowBatch], columns: Sequence[int], halves: bool = False) -> Encoded:
        """Encode columns of batches, on several threads if that helps; ``halves`` allows two chunks for a column."""
        how = self.encodings
        if not columns:
            return {}
        table = pa.concat_tables([batch.table.select(list(columns)) for batch in batches])
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            note_dictionaries(table, self.dictionaries)
        sizes = np.sum([batch.weights for batch in batches], axis=0)[list(columns)]
        tasks = _divided(table, sizes, how, halves)
        run = map if len(tasks) == 1 else self.executor.map  # a single task needs no other thread
        found = defaultdict(list)
        parts = run(lambda task: encode_rows(task[0], how, self.name, self._memory), tasks)
        for (_, share), chunks in zip(tasks, parts, strict=True):
            for leaf, chunk in zip(self.leaves(columns[n] for n in share), chunks, strict=True):
                found[leaf].append(chunk)
        self.encoded += size_of(found)
        return found

    def by_column(self, leaves: Sequence[int], sizes: Sequence[float]) -> Floats:
        tops = self.footer_schema.tops[list(leaves)]
        return np.bincount(tops, weights=sizes, minlength=self.columns).astype(np.float64)

    def taken(self, encoded: Encoded) -> Floats:
        return self.by_column(list(encoded), [sum(chunk.size for chunk in chunks) for chunks in encoded.values()])

    def joined(self, parts: Sequence[Encoded]) -> RowGroup:
        leaves = range(len(self.footer_schema.paths))
        chunks = [[chunk for part in parts for chunk in part.get(leaf, ())] for leaf in leaves]
        return concatenate_chunks(chunks, self.footer_schema.orders)


def note_dictionaries(table: pa.Table, known: dict[str, int]) -> None:
    """Remember the largest dictionaries in ``known``."""
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if pt.is_dictionary(column.type) and column.num_chunks:
            known[name] = max(known.get(name, 0), len(column.chunk(0).dictionary))


def _divided(table: pa.Table, sizes: Floats, encodings: Encodings, halves: bool) -> list[tuple[pa.Table, list[int]]]:
    """Divide ``table`` into parts that take about equally long to encode, each with the numbers of its columns.

    Parts have different columns, or, if one column takes nearly all the time and ``halves`` allows it, the first and
    the last rows of all columns. ``sizes`` are estimates of bytes on disk. Nothing here depends on the machine, since
    the bytes of a column chunk depend on how its rows are cut.
    """
    direct = [
        is_direct(name, column, encodings) or is_plain(name, column, encodings)
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    costs = np.where(direct, 0, sizes)
    nbytes = 0  # counted no further than needed, as columns of many chunks take long
    for column, done in zip(table.columns, direct, strict=True):
        if not done and nbytes <= _WORTH_A_THREAD:
            nbytes += bytes_in(column)
    large = nbytes > _WORTH_A_THREAD
    shares = _shares(costs, THREADS if large else 1)
    cuts = [0, table.num_rows]
    halves = halves and large and table.num_rows > 1  # a half needs a row
    if halves and max(costs[share].sum() for share in shares) > _UNEVEN * costs.sum():
        shares, cuts = [list(range(table.num_columns))], [0, table.num_rows // 2, table.num_rows]
    return [(table.select(share).slice(low, high - low), share) for low, high in pairwise(cuts) for share in shares]


def _shares(sizes: Floats, number: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(number)]
    totals = [0.0] * number
    for column in np.argsort(-sizes):
        least = totals.index(min(totals))
        shares[least].append(int(column))
        totals[least] += float(sizes[column])
    return [sorted(share) for share in shares if share]


def encode_rows(table: pa.Table, encodings: Encodings, name: str, memory: BufferPool | None = None) -> list[Chunk]:
    """Encode ``table`` as one row group, in a block of ``memory``."""
    memory = memory or BufferPool()
    found: dict[int, list[Chunk]] = {}
    for n, (field, column) in enumerate(zip(table.schema, table.columns, strict=True)):
        if is_direct(field.name, column, encodings):
            found[n] = [pages_of(field, column)]
        elif is_plain(field.name, column, encodings):
            if (numbers := pages_of_numbers(field, column)) is not None:
                found[n] = [numbers]
            else:
                log.debug("column %s: pyarrow encodes it, as some values are NaN", field.name)
        elif length := length_of(field, column, encodings):
            found[n] = [pages_of_lists(field, column, length, encodings, memory)]
    rest = [n for n in range(table.num_columns) if n not in found]
    if rest:
        chunks = iter(_chunks(in_one_piece(table.select(rest)), encodings, name, memory))
        for n in rest:
            found[n] = list(islice(chunks, sum(1 for _ in leaves_in(table.schema.field(n).type))))
    return [chunk for n in range(table.num_columns) for chunk in found[n]]


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
        pages, columns = [data[start : start + size]], index(chunk, COLUMN_INDEX)
        chunks.append(
            Chunk(rows=table.num_rows, fields=fields, data=pages, size=size, offsets=offsets, columns=columns)
        )
    return chunks


def _moved(meta: Struct, delta: int) -> Struct:
    found = dict(meta)
    for field in (DATA, DICTIONARY):
        if field in found:
            found[field] = (I64, found[field][1] + delta)
    return found


def concatenate_chunks(chunks_of_leaves: Sequence[Sequence[Chunk]], orders: Sequence[Order]) -> RowGroup:
    """Join the chunks of each leaf column to one row group.

    Only the first chunk of a leaf may have a dictionary. ``orders`` say for each leaf how minima and maxima compare.
    """
    rows = sum(chunk.rows for chunk in chunks_of_leaves[0])
    chunks: list[Struct] = []
    data: list[memoryview] = []
    offsets: dict[int, Struct] = {}
    columns: dict[int, bytes] = {}
    begin = at = len(footer.MAGIC)
    uncompressed = 0
    for number, (some, order) in enumerate(zip(chunks_of_leaves, orders, strict=True)):
        meta = _moved(_added([chunk.fields[3][1] for chunk in some], order), at)
        fields = {field: value for field, value in some[0].fields.items() if field not in (4, 5, 6, 7)}
        chunks.append({**fields, 2: (I64, 0), 3: (STRUCT, meta)})
        if (found := _offsets(some, at)) is not None:
            offsets[number] = found
        if (index := _columns(some, order)) is not None and number in offsets:
            columns[number] = index
        at += sum(chunk.size for chunk in some)
        uncompressed += meta[UNCOMPRESSED][1]
        for chunk in some:
            data.extend(chunk.data)
    if all(len(index[1][1].values) == 1 for index in offsets.values()):
        offsets, columns = {}, {}  # each chunk is one page, whose statistics say the same
    group: Struct = {
        1: (LIST, Items(STRUCT, chunks)),
        2: (I64, uncompressed),
        3: (I64, rows),
        5: (I64, begin),
        6: (I64, at - begin),
    }
    return RowGroup(rows=rows, fields=group, data=data, size=at - begin, offsets=offsets, columns=columns)


def as_row_group(chunks: Sequence[Chunk]) -> RowGroup:
    return concatenate_chunks([[chunk] for chunk in chunks], [bytes] * len(chunks))


def _added(metas: Sequence[Struct], order: Order) -> Struct:
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
    """Add up two SizeStatistics, without fields that one of them lacks."""
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
    """Statistics of all chunks together; None, or without fields, if those of a chunk are missing."""
    if not all(STATISTICS in meta for meta in metas):
        return None
    known = [(meta[STATISTICS][1], meta[VALUES][1]) for meta in metas]
    found: Struct = {}
    if all(_NULLS in fields for fields, _ in known):
        found[_NULLS] = (I64, sum(fields[_NULLS][1] for fields, _ in known))
    # A chunk of nulls needs no minimum. If another chunk lacks one, the minimum of all is unknown.
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


def _offsets(chunks: Sequence[Chunk], at: int) -> Struct | None:
    """One OffsetIndex for chunks that follow one another from ``at``."""
    found = [chunk.offsets for chunk in chunks if chunk.offsets is not None]
    if len(found) < len(chunks):
        log.debug("no page index: pyarrow wrote no OffsetIndex for some of the column's pages")
        return None
    pages: list[Struct] = []
    first = 0
    for chunk, index in zip(chunks, found, strict=True):
        for page in index[1][1].values:
            pages.append({**page, 1: (I64, page[1][1] + at), 3: (I64, page[3][1] + first)})
        at += chunk.size
        first += chunk.rows
    result: Struct = {1: (LIST, Items(STRUCT, pages))}
    if all(2 in index for index in found):
        result[2] = (LIST, Items(I64, list(_each(found, 2))))
    return result


def _columns(chunks: Sequence[Chunk], order: Order) -> bytes | None:
    """One encoded ColumnIndex for consecutive chunks."""
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
    """How minima and maxima of each leaf column compare."""
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
