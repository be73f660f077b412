"""Assigns the batches of a mix to its datasets: a pure function of a few numbers, without reading.

Each dataset contributes a fixed number of batches to an epoch of a mix. They are interleaved as evenly as possible
(``interleave``), which needs no randomness and no knowledge of earlier batches: a tree of two-way splits, each rounded
exactly. With two datasets, neither is ever more than half a batch away from its share.

A mix has lanes like a dataset: batch i belongs to lane ``i % lanes``, and a lane reads each dataset through that
dataset's lane of the same number. Each round of ``lanes`` batches is rotated by a number of its own, so that no lane
(and no rank, as ranks own lanes) always gets the same dataset. A batch only moves within its round.

A dataset is read in endless passes: an epoch continues where the one before stopped. A pass is divided among the lanes
as they read, so each of its batches comes exactly once.

Proportions and datasets may change between epochs, and a pass goes on across a change. Its rows stay divided among the
lanes according to the epochs in which it began, so nothing is repeated or lost. After the change, lanes may draw more
or fewer batches than they have left; lanes with too many then give their last ones to lanes with too few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order import Ints, Order, interleave, random_words
from pqcache.store.key_lookup import ranges_of
from pqcache.units import is_number, is_whole

_MOST_BATCHES = 1 << 28  # of an epoch; each takes at least 8 bytes
_ROTATION = 3  # the purpose of a random stream; the order uses the numbers before it


def batches_per_epoch(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None, length: str | int = "first_exhausted"
) -> tuple[int, ...]:
    """The number of batches from each dataset in an epoch of the mix.

    ``sizes`` are batches of one pass; without ``weights``, these are the sizes. ``length`` is "first_exhausted" (the
    epoch ends when one dataset has been read once, and no other more often), "all_exhausted" (when each has been read
    at least once), or a number of batches. Invalid options raise UsageError.
    """
    for name, size in sizes.items():
        if not size:
            raise UsageError(f"dataset {name!r}", "has no batches", "leave it out of the mix, or check its filters")
    shares = _shares(sizes, weights)
    per_share = {name: sizes[name] / shares[name] for name in sizes}
    if length == "first_exhausted":
        wanted = [min(per_share.values()) * share for share in shares.values()]
    elif length == "all_exhausted":
        wanted = [max(per_share.values()) * share for share in shares.values()]
    elif is_whole(length) and int(length) > 0:
        wanted = [int(length) * share for share in shares.values()]
    else:
        raise UsageError(
            f"epoch_length={length!r}", "choose 'first_exhausted', 'all_exhausted' or a number of batches of at least 1"
        )
    if is_whole(length):
        counts = _rounded(wanted, int(length))
    else:
        counts = [math.floor(share + Fraction(1, 2)) for share in wanted]
    if sum(counts) > _MOST_BATCHES:
        raise UsageError(
            "epoch_length",
            f"an epoch would have more than {_MOST_BATCHES:,} batches",
            "give weights that differ less, or a smaller epoch_length",
        )
    for name, count in zip(sizes, counts, strict=True):
        if not count:
            raise UsageError(
                "weights",
                f"{name!r} has none of the epoch's {sum(counts)} batches",
                "give it a larger weight, the mix a larger epoch_length, or leave it out",
            )
    return tuple(counts)


def batches_of_all(sizes: Mapping[str, int], length: str | int) -> int:
    """The number of batches in an epoch whose batches mix rows of every dataset; see `batches_per_epoch`."""
    of_all: Any = length * len(sizes) if is_whole(length) else length
    return batches_per_epoch(sizes, dict.fromkeys(sizes, 1), of_all)[0]


def _shares(sizes: Mapping[str, int], weights: Mapping[str, float] | None) -> dict[str, Fraction]:
    if weights is None:
        weights = sizes
    if not isinstance(weights, Mapping) or set(weights) != set(sizes):
        raise UsageError(f"weights={weights!r}", f"give a number for each of {', '.join(map(repr, sizes))}")
    for name, weight in weights.items():
        if not is_number(weight) or not 0 < weight < math.inf:
            raise UsageError(f"weights[{name!r}]={weight!r}", "give a number above 0")
    found = {name: Fraction(np.asarray(weights[name]).item()) for name in sizes}
    return {name: weight / sum(found.values()) for name, weight in found.items()}


def _rounded(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Round to integers that sum to ``total``: the largest remainders are rounded up."""
    counts = [math.floor(value) for value in wanted]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


class DatasetPass(NamedTuple):
    """The batches of one pass over a dataset that a part of an epoch reads.

    ``positions``      where its batches are among the requested indices
    ``batches``        their numbers in the pass, ``lanes`` their lanes, and ``lane_batches`` their numbers in these
    ``lane_sizes``     the batches of each lane in the complete pass
    ``last_lane``      the lane of the pass's last batch
    ``readers``        the lanes of the mix that read them, if different from ``lanes``
    """

    number: int
    positions: Ints
    batches: Ints
    lanes: Ints
    lane_batches: Ints
    lane_sizes: Ints
    last_lane: int
    readers: Ints | None = None

    def order_of(self, order: Order) -> Order:
        """The order of the pass, its rows divided among lanes in proportion to the mix's draws."""
        lane_rows = self.lane_sizes * order.batch_size
        lane_rows[self.last_lane] -= max(0, int(lane_rows.sum()) - order.rows)  # the last batch may be short
        return replace(order, lane_rows=lane_rows)


@dataclass(frozen=True)
class MixSchedule:
    """The dataset of each batch of an epoch: ``counts`` batches of each dataset, over ``lanes`` lanes."""

    counts: tuple[int, ...]
    lanes: int = 1
    seed: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts)

    @cached_property
    def interleaved(self) -> Ints:
        """The dataset of each batch before rounds are rotated."""
        return interleave(self.counts)

    @cached_property
    def _rotations(self) -> Ints:
        raw = random_words(-(-self.total // self.lanes), self.seed, 0, _ROTATION, 0, 0)
        return np.asarray(raw % np.uint64(self.lanes), np.int64)

    def _rotated(self, positions: Ints, epochs: Ints | int, direction: int) -> Ints:
        """Rotate positions within their rounds, by one more each epoch, so that lanes get the same over many epochs."""
        rounds = positions // self.lanes
        sizes = np.minimum(self.lanes, self.total - rounds * self.lanes)
        rotations = (self._rotations[rounds] + epochs) % sizes
        first = rounds * self.lanes
        return np.asarray(first + (positions - first + direction * rotations) % sizes, np.int64)

    def datasets(self, epoch: int, indices: Ints | None = None) -> Ints:
        """The datasets of batches ``indices`` (None: all) of an epoch."""
        wanted = np.arange(self.total) if indices is None else indices
        return np.asarray(self.interleaved[self._rotated(wanted, epoch, 1)], np.int64)

    def drawn(self, dataset: int, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        """Which batches among ``indices`` of an epoch come from a dataset, and how many of its batches precede each."""
        rotated = self._rotated(indices, epoch, 1)
        positions = np.flatnonzero(self.interleaved[rotated] == dataset)
        return positions, np.searchsorted(np.flatnonzero(self.interleaved == dataset), rotated[positions])

    def lanes_of(self, dataset: int, first: int, last: int, since: int) -> Ints:
        """The lanes of a dataset's batches ``first`` to ``last``, counted from epoch ``since`` on."""
        epochs, nth = np.divmod(np.arange(first, last), self.counts[dataset])
        slots = np.flatnonzero(self.interleaved == dataset)
        return np.asarray(self._rotated(slots[nth], epochs + since, -1) % self.lanes, np.int64)


class MixPeriod(NamedTuple):
    """The epochs from ``since`` on, with ``counts`` batches of each dataset."""

    since: int
    counts: Mapping[str, int]


class _Range(NamedTuple):
    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class MixHistory:
    """The draws of a mix over ``lanes`` lanes; the last of ``periods`` is open-ended.

    With ``together``, each batch combines draws of all datasets, else it is a draw of one.
    """

    periods: tuple[MixPeriod, ...]
    seed: int
    lanes: int = 1
    together: bool = False

    @property
    def total(self) -> int:
        """Batches of an epoch of the last period."""
        counts = self.periods[-1].counts.values()
        return max(counts) if self.together else sum(counts)

    def drawn_before(self, name: str, period: int) -> int:
        """Batches drawn from a dataset before a period."""
        spans = zip(self.periods[:period], self.periods[1 : period + 1], strict=True)
        return sum((end.since - begin.since) * begin.counts.get(name, 0) for begin, end in spans)

    def drawn(self, name: str, epoch: int, batches: Ints) -> int:
        """Batches drawn from a dataset up to the end of ``batches`` of an epoch of the last period."""
        last, (since, counts) = len(self.periods) - 1, self.periods[-1]
        here, _ = self._schedules[-1].drawn(self._number(name, last), epoch, batches)
        return self.drawn_before(name, last) + (epoch - since) * counts[name] + len(here)

    def passes(self, name: str, size: int, epoch: int, indices: Ints) -> list[DatasetPass]:
        """What batches ``indices`` of an epoch read from a dataset whose passes have ``size`` batches.

        An epoch before the last period raises UsageError.
        """
        since, counts = self.periods[-1]
        if epoch < since:
            raise UsageError(f"epoch {epoch}", f"the mix was changed from epoch {since} on", "read later ones with it")
        last = len(self.periods) - 1
        positions, nth = self._schedules[-1].drawn(self._number(name, last), epoch, indices)
        batches = self.drawn_before(name, last) + (epoch - since) * counts[name] + nth  # counted over all passes
        passes = batches // size
        order = np.argsort(passes, kind="stable")
        numbers, firsts = np.unique(passes[order], return_index=True)
        parts = np.split(order, firsts[1:]) if len(order) else []
        return [
            self._pass(name, size, number, positions[some], batches[some] - number * size)
            for number, some in zip(numbers.tolist(), parts, strict=True)
        ]

    def _pass(self, name: str, size: int, number: int, positions: Ints, batches: Ints) -> DatasetPass:
        """The part of a pass with ``batches``, counted from 0, for the indices at ``positions``."""
        first, end = number * size, (number + 1) * size
        begins = [self.drawn_before(name, period) for period in range(len(self.periods))]
        parts = [
            (period, max(first, begin), min(end, following))
            for period, (begin, following) in enumerate(zip(begins, [*begins[1:], end], strict=True))
            if max(first, begin) < min(end, following)
        ]
        planned = self._lanes_of(name, parts[0][0], first, end)
        lane_sizes = np.bincount(planned, minlength=self.lanes)
        lanes, lane_batches, readers = planned, _numbered(planned, lane_sizes), None
        if len(parts) > 1:
            lanes, lane_batches = self._across(name, parts, end, lane_sizes)
            readers = self._lanes_of(name, len(self.periods) - 1, first, end)[batches]
        return DatasetPass(
            number=number,
            positions=positions,
            batches=batches,
            lanes=lanes[batches],
            lane_batches=lane_batches[batches],
            lane_sizes=lane_sizes,
            last_lane=int(planned[-1]),
            readers=readers,
        )

    def _across(self, name: str, parts: list[tuple[int, int, int]], end: int, lane_sizes: Ints) -> Ints:
        """The lanes of a pass up to draw ``end``, and the numbers in them, if several periods draw from it."""
        left = [[_Range(lane, 0, count)] for lane, count in enumerate(lane_sizes.tolist())]
        found = []
        for period, start, stop in parts:
            drawing = self._lanes_of(name, period, start, end)
            _rebalance(left, np.bincount(drawing, minlength=self.lanes).tolist())
            part = np.zeros((2, stop - start), np.int64)
            for lane in range(self.lanes):
                places = np.flatnonzero(drawing[: stop - start] == lane)
                part[:, places] = _taken(left[lane], len(places))
            found.append(part)
        return np.concatenate(found, axis=1)

    def _lanes_of(self, name: str, period: int, first: int, last: int) -> Ints:
        """The lanes of a dataset's draws ``first`` to ``last``, as if the period had no end."""
        since, before = self.periods[period].since, self.drawn_before(name, period)
        return self._schedules[period].lanes_of(self._number(name, period), first - before, last - before, since)

    @cached_property
    def _schedules(self) -> list[MixSchedule]:
        counts = [tuple(period.counts.values()) for period in self.periods]
        return [MixSchedule((max(each),) if self.together else each, self.lanes, self.seed) for each in counts]

    def _number(self, name: str, period: int) -> int:
        return 0 if self.together else list(self.periods[period].counts).index(name)


def _numbered(lanes: Ints, sizes: Ints) -> Ints:
    """For each item, how many earlier ones are of the same lane; ``sizes`` is the count per lane."""
    found = np.empty(len(lanes), np.int64)
    found[np.argsort(lanes, kind="stable")] = ranges_of(np.zeros_like(sizes), sizes)
    return found


def _rebalance(left: list[list[_Range]], wanted: list[int]) -> None:
    """Move batches from the ends of lanes with more ``left`` than ``wanted`` to lanes with fewer."""
    spare: list[_Range] = []
    for ranges, count in zip(left, wanted, strict=True):
        more = sum(r.stop - r.start for r in ranges) - count
        while more > 0:
            lane, start, stop = ranges.pop()
            kept = max(start, stop - more)
            more -= stop - kept
            spare.append(_Range(lane, kept, stop))
            if kept > start:
                ranges.append(_Range(lane, start, kept))
    for ranges, count in zip(left, wanted, strict=True):
        less = count - sum(r.stop - r.start for r in ranges)
        while less > 0:
            lane, start, stop = spare.pop()
            kept = min(stop, start + less)
            less -= kept - start
            ranges.append(_Range(lane, start, kept))
            if kept < stop:
                spare.append(_Range(lane, kept, stop))
        ranges.sort()  # so that the batches of each lane come in order, also across several changes


def _taken(ranges: list[_Range], count: int) -> Ints:
    """Remove the first ``count`` batches of ranges; return their lanes and their numbers in them."""
    found = [np.zeros((2, 0), np.int64)]
    while count > 0:
        lane, start, stop = ranges.pop(0)
        kept = min(stop, start + count)
        count -= kept - start
        found.append(np.stack([np.full(kept - start, lane), np.arange(start, kept)]))
        if kept < stop:
            ranges.insert(0, _Range(lane, kept, stop))
    return np.concatenate(found, axis=1)
