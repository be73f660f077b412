"""What fits into memory: how many row groups are mixed, in what pieces, and how many are decoded ahead.

These are pure functions of what the row-group index says of the row groups that are read, so that all readers of one
snapshot mix alike. A lane is a stream of batches with a window of its own.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.units import format_size

log = logging.getLogger("pqcache.reader")

WINDOW = 16  # row groups, where memory allows
WINDOW_OF_ALL = 32  # row groups, where memory holds all rows; more of them take long to gather
IN_FILE_ORDER = 3  # row groups in memory, at least: one ahead, and two that a batch may be of
_ALONE = 2  # row groups' worth of memory that reading one takes: as decoded, and its rows in order
_DECODING = 4  # row groups' worth of memory beside the window: one ahead, one being decoded, read and scattered
_WINDOWS_OF_PIECES = (16, 8, 4)
_LEAST_PIECE = 4 << 20  # bytes of a decoded piece, below which the fixed cost of each shows
_MOST_PIECES = 64  # pieces of a row group, at most
_UNFORESEEN = 8  # parts of a lane's memory: a row group that is larger than the index says may take one


@dataclass(frozen=True)
class RowGroupSizes:
    """Bytes in memory of each row group: of its ``selected`` rows, and of all that is ``decoded`` to select them.

    ``decoded_rows`` are the rows, or sequences, among which these are selected; pieces are cut of them. ``complete``
    says that they are of all row groups, not only of the largest.
    """

    selected: Ints
    decoded: Ints
    decoded_rows: Ints
    complete: bool = True

    def __len__(self) -> int:
        return len(self.selected)

    @property
    def largest(self) -> int:
        """The bytes of the largest row group, decoded."""
        return int(self.decoded.max(initial=0))


class Window(NamedTuple):
    """How many row groups each lane mixes, and the rows of the pieces in which they are read; 0: not in pieces."""

    row_groups: int
    piece_rows: int = 0


def fit(
    sizes: RowGroupSizes,
    memory: int,
    lanes: int,
    shuffle: bool,
    name: object = "the dataset",
    pieces: bool = False,
    all_lanes: int | None = None,
) -> Window:
    """Return the window of each of ``lanes`` lanes, of ``all_lanes``, within ``memory`` bytes.

    In file order it is one row group. Row groups of which fewer than 16 fit are read in pieces, of which 16 are mixed,
    if ``pieces`` says that these have pages of their own. Others are read whole, one at a time in each lane if need
    be; a warning says when that takes more than ``memory``. UsageError if pieces would be tiny, or one row group alone
    is too large.
    """
    if not shuffle:
        least = IN_FILE_ORDER * sizes.largest
        if least <= memory:
            return Window(1)
        if not pieces:
            return _whole(sizes, memory, least, name)
        return Window(1, _piece_rows(sizes, memory, IN_FILE_ORDER, least, name))
    window = largest_window(sizes, memory, lanes, all_lanes)
    if window >= min(WINDOW, len(sizes)):
        return Window(window)
    for mixed in _WINDOWS_OF_PIECES if pieces else ():
        number = _number_of_pieces(sizes, memory, _pieces_at_once(mixed, lanes))
        if window < mixed and number <= _MOST_PIECES and sizes.largest >= _LEAST_PIECE * number:
            log.debug("%s: row groups are read in %d pieces or more, of which %d are mixed", name, number, mixed)
            return Window(mixed, -(-_rows_of_largest(sizes) // number))
    if window:
        log.debug("%s: memory=%s is enough to mix %d row groups", name, format_size(memory), window)
        return Window(window)
    mixed, least = _WINDOWS_OF_PIECES[-1], int(lane_bytes(sizes, 1)) * lanes
    if not pieces:
        return _whole(sizes, memory, least, name, f" and {lanes} lanes")
    return Window(mixed, _piece_rows(sizes, memory, _pieces_at_once(mixed, lanes), least, name, f" and {lanes} lanes"))


def largest_window(sizes: RowGroupSizes, memory: int, lanes: int, all_lanes: int | None = None) -> int:
    """Return how many complete row groups each of ``lanes`` lanes can mix within ``memory`` bytes, at most 16.

    Where memory holds all rows, these are all row groups of a lane, up to 32, whatever the number of ranks that the
    dataset's ``all_lanes`` are divided among. 0 when row groups are too large even for a window of one.
    """
    if not len(sizes):
        return 1
    if sizes.complete and int(sizes.selected.sum()) + lanes * _DECODING * sizes.largest <= memory:
        return max(WINDOW, min(-(-len(sizes) // (all_lanes or lanes)), WINDOW_OF_ALL))
    sizes = RowGroupSizes(largest_of(sizes.selected, WINDOW), largest_of(sizes.decoded, 1), sizes.decoded_rows)
    fitting = [window for window in range(1, WINDOW + 1) if lane_bytes(sizes, window) <= memory / lanes]
    return max(fitting, default=0)


def lane_bytes(sizes: RowGroupSizes, window: int) -> float:
    """Return the bytes that a lane takes with a window: its rows, and what is decoded meanwhile."""
    return window_bytes(sizes, window) + _DECODING * sizes.largest


def window_bytes(sizes: RowGroupSizes, window: int) -> float:
    """Return the bytes of the rows that a window holds at most: about half of each of its row groups."""
    largest = largest_of(sizes.selected, window)
    return float(largest.mean()) * (window / 2 + 1) if len(largest) else 0.0


def largest_of(sizes: Ints, most: int) -> Ints:
    """Return the largest sizes, at most so many."""
    return sizes if len(sizes) <= most else np.partition(sizes, len(sizes) - most)[len(sizes) - most :]


def decoding_ahead(sizes: RowGroupSizes, memory: float, lanes: int, all_lanes: int, window: int, threads: int) -> int:
    """Return how many row groups a process of ``threads`` threads may decode at once, beside the windows of its lanes.

    Who decodes takes a row group twice, decoded and ready to be mixed.
    """
    of_lane, largest = -(-len(sizes) // all_lanes), max(1, sizes.largest)
    mixed = min(window, of_lane) if window <= WINDOW else window
    spare = memory - lanes * (window_bytes(sizes, mixed) + 2 * largest)
    return int(max(1, min(threads, spare / (2 * largest))))


def decoding_in_file_order(sizes: RowGroupSizes, memory: float, threads: int) -> int:
    """Return how many of ``threads`` threads may decode ahead within ``memory`` bytes when nothing is mixed."""
    fitting = int(memory / max(1, sizes.largest))
    return max(1, min(threads, fitting - IN_FILE_ORDER + 1))


class MostDecoded(NamedTuple):
    """How many ``bytes`` a row group may take when it turns out to be larger than the index says.

    With ``memory`` a row group of ``at_once`` times fewer bytes is never refused.
    """

    bytes: float
    memory: float
    at_once: int


def most_decoded(sizes: RowGroupSizes, memory: float, lanes: int) -> MostDecoded:
    """Return what ``lanes`` lanes with ``memory`` bytes can bear beyond what the index says."""
    at_once = _UNFORESEEN * lanes
    return MostDecoded(max(1.25 * sizes.largest, memory / at_once), memory, at_once)


def check_decoded(size: float, most: MostDecoded, path: object, row_group: int) -> None:
    """Raise UsageError if a row group of ``size`` bytes decoded is more than ``most``."""
    if size > most.bytes:
        raise UsageError(
            path,
            f"row group {row_group} takes {format_size(int(size))} decoded, more than the row groups that were looked "
            f"at: too much for memory={format_size(int(most.memory))}",
            "run 'pqcache repartition' with a smaller --row-group-size, read fewer columns, or give "
            f"memory={format_size(int(1.01 * size * most.at_once))!r}",
        )


def check_complete(sizes: RowGroupSizes, memory: int, lanes: int, shuffle: bool, name: object) -> None:
    """Raise UsageError where row groups are too large to be read other than in pieces, and have to be read complete."""
    least = int(lane_bytes(sizes, 1)) * lanes if shuffle else IN_FILE_ORDER * sizes.largest
    if least > memory:
        raise UsageError(
            name,
            f"a row group takes {format_size(sizes.largest)} decoded and packed, too much for "
            f"memory={format_size(memory)}",
            "run 'pqcache repartition' with a smaller --row-group-size, or give "
            f"memory={format_size(int(1.01 * least))!r}",
        )


def warn_of_window(sizes: RowGroupSizes, window: int, memory: int, lanes: int, name: object) -> None:
    """Warn if a window that was set takes more than ``memory`` bytes on ``lanes`` lanes."""
    needed = lane_bytes(sizes, min(window, max(1, len(sizes)))) * lanes
    if needed > memory:
        warnings.warn(
            f"{name}: window={window} takes about {format_size(int(needed))}, more than memory={format_size(memory)}: "
            "leave window unset, or set a smaller one",
            stacklevel=2,
        )


def _piece_rows(sizes: RowGroupSizes, memory: int, at_once: int, least: int, name: object, lanes: str = "") -> int:
    """Return the rows of pieces of which ``at_once`` fit, where complete row groups would take ``least`` bytes."""
    rows, number = _rows_of_largest(sizes), _number_of_pieces(sizes, memory, at_once)
    reason = _too_large(sizes, memory, lanes)
    if number > min(rows, _MOST_PIECES):
        raise UsageError(name, reason, f"read fewer columns, or give memory={format_size(1.01 * least)!r}")
    log.debug("%s: row groups are read in %d pieces: %s", name, number, reason)
    return -(-rows // number)


def _whole(sizes: RowGroupSizes, memory: int, least: int, name: object, lanes: str = "") -> Window:
    """Return the window for row groups that cannot be read in pieces, and take ``least`` bytes one at a time."""
    advice = (
        "run 'pqcache repartition', which writes smaller ones that can be read in pieces, read fewer columns, or give "
        f"memory={format_size(1.01 * least)!r}"
    )
    reason = _too_large(sizes, memory, lanes)
    if _ALONE * sizes.largest > memory:
        raise UsageError(name, reason, advice)
    warnings.warn(f"{name}: {reason}: one is read at a time in each lane, which may take more; {advice}", stacklevel=3)
    return Window(1)


def _too_large(sizes: RowGroupSizes, memory: int, lanes: str) -> str:
    return f"a row group takes {format_size(sizes.largest)} decoded, too much for memory={format_size(memory)}{lanes}"


def _number_of_pieces(sizes: RowGroupSizes, memory: int, at_once: int) -> int:
    """Return into how many pieces the largest row group is split, so that ``at_once`` of them fit into ``memory``."""
    return max(1, -(-sizes.largest * at_once // max(1, memory)))


def _pieces_at_once(window: int, lanes: int) -> int:
    """Return how many pieces are in memory when ``lanes`` lanes mix ``window`` of them."""
    return (window // 2 + 1 + _DECODING) * lanes


def _rows_of_largest(sizes: RowGroupSizes) -> int:
    return int(sizes.decoded_rows[int(np.argmax(sizes.decoded))])
