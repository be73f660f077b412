"""Which batches of an epoch each worker of each rank yields: a pure function of a few numbers.

Each lane has a window of its own, so a worker should read few of them. If ranks x workers divide the lanes, each worker
takes complete lanes, and the sequence of batches is the same for every such number. Otherwise the remaining batches are
laid in a line, lane after lane, and each worker gets an equal part of the line. So a worker reads few lanes, some of
them only in part, and interleaves them evenly. The rows of a batch stay the same; only which batches come in the same
step differs.

A place is a number in the order in which batches are consumed: rank r has those with ``place % ranks == r``. The batch
at a place follows from the divisions of the epoch: one for each resume with another number of ranks or workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.order.mixture import interleave

MOST_BATCHES = 1 << 25  # limit of a divided epoch, whose batches take 8 bytes each
MOST_DIVISIONS = 32  # of an epoch


class Division(NamedTuple):
    """From place ``start`` on, what is left of an epoch is divided among ``ranks`` with ``workers`` each."""

    start: int
    ranks: int
    workers: int


Divisions = tuple[Division, ...]


def divisions_of(saved: object) -> Divisions:
    """The divisions that a state has as lists of numbers; UsageError for anything else."""
    try:
        found = tuple(Division(*map(int, numbers)) for numbers in saved or ())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = (Division(-1, 0, 0),)
    if len(found) > MOST_DIVISIONS or not all(start >= 0 < min(ranks, workers) for start, ranks, workers in found):
        raise UsageError("state", f"its divisions are {saved!r}", "load what state_dict() returned")
    return found


def next_divisions(divisions: Divisions, lanes: int, division: Division) -> Divisions:
    """The divisions of an epoch that continues with ``division``; empty while lanes are complete."""
    if divisions:
        same = divisions[-1][1:] == division[1:]
    else:
        same = lanes % (division.ranks * division.workers) == 0
    if len(divisions) - same >= MOST_DIVISIONS:
        raise UsageError(
            "state",
            f"its epoch was resumed with other ranks or workers {MOST_DIVISIONS} times",
            "resume with as many as before, or with the next epoch",
        )
    return divisions if same else (*divisions, division)


@lru_cache(maxsize=4)
def batches_at(total: int, lanes: int, divisions: Divisions) -> Ints:
    """The batch at each place of an epoch of ``total`` batches."""
    if total > MOST_BATCHES:
        raise UsageError(
            f"lanes={lanes}",
            f"ranks x workers do not divide it, and an epoch has more than {MOST_BATCHES:,} batches",
            "choose numbers that divide it, or larger batches",
        )
    found = np.arange(total, dtype=np.int64)
    for division in divisions:
        left = found[division.start :]
        line = left[np.lexsort((left // lanes, left % lanes))]
        start, ranks, workers = division
        at = 0
        for rank in range(ranks):
            of_rank = range(start + (rank - start) % ranks, total, ranks)
            for places in (of_rank[worker::workers] for worker in range(workers)):
                found[places] = _interleaved(line[at : at + len(places)], lanes)
                at += len(places)
    found.flags.writeable = False
    return found


def _interleaved(batches: Ints, lanes: int) -> Ints:
    """Alternate lanes evenly, each in its own order; ``batches`` come sorted by lane."""
    counts = np.unique(batches % lanes, return_counts=True)[1]
    if len(counts) < 2:
        return batches
    turns = interleave(counts.tolist())
    order = np.argsort(turns, kind="stable")
    found = np.empty_like(batches)
    found[order] = batches  # lane by lane, the turns of each in order
    return found


@dataclass(frozen=True, kw_only=True)
class EpochShare:
    """The batches that one worker of one rank yields, from batch ``start`` of the epoch to its end.

    ``total`` is the epoch's number of batches (``Order.batches``). All ranks get the same number: the last round is
    filled up with the epoch's first batches, as torch's DistributedSampler does with rows, or left out with
    ``drop_last``. Without ``pad`` it stays as it is, so some ranks get one less. ``start`` is the first place that no
    rank has consumed. Place and number of a batch are equal unless there are ``divisions``: then ranks x workers need
    not divide the lanes, nor if ``shuffled`` is False.
    """

    total: int
    lanes: int
    ranks: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0
    start: int = 0
    drop_last: bool = False
    pad: bool = True
    shuffled: bool = True
    divisions: Divisions = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise UsageError(
                f"rank={self.rank}", f"with num_replicas={self.ranks} it must be from 0 to {self.ranks - 1}"
            )
        if self.shuffled and not self.divisions and self.lanes % (self.ranks * self.workers):
            raise UsageError(
                f"lanes={self.lanes}",
                f"cannot be shared by {self.ranks} ranks x {self.workers} workers",
                f"choose a num_workers so that ranks x workers divides {self.lanes}, or start with lanes "
                "set to a common multiple",
            )

    def __len__(self) -> int:
        return len(self.indices())

    @property
    def left(self) -> int:
        """Batches from ``start`` on, of all ranks together."""
        return max(0, self.total - self.start)

    def rounds(self) -> int:
        """Batches that each rank gets; without ``pad``, the most that one gets."""
        return self.left // self.ranks if self.drop_last else -(-self.left // self.ranks)

    def count(self) -> int:
        """Batches of this rank, all its workers together."""
        return len(self._of_rank())

    @property
    def has_last(self) -> bool:
        """Whether this worker yields the rank's last batch."""
        return (max(1, self.count()) - 1) % self.workers == self.worker

    @property
    def end(self) -> int:
        """The place after the last round."""
        return max(self.total, self.start)

    @property
    def worker_lanes(self) -> int:
        """The most lanes that a worker reads at once."""
        units = self.ranks * self.workers
        return min(self.lanes, -(-self.lanes // units) + bool(self.divisions))

    def batches(self, places: range) -> Sequence[int]:
        """The global indices of the batches at ``places``; padding is indexed by its place."""
        if not self.divisions:
            return places
        known = batches_at(self.total, self.lanes, self.divisions)
        return [int(known[place]) if place < self.total else place for place in places]

    def place_of(self, index: int) -> int:
        """The place of a batch by its global index."""
        if not self.divisions or not 0 <= index < self.total:
            return index
        return int(np.flatnonzero(batches_at(self.total, self.lanes, self.divisions) == index)[0])

    def indices(self, begin: int | None = None) -> range:
        """The places of the worker's batches in order, from ``begin`` on if given; those from ``total`` on are padding.

        Any ``ranks`` consecutive places hold one of every rank, so each rank has as many of them from any start.
        Worker 0 yields the rank's first, as DataLoader asks it first.
        """
        mine = self._of_rank()[self.worker :: self.workers]
        return mine if begin is None else mine[max(0, -(-(begin - mine.start) // mine.step)) :]

    def _of_rank(self) -> range:
        first = self.start + (self.rank - self.start) % self.ranks
        last = first + self.rounds() * self.ranks
        return range(first, last if self.pad else min(last, max(self.total, first)), self.ranks)

    def after(self, index: int) -> int:
        """The first place left when every rank has consumed the round of place ``index``."""
        done = (index - self.start) // self.ranks + 1
        return min(self.start + done * self.ranks, self.end)


def batches_by_lane(indices: Iterable[int], lanes: int, total: int) -> Iterator[tuple[int, int, int]]:
    """Yield (global index, lane, batch within the lane) for ``indices``; padding starts again at 0."""
    for index in indices:
        inside = index % total if index >= total else index
        yield index, inside % lanes, inside // lanes
