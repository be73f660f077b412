"""Writes pages that need little work without pyarrow: large binary values, lists of one length, plain numbers.

The format is parquet.thrift and Encodings.md of https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import INLINE, LONG, bytes_in, is_text, is_view, length_prefixed_bytes, offsets_of
from pqcache.parquet.pages import CODECS, Chunk, data_page_header, encode_flags, encode_run, memory
from pqcache.parquet.rewrite.encodings import Encodings
from pqcache.parquet.thrift import (
    ASCENDING,
    BINARY,
    BOOL,
    BYTE_ARRAY,
    DATA_PAGE,
    DESCENDING,
    I32,
    I64,
    LIST,
    PAGES,
    PLAIN,
    RLE,
    SIZES,
    STATISTICS,
    STRUCT,
    Items,
    Struct,
    column_metadata,
)
from pqcache.system.buffers import BufferPool

_PHYSICAL = {"i8": 2, "u8": 2, "f4": 4, "f8": 5}  # of numbers; smaller integers are INT32
_Numbers = npt.NDArray[Any]


class _Page(NamedTuple):
    """A data page: its rows, and its bytes with the header, as stored and before compression."""

    rows: int
    size: int
    uncompressed: int


def _chunk(
    path: Sequence[str],
    physical: int,
    data: list[memoryview],
    pages: Sequence[_Page],
    values: int,
    definitions: list[int],
    *,
    repetitions: list[int] | None = None,
    codec: int = 0,
    encoding: int = PLAIN,
    texts: Sequence[int] | None = None,
    statistics: Struct | None = None,
    columns: Struct | None = None,
) -> Chunk:
    """Describe ``pages``, which follow one another in ``data``.

    ``repetitions`` and ``definitions`` count values by level, and ``texts`` the bytes of texts in each page.
    """
    size, uncompressed = sum(page.size for page in pages), sum(page.uncompressed for page in pages)
    names = [name.encode() for name in path]
    meta = column_metadata(physical, names, codec, [RLE, encoding], values, uncompressed, size)
    if statistics is not None:
        meta[STATISTICS] = (STRUCT, statistics)
    meta[PAGES] = (LIST, Items(STRUCT, [{1: (I32, DATA_PAGE), 2: (I32, encoding), 3: (I32, len(pages))}]))
    sizes: Struct = {} if texts is None else {1: (I64, sum(texts))}
    if definitions or texts is not None:
        sizes |= {2: (LIST, Items(I64, repetitions or [])), 3: (LIST, Items(I64, definitions))}
        meta[SIZES] = (STRUCT, sizes)
    places: list[Struct] = []
    at = rows = 0
    for page in pages:
        places.append({1: (I64, at), 2: (I32, page.size), 3: (I64, rows)})
        at, rows = at + page.size, rows + page.rows
    offsets: Struct = {1: (LIST, Items(STRUCT, places))}
    if texts is not None:
        offsets[2] = (LIST, Items(I64, list(texts)))
    about: Struct = {2: (I64, 0), 3: (STRUCT, meta)}
    return Chunk(rows=rows, fields=about, data=data, size=size, offsets=offsets, columns=columns)


# ---- Large binary values
#
# A plain, uncompressed page of binary values is a sequence of lengths and bytes. For images there is nothing else to
# encode, so Arrow lays out many at once.

_TEXT_PAGE = 1 << 20


def is_direct(name: str, column: pa.ChunkedArray, encodings: Encodings) -> bool:
    """Whether `pages_of` writes a column: large values that need no conversion."""
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
    pages: list[_Page] = []
    texts: list[int] = []
    waiting: list[memoryview] = []
    count = size = 0

    def close() -> None:
        nonlocal count, size, waiting
        levels = encode_run(count, 1) if field.nullable else b""
        body = len(levels) + 4 * count + size
        header = data_page_header(count, PLAIN, body)
        data.extend((memoryview(header + levels), *waiting))
        pages.append(_Page(count, len(header) + body, len(header) + body))
        texts.append(size)
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
    definitions = [0, len(column)] if field.nullable else []
    return _chunk([field.name], BYTE_ARRAY, data, pages, len(column), definitions, texts=texts)


def _length_prefixed(chunk: pa.Array) -> Iterator[tuple[memoryview, npt.NDArray[np.int64]]]:
    """Yield the length-prefixed rows of an array, and where they would end without the prefixes."""
    found = length_prefixed_bytes(chunk) if is_view(chunk.type) else None
    if found is not None:
        yield from found
        return
    if is_view(chunk.type):
        chunk = chunk.cast(pa.large_binary())
    ends = offsets_of(chunk).astype(np.int64)
    yield memoryview(_laid_out(chunk)), ends - ends[0]


def _laid_out(chunk: pa.Array) -> pa.Buffer:
    """Prefix each value with its length.

    Lengths and values become binary views, whose bytes Arrow copies without holding the interpreter's lock. See
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


# ---- Lists of one length, whose levels are known in advance
#
# A general writer finds out for each value whether a list begins there and whether it is null, which takes longer than
# encoding the value. So these are written as a flat column, and every page gets the same few bytes of levels.

_SHORTEST, _LARGEST = 16, 1 << 28  # values of a list; bytes of a list
_LIST_PAGE, _LIST_ROWS = 1 << 19, 20_000  # bytes and rows of a page, which is compressed in the processor's cache
_TOGETHER = 8  # pages encoded in one go
_HEADER = 64  # bytes, at most, as it has no statistics


def length_of(field: pa.Field, column: pa.ChunkedArray, encodings: Encodings) -> int:
    """The length of all lists of a column, if `pages_of_lists` can write it; else 0."""
    kind = field.type
    if not (pt.is_list(kind) or pt.is_large_list(kind)) or not len(column) or column.null_count:
        return 0
    value, path = kind.value_type, ".".join(_path(field))
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


def _path(field: pa.Field) -> list[str]:
    return [field.name, "list", field.type.value_field.name]


def pages_of_lists(
    field: pa.Field, column: pa.ChunkedArray, length: int, encodings: Encodings, memory: BufferPool
) -> Chunk:
    path = ".".join(_path(field))
    codec, special = CODECS[encodings.codecs[path]], encodings.special.get(path)
    compress = None
    if codec.arrow is not None:
        compress = pa.Codec(codec.arrow, encodings.level if codec.has_levels else None)
    deepest = 1 + field.nullable + field.type.value_field.nullable
    data: list[memoryview] = []
    pages: list[_Page] = []
    encoding = PLAIN
    cut = _cut(column, length)
    for first in range(0, len(cut), _TOGETHER):
        made: list[bytes | memoryview] = []
        for count, encoding, body in _flat(cut[first : first + _TOGETHER], special, memory):
            parts: list[bytes | memoryview] = [_repetitions(count // length, length) + encode_run(count, deepest), body]
            plain = sum(map(len, parts))
            if compress is not None:
                parts = [compress.compress(b"".join(parts), asbytes=True)]
            stored = sum(map(len, parts))
            head = data_page_header(count, encoding, plain, stored)
            pages.append(_Page(count // length, len(head) + stored, len(head) + plain))
            made += [head, *parts]
        if compress is not None:  # into memory that is reused
            kept = memory.borrow(sum(map(len, made)))
            kept[:] = np.frombuffer(b"".join(made), np.uint8)
            made = [kept.data]
        data += map(memoryview, made)
    rows, values = len(column), len(column) * length
    physical = _PHYSICAL.get(str(_dtype(field.type.value_type))[1:], 1)
    definitions, repetitions = [0] * deepest + [values], [rows, values - rows]
    return _chunk(
        _path(field),
        physical,
        data,
        pages,
        values,
        definitions,
        repetitions=repetitions,
        codec=codec.number,
        encoding=encoding,
    )


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


def _repetitions(rows: int, length: int) -> bytes:
    """Repetition levels as runs: 0 for the first value of each list, 1 for the others."""
    run = bytearray((1 << 1, 0))
    thrift.put_varint(run, (length - 1) << 1)
    run.append(1)
    return (rows * len(run)).to_bytes(4, "little") + run * rows


# ---- Numbers stored as they are in memory: plain and without a codec
#
# They are only copied, and the minimum and maximum of each page found. If some are null, the others lie side by side
# behind bits that say which rows they belong to.

_ROWS = 20_000  # of a page, as in pyarrow's
_WIDER = {"i1": "<i4", "i2": "<i4", "u1": "<u4", "u2": "<u4"}


def is_plain(name: str, column: pa.ChunkedArray, encodings: Encodings) -> bool:
    """Whether `pages_of_numbers` writes a column: numbers that need no conversion."""
    return (
        encodings.as_is(name)
        and name in encodings.statistics
        and _dtype(column.type) is not None
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
    """None if there is a NaN, or a null that the field doesn't allow."""
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
    ends = list(accumulate(filled, initial=0))
    bounds = _bounds(values, np.array(ends[:-1])[np.array(filled) > 0])
    if bounds is None:
        return None
    parts = [values[begin:end] for begin, end in pairwise(ends)]
    heads = []
    for page, (own, part) in enumerate(zip(rows, parts, strict=True)):
        levels = encode_run(own, 1) if field.nullable else b""
        if len(part) < own:
            levels = encode_flags(there[page * _ROWS : page * _ROWS + own])
        heads.append(data_page_header(own, PLAIN, len(levels) + part.nbytes) + levels)
    sizes = [len(head) + part.nbytes for head, part in zip(heads, parts, strict=True)]
    pieces = [(np.frombuffer(head, np.uint8), part.view(np.uint8)) for head, part in zip(heads, parts, strict=True)]
    buffer = np.concatenate(list(chain.from_iterable(pieces)), out=memory(sum(sizes)))
    pages = [_Page(own, size, size) for own, size in zip(rows, sizes, strict=True)]
    nulls = [own - have for own, have in zip(rows, filled, strict=True)]
    definitions = [sum(nulls), sum(filled)] if field.nullable else []
    columns = _column_index(rows, nulls, *bounds)
    if field.nullable:
        columns[7] = (LIST, Items(I64, list(chain.from_iterable(zip(nulls, filled, strict=True)))))
    physical, statistics = _PHYSICAL.get(values.dtype.str[1:], 1), _statistics(sum(nulls), *bounds)
    return _chunk(
        [field.name], physical, [buffer.data], pages, count, definitions, statistics=statistics, columns=columns
    )


def _values(array: pa.Array) -> _Numbers:
    """Stored values; nulls have arbitrary ones."""
    dtype = np.dtype(_dtype(array.type))
    values = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    return values.astype(_WIDER[dtype.str[1:]]) if dtype.itemsize < 4 else values


def _bounds(values: _Numbers, begins: npt.NDArray[np.int64]) -> tuple[_Numbers, _Numbers] | None:
    """Minima and maxima of the pages with values; None if one is NaN."""
    low, high = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    if low.dtype.kind == "f":
        if np.isnan(low).any():
            return None
        low[low == 0], high[high == 0] = -0.0, 0.0  # either may be the other
    return low, high


def _statistics(nulls: int, low: _Numbers, high: _Numbers) -> Struct:
    least, most = (BINARY, low.min().tobytes()), (BINARY, high.max().tobytes())
    # the older fields are for types that compare as signed numbers
    old: Struct = {} if low.dtype.kind == "u" else {1: most, 2: least}
    return {**old, 3: (I64, nulls), 5: most, 6: least, 7: (BOOL, True), 8: (BOOL, True)}


def _column_index(rows: Sequence[int], nulls: Sequence[int], low: _Numbers, high: _Numbers) -> Struct:
    """Pages without values have no bounds."""
    empty = [own == missing for own, missing in zip(rows, nulls, strict=True)]

    def stored(bounds: _Numbers) -> list[bytes]:
        left = iter(bounds)
        return [b"" if is_empty else next(left).tobytes() for is_empty in empty]

    return {
        1: (LIST, Items(BOOL, [1 if is_empty else 2 for is_empty in empty])),
        2: (LIST, Items(BINARY, stored(low))),
        3: (LIST, Items(BINARY, stored(high))),
        4: (I32, boundary_order(zip(low.tolist(), high.tolist(), strict=True))),
        5: (LIST, Items(I64, list(nulls))),
    }


def boundary_order(bounds: Iterable[tuple[Any, Any]]) -> int:
    """BoundaryOrder of pages: 1 ascending, 2 descending, 0 neither."""
    pages = list(bounds)
    if all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(pages)):
        return ASCENDING
    return DESCENDING if all(a[0] >= b[0] and a[1] >= b[1] for a, b in pairwise(pages)) else 0
