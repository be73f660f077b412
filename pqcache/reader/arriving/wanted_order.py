"""In which order a reader needs the row groups of an epoch: a pure function of the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pqcache.reader.order.epoch_order import Ints, Lane, Order


def row_groups_of_lanes(order: Order, first_batches: Mapping[int, int]) -> Ints:
    """Return the row groups that lanes read, each from a batch of its own on: those that a batch needs earlier first.

    Row groups are counted as in ``order.counts``. The lanes take turns, step by step, once each has what its first
    block mixes.
    """
    found = [_needs(order.lane(lane), batch * order.batch_size) for lane, batch in first_batches.items()]
    groups = np.concatenate([np.zeros(0, np.int64), *(groups for groups, _ in found)])
    steps = np.concatenate([np.zeros(0, np.int64), *(steps for _, steps in found)])
    return without_repeats(groups[np.argsort(steps, kind="stable")])


def _needs(lane: Lane, row: int) -> tuple[Ints, Ints]:
    """Return the row groups of a lane from a row on, and in which step from there each is mixed first."""
    block = lane.block_at(row)
    if block >= lane.blocks:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = lane.spans(block).start
    groups = lane.row_groups[first:]
    steps = np.arange(first, first + len(groups)) - block // lane.blocks_per_step
    return groups, np.maximum(steps, 0)


def row_groups_of_batches(order: Order, batches: Sequence[int]) -> Ints:
    """Return the row groups of these batches of an epoch in the order of the files, those of the first batch first."""
    if not len(batches):
        return np.zeros(0, np.int64)
    ends = np.cumsum(order.counts)
    numbers = np.asarray(batches, np.int64)
    first = np.searchsorted(ends, numbers * order.batch_size, side="right")
    last = np.searchsorted(ends, np.minimum((numbers + 1) * order.batch_size, order.rows) - 1, side="right")
    change = np.zeros(len(ends) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    found = np.flatnonzero((np.cumsum(change[:-1]) > 0) & (order.counts > 0))
    begin = int(np.searchsorted(found, first[0]))
    return np.concatenate([found[begin:], found[:begin]])


def without_repeats(numbers: Ints) -> Ints:
    """Return each of ``numbers`` once, where it comes first."""
    _, first = np.unique(numbers, return_index=True)
    return numbers[np.sort(first)]
