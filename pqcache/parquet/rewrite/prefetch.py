"""Batches that are read ahead of their use: several parts of the sources at once, passed on in order."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.parquet.rewrite.source_reader import RowBatch, row_batch

ReadTask = Callable[[], Iterator[RowBatch]]
"""What makes some consecutive batches, on whatever thread has time."""

_LARGE = 512 << 10  # Arrow bytes of a table: to take it by itself is cheaper than to copy it
_END = object()


def prefetch(tasks: Sequence[ReadTask], limit: int, threads: int = 1) -> Generator[RowBatch, None, None]:
    """Yield the batches of ``tasks``, in their order, made on ``threads`` that run ahead by ``limit`` Arrow bytes.

    Each thread has a share of ``limit`` for itself, so that the one whose batches are next never waits for another.
    """
    threads = min(threads, len(tasks))
    ready: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in tasks]
    numbers = itertools.count()
    freed = threading.Condition()
    held = [0] * threads
    stopped = False

    def produce(thread: int) -> None:
        while not stopped and (number := next(numbers)) < len(tasks):
            try:
                for batch in tasks[number]():
                    with freed:
                        while held[thread] > limit // threads and not stopped:
                            freed.wait()
                        if stopped:
                            return
                        held[thread] += batch.nbytes
                    ready[number].put((thread, batch))
                ready[number].put(_END)
            except BaseException as error:  # noqa: BLE001 - raised again where the batches are used
                ready[number].put(error)

    workers = [threading.Thread(target=produce, args=(n,), name="pqcache-decode", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for batches in ready:
            while (item := batches.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                thread, batch = item
                yield batch
                with freed:
                    held[thread] -= batch.nbytes
                    freed.notify_all()
    finally:
        with freed:
            stopped = True
            freed.notify_all()
        for worker in workers:
            worker.join()


def join_small_batches(stream: Iterator[RowBatch], target: int) -> Iterator[RowBatch]:
    """Yield ``stream`` with tiny neighbours joined, so that many tiny files cost about as much as one."""
    waiting: list[RowBatch] = []
    size = 0
    for batch in stream:
        if waiting and size + batch.nbytes > target:
            yield _join(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
        if size > target // 2:
            yield _join(waiting)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting)


def _join(waiting: list[RowBatch]) -> RowBatch:
    if len(waiting) == 1:
        return waiting[0]
    table = pa.concat_tables([batch.table for batch in waiting]).unify_dictionaries()
    if sum(batch.nbytes for batch in waiting) < _LARGE * len(waiting):
        table = table.combine_chunks()
    rows = np.array([max(1, batch.table.num_rows) for batch in waiting], np.float64)
    ratios = np.average([batch.ratios for batch in waiting], axis=0, weights=rows)
    numbers = range(waiting[0].numbers[0], waiting[0].numbers[0] + table.num_rows)
    return row_batch(table, ratios, numbers, waiting[-1].done, waiting[0].widths)
