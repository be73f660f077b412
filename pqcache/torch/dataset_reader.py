"""Reads the batches of one dataset as tensors: what ParquetDataset and Mix share."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces, checked_index, rows_of_batch
from pqcache.reader.columns.batch_layout import FinishedBatch
from pqcache.reader.dense_lists import with_dense_lists
from pqcache.reader.epoch import batches, samples
from pqcache.reader.epoch_loaders import EpochLoaders
from pqcache.reader.memory_budget import (
    DecodeBudget,
    Window,
    budget_in_file_order,
    decode_budget,
    even,
    fit,
    most_decoded,
    warn_of_window,
)
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.order.epoch_order import Order
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture_schedule import DatasetPass
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.reader.row_group_reader import cpu_count, release_unused
from pqcache.reader.selection.row_choice import RowChoice
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.selection.stored_counts import Counts
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.snapshot import Lease
from pqcache.store.tables.data_files import FileRules
from pqcache.torch.batch import Batch, Position
from pqcache.torch.batch_origins import register
from pqcache.torch.batch_values import values_of
from pqcache.torch.checkpoint import Place, State, check_options, check_rows_of_state
from pqcache.torch.column_options import masked_columns
from pqcache.torch.distributed import NodeShares, gather_shares, snapshot_of
from pqcache.torch.ragged import item
from pqcache.torch.shared_memory import worker_pool
from pqcache.torch.tensors import Nulls, null_error
from pqcache.torch.transform_errors import BatchOrigin, located


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What of a dataset is read, and how; see ``ParquetDataset``. ``memory`` is in bytes."""

    path: Path
    filters: Any
    rows: SelectedRows | None
    choice: RowChoice
    sequence: SequenceOf | None
    batch_size: int | None
    shuffle: bool
    seed: int
    drop_last: bool
    memory: int
    window: int | None
    transform: Callable[[Any], Any] | None
    nulls: Nulls
    ragged: tuple[str, ...]
    rules: FileRules


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
        self._share_alone = share_alone
        self._window = None if options.window is None else Window(options.window)
        self._release: Callable[[], object] | None = None
        self._open(columns, getattr(options.rows, "snapshot", "") or None)
        self._masked = masked_columns(self._plan, options.nulls, options.ragged)
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
    def rows(self) -> int | None:
        """The number of rows (or sequences) of an epoch, of this node's share; None where epochs differ."""
        return int(self._plan.counts.sum()) if self._plan.weights is None else None

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
        return self._order(self._loaders.at(epoch, of_mix).plan, epoch, 1, 1).batches(self.options.drop_last)

    def check_nulls(self) -> None:
        """Raise ParquetError before anything is decoded, where the files say that columns without a fill hold nulls."""
        if self.options.nulls.mask:
            return
        filled = {name for name, _ in self.options.nulls.fill}
        for name in self._plan.columns:
            if name not in filled and (count := self._plan.nulls(name)):
                raise null_error(name, count, "the dataset", self.options.nulls)

    def read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        """Yield (place, transformed batch) for ``indices``, the places of a share; rows without a batch size."""
        loader, order, budget = self._prepare(share, epoch)
        make = self._batches if self.options.batch_size is not None else self._rows
        origin = self._origin(loader, order)
        batches, total = share.batches(indices), order.batches(self.options.drop_last)
        with closing(make(loader, order, batches, total, budget)) as found:
            for place, (position, batch) in zip(indices, found, strict=True):
                with located(position, origin, position.index):
                    result = self.transformed(batch, position, (epoch, position.index))
                yield place, result

    def read_pass(self, reading: DatasetPass, share: EpochShare) -> Generator[tuple[BatchOrigin, Batch]]:
        """Yield what a mix, of which ``share`` is read, takes of one pass over this dataset, without the transform."""
        loader, order, budget = self._prepare(share, reading.number, of_mix=True)
        order = self._order_of_pass(order, reading)
        indices = reading.lane_batches * share.lanes + reading.lanes if self.options.shuffle else reading.batches
        with closing(self._batches(loader, order, indices.tolist(), int(indices.max()) + 1, budget)) as found:
            for _, batch in found:
                yield self._origin(loader, order), batch

    def _order_of_pass(self, order: Order, reading: DatasetPass) -> Order:
        """Return the order of a pass of a mix, which divides the rows among its lanes as it draws from them."""
        lane_rows = reading.lane_sizes * order.batch_size
        lane_rows[reading.last_lane] -= max(0, int(lane_rows.sum()) - order.rows)  # the last batch may be short
        return replace(order, lane_rows=lane_rows)

    def transformed(self, batch: Any, position: Position, numbers: tuple[int, int]) -> Any:
        """Return what the transform makes of a batch, with generators seeded by epoch (or pass) and batch number."""
        transform, node = self.options.transform, () if self.nodes is None else (self.nodes.node,)
        if transform is None:
            return batch
        with _seeded(self.options.seed & (2**64 - 1), *numbers, *node):
            result = transform(batch)
        if type(result) is dict and self.options.batch_size is not None:
            return Batch(result, position)
        return result

    def place_of(self, epoch: int, index: int, lanes: int, ranks: int) -> Position:
        """Return the position of a batch of an epoch that is read on so many lanes and ranks; UsageError without it."""
        index = checked_index(index, self.batches_at(epoch))
        window, piece_rows = self._shape(lanes, ranks)
        return Position(epoch=epoch, index=index, lanes=lanes, window=window, piece=piece_rows)

    def rows_at(self, position: Position, reading: DatasetPass | None = None) -> RowPlaces:
        """Return the rows of the batch at a position; with ``reading`` it is one of a pass of a mix."""
        plan = self._loaders.at(position.epoch, reading is not None).plan.split(position.piece)
        order = self._order(plan, position.epoch, position.lanes, position.window)
        if reading is not None:
            return rows_of_batch(plan, self._order_of_pass(order, reading), position.index)
        return rows_of_batch(plan, order, position.index % order.batches(self.options.drop_last))

    def state(self, place: Place, ranks: int, worker: list[int] | None = None) -> State:
        """Return the state of a training that goes on at a place; a mix keeps its own."""
        window, piece_rows = self._shape(place.lanes, ranks)
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
        if state.snapshot != self._content:
            self._open(self._plan.columns, self._snapshot_in(state))
            self._gather_shares()
            self.token = register(self)
        options = {
            "seed": self.options.seed,
            "batch_size": self.options.batch_size,
            "shuffle": self.options.shuffle,
            "columns": list(self._plan.columns),
            "window": state.window if self._window is None else self._window.row_groups,
        }
        check_options(state, options, "dataset")
        check_rows_of_state(state, self._row_groups_at(state.epoch))
        self._window = Window(state.window, state.piece)

    def _snapshot_in(self, state: State) -> str:
        """Return the name of the snapshot here that a state belongs to."""
        if self._data.cache is None:
            raise UsageError(
                self.options.path,
                f"the state belongs to {state.snapshot}, this is {self._data.snapshot}",
                "its files have changed since the state was taken",
            )
        return state.snapshot if self.nodes is None else snapshot_of(self._data.cache, state.snapshot)

    def _prepare(
        self, share: EpochShare, epoch: int, of_mix: bool = False
    ) -> tuple[RowGroupLoader, Order, DecodeBudget]:
        window, piece_rows = self._shape(share.lanes, share.ranks)
        loader = self._loaders.at(epoch, of_mix).split(piece_rows)
        order = self._order(loader.plan, epoch, share.lanes, window)
        processes = share.workers * max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        threads = max(1, cpu_count() // processes)
        lanes = share.worker_lanes
        memory = self.options.memory / share.workers
        loader.most = most_decoded(loader.sizes, memory, lanes if order.shuffle else 1)
        if not self.options.shuffle:
            return loader, order, budget_in_file_order(loader.sizes, memory, threads)
        if self.options.window is not None and share.worker == 0:
            warn_of_window(loader.sizes, window, int(memory), lanes, self.options.path)
        budget = decode_budget(loader.sizes, memory, lanes=lanes, all_lanes=share.lanes, window=window, threads=threads)
        return loader, order, budget

    def _batches(
        self, loader: RowGroupLoader, order: Order, indices: Sequence[int], total: int, budget: DecodeBudget
    ) -> Generator[tuple[Position, Batch]]:
        memory = worker_pool() if get_worker_info() is not None else None
        with closing(batches(loader, order, indices, total, budget, memory)) as found:
            for index, columns in found:
                position = self._position(loader, order, index)
                yield position, Batch(self._values(columns), position)

    def _rows(
        self, loader: RowGroupLoader, order: Order, indices: Sequence[int], total: int, budget: DecodeBudget
    ) -> Generator[tuple[Position, dict[str, Any]]]:
        columns_of_lane: dict[int, dict[str, Any]] = {}
        with closing(samples(loader, order, indices, total, budget)) as found:
            for index, columns, row in found:
                lane = index % total % order.lanes
                if row == 0:
                    columns_of_lane[lane] = self._values(columns)
                position = self._position(loader, order, index)
                yield position, {name: item(value, row) for name, value in columns_of_lane[lane].items()}

    def _position(self, loader: RowGroupLoader, order: Order, index: int) -> Position:
        return Position(
            epoch=order.epoch,
            index=index,
            lanes=order.lanes,
            window=order.window,
            piece=loader.plan.piece_rows,
            dataset=self.token,
        )

    def _values(self, columns: FinishedBatch) -> dict[str, Any]:
        return values_of(columns, self._plan, self.options.nulls, self._masked)

    def _origin(self, loader: RowGroupLoader, order: Order) -> BatchOrigin:
        dataset = f"{self.options.path} ({self._data.snapshot})"
        return BatchOrigin(dataset, loader.plan, order, self.options.batch_size is not None)

    def _order(self, plan: ReadPlan, epoch: int, lanes: int, window: int) -> Order:
        return Order(
            counts=plan.counts,
            batch_size=self.options.batch_size or 1,
            lanes=lanes,
            window=window,
            seed=self.options.seed,
            epoch=epoch,
            shuffle=self.options.shuffle,
        )

    def _shape(self, lanes: int, ranks: int) -> Window:
        if self._window is not None:
            return self._window
        of_rank = -(-lanes // ranks) if self.options.shuffle else 1
        if of_rank not in self._fitted:
            sizes, memory, path = (self.nodes or self._loaders.first).sizes, self.options.memory, self.options.path
            density = self._loaders.first.density if self.nodes is None else even
            self._fitted[of_rank] = fit(sizes, memory, of_rank, self.options.shuffle, path, density)
        return self._fitted[of_rank]

    @property
    def _content(self) -> str:
        """The name of the snapshot that is read, over all nodes."""
        return self._data.snapshot if self.nodes is None else self.nodes.listing

    def _row_groups_at(self, epoch: int) -> str:
        """Return the name of the rows that are read in an epoch, over all nodes."""
        return self._plan.fingerprint_at(epoch) if self.nodes is None else self.nodes.row_groups

    def _gather_shares(self) -> None:
        if self.nodes is not None or not self._share_alone:
            self.nodes = gather_shares(self._data, self._loaders.first)
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
            self.options.path if path is None else path, snapshot, self.options.rules
        )
        if self._release is not None:
            self._release()
        self._keep(lease)
        self._set_plan(columns, counts)

    def _keep(self, lease: Lease | None) -> None:
        self._release = weakref.finalize(self, lease.close) if lease is not None else None

    def _set_plan(self, columns: Sequence[str] | None, counts: Counts | None) -> None:
        options, self._counts = self.options, {} if counts is None else counts
        plan = make_read_plan(
            self._data, columns, options.filters, options.rows, self._counts, options.sequence, options.choice
        )
        filled = [name for name in plan.columns if options.nulls.fills_inside(name)]  # which dense lists cannot be
        self._plan = with_dense_lists(plan, (*options.ragged, *filled))
        self._loaders = EpochLoaders(self._plan, options.seed)
        self._fitted: dict[int, Window] = {}  # by lanes of a rank

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        del kept["_plan"], kept["_loaders"], kept["_release"], kept["_fitted"]
        kept["_columns"] = self._plan.columns
        data = self._data
        if data.identities is None:  # a snapshot: opened again, and leased, where it is unpickled
            kept["_data"] = data.root if data.cache is None else self.options.path, data.snapshot
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


@contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of random, numpy and torch, and restore them afterwards in the trainer's process."""
    in_worker = get_worker_info() is not None
    saved = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
    seeds = np.random.SeedSequence(list(numbers)).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # numpy's global generator, as transforms use it
    torch.default_generator.manual_seed(int(seeds[2]))
    try:
        yield
    finally:
        if saved is not None:
            random.setstate(saved[0])
            np.random.set_state(saved[1])
            torch.set_rng_state(saved[2])
