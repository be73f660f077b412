"""Counts what reading a dataset takes, in memory that all of its processes share.

Each process has a row of its own, so that nothing is locked between processes; the numbers of a dataset are the sums
over the rows, also over those of processes that have ended. A row holds the counters, and what they were when the
process began the present pass, so that the numbers of an epoch are differences. Counters grow once for each row group,
block or batch, never for each row.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.system.process_stats import disk_bytes_of_thread, is_alive

Cells = npt.NDArray[np.int64]

NAMES = (
    *("batches", "rows", "bytes", "row_groups", "row_group_bytes", "disk_bytes"),
    *("decode", "decode_blocked", "gather", "tensors", "read_wait", "arrival_wait", "transform", "send", "receive"),
    *("transfer", "waited", "seconds", "taken", "busy", "idle", "ready", "ready_samples", "start"),
)  # of the counters; times are in nanoseconds
_PROCESS, _PASS, _EPOCH, _SINCE, _READING, _READING_SINCE, _ARROW, _PEAK, _BEGUN = range(9)  # what a row begins with
_FIRST = _BEGUN + 1
_PAST = _FIRST + len(NAMES)  # behind the counters what they were when the pass began
(
    BATCHES, ROWS, BYTES, ROW_GROUPS, ROW_GROUP_BYTES, DISK_BYTES,
    DECODE, DECODE_BLOCKED, GATHER, TENSORS, READ_WAIT, ARRIVAL_WAIT, TRANSFORM, SEND, RECEIVE,
    TRANSFER, WAITED, SECONDS, TAKEN, BUSY, IDLE, READY, READY_SAMPLES, START,
) = range(_FIRST, _PAST)  # fmt: skip
_PROCESSES = 127
SHAPE = (1 + _PROCESSES, _PAST + len(NAMES))  # of a meter's numbers
_HEADER, _BY_LOADER = 0, _SINCE  # the row of what is the same for all processes: the present pass and epoch
OF_TRAINER = -1  # the pass of a trainer that has workers

WAIT_SPAN = "pqcache/wait"
_SPANS = {DECODE: "pqcache/decode", GATHER: "pqcache/gather", TRANSFORM: "pqcache/transform"}


def span(name: str | None) -> AbstractContextManager[Any]:
    """A span of torch's profiler if it is active in this process."""
    profiler = sys.modules.get("torch.autograd.profiler")
    is_active = name is not None and profiler is not None and profiler._is_profiler_enabled
    return profiler.record_function(name) if is_active and profiler is not None else nullcontext()


class MeterCounts(NamedTuple):
    """The counters by name, in all and of the present ``epoch`` (None before the first).

    ``arrow`` are the bytes of Arrow's that living processes have in use now, by their id, and ``peak`` the most.
    """

    total: dict[str, int]
    of_epoch: dict[str, int]
    epoch: int | None
    arrow: dict[int, int]
    peak: int


class Meter:
    """Counts for one dataset, in ``memory.numbers``, which other processes may share; may be used from any thread."""

    _mine: Any  # this process's row
    _fork: int  # in which process it was taken
    _reading: dict[int, tuple[int, int]]  # by thread: a row group of the index, and since when
    waits_since: int | None  # for what is read, in the thread that uses it

    def __init__(self, memory: Any = None) -> None:
        self.__setstate__({"_memory": memory or SimpleNamespace(numbers=np.zeros(SHAPE, np.int64))})

    def add(self, counter: int, amount: int) -> None:
        row = self._row()
        with _lock:
            row[counter] += amount

    def made(self, batches: int, rows: int, size: int) -> None:
        row = self._row()
        with _lock:
            row[BATCHES] += batches
            row[ROWS] += rows
            row[BYTES] += size

    @contextmanager
    def timed(self, counter: int, times: int = 1) -> Iterator[None]:
        """Add the body's duration to a counter, ``times`` over if it stands for calls that aren't measured."""
        begun = time.monotonic_ns()
        try:
            with span(_SPANS.get(counter)):
                yield
        finally:
            self.add(counter, (time.monotonic_ns() - begun) * times)

    @contextmanager
    def decoding(self, row_group: int, stored_bytes: int) -> Iterator[None]:
        """Count the body as this thread's decoding of a row group of the index."""
        thread = threading.get_ident()
        begun, cpu, disk = time.monotonic_ns(), time.thread_time_ns(), disk_bytes_of_thread()
        row = self._row()
        with _lock:
            self._reading[thread] = row_group, begun
            self._show_reading(row)
        try:
            with self.timed(DECODE):
                yield
        finally:
            blocked = time.monotonic_ns() - begun - (time.thread_time_ns() - cpu)
            with _lock:
                self._reading.pop(thread, None)
                self._show_reading(row)
                row[ROW_GROUPS] += 1
                row[ROW_GROUP_BYTES] += stored_bytes
                row[DISK_BYTES] += disk_bytes_of_thread() - disk
                row[DECODE_BLOCKED] += max(0, blocked)

    def _show_reading(self, row: Any) -> None:
        row_group, since = min(self._reading.values(), key=lambda item: item[1], default=(-1, 0))
        row[_READING], row[_READING_SINCE] = row_group + 1, since

    def note_memory(self) -> None:
        """Note how many bytes Arrow, which holds the rows, uses in this process."""
        row = self._row()
        row[_ARROW] = arrow = pa.default_memory_pool().bytes_allocated()
        row[_PEAK] = max(row[_PEAK], arrow)

    def begin(self, epoch: int, number: int, by_loader: bool = False) -> None:
        """Begin to count what this process does in a pass over an epoch.

        All workers give the pass the same ``number``, a trainer OF_TRAINER. ``by_loader``: a trainer counts too.
        """
        row, header = self._row(), self._memory.numbers[_HEADER]
        header[_EPOCH], header[_BY_LOADER] = epoch + 1, by_loader
        header[_PASS] = 0 if number == OF_TRAINER else number
        with _lock:
            row[_PAST:] = row[_FIRST:_PAST]
            row[_EPOCH], row[_PASS], row[_BEGUN] = epoch + 1, number, time.monotonic_ns()

    def set_running(self, is_running: bool) -> None:
        """Note that the trainer's iteration begins or ends; the time between is counted."""
        row, now = self._row(), time.monotonic_ns()
        with _lock:
            if row[_SINCE]:
                row[SECONDS] += now - row[_SINCE]
            row[_SINCE] = now if is_running else 0

    def taken(self) -> None:
        """Note that the trainer took a worker's batch, and now and then how many more are ready."""
        row, rows = self._row(), self._memory.numbers[1:]
        if row[TAKEN] == row[TAKEN + len(NAMES)]:  # the first one
            begun = rows[rows[:, _PASS] == self._memory.numbers[_HEADER, _PASS], _BEGUN]
            row[START] += max(0, int(begun.min(initial=time.monotonic_ns())) - row[_BEGUN])
        with _lock:
            row[TAKEN] += 1
            if row[TAKEN] % 8 == 0 and (made := int(rows[:, BATCHES].sum())):  # by a mix's datasets, not by the mix
                row[READY] += max(0, made - int(rows[:, TAKEN].sum()))
                row[READY_SAMPLES] += 1

    def counts(self) -> MeterCounts:
        """The sums over all processes."""
        with _lock:
            rows, header = self._memory.numbers[1:].copy(), self._memory.numbers[_HEADER]
        alive = np.array([process > 0 and is_alive(process) for process in rows[:, _PROCESS].tolist()], np.bool_)
        rows[:, SECONDS] += np.where(alive & (rows[:, _SINCE] > 0), time.monotonic_ns() - rows[:, _SINCE], 0)
        now = rows[:, _FIRST:_PAST]
        of_trainer = (rows[:, _PASS] == OF_TRAINER) & (rows[:, _EPOCH] == header[_EPOCH]) & (header[_BY_LOADER] != 0)
        present = of_trainer | ((rows[:, _PASS] == header[_PASS]) & (header[_PASS] != 0))
        past = np.where(present[:, None], np.maximum(now - rows[:, _PAST:], 0), 0)
        total, of_epoch = (dict(zip(NAMES, of.sum(axis=0).tolist(), strict=True)) for of in (now, past))
        arrow = dict(zip(rows[alive, _PROCESS].tolist(), rows[alive, _ARROW].tolist(), strict=True))
        epoch = int(header[_EPOCH]) - 1
        return MeterCounts(total, of_epoch, epoch if epoch >= 0 else None, arrow, int(rows[alive, _PEAK].sum()))

    def own(self, counter: int) -> int:
        return int(self._row()[counter])

    def reading(self) -> list[tuple[int, int | None, float]]:
        """Processes of the present pass, the row group each has read for longest (None: none), and how long."""
        header, now, found = self._memory.numbers[_HEADER].copy(), time.monotonic_ns(), []
        for row in self._memory.numbers[1:].tolist():
            is_present = row[_PASS] and row[_PASS] in (header[_PASS], OF_TRAINER) and row[_EPOCH] == header[_EPOCH]
            if row[_PROCESS] and is_present:
                row_group = row[_READING] - 1 if row[_READING] else None
                found.append(
                    (row[_PROCESS], row_group, 0.0 if row_group is None else (now - row[_READING_SINCE]) / 1e9)
                )
        return found

    def _row(self) -> Any:
        """This process's row, as a memoryview: much faster than numpy for single numbers."""
        row = self._mine
        if self._fork != _fork or row[_PROCESS] != _process:
            with _lock:
                row = self._claim()
        return row

    def _claim(self) -> Any:
        """Take an unused row, or one of a process that has ended, whose counts remain.

        Two processes that take one at the same time both write their ids; the first then finds the other's, and takes
        another row. With more processes than rows, some share one, and may lose a count.
        """
        owners = self._memory.numbers[1:, _PROCESS]
        free = np.flatnonzero((owners == 0) | (owners == _process))
        if not len(free):
            free = np.flatnonzero([not is_alive(process) for process in owners.tolist()])
        chosen = int(free[_process % len(free)] if len(free) else _process % _PROCESSES)
        row = memoryview(self._memory.numbers[chosen + 1])
        if row[_PROCESS] != _process:
            row[_PASS] = row[_SINCE] = row[_READING] = row[_ARROW] = row[_PEAK] = 0
            row[_PROCESS] = _process
        if self._fork != _fork:
            self._reading = {}
        self._mine, self._fork = row, _fork
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memory = state["_memory"]
        self._mine, self._fork, self._reading, self.waits_since = None, -1, {}, None


def _in_child() -> None:
    global _lock, _fork, _process
    _lock, _fork, _process = threading.Lock(), _fork + 1, os.getpid()


_lock = threading.Lock()  # between threads; a forked child has its own
_fork = 0  # how often this process and those before it were forked
_process = os.getpid()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
NO_METER = Meter()  # whose numbers nobody asks for
