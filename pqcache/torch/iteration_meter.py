"""Measures one iteration: how long the trainer waits for each batch, or a worker for its batches to be taken."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from pqcache.reader.meter import (
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
    span,
)
from pqcache.reader.reading_stats import ReadingStats
from pqcache.system.process_stats import is_alive
from pqcache.torch.stall_watch import StallWatch
from pqcache.torch.worker_memory import WorkerMemory

log = logging.getLogger("pqcache.torch")
T = TypeVar("T")


def new_meter() -> Meter:
    """A meter that a trainer shares with its workers, spawned ones too.

    Copies, and ranks that are forked or spawned, begin at 0 and share nothing with the original.
    """
    return Meter(WorkerMemory(SHAPE, kept=False))


class IterationMeter:
    """Counts the waits of one iteration, batch by batch; it leaves iterations over single rows alone."""

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
        """Call ``move``, and count it as a transfer that the trainer waits for."""
        with self._meter.timed(TRANSFER), self._meter.timed(WAITED):
            return move(*arguments)


@contextmanager
def measured(
    dataset: Any, epoch: int, number: int, workers: int = 0, by_loader: bool = False
) -> Iterator[IterationMeter]:
    """Measure an iteration of a ResumableDataset by a trainer with ``workers``, or by a process that reads itself.

    ``number`` identifies the pass. A complete epoch is logged in one line, with a Loader by the trainer alone.
    """
    meter, info, process = dataset.meter, get_worker_info(), os.getpid()
    for one in dataset.meters:
        one.begin(epoch, OF_TRAINER if workers else number, by_loader)
    if info is None:
        meter.set_running(True)
    before, begun = _own_waits(meter), time.monotonic_ns()
    watch = None
    if dataset.stall_timeout is not None:
        what = f"epoch {epoch}" if info is None else f"epoch {epoch}, worker {info.id} (pid {process})"
        describe = partial(_describe_reading, dataset.readers, only=None if info is None else process)
        watch = StallWatch(dataset.stall_timeout, what, describe, lambda: meter.waits_since)
    iteration = IterationMeter(meter, watch, dataset.yields_batches, workers > 0)
    try:
        yield iteration
    finally:
        if watch is not None:
            watch.close()
        if process == os.getpid():  # not in a child that was forked meanwhile
            if info is None:
                if not dataset.yields_batches:  # a transform on threads may take more than the iteration
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
    """What each process of the current pass, or ``only`` one of them, reads now: a line each.

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
