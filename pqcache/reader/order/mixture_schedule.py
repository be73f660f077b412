"""Which dataset each batch of a mix comes from: a pure function of a few numbers; numpy only, no reading.

In an epoch of a mix each dataset gives a fixed number of batches. They are spread over the epoch as evenly as
possible (``spread``), which needs no randomness and no memory of what was drawn: a tree of two-way splits, of which
each rounds exactly. Two datasets are never more than half a batch away from their shares.

A mix has lanes as a dataset has: batch i belongs to lane ``i % lanes``, and what a lane draws from a dataset comes from
that dataset's lane of the same number. So that no lane (and no rank, as these own lanes) gets always the same dataset,
each round of ``lanes`` batches is turned by a number of its own. That moves a batch within its round only.

A dataset is read pass after pass, without an end: the epoch's first draw from it goes on where the epoch before
stopped. A pass is shared among the lanes as they draw, so each of its batches comes exactly once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.order import Ints, stream

_MOST_BATCHES = 1 << 28  # of an epoch, each of which takes 8 bytes and more
_TURN = 3  # what a random stream is for, after those of the order


def batches_per_epoch(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None, length: str | int = "first_exhausted"
) -> tuple[int, ...]:
    """Return how many batches each dataset gives in an epoch of the mix.

    ``sizes`` are batches of one pass; ``weights`` of None are the sizes. ``length`` is "first_exhausted" (the
    epoch ends when one dataset has been read once, and no other more often), "all_exhausted" (when each has been read
    at least once), or a number of batches. What makes no sense raises UsageError.
    """
    for name, size in sizes.items():
        if not size:
            raise UsageError("", f"dataset {name!r} has no batches", "leave it out of the mix, or look at its filters")
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
            "",
            f"an epoch would have more than {_MOST_BATCHES:,} batches",
            "give weights that differ less, or a smaller epoch_length",
        )
    for name, count in zip(sizes, counts, strict=True):
        if not count:
            raise UsageError(
                "",
                f"weights give {name!r} none of the epoch's {sum(counts)} batches",
                "give it a larger weight, the mix a larger epoch_length, or leave it out",
            )
    return tuple(counts)


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
    """Return whole numbers of the same sum, rounding up those with the largest rest."""
    counts = [math.floor(value) for value in wanted]
    order = sorted(range(len(counts)), key=lambda i: counts[i] - wanted[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def interleave(counts: Sequence[int]) -> Ints:
    """Return each ``k`` ``counts[k]`` times, so that every beginning holds them in proportion.

    The two rarest are merged first, and what comes of it with the next: so rounding, at each merge, hardly adds up.
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

    ``at`` are positions among the indices asked for, ``batches`` numbers in the pass, each the ``turns``-th of its
    ``lanes``. ``shares`` are the batches of each lane in the whole pass, and ``last`` is the lane of the last one.
    """

    number: int
    at: Ints
    batches: Ints
    lanes: Ints
    turns: Ints
    shares: Ints
    last: int


@dataclass(frozen=True)
class MixSchedule:
    """The draws of a mix: ``counts`` batches of each dataset in an epoch, over ``lanes`` lanes."""

    counts: tuple[int, ...]
    lanes: int = 1
    seed: int = 0

    @property
    def total(self) -> int:
        """Batches of an epoch."""
        return sum(self.counts)

    @cached_property
    def line(self) -> Ints:
        """The datasets in the order they are drawn before rounds are turned."""
        return interleave(self.counts)

    @cached_property
    def _turns(self) -> Ints:
        raw = stream(self.seed, 0, _TURN, 0, 0).random_raw(-(-self.total // self.lanes))
        return np.asarray(raw % np.uint64(self.lanes), np.int64)

    def _turned(self, places: Ints, epochs: Ints | int, back: int) -> Ints:
        """Move places within their rounds; with an epoch the turn moves on, so that lanes get alike in the long run."""
        rounds = places // self.lanes
        sizes = np.minimum(self.lanes, self.total - rounds * self.lanes)
        turns = (self._turns[rounds] + epochs) % sizes
        first = rounds * self.lanes
        return np.asarray(first + (places - first + back * turns) % sizes, np.int64)

    def sources(self, epoch: int, indices: Ints | None = None) -> Ints:
        """Return which dataset each batch of an epoch comes from; None for all of them."""
        wanted = np.arange(self.total) if indices is None else indices
        return np.asarray(self.line[self._turned(wanted, epoch, 1)], np.int64)

    def passes(self, source: int, size: int, epoch: int, indices: Ints) -> list[DatasetPass]:
        """Return what batches ``indices`` of an epoch read of one dataset, whose passes have ``size`` batches."""
        count = self.counts[source]
        places = np.flatnonzero(self.line == source)
        line = self._turned(indices, epoch, 1)
        at = np.flatnonzero(self.line[line] == source)
        draws = epoch * count + np.searchsorted(places, line[at])
        passes = draws // size
        order = np.argsort(passes, kind="stable")
        numbers, firsts = np.unique(passes[order], return_index=True)
        found = []
        for number, some in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):  # none splits into one
            found.append(self._pass(source, places, number, size, at[some], draws[some] - number * size))
        return found

    def _pass(self, source: int, places: Ints, number: int, size: int, at: Ints, batches: Ints) -> DatasetPass:
        """Return where ``batches`` of a pass are; ``places`` are the dataset's in the line."""
        draws = np.arange(number * size, (number + 1) * size)
        epochs, nth = np.divmod(draws, self.counts[source])
        lanes = self._turned(places[nth], epochs, -1) % self.lanes
        shares = np.bincount(lanes, minlength=self.lanes)
        order = np.argsort(lanes, kind="stable")
        turns = np.empty(size, np.int64)
        turns[order] = np.arange(size) - np.repeat(np.cumsum(shares) - shares, shares)
        return DatasetPass(number, at, batches, lanes[batches], turns[batches], shares, int(lanes[-1]))
