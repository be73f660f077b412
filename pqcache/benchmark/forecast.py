"""What a training run gets from a dataset: how many row groups are mixed in its memory, why, and which would do better.

``inspect`` and ``bench`` print the same verdict: `describe_training`.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pqcache.errors import PqcacheError, UsageError
from pqcache.reader.memory import RowGroupSizes, Window, fit, has_pages, sizes_of
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.options import WINDOW, WINDOW_OF_ALL
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.store.hive import parent
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import local_path, url_scheme
from pqcache.system.process_stats import cpu_count
from pqcache.units import BLOCK_SIZE, format_count, format_size

MEMORY = 2 << 30
LANES = 2
_SMALLEST = 64 << 10  # bytes on disk of a row group that is proposed
_SMALLEST_WINDOW = 1 << 20  # the same, where memory is what limits the window
_LARGEST = 16 << 20  # the same, where row groups are small
_COSTLY = 1 << 20  # bytes of a decoded row group, below which the fixed cost of each shows
_TINY = 16 << 20  # bytes of a decoded dataset for which nothing is gained


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What ``ParquetDataset(memory=memory)`` with ``lanes`` lanes does with all columns of a dataset.

    ``decoded`` is the largest row group in memory, in bytes. ``window`` row groups of a lane are mixed, or ``pieces``
    of them if there is more than one of each, which are ``mixed`` of all rows, from 0 to 1. A window of 0 means that
    memory is too small for one row group. ``needed`` are the bytes that it takes to read one at a time in each lane
    where that is more than memory, else None. ``row_group_size`` in bytes on disk is what would mix better or be read
    faster, or None if that gains little.
    """

    memory: int
    lanes: int
    decoded: int
    window: int
    mixed: float
    row_group_size: int | None
    pieces: int = 1
    needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values."""
        return asdict(self)


def forecast(
    target: str | os.PathLike[str],
    memory: int = MEMORY,
    lanes: int = LANES,
    rules: FileRules | None = None,
    snapshot: str | None = None,
) -> Forecast | None:
    """Return what a training run will get, or None of a remote, arriving, empty or unreadable dataset."""
    text = os.fspath(target)
    if url_scheme(text) not in ("", "file"):
        return None
    try:
        data, lease = open_local_dataset(local_path(text), snapshot, rules=rules)
        with lease or nullcontext():
            plan = make_read_plan(data, None)
            sizes = sizes_of(plan)
    except PqcacheError:
        return None
    if not len(sizes) or not sizes.selected.max():
        return None
    return forecast_of(plan, sizes, memory, lanes)


def forecast_of(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> Forecast:
    """Return what a training run gets that reads ``plan``, whose row groups have ``sizes`` in memory."""
    fitted, largest = _window(plan, sizes, memory, lanes), int(np.argmax(sizes.decoded))
    window, rows = fitted.row_groups, int(plan.counts.sum())
    pieces = -(-int(sizes.decoded_rows[largest]) // fitted.piece_rows) if fitted.piece_rows else 1
    held = lanes * min(window, len(sizes) * pieces) * float(plan.counts.mean()) / pieces
    mixed = min(1.0, held / rows) if rows else 0.0
    one_each = int(sizes.of_lane(1)) * lanes
    return Forecast(
        memory=memory,
        lanes=lanes,
        decoded=int(sizes.selected.max()),
        window=window,
        mixed=mixed,
        row_group_size=None
        if pieces > 1 and window == WINDOW
        else _better_size(plan, sizes, memory, lanes, window, mixed),
        pieces=pieces,
        needed=one_each if window == pieces == 1 and one_each > memory else None,
    )


def _window(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> Window:
    """Return the window of a training, of 0 row groups where memory is too small for one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fit(sizes, memory, lanes, True, plan.data.root, has_pages(plan), lanes)
        except UsageError:
            return Window(0)


def describe_training(training: Forecast, row_groups: int) -> tuple[str, ...]:
    """Return what a training gets of its ``row_groups`` row groups, why, and what would be better; a line for each.

    The first line says for which settings that is.
    """
    workers = "0 or 1" if training.lanes == 1 else f"{training.lanes}"
    given = f"memory={format_size(training.memory).replace(' ', '')}, num_workers={workers}"
    decoded = f"a row group takes up to {format_size(training.decoded)} decoded"
    each = "each batch is of" if training.lanes == 1 else "each worker mixes"
    if training.window:
        found = f"window={training.window}: {each} {_mixed(training)}"
        why = f"{decoded}; {_limit(training)}"
    else:
        found, why = "refused: memory is too small for a row group", f"{decoded}, too much for that memory"
    lines = [given, found, why]
    if training.needed is not None:
        lines.append(f"over memory: one at a time may take {format_size(training.needed)}")
    if training.row_group_size is not None:
        lines.append(f"better: {_gain(training, row_groups)}")
    return tuple(lines)


def _mixed(training: Forecast) -> str:
    if training.mixed == 1:
        return "all row groups" if training.lanes == 1 else "all row groups that it reads"
    share = f"{100 * training.mixed:.0f} %" if training.mixed >= 0.01 else "less than 1 %"
    together = ", together" if training.lanes > 1 else ","
    unit = "row group" if training.pieces == 1 else "piece"
    return f"{format_count(training.window, unit)}{together} {share} of the rows"


def _limit(training: Forecast) -> str:
    """Return what limits the window, or how it is reached."""
    if training.pieces > 1:
        return f"read in {training.pieces} pieces"
    if training.needed is not None:
        return "one is read at a time"
    if training.mixed == 1:
        return "all fit"
    if training.window < WINDOW:
        return f"{training.window} fit"
    if training.window == WINDOW:
        return f"{WINDOW} are mixed at most, unless all fit"
    return f"{WINDOW_OF_ALL} are mixed at most"


def _gain(training: Forecast, row_groups: int) -> str:
    assert training.row_group_size is not None
    size = format_size(training.row_group_size)
    if training.mixed < 1 and training.window < WINDOW:
        return f"row groups of {size} on disk, of which {WINDOW} are mixed"
    if row_groups < 2 * cpu_count():
        few = f"{row_groups:,} {'is' if row_groups == 1 else 'are'} few"
        return f"row groups of {size} on disk: {few} for {format_count(cpu_count(), 'core')} to decode, and to mix"
    return f"row groups of {size} on disk: the fixed cost of small ones shows"


def _better_size(
    plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int, window: int, mixed: float
) -> int | None:
    """Return the bytes on disk of row groups that would mix better, or be read faster; None where that gains little."""
    total, decoded = int(plan.data.index.numbers("bytes").sum()), int(sizes.selected.sum())
    if window < WINDOW and mixed < 1:
        return row_group_size_for(plan, sizes, memory, lanes)
    even = max(_SMALLEST, min(_LARGEST, _power_of_two(total // (4 * WINDOW))))
    if decoded < _TINY:
        return None
    if len(sizes) < 2 * cpu_count():
        return even if _least(plan, even) > len(sizes) else None
    if len(sizes) > 2 * WINDOW and decoded / len(sizes) < _COSTLY:
        return even if 4 * _least(plan, even) <= len(sizes) else None
    return None


def _least(plan: ReadPlan, size: int) -> int:
    """Return how few row groups of up to ``size`` bytes on disk the partitions can have."""
    index = plan.data.index
    of_file = np.bincount(index.numbers("file"), index.numbers("bytes"), len(index.paths))
    held: Counter[str] = Counter()
    for path, amount in zip(index.paths, of_file.tolist(), strict=True):
        held[parent(path)] += int(amount)
    return sum(-(-amount // size) for amount in held.values())


def row_group_size_for(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> int:
    """Return the bytes on disk, a power of two, of row groups of which each lane can mix 16 in ``memory`` bytes."""
    scale = memory / lanes / sizes.of_lane(WINDOW)
    largest = int(plan.data.index.numbers("bytes").max())
    return max(_SMALLEST_WINDOW, min(BLOCK_SIZE, _power_of_two(int(scale * largest))))


def _power_of_two(size: int) -> int:
    """Return the largest power of two that is at most ``size``."""
    return 1 << (max(1, size).bit_length() - 1)
