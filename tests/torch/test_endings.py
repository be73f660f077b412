"""Trainings that are killed, interrupted or left: they end, and leave neither processes nor shared memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.torch import Batch, Loader, ParquetDataset

SCRIPT = Path(__file__).with_name("training_to_end.py")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")]

End = Callable[[int, list[int]], None]
ENDS: dict[str, tuple[End, int, str]] = {  # what is done, the exit status, what is said last
    "Ctrl-C": (lambda trainer, workers: [os.kill(pid, signal.SIGINT) for pid in (trainer, *workers)], -2, "Keyboard"),
    "SIGTERM": (lambda trainer, workers: os.kill(trainer, signal.SIGTERM), -15, ""),
    "SIGKILL": (lambda trainer, workers: os.kill(trainer, signal.SIGKILL), -9, ""),
    "killed worker": (lambda trainer, workers: os.kill(workers[-1], signal.SIGKILL), 1, "DataLoader worker (pid"),
}
DEEP = pytest.mark.deep  # each starts torch


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("table")
    rows = pa.table({"id": np.arange(2000), "x": [list(range(500))] * 2000})
    pq.write_table(rows, root / "a.parquet", row_group_size=200)
    return root


def start(table: Path, kind: str, persistent: str, context: str = "fork") -> tuple[subprocess.Popen[str], list[int]]:
    """Start a training, as a session of processes; return it with the numbers of its workers."""
    command = [sys.executable, "-W", "ignore:This DataLoader will create", str(SCRIPT), str(table), kind, persistent]
    process = subprocess.Popen(
        [*command, context], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def session_of(leader: int) -> list[int]:
    """Return the processes of a session that still run, whoever started them."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                words = Path(entry, "stat").read_text().rpartition(")")[2].split()
                if int(words[3]) == leader and words[0] != "Z":
                    found.append(int(entry.name))
    return found


def check_gone(leader: int, workers: list[int]) -> None:
    """Wait for a training's processes to end; fail where they do not, or left shared memory with their numbers."""
    deadline = time.monotonic() + 60
    while (left := session_of(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "they still ran"
    numbers = [[str(pid)] for pid in (leader, *workers)]
    assert not [name for name in os.listdir("/dev/shm") if name.split("_")[1:2] in numbers]


@pytest.mark.parametrize("persistent", ["persistent", pytest.param("anew", marks=DEEP)])
@pytest.mark.parametrize("kind", ["Loader", pytest.param("plain", marks=DEEP)])
@pytest.mark.parametrize(
    "end", ["Ctrl-C", "killed worker", *(pytest.param(n, marks=DEEP) for n in ("SIGTERM", "SIGKILL"))]
)
def test_a_training_ends_with_its_workers(table: Path, kind: str, persistent: str, end: str) -> None:
    act = ENDS[end][0]
    process, workers = start(table, kind, persistent)
    assert len(workers) >= 2, process.communicate()
    act(process.pid, workers)
    _, errors = process.communicate(timeout=120)
    if end == "Ctrl-C" and process.returncode == 1:
        assert "Exception ignored in" in errors, errors
        end = "killed worker"  # Python ignores an interrupt while it frees an object: the end of the workers ends it
    _, status, said = ENDS[end]
    assert process.returncode == status, errors
    assert said in errors if said else not errors, errors
    check_gone(process.pid, workers)


@pytest.mark.parametrize("persistent", ["persistent", pytest.param("anew", marks=DEEP)])
def test_a_loop_that_is_left_early_ends_without_a_word(table: Path, persistent: str) -> None:
    process, workers = start(table, "leave", persistent)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    check_gone(process.pid, workers)


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=DEEP)])
@pytest.mark.parametrize("persistent", ["persistent", pytest.param("anew", marks=DEEP)])
def test_workers_that_were_not_forked_end_with_a_killed_training(table: Path, persistent: str, context: str) -> None:
    """Those of a fork server are not the trainer's children, and the server lives as long as they do."""
    process, workers = start(table, "Loader", persistent, context)
    assert len(workers) == 2, process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=120) == -9
    check_gone(process.pid, workers)
    process.communicate()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_does_not_keep_the_loader(tmp_path: Path, workers: int) -> None:
    """Its workers would live until a garbage collection, and end slowly in that."""
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet", row_group_size=100)
    gc.collect()
    gc.disable()
    try:
        assert _failed(tmp_path, workers)() is None
    finally:
        gc.enable()


def _failed(path: Path, workers: int) -> weakref.ref[Loader]:
    loader = Loader(ParquetDataset(path, batch_size=10, lanes=2, transform=_refuse), num_workers=workers)
    with suppress(ValueError):
        deque(loader, maxlen=0)
    return weakref.ref(loader)


def _refuse(batch: Batch) -> Batch:
    if batch.index == 40:
        raise ValueError("a transform failed")
    return batch
