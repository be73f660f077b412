"""How well an order mixes: measured on the order itself, without reading any data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pqcache.reader.order.epoch_order import Order

_SAMPLED_BATCHES = 100  # spread over the epoch
_SAMPLED_ROW_GROUPS = 200  # whose rows are followed through the epoch


@dataclass(frozen=True)
class Mixing:
    """How far an epoch is from a uniform permutation of all rows.

    ``shared``   the probability that two rows of a batch come from the same row group
    ``groups``   the number of row groups that a batch has rows of, on average
    ``spread``   over how much of the epoch the rows of one row group are spread: the standard deviation of their
                 positions over that of a uniform permutation. 1 is uniform; 0 means that they all come at once.
    """

    shared: float
    groups: float
    spread: float


def mixing(order: Order) -> Mixing:
    """How well ``order`` mixes, from at most 100 of its batches and 200 of its row groups.

    An order of no rows raises ValueError.
    """
    total = order.batches()
    if not total:
        raise ValueError("an epoch of no rows mixes nothing")
    shared, groups = [], []
    for index in np.unique(np.linspace(0, total - 1, _SAMPLED_BATCHES).astype(int)).tolist():
        counts = np.unique(order.batch(index)[0], return_counts=True)[1]
        rows = int(counts.sum())
        groups.append(len(counts))
        if rows > 1:
            shared.append(float((counts * (counts - 1)).sum()) / (rows * (rows - 1)))
    return Mixing(float(np.mean(shared)) if shared else 0.0, float(np.mean(groups)), _spread(order))


def _spread(order: Order) -> float:
    """The mean spread of row groups, each from where its buckets come; a lane's batches are every C-th."""
    if not order.shuffle:
        return float(order.counts[order.counts > 0].mean() / order.rows)
    found = []
    followed = list(set(order.row_group_order[:: max(1, len(order.row_group_order) // _SAMPLED_ROW_GROUPS)].tolist()))
    buckets: dict[int, list[tuple[float, int]]] = {}  # where each comes, from 0 to 1, and its rows
    for number in range(order.lanes):
        lane = order.lane(number)
        before = np.array([lane.rows_before(block) for block in range(lane.blocks + 1)])
        middles = ((before[:-1] + before[1:]) / 2 / max(1, lane.rows)).tolist()
        for span in np.flatnonzero(np.isin(lane.row_groups, followed)).tolist():
            first = lane.first_block(span)
            for block, rows in enumerate(np.diff(lane.bucket_offsets(span)).tolist(), first):
                buckets.setdefault(int(lane.row_groups[span]), []).append((middles[block], rows))
    for parts in buckets.values():
        where, weights = np.array(parts).T
        if weights.sum() > 1:
            mean = np.average(where, weights=weights)
            found.append(float(np.sqrt(np.average((where - mean) ** 2, weights=weights))))
    return float(np.mean(found) * np.sqrt(12)) if found else 0.0
