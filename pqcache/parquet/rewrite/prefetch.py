"""Pieces that are made ahead of their use: several parts of the sources at once, handed on in order."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.parquet.rewrite.source_reader import Piece, piece_of

Stretch = Callable[[], Iterator[Piece]]
"""What makes some consecutive pieces, on whatever thread has time."""

_LARGE = 512 << 10  # Arrow bytes of a table: to take it by itself is cheaper than to copy it
_END = object()


def prefetched(stretches: Sequence[Stretch], limit: int, threads: int = 1) -> Generator[Piece, None, None]:
    """Yield the pieces of ``stretches``, in their order, made on ``threads`` that run ahead by ``limit`` Arrow bytes.

    Each thread has a share of ``limit`` for itself, so that the one whose pieces are next never waits for another.
    """
    threads = min(threads, len(stretches))
    ready: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in stretches]
    numbers = itertools.count()
    room = threading.Condition()
    held = [0] * threads
    stopped = False

    def produce(thread: int) -> None:
        while not stopped and (number := next(numbers)) < len(stretches):
            try:
                for piece in stretches[number]():
                    with room:
                        while held[thread] > limit // threads and not stopped:
                            room.wait()
                        if stopped:
                            return
                        held[thread] += piece.nbytes
                    ready[number].put((thread, piece))
                ready[number].put(_END)
            except BaseException as error:  # noqa: BLE001 - raised again where the pieces are used
                ready[number].put(error)

    workers = [threading.Thread(target=produce, args=(n,), name="pqcache-decode", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for pieces in ready:
            while (item := pieces.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                thread, piece = item
                yield piece
                with room:
                    held[thread] -= piece.nbytes
                    room.notify_all()
    finally:
        with room:
            stopped = True
            room.notify_all()
        for worker in workers:
            worker.join()


def joined(stream: Iterator[Piece], target: int) -> Iterator[Piece]:
    """Yield ``stream`` with tiny neighbours joined, so that four hundred tiny files cost as much as one."""
    waiting: list[Piece] = []
    size = 0
    for piece in stream:
        if waiting and size + piece.nbytes > target:
            yield _join(waiting)
            waiting, size = [], 0
        waiting.append(piece)
        size += piece.nbytes
        if size > target // 2:
            yield _join(waiting)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting)


def _join(waiting: list[Piece]) -> Piece:
    if len(waiting) == 1:
        return waiting[0]
    table = pa.concat_tables([piece.table for piece in waiting]).unify_dictionaries()
    if sum(piece.nbytes for piece in waiting) < _LARGE * len(waiting):
        table = table.combine_chunks()
    rows = np.array([max(1, piece.table.num_rows) for piece in waiting], np.float64)
    ratios = np.average([piece.ratios for piece in waiting], axis=0, weights=rows)
    numbers = range(waiting[0].numbers[0], waiting[0].numbers[0] + table.num_rows)
    return piece_of(table, ratios, numbers, waiting[-1].done, waiting[0].widths)
