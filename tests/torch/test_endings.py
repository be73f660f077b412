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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.torch import Batch, Loader, ParquetDataset
from tests.waiting import becomes_true

SCRIPT = Path(__file__).with_name("training_to_end.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("endings"),  # trainings are started by one process
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc"),
]

End = Callable[[int, list[int]], None]
ENDS: dict[str, tuple[End, int, str]] = {  # what is done, the exit status, what is said last
    "Ctrl-C": (lambda trainer, workers: [os.kill(pid, signal.SIGINT) for pid in (trainer, *workers)], -2, "Keyboard"),
    "SIGTERM": (lambda trainer, workers: os.kill(trainer, signal.SIGTERM), -15, ""),
    "SIGKILL": (lambda trainer, workers: os.kill(trainer, signal.SIGKILL), -9, ""),
    "killed worker": (lambda trainer, workers: os.kill(workers[-1], signal.SIGKILL), 1, "DataLoader worker (pid"),
}
DEEP = pytest.mark.deep  # each starts torch


class Trainings:
    """Trainings on a table, one after the other, and the process that starts them."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-W", "ignore:This DataLoader will create", str(SCRIPT)]
        self.parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.table, self._output, self._errors = root / "table", root / "output", root / "errors"
        self.table.mkdir()
        rows = pa.table({"id": np.arange(2000), "x": [list(range(500))] * 2000})
        pq.write_table(rows, self.table / "a.parquet", row_group_size=200)

    def start(self, kind: str, persistent: str, context: str = "fork") -> tuple[int, list[int]]:
        """Start a training, as a session of processes; return its number and those of its workers."""
        for path in (self._output, self._errors):
            path.write_text("")
        assert self.parent.stdin is not None
        self.parent.stdin.write(f"{self._output} {self._errors} {self.table} {kind} {persistent} {context}\n")
        self.parent.stdin.flush()
        pid = self._said()
        becomes_true(lambda: self._output.read_text().endswith("\n") or self._errors.read_text(), seconds=60)
        return pid, [int(worker) for worker in self._output.read_text().split()]

    def end(self) -> tuple[int, str]:
        """Wait for the training; return its exit status and what it said."""
        return self._said(), self._errors.read_text()

    def _said(self) -> int:
        assert self.parent.stdout is not None
        return int(self.parent.stdout.readline())


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    found = Trainings(tmp_path_factory.mktemp("trainings"))
    yield found
    found.parent.communicate()  # the end of its input ends it


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


@pytest.mark.parametrize(
    ("kind", "persistent", "context", "end"),
    [
        ("Loader", "persistent", "fork", "Ctrl-C"),
        ("plain", "persistent", "fork", "killed worker"),
        ("Loader", "persistent", "forkserver", "SIGKILL"),  # whose workers are not the trainer's children
        pytest.param("plain", "anew", "fork", "Ctrl-C", marks=DEEP),
        pytest.param("Loader", "anew", "fork", "killed worker", marks=DEEP),
        pytest.param("Loader", "persistent", "fork", "SIGTERM", marks=DEEP),
        pytest.param("plain", "persistent", "fork", "SIGKILL", marks=DEEP),
    ],
)
def test_a_training_ends_with_its_workers(
    trainings: Trainings, kind: str, persistent: str, context: str, end: str
) -> None:
    act = ENDS[end][0]
    trainer, workers = trainings.start(kind, persistent, context)
    assert len(workers) >= 2, trainings.end()
    act(trainer, workers)
    returned, errors = trainings.end()
    if end == "Ctrl-C" and returned == 1:
        assert "Exception ignored in" in errors, errors
        end = "killed worker"  # Python ignores an interrupt while it frees an object: the end of the workers ends it
    _, status, said = ENDS[end]
    assert returned == status, errors
    assert said in errors if said else not errors, errors
    check_gone(trainer, workers)


def test_a_loop_that_is_left_early_ends_without_a_word(trainings: Trainings) -> None:
    trainer, workers = trainings.start("leave", "persistent")
    assert trainings.end() == (0, "")
    check_gone(trainer, workers)


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
