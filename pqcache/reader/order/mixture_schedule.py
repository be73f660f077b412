"""Which dataset each batch of a mix comes from: a pure function of a few numbers; numpy only, no reading.

In an epoch of a mix each dataset gives a fixed number of batches. They are interleaved as evenly as possible
(``interleave``), which needs no randomness and no memory of the batches before: a tree of two-way splits, each of
which rounds exactly. With two datasets, neither is ever more than half a batch away from its share.

A mix has lanes as a dataset has: batch i belongs to lane ``i % lanes``, and what a lane reads of a dataset comes from
that dataset's lane of the same number. So that no lane (and no rank, as ranks own lanes) always gets the same dataset,
each round of ``lanes`` batches is rotated by a number of its own. That moves a batch within its round only.

A dataset is read pass after pass, without an end: an epoch's first batch of it follows the last one of the epoch
before. A pass is divided among the lanes as they read, so each of its batches comes exactly once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints, Order, random_words

_MOST_BATCHES = 1 << 28  # of an epoch, each of which takes 8 bytes and more
_ROTATION = 3  # what a random stream is for, after those of the order


def batches_per_epoch(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None, length: str | int = "first_exhausted"
) -> tuple[int, ...]:
    """Return how many batches each dataset gives to an epoch of the mix.

    ``sizes`` are batches of one pass; ``weights`` of None are the sizes. ``length`` is "first_exhausted" (the
    epoch ends when one dataset has been read once, and no other more often), "all_exhausted" (when each has been read
    at least once), or a number of batches. Options that make no sense raise UsageError.
    """
    for name, size in sizes.items():
        if not size:
            raise UsageError(f"dataset {name!r}", "has no batches", "leave it out of the mix, or look at its filters")
    shares = _shares(sizes, weights)
    per_share = {name: sizes[name] / shares[name] for name in sizes}
    if length == "first_exhausted":
        wanted = [min(per_share.values()) * share for share in shares.values()]
    elif length == "all_exhausted":
        wanted = [max(per_share.values()) * share for share in shares.values()]
    elif isinstance(length, int) and not isinstance(length, bool) and length > 0:
        wanted = [length * share for share in shares.values()]
    else:
        raise UsageError(
            f"epoch_length={length!r}", "choose 'first_exhausted', 'all_exhausted' or a number of batches of at least 1"
        )
    counts = _rounded(wanted, length) if isinstance(length, int) else [math.floor(w + Fraction(1, 2)) for w in wanted]
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
    """Return the batches of an epoch of which each has a batch of every dataset; see `batches_per_epoch`."""
    return batches_per_epoch(sizes, dict.fromkeys(sizes, 1), _of_all(length, len(sizes)))[0]


def _of_all(length: Any, datasets: int) -> Any:
    is_number = isinstance(length, int) and not isinstance(length, bool)
    return length * datasets if is_number else length


def _shares(sizes: Mapping[str, int], weights: Mapping[str, float] | None) -> dict[str, Fraction]:
    """Return the weights as fractions of 1."""
    if weights is None:
        weights = sizes
    if not isinstance(weights, Mapping) or set(weights) != set(sizes):
        raise UsageError(f"weights={weights!r}", f"give a number for each of {', '.join(map(repr, sizes))}")
    for name, weight in weights.items():
        number = isinstance(weight, int | float | np.integer | np.floating) and not isinstance(weight, bool)
        if not number or not 0 < weight < math.inf:
            raise UsageError(f"weights[{name!r}]={weight!r}", "give a number above 0")
    found = {name: Fraction(np.asarray(weights[name]).item()) for name in sizes}
    return {name: weight / sum(found.values()) for name, weight in found.items()}


def _rounded(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Return integers of sum ``total``, rounding up those with the largest remainder."""
    counts = [math.floor(value) for value in wanted]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def interleave(counts: Sequence[int]) -> Ints:
    """Return each ``k`` ``counts[k]`` times, so that every beginning holds them in proportion.

    The two rarest are merged first, and the result with the next, so that the rounding of each merge hardly adds up.
    """
    merged: list[tuple[int, int, Any]] = [(count, k, None) for k, count in enumerate(counts)]
    heapq.heapify(merged)
    for number in range(len(counts), 2 * len(counts) - 1):
        left, right = heapq.heappop(merged), heapq.heappop(merged)
        heapq.heappush(merged, (left[0] + right[0], number, (left, right)))
    found = np.empty(sum(counts), np.int64)
    todo = [(merged[0], np.arange(len(found)))]
    while todo:
        (count, k, parts), places = todo.pop()
        if parts is None:
            found[places] = k
            continue
        left, right = parts
        ahead = (2 * np.arange(count + 1, dtype=np.int64) * left[0] + count) // (2 * count)
        to_left = np.diff(ahead) > 0
        todo += [(left, places[to_left]), (right, places[~to_left])]
    return found


class DatasetPass(NamedTuple):
    """What a part of an epoch reads of one pass over a dataset.

    ``positions``      where its batches are among the indices asked for
    ``batches``        their numbers in the pass, ``lanes`` their lanes, and ``lane_batches`` their numbers in these
    ``lane_sizes``     the batches of each lane in the complete pass
    ``last_lane``      the lane of the pass's last batch
    ``readers``        the lanes of the mix that read them, where these are others than ``lanes``
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
        """Return the order of the pass, which divides the rows among its lanes as the mix draws from them."""
        lane_rows = self.lane_sizes * order.batch_size
        lane_rows[self.last_lane] -= max(0, int(lane_rows.sum()) - order.rows)  # the last batch may be short
        return replace(order, lane_rows=lane_rows)


@dataclass(frozen=True)
class MixSchedule:
    """Which dataset gives which batch: ``counts`` batches of each dataset in an epoch, over ``lanes`` lanes."""

    counts: tuple[int, ...]
    lanes: int = 1
    seed: int = 0

    @property
    def total(self) -> int:
        """Batches of an epoch."""
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
        """Rotate positions within their rounds, by one more in each epoch, so that over epochs lanes get the same."""
        rounds = positions // self.lanes
        sizes = np.minimum(self.lanes, self.total - rounds * self.lanes)
        rotations = (self._rotations[rounds] + epochs) % sizes
        first = rounds * self.lanes
        return np.asarray(first + (positions - first + direction * rotations) % sizes, np.int64)

    def datasets(self, epoch: int, indices: Ints | None = None) -> Ints:
        """Return which dataset batches ``indices`` (None: all) of an epoch come from."""
        wanted = np.arange(self.total) if indices is None else indices
        return np.asarray(self.interleaved[self._rotated(wanted, epoch, 1)], np.int64)

    def passes(
        self, dataset: int, size: int, epoch: int, indices: Ints, drawn: int = 0, since: int = 0
    ) -> list[DatasetPass]:
        """Return what batches ``indices`` of an epoch read of one dataset, whose passes have ``size`` batches.

        ``epoch`` is counted from epoch ``since`` on, before which ``drawn`` batches of the dataset were read.
        """
        slots = np.flatnonzero(self.interleaved == dataset)
        rotated = self._rotated(indices, epoch + since, 1)
        positions = np.flatnonzero(self.interleaved[rotated] == dataset)
        nth = np.searchsorted(slots, rotated[positions])
        batches = drawn + epoch * self.counts[dataset] + nth  # counted over all passes
        passes = batches // size
        order = np.argsort(passes, kind="stable")
        numbers, firsts = np.unique(passes[order], return_index=True)
        found = []
        for number, some in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):  # none splits into one
            lanes, lane_batches = self._lanes_of_pass(dataset, number * size - drawn, size, since)
            in_pass = batches[some] - number * size
            found.append(
                DatasetPass(
                    number=number,
                    positions=positions[some],
                    batches=in_pass,
                    lanes=lanes[in_pass],
                    lane_batches=lane_batches[in_pass],
                    lane_sizes=np.bincount(lanes, minlength=self.lanes),
                    last_lane=int(lanes[-1]),
                )
            )
        return found

    def lanes_of(self, dataset: int, first: int, last: int, since: int = 0) -> Ints:
        """Return the lanes of a dataset's batches ``first`` to ``last``, counted from epoch ``since`` on."""
        slots = np.flatnonzero(self.interleaved == dataset)
        epochs, nth = np.divmod(np.arange(first, last), self.counts[dataset])
        return np.asarray(self._rotated(slots[nth], epochs + since, -1) % self.lanes, np.int64)

    def _lanes_of_pass(self, dataset: int, first: int, size: int, since: int) -> tuple[Ints, Ints]:
        """Return the lane of each batch of a pass, and its number in the lane."""
        lanes = self.lanes_of(dataset, first, first + size, since)
        lane_sizes = np.bincount(lanes, minlength=self.lanes)
        order = np.argsort(lanes, kind="stable")
        lane_batches = np.empty(size, np.int64)
        lane_batches[order] = np.arange(size) - np.repeat(np.cumsum(lane_sizes) - lane_sizes, lane_sizes)
        return lanes, lane_batches
