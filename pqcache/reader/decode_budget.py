"""What threads do with the memory that windows leave: decode ahead, and keep what they have decoded."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from pqcache.reader.memory import RowGroupSizes, decoding_ahead, decoding_in_file_order, largest_of
from pqcache.units import format_size

log = logging.getLogger("pqcache.reader")

STRETCHES = 3  # of blocks that a lane has on their way, at least: one being used, one ready, one in the making
_MOST_STRETCHES = 9  # more would wait for the interpreter's lock and for the thread that uses the batches
_STRETCH = 32 << 20  # bytes of one, about, at most: a batch that somebody keeps may keep as many
_SMALL_STRETCH = 8 << 20  # bytes of one, below which fewer of them take less time


@dataclass(frozen=True, kw_only=True)
class DecodeBudget:
    """What memory allows a process: ``decoding`` row groups decoded at once, by ``threads`` threads, which also gather.

    With ``keep_decoded`` long rows remain where they were decoded until the last row of their row group is used, which
    saves copying them into buckets. ``arena_slots`` is how many row groups of the largest size fit into memory then;
    0 if not all that are needed. ``row_group_bytes`` are what one has on average; 0 where that is not known.
    ``stretch_bytes`` are about what blocks may have that a lane gathers at once; 0 where memory allows few only.
    At most ``stretches`` of blocks are on their way in each lane, and three where blocks or batches are larger.
    """

    threads: int
    decoding: int
    keep_decoded: bool = False
    arena_slots: int = 0
    row_group_bytes: int = 0
    stretch_bytes: int = 0
    stretches: int = STRETCHES


def budget_in_file_order(sizes: RowGroupSizes, memory: float, threads: int) -> DecodeBudget:
    """Return how many of ``threads`` threads may decode ahead within ``memory`` bytes when nothing is mixed."""
    decoding = decoding_in_file_order(sizes, memory, threads)
    return DecodeBudget(threads=decoding, decoding=decoding)


def decode_budget(
    sizes: RowGroupSizes, memory: float, *, lanes: int, all_lanes: int, window: int, threads: int
) -> DecodeBudget:
    """Return what ``memory`` bytes allow a process of ``threads`` threads that reads ``lanes`` of ``all_lanes`` lanes.

    Who decodes takes a row group twice, decoded and scattered. Up to half of those for whom the windows leave memory
    give way, but for two, if decoded rows can be kept then.
    """
    if not len(sizes):
        return DecodeBudget(threads=1, decoding=1)
    of_lane, largest = -(-len(sizes) // all_lanes), max(1, sizes.largest)
    decoding = decoding_ahead(sizes, memory, lanes, all_lanes, window, threads)
    kept = np.minimum(sizes.decoded, 2 * sizes.selected)  # of filtered rows, where they are less than half only those
    windows = int(largest_of(kept, lanes * window).sum())
    read = int(kept.sum()) * lanes // all_lanes + lanes * largest  # by these lanes; they may begin in the middle

    def left(decoding: int) -> float:
        return memory - min(windows, read) - 2 * (lanes + decoding) * largest

    least = max(min(decoding, 2), decoding // 2)
    decoding = next((fewer for fewer in range(decoding, least - 1, -1) if left(fewer) >= 0), decoding)
    mean = int(sizes.selected.mean())
    if left(decoding) < 0:
        log.debug("long rows are copied into buckets: decoded row groups do not fit into %s", format_size(memory))
        return DecodeBudget(threads=threads, decoding=decoding, row_group_bytes=mean)

    def slots(row_groups: int) -> int:
        return lanes * min(row_groups, of_lane + 1) + 2 * (lanes + decoding)

    largest_selected, mean = max(1, int(sizes.selected.max())), max(1, mean)
    stretches, stretch = _stretches(left(decoding) / lanes, -(-threads // lanes), mean / largest_selected)
    free = int(memory / largest) - slots(window)
    if free < 0:
        log.debug("long rows are gathered bucket by bucket: an arena does not fit into %s", format_size(memory))
        arena_slots = 0
    else:  # those that come after the first three are of row groups beyond the window
        stretch = min(stretch, mean * (STRETCHES + free // lanes) // stretches)
        arena_slots = slots(window + max(0, -(-stretches * stretch // mean) - STRETCHES))
    return DecodeBudget(
        threads=threads,
        decoding=decoding,
        keep_decoded=True,
        arena_slots=arena_slots,
        row_group_bytes=mean,
        stretch_bytes=stretch,
        stretches=stretches,
    )


def _stretches(memory: float, threads: int, share: float) -> tuple[int, int]:
    """Return how many stretches of blocks a lane of so many ``threads`` has on their way, and the bytes of one.

    Each is there decoded and gathered, and one is used: of ``n`` stretches one takes 1/(2n + 2) of the ``memory`` that
    is left, and only a ``share`` of that where some row groups are larger than the average.
    """

    def size(number: int) -> int:
        return int(min(_STRETCH, memory / (2 * number + 2)) * share)

    numbers = range(min(_MOST_STRETCHES, 1 + threads), STRETCHES, -1)
    number = next((n for n in numbers if size(n) >= _SMALL_STRETCH), STRETCHES)
    return number, size(number)
