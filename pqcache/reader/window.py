"""The batches of an epoch as Arrow record batches: row groups are decoded ahead on threads, mixed, and cut.

    line     the rows of a lane, or of the files in order: which rows of which row groups come where (`reader/order.py`)
    run      some upcoming batches of a line, gathered together: one take for each column
    window   the decoded row groups for upcoming runs of a line

A run is defined by the numbers of its batches alone, so an epoch can begin anywhere, and threads gather several runs at
once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError, first_line
from pqcache.reader.arriving import ArrivalQueue, arrival_queue, row_groups_of_batches, row_groups_of_lanes
from pqcache.reader.columns import Column, join, to_arrow
from pqcache.reader.decode import AnyHeld, Held, HeldPlaces, RowGroups
from pqcache.reader.memory_budget import Budget
from pqcache.reader.order import Ints, Lane, Order, batches_by_lane
from pqcache.reader.row_hashes import ROW_HASH, Hashes
from pqcache.reader.selection.exclude import LEFT_OUT
from pqcache.reader.stats import ARRIVAL_WAIT, GATHER, READ_WAIT
from pqcache.store.key_lookup import ranges_of
from pqcache.system.threads import ForkSafeThreadPool

log = logging.getLogger("pqcache.reader")

T = TypeVar("T")

_RUN_ROWS = 1 << 17  # of a run, at most: where each row is and goes to takes some numbers
SMALLER = "choose a smaller batch_size, or leave the column out with columns="


class Group(NamedTuple):
    """Batches that were gathered together: batch i is rows ``ends[i]`` up to ``ends[i + 1]``.

    For a proof, ``hashes`` has those of batch i from ``hash_ends[i]`` on, including rows left out.
    """

    rows: pa.RecordBatch
    ends: list[int]
    hashes: Hashes | None = None
    hash_ends: Sequence[int] = ()

    def batches(self) -> list[pa.RecordBatch]:
        """The batches, each with memory of its own."""
        if len(self.ends) == 2:
            return [self.rows]
        slices = [self.rows.slice(low, high - low) for low, high in pairwise(self.ends)]
        return [pa.RecordBatch.from_arrays(list(map(_copied, part.columns)), schema=part.schema) for part in slices]

    def with_hashes_apart(self) -> Group:
        """The same, with the column of hashes taken out of the rows."""
        return Group(self.rows.drop_columns([ROW_HASH]), self.ends, self.rows.column(ROW_HASH).to_numpy(), self.ends)

    def without_left_out(self) -> Group:
        """The group without the rows, or sequences, to leave out."""
        gone = self.rows.column(LEFT_OUT)
        if pa.types.is_fixed_size_list(gone.type):
            gone = pa.array(gone.flatten().to_numpy(zero_copy_only=False).reshape(len(gone), -1).any(axis=1))
        kept, rows = pc.invert(gone), self.rows.drop_columns([LEFT_OUT])
        before = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
        return self._replace(rows=rows.filter(kept), ends=before[self.ends].tolist())


def _copied(array: pa.Array) -> pa.Array:
    return pa.concat_arrays([array, array.slice(0, 0)])  # of one array it would be that


class Span(NamedTuple):
    """Rows ``low`` up to ``high`` of span ``number`` of a line; later runs need only rows from ``kept`` on."""

    number: int
    low: int
    high: int
    kept: int


class Places(NamedTuple):
    """The rows of a run: those of ``spans``, concatenated and then taken in ``order`` (None: as they are)."""

    spans: list[Span]
    order: Ints | None


class ShuffledLine:
    """A lane of a shuffled epoch as a line of rows, in spans of row groups."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.rows, self.spans = lane.rows, len(lane.row_groups)
        self._offsets: dict[int, Ints] = {}
        self._at = (0, 0)  # a block, and the rows before it
        self._order: tuple[int, Ints] | None = None  # of the last block, of which the next run may have rows too

    def number(self, span: int) -> int:
        """The number of a span's row group in the plan."""
        return int(self._lane.row_groups[span])

    def is_read(self, span: int) -> bool:
        return True

    def load(self, groups: RowGroups, span: int, first: int, parts: int) -> AnyHeld:
        """Decode the rows of a span from row ``first`` on, to be held in ``parts`` parts."""
        lane, cuts = self._lane, []
        if parts > 1:
            offsets = lane.bucket_offsets(span)
            cuts = offsets[:: -(-len(offsets) // parts)][1:].tolist()
        number, low, high = (int(of[span]) for of in (lane.row_groups, lane.lows, lane.highs))
        return groups.load(number, low, high, lane.row_order(span), first, cuts)

    def places(self, ranges: Sequence[tuple[int, int]]) -> Places:
        """The location of ascending ranges of rows."""
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
        """The first row of a span that belongs to each of ``blocks``, or to a later one."""
        offsets = self._offsets_of(span)
        return offsets[np.clip(blocks - self._lane.first_block(span), 0, len(offsets) - 1)]

    def _offsets_of(self, span: int) -> Ints:
        found = self._offsets.get(span)
        if found is None:
            found = self._offsets[span] = self._lane.bucket_offsets(span)
        return found

    def _blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """The blocks of ranges of rows: each block's number, and its rows in the range, in order."""
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
    """The rows of an unshuffled epoch: batch ``first`` and every ``apart``-th batch after it are read."""

    def __init__(self, order: Order, first: int, apart: int) -> None:
        self.rows, self.spans = order.rows, len(order.counts)
        self._batch_size, self._first, self._apart = order.batch_size, first, apart
        self._counts = order.counts
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(order.counts)])

    def number(self, span: int) -> int:
        return span

    def is_read(self, span: int) -> bool:
        """Whether any of the batches has rows of a span."""
        low, high = self._starts[span] // self._batch_size, (self._starts[span + 1] - 1) // self._batch_size
        return bool((self._first - low) % self._apart <= high - low)

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


Line = ShuffledLine | FileLine


@dataclass(eq=False)
class _Run(Generic[T]):
    """Some batches of a line that are gathered together, and the row groups they need."""

    line: Line
    ranges: list[tuple[int, int]]  # the rows of each batch
    spans: list[tuple[Span, Future[AnyHeld]]]
    result: Future[T]

    def end(self) -> None:
        """Free rows that only this run and earlier ones needed."""
        for span, future in self.spans:
            if not future.cancelled() and future.exception() is None and isinstance(held := future.result(), Held):
                held.drop(span.kept)


@dataclass(eq=False)
class _Window:
    """A line, its row groups that are decoded or being decoded, by span, and the number of its next batch."""

    line: Line
    held: dict[int, Future[AnyHeld]] = field(default_factory=dict)
    next: int = 0


class _EpochReader(Generic[T]):
    """Submits decoding and gathering to threads, and waits for the results."""

    def __init__(
        self,
        groups: RowGroups,
        order: Order,
        make: Callable[[Group], T],
        apart: int,
        ahead: int,
        pool: ForkSafeThreadPool,
        arrivals: ArrivalQueue | None,
    ) -> None:
        self._groups, self._order, self._budget, self._make = groups, order, groups.budget, make
        self._apart, self._ahead, self._pool, self._arrivals = apart, ahead, pool, arrivals
        self._row_bytes = groups.sizes.selected / np.maximum(groups.plan.counts, 1)
        self.together = 1  # how many batches of a lane should be gathered together
        self._windows: dict[int, _Window] = {}  # by lane

    def submit(self, batches: Sequence[tuple[int, int, int]]) -> list[tuple[int, _Run[T], int]]:
        """Have the first of ``batches`` (index, lane, number in the lane) decoded and gathered, a run for each lane.

        Returns the index of each with its run and its number in the run. Takes only as many as fit into memory
        together, and none after padding has begun the epoch again.
        """
        batch_size = self._order.batch_size
        while True:
            runs: dict[int, list[tuple[int, int]]] = {}  # by lane
            for at, (index, lane, number) in enumerate(batches):
                mine = runs.setdefault(lane, [])
                if mine and number <= mine[-1][1]:
                    batches = batches[:at]
                    break
                mine.append((index, number))
            windows = {lane: self._window(lane, mine[0][1]) for lane, mine in runs.items()}
            ranges, places = {}, {}
            for lane, window in windows.items():
                lows = [number * batch_size for _, number in runs[lane]]
                ranges[lane] = [(low, min(low + batch_size, window.line.rows)) for low in lows]
                places[lane] = window.line.places(ranges[lane])
            sizes = {lane: self._size(of.line, ranges[lane], places[lane]) for lane, of in windows.items()}
            if all(len(runs[lane]) == 1 or size <= 2 * self._budget.run_bytes for lane, size in sizes.items()):
                break
            batches = batches[: -(-len(batches) // 2)]
        placed: dict[int, tuple[_Run[T], int]] = {}
        together = 2 * self.together
        for lane, window in windows.items():
            run = self._run(window, ranges[lane], places[lane])
            window.next = runs[lane][-1][1] + 1
            placed |= {index: (run, at) for at, (index, _) in enumerate(runs[lane])}
            likely = self._budget.run_bytes / max(sizes[lane], 1) * len(ranges[lane])
            together = min(together, int(likely), _RUN_ROWS // (self._apart * batch_size))
        self.together = max(1, together)
        return [(index, *placed[index]) for index, _, _ in batches]

    def _window(self, lane: int, number: int) -> _Window:
        """The window of a lane; a new one if the epoch begins again."""
        window, order = self._windows.get(lane), self._order
        if window is None or number < window.next:
            line = ShuffledLine(order.lane(lane)) if order.shuffle else FileLine(order, number, self._apart)
            window = self._windows[lane] = _Window(line)
        return window

    def _run(self, window: _Window, ranges: list[tuple[int, int]], places: Places) -> _Run[T]:
        line, first, last = window.line, places.spans[0].number, places.spans[-1].number + 1
        low = {span.number: span.low for span in reversed(places.spans)}  # a span may be there for several batches
        coming = range(last, min(last + self._ahead, line.spans))
        for span in (*low, *(span for span in coming if line.is_read(span))):
            if span not in window.held:
                window.held[span] = self._load(line, span, low.get(span, 0))
        for span in [span for span in window.held if span < first]:
            del window.held[span]
        spans = [(span, window.held[span.number]) for span in places.spans]
        gather = partial(self._gather, ranges, places.order, spans)
        return _Run(line, ranges, spans, self._pool.submit_after([future for _, future in spans], gather))

    def _size(self, line: Line, ranges: Sequence[tuple[int, int]], places: Places) -> float:
        """The approximate bytes of batches, including those between them that others read."""
        held = [(span.high - span.low, self._row_bytes[line.number(span.number)]) for span in places.spans]
        row = sum(rows * size for rows, size in held) / max(1, sum(rows for rows, _ in held))
        return float(self._apart * row * sum(high - low for low, high in ranges))

    def _load(self, line: Line, span: int, first: int) -> Future[AnyHeld]:
        parts = self._budget.parts
        if self._arrivals is None:
            return self._pool.submit(line.load, self._groups, span, first, parts)
        return self._arrivals.submit(line.number(span), line.load, self._groups, span, first, parts)

    def _gather(
        self, ranges: Sequence[tuple[int, int]], order: Ints | None, spans: Sequence[tuple[Span, Future[AnyHeld]]]
    ) -> T:
        held = [(span, future.result()) for span, future in spans if span.high > span.low]
        with self._groups.meter.timed(GATHER):
            rows, ends = _gathered(self._groups, order, held)
        group = Group(rows, ends or np.cumsum([0, *(high - low for low, high in ranges)]).tolist())
        group = group.with_hashes_apart() if self._groups.plan.has_hashes else group
        return self._make(group.without_left_out() if self._groups.plan.left_out else group)

    def result(self, run: _Run[T], number: int) -> tuple[T, int]:
        """Wait for a batch of a run; return its group and its number in the group."""
        try:
            return self._wait(run.result), number
        except Exception as error:
            log.debug("a run of batches failed (%s): they are read one by one", first_line(error), exc_info=error)
            error.__traceback__ = None  # whose frames hold the future, which holds the error
        held, places = {span.number: future for span, future in run.spans}, run.line.places([run.ranges[number]])
        spans = [(span, held[span.number]) for span in places.spans]
        return self._gather([run.ranges[number]], places.order, spans), 0

    def _wait(self, future: Future[T]) -> T:
        if future.done():
            return future.result()
        meter, arrivals = self._groups.meter, self._arrivals
        arrived = 0.0 if arrivals is None else arrivals.waited_seconds
        meter.waits_since = begun = time.monotonic_ns()
        try:
            return future.result() if arrivals is None else arrivals.result(future)
        finally:
            meter.waits_since = None
            meter.add(READ_WAIT, time.monotonic_ns() - begun)
            if arrivals is not None:
                meter.add(ARRIVAL_WAIT, int(1e9 * (arrivals.waited_seconds - arrived)))


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
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
    make: Callable[[Group], T],
) -> Generator[tuple[int, T, int]]:
    """Yield (global index, group, number in the group) for batches of an epoch of ``total``.

    ``indices`` are one ``EpochShare``'s; those from ``total`` on are padding and repeat the epoch from its start.
    ``make`` is called with each group on a thread. A group that fails is made again batch by batch, so that the batches
    before the failing one are still yielded.
    """
    if not len(indices):
        return
    budget, lanes = groups.budget, order.lanes if order.shuffle else 1
    begins: dict[int, int] = {}  # the first batch of each lane
    for _, lane, number in batches_by_lane(indices[: order.lanes], lanes, total):
        begins.setdefault(lane, number)
    apart = 1 if order.shuffle or len(indices) < 2 else max(1, indices[1] - indices[0])
    ahead = -(-budget.decoding // len(begins))
    coming = batches_by_lane(indices, lanes, total)
    waiting: list[tuple[int, int, int]] = []  # as they were too large for the last round
    rounds: deque[list[tuple[int, _Run[T], int]]] = deque()  # a run of each lane
    with (
        _wanting(groups, order, begins, indices, total),
        _threads(budget) as pool,
        arrival_queue(groups.plan.data.arrivals, groups.plan.row_groups, pool) as arrivals,
    ):
        reader = _EpochReader(groups, order, make, apart, ahead, pool, arrivals)
        while True:
            while len(rounds) < budget.runs:
                wanted = reader.together * len(begins)
                waiting += islice(coming, max(0, wanted - len(waiting)))
                if not waiting:
                    break
                rounds.append(reader.submit(waiting[:wanted]))
                del waiting[: len(rounds[-1])]
            if not rounds:
                return
            for index, run, number in rounds[0]:
                yield index, *reader.result(run, number)
                if number == len(run.ranges) - 1:
                    run.end()
            del run  # so that the memory of its batches is used again by the next
            rounds.popleft()


@contextmanager
def _threads(budget: Budget) -> Iterator[ForkSafeThreadPool]:
    """Threads that are not waited for if their user stops early."""
    pool = ForkSafeThreadPool(max(budget.threads, budget.decoding), budget.decoding)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wanting(
    groups: RowGroups, order: Order, begins: dict[int, int], indices: Sequence[int], total: int
) -> AbstractContextManager[None]:
    """While entered, tell a run that still fetches the files which row groups are needed first."""
    plan = groups.plan
    if plan.data.arrivals is None or plan.data.arrivals.is_complete:
        return nullcontext()
    if order.shuffle:
        wanted = row_groups_of_lanes(order, begins)
    else:
        wanted = row_groups_of_batches(order, [index % total for index in indices])
    return plan.data.arrivals.wanting(plan.row_groups[wanted])


def _gathered(
    groups: RowGroups, order: Ints | None, spans: Sequence[tuple[Span, AnyHeld]]
) -> tuple[pa.RecordBatch, list[int] | None]:
    """The rows of a run; for batches by tokens, which differ in length, also the end of each."""
    plan, ends = groups.plan, None
    with _fitting("a column"):
        parts = [part for span, held in spans for part in held.slices(span.low, span.high)]
    sizes = [span.high - span.low for span, _ in spans]
    if plan.packs is not None and plan.pack is None:
        batches = [held.lengths(span.low, span.high) for span, held in spans if isinstance(held, HeldPlaces)]
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
    """Advise what to do if a batch's nested column exceeds Arrow's 32-bit offsets."""
    try:
        yield
    except (pa.ArrowCapacityError, pa.ArrowInvalid) as error:
        raise UsageError(subject, f"a batch has too much of it ({first_line(error)})", SMALLER) from error
