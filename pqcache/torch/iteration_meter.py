"""Measures one iteration: how long the trainer waits for each batch, or a worker for its batches to be taken."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from torch.utils.data import get_worker_info

from pqcache.reader.meter import BUSY, IDLE, OF_TRAINER, READ_WAIT, TRANSFER, TRANSFORM, WAIT_SPAN, WAITED, Meter
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.reading_stats import DatasetStats, ReadingStats
from pqcache.torch.stall_watch import StallWatch

log = logging.getLogger("pqcache.torch")
T = TypeVar("T")


class MeasuredDataset(Protocol):
    """A dataset whose iterations are measured."""

    stall_timeout: float | None

    @property
    def meter(self) -> Meter:
        """What counts the trainer's waits."""

    @property
    def yields_batches(self) -> bool:
        """Whether batches are yielded, not rows."""

    @property
    def meters(self) -> Sequence[Meter]:
        """All that count for it."""

    def stats(self) -> DatasetStats:
        """Return the numbers so far."""

    def describe_reading(self) -> list[str]:
        """Return lines on what its processes read now."""


class MeteredReader(Protocol):
    """What reads a dataset."""

    meter: Meter

    @property
    def data(self) -> LocalDataset:
        """The dataset that is open."""


class IterationMeter:
    """Counts the waits of one iteration; ``yields_batches`` says that items are batches, which are timed one by one."""

    def __init__(self, meter: Meter, watch: StallWatch | None, yields_batches: bool, made_here: bool) -> None:
        self._meter, self._watch, self._yields_batches, self._made_here = meter, watch, yields_batches, made_here
        self.in_worker = get_worker_info() is not None
        self.is_complete = False  # the epoch, as of the last item

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Return an iterator over the same items that counts how long each takes, and how long until the next."""
        return self._timed(iter(items)) if self._yields_batches else iter(items)

    def _timed(self, items: Iterator[T]) -> Generator[T]:
        meter, watch, in_worker, now = self._meter, self._watch, self.in_worker, time.monotonic_ns
        waits, got = BUSY if in_worker else WAITED, now()
        while True:
            asked = now()
            if watch is not None:
                watch.since = asked
            span = None if in_worker else meter.span(WAIT_SPAN)
            try:
                if span is None:
                    item = next(items)
                else:
                    with span:
                        item = next(items)
            except StopIteration:
                return
            if in_worker:
                meter.add(IDLE, asked - got)
            got = now()
            meter.add(waits, got - asked)
            if watch is not None:
                watch.since = None
                if watch.warned_of is not None:
                    watch.goes_on()
            if not self._made_here:
                meter.taken()
            yield item

    def transferring(self) -> AbstractContextManager[Any]:
        """Return a context whose time is that of a transfer, and within one for which the trainer waits."""
        return self._meter.timed(TRANSFER)

    def moved(self, move: Callable[..., T], *arguments: Any) -> T:
        """Return what ``move`` makes of its arguments; its time is that of a transfer, for which the trainer waits."""
        with self._meter.timed(TRANSFER):
            begun = time.monotonic_ns()
            result = move(*arguments)
            self._meter.add(WAITED, time.monotonic_ns() - begun)
        return result


class NoIterationMeter:
    """Measures nothing."""

    is_complete = False

    def over(self, items: Iterable[T]) -> Iterable[T]:
        """Return the items."""
        return items


@contextmanager
def measured(
    dataset: MeasuredDataset, epoch: int, number: int, workers: int = 0, by_loader: bool = False
) -> Iterator[IterationMeter]:
    """Measure an iteration of a trainer with so many ``workers``, or of one who reads a pass of this ``number`` itself.

    At its end one line about the epoch is logged if it is complete then, by the trainer if it uses a Loader.
    """
    meter, in_worker, process = dataset.meter, get_worker_info() is not None, os.getpid()
    begun = time.monotonic_ns()
    for one in dataset.meters:
        one.begin(epoch, OF_TRAINER if workers else number, by_loader)
    if not in_worker:
        meter.set_running(True)
    before, begun = _own_waits(meter), time.monotonic_ns()
    watch = _watch(dataset, epoch, meter)
    try:
        yield (iteration := IterationMeter(meter, watch, dataset.yields_batches, made_here=not workers))
    finally:
        if watch is not None:
            watch.close()
        if process == os.getpid() and not in_worker:  # not in a child that was forked meanwhile
            if not dataset.yields_batches:
                waited, iteration_time = _own_waits(meter) - before, time.monotonic_ns() - begun
                meter.add(WAITED, min(waited, iteration_time))  # a transform on threads may take more
            meter.set_running(False)
        if (
            process == os.getpid()
            and iteration.is_complete
            and not (in_worker and by_loader)
            and log.isEnabledFor(logging.INFO)
        ):
            log.info("%s", summary(dataset.stats().epoch))


def _own_waits(meter: Meter) -> int:
    """Return for how long a process that reads single rows has waited for these and for their transform."""
    return meter.own(READ_WAIT) + meter.own(TRANSFORM)


def _watch(dataset: MeasuredDataset, epoch: int, meter: Meter) -> StallWatch | None:
    if dataset.stall_timeout is None:
        return None
    info = get_worker_info()
    what = f"epoch {epoch}" if info is None else f"epoch {epoch}, worker {info.id} (pid {os.getpid()})"
    return StallWatch(dataset.stall_timeout, what, dataset.describe_reading, lambda: meter.waits_since)


def summary(stats: ReadingStats) -> str:
    """Return an epoch's numbers as one line."""
    info = get_worker_info()
    seconds = stats.seconds
    if seconds is None:  # of a plain DataLoader: what the workers took, one beside the other
        seconds = (stats.worker_seconds + stats.worker_idle_seconds) / (info.num_workers if info else 1)
    who = f"epoch {stats.epoch}" if info is None else f"epoch {stats.epoch}, {info.num_workers} workers together"
    text = f"{who}: {stats.rows:,} rows in {seconds:.1f} s"
    if seconds:
        text += f", {stats.rows / seconds:,.0f} rows/s"
    if stats.waited_share is not None:
        text += f"; the trainer waited {100 * stats.waited_share:.0f} % of it"
    return text if stats.limited_by is None else f"{text}; limited by {stats.limited_by}"


def describe_reading(readers: Iterable[MeteredReader], only: int | None = None) -> list[str]:
    """Return a line for each process of the present pass on what it reads now; or of ``only`` one process."""
    lines = []
    for reader in readers:
        if (arriving := reader.data.arriving) is not None:
            lines.append(f"  of a first copy {arriving}")
        for process, is_alive, row_group, seconds in reader.meter.processes():
            if only is not None and process != only:
                continue
            ended = "" if is_alive else ", which has ended,"
            what = "no row group" if row_group is None else f"{reader.data.describe(row_group)} since {seconds:.1f} s"
            lines.append(f"  process {process}{ended} reads {what}")
    return lines
