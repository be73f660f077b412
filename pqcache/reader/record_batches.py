"""An epoch as Arrow record batches, in the order in which ParquetDataset yields its batches."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.options import parsed
from pqcache.reader.epoch import Epoch, Epochs
from pqcache.reader.load import RowGroups, release_unused
from pqcache.reader.meter import WAITED, Meter
from pqcache.reader.open_dataset import LocalDataset, open_local_dataset
from pqcache.reader.options import BatchOptions
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.processes import MIXING, check_alike, of_this_process
from pqcache.reader.read_plan import make_read_plan
from pqcache.reader.reading_stats import DatasetStats, dataset_stats
from pqcache.reader.window import SMALLER, Group
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.snapshot import closed_on_error
from pqcache.store.tables.data_files import FileRules

_PATIENCE = 60.0  # seconds for other ranks to begin an epoch


class RecordBatches(Iterator[pa.RecordBatch]):
    """The record batches of an epoch, one after the other."""

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
        """What reading has taken so far, and how long batches were waited for; see docs/monitoring.md."""
        return dataset_stats(self._epoch.groups.meter.counts(), self._epoch.plan, self._options.memory)


def read_record_batches(
    path: str | os.PathLike[str], options: BatchOptions, rules: FileRules | None = None
) -> RecordBatches:
    """Iterate over the record batches of an epoch; see ``Cache.batches``.

    ``rules`` say which files are read if ``path`` is a plain directory. The dataset is opened, and its snapshot leased,
    before this returns.
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
    """Read ``rows`` in the order of the files; see ``Cache.read``."""
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as Cache.lookup returns them")
    if len(rows):
        options = BatchOptions(**parsed({"columns": columns, "shuffle": False, "rows": rows}, BatchOptions))
        return pa.Table.from_batches(list(read_record_batches(path, options)))
    data, lease = open_local_dataset(path, rows.snapshot or None)
    with lease or nullcontext():
        return RowGroups(make_read_plan(data, columns)).schema.empty_table()


def _compared(epoch: Epoch, data: LocalDataset, options: BatchOptions) -> dict[str, tuple[Any, Any]]:
    """What all ranks have to begin alike; see `check_alike`."""
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
    """A batch of a run with more than 2 GB of a column, in the types of all batches."""
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
