"""Reads the batches of one dataset as tensors, for ParquetDataset and Mix."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from pqcache.errors import CacheError, UsageError
from pqcache.reader.batch_rows import RowPlaces, checked_index, rows_of_batch
from pqcache.reader.decode import release_unused
from pqcache.reader.epoch import Epoch, Epochs
from pqcache.reader.memory_budget import Window
from pqcache.reader.mixture import DatasetPass
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.order import EpochShare
from pqcache.reader.packing import Pack
from pqcache.reader.proof import content_of
from pqcache.reader.ranks import agree
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.selection.exclude import Excluded, Exclusions, excluded, files_gone
from pqcache.reader.selection.filters import base_of
from pqcache.reader.selection.selection import Counts
from pqcache.reader.stats import TENSORS, DatasetStats, dataset_stats
from pqcache.reader.window import Group
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.manifest import content_digest
from pqcache.store.snapshot import Lease, Snapshot
from pqcache.store.urls import quoted
from pqcache.torch.batch import Batch, Position, item, register
from pqcache.torch.batch_groups import TensorGroup, UnmadeBatch, bytes_of, check_mask
from pqcache.torch.dataset_options import DatasetOptions
from pqcache.torch.distributed import NodeShares, gather_shares, listing_of, snapshot_of
from pqcache.torch.iteration_meter import new_meter
from pqcache.torch.state import Hashed, Place, State
from pqcache.torch.tensors import Conversion, check_type, fills_when_decoded, null_error, paths_in
from pqcache.torch.transforms import FailureLog, Item, TransformRunner
from pqcache.units import format_count

log = logging.getLogger("pqcache.reader")

_GONE = (
    'begin the next epoch on the current one with load_state_dict(state, snapshot="current"); to keep a snapshot for a '
    "training, pin it with 'pqcache pin' or sync with a larger --keep"
)


class DatasetReader:
    """An open dataset that makes batches; its callers track ranks and the place in an epoch.

    ParquetDataset reads shares of epochs (``read``). A mix reads passes (``open_pass``) and transforms the batches once
    they are in its own order. The snapshot is leased while the reader exists, also in processes that unpickle it.
    """

    def __init__(self, options: DatasetOptions) -> None:
        self.options = options
        self.nodes: NodeShares | None = None
        self.meter = new_meter()
        self.failures = FailureLog() if options.skips_errors else None
        self._share_alone = options.num_replicas is not None  # one node's share without the other nodes
        self._window: Window | None = None  # of a loaded state
        self._excluded: list[Excluded] | None = None  # of the options
        self.exclusions: Exclusions = []
        self._open(options.path, options.snapshot_read, options.columns, {})
        if options.since is not None:  # a pin may move
            self.options = replace(options, since=base_of(self.data, options.since))
        self.check_nulls()
        self._gather_shares()
        self.token = register(self)
        weakref.finalize(self, release_unused).atexit = False  # what epochs keep for the next ones

    @property
    def schema(self) -> pa.Schema:
        return self._plan.schema

    @property
    def snapshot(self) -> str:
        """The name of the snapshot; for a plain directory, a hash of its files."""
        return self.data.snapshot

    @property
    def content(self) -> str:
        """Identifies the rows, independent of the snapshot's name."""
        return self.data.content if self.nodes is None else self.nodes.listing

    @property
    def rows(self) -> int | None:
        """The rows (or sequences) of an epoch of this node's share; None if epochs differ."""
        return int(self._plan.counts.sum()) if self._plan.weights is None else None

    @property
    def fill(self) -> float | None:
        """The share of packed sequences filled with tokens; None without packing."""
        return None if self._plan.packs is None else self._plan.packs.fill

    def stats(self) -> DatasetStats:
        threads = self.options.transform_workers or 1
        return dataset_stats(self.meter.counts(), self._plan, self.options.memory, threads)

    def total(self, epoch: int, ranks: int, start: int, pad: bool) -> int:
        """The batches (or rows) of an epoch read from ``start``, over all ranks of this node.

        Without ``pad`` only the node's own share counts; other nodes may have more.
        """
        options = self.options
        if self.nodes is not None and pad:
            return self.nodes.total(options.size_in_order or 1, start, ranks, options.drop_last)
        return self.batches_at(epoch)

    def batches_at(self, epoch: int, of_mix: bool = False) -> int:
        return self._epochs.order(self._epochs.at(epoch, of_mix).plan, epoch).batches(self.options.drop_last)

    def check_nulls(self) -> None:
        """Raise ParquetError, before anything is decoded, if the files count nulls in columns without a fill."""
        conversion = self.options.conversion
        filled = {name for name, _ in conversion.fill}
        for name in self._plan.columns:
            if not conversion.mask and name not in filled and (count := self._plan.nulls(name)):
                raise null_error(name, count, "the dataset", conversion)

    def read(self, share: EpochShare, indices: range, epoch: int, are_sent: bool = False) -> Generator[tuple[int, Any]]:
        """Yield (place, transformed batch), or rows without a batch size, for places of a share.

        Without a transform, batches that ``are_sent`` to another process come as `UnmadeBatch`.
        """
        this, is_plain = self._epochs.begin(epoch, share), self.options.transform is None
        batches, total = share.batches(indices), this.order.batches(self.options.drop_last)

        def read_one(index: int) -> Any:
            with closing(self._batches(this, [index], total)) as found:
                return next(found)[1]

        with closing(self._batches(this, batches, total, are_sent and is_plain)) as found:
            if is_plain:
                for place, (_, batch) in zip(indices, found, strict=True):
                    yield place, batch
                return
            hashed: deque[Hashed] = deque()  # batches in the transform, which does not get their hashes

            def item_of(at: Position, batch: Any) -> Item:
                if type(batch) is Hashed:
                    hashed.append(batch)
                    batch = batch.value
                return Item(value=batch, position=at, place=at.index, numbers=(epoch, at.index))

            items = (item_of(at, batch) for at, batch in found)
            with closing(self._transforms(this).run(items, batches, this.order.lanes, total, read_one)) as results:
                for place, result in zip(indices, results, strict=True):
                    yield place, hashed.popleft()._replace(value=result) if hashed else result

    def open_pass(
        self, reading: DatasetPass, share: EpochShare
    ) -> tuple[TransformRunner, Generator[tuple[Position, Any]]]:
        """The transforms and batches that a share of a mix takes from one pass over this dataset."""
        this = self._epochs.begin(reading.number, share, of_mix=True)
        this = replace(this, order=reading.order_of(this.order))
        indices = reading.lane_batches * share.lanes + reading.lanes if self.options.shuffle else reading.batches
        streams = reading.lanes * 0 if reading.readers is None else reading.readers
        total = int(indices.max()) + 1
        return self._transforms(this), self._merged(this, indices.tolist(), streams.tolist(), total)

    def _merged(
        self, this: Epoch, indices: list[int], streams: list[int], total: int
    ) -> Generator[tuple[Position, Any]]:
        """Yield the batches of a pass, each read by the stream of its lane."""
        of_stream: dict[int, list[int]] = {stream: [] for stream in streams}
        for index, stream in zip(indices, streams, strict=True):
            of_stream[stream].append(index)
        with ExitStack() as stack:
            read = {s: stack.enter_context(closing(self._batches(this, of, total))) for s, of in of_stream.items()}
            for stream in streams:
                yield next(read[stream])

    def _transforms(self, this: Epoch) -> TransformRunner:
        node = None if self.nodes is None else self.nodes.node
        return TransformRunner(self.options, this, self.failures, node, self.meter)

    def place_of(self, epoch: int, index: int, lanes: int, ranks: int, of_mix: bool = False) -> Position:
        """The position of a batch; UsageError if the epoch has no such index."""
        index = checked_index(index, self.batches_at(epoch, of_mix))
        window, piece_rows = self._epochs.window(lanes, ranks)
        return Position(epoch=epoch, index=index, lanes=lanes, window=window, piece=piece_rows)

    def rows_at(self, position: Position, reading: DatasetPass | None = None) -> RowPlaces:
        """The rows of the batch at a position, or at one of a pass ``reading`` of a mix."""
        plan = self._epochs.at(position.epoch, reading is not None).plan.split(position.piece)
        order = self._epochs.order(plan, position.epoch, position.lanes, position.window)
        if reading is not None:
            return rows_of_batch(plan, reading.order_of(order), position.index)
        return rows_of_batch(plan, order, position.index % order.batches(self.options.drop_last))

    def state(self, place: Place, ranks: int, worker: list[int] | None = None) -> State:
        """The state of a training that continues at a place."""
        window, piece_rows = self._epochs.window(place.lanes, ranks)
        return State(
            snapshot=self._listing,
            row_groups=self._row_groups_at(place.epoch),
            columns=list(self._plan.columns),
            shuffle=self.options.shuffle,
            seed=self.options.seed,
            batch_size=self.options.size_in_order,
            window=window,
            piece=piece_rows,
            since=self.options.since,
            exclude=[[begin, one.to_json()] for begin, one in self.exclusions] or None,
            **place.in_state(worker),
        )

    def load_state(self, state: State, of_mix: bool = False) -> None:
        """Restore a state's snapshot, window and excluded rows; the caller restores lanes and place.

        Raises UsageError if options differ, CacheError if the snapshot is no longer kept.
        """
        chosen = self._epochs.set_window
        is_other = state.snapshot != self._listing
        snapshot = self._snapshot_in(state) if is_other else None
        self.check_order_of(state)
        state.check_options(window=state.window if chosen is None else chosen.row_groups)
        exclusions = self._exclusions_after(state, of_mix)
        with ExitStack() as stack:
            if snapshot is not None or exclusions != self.exclusions:
                try:
                    stack.enter_context(self._reopened(snapshot, exclusions))
                except CacheError as error:
                    raise type(error)(error.subject, error.reason, error.advice or _GONE) from error
            state.check_options(columns=list(self._plan.columns))
            if snapshot is not None:
                self._gather_shares()
            if state.row_groups != self._row_groups_at(state.epoch):
                reason = "it was taken with other filters or rows, or another split, sequence, pack or weights"
                raise UsageError("state", reason, "construct the dataset with the same ones")
        self._window = self._epochs.set_window = Window(state.window, state.piece)

    def _exclusions_after(self, state: State, of_mix: bool = False) -> Exclusions:
        """The exclusions of a state, and those of the options from its next epoch on."""
        before = state.exclusions
        known = [one for _, one in before]
        new = [one for one in self._excluded or () if one not in known]
        if new and (of_mix or self.nodes is not None):
            reason = "of a mix, and of nodes that each hold a share, epochs keep their rows"
            raise UsageError("exclude", reason, "give it when the training begins, without a state")
        if new and state.batch and (self.options.batch_size is None or isinstance(self.options.pack, Pack)):
            reason = "rows are single or packed, so an epoch that has begun cannot drop some"
            raise UsageError("exclude", reason, "give it with a state from the beginning of an epoch")
        return [*before, *((state.epoch + (state.batch > 0), one) for one in new)]

    def exclude_after(self, state: State) -> None:
        """Leave out the state's rows and the options' rows."""
        if (found := self._exclusions_after(state)) != self.exclusions:
            with self._reopened(None, found):
                pass

    def check_order_of(self, state: State) -> None:
        options = self.options
        state.check_options(
            seed=options.seed, shuffle=options.shuffle, batch_size=options.size_in_order, since=options.since
        )

    def check_refreshes(self) -> None:
        """Raise UsageError unless this dataset can follow a cache's current snapshot."""
        if self.options.snapshot_read:
            reason = f"the dataset was made for {self.options.snapshot_read!r}, not to follow the current one"
            raise UsageError("refresh", reason, "leave out snapshot= and rows=")
        if self.data.cache is None:
            reason = "only a cache has a current snapshot, and this is a directory, a file or one snapshot"
            raise UsageError("refresh", f"{self.options.path}: {reason}", "'pqcache sync' makes a cache of a directory")

    def refresh(self, with_ranks: bool, patience: float) -> None:
        """Read the cache's current snapshot from now on; after an error, the previous one is still read.

        With several ranks, rank 0's current snapshot decides: if it is new there, all ranks open theirs with its files.
        """
        assert self.data.cache is not None
        cache, before, by_listing = CacheDirectory(self.data.cache), self.data, self.nodes is not None

        def offer() -> tuple[str, bool] | None:
            current = cache.current()
            is_new = current is not None and current.id != before.snapshot
            if current is None or (not is_new and before.arrivals is not None):
                return None  # a first copy, which other nodes may not have completely yet
            return _content_of(current, by_listing), is_new

        with ExitStack() as stack:

            def follow(offered: tuple[str, bool] | None) -> None:
                if offered is None:
                    return
                content, is_new = offered
                kept = cache.snapshots()[::-1]
                if not is_new:
                    kept.sort(key=lambda snapshot: snapshot.id != before.snapshot)  # the one that is read comes first
                found = next((s.id for s in kept if _content_of(s, by_listing) == content), None)
                if found is None:
                    reason = "has no snapshot with the files of rank 0's current one"
                    raise CacheError(cache.path, reason, f"run 'pqcache sync {quoted(cache.path)}' there")
                if is_new or found != before.snapshot:
                    stack.enter_context(self._reopened(found, self.exclusions))

            if with_ranks:
                if objections := agree("refresh", offer, follow, patience):
                    reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in objections.items())
                    raise UsageError("refresh", f"some ranks cannot read rank 0's current snapshot: {reasons}")
            elif (current := cache.current()) is not None and current.id != before.snapshot:
                stack.enter_context(self._reopened(current.id, self.exclusions))
            if self.data is not before:  # on all ranks of nodes with shares, or on none
                self._gather_shares()

    @contextmanager
    def _reopened(self, snapshot: str | None, exclusions: Exclusions) -> Iterator[None]:
        """Read another snapshot, or other rows, from now on, unless the block raises an error."""
        before = self.__dict__.copy()
        self.exclusions = exclusions
        try:
            if snapshot is None:
                self._set_epochs(self.options.columns, {})
            else:
                self._window = None
                self._open(self.data.cache or self.options.path, snapshot, self.options.columns, {})
                self.check_nulls()
            if gone := files_gone(self.data, [one for _, one in exclusions]):
                number = format_count(len(gone), "file")
                log.warning("%s lacks %s with rows that exclude names: %s", self.snapshot, number, ", ".join(gone[:3]))
            yield
            self.token = register(self)
        except BaseException:
            if self._lease is not before["_lease"] and self._lease is not None:
                self._lease.close()
            self.__dict__.update(before)
            raise
        if before["_lease"] is not self._lease and before["_lease"] is not None:
            before["_lease"].release()

    def _snapshot_in(self, state: State) -> str:
        if self.data.cache is None:
            raise UsageError(
                self.options.path,
                f"the state belongs to {state.snapshot}, this is {self.data.snapshot}",
                "its files have changed since the state was taken",
            )
        if chosen := self.options.snapshot_read:
            raise UsageError(
                "state",
                f"it was taken with snapshot {state.snapshot}, and this dataset was made with {chosen!r}",
                "make it with the state's snapshot, or without snapshot= and rows=, to go on; or leave the state out",
            )
        return state.snapshot if self.nodes is None else snapshot_of(self.data.cache, state.snapshot)

    def _batches(
        self, this: Epoch, indices: Sequence[int], total: int, are_sent: bool = False
    ) -> Generator[tuple[Position, Any]]:
        order, piece = this.order, this.plan.piece_rows

        def make(group: Group) -> TensorGroup:
            with self.meter.timed(TENSORS):
                return TensorGroup.of(group, this.plan, self.options.conversion, self._masked)

        with closing(this.read(indices, total, make)) as found:
            for index, group, number in found:
                at = Position(
                    epoch=order.epoch,
                    index=index,
                    lanes=order.lanes,
                    window=order.window,
                    piece=piece,
                    dataset=self.token,
                )
                if self.options.batch_size is None:
                    self.meter.made(0, 1, round(group.row_bytes))
                    yield at, {name: item(value, number) for name, value in group.columns.items()}
                    continue
                if not group.rows(number):
                    log.warning("batch %d of epoch %d has no rows: all are excluded", index, order.epoch)
                unmade = UnmadeBatch(group, number, at)
                self.meter.made(1, group.rows(number), bytes_of(unmade))
                yield at, group.with_hashes(number, unmade if are_sent else Batch(group.batches[number], at))

    def window(self, lanes: int, ranks: int) -> Window:
        return self._epochs.window(lanes, ranks)

    @property
    def _listing(self) -> str:
        return self.data.snapshot if self.nodes is None else self.nodes.listing

    def _row_groups_at(self, epoch: int) -> str:
        """A hash of the rows read by all nodes in an epoch."""
        return self._epochs.plan_from(epoch).fingerprint_at(epoch) if self.nodes is None else self.nodes.row_groups

    def _gather_shares(self) -> None:
        if self.nodes is not None or not self._share_alone:
            self.nodes = gather_shares(self.data, self._epochs.first)
        if self.nodes is not None and self.options.proof:
            raise UsageError("proof=True", f"{self.options.path} holds a node's share", "leave it out")
        if self.nodes is not None and self._plan.weights is not None:
            raise UsageError("weights", "nodes that each hold a share have epochs of one length", "leave them out")
        self._epochs.sizes = None if self.nodes is None else self.nodes.sizes

    def _open(
        self, path: str | os.PathLike[str], snapshot: str | None, columns: Sequence[str] | None, counts: Counts
    ) -> None:
        self.data, lease = open_local_dataset(path, snapshot, self.options.rules, self.options.fill)
        self._hold(lease)
        if self.options.proof and self.data.arriving is not None:
            raise UsageError("proof=True", f"the first copy of {path} is still arriving", "leave it out until then")
        self.files_read = content_of(self.data) if self.options.proof else ""
        self._set_epochs(columns, counts)

    def _hold(self, lease: Lease | None) -> None:
        self._lease = lease
        if lease is not None:
            weakref.finalize(self, lease.close)

    def _set_epochs(self, columns: Sequence[str] | None, counts: Counts) -> None:
        options, conversion = self.options, self.options.conversion
        filled = [n for n in self.data.index.schema.names if conversion.fills_inside(n)]  # not possible in dense lists
        if self._excluded is None:
            self._excluded = excluded(self.data, options.exclude)
            self.exclusions = [(0, one) for one in self._excluded]
        self._counts = counts
        self._epochs = Epochs(
            self.data,
            columns,
            options.path,
            options,
            self.meter,
            counts=counts,
            ragged=(*options.ragged, *filled),
            fills=partial(fills_when_decoded, conversion),
            exclusions=self.exclusions,
            has_hashes=options.proof,
        )
        self._plan = self._epochs.plan
        self._masked = _masked_columns(self._plan, conversion, options.ragged)
        self._epochs.set_window = self._window or self._epochs.set_window
        self._epochs.sizes = None if self.nodes is None else self.nodes.sizes

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_plan", "_epochs", "_lease")
        kept = {name: value for name, value in self.__dict__.items() if name not in dropped}
        kept["_columns"] = self._plan.columns
        if self.data.identities is None:  # a snapshot: opened again, and leased, where it is unpickled
            kept["data"] = self.data.cache or self.data.directory, self.data.snapshot  # absolute paths
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        columns, counts = kept.pop("_columns"), kept.pop("_counts")
        self.__dict__.update(kept, token=register(self, kept["token"]))
        if isinstance(kept["data"], tuple):
            path, snapshot = kept["data"]
            self._open(path, snapshot, columns, counts)
        else:
            self._hold(self.data.lease())
            self._set_epochs(columns, counts)


@lru_cache(maxsize=16)
def _content_of(snapshot: Snapshot, by_listing: bool) -> str:
    """Identifies a table's content: equal in the caches of different nodes, and for shares of the same listing."""
    return listing_of(snapshot) if by_listing else content_digest(snapshot.manifest())


def _masked_columns(plan: ReadPlan, conversion: Conversion, ragged: tuple[str, ...]) -> frozenset[str]:
    """The columns that get a mask; UsageError for unknown columns in options and types without a tensor form."""
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
