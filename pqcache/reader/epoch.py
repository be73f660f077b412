"""The batches of an epoch, without torch: what ``pqcache.torch`` and ``Cache.batches`` use."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pyarrow as pa

from pqcache.reader.columns import Column, form_of, to_arrow
from pqcache.reader.order import Order, batches_of_lanes
from pqcache.reader.view import View
from pqcache.reader.window import LaneReader, in_sequence


def cpu_count() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batches(
    view: View, order: Order, indices: range, total: int, threads: int
) -> Generator[tuple[int, dict[str, Column]]]:
    """Yield (global index, columns) for batches of an epoch of ``total``, decoding ahead on threads.

    ``indices`` are one ``Part``'s; those from ``total`` on are padding and repeat the epoch from its start.
    """
    if not indices:
        return
    with _Pool(threads) as pool:
        if not order.shuffle:
            wanted = ((index, index % total) for index in indices)
            ahead = max(1, threads)
            for index, rows in in_sequence(order, wanted, view.load, view.load_forms, pool, ahead):
                yield index, view.finish(rows)
            return

        def reader(lane: int, batch: int) -> LaneReader:
            load, forms = view.load, view.load_forms
            return LaneReader(order.lane(lane), order.batch_size, batch, load, forms, pool, ahead)

        todo = list(_lanes(indices, order.lanes, total))
        ahead = max(1, -(-threads // max(1, len(todo))))
        readers = {lane: reader(lane, batch) for lane, batch in todo}
        for index, lane, batch in batches_of_lanes(indices, order.lanes, total):
            if index < total:
                yield index, view.finish(next(readers[lane]))
            else:
                readers.clear()
                yield index, view.finish(next(reader(lane, batch)))


def _lanes(indices: range, lanes: int, total: int) -> Iterator[tuple[int, int]]:
    """Yield each lane that ``indices`` come from with its first batch, in order, without the padding."""
    seen = set()
    for index, lane, batch in batches_of_lanes(indices, lanes, total):
        if index >= total or lane in seen:
            return
        seen.add(lane)
        yield lane, batch


class _Pool:
    """A thread pool that is not waited for when its user stops half way."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pqcache")

    def __enter__(self) -> ThreadPoolExecutor:
        return self._pool

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def record_batches(
    view: View, order: Order, indices: range, total: int, threads: int | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (global index, Arrow record batch) as ``batches`` does."""
    schema = pa.schema([(f.name, form_of(f).type, f.nullable, f.metadata) for f in view.schema])
    with closing(batches(view, order, indices, total, threads or cpu_count())) as found:
        for index, columns in found:
            yield index, pa.RecordBatch.from_arrays([to_arrow(columns[n]) for n in view.columns], schema=schema)
