"""How well an order mixes: measured on the order itself, without reading any data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pqcache.reader.order.order import Order

_BATCHES = 100  # looked at, spread over the epoch
_ROW_GROUPS = 200  # followed through the epoch


@dataclass(frozen=True)
class ShuffleQuality:
    """How far an epoch is from a uniform permutation of all rows.

    ``shared`` is the probability that two rows of a batch come from the same row group; ``groups`` the number of
    row groups that a batch has rows of, on average. ``spread`` is over how much of the epoch the rows of one row
    group are spread: the standard deviation of their positions over that of a uniform permutation, so 1 is
    uniform and 0 means that they all come at once.
    """

    shared: float
    groups: float
    spread: float


def shuffle_quality(order: Order) -> ShuffleQuality:
    """Return how well ``order`` mixes, from at most 100 of its batches and 200 of its row groups.

    An order of no rows raises ValueError.
    """
    total = order.batches()
    if not total:
        raise ValueError("an epoch of no rows mixes nothing")
    shared, groups = [], []
    for index in np.unique(np.linspace(0, total - 1, _BATCHES).astype(int)).tolist():
        counts = np.unique(order.batch(index)[0], return_counts=True)[1]
        rows = int(counts.sum())
        groups.append(len(counts))
        if rows > 1:
            shared.append(float((counts * (counts - 1)).sum()) / (rows * (rows - 1)))
    return ShuffleQuality(float(np.mean(shared)) if shared else 0.0, float(np.mean(groups)), _spread(order))


def _spread(order: Order) -> float:
    """Return the mean spread of row groups, each from where its hands come; a lane's batches are every C-th."""
    if not order.shuffle:
        return float(order.counts[order.counts > 0].mean() / order.rows)
    found = []
    followed = set(order.line[:: max(1, len(order.line) // _ROW_GROUPS)].tolist())
    pieces: dict[int, list[tuple[float, int]]] = {}
    for number in range(order.lanes):
        lane = order.lane(number)
        for j in np.flatnonzero(np.isin(lane.groups, list(followed))).tolist():
            first, cuts = lane.first_block(j), np.diff(lane.cuts(j))
            for hand, rows in enumerate(cuts.tolist()):
                middle = (lane.before(first + hand) + lane.before(first + hand + 1)) / 2
                pieces.setdefault(int(lane.groups[j]), []).append((middle / max(1, lane.rows), rows))
    for parts in pieces.values():
        where, weights = np.array(parts).T
        if weights.sum() > 1:
            mean = np.average(where, weights=weights)
            found.append(float(np.sqrt(np.average((where - mean) ** 2, weights=weights))))
    return float(np.mean(found) * np.sqrt(12)) if found else 0.0
