"""The row-group cache of a lane: decodes ahead on threads, deals rows into hands, gathers blocks into batches.

What is copied when: a row group is decoded and its rows are dealt into hands, each with memory of its own that
goes round when the hand is used. A block joins its hands, some columns at a time, in a scratch that stays in the
processor's cache, and takes the rows in their order from there; its batches are parts of the block, and it goes round
when the last of them is gone. Strings and lists move as 16-byte views until their bytes are packed, for several batches
of a block at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from pqcache.memory import Arena, Block, Pool
from pqcache.reader.columns import (
    NEAR,
    Bytes,
    Column,
    Form,
    bytes_of_views,
    compact,
    cut,
    is_views,
    join,
    packed,
    take,
)
from pqcache.reader.files import release_unused
from pqcache.reader.layout import LONG, Gathered, Layout
from pqcache.reader.order import Ints, Lane

Rows = list[Column]
Load = Callable[[int, int, int], Rows]
Done = TypeVar("Done")  # what a batch is made into

_SMALL = 1 << 20  # bytes; a smaller run is dealt whole, as many small copies cost more
_PACKED = 8 << 20  # bytes of a column, about, that are packed by one call
_STRETCHES = 3  # of blocks on their way: one being used, one ready (unless memory is spared), one in the making


@dataclass(frozen=True)
class Source(Generic[Done]):
    """What a lane reads with: ``load(row group, first, past-last row)``, the columns' forms, what the threads make of
    a batch's rows (``finish``), memory for what is decoded and for batches, threads, how many row groups to decode
    ahead, and whether long rows ``stay`` where they were decoded until all hands of their run are used. ``arenas``
    are by column where ``load`` puts those of fixed width then, as far as it can.
    """

    load: Load
    forms: Sequence[Form]
    finish: Callable[[Gathered], Done]
    memory: Pool
    batches: Pool
    threads: Executor
    ahead: int
    stay: bool = False
    arenas: Mapping[str, Arena] = field(default_factory=dict)

    @property
    def shared(self) -> Pool | None:
        """What is in memory that another process reads: batches of a worker; None where nothing is."""
        return None if self.batches is self.memory else self.batches

    @property
    def sparing(self) -> bool:
        """Whether memory is worth more than time: in workers, each with windows of its own, if no rows stay."""
        return self.shared is not None and not self.stay

    @cached_property
    def layout(self) -> Layout:
        """Where the fixed-width columns of a batch lie."""
        return Layout.of(self.forms)

    @cached_property
    def dealt(self) -> Layout:
        """Where those lie that are dealt: all, or those that do not stay where they were decoded."""
        return self.layout.short if self.stay else self.layout


class Cards:
    """Some of a run's rows in the order they were dealt: one hand or more, freed when all are used.

    ``arrays`` are the groups of ``Source.dealt`` over ``block``; ``long`` are columns that stay where they were
    decoded, with the rows that were dealt; ``columns`` are all others: of no fixed width, or with nulls.
    """

    def __init__(self, block: Block, arrays: list[Bytes], hands: int) -> None:
        self.block = block
        self.arrays = arrays
        self.long: dict[int, tuple[Bytes, Ints]] = {}
        self.columns: dict[int, Column] = {}
        self._left = hands
        self._lock = threading.Lock()

    def used(self, memory: Pool) -> None:
        """Note that one hand has been gathered."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.arrays, self.long, self.columns = [], {}, {}
        memory.give(self.block)


Dealt = list[tuple[Cards, int, int] | None]  # a run's hands: cards, first and past-last row in them


def deal(source: Source[Any], lane: Lane, run: int, first_hand: int) -> Dealt:
    """Decode run ``run`` of a lane and return its hands; those before ``first_hand`` are None."""
    columns = source.load(int(lane.groups[run]), int(lane.lows[run]), int(lane.highs[run]))
    order, cuts = lane.row_order(run), lane.cuts(run).tolist()
    hands: Dealt = [None] * first_hand
    left = range(first_hand, len(cuts) - 1)
    large = source.dealt.bytes(len(order)) + sum(map(bytes_of_views, columns)) > _SMALL
    each = (1 if source.sparing else lane.split) if large else len(cuts)
    portions = [left[i : i + each] for i in range(0, len(left), each)]
    counts = [len(portion) for portion in portions]
    orders = [order[cuts[portion[0]] : cuts[portion[-1] + 1]] for portion in portions]
    for portion, cards in zip(portions, dealt_cards(source, columns, orders, counts), strict=True):
        begin = cuts[portion[0]]
        hands.extend((cards, cuts[hand] - begin, cuts[hand + 1] - begin) for hand in portion)
    if source.sparing:
        release_unused()
    return hands


def dealt_cards(source: Source[Any], columns: Rows, orders: Sequence[Ints], hands: Sequence[int]) -> list[Cards]:
    """Take rows from columns once for each of ``orders``: column by column, as that is what a cache can hold."""
    layout, memory = source.dealt, source.memory
    dealt = []
    for order, count in zip(orders, hands, strict=True):
        block = memory.take(layout.bytes(len(order)))
        dealt.append(Cards(block, layout.arrays(block, len(order)), count))
    places = {p: (g, i) for g, group in enumerate(source.layout.groups) for i, p in enumerate(group.positions)}
    near = memory.take(NEAR)
    for position, form in enumerate(source.forms):
        column = columns[position]
        columns[position] = Column(form, None)  # decoded memory goes as soon as it is dealt
        if position in places and column.valid is None and isinstance(column.values, np.ndarray):
            group, row = places[position]
            values = column.values
            if group >= len(layout.groups):
                for order, cards in zip(orders, dealt, strict=True):
                    cards.long[position] = values, order
                continue
            if values.nbytes <= NEAR:  # read once in sequence, so that what jumps about finds it in the cache
                values = near[: values.nbytes].view(values.dtype).reshape(values.shape)
                np.copyto(values, column.values)
            for order, cards in zip(orders, dealt, strict=True):
                values.take(order, axis=0, out=cards.arrays[group][row], mode="clip")
        else:
            stays = source.stay and bytes_of_views(column) >= LONG * len(column)
            for order, cards in zip(orders, dealt, strict=True):
                cards.columns[position] = take(column, order) if stays else compact(take(column, order))
    memory.give(near)
    return dealt


class Frame:
    """A batch in the making: fixed-width columns have their places, the rest is put together at the end.

    Where one stretch of blocks has all of its rows (``whole``), the places are part of that stretch's memory.
    """

    def __init__(self, source: Source[Any], rows: int, whole: bool) -> None:
        self.rows = rows
        self.arrays: list[Bytes] = []
        if not whole:
            self.arrays = source.layout.arrays(source.batches.lend(source.layout.bytes(rows)), rows)
        self._parts: dict[int, dict[int, Column]] = {}  # by column, then by first row
        self._missing = rows
        self._lock = threading.Lock()

    def put(self, position: int, at: int, column: Column) -> None:
        """Put rows of a column that has no place at row ``at``."""
        with self._lock:
            self._parts.setdefault(position, {})[at] = column

    def filled(self, rows: int) -> bool:
        """Note that all columns of some more rows are there; return whether these were the last."""
        with self._lock:
            self._missing -= rows
            return self._missing == 0

    def gathered(self, source: Source[Any]) -> Gathered:
        """Return the batch, whose rows are all there."""
        found = Gathered(self.rows, source.layout, self.arrays, {})
        for position, parts in self._parts.items():
            form = source.forms[position]
            column = self._joined(parts, found.placed(position, form), form)
            found.columns[position] = (
                Column(form, packed(column, source.shared), column.valid) if is_views(column) else column
            )
        return found

    def _joined(self, parts: dict[int, Column], placed: Column | None, form: Form) -> Column:
        """Join the parts of a column; rows that no part has are in their place (no nulls among them)."""
        joined, at = [], 0
        for start, part in sorted(parts.items()):
            if placed is not None and start > at:
                joined.append(cut(placed, at, start))
            joined.append(part)
            at = start + len(part)
        if placed is not None and at < self.rows:
            joined.append(cut(placed, at, self.rows))
        return join(joined, form)


Piece = tuple[Frame, int, int, int]  # rows [from, to) of a stretch of blocks go to the frame's row


def gather(
    source: Source[Any], lane: Lane, blocks: range, dealt: dict[int, Dealt], pieces: Sequence[Piece]
) -> list[Frame]:
    """Put the rows of consecutive blocks into their batches; return those batches that are whole now."""
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
    gather_groups(source, hands, order, pieces)
    for position in sorted({position for cards, _, _ in hands for position in cards.columns}):
        column = take(join([hand_column(source, hand, position) for hand in hands], source.forms[position]), order)
        for first, part, some in packed_together(column, pieces, source.shared):
            if source.sparing:  # a batch that goes on in the next block would keep all of this one
                part = compact(part)
            for frame, at, start, stop in some:
                frame.put(position, at, cut(part, start - first, stop - first))
    for cards, _, _ in hands:
        cards.used(source.memory)
    return [frame for frame, _, start, stop in pieces if frame.filled(stop - start)]


def packed_together(
    column: Column, pieces: Sequence[Piece], shared: Pool | None
) -> Iterator[tuple[int, Column, Sequence[Piece]]]:
    """Yield (first row, rows, their pieces): views are packed for several whole batches at once, as each call costs.

    Large ones are packed one by one into ``shared`` memory, if there is any: each is free again when its batch is.
    """
    if not is_views(column):
        yield 0, column, pieces
        return
    together = _PACKED if shared is None else NEAR
    most = max(1, len(column) * together // max(1, bytes_of_views(column)))
    left = deque(pieces)
    while left:
        frame, _, first, past = left[0]
        some = [left.popleft()]
        whole = past - first == frame.rows
        while whole and left and left[0][3] - left[0][2] == left[0][0].rows and left[0][3] - first <= most:
            some.append(left.popleft())
        rows = cut(column, first, some[-1][3])
        yield first, Column(column.form, packed(rows, shared), rows.valid) if whole else rows, some


def gather_groups(
    source: Source[Any], hands: Sequence[tuple[Cards, int, int]], order: Ints, pieces: Sequence[Piece]
) -> None:
    """Put the fixed-width columns of hands laid end to end, in ``order``, where their batches find them.

    That is one call for each group, as every call may have to wait for the interpreter's lock.
    """
    layout, rows = source.layout, len(order)
    if not layout.groups:
        return
    arrays = layout.arrays(source.batches.lend(layout.bytes(rows)), rows)
    short = layout.short.groups
    scratch = source.memory.take(max((rows * group.width * len(group.positions) for group in short), default=0))
    for number, group in enumerate(short):
        (joined,) = Layout((group,)).arrays(scratch, rows)
        np.concatenate([cards.arrays[number][:, start:stop] for cards, start, stop in hands], axis=1, out=joined)
        joined.take(order, axis=1, out=arrays[number], mode="clip")
    source.memory.give(scratch)
    for group, array in zip(layout.groups[len(short) :], arrays[len(short) :], strict=True):
        for position, place in zip(group.positions, array, strict=True):
            gather_long(source, hands, order, position, place)
    for frame, at, start, stop in pieces:
        if not frame.arrays:
            frame.arrays = [array[:, start:stop] for array in arrays]
            continue
        for place, array in zip(frame.arrays, arrays, strict=True):
            place[:, at : at + stop - start] = array[:, start:stop]


def gather_long(
    source: Source[Any], hands: Sequence[tuple[Cards, int, int]], order: Ints, position: int, out: Bytes
) -> None:
    """Put the long rows of a column in ``order``; hands whose rows are among their columns are left out.

    That is one call where all of them lie in one arena; each hand is sown into its rows otherwise.
    """
    arena, width = source.arenas.get(source.forms[position].name), source.forms[position].width
    if arena is not None:
        found = [rows for hand in hands if (rows := rows_in(arena, hand, position, width)) is not None]
        if len(found) == len(hands):
            arena.block.reshape(-1, width).take(np.concatenate(found)[order], axis=0, out=out, mode="clip")
            return
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    items, at = out.view(f"V{width}")[:, 0], 0
    for hand in hands:
        past = at + hand[2] - hand[1]
        if position not in hand[0].columns:
            items[where[at:past]] = hand_column(source, hand, position).values.view(f"V{width}")[:, 0]
        at = past


def rows_in(arena: Arena, hand: tuple[Cards, int, int], position: int, width: int) -> Ints | None:
    """Return which rows of an arena are those of a hand, of a column of ``width`` bytes; None if they lie elsewhere."""
    cards, start, stop = hand
    if position not in cards.long:
        return None
    values, order = cards.long[position]
    begin = arena.at(values)
    return None if begin is None else order[start:stop] + begin // width


def hand_column(source: Source[Any], hand: tuple[Cards, int, int], position: int) -> Column:
    """Return one column of a hand, wherever it is."""
    cards, start, stop = hand
    if position in cards.columns:
        return cut(cards.columns[position], start, stop)
    if position in cards.long:
        decoded, order = cards.long[position]
        return Column(source.forms[position], decoded.take(order[start:stop], axis=0, mode="clip"))
    values = source.dealt.values(cards.arrays, position)
    assert values is not None
    return Column(source.forms[position], values[start:stop])


class LaneReader(Generic[Done]):
    """Yields a lane's rows in order from the ``first`` on, ``batch_size`` at a time.

    Decoding and gathering are kept ahead of it.
    """

    def __init__(self, source: Source[Done], lane: Lane, first: int, batch_size: int) -> None:
        self._source, self._lane, self._batch_size = source, lane, batch_size
        self._block = lane.block_at(first)  # next block to gather
        self._start = self._block
        self._at = first  # next row to put into a frame
        self._run = lane.runs(self._block).start if self._block < lane.blocks else 0  # next run to deal
        self._dealt: dict[int, Future[Dealt]] = {}
        self._open: tuple[Frame, Future[Done], int] | None = None  # a batch that goes on in the next block
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
                self._open = Frame(self._source, rows, whole=rows <= end - self._at), Future(), 0
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
        self, blocks: range, dealt: dict[int, Future[Dealt]], pieces: list[Piece], results: dict[int, Future[Done]]
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
                    results[id(frame)].set_result(source.finish(frame.gathered(source)))
                pieces.clear()
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the batch
                fail(error)

        def drop(*_: object) -> None:  # or futures and what waits for them hold one another, rows and batches
            dealt.clear()
            pieces.clear()
            results.clear()

        def one_done(future: Future[Dealt]) -> None:
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
