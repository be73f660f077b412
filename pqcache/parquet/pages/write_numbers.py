"""Pages of numbers that are stored as they lie in memory: plain, without a codec, and none of them null.

All that a writer does with them is to copy them, and to find the least and the largest of each page. The format is
parquet.thrift and Encodings.md of https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import thrift_fields
from pqcache.parquet.footer.thrift import BINARY, BOOL, I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.page_index import boundary_order
from pqcache.parquet.pages.page_format import data_page_header, encode_run
from pqcache.parquet.pages.write_binary import EncodedColumn
from pqcache.system.buffer_pool import Buffer

_ROWS = 20_000  # of a page, as pyarrow has them
_PHYSICAL = {"<i4": 1, "<u4": 1, "<i8": 2, "<u8": 2, "<f4": 4, "<f8": 5}
_WIDER = {"i1": "<i4", "i2": "<i4", "u1": "<u4", "u2": "<u4"}
_Numbers = npt.NDArray[Any]


def is_plain(name: str, column: pa.ChunkedArray, encodings: Encodings) -> bool:
    """Return whether the column ``name`` of a table is encoded like this: numbers, and nothing to do to them."""
    return (
        encodings.as_is(name)
        and name in encodings.statistics
        and _dtype(column.type) is not None
        and not (encodings.int96 and pt.is_timestamp(column.type))
        and len(column) > 0
        and column.null_count == 0
    )


def _dtype(kind: pa.DataType) -> str | None:
    """Return how numpy calls the values of a type that Parquet stores as they are, or wider."""
    if pt.is_integer(kind):
        return f"<{'i' if pt.is_signed_integer(kind) else 'u'}{kind.bit_width // 8}"
    if pt.is_float32(kind) or pt.is_float64(kind):
        return f"<f{kind.bit_width // 8}"
    # Seconds are stored as milliseconds, and date64 as days.
    if pt.is_date32(kind) or ((pt.is_time(kind) or pt.is_timestamp(kind)) and kind.unit != "s"):
        return f"<i{kind.bit_width // 8}"
    return None


def pages_of_numbers(field: pa.Field, column: pa.ChunkedArray) -> EncodedColumn | None:
    """Return the pages of a column that `is_plain`; None where a value is not a number."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    dtype = np.dtype(_dtype(array.type))
    values = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    if dtype.itemsize < 4:
        values = values.astype(_WIDER[dtype.str[1:]])
    bounds = _bounds(values)
    if bounds is None:
        return None
    count, width = len(values), values.itemsize
    in_full_pages = count // _ROWS * _ROWS
    rows = [_ROWS] * (in_full_pages // _ROWS) + ([count - in_full_pages] if in_full_pages < count else [])
    heads = {own: _head(own, width, field.nullable) for own in rows[-2:]}
    sizes = [len(heads[own]) + own * width for own in rows]
    buffer = np.frombuffer(pa.allocate_buffer(sum(sizes)), np.uint8)  # of the memory that decoded rows leave
    at = in_full_pages // _ROWS * sizes[0]
    if in_full_pages:
        _fill(buffer[:at], heads[_ROWS], values[:in_full_pages])
    if in_full_pages < count:
        _fill(buffer[at:], heads[count - in_full_pages], values[in_full_pages:])
    places = [{1: (I64, n * sizes[0]), 2: (I32, size), 3: (I64, n * _ROWS)} for n, size in enumerate(sizes)]
    physical = _PHYSICAL[values.dtype.str]
    path = [field.name.encode()]
    meta = thrift_fields.column_metadata(
        physical, path, 0, [thrift_fields.RLE, thrift_fields.PLAIN], count, len(buffer), len(buffer)
    )
    levels: Struct = {2: (LIST, Items(I64, [])), 3: (LIST, Items(I64, [0, count]))}
    meta = thrift_fields.with_page_statistics(meta, thrift_fields.PLAIN, len(rows), levels)
    meta[thrift_fields.STATISTICS] = (STRUCT, _statistics(*bounds))
    index = _column_index(*bounds)
    if field.nullable:
        index[7] = (LIST, Items(I64, [level for own in rows for level in (0, own)]))
    else:
        del meta[thrift_fields.SIZES]
    about: Struct = {2: (I64, 0), 3: (STRUCT, dict(sorted(meta.items())))}
    return EncodedColumn(
        fields=about, data=[buffer.data], size=len(buffer), offsets={1: (LIST, Items(STRUCT, places))}, columns=index
    )


def _head(rows: int, width: int, nullable: bool) -> bytes:
    """Return what is in front of a page's values: its header, and the levels of values that are not null."""
    levels = encode_run(rows, 1) if nullable else b""
    return data_page_header(rows, thrift_fields.PLAIN, len(levels) + rows * width) + levels


def _fill(buffer: Buffer, head: bytes, values: _Numbers) -> None:
    """Fill a block with pages that have the same head, and as many values as one another."""
    pages = buffer.reshape(-1, len(head) + min(len(values), _ROWS) * values.itemsize)
    pages[:, : len(head)] = np.frombuffer(head, np.uint8)
    pages[:, len(head) :] = values.view(np.uint8).reshape(len(pages), -1)  # as bytes, which need not be aligned


def _bounds(values: _Numbers) -> tuple[_Numbers, _Numbers] | None:
    """Return the least and the largest value of each page; None where there are values that are not numbers."""
    full_pages = values[: len(values) // _ROWS * _ROWS].reshape(-1, _ROWS)
    low, high = full_pages.min(axis=1), full_pages.max(axis=1)
    if len(rest := values[full_pages.size :]):
        low, high = np.append(low, rest.min()), np.append(high, rest.max())
    if values.dtype.kind == "f":
        if np.isnan(low).any():
            return None
        low[low == 0], high[high == 0] = -0.0, 0.0  # either may be the other
    return low, high


def _statistics(low: _Numbers, high: _Numbers) -> Struct:
    """Return the chunk's Statistics, where its pages' bounds are these."""
    least, most = (BINARY, low.min().tobytes()), (BINARY, high.max().tobytes())
    # The older fields are for what compares as signed numbers.
    old: Struct = {} if low.dtype.kind == "u" else {1: most, 2: least}
    return {**old, 3: (I64, 0), 5: most, 6: least, 7: (BOOL, True), 8: (BOOL, True)}


def _column_index(low: _Numbers, high: _Numbers) -> Struct:
    """Return the ColumnIndex of pages without nulls."""
    return {
        1: (LIST, Items(BOOL, [2] * len(low))),
        2: (LIST, Items(BINARY, [value.tobytes() for value in low])),
        3: (LIST, Items(BINARY, [value.tobytes() for value in high])),
        4: (I32, boundary_order(zip(low.tolist(), high.tolist(), strict=True))),
        5: (LIST, Items(I64, [0] * len(low))),
    }
