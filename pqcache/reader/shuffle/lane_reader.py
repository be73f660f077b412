"""Reads a lane: decodes row groups ahead on threads, scatters them into buckets, gathers blocks into batches.

What is copied when: a row group is decoded and its rows are scattered into buckets, in chunks with memory of their own
that is reused when their buckets are gathered. Blocks that are gathered together, a stretch, join their buckets, some
columns at a time, and take the rows in their order from there; their batches are parts of what comes of that, whose
memory is reused when the last of them is freed. Strings and lists move as 16-byte views until their bytes are packed,
for several batches at once, or in workers into the memory that a batch is sent in.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic

from pqcache.reader.decode_budget import STRETCHES
from pqcache.reader.meter import GATHER
from pqcache.reader.order.epoch_order import Lane
from pqcache.reader.shuffle.gather import BatchBuilder, BatchRows, gather
from pqcache.reader.shuffle.scatter import Buckets, Done, ReadContext, scatter

_NOTED = 2  # of so many stretches, at one it is looked how many batches are made and not used
_TOGETHER = 2 << 20  # bytes of blocks, as decoded, that are gathered at once where memory is short
_ROWS_TOGETHER = 1 << 17  # where it is not: where each row is and goes to takes some numbers


def _decoded_bytes(context: ReadContext[Any], lane: Lane, rows: int) -> int:
    """Return about how many bytes so many rows of a lane have as decoded."""
    if all(form.kind == "fixed" for form in context.forms):
        return context.decoded_layout.bytes(rows)
    return context.row_group_bytes * len(lane.row_groups) * rows // lane.rows or _TOGETHER


def _blocks_together(context: ReadContext[Any], lane: Lane) -> int:
    """Return how many blocks are gathered at once: as many as there is memory for, as each call takes time."""
    if not lane.blocks:
        return 1
    rows, step = -(-lane.rows // lane.blocks), lane.blocks_per_step
    size = max(1, _decoded_bytes(context, lane, rows))
    fitting = min(context.stretch_bytes // max(size, context.layout.bytes(rows)), _ROWS_TOGETHER // rows)
    together = max(min(-(-_TOGETHER // size), step), fitting)
    if together >= 2 * step:
        return together
    return -(-step // -(-step // together))  # parts of a step have about one size, as several threads gather them


def _stretches_on_way(context: ReadContext[Any], lane: Lane, rows: int) -> int:
    """Return how many stretches of ``rows`` rows are on their way: more than three only within their memory."""
    size = max(1, _decoded_bytes(context, lane, rows), context.layout.bytes(rows))
    fitting = context.stretches * context.stretch_bytes // size
    return max(STRETCHES, min(context.stretches, fitting)) - context.low_memory


class LaneReader(Generic[Done]):
    """Yields a lane's rows in order from the ``first`` on, ``batch_size`` at a time.

    Row groups are decoded and blocks gathered ahead of the consumer.
    """

    def __init__(self, context: ReadContext[Done], lane: Lane, first: int, batch_size: int) -> None:
        self._context, self._lane, self._batch_size = context, lane, batch_size
        self._first_block = lane.block_at(first)
        self._together = _blocks_together(context, lane)
        rows = max(batch_size, self._together * -(-lane.rows // max(1, lane.blocks)))
        self._stretches = _stretches_on_way(context, lane, rows) if lane.rows else 0
        self._block = self._first_block  # next block to gather
        self._row = first  # next row to assign to a batch
        self._span = lane.spans(self._block).start if self._block < lane.blocks else 0  # next span to scatter
        self._scattered: dict[int, Future[Buckets]] = {}
        self._rows_before = self._lane.rows_before(self._block)  # of the lane
        self._open: tuple[BatchBuilder, Future[list[Done]], int] | None = None  # a batch that goes on in the next block
        self._coming: deque[tuple[Future[list[Done]], int]] = deque()  # batches that are made together, and how many
        self._made: deque[Done] = deque()  # those of them that come next
        self._used = 0  # stretches
        self._ending: deque[int] = deque()  # jobs of ``_coming`` that end in each stretch on its way, and are not used
        self._submit_stretch()  # other lanes begin before this one reads further ahead

    def __iter__(self) -> LaneReader[Done]:
        return self

    def __next__(self) -> Done:
        """Return the next rows, finished."""
        if not self._made:
            self._top_up()
            if not self._coming:
                raise StopIteration
            future, _ = self._coming.popleft()
            made: list[Done] = self._context.result(future)
            self._made.extend(made)
        found = self._made.popleft()
        if not self._made:
            self._ending[0] -= 1
            while self._ending and self._ending[0] <= 0:
                self._end_stretch()
        return found

    def _end_stretch(self) -> None:
        """Note that the batches of a stretch are used."""
        self._ending.popleft()
        if self._used % _NOTED == 0 and self._context.shared is None:  # of a worker those count that it has sent
            self._context.meter.note_ready(sum(count for future, count in self._coming if future.done()))
        self._used += 1
        self._top_up()

    def _top_up(self) -> None:
        """Keep some stretches of blocks coming, and ``ahead`` row groups beyond them."""
        lane = self._lane
        while len(self._ending) < self._stretches and self._block < lane.blocks:
            self._submit_stretch()
        if self._block:
            self._scatter_until(lane.spans(min(self._block, lane.blocks) - 1).stop + self._context.ahead)

    def _submit_stretch(self) -> None:
        """Submit the next blocks that have the rows of a batch, and the row groups that they need."""
        lane = self._lane
        if self._block >= lane.blocks:
            return
        first, step = self._block, lane.blocks_per_step
        last = first + min(self._together, max(1, first - self._first_block))  # the first batches wait for few blocks
        if self._together <= step:  # part of the next step would only need its row group earlier
            last = min(last, (first // step + 1) * step)
        last = min(last, lane.blocks)
        before, self._rows_before = self._rows_before, lane.rows_before(last)
        while last < lane.blocks and self._rows_before < self._row + self._batch_size:
            last += 1  # tiny row groups: a batch takes many blocks
            self._rows_before = lane.rows_before(last)
        spans = range(lane.spans(first).start, lane.spans(last - 1).stop)
        self._scatter_until(spans.stop)
        places, results, ending = self._assign_rows(before, self._rows_before)
        scattered = {span: self._scattered[span] for span in spans}
        self._gather_when_scattered(range(first, last), scattered, places, results)
        self._ending.append(ending)
        self._block = last
        for span in spans:
            if lane.first_block(span) + lane.bucket_count(span) <= last:
                del self._scattered[span]

    def _assign_rows(self, before: int, end: int) -> tuple[list[BatchRows], dict[int, Future[list[Done]]], int]:
        """Return which of rows ``before`` to ``end`` of the lane go to which batches, and how many futures end there.

        In between are the batches' futures, by the builder's id.
        """
        places: list[BatchRows] = []
        results: dict[int, Future[list[Done]]] = {}
        ending = 0
        while self._row < end:
            if self._open is None:
                sizes, complete = self._sizes_until(end)
                self._open = BatchBuilder(self._context, sizes, complete), Future(), 0
                self._coming.append((self._open[1], len(sizes)))
            batches, future, filled = self._open
            count = min(batches.rows - filled, end - self._row)
            places.append(BatchRows(batches, filled, self._row - before, self._row - before + count))
            results[id(batches)] = future
            self._row += count
            ends = filled + count == batches.rows
            ending += ends
            self._open = None if ends else (batches, future, filled + count)
        return places, results, ending

    def _sizes_until(self, end: int) -> tuple[list[int], bool]:
        """Return the rows of the next batches that end by row ``end``, and True; or those of one that does not."""
        size, rows, of_lane = self._batch_size, end - self._row, self._lane.rows - self._row
        sizes = [size] * (rows // size)
        if rows == of_lane and rows % size:  # the last one
            sizes.append(rows % size)
        return (sizes, True) if sizes else ([min(size, of_lane)], False)

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
        results: dict[int, Future[list[Done]]],
    ) -> None:
        """Gather ``blocks`` on the threads once all spans they need are scattered; no thread waits for that.

        That is done before more row groups are decoded, as somebody may wait for these batches.
        """
        lane, context = self._lane, self._context
        waiting = [future for future in scattered.values() if not future.done()]
        left = [len(waiting)]
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
                    for batches in gather(context, lane, blocks, buckets, places):
                        results[id(batches)].set_result(context.finish(batches.build(context)))
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
            submit()

        def submit() -> None:
            try:
                context.threads.submit_first(work).add_done_callback(drop)
            except RuntimeError as error:  # the pool is being shut down
                fail(error.with_traceback(None))  # which would hold ``future``
                drop()

        for future in waiting:
            future.add_done_callback(one_done)
        if not waiting:
            submit()
