"""Counts what reading a dataset takes, in memory that all of its processes share.

Each process has a row of its own, so that nothing is locked between processes; the numbers of a dataset are the sums
over the rows, also over those of processes that have ended. A row holds the counters, and what they were when the
process began the present pass, so that the numbers of an epoch are differences. Counters grow once for each row group,
block or batch, never for each row.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.reader.timer import Timer, TimerOfMany, TimerWithSpan
from pqcache.system.process_stats import disk_bytes_of_thread, is_alive

Cells = npt.NDArray[np.int64]

NAMES = (
    *("batches", "rows", "bytes", "row_groups", "row_group_bytes", "disk_bytes"),
    *("decode", "decode_blocked", "gather", "tensors", "read_wait", "arrival_wait", "transform", "send", "receive"),
    *("transfer", "waited", "seconds", "taken", "busy", "idle", "ready", "ready_samples", "start"),
)  # of the counters; times are in nanoseconds
_PROCESS, _PASS, _EPOCH, _SINCE, _READING, _READING_SINCE, _ARROW, _PEAK, _BEGUN = range(9)  # what a row begins with
_FIRST = _BEGUN + 1
BATCHES, ROWS, BYTES, ROW_GROUPS, ROW_GROUP_BYTES, DISK_BYTES = range(_FIRST, _FIRST + 6)
DECODE, DECODE_BLOCKED, GATHER, TENSORS, READ_WAIT, ARRIVAL_WAIT, TRANSFORM, SEND, RECEIVE = range(
    _FIRST + 6, _FIRST + 15
)
TRANSFER, WAITED, SECONDS, TAKEN, BUSY, IDLE, READY, READY_SAMPLES, START = range(_FIRST + 15, _FIRST + 24)
_PAST = _FIRST + len(NAMES)
_WIDTH = _PAST + len(NAMES)  # behind the counters what they were when the pass began
_PROCESSES = 127
_HEADER, _BY_LOADER = 0, _SINCE  # the row of what is the same for all processes: the present pass and epoch
OF_TRAINER = -1  # the pass of a trainer that has workers

WAIT_SPAN = "pqcache/wait"
_SPANS = {DECODE: "pqcache/decode", GATHER: "pqcache/gather", TRANSFORM: "pqcache/transform"}


class ProcessState(NamedTuple):
    """What a process does: ``row_group`` of the index is the one that it reads for longest, ``seconds`` so far."""

    process: int
    is_alive: bool
    row_group: int | None
    seconds: float


class MeterCounts(NamedTuple):
    """The counters by name, in all and of the present ``epoch`` (None before the first)."""

    total: dict[str, int]
    of_epoch: dict[str, int]
    epoch: int | None


class MemoryUse(NamedTuple):
    """Bytes of Arrow's that processes have in use now, by their id; and the ``peak``."""

    arrow: dict[int, int]
    peak: int


def new_cells() -> Cells:
    """Return memory for a meter of one process and those that it forks."""
    return np.zeros((_PROCESSES + 1, _WIDTH), np.int64)


class Meter:
    """Counts for one dataset, in ``cells`` that its processes share; may be used from any thread."""

    def __init__(self, cells: Cells | None = None) -> None:
        self._given = new_cells() if cells is None else cells
        self._enter_process()

    def _enter_process(self) -> None:
        self._mine: Any = None  # this process's row
        self._fork = -1  # in which process it was taken
        self._reading: dict[int, tuple[int, int]] = {}  # by thread: a row group of the index, and since when
        self.waits_since: int | None = None  # for what is read, in the thread that uses it
        self.waited = 0  # by the trainer, in nanoseconds that are not in its row yet: adding takes as long as all else

    @property
    def _cells(self) -> Cells:
        return self._given

    def span(self, name: str) -> AbstractContextManager[Any] | None:
        """Return what is entered while something of this name is measured; None for nothing."""
        return None

    def add(self, counter: int, amount: int) -> None:
        """Add to a counter of this process."""
        row = self._mine
        if self._fork != _fork or row[_PROCESS] != _process:  # as in _row, without a call
            row = self._row()
        with _lock:
            row[counter] += amount

    def made(self, batches: int, rows: int, size: int) -> None:
        """Count batches that were made, with their rows and bytes."""
        row = self._row()
        with _lock:
            row[BATCHES] += batches
            row[ROWS] += rows
            row[BYTES] += size

    def timed(self, counter: int) -> AbstractContextManager[Any]:
        """Return a context whose duration is added to a counter."""
        span = self.span(_SPANS[counter]) if counter in _SPANS else None
        return Timer(self, counter) if span is None else TimerWithSpan(self, counter, span)

    def timed_for(self, counter: int, times: int) -> AbstractContextManager[Any]:
        """Return a context whose duration is added to a counter so many times: for others that are not measured."""
        return TimerOfMany(self, counter, times)

    def decoding(self, row_group: int, stored_bytes: int) -> AbstractContextManager[None]:
        """Return a context that is counted as the decoding of a row group of the index, which this thread reads."""
        return self._decoding(row_group, stored_bytes)

    @contextmanager
    def _decoding(self, row_group: int, stored_bytes: int) -> Iterator[None]:
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
        """Note how many bytes of Arrow's, in which rows are held, this process has in use."""
        row = self._row()
        row[_ARROW] = arrow = pa.default_memory_pool().bytes_allocated()
        row[_PEAK] = max(row[_PEAK], arrow)

    def begin(self, epoch: int, number: int, by_loader: bool = False) -> None:
        """Begin to count what this process does of a pass over an epoch.

        All its workers give the pass the same ``number``, and the trainer gives OF_TRAINER. ``by_loader`` says whether
        a trainer counts too.
        """
        self.add_waited()
        row, header = self._row(), self._cells[_HEADER]
        header[_EPOCH], header[_BY_LOADER] = epoch + 1, by_loader
        header[_PASS] = 0 if number == OF_TRAINER else number
        with _lock:
            row[_PAST:] = row[_FIRST:_PAST]
            row[_EPOCH], row[_PASS], row[_BEGUN] = epoch + 1, number, time.monotonic_ns()

    def add_waited(self) -> None:
        """Add what the trainer has waited, at the end of an iteration."""
        row = self._row()
        with _lock:
            row[WAITED] += self.waited
            self.waited = 0

    def set_running(self, is_running: bool) -> None:
        """Note that the trainer's iteration begins or ends: the time between is counted."""
        row, now = self._row(), time.monotonic_ns()
        with _lock:
            if row[_SINCE]:
                row[SECONDS] += now - row[_SINCE]
            row[_SINCE] = now if is_running else 0

    def taken(self) -> None:
        """Note that the trainer has taken a batch of a worker's; at times, how many more of them are made."""
        row = self._row()
        if row[TAKEN] == row[TAKEN + len(NAMES)]:  # the first one
            rows, header = self._cells[1:], self._cells[_HEADER]
            begun = rows[rows[:, _PASS] == header[_PASS], _BEGUN]
            row[START] += max(0, int(begun.min(initial=time.monotonic_ns())) - row[_BEGUN])
        with _lock:
            row[TAKEN] += 1
            row[WAITED] += self.waited
            self.waited = 0
            count = row[TAKEN]
        if count % 8 == 0 and (made := int(self._cells[1:, BATCHES].sum())):  # by a mix's datasets, not by the mix
            self.note_ready(made - int(self._cells[1:, TAKEN].sum()))

    def note_ready(self, batches: int) -> None:
        """Note how many batches were made and not used at one time."""
        row = self._row()
        with _lock:
            row[READY] += max(0, batches)
            row[READY_SAMPLES] += 1

    def counts(self) -> MeterCounts:
        """Return the sums over all processes."""
        with _lock:
            rows, header = self._cells[1:].copy(), self._cells[_HEADER]
            rows[rows[:, _PROCESS] == _process, WAITED] += self.waited
        running = np.where(rows[:, _SINCE] > 0, time.monotonic_ns() - rows[:, _SINCE], 0)
        rows[:, SECONDS] += np.where(_alive(rows[:, _PROCESS]), running, 0)
        now = rows[:, _FIRST:_PAST]
        of_trainer = (rows[:, _PASS] == OF_TRAINER) & (rows[:, _EPOCH] == header[_EPOCH]) & (header[_BY_LOADER] != 0)
        present = of_trainer | ((rows[:, _PASS] == header[_PASS]) & (header[_PASS] != 0))
        past = np.where(present[:, None], np.maximum(now - rows[:, _PAST:], 0), 0)
        epoch = int(header[_EPOCH]) - 1
        return MeterCounts(_named(now), _named(past), epoch if epoch >= 0 else None)

    def own(self, counter: int) -> int:
        """Return a counter of this process."""
        return int(self._row()[counter])

    def memory(self) -> MemoryUse:
        """Return what the living processes have now."""
        rows = self._cells[1:].copy()
        rows = rows[_alive(rows[:, _PROCESS])]
        processes = rows[:, _PROCESS].tolist()
        arrow = dict(zip(processes, rows[:, _ARROW].tolist(), strict=True))
        return MemoryUse(arrow, int(rows[:, _PEAK].sum()))

    def processes(self) -> list[ProcessState]:
        """Return what the processes of the present pass do."""
        header, now, found = self._cells[_HEADER].copy(), time.monotonic_ns(), []
        for row in self._cells[1:].copy():
            if row[_PROCESS] and row[_PASS] and row[_EPOCH] == header[_EPOCH] and row[_PASS] in (header[_PASS], -1):
                reading = int(row[_READING]) - 1
                seconds = (now - int(row[_READING_SINCE])) / 1e9 if reading >= 0 else 0.0
                process = int(row[_PROCESS])
                found.append(ProcessState(process, is_alive(process), reading if reading >= 0 else None, seconds))
        return found

    def _row(self) -> Any:
        """Return this process's row, as a memoryview: numpy takes several times as long for one number."""
        row = self._mine
        if self._fork != _fork or row[_PROCESS] != _process:
            with _lock:
                row = self._claim()
        return row

    def _claim(self) -> Any:
        """Take a row that no process uses, before that one of a process that has ended, whose counts remain.

        Two processes that take one at the same time both write their ids, and the first one looks for another when it
        finds that. Where there are more processes than rows, some share one, and may lose a count.
        """
        owners = self._cells[1:, _PROCESS]
        free = np.flatnonzero((owners == 0) | (owners == _process))
        if not len(free):
            free = np.flatnonzero(~_alive(owners))
        chosen = int(free[_process % len(free)] if len(free) else _process % _PROCESSES)
        row = memoryview(self._cells[chosen + 1])
        if row[_PROCESS] != _process:
            row[_PASS] = row[_SINCE] = row[_READING] = row[_ARROW] = row[_PEAK] = 0
            row[_PROCESS] = _process
        if self._fork != _fork:
            self._reading, self.waited = {}, 0
        self._mine, self._fork = row, _fork
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._given = new_cells()
        self._enter_process()


class NoMeter(Meter):
    """Counts nothing."""

    def __init__(self) -> None:
        super().__init__(np.zeros((2, _WIDTH), np.int64))

    def add(self, counter: int, amount: int) -> None:
        """Do nothing."""

    def made(self, batches: int, rows: int, size: int) -> None:
        """Do nothing."""

    def timed(self, counter: int) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def timed_for(self, counter: int, times: int) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def decoding(self, row_group: int, stored_bytes: int) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def note_memory(self) -> None:
        """Do nothing."""

    def taken(self) -> None:
        """Do nothing."""

    def note_ready(self, batches: int) -> None:
        """Do nothing."""


def _named(rows: Cells) -> dict[str, int]:
    return dict(zip(NAMES, rows.sum(axis=0).tolist(), strict=True))


def _alive(processes: Cells) -> npt.NDArray[np.bool_]:
    return np.array([process > 0 and is_alive(process) for process in processes.tolist()], np.bool_)


def _in_child() -> None:
    global _lock, _fork, _process
    _lock, _fork, _process = threading.Lock(), _fork + 1, os.getpid()


NO_METER = NoMeter()
_lock = threading.Lock()  # between threads; a forked child has its own
_fork = 0  # how often this process and those before it were forked
_process = os.getpid()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
