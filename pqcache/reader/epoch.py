"""The batches of an epoch, without torch: what ``pqcache.torch`` and ``Cache.batches`` use."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.batch_layout import Finished
from pqcache.reader.columns import form_of, to_arrow
from pqcache.reader.memory_budget import Room, fit, room_for
from pqcache.reader.open import open_data
from pqcache.reader.order.order import Order, Part, batches_of_lanes, check_numbers, check_rank, check_seed
from pqcache.reader.read_plan import View, view_of
from pqcache.reader.row_group_reader import cpu_count, release_unused
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.sequential import in_sequence
from pqcache.reader.shuffle.lane_reader import LaneReader
from pqcache.reader.shuffle.scatter import Source
from pqcache.store.selected_rows import SelectedRows
from pqcache.system.buffer_pool import BufferPool
from pqcache.system.fork_safe_threads import ForkSafeThreadPool
from pqcache.units import parse_size

_ROWS_AT_ONCE = 256  # when rows are wanted one by one


def batches(
    view: View, order: Order, indices: Sequence[int], total: int, room: Room, into: BufferPool | None = None
) -> Generator[tuple[int, Finished]]:
    """Yield (global index, columns) for batches of an epoch of ``total``, decoding ahead on threads.

    ``indices`` are one ``Part``'s; those from ``total`` on are padding and repeat the epoch from its start.
    Batches are made in memory of ``into``.
    """
    for index, columns, _ in _read(view, order, indices, total, room, order.batch_size, into):
        yield index, columns


def samples(
    view: View, order: Order, indices: Sequence[int], total: int, room: Room
) -> Generator[tuple[int, Finished, int]]:
    """Yield (global index, columns, row) for single rows: ``order.batch_size`` is 1.

    The columns hold several coming rows of the same lane (``index % total % order.lanes``); they are new ones
    whenever ``row`` is 0.
    """
    yield from _read(view, order, indices, total, room, _ROWS_AT_ONCE)


def _read(
    view: View,
    order: Order,
    indices: Sequence[int],
    total: int,
    room: Room,
    rows_at_once: int,
    into: BufferPool | None = None,
) -> Generator[tuple[int, Finished, int]]:
    if not indices:
        return
    memory = into or view.memory

    finish = partial(view.finish, memory)

    with _Pool(room) as pool:
        if not order.shuffle:
            wanted = ((index, index % total) for index in indices)
            source = Source(
                load=view.load,
                forms=view.load_forms,
                finish=finish,
                memory=view.memory,
                batches=memory,
                threads=pool,
                ahead=max(1, room.threads),
            )
            for index, columns in in_sequence(source, order, wanted):
                yield index, columns, 0
            return

        def reader(lane: int, batch: int, rows: int) -> LaneReader[Finished]:
            return LaneReader(source, order.lane(lane), batch * order.batch_size, rows)

        first_of_lane = _first_of_lanes(indices, order.lanes, total)
        ahead = 0 if room.threads == 1 else -(-room.threads // max(1, len(first_of_lane)))
        arenas = view.places(room.places)
        load = partial(view.load, arenas=arenas)
        source = Source(
            load=load,
            forms=view.load_forms,
            finish=finish,
            memory=view.memory,
            batches=memory,
            threads=pool,
            ahead=ahead,
            stay=room.stay,
            arenas=arenas,
        )
        readers = {lane: reader(lane, batch, rows_at_once) for lane, batch in first_of_lane.items()}
        held: dict[int, tuple[Finished, int, int]] = {}  # columns, how many are left, done
        nothing, lap = Finished(0, [], {}), indices[0] // total
        for index, lane, batch in batches_of_lanes(indices, order.lanes, total):
            if index // total > lap:  # padding: the epoch begins again
                lap = index // total
                readers.clear()
                held.clear()
            columns, left, done = held.get(lane, (nothing, 0, 0))
            if not left:
                if lane not in readers:
                    readers[lane] = reader(lane, batch, rows_at_once)
                columns = next(readers[lane])
                left, done = -(-columns.rows // order.batch_size), 0
            held[lane] = columns, left - 1, done + 1
            yield index, columns, done


def _first_of_lanes(indices: Sequence[int], lanes: int, total: int) -> dict[int, int]:
    """Return the lanes that ``indices`` begin with, with each one's first batch; padding is left out."""
    found: dict[int, int] = {}
    for index, lane, batch in batches_of_lanes(indices[:lanes], lanes, total):
        if index >= total:
            break
        found.setdefault(lane, batch)
    return found


class _Pool:
    """A thread pool that is not waited for when its user stops half way.

    What its threads leave behind in Arrow's allocator goes back to the system, unless there is room for long rows to
    stay: the next epoch will want as much, and fresh memory costs it more than anything it does with it.
    """

    def __init__(self, room: Room) -> None:
        self._pool = ForkSafeThreadPool(room.threads)
        self._keep = room.stay

    def __enter__(self) -> ForkSafeThreadPool:
        return self._pool

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._keep:
            release_unused()


def record_batches(
    view: View, order: Order, indices: Sequence[int], total: int, room: Room | None = None
) -> Generator[tuple[int, pa.RecordBatch]]:
    """Yield (global index, Arrow record batch) as ``batches`` does."""
    axes = _axes(view)
    schema = _schema_of(view)
    with closing(batches(view, order, indices, total, room or Room(cpu_count()))) as found:
        for index, columns in found:
            each = columns.columns()
            arrays = {name: to_arrow(each[name]) for name in view.columns}
            for name, axis in axes.items():
                arrays[name] = pa.FixedSizeListArray.from_arrays(arrays[name], axis)
            yield index, pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def _axes(view: View) -> dict[str, int]:
    """Return how many steps of a sequence each column has; columns without such an axis are left out."""
    return {name: axis for name in view.columns if (axis := view.axis(name)) is not None}


def _schema_of(view: View) -> pa.Schema:
    types = {f.name: form_of(f).type for f in view.row_schema}
    types.update({name: pa.list_(types[name], axis) for name, axis in _axes(view).items()})
    return pa.schema([(f.name, types[f.name], f.nullable, f.metadata) for f in view.row_schema])


def read_rows(path: str | os.PathLike[str], rows: SelectedRows, columns: Sequence[str] | None) -> pa.Table:
    """Return ``rows`` in the order of the files; see ``Cache.read``."""
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as Cache.lookup returns them")
    if len(rows):
        return pa.Table.from_batches(list(read_batches(path, columns, shuffle=False, rows=rows)))
    data, lease = open_data(path, rows.snapshot or None)
    with lease or nullcontext():
        return _schema_of(view_of(data, columns)).empty_table()


def read_batches(
    path: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    filters: Any = None,
    batch_size: int = 4096,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    memory: str | int = "2GB",
    window: int | None = None,
    lanes: int | None = None,
    num_replicas: int = 1,
    rank: int = 0,
    start: int = 0,
    snapshot: str | None = None,
    rows: SelectedRows | None = None,
    sequence: SequenceOf | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield an epoch as Arrow record batches; see ``Cache.batches``, which says what the arguments are."""
    check_seed(seed)
    check_numbers(batch_size=batch_size, window=window, lanes=lanes)
    check_rank(num_replicas, rank, lanes)
    if isinstance(epoch, bool) or epoch < 0 or start < 0:
        raise UsageError(f"epoch={epoch}, start={start}", "both count from 0")
    budget = parse_size(memory)
    lanes = lanes or num_replicas
    data, lease = open_data(path, snapshot or getattr(rows, "snapshot", "") or None)
    try:
        view = view_of(data, columns, filters, rows, sequence=sequence)
        if window is None:
            window, piece = fit(view, budget, lanes // num_replicas, path) if shuffle else (1, 0)
            view = view.in_pieces(piece)
        order = Order(
            counts=view.counts,
            batch_size=batch_size,
            lanes=lanes,
            window=window,
            seed=seed,
            epoch=epoch,
            shuffle=shuffle,
        )
        total = order.batches(drop_last)
        part = Part(total=total, lanes=lanes, ranks=num_replicas, rank=rank, start=start, drop_last=drop_last)
        room = Room(cpu_count())
        if shuffle:
            room = room_for(view, budget, lanes // num_replicas, lanes, window, room.threads)
    except BaseException:
        if lease is not None:
            lease.close()
        raise

    def epoch_of() -> Iterator[pa.RecordBatch]:
        try:
            with lease or nullcontext(), closing(record_batches(view, order, part.indices(), total, room)) as found:
                for _, batch in found:
                    yield batch
        finally:
            release_unused()  # also where the reader stops half way

    found = epoch_of()
    if lease is not None:
        weakref.finalize(found, lease.close)  # where nobody begins to iterate
    return found
