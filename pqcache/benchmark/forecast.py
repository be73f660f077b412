"""What a training run will get from a dataset: how many row groups are mixed in the memory it has."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from pqcache.errors import PqcacheError
from pqcache.reader.memory_budget import WINDOW, RowGroupSizes, lane_bytes, largest_window
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.reader.row_group_sizes import estimate_sizes
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import local_path, url_scheme
from pqcache.units import BLOCK_SIZE, format_count

MEMORY = 2 << 30
LANES = 2
_SMALLEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What ``ParquetDataset(memory=memory)`` with ``lanes`` lanes does with all columns of a dataset.

    ``decoded`` is the largest row group in memory, in bytes. ``window`` row groups of a lane are mixed (0: row groups
    are read in pieces), which are ``mixed`` of all rows, from 0 to 1. ``row_group_size`` in bytes on disk is what
    would fill the window, or None if that is filled already.
    """

    memory: int
    lanes: int
    decoded: int
    window: int
    mixed: float
    row_group_size: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values."""
        return asdict(self)


def forecast(
    target: str | os.PathLike[str], memory: int = MEMORY, lanes: int = LANES, rules: FileRules | None = None
) -> Forecast | None:
    """Return what a training run will get, or None of a remote, arriving, empty or unreadable dataset."""
    text = os.fspath(target)
    if url_scheme(text) not in ("", "file"):
        return None
    try:
        data, lease = open_local_dataset(local_path(text), rules=rules)
        with lease or nullcontext():
            if data.arrivals is not None:  # the texts that it looks at may be missing
                return None
            plan = make_read_plan(data, None, None)
            sizes = estimate_sizes(plan)
    except PqcacheError:
        return None
    if not len(sizes) or not sizes.selected.max():
        return None
    window, rows = largest_window(sizes, memory, lanes), int(plan.counts.sum())
    mixed = min(1.0, lanes * min(window, len(sizes)) * float(plan.counts.mean()) / rows) if rows else 0.0
    suggested = row_group_size_for(plan, sizes, memory, lanes) if window < WINDOW else None
    return Forecast(
        memory=memory,
        lanes=lanes,
        decoded=int(sizes.selected.max()),
        window=window,
        mixed=mixed,
        row_group_size=suggested,
    )


def describe_forecast(training: Forecast) -> str:
    """Return what each of the workers does, as a clause."""
    if not training.window:
        return "row groups are too large and are read in pieces"
    if training.mixed == 1:
        return "each mixes all row groups that it reads"
    mixed = f"{100 * training.mixed:.0f} %" if training.mixed >= 0.01 else "less than 1 %"
    return f"each mixes {format_count(training.window, 'row group')}, together {mixed} of the rows"


def row_group_size_for(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> int:
    """Return the bytes on disk, a power of two, of row groups of which each lane can mix 16 in ``memory`` bytes."""
    scale = memory / lanes / lane_bytes(sizes, WINDOW)
    largest = int(plan.data.index.numbers("bytes").max())
    return max(_SMALLEST, min(BLOCK_SIZE, 1 << (max(1, int(scale * largest)).bit_length() - 1)))
