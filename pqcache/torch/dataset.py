"""ParquetDataset: shuffled, exactly once, resumable at any batch."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.batch_layout import FinishedBatch
from pqcache.reader.dense_lists import with_dense_lists
from pqcache.reader.epoch import batches, samples
from pqcache.reader.memory_budget import DecodeBudget, Window, decode_budget, fit_window
from pqcache.reader.open import Data, open_data
from pqcache.reader.options import check_numbers, check_rank, check_seed
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture_schedule import DatasetPass
from pqcache.reader.order.order import Ints, Order
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.reader.row_group_reader import cpu_count, release_unused
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.snapshot import Lease
from pqcache.torch.batch import Batch, Place
from pqcache.torch.checkpoint import Progress, State, check_lanes, check_worker, replicas_and_rank
from pqcache.torch.distributed import Nodes, agree, snapshot_of
from pqcache.torch.ragged import in_sequences, item
from pqcache.torch.shared_memory import end_with_trainer, worker_pool
from pqcache.torch.tensors import Nulls, check_type, mask_name, null_error, to_value
from pqcache.units import parse_size


class ParquetDataset(IterableDataset[Batch]):
    """Whole shuffled batches of a cache or a directory of Parquet, for ``DataLoader(ds, batch_size=None)``.

    Every row comes exactly once per epoch, whatever the number of workers and ranks; call ``set_epoch`` before
    each epoch for another order. A batch is a dict of column name to tensor or Ragged (see
    ``pqcache.torch.tensors``) that knows its global ``index``.

    ``path``          a cache, a snapshot, a directory or a file
    ``columns``       names; None for all. Partition columns are columns.
    ``filters``       a condition on any columns: SQL text, a list as pandas takes it, like
                      ``[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])]``, or a pyarrow expression. What the
                      index does not decide is counted at once, by reading the condition's columns, and
                      remembered with the snapshot. On nulls see docs/loading.md.
    ``batch_size``    rows; None yields single rows, for DataLoader's own batching and collate
    ``shuffle``       False gives the rows in the order of the files
    ``drop_last``     False: the last batch may be short, and ranks are made equal by repeating the epoch's
                      first batches. True: what is left over is dropped.
    ``memory``        bytes that decoded row groups of this rank, all its workers together, may take
    ``window``        row groups mixed at a time by each lane; None: what ``memory`` allows, at most 16
    ``lanes``         independent streams of batches; None: one for each worker of each rank. Fix it to a
                      common multiple to get the same batches whatever the number of ranks and workers.
    ``num_replicas``, ``rank``   default to those of torch.distributed where it is initialised, else 1 and 0
    ``transform``     called in the worker on each batch (or row); what it returns is what the loader yields. numpy's,
                      random's and torch's generators are seeded for it from (seed, epoch, batch index).
    ``nulls``         "error", "mask" (adds a bool ``NAME_mask``, True where there is a value) or
                      ``{column: fill}``
    ``ragged``        list columns to keep Ragged although all their lists are of one length
    ``rows``          only these rows, of the snapshot that they were looked up in (None: all); with ``filters``,
                      those of them that satisfy it
    ``sequence``      a ``Sequence``: samples of several consecutive rows in place of single rows.
                      ``batch_size`` then counts sequences, and columns have an axis more

    >>> dataset = ParquetDataset("cache/shop", columns=["id", "price", "tokens", "dt"], batch_size=256, seed=1)
    >>> len(dataset)
    3
    >>> batch = next(iter(dataset))
    >>> batch.index, batch["price"].shape, batch["price"].dtype
    (0, torch.Size([256]), torch.float64)
    >>> batch["tokens"].to_padded(length=8).shape, batch["dt"][0][:8]
    (torch.Size([256, 8]), '2026-11-')
    >>> dataset.load_state_dict(dataset.state_dict(after=batch))
    >>> next(iter(dataset)).index
    1

    A cache that holds one node's share (``pqcache sync --shard``) is opened on every rank, after
    ``init_process_group()``: ranks then belong to their node, and all nodes have the same number of batches. With
    ``num_replicas`` and ``rank`` it is read by itself.

    Options that make no sense, and columns that no tensor can hold, raise UsageError here; files that are
    gone or damaged raise ParquetError by name while iterating.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        filters: Any = None,
        batch_size: int | None = 256,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        memory: str | int = "2GB",
        window: int | None = None,
        lanes: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        nulls: str | Mapping[str, Any] = "error",
        ragged: Sequence[str] = (),
        rows: SelectedRows | None = None,
        sequence: SequenceOf | None = None,
    ) -> None:
        super().__init__()
        check_numbers(batch_size=batch_size, window=window, lanes=lanes, num_replicas=num_replicas)
        check_seed(seed)
        if transform is not None and not callable(transform):
            raise UsageError(f"transform={transform!r}", "give a function that takes a batch (or row)")
        if (num_replicas is None) != (rank is None):
            raise UsageError("", "give both num_replicas and rank, or neither")
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self.memory = parse_size(memory)
        self.transform = transform
        self._path = Path(path)
        self._filters, self._chosen, self._sequence = filters, rows, sequence
        self._nulls, self._ragged = Nulls.of(nulls), tuple(ragged)
        self._window, self._lanes, self._piece = window, lanes, 0
        self._replicas = None if num_replicas is None or rank is None else (num_replicas, rank)
        self._nodes: Nodes | None = None
        self._masked: frozenset[str] = frozenset()
        self._open(columns, getattr(rows, "snapshot", "") or None)
        self._progress = Progress()
        for name in ragged:
            if name not in self._plan.columns:
                raise UsageError("", f"ragged names {name!r}, which is not among the columns")
        self._check_columns()
        self._agree()
        weakref.finalize(self, release_unused).atexit = False  # what epochs kept for one another
        check_rank(*self._rank(), lanes)

    @property
    def schema(self) -> pa.Schema:
        """The columns as Arrow has them: units and zones of timestamps, scales of decimals."""
        return self._plan.schema

    @property
    def snapshot(self) -> str:
        """The name of the snapshot that is read; for a plain directory, of its files' content."""
        return self._data.snapshot

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._progress.epoch

    def __len__(self) -> int:
        """Return the number of batches (or rows) of a whole epoch on each rank."""
        replicas, rank = self._rank()
        return EpochShare(
            total=self._total(replicas), lanes=replicas, ranks=replicas, rank=rank, drop_last=self.drop_last
        ).rounds()

    def _total(self, replicas: int, start: int = 0) -> int:
        """Return the number of batches (or rows) of an epoch that is read from ``start``, on all ranks of this node."""
        if self._nodes is not None:
            return self._nodes.total(self.batch_size or 1, start, replicas, self.drop_last)
        return self._order(self._plan, 0, 1, 1).batches(self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, persistent workers included; it is the shuffle's seed too.

        After ``load_state_dict`` the state's own epoch goes on where it was; any other begins at 0.
        """
        self._progress.set_epoch(epoch)

    def state_dict(self, after: Batch | int | None = None) -> dict[str, Any]:
        """Return where to go on, as a small dict for JSON.

        ``after`` is the last batch the trainer has consumed, or its global ``index``. It is needed with
        workers, which prepare batches in advance; without workers None means the last one yielded. The state
        is the same on every rank: it counts all ranks' batches of that step as consumed.
        """
        replicas, _ = self._rank()
        place = self._progress.consumed(after, self._lanes, replicas, partial(self._total, replicas), self.drop_last)
        found = self._state(place.lanes, replicas, place.epoch, place.index)
        return replace(found, worker=self._progress.of_worker()).to_dict()

    def _state(self, lanes: int, replicas: int, epoch: int = 0, batch: int = 0) -> State:
        window, piece = self._shape(lanes, replicas)
        return State(
            snapshot=self._content[0],
            row_groups=self._content[1],
            columns=list(self._plan.columns),
            shuffle=self.shuffle,
            seed=self.seed,
            batch_size=self.batch_size,
            lanes=lanes,
            window=window,
            piece=piece,
            epoch=epoch,
            batch=batch,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, also with other numbers of ranks and workers that divide its lanes.

        A state from the end of an epoch goes on with the next one. The state's lanes and window are taken over
        where they were left open here. A snapshot that is no
        longer the current one is opened if it is still kept. What does not fit raises UsageError, or
        CacheError for a snapshot that is gone, and says why.
        """
        loaded = State.from_dict(state)
        in_worker = check_worker(loaded.worker)
        replicas, _ = self._rank()
        self._take_over(loaded, replicas)
        total = self._total(replicas, loaded.batch)
        left = EpochShare(
            total=total, lanes=loaded.lanes, ranks=replicas, rank=0, start=loaded.batch, drop_last=self.drop_last
        ).rounds()
        self._progress.resume(loaded, in_worker, ended=loaded.batch > 0 and not left)

    def _take_over(self, loaded: State, replicas: int) -> None:
        """Take a state's snapshot, lanes and window; raise UsageError where options differ."""
        if loaded.snapshot != self._content[0]:
            if self._data.cache is None:
                raise UsageError(
                    self._path,
                    f"the state belongs to {loaded.snapshot}, this is {self._data.snapshot}",
                    "its files have changed since the state was taken",
                )
            name = loaded.snapshot
            if self._nodes is not None:
                name = snapshot_of(self._data.cache, name)
            self._open(self._plan.columns, name)
            self._agree()
        mine = {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "columns": list(self._plan.columns),
            "lanes": self._lanes or loaded.lanes,
            "window": self._window or loaded.window,
        }
        loaded.check(mine, self._content[1])
        check_lanes(loaded.lanes, replicas)
        self._lanes, self._window, self._piece = loaded.lanes, loaded.window, loaded.piece

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if info is not None:
            end_with_trainer()
        replicas, rank = self._rank()
        lanes = self._lanes or replicas * workers
        self._refuse_nulls()
        place = self._progress.begin(worker, workers if info else 0)
        window, piece = self._shape(lanes, replicas)
        loader = self._loader.split(piece)
        order = self._order(loader.plan, place.epoch, lanes, window)
        total = self._total(replicas, place.start)
        part = EpochShare(
            total=total,
            lanes=lanes,
            ranks=replicas,
            rank=rank,
            workers=workers,
            worker=worker,
            start=place.start,
            drop_last=self.drop_last,
        )
        indices = part.indices(place.next)
        self._progress.next = indices[0] if indices else part.after(total)
        budget = self._budget(order, loader, replicas, workers)
        return self._batches(loader, order, part, indices, budget, worker, in_worker=info is not None)

    def _budget(self, order: Order, loader: RowGroupLoader, replicas: int, workers: int) -> DecodeBudget:
        near = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = max(1, cpu_count() // (workers * max(1, near)))
        if not self.shuffle:
            return DecodeBudget(threads)
        share, each = self.memory / workers, -(-order.lanes // (replicas * workers))
        return decode_budget(
            loader.sizes, share, lanes=each, all_lanes=order.lanes, window=order.window, threads=threads
        )

    def _read_pass(self, reading: DatasetPass, lanes: int, replicas: int, workers: int) -> Generator[Batch]:
        """Yield what a mix reads of one pass, without the transform; see `pqcache.torch.mix`."""
        window, piece = self._shape(lanes, replicas)
        loader = self._loader.split(piece)
        order = self._order(loader.plan, reading.number, lanes, window)
        lane_rows = reading.lane_sizes * order.batch_size
        lane_rows[reading.last_lane] -= max(0, int(lane_rows.sum()) - order.rows)  # the last batch may be short
        order = replace(order, lane_rows=lane_rows)
        indices = reading.lane_batches * lanes + reading.lanes if self.shuffle else reading.batches
        budget = self._budget(order, loader, replicas, workers)
        return self._whole(loader, order, indices.tolist(), int(indices.max()) + 1, budget)

    def _batches(
        self,
        loader: RowGroupLoader,
        order: Order,
        part: EpochShare,
        indices: range,
        budget: DecodeBudget,
        worker: int,
        in_worker: bool,
    ) -> Iterator[Any]:
        make = self._whole if self.batch_size is not None else self._rows
        with closing(make(loader, order, indices, order.batches(self.drop_last), budget)) as found:
            for batch in found:
                index = batch.index
                result = batch if self.batch_size is not None else dict(batch)
                result = self._transformed(result, batch.place, (batch.epoch, index))
                self._progress.next = index + indices.step if in_worker else part.after(index)
                yield result
        self._progress.finish(worker)

    def _whole(
        self, loader: RowGroupLoader, order: Order, indices: Sequence[int], total: int, budget: DecodeBudget
    ) -> Generator[Batch]:
        memory = worker_pool() if get_worker_info() is not None else None
        with closing(batches(loader, order, indices, total, budget, memory)) as found:
            for index, columns in found:
                yield self._to_batch(
                    columns, Place(epoch=order.epoch, index=index, lanes=order.lanes, window=order.window)
                )

    def _rows(
        self, loader: RowGroupLoader, order: Order, indices: range, total: int, budget: DecodeBudget
    ) -> Generator[Batch]:
        held: dict[int, Batch] = {}
        with closing(samples(loader, order, indices, total, budget)) as found:
            for index, columns, row in found:
                place = Place(epoch=order.epoch, index=index, lanes=order.lanes, window=order.window)
                lane = index % total % order.lanes
                if row == 0:
                    held[lane] = self._to_batch(columns, place)
                yield Batch({name: item(value, row) for name, value in held[lane].items()}, place)

    def _to_batch(self, columns: FinishedBatch, place: Place) -> Batch:
        values: dict[str, Any] = {}
        masks: dict[str, torch.Tensor] = {}
        for numbers in columns.numbers:  # each a tensor of its own: views of one could not be changed in place
            values.update(zip(numbers.forms, map(torch.from_numpy, numbers.values), strict=True))
        masks.update((name, torch.ones(columns.rows, dtype=torch.bool)) for name in self._masked & values.keys())
        for name, column in columns.others.items():
            value, mask = to_value(column, name, self._nulls)
            mask = torch.ones(len(column), dtype=torch.bool) if mask is None and name in self._masked else mask
            axis = self._plan.axis(name)
            values[name] = value if axis is None else in_sequences(value, axis)
            if mask is not None:
                masks[name] = mask if axis is None else in_sequences(mask, axis)
        found: dict[str, Any] = {}
        for name in self._plan.columns:
            found[name] = values[name]
            if name in self._masked:
                found[mask_name(name)] = masks[name]
        return Batch(found, place)

    def _refuse_nulls(self) -> None:
        """Raise ParquetError before anything is decoded, where the files say how many nulls they hold."""
        if self._nulls.mask:
            return
        filled = {name for name, _ in self._nulls.fill}
        for name in self._plan.columns:
            if name not in filled and (count := self._plan.nulls(name)):
                raise null_error(name, count, "the dataset")

    def _transformed(self, batch: Any, place: Place, number: tuple[int, int]) -> Any:
        """Apply the transform with generators seeded for ``number``, epoch and batch, the same in any run."""
        if self.transform is None:
            return batch
        in_worker = get_worker_info() is not None
        kept = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
        node = () if self._nodes is None else (self._nodes.node,)
        words = np.random.SeedSequence([self.seed & (2**64 - 1), *number, *node]).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))  # the generator that transforms use, old as it is
        torch.default_generator.manual_seed(int(words[2]))
        try:
            result = self.transform(batch)
        finally:
            if kept is not None:
                random.setstate(kept[0])
                np.random.set_state(kept[1])
                torch.set_rng_state(kept[2])
        if type(result) is dict and self.batch_size is not None:
            return Batch(result, place)
        return result

    def _order(self, plan: ReadPlan, epoch: int, lanes: int, window: int) -> Order:
        rows = self.batch_size or 1
        return Order(
            counts=plan.counts,
            batch_size=rows,
            lanes=lanes,
            window=window,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
        )

    def _shape(self, lanes: int, replicas: int) -> Window:
        """Return the window, and the rows of the pieces in which row groups are read (0: whole)."""
        if self._window is not None:
            return Window(self._window, self._piece)
        if not self.shuffle:
            return Window(1)
        each = -(-lanes // replicas)
        if each not in self._fitted:
            self._fitted[each] = fit_window((self._nodes or self._loader).sizes, self.memory, each, self._path)
        return self._fitted[each]

    @property
    def _content(self) -> tuple[str, str]:
        """Name the snapshot and the row groups that are read, over all nodes."""
        if self._nodes is not None:
            return self._nodes.listing, self._nodes.row_groups
        return self._data.snapshot, self._plan.fingerprint

    def _agree(self) -> None:
        """Agree with the other nodes, where this is one's share and no ranks were given to read it by itself."""
        if self._nodes is not None or self._replicas is None:
            self._nodes = agree(self._data, self._loader)

    def _rank(self) -> tuple[int, int]:
        if self._nodes is not None:
            return self._nodes.replicas, self._nodes.rank
        return replicas_and_rank(self._replicas)

    def _check_for_mix(self, name: str) -> None:
        """Raise UsageError for options that a mix decides."""
        if self.batch_size is None:
            raise UsageError(f"dataset {name!r}", "a mix draws whole batches", "give it a batch_size")
        if self._nodes is not None:
            raise UsageError(f"dataset {name!r}", "holds a node's share", "a mix needs the whole of it on every node")
        if self._lanes is not None or self._replicas is not None:
            raise UsageError(f"dataset {name!r}", "give lanes, num_replicas and rank to the mix instead")

    def _open(self, columns: Sequence[str] | None, snapshot: str | None, counts: Ints | None = None) -> None:
        data, lease = open_data(self._path, snapshot)
        self._hold(data, lease)
        self._fitted: dict[int, Window] = {}  # window and piece by lanes of a rank
        self._set_plan(data, columns, counts)

    def _set_plan(self, data: Data, columns: Sequence[str] | None, counts: Ints | None) -> None:
        plan = make_read_plan(data, columns, self._filters, self._chosen, counts, self._sequence)
        self._plan = with_dense_lists(plan, self._ragged)
        self._loader = RowGroupLoader(self._plan)

    def _hold(self, data: Data, lease: Lease | None) -> None:
        old = getattr(self, "_release", None)
        if old is not None:
            old()
        self._data = data
        self._release = weakref.finalize(self, lease.close) if lease is not None else None

    def _check_columns(self) -> None:
        names = set(self._plan.columns)
        for field in self._plan.schema:
            check_type(field.name, field.type)
        for name, _ in self._nulls.fill:
            if name not in names:
                raise UsageError("", f"nulls names {name!r}, which is not among the columns")
        if self._nulls.mask:
            self._masked = frozenset(name for name in names if self._plan.nulls(name) != 0)
        for name in self._masked:
            if mask_name(name) in names:
                raise UsageError("", f"nulls='mask' would add {mask_name(name)!r}, which is a column already")

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        kept["_replicas"] = self._rank()
        del kept["_plan"], kept["_loader"], kept["_release"]
        kept["_columns"], kept["_counts"] = self._plan.columns, self._plan.counts_in_index
        if self._release is not None:  # in a cache: opened again, and leased, where it is unpickled
            kept["_data"] = self._data.snapshot
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        columns, counts = kept.pop("_columns"), kept.pop("_counts")
        self.__dict__.update(kept)
        if isinstance(kept["_data"], str):
            self._open(columns, kept["_data"], counts)
        else:
            self._release = None
            self._fitted = {}
            self._set_plan(self._data, columns, counts)
