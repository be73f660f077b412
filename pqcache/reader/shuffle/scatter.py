"""Scatters the rows of a decoded row group into buckets, one for each block that mixes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from pqcache.reader.arriving.arrival_queue import ArrivalQueue
from pqcache.reader.columns.batch_layout import BatchLayout, GatheredBatches
from pqcache.reader.columns.column_data import NEAR, Bytes, ColumnData, bytes_of_views, compact, cut, take
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.meter import ARRIVAL_WAIT, DECODE, GATHER, NO_METER, READ_WAIT, Meter
from pqcache.reader.order.epoch_order import Ints, Lane
from pqcache.reader.row_group_reader import release_unused
from pqcache.system.buffer_pool import Arena, Buffer, BufferPool
from pqcache.system.fork_safe_threads import ForkSafeThreadPool

Rows = list[ColumnData]
Load = Callable[[int, int, int], Rows]
Use = Callable[[int, ColumnData], None]  # takes a column by its position
LoadAround = Callable[[int, int, int, "Use | None"], tuple[Rows, "Ints | None"]]
Done = TypeVar("Done")  # what a batch is made into
P = ParamSpec("P")
T = TypeVar("T")

_SMALL = 1 << 20  # bytes; a smaller span is scattered into one chunk, as many small copies cost more
_FAR = 128  # bytes of a row from which on it is not copied as long as it is kept where it was decoded


@dataclass(frozen=True, kw_only=True)
class ReadContext(Generic[Done]):
    """What the batches of an epoch are read with.

    ``load``           decodes rows: (row group, first row, past-last row) -> columns of ``forms``
    ``gathered_forms``  those in batches: some of ``forms`` may be stored as other numbers, which gathering changes
    ``finish``         makes batches of gathered columns, on a thread
    ``memory``         for what is decoded and scattered; ``batches`` for batches
    ``ahead``          row groups to decode ahead
    ``lanes``          how many are read at once
    ``row_group_bytes``  what one has decoded, on average; 0 where that is not known
    ``stretch_bytes``  what blocks may have that are gathered at once; 0: a little, of one step
    ``stretches``      of blocks that each lane has on their way, at most
    ``keep_decoded``   whether long rows remain where they were decoded until the last row of their row group is used
    ``arenas``         by column, where ``load`` puts long rows of fixed width then, as far as it can
    ``arrivals``       where row groups are still arriving: starts what reads one when it is there
    ``load_around``    like ``load``, but returns more rows, and where among them are those that are wanted, so that
                       these are copied only once; where all are wanted, it may pass columns to the function that is
                       its last argument as soon as each is decoded, and returns them without values
    ``meter``          counts what it takes
    """

    load: Load
    forms: Sequence[ColumnForm]
    gathered_forms: Sequence[ColumnForm]
    finish: Callable[[GatheredBatches], list[Done]]
    memory: BufferPool
    batches: BufferPool
    threads: ForkSafeThreadPool
    ahead: int
    stretches: int
    lanes: int = 1
    row_group_bytes: int = 0
    stretch_bytes: int = 0
    keep_decoded: bool = False
    arenas: Mapping[str, Arena] = field(default_factory=dict)
    arrivals: ArrivalQueue | None = None
    load_around: LoadAround | None = None
    meter: Meter = NO_METER

    def submit_read(self, row_group: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn``, which loads a row group, on a thread, once its bytes are there."""
        if self.arrivals is None:
            return self.threads.submit(fn, *args, **kwargs)
        return self.arrivals.submit(row_group, fn, *args, **kwargs)

    def result(self, future: Future[T]) -> T:
        """Return what comes of jobs that read row groups."""
        if future.done():
            return future.result()
        arrived = 0.0 if self.arrivals is None else self.arrivals.waited_seconds
        self.meter.waits_since = begun = time.monotonic_ns()
        try:
            return future.result() if self.arrivals is None else self.arrivals.result(future)
        finally:
            self.meter.waits_since = None
            self.meter.add(READ_WAIT, time.monotonic_ns() - begun)
            if self.arrivals is not None:
                self.meter.add(ARRIVAL_WAIT, int(1e9 * (self.arrivals.waited_seconds - arrived)))

    def loaded(self, row_group: int, low: int, high: int, use: Use | None) -> tuple[Rows, Ints | None]:
        """Return decoded rows, and where among them are those that are wanted; None for all.

        Columns that ``use`` was called with have no values.
        """
        if self.load_around is None:
            return self.load(row_group, low, high), None
        return self.load_around(row_group, low, high, use)

    @property
    def shared(self) -> BufferPool | None:
        """The memory that another process reads: that of a worker's batches; None outside of workers."""
        return None if self.batches is self.memory else self.batches

    @property
    def low_memory(self) -> bool:
        """Whether memory counts more than time: in workers, each with windows of its own, if no rows are kept."""
        return self.shared is not None and not self.keep_decoded

    @cached_property
    def layout(self) -> BatchLayout:
        """Where the fixed-width columns of a batch lie."""
        return BatchLayout.of(self.gathered_forms)

    @cached_property
    def decoded_layout(self) -> BatchLayout:
        """How the fixed-width columns of decoded rows are grouped; groups of short rows are those of a batch."""
        return BatchLayout.of(self.forms)

    @cached_property
    def scattered_layout(self) -> BatchLayout:
        """Where those fixed-width columns lie that are scattered: all, or those that are not kept as decoded."""
        return self.decoded_layout.short if self.keep_decoded else self.decoded_layout


class ScatterChunk:
    """Some of a span's rows in scattered order: one bucket or more, freed when all are used.

    ``arrays`` are the groups of ``ReadContext.scattered_layout`` over ``buffer``; ``long`` are columns that are kept
    where they were decoded, with the rows of the chunk; ``columns`` are all others: of no fixed width, or with nulls.
    """

    def __init__(self, buffer: Buffer, arrays: list[Bytes], buckets: int) -> None:
        self.buffer = buffer
        self.arrays = arrays
        self.long: dict[int, tuple[Bytes, Ints]] = {}
        self.columns: dict[int, ColumnData] = {}
        self._left = buckets
        self._lock = threading.Lock()

    def release_buckets(self, count: int, memory: BufferPool) -> None:
        """Note that buckets have been gathered; after the last one the chunk's buffer goes back to ``memory``."""
        with self._lock:
            self._left -= count
            if self._left:
                return
        self.arrays, self.long, self.columns = [], {}, {}
        memory.release(self.buffer)


class Bucket(NamedTuple):
    """Rows ``start <= row < stop`` of a chunk: those of a span that ``blocks`` consecutive blocks mix."""

    chunk: ScatterChunk
    start: int
    stop: int
    blocks: int = 1


Buckets = list[Bucket | None]  # of a span; None where it is not needed, or was gathered


def scatter(context: ReadContext[Any], lane: Lane, span: int, first_bucket: int) -> Buckets:
    """Decode a span of a lane and return its buckets; those before ``first_bucket`` are None.

    Where fixed-width columns are many, each is scattered when it is decoded, while the processor's cache holds it.
    """
    row_group, low, high = int(lane.row_groups[span]), int(lane.lows[span]), int(lane.highs[span])
    early: ScatteredColumns | None = None
    if context.scattered_layout.bytes(high - low) > _SMALL:
        early = ScatteredColumns(context, lane, span, first_bucket)
    columns, rows = context.loaded(row_group, low, high, early.add_decoded if early else None)
    with context.meter.timed(GATHER):
        if early is not None and rows is None:
            scattered = early
            context.meter.add(DECODE, -early.while_decoding)
            context.meter.add(GATHER, early.while_decoding)
        else:
            row_bytes = sum(map(bytes_of_views, columns))
            scattered = ScatteredColumns(context, lane, span, first_bucket, rows, row_bytes)
        buckets = scattered.buckets(columns)
        if context.low_memory:
            release_unused()
        return buckets


class ScatteredColumns:
    """The buckets of a span from ``first_bucket`` on, to which columns are added.

    ``rows`` are those of the columns that are wanted, None for all; ``of_views`` is how many bytes the columns have
    beside those of fixed width.
    """

    def __init__(
        self,
        context: ReadContext[Any],
        lane: Lane,
        span: int,
        first_bucket: int,
        rows: Ints | None = None,
        of_views: int = 0,
    ) -> None:
        self._context = context
        self._offsets: list[int] = lane.bucket_offsets(span).tolist()
        order = lane.row_order(span)
        order = order if rows is None else rows[order]
        large = context.scattered_layout.bytes(len(order)) + of_views > _SMALL and not context.keep_decoded
        self._portions = self._in_chunks(lane, range(first_bucket, len(self._offsets) - 1), large)
        self._orders = [order[self._offsets[p[0]] : self._offsets[p[-1] + 1]] for p in self._portions]
        # in workers, where memory is scarce, none is left over in chunks; else all chunks are as large, to be reused
        self._least_rows = 0 if context.low_memory or not large else -(-len(order) // lane.window)
        groups = context.decoded_layout.groups
        self._places = {p: (g, i) for g, group in enumerate(groups) for i, p in enumerate(group.positions)}
        self._chunks: list[ScatterChunk] = []
        self.while_decoding = 0  # nanoseconds

    def _in_chunks(self, lane: Lane, buckets: range, large: bool) -> list[range]:
        """Return which buckets go to the same chunk: all of them, unless they are large.

        They are not large where decoded rows are kept: there is memory for all rows of a span until the last one is
        used. The buckets of a lane's last spans are larger, as they are fewer. There fewer go to a chunk, so that all
        chunks are about equal.
        """
        each = max(1, len(buckets))
        if large:
            each = 1 if self._context.low_memory else max(1, (len(self._offsets) - 1) // lane.window)
        return [buckets[i : i + each] for i in range(0, len(buckets), each)]

    def chunks(self) -> list[ScatterChunk]:
        """Return the chunks, with the columns that were added so far."""
        layout, memory = self._context.scattered_layout, self._context.memory
        if not self._chunks:
            for order, portion in zip(self._orders, self._portions, strict=True):
                buffer = memory.acquire(layout.bytes(max(self._least_rows, len(order))))
                self._chunks.append(ScatterChunk(buffer, layout.arrays(buffer, len(order)), len(portion)))
        return self._chunks

    def add_decoded(self, position: int, column: ColumnData) -> None:
        """Add a column that was decoded just now."""
        begun = time.monotonic_ns()
        self.add(position, column)
        self.while_decoding += time.monotonic_ns() - begun

    def add(self, position: int, column: ColumnData, near: Bytes | None = None) -> None:
        """Add a column; ``near`` is memory in the processor's cache, through which values are read that are not."""
        values = column.values
        if position in self._places and column.valid is None and isinstance(values, np.ndarray):
            group, row = self._places[position]
            if group >= len(self._context.scattered_layout.groups):
                for order, chunk in zip(self._orders, self.chunks(), strict=True):
                    chunk.long[position] = values, order
                return
            if near is not None and values.nbytes <= NEAR:  # read once in sequence: random access finds it there
                values = near[: values.nbytes].view(values.dtype).reshape(values.shape)
                np.copyto(values, column.values)
            for order, chunk in zip(self._orders, self.chunks(), strict=True):
                values.take(order, axis=0, out=chunk.arrays[group][row], mode="clip")
        else:
            far = self._context.keep_decoded and bytes_of_views(column) >= _FAR * len(column)
            for order, chunk in zip(self._orders, self.chunks(), strict=True):
                taken = take(column, order)
                chunk.columns[position] = taken if far else compact(taken)

    def buckets(self, columns: Rows) -> Buckets:
        """Return the buckets, with those of ``columns`` that have values being added now; None before the first.

        Rows are taken column by column, as a column is what a cache can hold; ``columns`` is emptied meanwhile.
        """
        near = self._context.memory.acquire(NEAR)
        for position, form in enumerate(self._context.forms):
            column = columns[position]
            columns[position] = ColumnData(form, None)  # decoded memory is freed as soon as it is scattered
            if column.values is not None:
                self.add(position, column, near)
        self._context.memory.release(near)
        found: Buckets = [None] * (self._portions[0].start if self._portions else len(self._offsets) - 1)
        for portion, chunk in zip(self._portions, self.chunks(), strict=True):
            begin = self._offsets[portion[0]]
            found.extend(Bucket(chunk, self._offsets[i] - begin, self._offsets[i + 1] - begin) for i in portion)
        return found


def arena_rows(arena: Arena, bucket: Bucket, position: int, width: int) -> Ints | None:
    """Return a bucket's rows of a column of ``width`` bytes, counted in the arena; None if they lie elsewhere."""
    chunk, start, stop, _ = bucket
    if position not in chunk.long:
        return None
    values, order = chunk.long[position]
    begin = arena.offset_of(values)
    return None if begin is None else order[start:stop] + begin // width


def bucket_column(context: ReadContext[Any], bucket: Bucket, position: int) -> ColumnData:
    """Return one column of a bucket, wherever it lies."""
    chunk, start, stop, _ = bucket
    if position in chunk.columns:
        return cut(chunk.columns[position], start, stop)
    if position in chunk.long:
        decoded, order = chunk.long[position]
        return ColumnData(context.forms[position], decoded.take(order[start:stop], axis=0, mode="clip"))
    values = context.scattered_layout.values(chunk.arrays, position)
    assert values is not None
    return ColumnData(context.forms[position], values[start:stop])
