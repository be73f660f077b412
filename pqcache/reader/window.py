"""The row-group cache of a lane: decodes ahead on threads, deals rows into hands, gathers blocks of rows.

What is copied when: a row group is decoded and its rows are dealt into hands at once, while they are still in
the processor's cache; each hand has memory of its own, so that what was used is freed. A block joins its
hands and puts the rows in order with one gather per column; batches are slices of blocks. Strings and lists
move as 16-byte views until a batch packs their bytes.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pqcache.reader.columns import Column, Form, compact, cut, join, take
from pqcache.reader.order import Lane, Order

Rows = list[Column]
Load = Callable[[int, int, int], Rows]


def deal(load: Load, lane: Lane, run: int, first_hand: int) -> list[Rows | None]:
    """Decode run ``run`` of a lane and return its hands; those before ``first_hand`` are None."""
    columns = load(int(lane.groups[run]), int(lane.lows[run]), int(lane.highs[run]))
    order, cuts = lane.row_order(run), lane.cuts(run).tolist()
    hands: list[Rows | None] = [None] * first_hand
    for start, stop in zip(cuts[first_hand:-1], cuts[first_hand + 1 :], strict=True):
        hands.append([compact(take(column, order[start:stop])) for column in columns])
    return hands


def gather(lane: Lane, blocks: range, dealt: dict[int, list[Rows | None]], forms: Sequence[Form]) -> Rows:
    """Return the rows of consecutive blocks in order, and let go of the hands they took."""
    pieces: list[Rows] = []
    orders = []
    rows = 0
    for block in blocks:
        begin = rows
        for run in lane.runs(block):
            hand = block - lane.first_block(run)
            cards = dealt[run][hand]
            assert cards is not None
            dealt[run][hand] = None
            pieces.append(cards)
            rows += len(cards[0])
        orders.append(lane.block_order(block, rows - begin) + begin)
    order = np.concatenate(orders) if len(orders) > 1 else orders[0]
    result = []
    for position, form in enumerate(forms):
        result.append(take(join([cards[position] for cards in pieces], form), order))
        for cards in pieces:
            cards[position] = None  # type: ignore[call-overload]  # free column by column
    return result


def joined(parts: Sequence[Rows], forms: Sequence[Form]) -> Rows:
    """Return the rows of all parts, one after the other."""
    return [join([part[i] for part in parts], form) for i, form in enumerate(forms)]


class LaneReader:
    """Yields a lane's batches in order from batch ``first`` on, keeping decoding and gathering ahead."""

    def __init__(
        self,
        lane: Lane,
        batch_size: int,
        first: int,
        load: Load,
        forms: Sequence[Form],
        pool: ThreadPoolExecutor,
        ahead: int,
    ) -> None:
        self._lane, self._batch_size, self._forms = lane, batch_size, forms
        self._load, self._pool, self._ahead = load, pool, ahead
        row = first * batch_size
        self._block = lane.block_at(row)  # next block to gather
        self._skip = row - lane.before(self._block)  # rows of it that come before the first batch
        self._start = self._block
        self._run = lane.runs(self._block).start if self._block < lane.blocks else 0  # next run to deal
        self._dealt: dict[int, Future[list[Rows | None]]] = {}
        self._gathered: deque[Future[Rows]] = deque()
        self._rows: Rows | None = None  # gathered, and batches are cut from it
        self._at = 0
        self._top_up()

    def __iter__(self) -> LaneReader:
        return self

    def __next__(self) -> Rows:
        """Return the lane's next batch, a list of columns."""
        parts: list[Rows] = []
        missing = self._batch_size
        while missing:
            if self._rows is None:
                if not self._gathered:
                    break
                self._rows, self._at = self._gathered[0].result(), self._skip
                self._gathered.popleft()
                self._skip = 0
                self._top_up()
            rows = len(self._rows[0])
            stop = min(rows, self._at + missing)
            if stop > self._at:
                parts.append([cut(column, self._at, stop) for column in self._rows])
                missing -= stop - self._at
            self._at = stop
            if stop == rows:
                self._rows = None
        if not parts:
            raise StopIteration
        if len(parts) == 1:
            return parts[0]
        return joined(parts, self._forms)

    def _top_up(self) -> None:
        """Keep one gathered stretch and ``ahead`` row groups coming beyond the one in use."""
        lane = self._lane
        while len(self._gathered) < 2 and self._block < lane.blocks:
            first, last = self._block, self._block + 1
            wanted = lane.before(first) + self._skip + self._batch_size
            while last < lane.blocks and lane.before(last) < wanted:
                last += 1  # tiny row groups: a batch takes many blocks
            self._deal_until(lane.runs(last - 1).stop)
            blocks = range(first, last)
            runs = range(lane.runs(first).start, lane.runs(last - 1).stop)
            self._gathered.append(self._gather_when_dealt(blocks, {run: self._dealt[run] for run in runs}))
            self._block = last
            for run in runs:
                if lane.first_block(run) + lane.hands(run) <= last:
                    del self._dealt[run]
            self._deal_until(lane.runs(last - 1).stop + self._ahead)

    def _deal_until(self, stop: int) -> None:
        while self._run < min(stop, len(self._lane.groups)):
            skipped = max(0, self._start - self._lane.first_block(self._run))
            self._dealt[self._run] = self._pool.submit(deal, self._load, self._lane, self._run, skipped)
            self._run += 1

    def _gather_when_dealt(self, blocks: range, dealt: dict[int, Future[list[Rows | None]]]) -> Future[Rows]:
        """Gather ``blocks`` on the pool once all runs they need are dealt; no thread waits for that."""
        result: Future[Rows] = Future()
        lane, forms, pool = self._lane, self._forms, self._pool
        left = [len(dealt)]
        lock = threading.Lock()

        def work() -> None:
            try:
                hands = {run: future.result() for run, future in dealt.items()}
                dealt.clear()
                result.set_result(gather(lane, blocks, hands, forms))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
                result.set_exception(error)

        def one_done(_: Future[list[Rows | None]]) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                pool.submit(work)
            except RuntimeError as error:  # the pool is being shut down
                result.set_exception(error)

        for future in list(dealt.values()):
            future.add_done_callback(one_done)
        return result


def in_sequence(
    order: Order,
    batches: Iterable[tuple[int, int]],
    load: Load,
    forms: Sequence[Form],
    pool: ThreadPoolExecutor,
    ahead: int,
) -> Iterator[tuple[int, Rows]]:
    """Yield unshuffled batches: for each (number, batch) that rows ``batch * batch_size`` onwards.

    Row groups are decoded once for as long as the coming batches need them, ``ahead`` of them in advance.
    """
    coming: deque[tuple[int, list[tuple[int, int, int]]]] = deque()
    needed: Counter[int] = Counter()
    loading: dict[int, Future[Rows]] = {}
    source = iter(batches)
    more = True
    while True:
        while more and (len(needed) <= ahead + 1 or not coming) and len(coming) < 1000:
            try:
                number, batch = next(source)
            except StopIteration:
                more = False
                break
            start = batch * order.batch_size
            spans = order.span(start, min(start + order.batch_size, order.rows))
            runs = list(zip(*(part.tolist() for part in spans), strict=True))
            coming.append((number, runs))
            for group, _, _ in runs:
                needed[group] += 1
                if group not in loading:
                    loading[group] = pool.submit(load, group, 0, int(order.counts[group]))
        if not coming:
            return
        number, runs = coming.popleft()
        parts = [[cut(c, low, high) for c in loading[group].result()] for group, low, high in runs]
        for group, _, _ in runs:
            needed[group] -= 1
            if not needed[group]:
                del needed[group], loading[group]
        yield number, joined(parts, forms)
