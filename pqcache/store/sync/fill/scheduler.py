"""Which range of which file is fetched next: a function of what is there, what is being fetched, and what is wanted.

Readers that wait now come first, then all readers in turn, each by its first row group that is missing, then the rest
in the order of the files. No byte is given out twice, unless it was put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqcache.store.arriving.wanted import Wanted
from pqcache.store.sync.fill.intervals import Intervals

PIECE = 4 << 20  # bytes of a request: several threads fetch the pieces of a large row group at once
SMALL = 1 << 20  # bytes up to which neighbouring row groups are fetched with a wanted one
GAP = 256 << 10  # bytes between wanted columns that are fetched with them

Range = tuple[int, int]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """The range ``[start, end)`` of a file, by its position in path order."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FileRanges:
    """Where row groups lie: by row group of the index its ``file``, and ``[starts, ends)`` of all its chunks.

    ``sizes`` are those of the files. ``columns`` returns where the named columns of a row group lie, None where all of
    it is to be fetched.
    """

    sizes: Sequence[int]
    file: Ints
    starts: Ints
    ends: Ints
    columns: Callable[[int, tuple[str, ...]], Sequence[Range] | None]


class _WantedOrder:
    """What one reader wants, and how far that has been given out."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.next = 0


class Scheduler:
    """Gives out the ranges to fetch; not for several threads at once."""

    def __init__(self, ranges: FileRanges, there: Sequence[Intervals]) -> None:
        """``there`` has for each file what need not be fetched, and is changed: given out counts as there."""
        self._ranges = ranges
        self._taken = there
        self._orders: list[_WantedOrder] = []
        self._turn = 0
        self._next_file = 0
        self._dropped: set[int] = set()

    def want(self, wanted: Sequence[Wanted]) -> None:
        """Replace what readers want."""
        known = {id(order.wanted): order for order in self._orders}
        self._orders = [known.get(id(item)) or _WantedOrder(item) for item in wanted]

    def take(self) -> Piece | None:
        """Return what to fetch next; None where everything is there or being fetched."""
        for urgent in (True, False):
            orders = [order for order in self._orders if order.wanted.urgent is urgent]
            for position in range(len(orders)):
                order = orders[(self._turn + position) % len(orders)]
                if (piece := self._next_wanted(order)) is not None:
                    self._turn += position + 1
                    return self._given(piece)
        piece = self._next_of_rest()
        return None if piece is None else self._given(piece)

    def put_back(self, file: int, start: int, end: int) -> None:
        """Give out a range again that could not be fetched."""
        self._taken[file].remove(start, end)
        self._next_file = min(self._next_file, file)
        for order in self._orders:
            order.next = 0

    def drop(self, file: int) -> None:
        """Give out nothing more of a file."""
        self._dropped.add(file)

    def _given(self, piece: Piece) -> Piece:
        self._taken[piece.file].add(piece.start, piece.end)
        return piece

    def _next_wanted(self, order: _WantedOrder) -> Piece | None:
        row_groups, columns = order.wanted.row_groups, order.wanted.columns
        while order.next < len(row_groups):
            row_group = int(row_groups[order.next])
            if 0 <= row_group < len(self._ranges.file):
                for start, end in self._missing(row_group, columns):
                    end = min(end, start + PIECE)
                    file = int(self._ranges.file[row_group])
                    return Piece(file, start, max(end, self._with_neighbours(row_group, start, end)))
            order.next += 1
        return None

    def _missing(self, row_group: int, columns: tuple[str, ...] | None) -> Iterator[Range]:
        """Yield the ranges of a row group that have not been given out."""
        file = int(self._ranges.file[row_group])
        if file in self._dropped:
            return
        start, end = int(self._ranges.starts[row_group]), int(self._ranges.ends[row_group])
        if self._taken[file].has(start, end):
            return
        found = None if columns is None else self._ranges.columns(row_group, columns)
        for low, high in [(start, end)] if found is None else _merged(found):
            yield from self._taken[file].missing(low, high)

    def _with_neighbours(self, row_group: int, start: int, end: int) -> int:
        """Return where a range ends that has small row groups behind ``row_group`` too, if they are missing."""
        ranges, file = self._ranges, self._ranges.file[row_group]
        if end < ranges.ends[row_group]:
            return end
        following = row_group + 1
        while following < len(ranges.file) and ranges.file[following] == file:
            low, high = int(ranges.starts[following]), int(ranges.ends[following])
            gap = next(self._taken[int(file)].missing(end, high), None)
            if not end <= low or high - start > SMALL or gap != (end, high):
                break
            end, following = high, following + 1
        return end

    def _next_of_rest(self) -> Piece | None:
        while self._next_file < len(self._ranges.sizes):
            file = self._next_file
            if file not in self._dropped:
                for start, end in self._taken[file].missing(0, self._ranges.sizes[file]):
                    return Piece(file, start, min(end, start + PIECE))
            self._next_file += 1
        return None


def _merged(ranges: Sequence[Range]) -> Iterator[Range]:
    """Yield ranges with those between which little lies as one."""
    last: Range | None = None
    for start, end in sorted(ranges):
        if last is not None and start - last[1] <= GAP:
            last = (last[0], max(last[1], end))
            continue
        if last is not None:
            yield last
        last = (start, end)
    if last is not None:
        yield last
