"""How the batches of an epoch are divided where ranks x workers do not divide its lanes: arithmetic, no reading.

Each lane has a window of its own, so a worker should read few of them. If ranks x workers divide the lanes, each worker
takes complete lanes, and the sequence of batches is the same for every such number. Otherwise the batches that are left
are laid in a line, lane after lane, and the line is divided into as many equal parts as there are workers. So a worker
reads few lanes, some of them from or to somewhere in the middle, and interleaves them evenly. Each batch has the rows
that it has anyway; which batches come in the same step is different.

A place is a number in the order in which batches are consumed: rank r has those with ``place % ranks == r``. The batch
at a place follows from the divisions of the epoch: one for each resume with another number of ranks or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.order.mixture_schedule import interleave

MOST_BATCHES = 1 << 25  # of an epoch that is divided so, each of which takes 8 bytes
MOST_DIVISIONS = 32  # of an epoch


class Division(NamedTuple):
    """From place ``start`` on, what is left of an epoch is divided among ``ranks`` with ``workers`` each."""

    start: int
    ranks: int
    workers: int


Divisions = tuple[Division, ...]


def next_divisions(divisions: Divisions, lanes: int, division: Division) -> Divisions:
    """Return the divisions of an epoch that goes on with ``division``; none where lanes are complete."""
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
    """Return the batch at each place of an epoch of ``total`` batches."""
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
        at = 0
        for places in _places_of_workers(total, division):
            found[places] = _interleaved(line[at : at + len(places)], lanes)
            at += len(places)
    found.flags.writeable = False
    return found


def _places_of_workers(total: int, division: Division) -> Sequence[range]:
    """Return the places of each worker of each rank."""
    start, ranks, workers = division
    of_ranks = [range(start + (rank - start) % ranks, total, ranks) for rank in range(ranks)]
    return [places[worker::workers] for places in of_ranks for worker in range(workers)]


def _interleaved(batches: Ints, lanes: int) -> Ints:
    """Return batches that are sorted by lane so that lanes alternate evenly, each in its own order."""
    counts = np.unique(batches % lanes, return_counts=True)[1]
    if len(counts) < 2:
        return batches
    turns = interleave(counts.tolist())
    order = np.argsort(turns, kind="stable")
    found = np.empty_like(batches)
    found[order] = batches  # lane by lane, the turns of each in order
    return found
