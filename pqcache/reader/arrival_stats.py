"""What has arrived of the row groups and columns that are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pqcache.reader.arriving.wanted_order import without_repeats
from pqcache.reader.read_plan import ReadPlan


@dataclass(frozen=True, kw_only=True)
class ArrivalStats:
    """What has arrived of a dataset; all 0 for one that was complete when it was opened.

    Attributes:
        total_bytes: bytes of all its files.
        arrived_bytes: bytes of them that have arrived.
        wanted_bytes: bytes of the row groups and columns that are read.
        wanted_arrived_bytes: bytes of these that have arrived.
        waited_seconds: how long this process, and workers that it has forked, waited for some that had not.
    """

    total_bytes: int = 0
    arrived_bytes: int = 0
    wanted_bytes: int = 0
    wanted_arrived_bytes: int = 0
    waited_seconds: float = 0.0


def arrival_stats(plan: ReadPlan) -> ArrivalStats:
    """Return what has arrived of what a plan reads."""
    arrivals, index = plan.data.arrivals, plan.data.index
    if arrivals is None:
        return ArrivalStats()
    row_groups = without_repeats(plan.row_groups)
    wanted = arrived = 0
    for name in plan.columns_read:
        if f"{name}:bytes" not in index.recorded:
            continue
        sizes = np.nan_to_num(index.table[f"{name}:bytes"].to_numpy()).astype(np.int64)[row_groups]
        wanted += int(sizes.sum())
        arrived += int(sizes[arrivals.arrived(row_groups, arrivals.positions([name]))].sum())
    return ArrivalStats(
        total_bytes=arrivals.total_bytes,
        arrived_bytes=arrivals.arrived_bytes,
        wanted_bytes=wanted,
        wanted_arrived_bytes=arrived,
        waited_seconds=arrivals.waited_seconds,
    )
