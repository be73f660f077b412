"""Blocks are gathered into batches: a hand of each row group that is held, joined and put in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pqcache.reader.batch_layout import Gathered, Layout
from pqcache.reader.columns import (
    NEAR,
    Bytes,
    Column,
    Form,
    compact,
    cut,
    ends_of_views,
    is_views,
    join,
    packed,
    take,
)
from pqcache.reader.order.order import Ints, Lane
from pqcache.reader.shuffle.scatter import Dealt, Hand, Source, hand_column, rows_in
from pqcache.system.buffer_pool import BufferPool

_PACKED = 8 << 20  # bytes of a column, about, that are packed by one call


class Frame:
    """A batch in the making: fixed-width columns have their places, the rest is put together at the end.

    Where one stretch of blocks has all of its rows (``whole``), the places are part of that stretch's memory.
    """

    def __init__(self, source: Source[Any], rows: int, whole: bool) -> None:
        self.rows = rows
        self.arrays: list[Bytes] = []
        if not whole:
            self.arrays = source.layout.arrays(source.batches.borrow(source.layout.bytes(rows)), rows)
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
    hands: list[Hand] = []
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
    column: Column, pieces: Sequence[Piece], shared: BufferPool | None
) -> Iterator[tuple[int, Column, Sequence[Piece]]]:
    """Yield (first row, rows, their pieces): views are packed for several whole batches at once, as each call costs.

    Large ones are packed one by one into ``shared`` memory, if there is any: each is free again when its batch is.
    """
    if not is_views(column):
        yield 0, column, pieces
        return
    most, ends = _PACKED if shared is None else NEAR, ends_of_views(column)
    left = deque(pieces)
    while left:
        some = [left.popleft()]
        first, whole = some[0][2], _is_whole(some[0])
        while whole and left and _is_whole(left[0]) and ends[left[0][3]] - ends[first] <= most:
            some.append(left.popleft())
        rows = cut(column, first, some[-1][3])
        yield first, Column(column.form, packed(rows, shared), rows.valid) if whole else rows, some


def _is_whole(piece: Piece) -> bool:
    frame, _, start, stop = piece
    return stop - start == frame.rows


def gather_groups(source: Source[Any], hands: Sequence[Hand], order: Ints, pieces: Sequence[Piece]) -> None:
    """Put the fixed-width columns of hands laid end to end, in ``order``, where their batches find them.

    That is one call for each group, as every call may have to wait for the interpreter's lock.
    """
    layout, rows = source.layout, len(order)
    if not layout.groups:
        return
    arrays = layout.arrays(source.batches.borrow(layout.bytes(rows)), rows)
    short = layout.short.groups
    scratch = source.memory.acquire(max((rows * group.width * len(group.positions) for group in short), default=0))
    for number, group in enumerate(short):
        (joined,) = Layout((group,)).arrays(scratch, rows)
        np.concatenate([cards.arrays[number][:, start:stop] for cards, start, stop in hands], axis=1, out=joined)
        joined.take(order, axis=1, out=arrays[number], mode="clip")
    source.memory.release(scratch)
    for group, array in zip(layout.groups[len(short) :], arrays[len(short) :], strict=True):
        for position, place in zip(group.positions, array, strict=True):
            gather_long(source, hands, order, position, place)
    for frame, at, start, stop in pieces:
        if not frame.arrays:
            frame.arrays = [array[:, start:stop] for array in arrays]
            continue
        for place, array in zip(frame.arrays, arrays, strict=True):
            place[:, at : at + stop - start] = array[:, start:stop]


def gather_long(source: Source[Any], hands: Sequence[Hand], order: Ints, position: int, out: Bytes) -> None:
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
