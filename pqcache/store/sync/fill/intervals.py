"""A set of byte ranges of one file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Intervals:
    """Disjoint ranges ``[start, end)`` in order; ranges that touch are one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def copy(self) -> Intervals:
        """Return a set of the same ranges."""
        other = Intervals()
        other._starts, other._ends = list(self._starts), list(self._ends)
        return other

    def add(self, start: int, end: int) -> None:
        """Add a range; parts of it may be there."""
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]

    def remove(self, start: int, end: int) -> None:
        """Remove a range; parts of it may be missing."""
        if start >= end:
            return
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return
        low, high = self._starts[first], self._ends[last - 1]
        left = [(low, start)] if low < start else []
        right = [(end, high)] if end < high else []
        kept = [*left, *right]
        self._starts[first:last], self._ends[first:last] = [s for s, _ in kept], [e for _, e in kept]

    def has(self, start: int, end: int) -> bool:
        """Return whether all of a range is there."""
        if start >= end:
            return True
        position = bisect_right(self._starts, start) - 1
        return position >= 0 and self._ends[position] >= end

    def missing(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range that are not there, in order."""
        position = bisect_right(self._ends, start)
        while start < end:
            until = self._starts[position] if position < len(self._starts) else end
            if start < until:
                yield start, min(until, end)
            if position < len(self._ends):
                start = max(start, self._ends[position])
                position += 1
            else:
                start = end

    @property
    def total(self) -> int:
        """Bytes of all ranges."""
        return sum(self._ends) - sum(self._starts)
