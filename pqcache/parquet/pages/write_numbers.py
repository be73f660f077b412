"""Pages of numbers that are stored as they lie in memory: plain, and without a codec.

All that a writer does with them is to copy them, and to find the least and the largest of each page. Where some are
null, the others lie side by side, and bits in front of them say which rows they are of. The format is parquet.thrift
and Encodings.md of https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import thrift_fields
from pqcache.parquet.footer.thrift import BINARY, BOOL, I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.footer.thrift_fields import ASCENDING, DESCENDING
from pqcache.parquet.pages.page_format import Chunk, data_page_header, encode_flags, encode_run
from pqcache.system.buffer_pool import Buffer

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
