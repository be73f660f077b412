"""Row groups are dealt into hands as they are decoded: what a lane reads with, and the rows that it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from pqcache.reader.batch_layout import LONG, Gathered, Layout
from pqcache.reader.columns import NEAR, Bytes, Column, Form, bytes_of_views, compact, cut, take
from pqcache.reader.order.order import Ints, Lane
from pqcache.reader.row_group_reader import release_unused
from pqcache.system.buffer_pool import Arena, Block, BufferPool

Rows = list[Column]
Load = Callable[[int, int, int], Rows]
Done = TypeVar("Done")  # what a batch is made into

_SMALL = 1 << 20  # bytes; a smaller run is dealt whole, as many small copies cost more


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Done]):
    """What a lane reads with: ``load(row group, first, past-last row)``, the columns' forms, what the threads make of
    a batch's rows (``finish``), memory for what is decoded and for batches, threads, how many row groups to decode
    ahead, and whether long rows ``stay`` where they were decoded until all hands of their run are used. ``arenas``
    are by column where ``load`` puts those of fixed width then, as far as it can.
    """

    load: Load
    forms: Sequence[Form]
    finish: Callable[[Gathered], Done]
    memory: BufferPool
    batches: BufferPool
    threads: Executor
    ahead: int
    stay: bool = False
    arenas: Mapping[str, Arena] = field(default_factory=dict)

    @property
    def shared(self) -> BufferPool | None:
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

    def used(self, memory: BufferPool) -> None:
        """Note that one hand has been gathered."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.arrays, self.long, self.columns = [], {}, {}
        memory.release(self.block)


Hand = tuple[Cards, int, int]  # cards, first and past-last row in them
Dealt = list[Hand | None]  # a run's hands


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
        block = memory.acquire(layout.bytes(len(order)))
        dealt.append(Cards(block, layout.arrays(block, len(order)), count))
    places = {p: (g, i) for g, group in enumerate(source.layout.groups) for i, p in enumerate(group.positions)}
    near = memory.acquire(NEAR)
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
    memory.release(near)
    return dealt


def rows_in(arena: Arena, hand: Hand, position: int, width: int) -> Ints | None:
    """Return which rows of an arena are those of a hand, of a column of ``width`` bytes; None if they lie elsewhere."""
    cards, start, stop = hand
    if position not in cards.long:
        return None
    values, order = cards.long[position]
    begin = arena.offset_of(values)
    return None if begin is None else order[start:stop] + begin // width


def hand_column(source: Source[Any], hand: Hand, position: int) -> Column:
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
