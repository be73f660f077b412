"""An epoch as Arrow record batches, in the order in which ParquetDataset yields its batches."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.arrival_stats import arrival_stats
from pqcache.reader.columns.column_data import to_arrow
from pqcache.reader.columns.column_forms import form_of
from pqcache.reader.decode_budget import DecodeBudget, budget_in_file_order, decode_budget
from pqcache.reader.epoch import batches
from pqcache.reader.epoch_loaders import EpochLoaders
from pqcache.reader.memory import Window, check_complete, most_decoded, warn_of_window
from pqcache.reader.meter import WAITED, Meter
from pqcache.reader.open_dataset import LocalDataset, open_local_dataset
from pqcache.reader.options import BatchOptions
from pqcache.reader.order.epoch_order import Order
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.packed_plan import pack_plan
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_rows import PackedRows
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.reader.processes import MIXING, check_alike, of_this_process
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.reader.reading_stats import DatasetStats, dataset_stats
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.reader.row_group_reader import cpu_count, release_unused
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.tables.data_files import FileRules

_PATIENCE = 60.0  # seconds for other ranks to begin an epoch


class RecordBatches(Iterator[pa.RecordBatch]):
    """The record batches of an epoch, one after the other."""

    def __init__(self, batches: Generator[pa.RecordBatch], loader: RowGroupLoader, options: BatchOptions) -> None:
        self._batches, self._loader, self._options = batches, loader, options
        self._begun = False
        loader.meter = Meter()

    def __next__(self) -> pa.RecordBatch:
        meter, asked = self._loader.meter, time.monotonic_ns()
        if not self._begun:
            self._begun = True
            meter.begin(self._options.epoch, asked)
            meter.set_running(True)
        try:
            batch = next(self._batches)
        except BaseException:
            meter.set_running(False)
            raise
        meter.add(WAITED, time.monotonic_ns() - asked)
        return batch

    def close(self) -> None:
        """Stop reading, and let go of the snapshot."""
        self._batches.close()
        self._loader.meter.set_running(False)

    def stats(self) -> DatasetStats:
        """Return what reading has taken so far, and how long batches were waited for; see docs/monitoring.md."""
        meter = self._loader.meter
        arrivals = arrival_stats(self._loader.plan)
        return dataset_stats(meter.counts(), meter.memory(), limit=self._options.memory, arrivals=arrivals)


def read_record_batches(
    path: str | os.PathLike[str], options: BatchOptions, rules: FileRules | None = None
) -> RecordBatches:
    """Return an iterator over the record batches of an epoch; see ``Cache.batches``.

    ``rules`` say which files are read where ``path`` is a plain directory. The dataset is opened, and its snapshot
    leased, before this returns.
    """
    snapshot = options.snapshot or getattr(options.rows, "snapshot", "") or None
    data, lease = open_local_dataset(path, snapshot, rules, options.fill)
    try:
        epoch = _open_epoch(path, data, options)
    except BaseException:
        if lease is not None:
            lease.close()
        raise

    def read() -> Generator[pa.RecordBatch]:
        try:
            if options.compares:
                check_alike(epoch.compared(data, options), _PATIENCE)
            with lease or nullcontext(), closing(epoch.record_batches()) as found:
                for _, batch in found:
                    yield batch
        finally:
            release_unused()  # also where the reader stops half way

    found = RecordBatches(of_this_process(read(), "Cache.batches"), epoch.loader, options)
    if lease is not None:
        weakref.finalize(found, lease.close)  # where nobody begins to iterate
    return found


def read_rows(path: str | os.PathLike[str], rows: SelectedRows, columns: Sequence[str] | None) -> pa.Table:
    """Return ``rows`` in the order of the files; see ``Cache.read``."""
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as Cache.lookup returns them")
    if len(rows):
        return pa.Table.from_batches(
            list(read_record_batches(path, BatchOptions(columns=columns, shuffle=False, rows=rows)))
        )
    data, lease = open_local_dataset(path, rows.snapshot or None)
    with lease or nullcontext():
        return _schema_of(make_read_plan(data, columns)).empty_table()


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """What reading an epoch takes, once the dataset is open."""

    loader: RowGroupLoader
    order: Order
    share: EpochShare
    budget: DecodeBudget

    def compared(self, data: LocalDataset, options: BatchOptions) -> dict[str, tuple[Any, Any]]:
        """What all ranks have to begin alike; see `check_alike`."""
        plan, order = self.loader.plan, self.order
        found = {
            "row_groups": plan.fingerprint,
            "batch_size": order.batch_size,
            "lanes": order.lanes,
            "window": order.window,
            "piece": plan.piece_rows,
            "seed": order.seed,
            "epoch": order.epoch,
            "shuffle": order.shuffle,
            "start": options.start,
            "drop_last": options.drop_last,
        }
        alike = {name: (value, value) for name, value in found.items() if order.shuffle or name not in MIXING}
        return {"snapshot": (data.content, data.snapshot), **alike}

    def record_batches(self) -> Generator[tuple[int, pa.RecordBatch]]:
        return record_batches(self.loader, self.order, self.share.indices(), self.share.total, self.budget)


def _plan_of(data: LocalDataset, options: BatchOptions) -> ReadPlan:
    columns, pack = options.columns, options.pack
    if columns is None and isinstance(pack, Pack):
        columns = pack.columns
    plan = make_read_plan(
        data, columns, options.filters, options.rows, sequence=options.sequence, choice=options.choice
    )
    return plan if pack is None else pack_plan(plan, pack)


def _open_epoch(path: str | os.PathLike[str], data: LocalDataset, options: BatchOptions) -> _Epoch:
    lanes, memory = options.rank_lanes, options.memory
    loaders = EpochLoaders(_plan_of(data, options), options.seed)
    loader = loaders.first
    if options.pack is not None:
        check_complete(loader.sizes, memory, lanes, options.shuffle, path)
    window = Window(options.window or 1)
    if options.shuffle and options.window is not None:
        warn_of_window(loader.sizes, window.row_groups, memory, lanes, path)
    elif options.shuffle or options.rows is None:  # a lookup does not wait for a sample
        window = loader.fit(memory, lanes, options.shuffle, path, options.all_lanes)
    loader = loaders.at(options.epoch).split(window.piece_rows)
    if options.shuffle:
        loader = loader.in_order(options.seed, options.epoch)
    order = Order(
        counts=loader.plan.counts,
        batch_size=1 if isinstance(options.pack, TokenBatches) else options.batch_size,
        lanes=options.all_lanes,
        window=window.row_groups,
        seed=options.seed,
        epoch=options.epoch,
        shuffle=options.shuffle,
    )
    share = EpochShare(
        total=order.batches(options.drop_last),
        lanes=options.all_lanes,
        ranks=options.num_replicas,
        rank=options.rank,
        workers=options.workers,
        worker=options.worker,
        start=options.start,
        drop_last=options.drop_last,
        shuffled=options.shuffle,
    )
    lanes, memory = share.worker_lanes, memory // share.workers
    threads = max(1, cpu_count() // share.workers)
    if options.rows is None:
        loader.most = most_decoded(loader.sizes, memory, lanes if options.shuffle else 1)
    if options.shuffle:
        budget = decode_budget(
            loader.sizes,
            memory,
            lanes=lanes,
            all_lanes=options.all_lanes,
            window=window.row_groups,
            threads=threads,
        )
    elif options.rows is None:
        budget = budget_in_file_order(loader.sizes, memory, threads)
    else:
        budget = _all_cores()
    return _Epoch(loader=loader, order=order, share=share, budget=budget)


def _all_cores() -> DecodeBudget:
    return DecodeBudget(threads=cpu_count(), decoding=cpu_count())


def record_batches(
    loader: RowGroupLoader, order: Order, indices: Sequence[int], total: int, budget: DecodeBudget | None = None
) -> Generator[tuple[int, pa.RecordBatch]]:
    """Yield (global index, Arrow record batch) as ``epoch.batches`` yields columns."""
    plan = loader.plan
    axes, schema = _axes(plan), _schema_of(plan)
    packs = plan.packs.spec if isinstance(plan.packs, PackedRows) else None
    names = plan.columns if packs is None else schema.names
    with closing(batches(loader, order, indices, total, budget or _all_cores())) as found:
        for index, batch in found:
            columns = batch.columns()
            arrays = {name: to_arrow(columns[name]) for name in names}
            if packs is not None:
                arrays = {name: array.flatten() for name, array in arrays.items()}
            for name, axis in axes.items():
                arrays[name] = pa.FixedSizeListArray.from_arrays(arrays[name], axis)
            loader.meter.made(1, batch.rows, batch.bytes)
            yield index, pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def _axes(plan: ReadPlan) -> dict[str, int]:
    """Return how many steps of a sequence each column has; columns without such an axis are left out."""
    if isinstance(plan.packs, PackedRows):
        return dict.fromkeys([*plan.columns, *_ids(plan.packs.spec)], plan.packs.spec.length)
    return {name: axis for name in plan.columns if (axis := plan.axis(name)) is not None}


def _ids(pack: Pack) -> list[str]:
    """Return what tells documents apart in a record batch, in which every column has a value for each sequence."""
    return [name for name in pack.ids if name != "cu_seqlens"]


def _schema_of(plan: ReadPlan) -> pa.Schema:
    if isinstance(plan.packs, PackedRows):
        spec = plan.packs.spec
        items = [(name, plan.row_schema.field(name).type.value_type) for name in plan.columns]
        items += [(name, pa.int32()) for name in _ids(spec)]
        return pa.schema([(name, pa.list_(item, spec.length)) for name, item in items])
    types = {f.name: form_of(f).type for f in plan.row_schema}
    types.update({name: pa.list_(types[name], axis) for name, axis in _axes(plan).items()})
    # a required column of a type that is not read here is null; reading it is refused
    return pa.schema(
        [(f.name, types[f.name], f.nullable or pa.types.is_null(f.type), f.metadata) for f in plan.row_schema]
    )
