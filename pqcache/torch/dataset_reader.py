"""Reads the batches of one dataset as tensors: what ParquetDataset and Mix share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces, checked_index, rows_of_batch
from pqcache.reader.epoch import Epoch, Epochs
from pqcache.reader.load import release_unused
from pqcache.reader.memory import Window
from pqcache.reader.meter import TENSORS
from pqcache.reader.open_dataset import LocalDataset, open_local_dataset
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture import DatasetPass
from pqcache.reader.packed_plan import pack_plan
from pqcache.reader.packing.pack import Pack, TokenBatches
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.reader.reading_stats import DatasetStats, dataset_stats
from pqcache.reader.selection.row_choice import RowChoice
from pqcache.reader.selection.selection import Counts
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.window import Group
from pqcache.store.arriving.start_run import FillRequest
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.snapshot import Lease
from pqcache.store.tables.data_files import FileRules
from pqcache.torch.batch import Batch, Position, register
from pqcache.torch.batch_groups import TensorGroup, UnmadeBatch, bytes_of, check_mask
from pqcache.torch.checkpoint import Place, State, check_options, check_rows_of_state
from pqcache.torch.distributed import NodeShares, gather_shares, snapshot_of
from pqcache.torch.iteration_meter import new_meter
from pqcache.torch.ragged import item
from pqcache.torch.tensors import Conversion, check_type, fills_when_decoded, null_error, paths_in
from pqcache.torch.transforms import BatchOrigin, FailureLog, Item, Transform, TransformRunner


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What of a dataset is read, and how; see ``ParquetDataset``. ``memory`` is in bytes."""

    path: Path
    filters: Any
    rows: SelectedRows | None
    choice: RowChoice
    sequence: SequenceOf | None
    pack: Pack | TokenBatches | None
    batch_size: int | None
    shuffle: bool
    seed: int
    drop_last: bool
    memory: int
    window: int | None
    transform: Transform
    conversion: Conversion
    ragged: tuple[str, ...]
    rules: FileRules
    fill: FillRequest | None = None
    snapshot: str | None = None


class DatasetReader:
    """An open dataset, and how its batches are made; its callers know the ranks and the place in an epoch.

    ParquetDataset reads shares of epochs (``read``). A mix reads passes (``read_pass``), whose batches it puts into its
    own order before they are ``transformed``. Both ask for ``total`` and ``check_nulls`` before an epoch, and keep
    places in their checkpoints beside ``state``, which ``load_state`` takes over.

    A cache's snapshot is leased while the reader exists, also in the process that unpickles it.
    """

    def __init__(self, options: ReadOptions, columns: Sequence[str] | None, share_alone: bool) -> None:
        """Open the dataset; with ``share_alone`` one node's share is read without the other nodes.

        Columns that no tensor can hold, or that are named but not there, raise UsageError.
        """
        self.options = options
        self.nodes: NodeShares | None = None
        self.meter = new_meter()
        self.failures = FailureLog() if options.transform.skips else None
        self._share_alone = share_alone
        self._window: Window | None = None  # of a state that was loaded
        self._release: Callable[[], object] | None = None
        self._open(columns, options.snapshot or getattr(options.rows, "snapshot", "") or None)
        self._masked = masked_columns(self._plan, options.conversion, options.ragged)
        self.check_nulls()
        self._gather_shares()
        self.token = register(self)
        weakref.finalize(self, release_unused).atexit = False  # what epochs keep for the next ones

    @property
    def schema(self) -> pa.Schema:
        """The columns as Arrow has them."""
        return self._plan.schema

    @property
    def snapshot(self) -> str:
        """The name of the snapshot; for a plain directory, of its files' content."""
        return self._data.snapshot

    @property
    def content(self) -> str:
        """A name that is equal for equal rows, whatever their snapshot is called."""
        return self._data.content if self.nodes is None else self.nodes.listing

    @property
    def rows(self) -> int | None:
        """The number of rows (or sequences) of an epoch, of this node's share; None where epochs differ."""
        return int(self._plan.counts.sum()) if self._plan.weights is None else None

    @property
    def fill(self) -> float | None:
        """The share of the places in packed sequences that hold tokens; None where rows are not packed."""
        return None if self._plan.packs is None else self._plan.packs.fill

    def stats(self) -> DatasetStats:
        """Return what reading has taken so far."""
        threads = self.options.transform.threads or 1
        return dataset_stats(self.meter.counts(), self._plan, self.options.memory, threads)

    @property
    def data(self) -> LocalDataset:
        """The dataset that is open."""
        return self._data

    def total(self, epoch: int, ranks: int, start: int = 0, pad: bool = True) -> int:
        """Return the number of batches (or rows) of an epoch that is read from ``start``, on all ranks of this node.

        Without ``pad`` that is what the node's own share has; other nodes may have more.
        """
        options = self.options
        if self.nodes is not None and pad:
            return self.nodes.total(options.batch_size or 1, start, ranks, options.drop_last)
        return self.batches_at(epoch)

    def batches_at(self, epoch: int, of_mix: bool = False) -> int:
        """Return the number of batches (or rows) of an epoch, or of each pass of a mix."""
        return self._epochs.order(self._epochs.at(epoch, of_mix).plan, epoch).batches(self.options.drop_last)

    def check_nulls(self) -> None:
        """Raise ParquetError before anything is decoded, where the files say that columns without a fill hold nulls."""
        check_nulls(self._plan, self.options.conversion)

    def read(self, share: EpochShare, indices: range, epoch: int, are_sent: bool = False) -> Generator[tuple[int, Any]]:
        """Yield (place, transformed batch) for ``indices``, the places of a share; rows without a batch size.

        Batches that ``are_sent`` to another process as they are come as `UnmadeBatch`, unless there is a transform.
        """
        this = self._epochs.begin(epoch, share)
        make: Callable[..., Generator[tuple[Position, Any]]] = self._rows
        if self.options.batch_size is not None:
            make = partial(self._batches, sent=are_sent and self.options.transform.function is None)
        batches, total = share.batches(indices), this.order.batches(self.options.drop_last)

        def read(index: int) -> Any:
            with closing(make(this, [index], total)) as found:
                return next(found)[1]

        with closing(make(this, batches, total)) as found:
            if self.options.transform.function is None:
                yield from zip(indices, (batch for _, batch in found), strict=True)
                return
            items = (Item(value=batch, position=at, place=at.index, numbers=(epoch, at.index)) for at, batch in found)
            runner = self.transforms(self._origin(this))
            with closing(runner.run(items, batches, this.order.lanes, total, read)) as results:
                yield from zip(indices, results, strict=True)

    def read_pass(self, reading: DatasetPass, share: EpochShare) -> Generator[tuple[BatchOrigin, Batch]]:
        """Yield what a mix, of which ``share`` is read, takes of one pass over this dataset, without the transform."""
        this = self._epochs.begin(reading.number, share, of_mix=True)
        this = replace(this, order=reading.order_of(this.order))
        indices = reading.lane_batches * share.lanes + reading.lanes if self.options.shuffle else reading.batches
        streams = reading.lanes * 0 if reading.readers is None else reading.readers
        total = int(indices.max()) + 1
        with ExitStack() as stack:
            read = {
                stream: stack.enter_context(closing(self._batches(this, indices[streams == stream].tolist(), total)))
                for stream in dict.fromkeys(streams.tolist())
            }
            for stream in streams.tolist():
                yield self._origin(this), next(read[stream])[1]

    def transforms(self, origin: BatchOrigin) -> TransformRunner:
        """Return what calls the transform for batches of one pass."""
        node = () if self.nodes is None else (self.nodes.node,)
        return TransformRunner(self.options.transform, origin, self.failures, self.options.seed, node, self.meter)

    def place_of(self, epoch: int, index: int, lanes: int, ranks: int, of_mix: bool = False) -> Position:
        """Return the position of a batch of an epoch that is read on so many lanes and ranks; UsageError without it."""
        index = checked_index(index, self.batches_at(epoch, of_mix))
        window, piece_rows = self._epochs.window(lanes, ranks)
        return Position(epoch=epoch, index=index, lanes=lanes, window=window, piece=piece_rows)

    def rows_at(self, position: Position, reading: DatasetPass | None = None) -> RowPlaces:
        """Return the rows of the batch at a position; with ``reading`` it is one of a pass of a mix."""
        plan = self._epochs.at(position.epoch, reading is not None).plan.split(position.piece)
        order = self._epochs.order(plan, position.epoch, position.lanes, position.window)
        if reading is not None:
            return rows_of_batch(plan, reading.order_of(order), position.index)
        return rows_of_batch(plan, order, position.index % order.batches(self.options.drop_last))

    def state(self, place: Place, ranks: int, worker: list[int] | None = None) -> State:
        """Return the state of a training that goes on at a place; a mix keeps its own."""
        window, piece_rows = self._epochs.window(place.lanes, ranks)
        return State(
            snapshot=self._content,
            row_groups=self._row_groups_at(place.epoch),
            columns=list(self._plan.columns),
            shuffle=self.options.shuffle,
            seed=self.options.seed,
            batch_size=self.options.batch_size,
            window=window,
            piece=piece_rows,
            worker=worker,
            **place.in_state(worker),
        )

    def load_state(self, state: State) -> None:
        """Take over a state's snapshot and window; the caller takes over lanes and place.

        Options that differ raise UsageError; a snapshot that is no longer kept raises CacheError.
        """
        snapshot = None if state.snapshot == self._content else self._snapshot_in(state)
        options = {name: getattr(self.options, name) for name in ("seed", "batch_size", "shuffle")}
        options["columns"] = list(self._plan.columns)
        set_window = self._epochs.set_window
        options["window"] = state.window if set_window is None else set_window.row_groups
        check_options(state, options, "dataset")
        before = self.__dict__.copy()
        try:
            if snapshot is not None:
                self._release = None  # the present snapshot stays leased, for a state that does not fit
                self._open(self._plan.columns, snapshot)
                self._gather_shares()
                self.token = register(self)
            check_rows_of_state(state, self._row_groups_at(state.epoch))
        except BaseException:
            if self._release is not None and snapshot is not None:
                self._release()
            self.__dict__.update(before)
            raise
        if before["_release"] is not None and snapshot is not None:
            before["_release"]()
        self._window = self._epochs.set_window = Window(state.window, state.piece)

    def _snapshot_in(self, state: State) -> str:
        """Return the name of the snapshot here that a state belongs to."""
        if self._data.cache is None:
            raise UsageError(
                self.options.path,
                f"the state belongs to {state.snapshot}, this is {self._data.snapshot}",
                "its files have changed since the state was taken",
            )
        if chosen := self.options.snapshot or getattr(self.options.rows, "snapshot", ""):
            raise UsageError(
                "state",
                f"it was taken with snapshot {state.snapshot}, and this dataset was made with {chosen!r}",
                "make it with the state's snapshot, or without snapshot= and rows=, to go on; or leave the state out",
            )
        return state.snapshot if self.nodes is None else snapshot_of(self._data.cache, state.snapshot)

    def _batches(
        self, this: Epoch, indices: Sequence[int], total: int, sent: bool = False
    ) -> Generator[tuple[Position, Any]]:
        for position, group, number in self._groups(this, indices, total):
            unmade = UnmadeBatch(group, number, position)
            self.meter.made(1, group.rows(number), bytes_of(unmade))
            yield position, unmade if sent else Batch(group.batches[number], position)

    def _rows(self, this: Epoch, indices: Sequence[int], total: int) -> Generator[tuple[Position, Any]]:
        for position, group, number in self._groups(this, indices, total):
            self.meter.made(0, 1, round(group.row_bytes))
            yield position, {name: item(value, number) for name, value in group.columns.items()}

    def _groups(self, this: Epoch, indices: Sequence[int], total: int) -> Generator[tuple[Position, TensorGroup, int]]:
        def make(group: Group) -> TensorGroup:
            with self.meter.timed(TENSORS):
                return TensorGroup.of(group, this.plan, self.options.conversion, self._masked)

        with closing(this.read(indices, total, make)) as found:
            for index, group, number in found:
                yield self._position(this, index), group, number

    def _position(self, this: Epoch, index: int) -> Position:
        order, piece = this.order, this.plan.piece_rows
        return Position(
            epoch=order.epoch, index=index, lanes=order.lanes, window=order.window, piece=piece, dataset=self.token
        )

    def _origin(self, this: Epoch) -> BatchOrigin:
        dataset = f"{self.options.path} ({self._data.snapshot})"
        return BatchOrigin(dataset, this.plan, this.order, self.options.batch_size is not None)

    def window(self, lanes: int, ranks: int) -> Window:
        """How many row groups are mixed at a time, of which size, on so many lanes and ranks."""
        return self._epochs.window(lanes, ranks)

    @property
    def _content(self) -> str:
        """The name of the snapshot that is read, over all nodes."""
        return self._data.snapshot if self.nodes is None else self.nodes.listing

    def _row_groups_at(self, epoch: int) -> str:
        """Return the name of the rows that are read in an epoch, over all nodes."""
        return self._plan.fingerprint_at(epoch) if self.nodes is None else self.nodes.row_groups

    def _gather_shares(self) -> None:
        if self.nodes is not None or not self._share_alone:
            self.nodes = gather_shares(self._data, self._epochs.first)
        if self.nodes is not None:
            self._epochs.sizes = self.nodes.sizes
        if self.nodes is not None and self._plan.weights is not None:
            raise UsageError("weights", "nodes that each hold a share have epochs of one length", "leave them out")

    def _open(
        self,
        columns: Sequence[str] | None,
        snapshot: str | None,
        counts: Counts | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Open a snapshot (None: the current one) and lease it instead of the previous one."""
        self._data, lease = open_local_dataset(
            self.options.path if path is None else path, snapshot, self.options.rules, self.options.fill
        )
        if self._release is not None:
            self._release()
        self._keep(lease)
        self._set_plan(columns, counts)

    def _keep(self, lease: Lease | None) -> None:
        self._release = weakref.finalize(self, lease.close) if lease is not None else None

    def _set_plan(self, columns: Sequence[str] | None, counts: Counts | None) -> None:
        options, pack = self.options, self.options.pack
        self._counts = {} if counts is None else counts
        if isinstance(pack, Pack) and columns is None:
            columns = pack.columns
        plan = make_read_plan(
            self._data, columns, options.filters, options.rows, self._counts, options.sequence, options.choice
        )
        filled = [name for name in plan.columns if options.conversion.fills_inside(name)]  # which dense lists cannot be
        if not isinstance(pack, Pack):
            plan = plan.with_dense_lists((*options.ragged, *filled, *(pack.columns if pack else ())))
        plan = replace(plan, fill=fills_when_decoded(options.conversion, plan.kinds))
        self._plan = plan if pack is None else pack_plan(plan, pack, self._counts)
        self._epochs = Epochs(
            self._plan,
            self.meter,
            path=options.path,
            seed=options.seed,
            shuffle=options.shuffle,
            batch_size=options.batch_size,
            memory=options.memory,
            window=options.window,
        )
        self._epochs.set_window = self._window or self._epochs.set_window
        self._epochs.sizes = None if self.nodes is None else self.nodes.sizes

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        del kept["_plan"], kept["_epochs"], kept["_release"]
        kept["_columns"] = self._plan.columns
        data = self._data
        if data.identities is None:  # a snapshot: opened again, and leased, where it is unpickled
            kept["_data"] = data.cache or data.directory, data.snapshot  # absolute: a worker may be elsewhere
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        columns, counts = kept.pop("_columns"), kept.pop("_counts")
        self.__dict__.update(kept, _release=None, token=register(self, kept["token"]))
        if isinstance(kept["_data"], tuple):
            path, snapshot = kept["_data"]
            self._open(columns, snapshot, counts, path)
        else:
            self._keep(self._data.lease())
            self._set_plan(columns, counts)


def masked_columns(plan: ReadPlan, conversion: Conversion, ragged: tuple[str, ...]) -> frozenset[str]:
    """Return the columns that get a mask; UsageError where options name others or types have no tensor form."""
    names = set(plan.columns)
    for field in plan.row_schema:
        check_type(field.name, field.type, conversion.decimals, plan.bounds)
    parts = {path for field in plan.row_schema for path in paths_in(field.name, field.type)}
    for option, named, known in (("ragged", ragged, names), ("nulls", dict(conversion.fill), parts)):
        for name in named:
            if name not in known:
                near = sorted(path for path in known if path.startswith(f"{name.partition('.')[0]}."))
                advice = f"there are: {', '.join(near)}" if near else ""
                raise UsageError(option, f"{name!r} is not among the columns", advice)
    masked = frozenset(field.name for field in plan.row_schema if conversion.mask and field.nullable)
    for name in masked:
        check_mask(name, names)
    return masked


def check_nulls(plan: ReadPlan, conversion: Conversion) -> None:
    """Raise ParquetError where the files say that columns without a fill hold nulls, which get no mask."""
    if conversion.mask:
        return
    filled = {name for name, _ in conversion.fill}
    for name in plan.columns:
        if name not in filled and (count := plan.nulls(name)):
            raise null_error(name, count, "the dataset", conversion)
