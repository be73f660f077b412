"""The counts of threads and processes add up, and what limits a training follows from them."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest

from pqcache.reader.stats import BATCHES, NAMES, SHAPE, Meter, reading_stats
from tests.forked_commands import true_in_child


@pytest.fixture
def meter() -> Meter:
    """A meter that children share."""
    size = 8 * SHAPE[0] * SHAPE[1]
    return Meter(SimpleNamespace(numbers=np.frombuffer(mmap.mmap(-1, size), np.int64).reshape(SHAPE)))


def test_more_children_than_there_are_rows(meter: Meter) -> None:
    """The rows of those that have ended are used again, and keep what they counted."""
    meter.add(BATCHES, 1)
    meter._memory.numbers[5:, 0] = os.getppid()

    def count() -> bool:
        meter.add(BATCHES, 1)
        return True

    assert all(true_in_child(count) for _ in range(8))
    assert meter.counts().total["batches"] == 9


SECOND = 1_000_000_000
FAST = {"rows": 1, "row_group_bytes": 100}
READING = FAST | {"seconds": 10 * SECOND, "waited": 9 * SECOND, "read_wait": 8 * SECOND, "decode": 8 * SECOND}


@pytest.mark.parametrize(
    ("counts", "limit"),
    [
        ({}, None),
        (READING, "decode"),
        (READING | {"waited": SECOND // 10}, "trainer"),
        (READING | {"disk_bytes": 100, "decode_blocked": 7 * SECOND}, "storage"),
        (READING | {"disk_bytes": 100, "decode_blocked": SECOND}, "decode"),
        (READING | {"decode_blocked": 7 * SECOND}, "decode"),  # from the page cache: it waited for cores
        (READING | {"arrival_wait": 7 * SECOND}, "storage"),
        (READING | {"gather": 9 * SECOND}, "gather"),
        (READING | {"tensors": 9 * SECOND}, "gather"),
        (READING | {"transform": 9 * SECOND}, "transform"),
        (READING | {"receive": 6 * SECOND}, "transfer"),
        (READING | {"transfer": 6 * SECOND}, "transfer"),
        (READING | {"send": 9 * SECOND}, "transfer"),
        (READING | {"start": 6 * SECOND}, "start"),
        (FAST | {"busy": 2 * SECOND, "idle": SECOND, "decode": SECOND, "read_wait": SECOND}, "trainer"),
        (FAST | {"busy": 9 * SECOND, "idle": SECOND, "decode": SECOND, "read_wait": SECOND}, "decode"),
    ],
)
def test_what_limits_a_training(counts: dict[str, int], limit: str | None) -> None:
    assert reading_stats(dict.fromkeys(NAMES, 0) | counts, 0).limited_by == limit


def test_a_transform_on_threads_counts_as_each_of_them() -> None:
    counts = dict.fromkeys(NAMES, 0) | READING | {"transform": 20 * SECOND}
    assert reading_stats(counts, 0, transform_threads=4).limited_by == "decode"
    assert reading_stats(counts, 0, transform_threads=2).limited_by == "transform"
