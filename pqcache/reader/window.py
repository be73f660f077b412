"""The row-group cache of a lane: decodes ahead on threads, deals rows into hands, gathers blocks into batches.

What is copied when: a row group is decoded and its rows are dealt into hands, each with memory of its own that
goes round when the hand is used. A block joins its hands column by column in a scratch that stays in the
processor's cache, and from there the rows go straight to their places in their batches. Strings and lists
move as 16-byte views until a batch packs their bytes.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from pqcache.reader.columns import WORDS, Bytes, Column, Form, compact, cut, is_views, join, packed, take
from pqcache.reader.memory import Block, Pool, aligned
from pqcache.reader.order import Ints, Lane, Order

Rows = list[Column]
Load = Callable[[int, int, int], Rows]

_SMALL = 1 << 20  # bytes of fixed-width columns; less of them is dealt whole, as many small copies cost more


@dataclass(frozen=True)
class Source:
    """What a lane reads with: ``load(row group, first, past-last row)``, the columns' forms, memory, threads."""

    load: Load
    forms: Sequence[Form]
    memory: Pool
    threads: ThreadPoolExecutor
    ahead: int


def laid_out(block: Block, forms: Sequence[Form], rows: int) -> dict[int, Bytes]:
    """Return arrays for the fixed-width columns, by position in ``forms``, that lie in ``block`` one by one."""
    arrays: dict[int, Bytes] = {}
    at = 0
    for position, form in enumerate(forms):
        if form.form == "fixed":
            data = block[at : at + rows * form.width]
            word = WORDS.get(form.width)
            arrays[position] = data.view(word) if word else data.reshape(rows, form.width)
            at += aligned(rows * form.width)
    return arrays


def bytes_for(forms: Sequence[Form], rows: int) -> int:
    """Return the size of a block that holds ``rows`` rows of the fixed-width columns."""
    return sum(aligned(rows * form.width) for form in forms if form.form == "fixed")


class Cards:
    """Some of a run's rows in the order they were dealt: one hand or more, freed when all are used."""

    def __init__(self, columns: Rows, block: Block | None, hands: int) -> None:
        self.columns = columns
        self.block = block
        self._left = hands
        self._lock = threading.Lock()

    def used(self, memory: Pool) -> None:
        """Note that one hand has been gathered."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.columns = []
        if self.block is not None:
            memory.give(self.block)


Dealt = list[tuple[Cards, int, int] | None]  # a run's hands: cards, first and past-last row in them


def deal(source: Source, lane: Lane, run: int, first_hand: int) -> Dealt:
    """Decode run ``run`` of a lane and return its hands; those before ``first_hand`` are None."""
    columns = source.load(int(lane.groups[run]), int(lane.lows[run]), int(lane.highs[run]))
    order, cuts = lane.row_order(run), lane.cuts(run).tolist()
    hands: Dealt = [None] * first_hand
    left = range(first_hand, len(cuts) - 1)
    each = lane.split if bytes_for(source.forms, len(order)) > _SMALL else len(cuts)
    portions = [left[i : i + each] for i in range(0, len(left), each)]
    shuffled = dealt_columns(source, columns, [order[cuts[p[0]] : cuts[p[-1] + 1]] for p in portions])
    for portion, (picked, block) in zip(portions, shuffled, strict=True):
        cards = Cards(picked, block, len(portion))
        begin = cuts[portion[0]]
        hands.extend((cards, cuts[hand] - begin, cuts[hand + 1] - begin) for hand in portion)
    return hands


def dealt_columns(source: Source, columns: Rows, orders: Sequence[Ints]) -> list[tuple[Rows, Block | None]]:
    """Take rows from columns once for each of ``orders``: column by column, as that is what a cache can hold."""
    blocks = [source.memory.take(bytes_for(source.forms, len(order))) for order in orders]
    places = [laid_out(block, source.forms, len(order)) for block, order in zip(blocks, orders, strict=True)]
    taken: list[Rows] = [[] for _ in orders]
    for position, (form, column) in enumerate(zip(source.forms, columns, strict=True)):
        columns[position] = Column(form, None)  # decoded memory goes as soon as it is dealt
        for order, place, rows in zip(orders, places, taken, strict=True):
            if position in place and isinstance(column.values, np.ndarray):
                values = column.values.take(order, axis=0, out=place[position], mode="clip")
                rows.append(Column(form, values, None if column.valid is None else column.valid.take(order)))
            else:
                rows.append(compact(take(column, order), source.memory))
    return list(zip(taken, blocks, strict=True))


@dataclass
class Frame:
    """A batch in the making: ``fixed`` are the places of its fixed-width columns, the rest is put together."""

    rows: int
    fixed: dict[int, Bytes]
    parts: dict[int, dict[int, Column]] = field(default_factory=dict)  # by column, then by first row
    missing: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of(source: Source, rows: int) -> Frame:
        """Return an empty frame."""
        block = source.memory.lend(bytes_for(source.forms, rows))
        return Frame(rows, laid_out(block, source.forms, rows), missing=rows)

    def put(self, position: int, at: int, column: Column) -> None:
        """Put rows of a column at row ``at``."""
        with self.lock:
            self.parts.setdefault(position, {})[at] = column

    def filled(self, rows: int) -> bool:
        """Note that all columns of some more rows are there; return whether these were the last."""
        with self.lock:
            self.missing -= rows
            return self.missing == 0

    def columns(self, source: Source) -> Rows:
        """Return the finished batch."""
        found = []
        for position, form in enumerate(source.forms):
            parts = [part for _, part in sorted(self.parts.get(position, {}).items())]
            if position not in self.fixed:
                column = join(parts, form)
            elif not parts:
                column = Column(form, self.fixed[position])
            else:  # nulls somewhere in the batch, or in a way that only Arrow can hold
                column = self._with_nulls(position, form)
            found.append(Column(form, packed(column, source.memory), column.valid) if is_views(column) else column)
        return found

    def _with_nulls(self, position: int, form: Form) -> Column:
        """Join a fixed-width column of which some parts lie in place and some do not."""
        parts, at = [], 0
        for start, part in sorted(self.parts[position].items()):
            parts += [Column(form, self.fixed[position][at:start]), part]
            at = start + len(part)
        return join([p for p in [*parts, Column(form, self.fixed[position][at:])] if len(p)], form)


Piece = tuple[Frame, int, int, int]  # rows [from, to) of a stretch of blocks go to the frame's row


def gather(source: Source, lane: Lane, blocks: range, dealt: dict[int, Dealt], pieces: Sequence[Piece]) -> list[Frame]:
    """Put the rows of consecutive blocks into batches; return the batches that are whole now, as ``done``."""
    hands: list[tuple[Cards, int, int]] = []
    orders = []
    rows = 0
    for block in blocks:
        begin = rows
        for run in lane.runs(block):
            number = block - lane.first_block(run)
            hand = dealt[run][number]
            assert hand is not None
            dealt[run][number] = None
            hands.append(hand)
            rows += hand[2] - hand[1]
        orders.append(lane.block_order(block, rows - begin) + begin)
    order = np.concatenate(orders) if len(orders) > 1 else orders[0]
    scratch = source.memory.take(rows * max((form.width for form in source.forms), default=1))
    for position, form in enumerate(source.forms):
        parts = [cut(cards.columns[position], start, stop) for cards, start, stop in hands if stop > start]
        plain = form.form == "fixed" and all(p.valid is None and isinstance(p.values, np.ndarray) for p in parts)
        if plain:
            space = scratch[: rows * form.width]
            word = WORDS.get(form.width)
            joined = space.view(word) if word else space.reshape(rows, form.width)
            np.concatenate([part.values for part in parts], out=joined)
            for frame, at, start, stop in pieces:
                place = frame.fixed[position][at : at + stop - start]
                joined.take(order[start:stop], axis=0, out=place, mode="clip")
        else:
            column = join(parts, form)
            for frame, at, start, stop in pieces:
                frame.put(position, at, take(column, order[start:stop]))
    source.memory.give(scratch)
    for cards, _, _ in hands:
        cards.used(source.memory)
    return [frame for frame, _, start, stop in pieces if frame.filled(stop - start)]


class LaneReader:
    """Yields a lane's rows in order from the ``first`` on, ``batch_size`` at a time.

    Decoding and gathering are kept ahead of it.
    """

    def __init__(self, source: Source, lane: Lane, first: int, batch_size: int) -> None:
        self._source, self._lane, self._batch_size = source, lane, batch_size
        self._block = lane.block_at(first)  # next block to gather
        self._start = self._block
        self._at = first  # next row to put into a frame
        self._run = lane.runs(self._block).start if self._block < lane.blocks else 0  # next run to deal
        self._dealt: dict[int, Future[Dealt]] = {}
        self._open: tuple[Frame, Future[Rows], int] | None = None  # a batch that goes on in the next block
        self._coming: deque[Future[Rows]] = deque()
        self._left: deque[int] = deque()  # batches begun by each stretch of blocks on its way
        self._top_up()

    def __iter__(self) -> LaneReader:
        return self

    def __next__(self) -> Rows:
        """Return the next rows, a list of columns."""
        if not self._coming:
            raise StopIteration
        found = self._coming.popleft().result()
        self._left[0] -= 1
        while self._left and self._left[0] <= 0:
            self._left.popleft()
            self._top_up()
        return found

    def _top_up(self) -> None:
        """Keep two stretches of blocks coming, and ``ahead`` row groups beyond them."""
        lane = self._lane
        while len(self._left) < 2 and self._block < lane.blocks:
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

    def _frames(self, before: int, end: int) -> tuple[list[Piece], dict[int, Future[Rows]], int]:
        """Return which rows of a stretch go to which batch, and the batches' futures by the frame's id."""
        pieces: list[Piece] = []
        results: dict[int, Future[Rows]] = {}
        begun = 0
        while self._at < end:
            if self._open is None:
                rows = min(self._batch_size, self._lane.rows - self._at)
                self._open = Frame.of(self._source, rows), Future(), 0
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
            job = self._source.threads.submit(deal, self._source, self._lane, self._run, skipped)
            self._dealt[self._run] = job
            self._run += 1

    def _gather_when_dealt(
        self, blocks: range, dealt: dict[int, Future[Dealt]], pieces: list[Piece], results: dict[int, Future[Rows]]
    ) -> None:
        """Gather ``blocks`` on the pool once all runs they need are dealt; no thread waits for that."""
        lane, source = self._lane, self._source
        left = [len(dealt)]
        lock = threading.Lock()

        def fail(error: BaseException) -> None:
            for future in results.values():
                if not future.done():
                    future.set_exception(error)

        def work() -> None:
            try:
                hands = {run: future.result() for run, future in dealt.items()}
                dealt.clear()
                for frame in gather(source, lane, blocks, hands, pieces):
                    results[id(frame)].set_result(frame.columns(source))
                pieces.clear()
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the batch
                fail(error)

        def one_done(future: Future[Dealt]) -> None:
            if future.cancelled():  # the pool is being shut down, under a lock that submit needs
                for result in results.values():
                    result.cancel()
                return
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                source.threads.submit(work)
            except RuntimeError as error:  # the pool is being shut down
                fail(error)

        for future in list(dealt.values()):
            future.add_done_callback(one_done)


def joined(parts: Sequence[Rows], forms: Sequence[Form]) -> Rows:
    """Return the rows of all parts, one after the other."""
    return [join([part[i] for part in parts], form) for i, form in enumerate(forms)]


def in_sequence(source: Source, order: Order, batches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Rows]]:
    """Yield unshuffled batches: for each (number, batch) that rows ``batch * batch_size`` onwards.

    Row groups are decoded once for as long as the coming batches need them, ``source.ahead`` of them in advance.
    """
    coming: deque[tuple[int, list[tuple[int, int, int]]]] = deque()
    needed: Counter[int] = Counter()
    loading: dict[int, Future[Rows]] = {}
    wanted = iter(batches)
    more = True
    while True:
        while more and (len(needed) <= source.ahead + 1 or not coming) and len(coming) < 1000:
            try:
                number, batch = next(wanted)
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
                    loading[group] = source.threads.submit(source.load, group, 0, int(order.counts[group]))
        if not coming:
            return
        number, runs = coming.popleft()
        parts = [[cut(c, low, high) for c in loading[group].result()] for group, low, high in runs]
        for group, _, _ in runs:
            needed[group] -= 1
            if not needed[group]:
                del needed[group], loading[group]
        yield number, joined(parts, source.forms)
