"""Mixes whose proportions or datasets change between epochs: a pure function of a few numbers; no reading.

A pass over a dataset goes on across a change. Its rows are divided among the lanes as the epochs would have drawn them
in which it began, so that what was read before the change and what is read after it make up the pass. After the change
lanes draw other numbers of batches than are left in each; then those that have too many leave their last ones to those
that have too few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.order.mixture_schedule import DatasetPass, MixSchedule


class MixPeriod(NamedTuple):
    """The epochs from ``since`` on, each with so many batches of each dataset."""

    since: int
    counts: Mapping[str, int]


class _Range(NamedTuple):
    """Batches ``start`` to ``stop`` of a dataset's lane."""

    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class MixHistory:
    """The draws of a mix over ``lanes`` lanes, of which the last of ``periods`` has no end.

    With ``together`` each batch holds a draw of every dataset, else of one of them.
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
        """Return how many batches of a dataset were drawn before a period."""
        spans = zip(self.periods[:period], self.periods[1 : period + 1], strict=True)
        return sum((end.since - begin.since) * begin.counts.get(name, 0) for begin, end in spans)

    def drawn(self, name: str, epoch: int, batches: Ints) -> int:
        """Return how many batches of a dataset were drawn until these of an epoch of the last period, with them."""
        last = len(self.periods) - 1
        since, counts = self.periods[-1]
        here = np.isin(self._schedules[-1].datasets(epoch, batches), self._number(name, last))
        return self.drawn_before(name, last) + (epoch - since) * counts[name] + int(here.sum())

    def passes(self, name: str, size: int, epoch: int, indices: Ints) -> list[DatasetPass]:
        """Return what batches ``indices`` of an epoch read of a dataset, whose passes have ``size`` batches.

        An epoch before the last period raises UsageError.
        """
        last = len(self.periods) - 1
        since = self.periods[-1].since
        if epoch < since:
            raise UsageError(f"epoch {epoch}", f"the mix was changed from epoch {since} on", "read later ones with it")
        schedule, drawn = self._schedules[-1], self.drawn_before(name, last)
        found = []
        for reading in schedule.passes(self._number(name, last), size, epoch - since, indices, drawn, since):
            began = reading.number * size
            if began < drawn:
                reading = self._across(name, size, reading)
            found.append(reading)
        return found

    @cached_property
    def _schedules(self) -> list[MixSchedule]:
        return [self._schedule(period.counts) for period in self.periods]

    def _schedule(self, counts: Mapping[str, int]) -> MixSchedule:
        numbers = (max(counts.values()),) if self.together else tuple(counts.values())
        return MixSchedule(numbers, self.lanes, self.seed)

    def _number(self, name: str, period: int) -> int:
        return 0 if self.together else list(self.periods[period].counts).index(name)

    def _lanes_of(self, name: str, period: int, first: int, last: int) -> Ints:
        """Return the lanes of a dataset's draws ``first`` to ``last``, if the period had no end."""
        since = self.periods[period].since
        before = self.drawn_before(name, period)
        return self._schedules[period].lanes_of(self._number(name, period), first - before, last - before, since)

    def _across(self, name: str, size: int, reading: DatasetPass) -> DatasetPass:
        """Return a pass that began in an earlier period, with its batches where they are left."""
        first, end = reading.number * size, (reading.number + 1) * size
        begins = [self.drawn_before(name, period) for period in range(len(self.periods))]
        parts = [
            (period, max(first, begin), min(end, following))
            for period, (begin, following) in enumerate(zip(begins, [*begins[1:], end], strict=True))
            if max(first, begin) < min(end, following)
        ]
        lanes = self._lanes_of(name, parts[0][0], first, end)
        lane_sizes = np.bincount(lanes, minlength=self.lanes)
        left = [[_Range(lane, 0, count)] for lane, count in enumerate(lane_sizes.tolist())]
        of_lanes, of_batches = [], []
        for period, start, stop in parts:
            drawing = self._lanes_of(name, period, start, end)
            _rebalance(left, np.bincount(drawing, minlength=self.lanes).tolist())
            found = np.zeros((2, stop - start), np.int64)
            for lane in range(self.lanes):
                places = np.flatnonzero(drawing[: stop - start] == lane)
                found[:, places] = _taken(left[lane], len(places))
            of_lanes.append(found[0])
            of_batches.append(found[1])
        return reading._replace(
            lanes=np.concatenate(of_lanes)[reading.batches],
            lane_batches=np.concatenate(of_batches)[reading.batches],
            lane_sizes=lane_sizes,
            last_lane=int(lanes[-1]),
            readers=reading.lanes,
        )


def _rebalance(left: list[list[_Range]], wanted: list[int]) -> None:
    """Move batches from the ends of lanes that have more ``left`` than is ``wanted`` of them to those with less."""
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
    """Remove the first batches of ranges; return their lanes and their numbers in these."""
    found = [np.zeros((2, 0), np.int64)]
    while count > 0:
        lane, start, stop = ranges.pop(0)
        kept = min(stop, start + count)
        count -= kept - start
        found.append(np.stack([np.full(kept - start, lane), np.arange(start, kept)]))
        if kept < stop:
            ranges.insert(0, _Range(lane, kept, stop))
    return np.concatenate(found, axis=1)
