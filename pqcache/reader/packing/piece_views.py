"""Arrow's binary views of parts of a buffer, made of where they begin: no byte that they point to is copied."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.parquet.binary_views import INLINE
from pqcache.reader.order.epoch_order import Ints

_STEP = 1 << 30  # bytes from one of the buffers to the next; a view's 31 bits reach as far behind its end
_REACH = (1 << 31) - 1

Words = npt.NDArray[np.int32]  # (views, 4): see `pqcache.parquet.binary_views`


def view_words(data: npt.NDArray[np.uint8], begins: Ints, lengths: Ints, first_buffer: int = 0) -> Words:
    """Return views of ``data``: ``lengths`` bytes from ``begins`` on, of at most a GB each.

    Their buffers are `view_buffers` of ``data``, the first of which has the number ``first_buffer``.
    """
    words = np.zeros((len(begins), 4), "<i4")
    words[:, 0] = lengths
    words[:, 2] = first_buffer + begins // _STEP
    words[:, 3] = begins % _STEP
    short = np.flatnonzero(lengths <= INLINE)
    heads = np.where(lengths > INLINE, begins, 0)
    if len(short) < len(begins):
        words[:, 1] = data[heads[:, None] + np.arange(4)].view("<i4")[:, 0]
    places = np.arange(INLINE)
    inside = places < lengths[short, None]
    held = np.zeros((len(short), INLINE), np.uint8)
    held[inside] = data[(begins[short, None] + places)[inside]]
    words[short, 1:] = held.view("<i4")
    return words


def view_buffers(data: npt.NDArray[np.uint8]) -> list[pa.Buffer]:
    """Return the buffers that views of ``data`` point to: parts of it that overlap, as a view reaches 2 GB."""
    return [pa.py_buffer(data[begin : begin + _REACH]) for begin in range(0, len(data), _STEP)]


def array_of(words: Words, buffers: list[pa.Buffer]) -> pa.Array:
    """Return views of ``buffers`` as an array."""
    return pa.Array.from_buffers(pa.binary_view(), len(words), [None, pa.py_buffer(words), *buffers])
