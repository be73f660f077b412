"""Gathers blocks into batches: one bucket of each row group that is mixed, joined and put in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pqcache.reader.columns.batch_layout import BatchLayout, GatheredBatches
from pqcache.reader.columns.column_data import (
    NEAR,
    Bytes,
    ColumnData,
    as_typed,
    compact,
    cut,
    cut_all,
    ends_of_views,
    has_bits_of_type,
    is_views,
    join,
    pack_bytes,
    take,
    write_typed,
)
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.order.epoch_order import Ints, Lane
from pqcache.reader.shuffle.scatter import Bucket, Buckets, ReadContext, arena_rows, bucket_column
from pqcache.system.buffer_pool import BufferPool

_PACKED = 8 << 20  # bytes of views that are packed at once


class BatchBuilder:
    """Batches in the making: fixed-width columns are written to their places, the rest is joined at the end.

    Those of which one stretch of blocks has all rows are ``complete``, and made together; their places are part of that
    stretch's memory. Another one is made alone. ``sizes`` are the rows of each.
    """

    def __init__(self, context: ReadContext[Any], sizes: Sequence[int], complete: bool) -> None:
        self.sizes, self.complete = sizes, complete
        self.rows = rows = sum(sizes)
        self.arrays: list[Bytes] = []
        if not complete:
            self.arrays = context.layout.arrays(context.batches.borrow(context.layout.bytes(rows)), rows)
        self._parts: dict[int, dict[int, ColumnData]] = {}  # by column, then by first row
        self._missing = rows
        self._lock = threading.Lock()

    def add(self, position: int, first_row: int, column: ColumnData) -> None:
        """Add rows of a column that has no place."""
        with self._lock:
            self._parts.setdefault(position, {})[first_row] = column

    def filled(self, rows: int) -> bool:
        """Note that all columns of some more rows are there; return whether these were the last."""
        with self._lock:
            self._missing -= rows
            return self._missing == 0

    def build(self, context: ReadContext[Any]) -> GatheredBatches:
        """Return the batches, whose rows are all there."""
        columns: list[dict[int, ColumnData]] = [{} for _ in self.sizes]
        for position, parts in self._parts.items():
            if self.complete:
                for of_batch, (_, part) in zip(columns, sorted(parts.items()), strict=True):
                    of_batch[position] = part
                continue
            form, values = context.gathered_forms[position], context.layout.values(self.arrays, position)
            column = self._joined(parts, None if values is None else ColumnData(form, values), form)
            columns[0][position] = (
                ColumnData(form, pack_bytes(column, context.shared), column.valid) if is_views(column) else column
            )
        return GatheredBatches(self.sizes, context.layout, self.arrays, columns)

    def _joined(self, parts: dict[int, ColumnData], placed: ColumnData | None, form: ColumnForm) -> ColumnData:
        """Join the parts of a column; rows that no part has are in their place (no nulls among them)."""
        joined, done = [], 0
        for start, part in sorted(parts.items()):
            if placed is not None and start > done:
                joined.append(cut(placed, done, start))
            joined.append(part)
            done = start + len(part)
        if placed is not None and done < self.rows:
            joined.append(cut(placed, done, self.rows))
        return join(joined, form)


class BatchRows(NamedTuple):
    """Rows ``start <= row < stop`` of a stretch of blocks, which go to ``batches`` from their row ``first_row`` on."""

    batches: BatchBuilder
    first_row: int
    start: int
    stop: int

    def one_by_one(self) -> Iterator[BatchRows]:
        """Yield the rows of each batch; of one that is not complete, those that are here."""
        if not self.batches.complete:
            yield self
            return
        first = 0
        for size in self.batches.sizes:
            start = self.start + first
            yield BatchRows(self.batches, first, start, start + size)
            first += size


def gather(
    context: ReadContext[Any], lane: Lane, blocks: range, scattered: dict[int, Buckets], places: Sequence[BatchRows]
) -> list[BatchBuilder]:
    """Put the rows of consecutive blocks into their batches; return those that have all of their rows now.

    ``scattered`` are the buckets of the lane's spans that the blocks mix; those that are gathered become None.
    """
    buckets, order = _take_buckets(lane, blocks, scattered)
    _gather_fixed(context, buckets, order, places)
    positions = sorted({position for bucket in buckets for position in bucket.chunk.columns})
    of_batches = [rows for place in places for rows in place.one_by_one()] if positions else []
    for position in positions:
        parts = [bucket_column(context, bucket, position) for bucket in buckets]
        column = take(join(parts, context.forms[position]), order)
        column = _as_gathered(context, position, column, context.batches)
        for first, part, of_part in _packed_together(context, column, of_batches):
            if context.low_memory:  # a batch that goes on in the next block would keep all of this one
                part = compact(part)
            pieces = cut_all(part, [of_part[0].start - first, *(rows.stop - first for rows in of_part)])
            for (batches, first_row, _, _), piece in zip(of_part, pieces, strict=True):
                batches.add(position, first_row, piece)
    for bucket in buckets:
        bucket.chunk.release_buckets(bucket.blocks, context.memory)
    return [batches for batches, _, start, stop in places if batches.filled(stop - start)]


def _take_buckets(lane: Lane, blocks: range, scattered: dict[int, Buckets]) -> tuple[list[Bucket], Ints]:
    """Return the buckets of consecutive blocks, span by span, and where in them the blocks' rows lie, in their order.

    Buckets of a span that lie end to end are one. Those of ``scattered`` become None.
    """
    spans = range(lane.spans(blocks[0]).start, lane.spans(blocks[-1]).stop)
    sizes = np.zeros((len(spans), len(blocks)), np.int64)
    buckets: list[Bucket] = []
    for span, of_blocks in zip(spans, sizes, strict=True):
        of_span, first = scattered[span], lane.first_block(span)
        low, high = max(first, blocks.start), min(first + len(of_span), blocks.stop)
        taken = [bucket for bucket in of_span[low - first : high - first] if bucket is not None]
        assert len(taken) == high - low
        of_span[low - first : high - first] = [None] * (high - low)
        of_blocks[low - blocks.start : high - blocks.start] = [stop - start for _, start, stop, _ in taken]
        chunk, begin, _, _ = taken[0]
        if taken[-1].chunk is chunk:
            taken = [Bucket(chunk, begin, taken[-1].stop, len(taken))]
        buckets += taken
    rows = sizes.sum(axis=0).tolist()
    if len(blocks) == 1:
        return buckets, lane.block_order(blocks[0], rows[0])
    orders, before = [], 0
    for block, count in zip(blocks, rows, strict=True):
        orders.append(lane.block_order(block, count) + before)
        before += count
    by_block = sizes.T.ravel()
    begins = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape).T.ravel()
    places = np.repeat(begins - np.cumsum(by_block) + by_block, by_block) + np.arange(before)
    return buckets, places.take(np.concatenate(orders), mode="clip")


def _packed_together(
    context: ReadContext[Any], column: ColumnData, places: Sequence[BatchRows]
) -> Iterator[tuple[int, ColumnData, Sequence[BatchRows]]]:
    """Yield (first row, rows, their places): views are packed for several complete batches by one call.

    Many bytes are packed by several calls, with little memory batch by batch, so that some are free again earlier.
    """
    if not is_views(column):
        yield 0, column, places
        return
    ends = ends_of_views(column)
    shared = context.shared
    most = _PACKED if context.keep_decoded else NEAR
    left = deque(places)
    while left:
        some = [left.popleft()]
        first, complete = some[0].start, some[0].batches.complete
        while complete and left and left[0].batches.complete and ends[left[0].stop] - ends[first] <= most:
            some.append(left.popleft())
        rows = cut(column, first, some[-1].stop)
        yield first, ColumnData(column.form, pack_bytes(rows, shared), rows.valid) if complete else rows, some


def _gather_fixed(
    context: ReadContext[Any], buckets: Sequence[Bucket], order: Ints, places: Sequence[BatchRows]
) -> None:
    """Put the fixed-width columns of buckets laid end to end, in ``order``, where their batches find them.

    That is one call for each group of columns, as every call may have to wait for the interpreter's lock.
    """
    layout, rows = context.layout, len(order)
    if not layout.groups:
        return
    arrays = layout.arrays(context.batches.borrow(layout.bytes(rows)), rows)
    short = layout.short.groups
    scratch = context.memory.acquire(max((rows * group.width * len(group.positions) for group in short), default=0))
    for number, group in enumerate(short):
        (joined,) = BatchLayout((group,)).arrays(scratch, rows)
        np.concatenate([chunk.arrays[number][:, start:stop] for chunk, start, stop, _ in buckets], axis=1, out=joined)
        joined.take(order, axis=1, out=arrays[number], mode="clip")
    context.memory.release(scratch)
    for group, array in zip(layout.groups[len(short) :], arrays[len(short) :], strict=True):
        for position, place in zip(group.positions, array, strict=True):
            _gather_long(context, buckets, order, position, place)
    for batches, first_row, start, stop in places:
        if batches.complete:
            batches.arrays = [array[:, start:stop] for array in arrays]
            continue
        for place, array in zip(batches.arrays, arrays, strict=True):
            place[:, first_row : first_row + stop - start] = array[:, start:stop]


def _gather_long(context: ReadContext[Any], buckets: Sequence[Bucket], order: Ints, position: int, out: Bytes) -> None:
    """Write the long rows of a column to ``out`` in ``order``, but not those that lie among a chunk's ``columns``.

    Those of one arena are read by few calls; otherwise each bucket's rows are written to their places.
    """
    form = context.forms[position]
    arena = context.arenas.get(form.name)
    if arena is not None:
        found = [rows for bucket in buckets if (rows := arena_rows(arena, bucket, position, form.width)) is not None]
        if len(found) == len(buckets):
            rows, decoded = np.concatenate(found)[order], arena.buffer.reshape(-1, form.width)
            if form == context.gathered_forms[position] or has_bits_of_type(form):
                decoded.take(rows, axis=0, out=out, mode="clip")
            else:
                _take_typed(context, form, decoded, rows, out)
            return
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    items, first = out.view(f"V{out.shape[-1]}")[:, 0], 0
    for bucket in buckets:
        past = first + bucket.stop - bucket.start
        if position not in bucket.chunk.columns:
            column = _as_gathered(context, position, bucket_column(context, bucket, position), context.memory)
            items[where[first:past]] = column.values.view(items.dtype)[:, 0]
        first = past


def _as_gathered(context: ReadContext[Any], position: int, column: ColumnData, memory: BufferPool) -> ColumnData:
    """Return a decoded column as batches have it; other numbers are written to ``memory``."""
    return column if context.gathered_forms[position] == context.forms[position] else as_typed(column, memory)


def _take_typed(context: ReadContext[Any], form: ColumnForm, decoded: Bytes, rows: Ints, out: Bytes) -> None:
    """Write ``rows`` that are held as they are stored to ``out`` as numbers of their type, some at a time."""
    each = max(1, NEAR // form.width)
    near = context.memory.acquire(each * form.width)
    stored = near[: each * form.width].reshape(each, form.width)
    for start in range(0, len(rows), each):
        some = rows[start : start + each]
        write_typed(form, decoded.take(some, axis=0, out=stored[: len(some)], mode="clip"), out[start : start + each])
    context.memory.release(near)
