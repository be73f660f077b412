"""What fits into memory: how many row groups are mixed, how many are decoded at once, and in what pieces."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.units import format_size

log = logging.getLogger("pqcache.reader")

WINDOW = 16  # row groups, where memory allows
WINDOW_OF_ALL = 32  # row groups, where memory holds all rows; more of them take long to gather
_DECODING = 4  # row groups' worth of memory beside the window: one ahead, one being decoded, read and scattered
_IN_FILE_ORDER = 3  # row groups in memory, at least: one ahead, and two that a batch may be of
_WINDOWS_OF_PIECES = (16, 8, 4)
_LEAST_PIECE = 4 << 20  # bytes of a decoded piece, below which the fixed cost of each shows
_UNFORESEEN = 8  # parts of a lane's memory: a row group that was not looked at may take one
_MOST_PIECES = 64  # pieces of a row group, at most
STRETCHES = 3  # of blocks that a lane has on their way, at least: one being used, one ready, one in the making
_MOST_STRETCHES = 9  # more would wait for the interpreter's lock and for the thread that uses the batches
_STRETCH = 32 << 20  # bytes of one, about, at most: a batch that somebody keeps may keep as many
_SMALL_STRETCH = 8 << 20  # bytes of one, below which fewer of them take less time


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


class Window(NamedTuple):
    """How many row groups each lane mixes, and the rows of the pieces in which they are read; 0: not in pieces."""

    row_groups: int
    piece_rows: int = 0


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


def even(number: int) -> float:
    """Return that the rows of a row group are about as long everywhere."""
    return 1.0


def never(number: int) -> bool:
    """Return that a row group is decoded from its beginning."""
    return False


def anywhere(number: int, rows: int) -> int:
    """Return that pieces of a row group may have as many ``rows`` as fit."""
    return rows


class PiecesOf(NamedTuple):
    """What is known of row groups that may be read in pieces, each by its number.

    ``density`` returns how many times as long as the average the longest rows of one are. ``by_pages`` returns whether
    a piece of one is read from its own pages; otherwise all that is before it is decoded too. ``along_pages`` returns
    how many rows pieces of one have, where so many fit, that few pages are read for two pieces.
    """

    density: Callable[[int], float] = even
    by_pages: Callable[[int], bool] = never
    along_pages: Callable[[int, int], int] = anywhere


_FROM_BEGINNING = PiecesOf()


class MostDecoded(NamedTuple):
    """How many ``bytes`` a row group may take when it turns out to be larger than was estimated.

    With ``memory`` a row group of ``at_once`` times fewer bytes is never refused.
    """

    bytes: float
    memory: float
    at_once: int


def most_decoded(sizes: RowGroupSizes, memory: float, lanes: int) -> MostDecoded:
    """Return what ``lanes`` lanes with ``memory`` bytes can bear beyond what was estimated."""
    at_once = _UNFORESEEN * lanes
    return MostDecoded(max(1.25 * int(sizes.decoded.max(initial=0)), memory / at_once), memory, at_once)


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


def warn_of_window(sizes: RowGroupSizes, window: int, memory: int, lanes: int, name: object) -> None:
    """Warn if a window that was set takes more than ``memory`` bytes on ``lanes`` lanes."""
    needed = lane_bytes(sizes, min(window, max(1, len(sizes)))) * lanes
    if needed > memory:
        warnings.warn(
            f"{name}: window={window} takes about {format_size(int(needed))}, more than memory={format_size(memory)}: "
            "leave window unset, or set a smaller one",
            stacklevel=2,
        )


def window_bytes(sizes: RowGroupSizes, window: int) -> float:
    """Return the bytes of the rows that a window holds at most: about half of each of its row groups."""
    largest = _largest(sizes.selected, window)
    return float(largest.mean()) * (window / 2 + 1) if len(largest) else 0.0


def _largest(sizes: Ints, most: int) -> Ints:
    """Return the largest sizes, at most so many, in descending order."""
    some = sizes if len(sizes) <= most else np.partition(sizes, len(sizes) - most)[len(sizes) - most :]
    return np.sort(some)[::-1]


def lane_bytes(sizes: RowGroupSizes, window: int) -> float:
    """Return the bytes that a lane takes with a window: its rows, and what is decoded meanwhile."""
    return window_bytes(sizes, window) + _DECODING * int(sizes.decoded.max(initial=0))


def largest_window(sizes: RowGroupSizes, memory: int, lanes: int, all_lanes: int | None = None) -> int:
    """Return how many row groups each of ``lanes`` lanes can mix within ``memory`` bytes, at most 16.

    Where memory holds all rows, these are all row groups of a lane, up to 32, whatever the number of ranks that the
    dataset's ``all_lanes`` are divided among. 0 when row groups are too large even for a window of one.
    """
    if not len(sizes):
        return 1
    held = int(sizes.selected.sum()) + lanes * _DECODING * int(sizes.decoded.max())
    if sizes.complete and held <= memory:
        return max(WINDOW, min(-(-len(sizes) // (all_lanes or lanes)), WINDOW_OF_ALL))
    sizes = RowGroupSizes(_largest(sizes.selected, WINDOW), sizes.decoded[[sizes.decoded.argmax()]], sizes.decoded_rows)
    fitting = [window for window in range(1, WINDOW + 1) if lane_bytes(sizes, window) <= memory / lanes]
    return max(fitting, default=0)


def fit_window(
    sizes: RowGroupSizes,
    memory: int,
    lanes: int,
    name: object = "the dataset",
    pieces: PiecesOf = _FROM_BEGINNING,
    all_lanes: int | None = None,
) -> Window:
    """Return the window for each of ``lanes`` lanes within ``memory`` bytes; see `largest_window`.

    Row groups of which fewer than 16 fit are read in pieces, of which 16 are mixed, if these have pages of their own.
    Others are read in pieces only where they are too large even for a window of one: four are mixed, and a warning says
    how to do better. So little memory that pieces would be tiny raises UsageError.
    """
    window = largest_window(sizes, memory, lanes, all_lanes)
    if window >= min(WINDOW, len(sizes)):
        return Window(window)
    largest = int(np.argmax(sizes.decoded))
    by_pages = pieces.by_pages(largest)
    pieces = pieces._replace(density=cache(pieces.density))  # which may decode texts, once for all sizes of a piece
    for mixed in _WINDOWS_OF_PIECES if by_pages else ():
        number = _number_of_pieces(sizes, memory, _pieces_at_once(mixed, lanes), pieces)
        if window < mixed and number <= _MOST_PIECES and int(sizes.decoded[largest]) >= _LEAST_PIECE * number:
            log.debug("%s: row groups are read in %d pieces or more, of which %d are mixed", name, number, mixed)
            return Window(mixed, pieces.along_pages(largest, -(-int(sizes.decoded_rows[largest]) // number)))
    if window:
        log.debug("%s: memory=%s is enough to mix %d row groups", name, format_size(memory), window)
        return Window(window)
    mixed, least = _WINDOWS_OF_PIECES[-1], int(lane_bytes(sizes, 1)) * lanes
    too_large = _TooLarge(sizes=sizes, memory=memory, least=least, lanes=f" and {lanes} lanes", name=name)
    return Window(mixed, too_large.piece_rows(_pieces_at_once(mixed, lanes), pieces, by_pages))


def _pieces_at_once(window: int, lanes: int) -> int:
    """Return how many pieces are in memory when ``lanes`` lanes mix ``window`` of them."""
    return (window // 2 + 1 + _DECODING) * lanes


def fit_in_file_order(
    sizes: RowGroupSizes, memory: int, name: object = "the dataset", pieces: PiecesOf = _FROM_BEGINNING
) -> Window:
    """Return the window, of one row group, for reading in the order of the files within ``memory`` bytes.

    Row groups of which not even three fit are read in pieces; see `fit_window`.
    """
    least = _IN_FILE_ORDER * int(sizes.decoded.max(initial=0))
    if least <= memory:
        return Window(1)
    by_pages = pieces.by_pages(int(np.argmax(sizes.decoded)))
    too_large = _TooLarge(sizes=sizes, memory=memory, least=least, lanes="", name=name)
    return Window(1, too_large.piece_rows(_IN_FILE_ORDER, pieces, by_pages))


def fit(
    sizes: RowGroupSizes,
    memory: int,
    lanes: int,
    shuffle: bool,
    name: object = "the dataset",
    pieces: PiecesOf = _FROM_BEGINNING,
    all_lanes: int | None = None,
) -> Window:
    """Return the window within ``memory`` bytes: shuffled on ``lanes`` of ``all_lanes``, or in file order."""
    if shuffle:
        return fit_window(sizes, memory, lanes, name, pieces, all_lanes)
    return fit_in_file_order(sizes, memory, name, pieces)


def check_complete(sizes: RowGroupSizes, memory: int, lanes: int, shuffle: bool, name: object) -> None:
    """Raise UsageError where row groups are too large to be read other than in pieces, and have to be read complete."""
    largest = int(sizes.decoded.max(initial=0))
    least = int(lane_bytes(sizes, 1)) * lanes if shuffle else _IN_FILE_ORDER * largest
    if least > memory:
        raise UsageError(
            name,
            f"a row group takes {format_size(largest)} decoded and packed, too much for memory={format_size(memory)}",
            "run 'pqcache repartition' with a smaller --row-group-size, or give "
            f"memory={format_size(int(1.01 * least))!r}",
        )


@dataclass(frozen=True, kw_only=True)
class _TooLarge:
    """Row groups that do not fit into ``memory``, where complete ones would take ``least`` bytes; ``lanes`` is text."""

    sizes: RowGroupSizes
    memory: int
    least: int
    lanes: str
    name: object

    def piece_rows(self, at_once: int, pieces: PiecesOf, by_pages: bool) -> int:
        """Return the rows of pieces of which ``at_once`` fit."""
        largest = int(np.argmax(self.sizes.decoded))
        size, rows = int(self.sizes.decoded[largest]), int(self.sizes.decoded_rows[largest])
        number = _number_of_pieces(self.sizes, self.memory, at_once, pieces)
        reason = (
            f"a row group takes {format_size(size)} decoded, too much for memory={format_size(self.memory)}{self.lanes}"
        )
        smaller = "" if by_pages else "run 'pqcache repartition' with a smaller --row-group-size, "
        advice = f"{smaller}read fewer columns, or give memory={format_size(1.01 * self.least)!r}"
        if number > min(rows, _MOST_PIECES):
            raise UsageError(self.name, reason, advice)
        log.debug("%s: row groups are read in %d pieces: %s", self.name, number, reason)
        if not by_pages:
            slow = f"read in {number} pieces, which is slow"
            warnings.warn(f"{self.name}: {reason}: {slow}; {advice}", stacklevel=2)
        fitting = -(-rows // number)
        return pieces.along_pages(largest, fitting) if by_pages else fitting


def _number_of_pieces(sizes: RowGroupSizes, memory: int, at_once: int, pieces: PiecesOf) -> int:
    """Return into how many pieces the largest row group is split, so that ``at_once`` of them fit into ``memory``."""
    largest = int(np.argmax(sizes.decoded))
    number = -(-int(sizes.decoded[largest]) * at_once // max(1, memory))
    if number > min(int(sizes.decoded_rows[largest]), _MOST_PIECES):
        return number
    return int(np.ceil(number * pieces.density(largest)))


def budget_in_file_order(sizes: RowGroupSizes, memory: float, threads: int) -> DecodeBudget:
    """Return how many of ``threads`` threads may decode ahead within ``memory`` bytes when nothing is mixed."""
    fitting = int(memory / max(1, int(sizes.decoded.max(initial=0))))
    decoding = max(1, min(threads, fitting - _IN_FILE_ORDER + 1))
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
    of_lane, largest = -(-len(sizes) // all_lanes), max(1, int(sizes.decoded.max()))
    mixed = min(window, of_lane) if window <= WINDOW else window
    spare = memory - lanes * (window_bytes(sizes, mixed) + 2 * largest)
    decoding = int(max(1, min(threads, spare / (2 * largest))))
    kept = np.minimum(sizes.decoded, 2 * sizes.selected)  # of filtered rows, where they are less than half only those
    windows = int(_largest(kept, lanes * window).sum())
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
