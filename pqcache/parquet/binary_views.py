"""Arrow arrays of views: strings and binary that lie in other buffers, such as the pages of a file.

A view is the length, and either up to 12 bytes or the first four, the number of the buffer and where in it the bytes
begin. See https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

LONG = 2048  # bytes of a value, from which on it is read and written as a view
INLINE = 12  # bytes that a view holds itself


def is_view(kind: pa.DataType) -> bool:
    return bool(pt.is_binary_view(kind) or pt.is_string_view(kind))


def bytes_in(column: pa.ChunkedArray) -> int:
    """The bytes of a column. For views only the bytes that they point to: ``nbytes`` would count whole pages."""
    if not is_view(column.type):
        return int(column.nbytes)
    return sum(int(_words(chunk)[:, 0].sum(dtype=np.int64)) for chunk in column.chunks)


def _words(views: pa.Array) -> npt.NDArray[np.int32]:
    """The four words of each view: length, first four bytes, buffer, and offset in it."""
    if not len(views):
        return np.zeros((0, 4), np.int32)
    return np.frombuffer(views.buffers()[1], "<i4", 4 * len(views), 16 * views.offset).reshape(-1, 4)


def without_views(table: pa.Table) -> pa.Table:
    """Copy strings and binary views to contiguous arrays."""
    for number, field in enumerate(table.schema):
        if is_view(field.type):
            kind = pa.large_string() if pt.is_string_view(field.type) else pa.large_binary()
            table = table.set_column(number, field.with_type(kind), table.column(number).cast(kind))
    return table


def length_prefixed_bytes(views: pa.Array) -> list[tuple[memoryview, npt.NDArray[np.int64]]] | None:
    """Return stretches of length-prefixed rows, each with the ends that the rows would have without their lengths.

    Returns None unless every row has its length in front, as in a page.
    """
    words = _words(views)
    lengths, numbers, begins = words[:, 0].astype(np.int64), words[:, 2], words[:, 3].astype(np.int64)
    if np.any(lengths <= INLINE) or np.any(begins < 4):
        return None
    if not len(words):
        return []
    buffers = [np.frombuffer(buffer, np.uint8) for buffer in views.buffers()[2:]]
    cuts = np.flatnonzero((numbers[1:] != numbers[:-1]) | (begins[1:] != begins[:-1] + lengths[:-1] + 4)) + 1
    found = []
    for low, high in pairwise([0, *cuts.tolist(), len(words)]):
        data = buffers[numbers[low]]
        heads = data[begins[low:high, None] + np.arange(-4, 0)].reshape(-1).view("<i4")
        if not np.array_equal(heads, lengths[low:high]):
            return None
        bytes_ = data[begins[low] - 4 : begins[high - 1] + lengths[high - 1]].data
        found.append((bytes_, np.concatenate([[0], np.cumsum(lengths[low:high])])))
    return found


def offsets_of(chunk: pa.Array) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    """Return where each value of an array of lists, strings or binary begins, and where the last one ends."""
    large = pt.is_large_binary(chunk.type) or pt.is_large_string(chunk.type) or pt.is_large_list(chunk.type)
    kind = np.int64 if large else np.int32  # pyarrow's own to_numpy would load pandas
    if not len(chunk):  # whose buffer may hold nothing
        return np.zeros(1, kind)
    return np.frombuffer(chunk.buffers()[1], kind, len(chunk) + 1, chunk.offset * np.dtype(kind).itemsize)
