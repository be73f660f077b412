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
from pqcache.reader.columns.batch_layout import LONG, BatchLayout, GatheredBatch
from pqcache.reader.columns.column_data import NEAR, Bytes, ColumnData, bytes_of_views, compact, cut, take
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.meter import ARRIVAL_WAIT, GATHER, NO_METER, READ_WAIT, Meter
from pqcache.reader.order.epoch_order import Ints, Lane
from pqcache.reader.row_group_reader import release_unused
from pqcache.system.buffer_pool import Arena, Buffer, BufferPool
from pqcache.system.fork_safe_threads import ForkSafeThreadPool

Rows = list[ColumnData]
Load = Callable[[int, int, int], Rows]
LoadAround = Callable[[int, int, int], tuple[Rows, "Ints | None"]]
Done = TypeVar("Done")  # what a batch is made into
P = ParamSpec("P")
T = TypeVar("T")

_SMALL = 1 << 20  # bytes; a smaller span is scattered into one chunk, as many small copies cost more


@dataclass(frozen=True, kw_only=True)
class ReadContext(Generic[Done]):
    """What the batches of an epoch are read with.

    ``load``           decodes rows: (row group, first row, past-last row) -> columns of ``forms``
    ``finish``         makes a batch of gathered columns, on a thread
    ``memory``         for what is decoded and scattered; ``batches`` for batches
    ``ahead``          row groups to decode ahead
    ``keep_decoded``   whether long rows remain where they were decoded until the last row of their row group is used
    ``arenas``         by column, where ``load`` puts long rows of fixed width then, as far as it can
    ``arrivals``       where row groups are still arriving: starts what reads one when it is there
    ``load_around``    like ``load``, but returns more rows, and where among them are those that are wanted, so that
                       these are copied only once
    ``meter``          counts what it takes
    """

    load: Load
    forms: Sequence[ColumnForm]
    finish: Callable[[GatheredBatch], Done]
    memory: BufferPool
    batches: BufferPool
    threads: ForkSafeThreadPool
    ahead: int
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

    def loaded(self, row_group: int, low: int, high: int) -> tuple[Rows, Ints | None]:
        """Return decoded rows, and where among them are those that are wanted; None for all."""
        if self.load_around is None:
            return self.load(row_group, low, high), None
        return self.load_around(row_group, low, high)

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
        return BatchLayout.of(self.forms)

    @cached_property
    def scattered_layout(self) -> BatchLayout:
        """Where those fixed-width columns lie that are scattered: all, or those that are not kept as decoded."""
        return self.layout.short if self.keep_decoded else self.layout


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

    def release_bucket(self, memory: BufferPool) -> None:
        """Note that one bucket has been gathered; after the last one the chunk's buffer goes back to ``memory``."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.arrays, self.long, self.columns = [], {}, {}
        memory.release(self.buffer)


class Bucket(NamedTuple):
    """Rows ``start <= row < stop`` of a chunk: those of a span that one block mixes."""

    chunk: ScatterChunk
    start: int
    stop: int


Buckets = list[Bucket | None]  # of a span; None where it is not needed, or was gathered


def scatter(context: ReadContext[Any], lane: Lane, span: int, first_bucket: int) -> Buckets:
    """Decode a span of a lane and return its buckets; those before ``first_bucket`` are None."""
    columns, rows = context.loaded(int(lane.row_groups[span]), int(lane.lows[span]), int(lane.highs[span]))
    with context.meter.timed(GATHER):
        return _in_buckets(context, lane, span, first_bucket, columns, rows)


def _in_buckets(
    context: ReadContext[Any], lane: Lane, span: int, first_bucket: int, columns: Rows, rows: Ints | None
) -> Buckets:
    """Return the buckets of a span of decoded ``columns``; ``rows`` are those that are wanted, None for all."""
    order, offsets = lane.row_order(span), lane.bucket_offsets(span).tolist()
    order = order if rows is None else rows[order]
    buckets: Buckets = [None] * first_bucket
    left = range(first_bucket, len(offsets) - 1)
    large = context.scattered_layout.bytes(len(order)) + sum(map(bytes_of_views, columns)) > _SMALL
    each = (1 if context.low_memory else lane.blocks_per_step) if large else len(offsets)
    portions = [left[i : i + each] for i in range(0, len(left), each)]
    counts = [len(portion) for portion in portions]
    orders = [order[offsets[portion[0]] : offsets[portion[-1] + 1]] for portion in portions]
    for portion, chunk in zip(portions, scatter_columns(context, columns, orders, counts), strict=True):
        begin = offsets[portion[0]]
        buckets.extend(Bucket(chunk, offsets[i] - begin, offsets[i + 1] - begin) for i in portion)
    if context.low_memory:
        release_unused()
    return buckets


def scatter_columns(
    context: ReadContext[Any], columns: Rows, orders: Sequence[Ints], buckets: Sequence[int]
) -> list[ScatterChunk]:
    """Return a chunk of the columns' rows in each of ``orders``, with so many buckets.

    Rows are taken column by column, as a column is what a cache can hold; ``columns`` is emptied meanwhile.
    """
    layout, memory = context.scattered_layout, context.memory
    chunks = []
    for order, count in zip(orders, buckets, strict=True):
        buffer = memory.acquire(layout.bytes(len(order)))
        chunks.append(ScatterChunk(buffer, layout.arrays(buffer, len(order)), count))
    places = {p: (g, i) for g, group in enumerate(context.layout.groups) for i, p in enumerate(group.positions)}
    near = memory.acquire(NEAR)
    for position, form in enumerate(context.forms):
        column = columns[position]
        columns[position] = ColumnData(form, None)  # decoded memory is freed as soon as it is scattered
        if position in places and column.valid is None and isinstance(column.values, np.ndarray):
            group, row = places[position]
            values = column.values
            if group >= len(layout.groups):
                for order, chunk in zip(orders, chunks, strict=True):
                    chunk.long[position] = values, order
                continue
            if values.nbytes <= NEAR:  # read once in sequence, so that random access finds it in the cache
                values = near[: values.nbytes].view(values.dtype).reshape(values.shape)
                np.copyto(values, column.values)
            for order, chunk in zip(orders, chunks, strict=True):
                values.take(order, axis=0, out=chunk.arrays[group][row], mode="clip")
        else:
            kept = context.keep_decoded and bytes_of_views(column) >= LONG * len(column)
            for order, chunk in zip(orders, chunks, strict=True):
                chunk.columns[position] = take(column, order) if kept else compact(take(column, order))
    memory.release(near)
    return chunks


def arena_rows(arena: Arena, bucket: Bucket, position: int, width: int) -> Ints | None:
    """Return a bucket's rows of a column of ``width`` bytes, counted in the arena; None if they lie elsewhere."""
    chunk, start, stop = bucket
    if position not in chunk.long:
        return None
    values, order = chunk.long[position]
    begin = arena.offset_of(values)
    return None if begin is None else order[start:stop] + begin // width


def bucket_column(context: ReadContext[Any], bucket: Bucket, position: int) -> ColumnData:
    """Return one column of a bucket, wherever it lies."""
    chunk, start, stop = bucket
    if position in chunk.columns:
        return cut(chunk.columns[position], start, stop)
    if position in chunk.long:
        decoded, order = chunk.long[position]
        return ColumnData(context.forms[position], decoded.take(order[start:stop], axis=0, mode="clip"))
    values = context.scattered_layout.values(chunk.arrays, position)
    assert values is not None
    return ColumnData(context.forms[position], values[start:stop])
