"""Pages that are written without pyarrow: large binary values, lists of one length, and numbers stored as they are.

The format is parquet.thrift and Encodings.md of https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.binary_views import INLINE, LONG, bytes_in, is_view, length_prefixed_bytes, offsets_of
from pqcache.parquet.codecs import CODECS
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import footer, thrift, thrift_fields
from pqcache.parquet.footer.thrift import BINARY, BOOL, I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.footer.thrift_fields import ASCENDING, DESCENDING
from pqcache.parquet.pages.page_format import Chunk, data_page_header, encode_flags, encode_run
from pqcache.parquet.schema_merge import is_text
from pqcache.system.buffer_pool import Buffer, BufferPool

# ---- Large binary values, made into pages without looking at them
#
# A plain, uncompressed page of binary values is their bytes, each with its length before it. For images that is all
# there is to encode, so Arrow lays them out, many at once.

_TEXT_PAGE = 1 << 20
_BYTE_ARRAY = 6


def is_direct(name: str, column: pa.ChunkedArray, encodings: Encodings) -> bool:
    """Whether a column is written here: large values that need no conversion."""
    return (
        (is_text(column.type) or is_view(column.type))
        and encodings.as_is(name)
        and name not in encodings.statistics
        and len(column) > 0
        and column.null_count == 0
        and bytes_in(column) >= LONG * len(column)
    )


def pages_of(field: pa.Field, column: pa.ChunkedArray) -> Chunk:
    data: list[memoryview] = []
    places: list[Struct] = []
    sizes: list[int] = []
    waiting: list[memoryview] = []
    at = row = count = size = 0

    def close() -> None:
        nonlocal at, row, count, size, waiting
        levels = encode_run(count, 1) if field.nullable else b""
        body = len(levels) + 4 * count + size
        header = data_page_header(count, thrift_fields.PLAIN, body)
        data.append(memoryview(header + levels))
        data.extend(waiting)
        places.append({1: (I64, at), 2: (I32, len(header) + body), 3: (I64, row)})
        sizes.append(size)
        at, row = at + len(header) + body, row + count
        waiting, count, size = [], 0, 0

    for laid, ends in (span for chunk in column.chunks for span in _length_prefixed(chunk)):
        low, last = 0, len(ends) - 1
        while low < last:
            high = int(np.searchsorted(ends, ends[low] + _TEXT_PAGE - size, side="right")) - 1
            if high <= low:
                if count:
                    close()
                    continue
                high = low + 1  # one value that is larger than a page
            waiting.append(laid[int(ends[low]) + 4 * low : int(ends[high]) + 4 * high])
            count, size = count + high - low, size + int(ends[high] - ends[low])
            low = high
    close()
    meta = thrift_fields.column_metadata(
        _BYTE_ARRAY, [field.name.encode()], 0, [thrift_fields.RLE, thrift_fields.PLAIN], row, at, at
    )
    levels = _size_statistics(sum(sizes), row, field.nullable)
    meta = thrift_fields.with_page_statistics(meta, thrift_fields.PLAIN, len(places), levels)
    offsets: Struct = {1: (LIST, Items(STRUCT, places)), 2: (LIST, Items(I64, sizes))}
    return Chunk(rows=row, fields={2: (I64, 0), 3: (STRUCT, meta)}, data=data, size=at, offsets=offsets)


def _length_prefixed(chunk: pa.Array) -> Iterator[tuple[memoryview, npt.NDArray[np.int64]]]:
    """Yield an array's rows, each with its length before it, and where they would end if lengths took no bytes."""
    found = length_prefixed_bytes(chunk) if is_view(chunk.type) else None
    if found is not None:
        yield from found
        return
    if is_view(chunk.type):
        chunk = chunk.cast(pa.large_binary())
    ends = offsets_of(chunk).astype(np.int64)
    yield memoryview(_laid_out(chunk)), ends - ends[0]


def _laid_out(chunk: pa.Array) -> pa.Buffer:
    """Put each value's length before it.

    They are twice as many binary views, and Arrow copies what these point to, without the interpreter's lock. See
    https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout.
    """
    ends, values = offsets_of(chunk), chunk.buffers()[2]
    if values is None:
        return pa.py_buffer(bytes(4 * len(chunk)))
    views = np.zeros((len(chunk), 2, 4), "<i4")  # of a view: the length, four bytes, the buffer, and where in it
    lengths = np.diff(ends)
    views[:, 0, 0], views[:, 0, 1] = 4, lengths
    views[:, 1, 0], views[:, 1, 3] = lengths, ends[:-1] - ends[0]
    for row in np.flatnonzero(lengths <= INLINE).tolist():
        low, length = int(ends[row]), int(lengths[row])
        views[row, 1, 1:].view(np.uint8)[:length] = np.frombuffer(values, np.uint8, length, low)
        views[row, 1, 1:].view(np.uint8)[length:] = 0
    own = values.slice(int(ends[0]), int(ends[-1] - ends[0]))
    array = pa.Array.from_buffers(pa.binary_view(), 2 * len(chunk), [None, pa.py_buffer(views), own])
    return array.cast(pa.large_binary()).buffers()[2]


def _size_statistics(size: int, values: int, nullable: bool) -> Struct:
    """Bytes without lengths, and how many values have which level."""
    levels: Sequence[int] = [0, values] if nullable else []
    return {1: (I64, size), 2: (LIST, Items(I64, [])), 3: (LIST, Items(I64, list(levels)))}


# ---- Lists of one length, whose levels are known before a value is looked at
#
# A writer that takes any list finds out for each value where its list begins and that it is not null, which takes
# longer than the values themselves. So these are written as if they were no lists, and get the same few bytes of
# levels in every page.

_SHORTEST, _LARGEST = 16, 1 << 28  # values of a list; bytes of a list
_LIST_PAGE, _LIST_ROWS = (
    1 << 19,
    20_000,
)  # bytes and rows of a page: compressed in the processor's cache
_TOGETHER = 8  # pages encoded in one go
_HEADER = 64  # bytes, at most: there are no statistics in it
_LIST_PHYSICAL = {pa.float32(): 4, pa.float64(): 5, pa.int64(): 2, pa.uint64(): 2}  # others are INT32


def length_of(field: pa.Field, column: pa.ChunkedArray, encodings: Encodings) -> int:
    """The number of items in each list of a column that is written here; 0 for any other column."""
    kind = field.type
    if not (pt.is_list(kind) or pt.is_large_list(kind)) or not len(column) or column.null_count:
        return 0
    value, path = kind.value_type, _path(field)
    if not (pt.is_integer(value) or pt.is_float32(value) or pt.is_float64(value)):
        return 0
    if path in encodings.dictionary or path in encodings.statistics or encodings.codecs.get(path) not in CODECS:
        return 0
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    lengths = [np.diff(offsets_of(chunk)) for chunk in chunks]
    length = int(lengths[0][0])
    if length < _SHORTEST or length * value.bit_width // 8 > _LARGEST or any((own != length).any() for own in lengths):
        return 0
    return 0 if any(_items(chunk).null_count for chunk in chunks) else length


def _items(chunk: pa.Array) -> pa.Array:
    ends = offsets_of(chunk)
    return chunk.values.slice(int(ends[0]), int(ends[-1] - ends[0]))


def _path(field: pa.Field) -> str:
    return f"{field.name}.list.{field.type.value_field.name}"


def pages_of_lists(
    field: pa.Field, column: pa.ChunkedArray, length: int, encodings: Encodings, memory: BufferPool
) -> Chunk:
    codec, special = CODECS[encodings.codecs[_path(field)]], encodings.special.get(_path(field))
    compress = None
    if codec.arrow is not None:
        compress = pa.Codec(codec.arrow, encodings.level if codec.has_levels else None)
    deepest = 1 + field.nullable + field.type.value_field.nullable
    data: list[memoryview] = []
    places: list[Struct] = []
    at = row = uncompressed = encoding = 0
    pages = _cut(column, length)
    for first in range(0, len(pages), _TOGETHER):
        waiting: list[bytes] = []
        for count, encoding, body in _flat(pages[first : first + _TOGETHER], special, memory):
            levels = _repetitions(count // length, length) + encode_run(count, deepest)
            plain_size = stored = len(levels) + len(body)
            if compress is not None:
                waiting.append(compress.compress(b"".join((levels, body)), asbytes=True))
                stored = len(waiting[-1])
            head = data_page_header(count, encoding, plain_size, stored)
            places.append({1: (I64, at), 2: (I32, len(head) + stored), 3: (I64, row)})
            at, row, uncompressed = (
                at + len(head) + stored,
                row + count // length,
                uncompressed + len(head) + plain_size,
            )
            if compress is None:
                data += [memoryview(head + levels), body]
            else:
                waiting.insert(-1, head)
        if waiting:
            kept = memory.borrow(sum(map(len, waiting)))
            kept[:] = np.frombuffer(b"".join(waiting), np.uint8)
            data.append(kept.data)
    total = len(column) * length
    sizes: Struct = {
        2: (LIST, Items(I64, [len(column), total - len(column)])),
        3: (LIST, Items(I64, [0] * deepest + [total])),
    }
    path = [part.encode() for part in (field.name, "list", field.type.value_field.name)]
    physical = _LIST_PHYSICAL.get(field.type.value_type, 1)
    meta = thrift_fields.column_metadata(
        physical, path, codec.number, [thrift_fields.RLE, encoding], total, uncompressed, at
    )
    meta = thrift_fields.with_page_statistics(meta, encoding, len(places), sizes)
    offsets: Struct = {1: (LIST, Items(STRUCT, places))}
    return Chunk(rows=row, fields={2: (I64, 0), 3: (STRUCT, meta)}, data=data, size=at, offsets=offsets)


def _cut(column: pa.ChunkedArray, length: int) -> list[pa.Array]:
    parts = [_items(chunk) for chunk in column.chunks if len(chunk)]
    rows = min(max(1, _LIST_PAGE // (length * parts[0].type.bit_width // 8)), _LIST_ROWS)
    if len(column) < len(parts) * rows // 2:
        parts = [pa.concat_arrays(parts)]
    return [part.slice(first, rows * length) for part in parts for first in range(0, len(part), rows * length)]


def _flat(pages: list[pa.Array], special: str | None, memory: BufferPool) -> Iterator[tuple[int, int, memoryview]]:
    schema = pa.schema([pa.field("", pages[0].type, nullable=False)])
    plain = Encodings(special={"": special} if special else {})
    file = plain.file(pa.table([pa.chunked_array(pages)], schema), memory, batch=max(map(len, pages)))
    begin = len(footer.MAGIC)
    for _ in pages:
        header, size = thrift.decode_first(bytes(file[begin : begin + _HEADER]), "a page")
        about, end = header[5][1], begin + size + header[2][1]
        yield about[1][1], about[2][1], file[begin + size : end]
        begin = end


@lru_cache(64)
def _repetitions(rows: int, length: int) -> bytes:
    """Repetition levels: 0 for the first value of each list and 1 for the others, as runs."""
    run = bytearray((1 << 1, 0))
    thrift.put_varint(run, (length - 1) << 1)
    run.append(1)
    return (rows * len(run)).to_bytes(4, "little") + run * rows


# ---- Numbers that are stored as they lie in memory: plain, and without a codec
#
# All that a writer does with them is to copy them, and to find the least and the largest of each page. Where some are
# null, the others lie side by side, and bits in front of them say which rows they are of.

_ROWS = 20_000  # of a page, as pyarrow has them
_PHYSICAL = {"<i4": 1, "<u4": 1, "<i8": 2, "<u8": 2, "<f4": 4, "<f8": 5}
_WIDER = {"i1": "<i4", "i2": "<i4", "u1": "<u4", "u2": "<u4"}
_Numbers = npt.NDArray[Any]


def is_plain(name: str, column: pa.ChunkedArray, encodings: Encodings) -> bool:
    """Whether a column is written here: numbers that need no conversion."""
    return (
        encodings.as_is(name)
        and name in encodings.statistics
        and _dtype(column.type) is not None
        and not (encodings.int96 and pt.is_timestamp(column.type))
        and len(column) > column.null_count
    )


def _dtype(kind: pa.DataType) -> str | None:
    if pt.is_integer(kind):
        return f"<{'i' if pt.is_signed_integer(kind) else 'u'}{kind.bit_width // 8}"
    if pt.is_float32(kind) or pt.is_float64(kind):
        return f"<f{kind.bit_width // 8}"
    # Seconds are stored as milliseconds, and date64 as days.
    if pt.is_date32(kind) or ((pt.is_time(kind) or pt.is_timestamp(kind)) and kind.unit != "s"):
        return f"<i{kind.bit_width // 8}"
    return None


def pages_of_numbers(field: pa.Field, column: pa.ChunkedArray) -> Chunk | None:
    """Return None for a NaN, and for a null that the field does not allow."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count and not field.nullable:
        return None
    count, values = len(array), _values(array)
    rows = [min(_ROWS, count - first) for first in range(0, count, _ROWS)]
    filled, there = rows, np.zeros(0, np.uint8)
    if array.null_count:
        bits = np.frombuffer(array.buffers()[0], np.uint8)
        there = np.unpackbits(bits, count=array.offset + count, bitorder="little")[array.offset :]
        values = values[there.view(bool)]
        filled = np.add.reduceat(there, np.arange(0, count, _ROWS), dtype=np.int64).tolist()
    begins = [end - own for own, end in zip(filled, accumulate(filled), strict=True)]
    bounds = _bounds(values, np.array(begins)[np.array(filled) > 0])
    if bounds is None:
        return None
    parts = [values[begin : begin + own] for begin, own in zip(begins, filled, strict=True)]
    heads = []
    for page, (own, part) in enumerate(zip(rows, parts, strict=True)):
        if len(part) == own:
            heads.append(_full_head(own, part.nbytes, field.nullable))
        else:
            heads.append(_head(own, part.nbytes, encode_flags(there[page * _ROWS : page * _ROWS + own])))
    sizes = [len(head) + part.nbytes for head, part in zip(heads, parts, strict=True)]
    buffer = np.frombuffer(pa.allocate_buffer(sum(sizes)), np.uint8)  # of the memory that decoded rows leave
    at = 0
    for head, part in zip(heads, parts, strict=True):
        begin, end = at + len(head), at + len(head) + part.nbytes
        buffer[at:begin] = np.frombuffer(head, np.uint8)
        buffer[begin:end] = part.view(np.uint8)
        at = end
    nulls = [own - have for own, have in zip(rows, filled, strict=True)] if field.nullable else None
    return _encoded(field, buffer, sizes, _Pages(values.dtype, rows, nulls, *bounds))


def _head(rows: int, size: int, levels: bytes) -> bytes:
    return data_page_header(rows, thrift_fields.PLAIN, len(levels) + size) + levels


@lru_cache(64)
def _full_head(rows: int, size: int, nullable: bool) -> bytes:
    return _head(rows, size, encode_run(rows, 1) if nullable else b"")


def _values(array: pa.Array) -> _Numbers:
    """Stored values; nulls have arbitrary ones."""
    dtype = np.dtype(_dtype(array.type))
    values = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    return values.astype(_WIDER[dtype.str[1:]]) if dtype.itemsize < 4 else values


class _Pages(NamedTuple):
    """Rows, nulls and bounds of pages; ``nulls`` is None if there can be none."""

    dtype: np.dtype[Any]
    rows: list[int]
    nulls: list[int] | None
    low: _Numbers
    high: _Numbers


def _encoded(field: pa.Field, buffer: Buffer, sizes: list[int], pages: _Pages) -> Chunk:
    ends, begins = np.cumsum(sizes), np.append(0, np.cumsum(sizes)[:-1]).tolist()
    places = [
        {1: (I64, at), 2: (I32, size), 3: (I64, n * _ROWS)}
        for n, (at, size) in enumerate(zip(begins, sizes, strict=True))
    ]
    count, size = sum(pages.rows), int(ends[-1])
    nulls = 0 if pages.nulls is None else sum(pages.nulls)
    physical = _PHYSICAL[pages.dtype.str]
    path = [field.name.encode()]
    meta = thrift_fields.column_metadata(physical, path, 0, [thrift_fields.RLE, thrift_fields.PLAIN], count, size, size)
    levels: Struct = {2: (LIST, Items(I64, [])), 3: (LIST, Items(I64, [nulls, count - nulls]))}
    meta = thrift_fields.with_page_statistics(meta, thrift_fields.PLAIN, len(sizes), levels)
    meta[thrift_fields.STATISTICS] = (STRUCT, _statistics(pages, nulls))
    index = _column_index(pages)
    if pages.nulls is not None:
        both = zip(pages.rows, pages.nulls, strict=True)
        index[7] = (LIST, Items(I64, [level for own, empty in both for level in (empty, own - empty)]))
    else:
        del meta[thrift_fields.SIZES]
    about: Struct = {2: (I64, 0), 3: (STRUCT, dict(sorted(meta.items())))}
    offsets: Struct = {1: (LIST, Items(STRUCT, places))}
    return Chunk(rows=count, fields=about, data=[buffer.data], size=size, offsets=offsets, columns=index)


def _bounds(values: _Numbers, begins: npt.NDArray[np.int64]) -> tuple[_Numbers, _Numbers] | None:
    """Minima and maxima of the pages that have values; None if one is NaN."""
    low, high = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    if low.dtype.kind == "f":
        if np.isnan(low).any():
            return None
        low[low == 0], high[high == 0] = -0.0, 0.0  # either may be the other
    return low, high


def _statistics(pages: _Pages, nulls: int) -> Struct:
    least, most = (BINARY, pages.low.min().tobytes()), (BINARY, pages.high.max().tobytes())
    # The older fields are for what compares as signed numbers.
    old: Struct = {} if pages.dtype.kind == "u" else {1: most, 2: least}
    return {**old, 3: (I64, nulls), 5: most, 6: least, 7: (BOOL, True), 8: (BOOL, True)}


def _column_index(pages: _Pages) -> Struct:
    """Pages without values have no bounds."""
    nulls = pages.nulls or [0] * len(pages.rows)
    empty = [own == missing for own, missing in zip(pages.rows, nulls, strict=True)]

    def stored(bounds: _Numbers) -> list[bytes]:
        left = iter(bounds)
        return [b"" if is_empty else next(left).tobytes() for is_empty in empty]

    return {
        1: (LIST, Items(BOOL, [1 if is_empty else 2 for is_empty in empty])),
        2: (LIST, Items(BINARY, stored(pages.low))),
        3: (LIST, Items(BINARY, stored(pages.high))),
        4: (I32, boundary_order(zip(pages.low.tolist(), pages.high.tolist(), strict=True))),
        5: (LIST, Items(I64, nulls)),
    }


def boundary_order(bounds: Iterable[tuple[Any, Any]]) -> int:
    """BoundaryOrder of pages: 1 ascending, 2 descending, 0 neither."""
    pages = list(bounds)
    if all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(pages)):
        return ASCENDING
    return DESCENDING if all(a[0] >= b[0] and a[1] >= b[1] for a, b in pairwise(pages)) else 0
