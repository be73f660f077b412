"""The counts of threads and processes add up, and what limits a training follows from them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from pqcache.reader.stats import BATCHES, BUSY, NAMES, OF_TRAINER, SHAPE, WAITED, Meter, reading_stats


@pytest.fixture
def meter() -> Meter:
    """A meter that children share."""
    size = 8 * SHAPE[0] * SHAPE[1]
    return Meter(SimpleNamespace(numbers=np.frombuffer(mmap.mmap(-1, size), np.int64).reshape(SHAPE)))


def in_child(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_more_children_than_there_are_rows(meter: Meter) -> None:
    """The rows of those that have ended are used again, and keep what they counted."""
    meter.add(BATCHES, 1)
    meter._memory.numbers[5:, 0] = os.getppid()
    for _ in range(8):
        in_child(lambda: meter.add(BATCHES, 1))
    assert meter.counts().total["batches"] == 9


def test_an_epoch_is_what_its_pass_has_counted(meter: Meter) -> None:
    meter.begin(0, OF_TRAINER, by_loader=True)
    meter.add(WAITED, 5)
    in_child(lambda: (meter.begin(0, 11, by_loader=True), meter.add(BUSY, 3)))
    assert (meter.counts().of_epoch["waited"], meter.counts().of_epoch["busy"], meter.counts().epoch) == (5, 3, 0)
    in_child(lambda: (meter.begin(0, 12, by_loader=True), meter.add(BUSY, 4)))  # the epoch again
    assert (meter.counts().of_epoch["waited"], meter.counts().of_epoch["busy"]) == (5, 4)
    meter.begin(1, OF_TRAINER, by_loader=True)
    assert not any(meter.counts().of_epoch.values())
    in_child(lambda: (meter.begin(1, 13), meter.add(BUSY, 6)))  # of a plain DataLoader
    assert (meter.counts().of_epoch["waited"], meter.counts().of_epoch["busy"]) == (0, 6)
    assert (meter.counts().total["waited"], meter.counts().total["busy"]) == (5, 13)


def test_what_is_read(meter: Meter) -> None:
    meter.begin(0, 1)
    with meter.decoding(7, 100):
        assert [found[:2] for found in meter.reading()] == [(os.getpid(), 7)]
    assert meter.reading() == [(os.getpid(), None, 0.0)]
    assert (meter.counts().total["row_groups"], meter.counts().total["row_group_bytes"]) == (1, 100)


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
