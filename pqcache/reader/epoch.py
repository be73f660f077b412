"""The batches of an epoch as columns: what ``pqcache.torch`` and ``Cache.batches`` read with."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from pqcache.reader.arriving.arrival_queue import ArrivalQueue, arrival_queue
from pqcache.reader.arriving.wanted_order import row_groups_of_batches, row_groups_of_lanes, without_repeats
from pqcache.reader.columns.batch_layout import FinishedBatch
from pqcache.reader.decode_budget import DecodeBudget
from pqcache.reader.order.epoch_order import Order
from pqcache.reader.order.epoch_share import batches_by_lane
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.reader.row_group_reader import release_unused
from pqcache.reader.sequential import in_file_order
from pqcache.reader.shuffle.lane_reader import LaneReader
from pqcache.reader.shuffle.scatter import ReadContext
from pqcache.system.buffer_pool import BufferPool
from pqcache.system.fork_safe_threads import ForkSafeThreadPool

_ROWS_AT_ONCE = 256  # when rows are wanted one by one


def batches(
    loader: RowGroupLoader,
    order: Order,
    indices: Sequence[int],
    total: int,
    budget: DecodeBudget,
    into: BufferPool | None = None,
) -> Generator[tuple[int, FinishedBatch]]:
    """Yield (global index, columns) for batches of an epoch of ``total``, decoding ahead on threads.

    ``indices`` are one ``EpochShare``'s; those from ``total`` on are padding and repeat the epoch from its start.
    Batches are made in memory of ``into`` (None: the loader's). The caller counts them.
    """
    for index, columns, _ in _read(loader, order, indices, total, budget, order.batch_size, into):
        yield index, columns


def samples(
    loader: RowGroupLoader, order: Order, indices: Sequence[int], total: int, budget: DecodeBudget
) -> Generator[tuple[int, FinishedBatch, int]]:
    """Yield (global index, columns, row) for single rows: ``order.batch_size`` is 1.

    The columns hold several coming rows of the same lane (``index % total % order.lanes``); they are new ones
    whenever ``row`` is 0.
    """
    for index, columns, row in _read(loader, order, indices, total, budget, _ROWS_AT_ONCE):
        if row == 0:
            loader.meter.made(0, columns.rows, columns.bytes)
        yield index, columns, row


def _read(
    loader: RowGroupLoader,
    order: Order,
    indices: Sequence[int],
    total: int,
    budget: DecodeBudget,
    rows_at_once: int,
    into: BufferPool | None = None,
) -> Generator[tuple[int, FinishedBatch, int]]:
    if not indices:
        return
    if order.shuffle:
        lanes = max(1, len(_first_batches(indices, order.lanes, total)))
        ahead = 0 if budget.threads == 1 else -(-budget.decoding // lanes)
        arenas = loader.arenas_for(budget.arena_slots)
    else:
        lanes, ahead, arenas = 1, max(1, budget.decoding), {}
    memory, plan = into or loader.memory, loader.plan
    with (
        _wanting(loader, order, indices, total),
        _decoding_threads(budget) as threads,
        arrival_queue(plan.data.arrivals, plan.row_groups, plan.columns_read, threads) as arrivals,
    ):
        context = ReadContext(
            load=loader.measured(partial(loader.load, arenas=arenas)),
            load_around=loader.measured(partial(loader.load_around, arenas=arenas)),
            forms=loader.forms,
            gathered_forms=loader.gathered_forms,
            finish=partial(loader.finish, memory),
            memory=loader.memory,
            batches=memory,
            threads=threads,
            ahead=ahead,
            lanes=lanes,
            row_group_bytes=budget.row_group_bytes,
            stretch_bytes=_stretch_bytes(budget, plan, arrivals),
            stretches=budget.stretches,
            keep_decoded=budget.keep_decoded,
            arenas=arenas,
            arrivals=arrivals,
            meter=loader.meter,
        )
        if order.shuffle:
            yield from _shuffled(context, order, indices, total, rows_at_once)
        else:
            for index, columns in in_file_order(context, order, ((index, index % total) for index in indices)):
                yield index, columns, 0


def _shuffled(
    context: ReadContext[FinishedBatch], order: Order, indices: Sequence[int], total: int, rows_at_once: int
) -> Generator[tuple[int, FinishedBatch, int]]:
    def reader(lane: int, batch: int) -> LaneReader[FinishedBatch]:
        return LaneReader(context, order.lane(lane), batch * order.batch_size, rows_at_once)

    readers = {lane: reader(lane, batch) for lane, batch in _first_batches(indices, order.lanes, total).items()}
    open_batches: dict[int, tuple[FinishedBatch, int, int]] = {}  # by lane: columns, items left in them, items used
    coming: dict[int, int] = {}  # the next batch of each lane
    nothing, lap = FinishedBatch(0, [], {}), indices[0] // total
    for index, lane, batch in batches_by_lane(indices, order.lanes, total):
        if index // total > lap:  # padding: the epoch begins again
            lap = index // total
            readers.clear()
            open_batches.clear()
            coming.clear()
        if coming.get(lane, batch) != batch:  # what another worker, or a changed mix, reads elsewhere lies between
            readers.pop(lane, None)
            open_batches.pop(lane, None)
        coming[lane] = batch + 1
        columns, left, used = open_batches.get(lane, (nothing, 0, 0))
        if not left:
            if lane not in readers:
                readers[lane] = reader(lane, batch)
            columns = next(readers[lane])
            left, used = -(-columns.rows // order.batch_size), 0
        open_batches[lane] = columns, left - 1, used + 1
        yield index, columns, used


def _first_batches(indices: Sequence[int], lanes: int, total: int) -> dict[int, int]:
    """Return the lanes that ``indices`` begin with, with each one's first batch; padding is left out."""
    found: dict[int, int] = {}
    for index, lane, batch in batches_by_lane(indices[:lanes], lanes, total):
        if index >= total:
            break
        found.setdefault(lane, batch)
    return found


def _wanting(loader: RowGroupLoader, order: Order, indices: Sequence[int], total: int) -> AbstractContextManager[None]:
    """Return what tells, while it is entered, which row groups are needed, where they are still arriving."""
    plan, arrivals = loader.plan, loader.plan.data.arrivals
    if arrivals is None or arrivals.is_complete:
        return nullcontext()
    if order.shuffle:
        wanted = row_groups_of_lanes(order, _first_batches(indices, order.lanes, total))
    else:
        wanted = row_groups_of_batches(order, [index % total for index in indices])
    return arrivals.wanting(without_repeats(plan.row_groups[wanted]), plan.columns_read)


def _stretch_bytes(budget: DecodeBudget, plan: ReadPlan, arrivals: ArrivalQueue | None) -> int:
    """Return the bytes of blocks that are gathered at once; 0 for a few only.

    Batches do not wait for later row groups that are still arriving; and of packed rows more is made than is counted.
    """
    return budget.stretch_bytes if arrivals is None and plan.packs is None else 0


@contextmanager
def _decoding_threads(budget: DecodeBudget) -> Iterator[ForkSafeThreadPool]:
    """Yield threads that are not waited for when their user stops half way.

    What they leave behind in Arrow's allocator goes back to the system, unless decoded rows are kept: the next epoch
    will want as much, and fresh memory costs it more than anything it does with it.
    """
    threads = ForkSafeThreadPool(budget.threads, budget.decoding)
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        if not budget.keep_decoded:
            release_unused()
