"""The costs of reading: a `Meter` counts them in memory shared by all processes, ``stats()`` returns values.

Each process has a row of its own, so no locks are needed. The numbers of a dataset are the sums over the rows,
including those of processes that have ended. A row has the counters, and their values at the beginning of the current
pass, so an epoch's numbers are differences. Counters grow once for each row group, block or batch, never for each row.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.reader.arriving import without_repeats
from pqcache.reader.read_plan import ReadPlan
from pqcache.system.processes import disk_bytes_of_thread, is_alive

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
    """A span of torch's profiler, if that is active in this process."""
    profiler = sys.modules.get("torch.autograd.profiler")
    is_active = name is not None and profiler is not None and profiler._is_profiler_enabled
    return profiler.record_function(name) if is_active and profiler is not None else nullcontext()


class MeterCounts(NamedTuple):
    """The counters by name, in total and for the present ``epoch`` (None before the first).

    ``arrow`` has the Arrow bytes now in use by living processes, by process ID, and ``peak`` their maxima.
    """

    total: dict[str, int]
    of_epoch: dict[str, int]
    epoch: int | None
    arrow: dict[int, int]
    peak: int


class Meter:
    """Counts the costs of a dataset in ``memory.numbers``, which processes may share; thread-safe."""

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
        """Add the body's duration to a counter, multiplied by ``times`` if it stands for unmeasured calls too."""
        begun = time.monotonic_ns()
        try:
            with span(_SPANS.get(counter)):
                yield
        finally:
            self.add(counter, (time.monotonic_ns() - begun) * times)

    @contextmanager
    def decoding(self, row_group: int, stored_bytes: int) -> Iterator[None]:
        """Count the body as this thread's decoding of a row group."""
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
        """Note the bytes that Arrow, which holds the rows, uses in this process."""
        row = self._row()
        row[_ARROW] = arrow = pa.default_memory_pool().bytes_allocated()
        row[_PEAK] = max(row[_PEAK], arrow)

    def begin(self, epoch: int, number: int, by_loader: bool = False) -> None:
        """Begin to count a pass of this process over an epoch.

        All workers pass the same ``number``, a trainer OF_TRAINER. ``by_loader`` says that a trainer counts too.
        """
        row, header = self._row(), self._memory.numbers[_HEADER]
        header[_EPOCH], header[_BY_LOADER] = epoch + 1, by_loader
        header[_PASS] = 0 if number == OF_TRAINER else number
        with _lock:
            row[_PAST:] = row[_FIRST:_PAST]
            row[_EPOCH], row[_PASS], row[_BEGUN] = epoch + 1, number, time.monotonic_ns()

    def set_running(self, is_running: bool) -> None:
        """Note the beginning or end of the trainer's iteration, to count the time between."""
        row, now = self._row(), time.monotonic_ns()
        with _lock:
            if row[_SINCE]:
                row[SECONDS] += now - row[_SINCE]
            row[_SINCE] = now if is_running else 0

    def taken(self) -> None:
        """Note that the trainer took a worker's batch, and sometimes how many more are ready."""
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
        """Processes of the present pass, with the row group being read for longest, or None, and the time."""
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
        """This process's row as a memoryview, which is much faster than numpy for single numbers."""
        row = self._mine
        if self._fork != _fork or row[_PROCESS] != _process:
            with _lock:
                row = self._claim()
        return row

    def _claim(self) -> Any:
        """Take an unused row, or one of a process that has ended, whose counts remain.

        If two processes take a row at the same time, both write their IDs, and the first one finds the other's and
        takes another row. If there are more processes than rows, some share a row, and may lose a count.
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


Limit = Literal["trainer", "start", "storage", "decode", "gather", "transform", "transfer"]

_FEW = 0.05  # of the time: a trainer that waits for less is not limited by its data
_IDLE = 0.25  # of the time of workers: they have made batches before the trainer wants them
_MOST = 0.5  # of the time that the trainer waits
_BLOCKED = 0.5  # of the time to decode
_FROM_DISK = 0.1  # of the bytes that are decoded


@dataclass(frozen=True, kw_only=True)
class ReadingStats:
    """Costs of reading; times add up over threads and workers, so they may exceed the trainer's.

    Attributes:
        epoch: the epoch; None for all epochs together.
        batches: batches made, including those that the trainer has not taken yet; 0 if rows are yielded.
        rows: rows (or sequences) made.
        bytes: bytes of their columns in memory.
        seconds: the trainer's, from the start of its iterations to their ends, or until now; None if unknown, as with
            workers of a plain DataLoader.
        waited_seconds: the trainer's wait for batches, with the transform if it makes the batches itself. None if
            ``seconds`` is None.
        start_seconds: the part of it until a worker began.
        read_wait_seconds: the wait for decoded rows, of threads and workers that make batches.
        arrival_wait_seconds: the part of it for bytes of a first copy that had not arrived.
        decode_seconds: reading and decoding row groups.
        decode_blocked_seconds: the part of it waiting for a disk, a core or the interpreter.
        gather_seconds: putting rows in order, and into batches of tensors.
        transform_seconds: in the transform.
        send_seconds: packing batches in workers and unpacking them in the trainer, with making tensors if there is no
            transform.
        transfer_seconds: moving batches to the ``device`` of a Loader, or waiting until a Prefetch has packed them, but
            not for copies beside the training.
        worker_seconds: the workers' time making batches.
        worker_idle_seconds: the workers' time after making all batches that they prepare in advance.
        row_groups: row groups (or pieces) decoded.
        row_group_bytes: bytes of their columns in the files.
        disk_bytes: bytes read from a disk; the others were in the page cache.
        ready_batches: the average number of batches made and not yet used; None if not sampled.
        limited_by: the first thing to speed up: "trainer" (it hardly waits for data), "start" (of worker processes),
            "storage", "decode", "gather", "transform" or "transfer" (from workers, and to a device); None before
            anything was read.
    """

    epoch: int | None = None
    batches: int = 0
    rows: int = 0
    bytes: int = 0
    seconds: float | None = None
    waited_seconds: float | None = None
    start_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    arrival_wait_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_blocked_seconds: float = 0.0
    gather_seconds: float = 0.0
    transform_seconds: float = 0.0
    send_seconds: float = 0.0
    transfer_seconds: float = 0.0
    worker_seconds: float = 0.0
    worker_idle_seconds: float = 0.0
    row_groups: int = 0
    row_group_bytes: int = 0
    disk_bytes: int = 0
    ready_batches: float | None = None
    limited_by: Limit | None = None

    @property
    def waited_share(self) -> float | None:
        """The share of its time, from 0 to 1, that the trainer waited; None if unknown."""
        return None if self.waited_seconds is None or not self.seconds else self.waited_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ArrivalStats:
    """The arrival of a dataset; all 0 if it was complete when opened.

    Attributes:
        total_bytes: the size of all its files.
        arrived_bytes: the part of it that has arrived.
        wanted_bytes: the size of the row groups and columns that are read.
        wanted_arrived_bytes: the part of it that has arrived.
        waited_seconds: the time that this process, and workers it forked, waited for arrivals.
    """

    total_bytes: int = 0
    arrived_bytes: int = 0
    wanted_bytes: int = 0
    wanted_arrived_bytes: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DatasetStats:
    """The costs of a dataset in all threads and workers of this rank, as returned by ``dataset.stats()``.

    Attributes:
        epoch: the costs of the present or latest epoch.
        total: the costs of all epochs.
        memory_bytes: Arrow's memory in all living processes now, with decoded rows.
        memory_peak_bytes: the sum of the peaks of these processes.
        memory_limit_bytes: the dataset's ``memory``.
        arrivals: the arrival of a first copy.
        datasets: for a Mix, the costs of its datasets by name, except waiting, which is the mix's. With
            ``within_batch`` each one counts its parts of the mix's batches.
    """

    epoch: ReadingStats = field(default_factory=ReadingStats)
    total: ReadingStats = field(default_factory=ReadingStats)
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    arrivals: ArrivalStats = field(default_factory=ArrivalStats)
    datasets: Mapping[str, DatasetStats] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        found = asdict(replace(self, datasets={}))
        return found | {"datasets": {name: stats.to_dict() for name, stats in self.datasets.items()}}


def dataset_stats(counts: MeterCounts, plan: ReadPlan, limit: int | None, transform_threads: int = 1) -> DatasetStats:
    return DatasetStats(
        epoch=reading_stats(counts.of_epoch, counts.epoch, transform_threads),
        total=reading_stats(counts.total, None, transform_threads),
        memory_bytes=sum(counts.arrow.values()),
        memory_peak_bytes=counts.peak,
        memory_limit_bytes=limit or 0,
        arrivals=_arrivals(plan),
    )


def _arrivals(plan: ReadPlan) -> ArrivalStats:
    arrivals, index = plan.data.arrivals, plan.data.index
    if arrivals is None:
        return ArrivalStats()
    row_groups = without_repeats(plan.row_groups)
    sizes = index.stored(plan.columns_read)[row_groups]
    return ArrivalStats(
        total_bytes=arrivals.total_bytes,
        arrived_bytes=arrivals.arrived_bytes,
        wanted_bytes=int(sizes.sum()),
        wanted_arrived_bytes=int(sizes[arrivals.arrived(row_groups)].sum()),
        waited_seconds=arrivals.waited_seconds,
    )


def mix_stats(
    own: MeterCounts,
    datasets: Mapping[str, DatasetStats],
    parts: Iterable[MeterCounts],
    within_batch: bool = False,
) -> DatasetStats:
    """The costs of a mix: the trainer's from its ``own`` meter, the others from its datasets.

    With ``within_batch``, the mix makes its batches from those of several datasets, and counts them itself.
    """
    total, epoch, peak = dict(own.total), dict(own.of_epoch), 0
    arrow: dict[int, int] = {}  # of each process, whatever it reads
    for counts in parts:
        for sums, more in ((total, counts.total), (epoch, counts.of_epoch)):
            for name, number in more.items():
                sums[name] += number
        peak += counts.peak
        arrow |= {process: max(size, arrow.get(process, 0)) for process, size in counts.arrow.items()}
    if within_batch:
        total["batches"], epoch["batches"] = own.total["batches"], own.of_epoch["batches"]
    arrivals = [stats.arrivals for stats in datasets.values()]
    return DatasetStats(
        epoch=reading_stats(epoch, own.epoch),
        total=reading_stats(total, None),
        memory_bytes=sum(arrow.values()),
        memory_peak_bytes=peak,
        memory_limit_bytes=sum(stats.memory_limit_bytes for stats in datasets.values()),
        arrivals=ArrivalStats(
            **{item.name: sum(getattr(stats, item.name) for stats in arrivals) for item in fields(ArrivalStats)}
        ),
        datasets=dict(datasets),
    )


def reading_stats(counts: Mapping[str, int], epoch: int | None, transform_threads: int = 1) -> ReadingStats:
    seconds = {name: number / 1e9 for name, number in counts.items()}
    is_known = counts["seconds"] > 0
    samples = counts["ready_samples"]
    found = ReadingStats(
        epoch=epoch,
        batches=counts["batches"],
        rows=counts["rows"],
        bytes=counts["bytes"],
        seconds=seconds["seconds"] if is_known else None,
        waited_seconds=seconds["waited"] if is_known else None,
        start_seconds=seconds["start"],
        read_wait_seconds=seconds["read_wait"],
        arrival_wait_seconds=seconds["arrival_wait"],
        decode_seconds=seconds["decode"],
        decode_blocked_seconds=seconds["decode_blocked"],
        gather_seconds=seconds["gather"] + seconds["tensors"],
        transform_seconds=seconds["transform"],
        send_seconds=seconds["send"] + seconds["receive"],
        transfer_seconds=seconds["transfer"],
        worker_seconds=seconds["busy"],
        worker_idle_seconds=seconds["idle"],
        row_groups=counts["row_groups"],
        row_group_bytes=counts["row_group_bytes"],
        disk_bytes=counts["disk_bytes"],
        ready_batches=counts["ready"] / samples if samples else None,
    )
    return replace(found, limited_by=_limit_of(found, seconds, transform_threads))


def _limit_of(stats: ReadingStats, seconds: Mapping[str, float], transform_threads: int) -> Limit | None:
    """The first thing to make faster; ``seconds`` are the counters by name.

    Batches are made in turn by waiting for decoded rows, making tensors and calling the transform. The slowest of these
    limits the dataset.
    """
    if not stats.rows:
        return None
    share, working = stats.waited_share, seconds["busy"] + seconds["idle"]
    much = _MOST * (stats.waited_seconds or float("inf"))
    if share is not None and share < _FEW:
        return "trainer"
    if share is None and seconds["idle"] > _IDLE * working:
        return "trainer"
    if stats.start_seconds > much:
        return "start"
    if seconds["receive"] + seconds["transfer"] > much:
        return "transfer"
    waits: dict[Limit, float] = {
        "storage": seconds["arrival_wait"],
        "decode": seconds["read_wait"] - seconds["arrival_wait"],
        "gather": seconds["tensors"],
        "transform": seconds["transform"] / transform_threads,
        "transfer": seconds["send"],
    }
    first: Limit = max(waits, key=lambda name: waits[name])
    if first != "decode":
        return first
    if seconds["gather"] > seconds["decode"]:
        return "gather"
    from_disk = stats.disk_bytes > _FROM_DISK * stats.row_group_bytes
    return "storage" if from_disk and seconds["decode_blocked"] > _BLOCKED * seconds["decode"] else "decode"
