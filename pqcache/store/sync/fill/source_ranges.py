"""Where the bytes of an arriving file are at the source, where only some columns of it are fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pqcache.parquet.projection import ByteRange, Projection

Ints = npt.NDArray[np.int64]

WHOLE: Ints = np.zeros((0, 3), np.int64)  # of a file that has the source's bytes


def source_ranges(projection: Projection, start: int) -> Ints:
    """Return (start, start at the source, length) of each range of a file whose pages begin at ``start``."""
    lengths = np.array([item.length for item in projection.ranges], np.int64)
    sources = np.array([item.offset for item in projection.ranges], np.int64)
    return np.stack([start + np.cumsum(lengths) - lengths, sources, lengths], axis=1)


def known_from(ranges: Ints, size: int, start: int) -> int:
    """Return from where on a file is known if the source's file is known from ``start`` on.

    ``size`` is where the file's own footer begins, which is known.
    """
    known = size
    for here, source, length in reversed(ranges.tolist()):
        if source + length < start:
            break
        known = here + max(0, start - source)
        if source < start:
            break
    return known


def parts_of(ranges: Ints, start: int, end: int) -> Iterator[ByteRange]:
    """Yield where ``[start, end)`` of a file is at the source, in its order."""
    if not len(ranges):
        yield ByteRange(start, end - start)
        return
    first = int(np.searchsorted(ranges[:, 0] + ranges[:, 2], start, side="right"))
    for here, source, length in ranges[first:].tolist():
        if here >= end:
            return
        low, high = max(start, here), min(end, here + length)
        if low < high:
            yield ByteRange(source + low - here, high - low)


def pieces_in(received: memoryview, position: int, ranges: Sequence[ByteRange]) -> Iterator[memoryview]:
    """Yield what is wanted of bytes that were ``received`` from ``position`` on, in order."""
    for item in ranges:
        low, high = max(item.offset, position), min(item.end, position + len(received))
        if low < high:
            yield received[low - position : high - position]
