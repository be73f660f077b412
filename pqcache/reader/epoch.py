"""Epochs of an open dataset: their plan, order and memory; and an epoch as Arrow record batches."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.options import parsed
from pqcache.reader.columns import Fill, Kind
from pqcache.reader.decode import RowGroups, release_unused
from pqcache.reader.epoch_options import BatchOptions, EpochOptions
from pqcache.reader.memory_budget import Budget, RowGroupSizes, Window, fit, has_pages, warn_of_window
from pqcache.reader.open_dataset import LocalDataset, open_local_dataset
from pqcache.reader.order import EpochShare, Order
from pqcache.reader.ranks import MIXING, check_alike, of_this_process
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.reader.selection.exclude import Exclusions, divided
from pqcache.reader.selection.selection import Counts
from pqcache.reader.stats import WAITED, DatasetStats, Meter, dataset_stats
from pqcache.reader.window import SMALLER, Group, read_groups
from pqcache.store.key_lookup import SelectedRows
from pqcache.store.snapshot import closed_on_error
from pqcache.store.tables.data_files import FileRules
from pqcache.system.processes import cpu_count

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch, readable from any batch on."""

    groups: RowGroups
    order: Order

    @property
    def plan(self) -> ReadPlan:
        """The plan of reading."""
        return self.groups.plan

    def read(self, indices: Sequence[int], total: int, make: Callable[[Group], T]) -> Generator[tuple[int, T, int]]:
        """Yield (global index, group, batch in the group); see `read_groups`."""
        return read_groups(self.groups, self.order, indices, total, make)


class Epochs:
    """The epochs of a plan, for any number of lanes, ranks and workers.

    Attributes:
        first: the row groups of epoch 0, which determine windows.
        set_window: the window set by the user or a state; None for as large as ``memory`` allows.
        sizes: the sizes of the row groups that determine windows, if those of ``first`` don't suffice because nodes
            hold shares of a dataset.
    """

    def __init__(
        self,
        data: LocalDataset,
        columns: Sequence[str] | None,
        path: str | os.PathLike[str],
        options: EpochOptions,
        meter: Meter,
        *,
        counts: Counts | None = None,
        ragged: Collection[str] | None = None,
        fills: Callable[[Mapping[str, Kind]], Mapping[str, Fill]] | None = None,
        exclusions: Exclusions | None = None,
        has_hashes: bool = False,
    ) -> None:
        """Plan the epochs of an open dataset; see `make_read_plan`.

        ``path`` names the dataset in messages. ``fills`` gives replacements of nulls. ``exclusions`` replace those of
        the options and say from which epoch on rows are left out; in earlier epochs they are dropped after gathering.
        With ``has_hashes``, rows have the column `ROW_HASH`.
        """

        def plan_from(epoch: int) -> ReadPlan:
            left_out, later = divided(exclusions or (), epoch)
            chosen = options if exclusions is None else replace(options, exclude=left_out or None)
            plan = make_read_plan(data, columns, chosen, seed=options.seed, counts=counts, ragged=ragged)
            fill = {} if fills is None else fills(plan.kinds)
            return replace(plan, fill=fill, left_out=later, has_hashes=has_hashes)

        self._begins, self._plan_from = [0, *(begin for begin, _ in exclusions or ())], cache(plan_from)
        plan = self._plan_from(0)
        self.plan, self.set_window = plan, None if options.window is None else Window(options.window)
        self.sizes: RowGroupSizes | None = None
        self.first = RowGroups(plan.at_epoch(0, options.seed), meter)
        self._path, self._seed, self._shuffle, self._memory = path, options.seed, options.shuffle, options.memory
        self._batch_size = options.size_in_order or 1
        self._warns = options.window is not None and options.shuffle
        self._latest: tuple[tuple[int, bool], RowGroups] | None = None
        self._fitted: dict[tuple[int, int], Window] = {}  # by lanes of a rank, and of all

    def at(self, epoch: int, of_mix: bool = False) -> RowGroups:
        """The row groups of an epoch, or of a pass of a mix; passes all have the same number of rows."""
        plan = self.plan_from(epoch)
        if plan.weights is None and plan is self.plan:
            return self.first
        if self._latest is None or self._latest[0] != (epoch, of_mix):
            groups = self.first.with_plan(plan.at_epoch(epoch, self._seed, constant=of_mix))
            self._latest = (epoch, of_mix), groups
        return self._latest[1]

    def plan_from(self, epoch: int) -> ReadPlan:
        """The plan of all epochs with the same excluded rows as this one."""
        return self._plan_from(max(begin for begin in self._begins if begin <= epoch))

    def window(self, lanes: int, ranks: int) -> Window:
        """The window of each of ``lanes`` lanes, shared by ``ranks`` ranks.

        Raises:
            UsageError: a row group is too large for the memory.
        """
        if self.set_window is not None:
            return self.set_window
        if self._memory is None:
            return Window(1)
        of_rank = -(-lanes // ranks) if self._shuffle else 1
        if (of_rank, lanes) not in self._fitted:
            sizes = self.first.sizes if self.sizes is None else self.sizes
            pieces = self.sizes is None and has_pages(self.plan)
            self._fitted[of_rank, lanes] = fit(sizes, self._memory, of_rank, self._shuffle, self._path, pieces, lanes)
        return self._fitted[of_rank, lanes]

    def order(self, plan: ReadPlan, epoch: int, lanes: int = 1, window: int = 1) -> Order:
        """The order of an epoch over the rows of its ``plan``."""
        return Order(
            counts=plan.counts,
            batch_size=self._batch_size,
            lanes=lanes,
            window=window,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
        )

    def begin(self, epoch: int, share: EpochShare, of_mix: bool = False) -> Epoch:
        """Prepare to read a share of an epoch, or of a pass of a mix."""
        window, groups = self.window(share.lanes, share.ranks), self.at(epoch, of_mix)
        plan = groups.plan.split(window.piece_rows)
        if self._shuffle and plan.packs is not None:
            plan = replace(plan, packs=replace(plan.packs, shuffle=(self._seed, epoch)))
        groups = groups.with_plan(plan)
        processes = share.workers * max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        threads = max(1, cpu_count() // processes)
        budget = Budget(threads=threads, decoding=threads)
        if self._memory is not None:
            memory, lanes = self._memory / share.workers, share.worker_lanes
            if self._warns and share.worker == 0:
                warn_of_window(groups.sizes, window.row_groups, int(memory), lanes, self._path)
            budget = Budget.within(
                memory,
                groups.sizes,
                window.row_groups,
                lanes=lanes,
                all_lanes=share.lanes,
                threads=threads,
                shuffle=self._shuffle,
            )
        order = self.order(plan, epoch, share.lanes, window.row_groups)
        return Epoch(groups=groups.with_budget(budget), order=order)


_PATIENCE = 60.0  # seconds for other ranks to begin an epoch


class RecordBatches(Iterator[pa.RecordBatch]):
    """An iterator over the record batches of an epoch."""

    def __init__(self, batches: Generator[pa.RecordBatch], epoch: Epoch, options: BatchOptions) -> None:
        self._batches, self._epoch, self._options = batches, epoch, options
        self._begun = False

    def __next__(self) -> pa.RecordBatch:
        meter, asked = self._epoch.groups.meter, time.monotonic_ns()
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
        """Stop reading, and release the snapshot."""
        self._batches.close()
        self._epoch.groups.meter.set_running(False)

    def stats(self) -> DatasetStats:
        """The costs of reading so far, and of waiting for batches; see docs/gpus.md."""
        return dataset_stats(self._epoch.groups.meter.counts(), self._epoch.plan, self._options.memory)


def read_record_batches(
    path: str | os.PathLike[str], options: BatchOptions, rules: FileRules | None = None
) -> RecordBatches:
    """Iterate over the record batches of an epoch; see ``Cache.batches``.

    ``rules`` select the files if ``path`` is a plain directory. Opens the dataset and leases its snapshot before it
    returns.
    """
    data, lease = open_local_dataset(path, options.snapshot_read, rules or options.rules, options.fill)
    with closed_on_error(lease):
        epoch, share = _open_epoch(path, data, options)

    def read() -> Generator[pa.RecordBatch]:
        try:
            if options.compares:
                check_alike(_compared(epoch, data, options), _PATIENCE)
            with lease or nullcontext(), closing(_record_batches(epoch, share)) as found:
                yield from found
        finally:
            release_unused()  # also where the reader stops half way

    found = RecordBatches(of_this_process(read(), "Cache.batches"), epoch, options)
    if lease is not None:
        weakref.finalize(found, lease.close)  # where nobody begins to iterate
    return found


def read_rows(path: str | os.PathLike[str], rows: SelectedRows, columns: Sequence[str] | None) -> pa.Table:
    """Read ``rows`` in file order; see ``Cache.read``."""
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as returned by Cache.lookup")
    if len(rows):
        options = BatchOptions(**parsed({"columns": columns, "shuffle": False, "rows": rows}, BatchOptions))
        return pa.Table.from_batches(list(read_record_batches(path, options)))
    data, lease = open_local_dataset(path, rows.snapshot or None)
    with lease or nullcontext():
        return RowGroups(make_read_plan(data, columns)).schema.empty_table()


def _compared(epoch: Epoch, data: LocalDataset, options: BatchOptions) -> dict[str, tuple[Any, Any]]:
    """The values that must be equal on all ranks; see `check_alike`."""
    order = epoch.order
    found = {
        "row_groups": epoch.plan.fingerprint,
        "batch_size": order.batch_size,
        "lanes": order.lanes,
        "window": order.window,
        "piece": epoch.plan.piece_rows,
        "seed": order.seed,
        "epoch": order.epoch,
        "shuffle": order.shuffle,
        "start": options.start,
        "drop_last": options.drop_last,
    }
    alike = {name: (value, value) for name, value in found.items() if order.shuffle or name not in MIXING}
    return {"snapshot": (data.content, data.snapshot), **alike}


def _record_batches(epoch: Epoch, share: EpochShare) -> Generator[pa.RecordBatch]:
    meter, schema = epoch.groups.meter, epoch.groups.schema

    def make(group: Group) -> list[pa.RecordBatch]:
        found = group.batches()
        return found if group.rows.schema.equals(schema) else [_with_schema(batch, schema) for batch in found]

    with closing(epoch.read(share.indices(), share.total, make)) as found:
        for _, batches, number in found:
            batch = batches[number]
            meter.made(1, batch.num_rows, batch.nbytes)
            yield batch


def _with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast a batch of a run with more than 2 GB in a column to the types of the other batches."""
    arrays = []
    for field, array in zip(schema, batch.columns, strict=True):
        try:
            arrays.append(array if array.type == field.type else array.cast(field.type))
        except pa.ArrowException as error:
            reason = f"a batch has more than 2 GB of it, which {field.type} cannot hold"
            raise UsageError(f"column {field.name!r}", reason, SMALLER) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _open_epoch(path: str | os.PathLike[str], data: LocalDataset, options: BatchOptions) -> tuple[Epoch, EpochShare]:
    if not options.shuffle:
        options = replace(options, window=None, memory=options.memory if options.rows is None else None)
    epochs = Epochs(data, options.columns, path, options, Meter())
    epochs.window(options.all_lanes, options.ranks)  # which may refuse it
    share = EpochShare(
        total=epochs.order(epochs.at(options.epoch).plan, options.epoch).batches(options.drop_last),
        lanes=options.all_lanes,
        ranks=options.ranks,
        rank=options.rank or 0,
        workers=options.workers,
        worker=options.worker,
        start=options.start,
        drop_last=options.drop_last,
        shuffled=options.shuffle,
    )
    return epochs.begin(options.epoch, share), share
