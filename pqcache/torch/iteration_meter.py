"""Measures an iteration: how long the trainer waits for each batch, or a worker until its batches are taken.

After a long wait, a `StallWatch` logs the stacks of the reading threads, and their files.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from pqcache.reader.stats import (
    BUSY,
    IDLE,
    OF_TRAINER,
    READ_WAIT,
    SHAPE,
    TRANSFER,
    TRANSFORM,
    WAIT_SPAN,
    WAITED,
    Meter,
    ReadingStats,
    span,
)
from pqcache.system.processes import is_alive
from pqcache.torch.transport import WorkerMemory

_FRAMES = 16  # the innermost ones of a stack
_FORKED = (
    "  This process was forked: a library with threads, as polars is, hangs here if the process before has used it.",
    "  Pass multiprocessing_context='forkserver' to the Loader.",
)
_is_forked = False
_now = time.monotonic_ns


class StallWatch:
    """Logs a warning, once for a batch, if it does not arrive within ``seconds``, and another when it does.

    Its thread neither keeps the iteration alive nor uses Arrow, and does not exist in a forked child. ``describe``
    returns lines about what is being read; ``waits_since`` returns the beginning of the wait if ``since`` is not set.
    """

    def __init__(
        self,
        seconds: float,
        what: str,
        describe: Callable[[], Sequence[str]],
        waits_since: Callable[[], int | None],
    ) -> None:
        self._seconds, self._what, self._describe, self._waits_since = seconds, what, describe, waits_since
        self._thread = threading.get_ident()
        self.since: int | None = None  # when the batch was requested; all times are time.monotonic_ns
        self.warned_of: int | None = None  # the same, of the batch in the latest warning
        self._ended = threading.Event()
        watcher = threading.Thread(target=self._watch, name="pqcache-stall-watch", daemon=True)
        watcher.start()
        self.close = weakref.finalize(self, _end, self._ended, watcher, os.getpid())  # called at exit too

    def goes_on(self) -> None:
        since, self.warned_of = self.warned_of, None
        if since is not None:
            log.warning("%s: it goes on after %.1f s", self._what, (_now() - since) / 1e9)

    def _watch(self) -> None:
        wait = self._seconds / 4
        while not self._ended.wait(wait):
            since, now = self.since or self._waits_since(), _now()
            if since != self.warned_of:
                self.goes_on()
            if since is None or since == self.warned_of:
                wait = self._seconds / 4
            elif (seconds := (now - since) / 1e9) < self._seconds:
                wait = min(self._seconds / 4, self._seconds - seconds)
            else:
                self.warned_of = since
                lines = [*self._describe(), *_stacks(self._thread), *(_FORKED if _is_forked else ())]
                log.warning("%s: no batch for %.1f s\n%s", self._what, seconds, "\n".join(lines))


def _in_child() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _end(ended: threading.Event, watcher: threading.Thread, process: int) -> None:
    """End the thread before the iteration ends, and at the latest before the interpreter does.

    The thread refers to the dataset, so it may be the one that frees its shared tensors. torch releases the GIL for
    that, and a thread that reacquires it while the interpreter exits aborts the process.
    """
    if process == os.getpid():  # a child has no such thread, and may have copied a lock that it held
        ended.set()
        if watcher is not threading.current_thread():
            watcher.join(1.0)


def _stacks(consumer: int) -> list[str]:
    """The stacks of this process's reading threads and of the ``consumer``'s thread, as lines."""
    frames, lines = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.ident == consumer or (thread.name.startswith("pqcache") and thread is not threading.current_thread()):
            frame = frames.get(thread.ident or 0)
            lines += [f"  thread {thread.name}:", *(f"    {line}" for line in _lines(frame))]
    return lines


def _lines(frame: FrameType | None) -> list[str]:
    """The innermost calls of a stack, latest first. Reads no source code, as the file system may hang."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


log = logging.getLogger("pqcache.torch")
T = TypeVar("T")


def new_meter() -> Meter:
    """A meter that a trainer shares with its workers, spawned ones too.

    Copies, and forked or spawned ranks, begin at 0 and share nothing with the original.
    """
    return Meter(WorkerMemory(SHAPE, kept=False))


class IterationMeter:
    """Counts the waits of one iteration, batch by batch; not used for iterations over single rows."""

    def __init__(self, meter: Meter, watch: StallWatch | None = None, by_batch: bool = False, by_workers: bool = False):
        self._meter, self._watch, self._by_batch, self._by_workers = meter, watch, by_batch, by_workers
        self.is_complete = False  # whether the last item ended the epoch

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate, counting how long each item takes and how long until the next is requested."""
        return self._timed(iter(items)) if self._by_batch else iter(items)

    def _timed(self, items: Iterator[T]) -> Generator[T]:
        meter, watch, in_worker, now = self._meter, self._watch, get_worker_info() is not None, time.monotonic_ns
        got = now()
        while True:
            asked = now()
            if watch is not None:
                watch.since = asked
            try:
                with nullcontext() if in_worker else span(WAIT_SPAN):
                    item = next(items)
            except StopIteration:
                return
            if in_worker:
                meter.add(IDLE, asked - got)
            got = now()
            meter.add(BUSY if in_worker else WAITED, got - asked)
            if watch is not None:
                watch.since = None
                if watch.warned_of is not None:
                    watch.goes_on()
            if self._by_workers:
                meter.taken()
            yield item

    def transferring(self) -> AbstractContextManager[Any]:
        """Count the body as a transfer; the caller counts the trainer's wait."""
        return self._meter.timed(TRANSFER)

    def moved(self, move: Callable[..., T], *arguments: Any) -> T:
        """Call ``move``, and count it as a transfer that delays the trainer."""
        with self._meter.timed(TRANSFER), self._meter.timed(WAITED):
            return move(*arguments)


@contextmanager
def measured(
    dataset: Any, epoch: int, number: int, workers: int = 0, by_loader: bool = False
) -> Iterator[IterationMeter]:
    """Measure an iteration of a ResumableDataset by a trainer with ``workers``, or by a process that reads itself.

    ``number`` identifies the pass. A complete epoch is logged in one line, with a Loader by the trainer alone.
    """
    meter, info, process = dataset._meter, get_worker_info(), os.getpid()
    for one in dataset._meters:
        one.begin(epoch, OF_TRAINER if workers else number, by_loader)
    if info is None:
        meter.set_running(True)
    before, begun = _own_waits(meter), time.monotonic_ns()
    watch = None
    if dataset.stall_timeout is not None:
        what = f"epoch {epoch}" if info is None else f"epoch {epoch}, worker {info.id} (pid {process})"
        describe = partial(_describe_reading, dataset._readers, only=None if info is None else process)
        watch = StallWatch(dataset.stall_timeout, what, describe, lambda: meter.waits_since)
    iteration = IterationMeter(meter, watch, dataset._yields_batches, workers > 0)
    try:
        yield iteration
    finally:
        if watch is not None:
            watch.close()
        if process == os.getpid():  # not in a child that was forked meanwhile
            if info is None:
                if not dataset._yields_batches:  # a transform on threads may take more than the iteration
                    meter.add(WAITED, min(_own_waits(meter) - before, time.monotonic_ns() - begun))
                meter.set_running(False)
            if iteration.is_complete and (info is None or not by_loader) and log.isEnabledFor(logging.INFO):
                log.info("%s", summary(dataset.stats().epoch))


def _own_waits(meter: Meter) -> int:
    # of a process that reads single rows: its waits for them and for their transform
    return meter.own(READ_WAIT) + meter.own(TRANSFORM)


def summary(stats: ReadingStats) -> str:
    info = get_worker_info()
    seconds = stats.seconds
    if seconds is None:  # with a plain DataLoader: the workers' time, divided among them
        seconds = (stats.worker_seconds + stats.worker_idle_seconds) / (info.num_workers if info else 1)
    who = f"epoch {stats.epoch}" if info is None else f"epoch {stats.epoch}, {info.num_workers} workers together"
    text = f"{who}: {stats.rows:,} rows in {seconds:.1f} s"
    if seconds:
        text += f", {stats.rows / seconds:,.0f} rows/s"
    if stats.waited_share is not None:
        text += f"; the trainer waited {100 * stats.waited_share:.0f} % of it"
    return text if stats.limited_by is None else f"{text}; limited by {stats.limited_by}"


def _describe_reading(readers: Iterable[Any], only: int | None) -> list[str]:
    """One line per process of the current pass, or for ``only`` one of them: what it is reading.

    ``readers`` are DatasetReaders.
    """
    lines = []
    for reader in readers:
        if (arriving := reader.data.arriving) is not None:
            lines.append(f"  of a first copy {arriving}")
        for process, row_group, seconds in reader.meter.reading():
            if only is None or process == only:
                ended = "" if is_alive(process) else ", which has ended,"
                what = (
                    "no row group" if row_group is None else f"{reader.data.describe(row_group)} since {seconds:.1f} s"
                )
                lines.append(f"  process {process}{ended} reads {what}")
    return lines
