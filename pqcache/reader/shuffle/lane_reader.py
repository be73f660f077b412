"""Reads a lane: decodes row groups ahead on threads, scatters them into buckets, gathers blocks into batches.

What is copied when: a row group is decoded and its rows are scattered into buckets, in chunks with memory of their own
that is reused when their buckets are gathered. A block joins its buckets, some columns at a time, in a scratch that
fits into the processor's cache, and takes the rows in their order from there; its batches are parts of the block, whose
memory is reused when the last of them is freed. Strings and lists move as 16-byte views until their bytes are packed,
for several batches of a block at once, or in workers into the memory that a batch is sent in.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic

from pqcache.reader.meter import GATHER
from pqcache.reader.order.epoch_order import Lane
from pqcache.reader.shuffle.gather import BatchBuilder, BatchRows, gather
from pqcache.reader.shuffle.scatter import Buckets, Done, ReadContext, scatter

_STRETCHES = 3  # of blocks on their way: one being used, one ready (unless memory is low), one in the making
_NOTED = 8  # of so many stretches, at one it is looked how many batches are made and not used
_TOGETHER = 1 << 20  # bytes of blocks that are gathered at once, which a processor's cache holds


def _blocks_together(context: ReadContext[Any], lane: Lane) -> int:
    """Return how many blocks of a step are gathered at once: several where they are small, as each call takes time."""
    if not lane.blocks:
        return 1
    if all(form.kind == "fixed" for form in context.forms):
        size = context.layout.bytes(-(-lane.rows // lane.blocks))
    else:
        size = context.row_group_bytes * len(lane.row_groups) // lane.blocks or _TOGETHER
    return -(-_TOGETHER // max(1, size))


class LaneReader(Generic[Done]):
    """Yields a lane's rows in order from the ``first`` on, ``batch_size`` at a time.

    Row groups are decoded and blocks gathered ahead of the consumer.
    """

    def __init__(self, context: ReadContext[Done], lane: Lane, first: int, batch_size: int) -> None:
        self._context, self._lane, self._batch_size = context, lane, batch_size
        self._first_block = lane.block_at(first)
        self._together = _blocks_together(context, lane)
        self._block = self._first_block  # next block to gather
        self._row = first  # next row to assign to a batch
        self._span = lane.spans(self._block).start if self._block < lane.blocks else 0  # next span to scatter
        self._scattered: dict[int, Future[Buckets]] = {}
        self._open: tuple[BatchBuilder, Future[Done], int] | None = None  # a batch that goes on in the next block
        self._coming: deque[Future[Done]] = deque()
        self._used = 0  # stretches
        self._begun: deque[int] = deque()  # batches that begin in each stretch of blocks on its way, and are not used
        self._submit_stretch()  # other lanes begin before this one reads further ahead

    def __iter__(self) -> LaneReader[Done]:
        return self

    def __next__(self) -> Done:
        """Return the next rows, finished."""
        self._top_up()
        if not self._coming:
            raise StopIteration
        found = self._context.result(self._coming.popleft())
        self._begun[0] -= 1
        while self._begun and self._begun[0] <= 0:
            self._begun.popleft()
            if self._used % _NOTED == 0 and self._context.shared is None:  # of a worker those count that it has sent
                self._context.meter.note_ready(sum(future.done() for future in self._coming))
            self._used += 1
            self._top_up()
        return found

    def _top_up(self) -> None:
        """Keep some stretches of blocks coming, and ``ahead`` row groups beyond them."""
        lane = self._lane
        while len(self._begun) < _STRETCHES - self._context.low_memory and self._block < lane.blocks:
            self._submit_stretch()
        if self._block:
            self._scatter_until(lane.spans(min(self._block, lane.blocks) - 1).stop + self._context.ahead)

    def _submit_stretch(self) -> None:
        """Submit the next blocks that have the rows of a batch, and the row groups that they need."""
        lane = self._lane
        if self._block >= lane.blocks:
            return
        first = self._block
        step = lane.blocks_per_step
        last = min(first + self._together, (first // step + 1) * step, lane.blocks)
        while last < lane.blocks and lane.rows_before(last) < self._row + self._batch_size:
            last += 1  # tiny row groups: a batch takes many blocks
        spans = range(lane.spans(first).start, lane.spans(last - 1).stop)
        self._scatter_until(spans.stop)
        places, results, begun = self._assign_rows(lane.rows_before(first), lane.rows_before(last))
        scattered = {span: self._scattered[span] for span in spans}
        self._gather_when_scattered(range(first, last), scattered, places, results)
        self._begun.append(begun)
        self._block = last
        for span in spans:
            if lane.first_block(span) + lane.bucket_count(span) <= last:
                del self._scattered[span]

    def _assign_rows(self, before: int, end: int) -> tuple[list[BatchRows], dict[int, Future[Done]], int]:
        """Return which of rows ``before`` to ``end`` of the lane go to which batch, and how many batches begin there.

        In between are the batches' futures, by the builder's id.
        """
        places: list[BatchRows] = []
        results: dict[int, Future[Done]] = {}
        begun = 0
        while self._row < end:
            if self._open is None:
                rows = min(self._batch_size, self._lane.rows - self._row)
                batch = BatchBuilder(self._context, rows, complete=rows <= end - self._row)
                self._open = batch, Future(), 0
                self._coming.append(self._open[1])
                begun += 1
            batch, future, filled = self._open
            count = min(batch.rows - filled, end - self._row)
            places.append(BatchRows(batch, filled, self._row - before, self._row - before + count))
            results[id(batch)] = future
            self._row += count
            self._open = (batch, future, filled + count) if filled + count < batch.rows else None
        return places, results, begun

    def _scatter_until(self, stop: int) -> None:
        """Submit the spans before ``stop`` that are not yet submitted to the threads."""
        while self._span < min(stop, len(self._lane.row_groups)):
            skipped = max(0, self._first_block - self._lane.first_block(self._span))
            row_group = int(self._lane.row_groups[self._span])
            job = self._context.submit_read(row_group, scatter, self._context, self._lane, self._span, skipped)
            self._scattered[self._span] = job
            self._span += 1

    def _gather_when_scattered(
        self,
        blocks: range,
        scattered: dict[int, Future[Buckets]],
        places: list[BatchRows],
        results: dict[int, Future[Done]],
    ) -> None:
        """Gather ``blocks`` on the threads once all spans they need are scattered; no thread waits for that.

        That is done before more row groups are decoded, as somebody may wait for these batches.
        """
        lane, context = self._lane, self._context
        left = [len(scattered)]
        lock = threading.Lock()

        def fail(error: BaseException) -> None:
            for future in list(results.values()):
                with suppress(InvalidStateError):  # a batch that began in a stretch before may have failed there
                    future.set_exception(error)

        def work() -> None:
            try:
                buckets = {span: future.result() for span, future in scattered.items()}
                scattered.clear()
                with context.meter.timed(GATHER):
                    for batch in gather(context, lane, blocks, buckets, places):
                        results[id(batch)].set_result(context.finish(batch.build(context)))
                places.clear()
            except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
                fail(error)

        def drop(*_: object) -> None:  # or futures and what waits for them hold one another, rows and batches
            scattered.clear()
            places.clear()
            results.clear()

        def one_done(future: Future[Buckets]) -> None:
            if future.cancelled():  # the pool is being shut down, under a lock that submit needs
                for result in results.values():
                    result.cancel()
                drop()
                return
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                context.threads.submit_first(work).add_done_callback(drop)
            except RuntimeError as error:  # the pool is being shut down
                fail(error.with_traceback(None))  # which would hold ``future``
                drop()

        for future in list(scattered.values()):
            future.add_done_callback(one_done)
