"""Strings and binary where they lie: in pages of a column chunk, each value with its length before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.parquet.binary_views import INLINE
from pqcache.parquet.pages.page_format import Bytes, NotRead
from pqcache.system.buffer_pool import BufferPool

MOST_BYTES = 2**31 - 1  # a view reaches this far into its buffer


@dataclass(frozen=True)
class ByteArrays:
    """Rows of strings or binary where they lie: row i is ``pages[p][1][begins[i]:begins[i] + lengths[i]]``.

    ``pages`` are (first row, bytes), and p is the last page whose first row is not beyond i.
    """

    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    pages: list[tuple[int, Bytes]]


class ChunkMemory:
    """A block for the pages of a column chunk, one after the other, so that its rows are views into one buffer.

    Views into hundreds of buffers cost more than their bytes: each array of them holds them all.
    """

    def __init__(self, pool: BufferPool, size: int) -> None:
        self.block = pool.borrow(size)
        self._pool, self._used = pool, 0
        self._begin = int(self.block.ctypes.data)

    def borrow(self, size: int) -> Bytes:
        """Return the next ``size`` bytes of the block, or memory of the pool where so many are not left."""
        if size > len(self.block) - self._used:
            return self._pool.borrow(size)
        self._used += size
        return self.block[self._used - size : self._used]

    def offset_of(self, data: Bytes) -> int | None:
        """Return the offset in the block at which ``data`` begin; None if they are elsewhere."""
        offset = int(data.ctypes.data) - self._begin
        return offset if 0 <= offset <= len(self.block) - len(data) else None


def join(parts: Sequence[ByteArrays], memory: ChunkMemory | None) -> ByteArrays:
    """Return the rows of pages, one after the other; those in ``memory`` have its block as their page."""
    pages: list[tuple[int, Bytes]] = []
    begins, lengths, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for part in parts:
        data = part.pages[0][1]
        offset = None if memory is None else memory.offset_of(data)
        if memory is not None and offset is not None:
            data = memory.block
        if not pages or pages[-1][1] is not data:
            pages.append((first, data))
        begins.append(part.begins + (offset or 0))
        lengths.append(part.lengths)
        first += len(part.begins)
    return ByteArrays(np.concatenate(begins), np.concatenate(lengths), pages)


def split(data: Bytes, count: int) -> ByteArrays:
    """Return where each of the byte arrays of a plain page is; its length is in front of it."""
    at, view = 4, data.data
    begins = [at]
    length_at, note = struct.Struct("<I").unpack_from, begins.append
    for _ in range(count):
        at += length_at(view, at - 4)[0] + 4
        note(at)
    if at - 4 != len(data):
        raise NotRead("values that are not all of their page")
    found = np.array(begins, np.int64)
    return ByteArrays(found[:-1], np.diff(found) - 4, [(0, data)])


def views_of(rows: ByteArrays, kind: pa.DataType | None = None) -> pa.Array:
    """Return rows of bytes as views, binary or of ``kind``, into the pages they lie in."""
    count = len(rows.begins)
    views = np.zeros((count, 16), np.uint8)
    views[:, :4] = rows.lengths.astype("<i4").view(np.uint8).reshape(-1, 4)
    views[:, 12:] = rows.begins.astype("<i4").view(np.uint8).reshape(-1, 4)
    ends = [first for first, _ in rows.pages[1:]] + [count]
    for number, ((first, data), end) in enumerate(zip(rows.pages, ends, strict=True)):
        views[first:end, 8:12] = np.array([number], "<i4").view(np.uint8)
        begins, lengths = rows.begins[first:end], rows.lengths[first:end]
        heads = begins[:, None] + np.arange(4)
        views[first:end, 4:8] = data.take(heads, mode="clip")
        for row in np.flatnonzero(lengths <= INLINE):
            begin, length = int(begins[row]), int(lengths[row])
            views[first + row, 4:] = 0
            views[first + row, 4 : 4 + length] = data[begin : begin + length]
    pages = [pa.py_buffer(data) for _, data in rows.pages]
    return pa.Array.from_buffers(kind or pa.binary_view(), count, [None, pa.py_buffer(views), *pages])
