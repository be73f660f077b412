"""The row-group cache of a lane: decodes ahead on threads, deals rows into hands, gathers blocks into batches.

What is copied when: a row group is decoded and its rows are dealt into hands, each with memory of its own that
goes round when the hand is used. A block joins its hands, some columns at a time, in a scratch that stays in the
processor's cache, and takes the rows in their order from there; its batches are parts of the block, and it goes round
when the last of them is gone. Strings and lists move as 16-byte views until their bytes are packed, for several batches
of a block at once, or in workers into the memory that a batch is sent in.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic

from pqcache.reader.order.order import Lane
from pqcache.reader.shuffle.gather import BatchBuilder, Piece, gather
from pqcache.reader.shuffle.scatter import Buckets, Done, ReadContext, scatter

_STRETCHES = 3  # of blocks on their way: one being used, one ready (unless memory is spared), one in the making


class LaneReader(Generic[Done]):
    """Yields a lane's rows in order from the ``first`` on, ``batch_size`` at a time.

    Decoding and gathering are kept ahead of it.
    """

    def __init__(self, source: ReadContext[Done], lane: Lane, first: int, batch_size: int) -> None:
        self._source, self._lane, self._batch_size = source, lane, batch_size
        self._block = lane.block_at(first)  # next block to gather
        self._start = self._block
        self._at = first  # next row to put into a frame
        self._run = lane.runs(self._block).start if self._block < lane.blocks else 0  # next run to deal
        self._dealt: dict[int, Future[Buckets]] = {}
        self._open: tuple[BatchBuilder, Future[Done], int] | None = None  # a batch that goes on in the next block
        self._coming: deque[Future[Done]] = deque()
        self._left: deque[int] = deque()  # batches begun by each stretch of blocks on its way
        self._top_up()

    def __iter__(self) -> LaneReader[Done]:
        return self

    def __next__(self) -> Done:
        """Return the next rows, finished."""
        if not self._coming:
            raise StopIteration
        found = self._coming.popleft().result()
        self._left[0] -= 1
        while self._left and self._left[0] <= 0:
            self._left.popleft()
            self._top_up()
        return found

    def _top_up(self) -> None:
        """Keep some stretches of blocks coming, and ``ahead`` row groups beyond them."""
        lane = self._lane
        most = _STRETCHES - self._source.sparing
        while len(self._left) < most and self._block < lane.blocks:
            first, last = self._block, self._block + 1
            while last < lane.blocks and lane.before(last) < self._at + self._batch_size:
                last += 1  # tiny row groups: a batch takes many blocks
            self._deal_until(lane.runs(last - 1).stop)
            blocks = range(first, last)
            runs = range(lane.runs(first).start, lane.runs(last - 1).stop)
            pieces, results, begun = self._frames(lane.before(first), lane.before(last))
            self._gather_when_dealt(blocks, {run: self._dealt[run] for run in runs}, pieces, results)
            self._left.append(begun)
            self._block = last
            for run in runs:
                if lane.first_block(run) + lane.hands(run) <= last:
                    del self._dealt[run]
            self._deal_until(lane.runs(last - 1).stop + self._source.ahead)

    def _frames(self, before: int, end: int) -> tuple[list[Piece], dict[int, Future[Done]], int]:
        """Return which rows of a stretch go to which batch, and the batches' futures by the frame's id."""
        pieces: list[Piece] = []
        results: dict[int, Future[Done]] = {}
        begun = 0
        while self._at < end:
            if self._open is None:
                rows = min(self._batch_size, self._lane.rows - self._at)
                self._open = BatchBuilder(self._source, rows, whole=rows <= end - self._at), Future(), 0
                self._coming.append(self._open[1])
                begun += 1
            frame, future, at = self._open
            count = min(frame.rows - at, end - self._at)
            pieces.append((frame, at, self._at - before, self._at - before + count))
            results[id(frame)] = future
            self._at += count
            self._open = (frame, future, at + count) if at + count < frame.rows else None
        return pieces, results, begun

    def _deal_until(self, stop: int) -> None:
        while self._run < min(stop, len(self._lane.groups)):
            skipped = max(0, self._start - self._lane.first_block(self._run))
            job = self._source.threads.submit(scatter, self._source, self._lane, self._run, skipped)
            self._dealt[self._run] = job
            self._run += 1

    def _gather_when_dealt(
        self, blocks: range, dealt: dict[int, Future[Buckets]], pieces: list[Piece], results: dict[int, Future[Done]]
    ) -> None:
        """Gather ``blocks`` on the pool once all runs they need are dealt; no thread waits for that."""
        lane, source = self._lane, self._source
        left = [len(dealt)]
        lock = threading.Lock()

        def fail(error: BaseException) -> None:
            for future in list(results.values()):
                with suppress(InvalidStateError):  # a batch that began in a stretch before may have failed there
                    future.set_exception(error)

        def work() -> None:
            try:
                hands = {run: future.result() for run, future in dealt.items()}
                dealt.clear()
                for frame in gather(source, lane, blocks, hands, pieces):
                    results[id(frame)].set_result(source.finish(frame.gathered(source)))
                pieces.clear()
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the batch
                fail(error)

        def drop(*_: object) -> None:  # or futures and what waits for them hold one another, rows and batches
            dealt.clear()
            pieces.clear()
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
                source.threads.submit(work).add_done_callback(drop)
            except RuntimeError as error:  # the pool is being shut down
                fail(error.with_traceback(None))  # which would hold ``future``
                drop()

        for future in list(dealt.values()):
            future.add_done_callback(one_done)
