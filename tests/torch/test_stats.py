"""What dataset.stats() counts, over threads, workers and datasets, and what is said at the end of an epoch."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from pqcache import Pack
from pqcache.torch import Batch, Loader, Mix, ParquetDataset
from tests.torch.conftest import ROWS

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

NAP = 0.02  # seconds
EVEN = f"id in ({', '.join(map(str, range(0, ROWS, 2)))})"
FEW = f"id in ({', '.join(map(str, range(0, ROWS, 50)))})"  # one of each row group


def nap(batch: Batch) -> Batch:
    time.sleep(NAP)
    return batch


class LongestNap:
    """A transform that takes longer than all that has happened since it was called last, on a busy machine too."""

    def __init__(self, least: float = NAP) -> None:
        self.least, self.ended = least, time.monotonic()

    def __call__(self, rows: Any) -> Any:
        time.sleep(max(self.least, time.monotonic() - self.ended))
        self.ended = time.monotonic()
        return rows


def dataset(table: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(table, **{"columns": ["id", "tokens"], "batch_size": 50, "lanes": 2, **options})


def test_nothing_is_counted_before_the_first_batch(table: Path) -> None:
    stats = dataset(table, memory="3MB").stats()
    assert (stats.epoch.epoch, stats.total.rows, stats.total.seconds, stats.total.limited_by) == (None, 0, None, None)
    assert (stats.memory_bytes, stats.memory_limit_bytes) == (0, 3 << 20)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_without_workers(table: Path, shuffle: bool) -> None:
    read = dataset(table, shuffle=shuffle)
    size = 0
    for number in range(2):
        read.set_epoch(number)
        size += sum(
            batch["id"].nbytes + batch["tokens"].values.nbytes + batch["tokens"].offsets.nbytes for batch in read
        )
        stats = read.stats()
        assert (stats.epoch.epoch, stats.epoch.batches, stats.epoch.rows) == (number, 10, ROWS)
        assert stats.epoch.row_groups == 10
    assert (stats.total.epoch, stats.total.batches, stats.total.rows) == (None, 20, 2 * ROWS)
    assert stats.total.bytes == pytest.approx(size, rel=0.02)  # batches that are made together share offsets
    assert stats.total.row_group_bytes == 2 * stats.epoch.row_group_bytes > 0
    for part in (stats.epoch, stats.total):
        assert part.seconds is not None
        assert part.waited_seconds is not None
        assert 0 < part.waited_seconds <= part.seconds
        assert min(part.decode_seconds, part.gather_seconds) > 0
        assert part.transform_seconds == part.send_seconds == part.transfer_seconds == part.worker_seconds == 0
    assert 0 < stats.memory_bytes <= stats.memory_peak_bytes
    assert json.loads(json.dumps(stats.to_dict()))["total"]["rows"] == 2 * ROWS


def test_a_slow_transform_is_the_limit(table: Path) -> None:
    read = dataset(table, transform=LongestNap())
    list(read)
    stats = read.stats().epoch
    assert stats.transform_seconds >= 10 * NAP
    assert stats.waited_seconds is not None
    assert stats.waited_seconds >= stats.transform_seconds
    assert stats.limited_by == "transform"


def test_numbers_in_the_loop_are_up_to_the_batch_that_was_just_got(table: Path) -> None:
    read = dataset(table, transform=nap)
    for number, _ in enumerate(Loader(read), 1):
        stats = read.stats().epoch
        assert stats.batches == number
        assert stats.waited_seconds is not None
        assert stats.waited_seconds >= number * NAP
        if number == 7:
            break
    assert read.stats().epoch.waited_seconds == read.stats().total.waited_seconds == stats.waited_seconds


def test_workers_of_a_loader_add_up(table: Path) -> None:
    read = dataset(table, transform=nap)
    loader = Loader(read, num_workers=2)
    for number in range(2):
        assert len(list(loader)) == 10
        stats = read.stats()
        assert (stats.epoch.epoch, stats.epoch.batches, stats.epoch.rows) == (number, 10, ROWS)
        assert (stats.total.batches, stats.total.rows) == (10 * (number + 1), ROWS * (number + 1))
        assert stats.epoch.transform_seconds >= 10 * NAP
        assert stats.epoch.send_seconds > 0
        assert stats.epoch.worker_seconds >= stats.epoch.transform_seconds
        assert stats.epoch.seconds is not None
        assert stats.epoch.waited_seconds is not None
        assert stats.epoch.seconds >= stats.epoch.waited_seconds > NAP
    assert stats.epoch.start_seconds < stats.total.start_seconds  # the workers are persistent


def test_workers_of_a_plain_loader_without_what_only_the_trainer_knows(table: Path) -> None:
    read = dataset(table, transform=nap)
    for number in range(2):  # other workers in each epoch
        read.set_epoch(number)
        assert len(list(DataLoader(read, batch_size=None, num_workers=2))) == 10
        stats = read.stats()
        assert (stats.epoch.epoch, stats.epoch.rows, stats.total.rows) == (number, ROWS, ROWS * (number + 1))
        assert (stats.epoch.seconds, stats.epoch.waited_seconds) == (None, None)
        assert stats.epoch.transform_seconds >= 10 * NAP
        assert stats.epoch.limited_by in ("transform", "trainer")  # which gets no core where the machine is busy


class EndOfWorker:
    """A transform that lets a worker be killed at its second batch."""

    def __init__(self) -> None:
        self.trainer, self.calls = os.getpid(), 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if os.getpid() != self.trainer and self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_what_a_killed_worker_has_made_remains(table: Path) -> None:
    read = dataset(table, transform=EndOfWorker())
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(DataLoader(read, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    stats = read.stats()
    assert (stats.total.batches, stats.total.rows, stats.memory_bytes) == (2, 100, 0)
    assert sum(len(batch["id"]) for batch in read) == ROWS
    assert (read.stats().epoch.rows, read.stats().total.rows) == (ROWS, ROWS + 100)


def test_the_transform_of_single_rows_is_measured(table: Path) -> None:
    read = dataset(table, batch_size=None, transform=LongestNap(0.001), limit=160)
    assert len(list(read)) == 160
    stats = read.stats().epoch
    assert stats.transform_seconds >= 0.16
    assert stats.seconds is not None
    assert stats.waited_seconds is not None
    assert 0.16 <= stats.waited_seconds <= stats.seconds
    assert stats.limited_by == "transform"


def test_a_mix_counts_each_dataset(table: Path) -> None:
    mix = Mix({"slow": dataset(table, lanes=None, transform=nap), "fast": dataset(table, lanes=None, batch_size=25)})
    assert len(list(Loader(mix, num_workers=2))) == 30
    stats = mix.stats()
    assert stats.epoch.rows == 2 * ROWS
    assert {name: (s.epoch.rows, s.epoch.batches) for name, s in stats.datasets.items()} == {
        "slow": (ROWS, 10),
        "fast": (ROWS, 20),
    }
    assert stats.datasets["slow"].epoch.transform_seconds >= 10 * NAP
    assert stats.datasets["fast"].epoch.transform_seconds == 0
    assert stats.epoch.seconds is not None
    assert set(stats.to_dict()["datasets"]) == {"slow", "fast"}


def test_a_mix_within_batches_counts_its_own_batches(table: Path) -> None:
    parts = {"a": dataset(table, lanes=None, batch_size=30, transform=nap), "b": dataset(table, lanes=None)}
    mix = Mix(parts, within_batch=True, lanes=2)
    for number in range(2):
        batches = list(Loader(mix, num_workers=1))
        mix.set_epoch(number + 1)
        stats = mix.stats()
        assert len(batches) == 10
        assert (stats.epoch.batches, stats.total.batches) == (10, 10 * (number + 1))
        assert stats.epoch.rows == sum(len(batch["id"]) for batch in batches) > 0
        assert {name: s.epoch.batches for name, s in stats.datasets.items()} == {"a": 10, "b": 10}
        assert stats.datasets["a"].epoch.transform_seconds >= 10 * NAP
        assert stats.epoch.transform_seconds == pytest.approx(stats.datasets["a"].epoch.transform_seconds)
        assert stats.epoch.gather_seconds > sum(s.epoch.gather_seconds for s in stats.datasets.values())


@pytest.mark.parametrize(("options", "shuffle"), [({"filters": EVEN}, False), ({"filters": FEW}, True)])
def test_row_groups_of_which_rows_are_chosen_are_counted_once(table: Path, options: Any, shuffle: bool) -> None:
    read = dataset(table, shuffle=shuffle, **options)
    rows = sum(len(batch["id"]) for batch in read)
    stats = read.stats().epoch
    assert 0 < rows < ROWS
    assert (stats.rows, stats.row_groups) == (rows, 10)
    assert stats.row_group_bytes > 0
    assert min(stats.decode_seconds, stats.gather_seconds) > 0


def test_packed_documents_are_counted_as_sequences(table: Path) -> None:
    read = ParquetDataset(table, pack=Pack("tokens", length=16), batch_size=4)
    rows = sum(len(batch["tokens"]) for batch in read)
    stats = read.stats().epoch
    assert stats.rows == rows > 0
    assert stats.bytes > 0
    assert min(stats.decode_seconds, stats.gather_seconds) > 0


def test_a_copy_begins_at_zero(table: Path) -> None:
    read = dataset(table)
    list(read)
    copy = pickle.loads(pickle.dumps(read))
    assert copy.stats().total.rows == 0
    copy.set_epoch(1)
    list(copy)
    assert (copy.stats().total.rows, read.stats().total.rows) == (ROWS, ROWS)


def test_one_line_at_the_end_of_an_epoch(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pqcache.torch")
    loader = Loader(dataset(table, transform=LongestNap()))
    for number in range(2):
        batches = iter(loader)
        for _ in range(10):  # a trainer that counts steps does not ask for more
            next(batches)
        del batches
        (record,) = caplog.records
        assert record.getMessage().startswith(f"epoch {number}: 500 rows in ")
        assert "the trainer waited" in record.getMessage()
        assert record.getMessage().endswith("limited by transform")
        caplog.clear()
    batches = iter(loader)
    next(batches)
    del batches  # not at its end
    assert not caplog.records


def test_spans_where_a_profiler_is_active(table: Path) -> None:
    read = dataset(table, transform=nap, shuffle=False)
    list(read)
    read.set_epoch(1)
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        list(read)
    names = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("pqcache/")}
    assert names["pqcache/wait"] == 11  # the last one finds the end
    assert names["pqcache/transform"] == 10
    assert names["pqcache/decode"] == 10
    assert 0 < names["pqcache/gather"] <= 10, "several batches are gathered together"
