"""Pages of large binary values, made without looking at them.

A plain, uncompressed page of binary values is their bytes, each with its length before it. For images that is all
there is to encode, so Arrow lays them out, many at once. The format is parquet.thrift and Encodings.md of
https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.parquet.binary_views import INLINE, LONG, bytes_in, is_view, length_prefixed_bytes, offsets_of
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import thrift_fields as fields
from pqcache.parquet.footer.thrift import I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.pages.page_format import Chunk, data_page_header, encode_run
from pqcache.parquet.schema_merge import is_text

_PAGE = 1 << 20
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
        header = data_page_header(count, fields.PLAIN, body)
        data.append(memoryview(header + levels))
        data.extend(waiting)
        places.append({1: (I64, at), 2: (I32, len(header) + body), 3: (I64, row)})
        sizes.append(size)
        at, row = at + len(header) + body, row + count
        waiting, count, size = [], 0, 0

    for laid, ends in (span for chunk in column.chunks for span in _length_prefixed(chunk)):
        low, last = 0, len(ends) - 1
        while low < last:
            high = int(np.searchsorted(ends, ends[low] + _PAGE - size, side="right")) - 1
            if high <= low:
                if count:
                    close()
                    continue
                high = low + 1  # one value that is larger than a page
            waiting.append(laid[int(ends[low]) + 4 * low : int(ends[high]) + 4 * high])
            count, size = count + high - low, size + int(ends[high] - ends[low])
            low = high
    close()
    meta = fields.column_metadata(_BYTE_ARRAY, [field.name.encode()], 0, [fields.RLE, fields.PLAIN], row, at, at)
    levels = _size_statistics(sum(sizes), row, field.nullable)
    meta = fields.with_page_statistics(meta, fields.PLAIN, len(places), levels)
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
