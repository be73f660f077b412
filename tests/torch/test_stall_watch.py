"""What is logged where no batch comes for long: the file that is read and the stacks, and again when it goes on."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pqcache.errors import UsageError
from pqcache.parquet.row_group_reader import RowGroupFile
from pqcache.torch import Batch, Loader, Mix, ParquetDataset, iteration_meter
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")
TIMEOUT = 0.2


def dataset(table: Path, **options: Any) -> ParquetDataset:
    how = {"columns": ["id"], "batch_size": 50, "lanes": 2, "stall_timeout": TIMEOUT, **options}
    return ParquetDataset(table, **how)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "pqcache.torch")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "pqcache.torch"]


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set while watches see time go by: a busy machine alone is no stall."""
    event = threading.Event()
    monkeypatch.setattr(iteration_meter, "_now", lambda: time.monotonic_ns() if event.is_set() else 0)
    return event


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch, watching: threading.Event) -> Iterator[threading.Event]:
    """Storage that blocks until the event is set, and is watched from then on."""
    event, read = threading.Event(), RowGroupFile.read_rows

    def block(self: RowGroupFile, *args: Any, **how: Any) -> Any:
        watching.set()
        event.wait(60)
        return read(self, *args, **how)

    monkeypatch.setattr(RowGroupFile, "read_rows", block)
    yield event
    event.set()


def test_storage_that_blocks(
    table: Path, blocked: threading.Event, watching: threading.Event, warnings: Callable[[], list[str]]
) -> None:
    def go_on() -> None:
        wait_for(lambda: bool(warnings()))
        watching.clear()
        blocked.set()

    batches = iter(dataset(table))
    threading.Thread(target=go_on).start()
    next(batches)
    wait_for(lambda: len(warnings()) == 2)
    first, second = warnings()
    assert re.match(r"epoch 0: no batch for \d+\.\d s\n", first)
    assert f"process {os.getpid()} reads row group " in first
    assert f" of {table / 'a.parquet'} since " in first
    assert " block\n" in first  # in the stack of a thread that reads
    assert "thread MainThread:" in first
    assert second.startswith("epoch 0: it goes on after ")
    for _ in batches:
        pass
    assert len(warnings()) == 2


def test_a_worker_that_is_stopped(table: Path, watching: threading.Event, warnings: Callable[[], list[str]]) -> None:
    loader = Loader(dataset(table), num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    (worker,) = [child for child in torch.multiprocessing.active_children() if not child.name.startswith("rank ")]
    os.kill(worker.pid, signal.SIGSTOP)
    watching.set()
    threading.Thread(target=lambda: (wait_for(lambda: bool(warnings())), os.kill(worker.pid, signal.SIGCONT))).start()
    for _ in batches:
        pass
    first, second = warnings()[:2]
    assert first.startswith("epoch 0: no batch for ")
    assert f"process {worker.pid} reads " in first
    assert second.startswith("epoch 0: it goes on after ")


def test_a_worker_logs_its_own_stacks(table: Path, watching: threading.Event, tmp_path: Path) -> None:
    log = tmp_path / "log"
    hang = _Hang(log, watching)
    loader = DataLoader(dataset(table, transform=hang), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 10
    text = log.read_text()
    assert "epoch 0, worker 0 (pid " in text
    assert "no batch for" in text
    assert "a library with threads, as polars is, hangs here" in text
    assert "multiprocessing_context='forkserver'" in text


class _Hang:
    """A transform that hangs at its second batch until a warning that shows it is in the log."""

    def __init__(self, log: Path, watching: threading.Event) -> None:
        self.log, self.watching = log, watching

    def __call__(self, batch: Batch) -> Batch:
        if not self.log.exists():
            logging.getLogger("pqcache.torch").addHandler(logging.FileHandler(self.log))
        else:
            self.watching.set()
            wait_for(lambda: "__call__" in self.log.read_text())
        return batch


def test_no_thread_outlives_its_iteration(table: Path) -> None:
    """One that ends later may be the last to hold the dataset, and abort a process that ends with the iteration."""

    def watches() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "pqcache-stall-watch"]

    loader = Loader(dataset(table, stall_timeout=60), num_workers=2)
    list(loader)
    assert not watches()
    batches = iter(loader)
    next(batches)
    assert len(watches()) == 1
    del batches  # dropped half way
    gc.collect()
    assert not watches()
    batches = iter(dataset(table, stall_timeout=None))
    next(batches)
    assert not watches()


def test_a_fork_in_the_middle(table: Path, warnings: Callable[[], list[str]]) -> None:
    """A child has a copy of the iteration, which it may close, and no thread."""
    batches = iter(dataset(table, stall_timeout=60))
    next(batches)
    child = os.fork()
    if child == 0:
        batches.close()  # type: ignore[attr-defined]
        os._exit(0 if threading.active_count() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == 9


def test_what_does_not_fit(table: Path) -> None:
    assert dataset(table, stall_timeout="5m").stall_timeout == 300
    with pytest.raises(UsageError, match="every batch takes longer"):
        dataset(table, stall_timeout=0)
    with pytest.raises(UsageError, match="not a duration"):
        Mix({"a": dataset(table, lanes=None)}, stall_timeout="soon")
