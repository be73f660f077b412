"""The batches of an epoch as Arrow record batches: row groups are decoded ahead on threads, mixed, and cut.

    line     the rows of a lane, or of the files in order: which rows of which row groups come where (`reader/order`)
    run      some coming batches of a line, gathered together: one take for each column
    window   the decoded row groups that the coming runs of a line need

A run needs nothing but the numbers of its batches, so an epoch begins anywhere, and threads gather several at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError, first_line
from pqcache.reader.arriving.arrival_queue import ArrivalQueue, arrival_queue, pass_on
from pqcache.reader.arriving.wanted_order import row_groups_of_batches, row_groups_of_lanes, without_repeats
from pqcache.reader.load import AnyHeld, Held, RowGroups
from pqcache.reader.memory import RowGroupSizes, largest_of
from pqcache.reader.meter import ARRIVAL_WAIT, GATHER, READ_WAIT
from pqcache.reader.order.epoch_order import Ints, Lane, Order
from pqcache.reader.order.epoch_share import batches_by_lane
from pqcache.reader.rows import Column, join, to_arrow
from pqcache.store.selected_rows import ranges_of
from pqcache.system.fork_safe_threads import ForkSafeThreadPool

log = logging.getLogger("pqcache.reader")

T = TypeVar("T")

_RUNS = 3  # of each line, that are on their way
_RUN, _LEAST_RUN = 32 << 20, 1 << 20  # bytes of a run
_RUN_ROWS = 1 << 17  # of a run, at most: where each row is and goes to takes some numbers
_PARTS = 8  # of a row group
SMALLER = "choose a smaller batch_size, or leave the column out with columns="


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a process may use to read with.

    Attributes:
        threads: that decode and gather.
        decoding: row groups decoded at once, and ahead.
        run_bytes: of a run of batches, about.
        runs: of each line that are on their way.
        parts: in how many parts the rows of a row group are held, each of which is freed when it is used up. More than
            one takes another copy of long values, and is for memory that does not hold all row groups of the windows.
    """

    threads: int = 1
    decoding: int = 1
    run_bytes: int = _RUN
    runs: int = _RUNS
    parts: int = 1

    @staticmethod
    def within(
        sizes: RowGroupSizes, memory: float, lanes: int, all_lanes: int, window: int, decoding: int, threads: int
    ) -> Budget:
        """What ``memory`` bytes allow a process that reads ``lanes`` of ``all_lanes`` lanes."""
        if not len(sizes):
            return Budget()
        run = int(min(_RUN, max(_LEAST_RUN, memory / (8 * _RUNS * lanes))))
        kept = np.minimum(sizes.decoded, 2 * sizes.selected)
        held = int(largest_of(kept, lanes * window).sum())
        held = min(held, int(kept.sum()) * lanes // all_lanes + lanes * sizes.largest)
        if held + 2 * (lanes + decoding) * sizes.largest + 2 * _RUNS * lanes * run <= memory:
            return Budget(threads=threads, decoding=decoding, run_bytes=run)
        return Budget(threads=threads, decoding=decoding, run_bytes=max(_LEAST_RUN, run // 4), runs=2, parts=_PARTS)


class Group(NamedTuple):
    """Batches that were gathered together: batch i is rows ``ends[i]`` up to ``ends[i + 1]``."""

    rows: pa.RecordBatch
    ends: list[int]

    def batches(self) -> list[pa.RecordBatch]:
        """The batches, each with memory of its own."""
        if len(self.ends) == 2:
            return [self.rows]
        slices = [self.rows.slice(low, high - low) for low, high in pairwise(self.ends)]
        return [pa.RecordBatch.from_arrays(list(map(_copied, part.columns)), schema=part.schema) for part in slices]


def _copied(array: pa.Array) -> pa.Array:
    return pa.concat_arrays([array, array.slice(0, 0)])  # of one array it would be that


class Span(NamedTuple):
    """Rows ``low`` up to ``high`` of a span of a line; what comes later needs none before row ``kept``."""

    number: int
    low: int
    high: int
    kept: int


class Places(NamedTuple):
    """Where the rows of a run are: those of ``spans``, laid end to end, in ``order``."""

    spans: list[Span]
    order: Ints | None


class Line(Protocol):
    """Rows one after the other, in spans of row groups."""

    rows: int
    spans: int

    def number(self, span: int) -> int:
        """The number of a span's row group in the plan."""

    def load(self, groups: RowGroups, span: int, first: int, parts: int) -> AnyHeld:
        """Decode the rows of a span from row ``first`` on, to be held in ``parts`` parts."""

    def places(self, ranges: Sequence[tuple[int, int]]) -> Places:
        """Where ascending ranges of rows are."""


class ShuffledLine:
    """A lane of a shuffled epoch."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.rows, self.spans = lane.rows, len(lane.row_groups)
        self._offsets: dict[int, Ints] = {}
        self._at = (0, 0)  # a block, and the rows before it
        self._order: tuple[int, Ints] | None = None  # of the last block, of which the next run may have rows too

    def number(self, span: int) -> int:
        return int(self._lane.row_groups[span])

    def load(self, groups: RowGroups, span: int, first: int, parts: int) -> AnyHeld:
        lane, cuts = self._lane, []
        if parts > 1:
            offsets = lane.bucket_offsets(span)
            cuts = offsets[:: -(-len(offsets) // parts)][1:].tolist()
        number, low, high = (int(of[span]) for of in (lane.row_groups, lane.lows, lane.highs))
        return groups.load(number, low, high, lane.row_order(span), first, cuts)

    def places(self, ranges: Sequence[tuple[int, int]]) -> Places:
        lane, blocks = self._lane, list(self._blocks(_joined(ranges)))
        begin, end = blocks[0][0], blocks[-1][0] + 1
        first, last = lane.spans(begin).start, lane.spans(end - 1).stop
        for span in [span for span in self._offsets if span < first]:
            del self._offsets[span]
        numbers = np.arange(begin, end + 1)
        buckets = np.stack([self._bucket_at(span, numbers) for span in range(first, last)])  # of each span, by block
        low, high = buckets[:, 0], buckets[:, -1]
        base = np.cumsum(high - low) - high  # of all that is joined, where row 0 of each span would be
        order = []
        for block, skipped, stop in blocks:
            starts = buckets[:, block - begin]
            rows = ranges_of(base + starts, buckets[:, block - begin + 1] - starts)
            if self._order is None or self._order[0] != block:
                self._order = block, lane.block_order(block, len(rows))
            order.append(rows[self._order[1][skipped:stop]])
        bounds = zip(low.tolist(), high.tolist(), buckets[:, -2].tolist(), strict=True)
        spans = [Span(first + at, begins, ends, kept) for at, (begins, ends, kept) in enumerate(bounds)]
        return Places(spans, np.concatenate(order))

    def _bucket_at(self, span: int, blocks: Ints) -> Ints:
        """Where the bucket of a span for each of these blocks begins."""
        offsets = self._offsets_of(span)
        return offsets[np.clip(blocks - self._lane.first_block(span), 0, len(offsets) - 1)]

    def _offsets_of(self, span: int) -> Ints:
        found = self._offsets.get(span)
        if found is None:
            found = self._offsets[span] = self._lane.bucket_offsets(span)
        return found

    def _blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """The blocks of ranges of rows: number, and which of its rows, in order."""
        for low, high in ranges:
            block, before = self._at
            if low < before or block == 0:
                block = self._lane.block_at(low)
                before = self._lane.rows_before(block)
            while before < high:
                past = self._lane.rows_before(block + 1)
                if past > low:
                    yield block, max(0, low - before), min(high, past) - before
                if past > high:
                    break
                block, before = block + 1, past
            self._at = block, before


class FileLine:
    """The rows of an epoch that is not shuffled."""

    def __init__(self, order: Order) -> None:
        self.rows, self.spans = order.rows, len(order.counts)
        self._counts = order.counts
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(order.counts)])

    def number(self, span: int) -> int:
        return span

    def load(self, groups: RowGroups, span: int, first: int, parts: int) -> AnyHeld:
        return groups.load(span, 0, int(self._counts[span]))

    def places(self, ranges: Sequence[tuple[int, int]]) -> Places:
        spans = []
        for low, high in _joined(ranges):
            first, last = np.searchsorted(self._starts, low, "right") - 1, np.searchsorted(self._starts, high)
            for span in range(int(first), int(last)):
                begin, end = self._starts[span], self._starts[span + 1]
                spans.append(Span(span, int(max(low, begin) - begin), int(min(high, end) - begin), 0))
        return Places(spans, None)


@dataclass(eq=False)
class _Run(Generic[T]):
    """Some batches of a line that are gathered together, and the row groups that they need."""

    line: Line
    batches: int
    spans: list[tuple[Span, Future[AnyHeld]]]
    result: Future[T]

    def end(self) -> None:
        """Let go of what only this run and those before it needed."""
        for span, future in self.spans:
            if not future.cancelled() and future.exception() is None and isinstance(held := future.result(), Held):
                held.drop(span.kept)


@dataclass(eq=False)
class _Batch(Generic[T]):
    """A batch: which rows of a line, and once it is on its way, which of a run."""

    index: int
    rows: tuple[int, int]
    run: _Run[T] | None = None
    number: int = 0


class _Window(Generic[T]):
    """The decoded row groups of one line, and its batches that are next."""

    def __init__(self, line: Line, load: Callable[[Line, int, int], Future[AnyHeld]], ahead: int) -> None:
        self.line, self.together = line, 1
        self.next: list[_Batch[T]] = []
        self._load, self._ahead = load, ahead
        self._held: dict[int, Future[AnyHeld]] = {}

    def fetch(self, spans: Sequence[Span]) -> list[tuple[Span, Future[AnyHeld]]]:
        """Begin to decode what a run needs, and some more."""
        first, last = spans[0].number, spans[-1].number + 1
        low = {span.number: span.low for span in spans}
        for span in range(first, min(last + self._ahead, self.line.spans)):
            if span not in self._held:
                self._held[span] = self._load(self.line, span, low.get(span, 0))
        for span in [span for span in self._held if span < first]:
            del self._held[span]
        return [(span, self._held[span.number]) for span in spans]


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of rows, those that follow one another as one."""
    found = [ranges[0]]
    for low, high in ranges[1:]:
        if low == found[-1][1]:
            found[-1] = found[-1][0], high
        else:
            found.append((low, high))
    return found


def read_groups(
    groups: RowGroups,
    order: Order,
    indices: Sequence[int],
    total: int,
    budget: Budget,
    make: Callable[[Group], T],
) -> Generator[tuple[int, T, int]]:
    """Yield (global index, group, which of its batches) for batches of an epoch of ``total``.

    ``indices`` are one ``EpochShare``'s; those from ``total`` on are padding and repeat the epoch from its start.
    ``make`` is called with each group on a thread. What fails is made again batch by batch, so that the batches before
    one with an error come first.
    """
    if not len(indices):
        return
    row_bytes = groups.sizes.selected / np.maximum(groups.plan.counts, 1)
    apart = 1 if order.shuffle or len(indices) < 2 else max(1, indices[1] - indices[0])
    lanes = order.lanes if order.shuffle else 1
    begins: dict[int, int] = {}  # the first batch of each lane
    for _, lane, number in batches_by_lane(indices[: order.lanes], lanes, total):
        begins.setdefault(lane, number)
    ahead = 0 if budget.decoding == 1 or budget.parts > 1 else -(-budget.decoding // len(begins))

    def load(line: Line, span: int, first: int) -> Future[AnyHeld]:
        if arrivals is None:
            return pool.submit(line.load, groups, span, first, budget.parts)
        return arrivals.submit(line.number(span), line.load, groups, span, first, budget.parts)

    def gather(ranges: list[tuple[int, int]], order: Ints | None, spans: list[tuple[Span, Future[AnyHeld]]]) -> T:
        with groups.meter.timed(GATHER):
            rows, ends = _gathered(groups, order, [(s, future.result()) for s, future in spans if s.high > s.low])
        return make(Group(rows, ends or np.cumsum([0, *(high - low for low, high in ranges)]).tolist()))

    def submit(window: _Window[T]) -> None:
        """Send the next batches of a window on their way as one run, as many as are not too large for it."""
        batches = window.next
        while True:
            ranges = [batch.rows for batch in batches]
            places = window.line.places(ranges)
            held = [(span.high - span.low, row_bytes[window.line.number(span.number)]) for span in places.spans]
            row = sum(rows * size for rows, size in held) / max(1, sum(rows for rows, _ in held))
            most = int(min(budget.run_bytes / max(row, 1), _RUN_ROWS) / (order.batch_size * apart))
            if len(batches) <= max(1, 2 * most):
                break
            batches = batches[: len(batches) // 2]  # these row groups have longer rows than those before
        window.next = window.next[len(batches) :]
        if window.next:
            full.appendleft(window)
        window.together = max(1, min(2 * window.together, most))
        spans = window.fetch(places.spans)
        job = partial(pool.submit_first, partial(gather, ranges, places.order, spans))
        run = _Run(window.line, len(batches), spans, _after([future for _, future in spans], job))
        on_way.append(run)
        for number, batch in enumerate(batches):
            batch.run, batch.number = run, number

    def one(batch: _Batch[T], run: _Run[T]) -> T:
        """A batch of a run that failed."""
        held = {span.number: future for span, future in run.spans}
        places = run.line.places([batch.rows])
        return gather([batch.rows], places.order, [(span, held[span.number]) for span in places.spans])

    def placed() -> Iterator[_Batch[T]]:
        """Each batch of the epoch, added to its window."""
        windows: dict[int, _Window[T]] = {}
        coming: dict[int, int] = {}  # the next batch of each lane
        for index, lane, number in batches_by_lane(indices, lanes, total):
            window = windows.get(lane)
            if window is None or number < coming[lane]:  # padding: the epoch begins again
                if window is not None and window.next:
                    full.append(window)
                line = ShuffledLine(order.lane(lane)) if order.shuffle else FileLine(order)
                window = windows[lane] = _Window(line, load, ahead)
            coming[lane] = number + 1
            low = number * order.batch_size
            batch: _Batch[T] = _Batch(index, (low, min(low + order.batch_size, window.line.rows)))
            window.next.append(batch)
            if len(window.next) >= window.together:
                full.append(window)
            yield batch
        full.extend(window for window in windows.values() if window.next)

    def more() -> bool:
        """Place another batch, or send a run on its way; False at the end of the epoch."""
        batch = None if full else next(coming, None)
        if batch is not None:
            queue.append(batch)
        elif full:
            submit(full.popleft())
        else:
            return False
        return True

    queue: deque[_Batch[T]] = deque()
    full: deque[_Window[T]] = deque()  # those with enough batches for a run
    on_way: list[_Run[T]] = []
    coming = placed()
    with (
        _wanting(groups, order, begins, indices, total),
        _threads(budget) as pool,
        arrival_queue(groups.plan.data.arrivals, groups.plan.row_groups, groups.plan.columns_read, pool) as arrivals,
    ):
        while True:
            while len(on_way) < budget.runs * len(begins) and more():
                pass
            if not queue:
                return
            batch = queue.popleft()
            while (run := batch.run) is None:
                more()
            group = _result(groups, run.result, arrivals)
            if group is None:
                yield batch.index, one(batch, run), 0
            else:
                yield batch.index, group, batch.number
            del group
            if batch.number == run.batches - 1:
                run.end()
                on_way.remove(run)


@contextmanager
def _threads(budget: Budget) -> Iterator[ForkSafeThreadPool]:
    """Threads that nobody waits for when their user stops half way."""
    pool = ForkSafeThreadPool(max(budget.threads, budget.decoding), budget.decoding)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wanting(
    groups: RowGroups, order: Order, begins: dict[int, int], indices: Sequence[int], total: int
) -> AbstractContextManager[None]:
    """Tells a run that still fetches the files, while it is entered, which row groups are needed first."""
    plan = groups.plan
    if plan.data.arrivals is None or plan.data.arrivals.is_complete:
        return nullcontext()
    if order.shuffle:
        wanted = row_groups_of_lanes(order, begins)
    else:
        wanted = row_groups_of_batches(order, [index % total for index in indices])
    return plan.data.arrivals.wanting(without_repeats(plan.row_groups[wanted]), plan.columns_read)


def _after(decoded: Sequence[Future[AnyHeld]], submit: Callable[[], Future[T]]) -> Future[T]:
    """What comes of a job that is submitted as soon as all row groups are decoded, so that no thread waits for them."""
    result: Future[T] = Future()
    left, lock, jobs = [len(decoded)], Lock(), [submit]  # taken out, or futures and what waits for them hold each other

    def one_done(future: Future[AnyHeld]) -> None:
        with lock:
            left[0] -= 1
            if not jobs or (left[0] and not future.cancelled()):
                return
            job = jobs.pop()
        if future.cancelled():  # as the epoch ends
            result.cancel()
            return
        try:
            job().add_done_callback(partial(pass_on, result))
        except RuntimeError:  # the same
            result.cancel()

    for future in decoded:
        future.add_done_callback(one_done)
    return result


def _result(groups: RowGroups, future: Future[T], arrivals: ArrivalQueue | None) -> T | None:
    """What comes of a run; None if it failed."""
    meter = groups.meter
    try:
        if future.done():
            return future.result()
        arrived = 0.0 if arrivals is None else arrivals.waited_seconds
        meter.waits_since = begun = time.monotonic_ns()
        try:
            return future.result() if arrivals is None else arrivals.result(future)
        finally:
            meter.waits_since = None
            meter.add(READ_WAIT, time.monotonic_ns() - begun)
            if arrivals is not None:
                meter.add(ARRIVAL_WAIT, int(1e9 * (arrivals.waited_seconds - arrived)))
    except Exception as error:  # noqa: BLE001 - the batch that has it raises it again
        log.debug("a run of batches failed (%s): they are read one by one", first_line(error))
        error.__traceback__ = None  # whose frames hold the future, which holds the error
        return None


def _gathered(
    groups: RowGroups, order: Ints | None, spans: Sequence[tuple[Span, AnyHeld]]
) -> tuple[pa.RecordBatch, list[int] | None]:
    """The rows of a run; and where each of its batches ends if that differs, as it does in batches by tokens."""
    plan, ends = groups.plan, None
    with _fitting("a column"):
        parts = [part for span, held in spans for part in held.slices(span.low, span.high)]
    sizes = [span.high - span.low for span, _ in spans]
    if plan.packs is not None and plan.pack is None:
        batches = [held.lengths(span.low, span.high) for span, held in spans if isinstance(held, Held)]
        lengths, sizes = np.concatenate(batches), [int(counts.sum()) for counts in batches]
        begins = np.cumsum(lengths) - lengths
        if order is not None:
            begins, lengths = begins[order], lengths[order]
        order, ends = ranges_of(begins, lengths), [0, *np.cumsum(lengths).tolist()]
    arrays: dict[str, pa.Array] = {}
    for position, name in enumerate(groups.columns):
        with _fitting(f"column {name!r}"):
            column: Column = join([part[position] for part in parts])
            column = column if order is None else column.take(order)
        arrays[name] = to_arrow(replace(column, steps=0) if column.steps and plan.axis(name) is None else column)
    if plan.partitions:
        files = np.repeat([held.file for _, held in spans], sizes)
        files = files if order is None else files.take(order)
        for name in plan.partitions:
            axis, kind = plan.axis(name), plan.row_schema.field(name).type
            numbers = pa.array(files if axis is None else np.repeat(files, axis))
            array = pc.take(plan.data.index.partitions[name], numbers).cast(kind).combine_chunks()
            arrays[name] = array if axis is None else pa.FixedSizeListArray.from_arrays(array, axis)
    schema = groups.schema
    found = [arrays[name] for name in schema.names]
    for position, (array, kind) in enumerate(zip(found, schema.types, strict=True)):
        if array.type != kind:  # of more than 2 GB
            schema = schema.set(position, schema.field(position).with_type(array.type))
    return pa.RecordBatch.from_arrays(found, schema=schema), ends


@contextmanager
def _fitting(subject: str) -> Iterator[None]:
    """Say what to do where a batch has more of a nested column than Arrow's 32-bit offsets hold."""
    try:
        yield
    except (pa.ArrowCapacityError, pa.ArrowInvalid) as error:
        raise UsageError(subject, f"a batch has too much of it ({first_line(error)})", SMALLER) from error
