"""Epochs, ranks and checkpoints, common to datasets and mixes."""

from __future__ import annotations

import hashlib
import time
import warnings
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.order import Division, EpochShare, next_divisions
from pqcache.reader.ranks import MIXING, check_alike, check_launched, is_rank, of_this_process, of_torch
from pqcache.reader.selection.selection import digest_of
from pqcache.reader.stats import DatasetStats, Meter
from pqcache.torch.batch import Batch, has_moved
from pqcache.torch.batch_groups import GroupSizes, grouped, sizes_in_worker
from pqcache.torch.dataset_options import STALL_TIMEOUT, IterationOptions
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.foreign_loaders import check_batching, check_dividing, reads_ahead
from pqcache.torch.iteration_meter import IterationMeter, measured
from pqcache.torch.state import Place, Progress, Record, SavedPlace, Tally
from pqcache.torch.transport import begin_worker

_REPEATS = (
    "this epoch has the same order as the one before: call set_epoch(epoch) on the dataset before each epoch, or use "
    "pqcache.torch.Loader, which does"
)


def _other_epoch(named: int, of_state: int) -> UsageError:
    return UsageError(
        f"set_epoch({named})",
        f"the loaded state is at epoch {of_state}",
        f"begin with set_epoch({of_state}): dataset.epoch does not know of a StatefulDataLoader's state "
        "before it iterates; pqcache.torch.Loader and its epoch do",
    )


@dataclass
class LoaderIteration:
    """A Loader's iteration over a ``share`` of an epoch, with the number of batches ``given`` to the trainer.

    A caller that reads ahead holds back ``held_back`` of them until the end.
    """

    record: Record
    share: EpochShare
    count: int  # batches in the share
    held_back: int
    given: int = 0
    goes_on: bool = True
    is_done: bool = False  # nothing is left on any rank

    @property
    def is_all(self) -> bool:
        return self.given >= self.count

    @property
    def place(self) -> Place:
        """The place after the last batch that the trainer received; at the end, after all rounds of all ranks."""
        if self.is_done:
            return Place(self.record.epoch, self.share.end, self.share.lanes, self.share.divisions)
        batch = min(self.share.start + max(0, self.given - self.held_back) * self.share.ranks, self.share.end)
        return Place(self.record.epoch, batch, self.share.lanes, self.share.divisions)


@dataclass
class _Iteration:
    """This process's iteration over a ``share`` of an epoch, which continues at the place ``following``.

    In a worker, that is the place of its own next batch. With ``reads_ahead`` the caller holds a batch back.
    """

    record: Record
    share: EpochShare
    following: int
    reads_ahead: bool = False
    goes_on: bool = False


class ResumableDataset(IterableDataset[Batch]):
    """An iterable dataset whose epochs are divided among ranks and workers, and can resume at any batch.

    A subclass has ``readers`` and a ``meter``, says how many batches an epoch has (``_total``) and reads those of one
    worker (``_read``).
    """

    _readers: Sequence[DatasetReader]  # of a mix several
    _meter: Meter  # counts the trainer's waits
    _yields_batches = True  # else rows
    _is_shuffled = True  # epochs differ in their order
    _epochs_differ = False  # epochs differ in their number of batches
    _can_divide = True  # among any number of ranks x workers, whatever the lanes

    def __init__(self, options: IterationOptions) -> None:
        super().__init__()
        self.stall_timeout, self.drop_last, self.pad = options.stall_timeout, options.drop_last, options.pad
        self._lanes, self._chosen_ranks = options.lanes, options.chosen_ranks
        self._ranks_of_trainer: tuple[int, int] | None = None  # set by unpickling
        self._progress = Progress()  # a Loader looks at it too
        self._iteration: _Iteration | None = None  # the latest one of this process
        self._restored: _Iteration | None = None  # by torchdata's StatefulDataLoader in this worker
        self._has_loader = False  # there is a Loader, which counts epochs
        self._in_loader = False  # a Loader is iterating, or has started this worker
        self._loader_iteration: LoaderIteration | None = None  # the latest one
        self._groups: GroupSizes | None = None  # in workers of a Loader that takes several batches together
        self._tally: Tally | None = None  # of the batches that were given, for a proof

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._progress.record.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in persistent workers too; it selects the order of the batches.

        After ``load_state_dict``, the state's own epoch continues where it was; any other begins at its first batch.
        Raises UsageError for an epoch below 0.
        """
        check_dividing(self._ranks()[0])
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches (or rows) of a complete epoch on this rank; the same on all unless pad=False."""
        if self._yields_batches:
            check_batching()
        self._check_started()
        return self.batches_of(self.epoch)

    def __getitem__(self, index: Any) -> Any:
        """Raise UsageError: `random_split` and `Subset` need a dataset without an order of its own."""
        reason = "it can only be iterated, and random_split and Subset need items by number"
        advice = "for a part of its rows pass split=Split(KEY, 0.0, 0.8), or limit=; for specific rows rows="
        raise UsageError(f"{type(self).__name__}[{index!r}]", reason, advice)

    @property
    def batches_per_rank(self) -> tuple[int, ...]:
        """The number of batches (or rows) of a complete epoch on each rank: equal unless ``pad=False``."""
        share = self._share(Place(self.epoch, 0, self._ranks()[0]))
        return tuple(replace(share, rank=rank).count() for rank in range(share.ranks))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            begin_worker()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        ranks, _ = self._ranks()
        self._check_started()
        check_dividing(ranks)
        if self._yields_batches:
            check_batching()
        for reader in self._readers:
            reader.check_nulls()
        trains = torch.is_grad_enabled()  # evaluations may use the same order each time
        if worker == 0 and trains and self._is_shuffled and self._restored is None and self._progress.repeats():
            warnings.warn(_REPEATS, UserWarning, stacklevel=2)
        record, lanes = self._progress.begin(), self._lanes or ranks * workers
        iteration, self._restored = self._restored, None
        if iteration is None:
            share = self._share(record.place(lanes), worker=worker, workers=workers)
            iteration = _Iteration(record, share, share.start)
        iteration.reads_ahead, self._iteration = reads_ahead(), iteration
        if self._tally is not None and not self._in_loader:
            if info is not None or iteration.reads_ahead:
                reason = "only a Loader knows which batches of its workers the trainer was given"
                raise UsageError("proof=True", reason, "use pqcache.torch.Loader")
            self._tally.begin(iteration.record.epoch, iteration.share)
        self._check_ranks(iteration.share, iteration.record.epoch)
        batches = of_this_process(self._iterate(iteration), type(self).__name__)
        return batches if (sizes := sizes_in_worker(self._groups)) is None else grouped(batches, sizes)

    def _iterate(self, iteration: _Iteration) -> Generator[Any]:
        record, share, in_worker = iteration.record, iteration.share, get_worker_info() is not None
        indices = share.indices(iteration.following)
        known = (0, self._layout(share.lanes), self._layout(0))
        if in_worker and not self._progress.is_own and record.layout not in known:
            raise UsageError(
                "DataLoader(persistent_workers=True)",
                "a state with another snapshot, window or number of lanes was loaded after its workers had started",
                "make a new DataLoader, or use pqcache.torch.Loader, which starts new workers",
            )
        try:
            with self._measured(record.epoch) as meter, closing(self._read(share, indices, record.epoch)) as batches:
                for index, batch in meter.over(batches):
                    self._progress.check(record)
                    if self._tally is not None and not self._in_loader:
                        batch = self._tally.take(batch)
                        self._tally.give()
                    iteration.following = index + indices.step if in_worker else share.after(index)
                    iteration.goes_on = index != indices[-1]
                    if not iteration.goes_on:  # here already, as a trainer that counts steps does not ask for more
                        if (share.has_last or self._progress.is_own) and not self._in_loader:
                            self._progress.finish(record)
                        meter.is_complete = not in_worker or self._is_made(share)
                    yield batch
        finally:
            iteration.goes_on = False
        self._progress.check(record)
        if not share.count() and not self._in_loader:
            self._progress.finish(record)
        if not in_worker:  # with pad=False another rank may have had one batch more
            iteration.following = share.end

    def _is_made(self, share: EpochShare) -> bool:
        counts = self.stats().epoch
        return (counts.batches if self._yields_batches else counts.rows) >= share.count()

    def _measured(self, epoch: int) -> AbstractContextManager[IterationMeter]:
        """Measure an iteration of this process, unless a Loader does."""
        in_worker = get_worker_info() is not None
        if self._in_loader and not in_worker:
            return nullcontext(IterationMeter(self._meter))
        number = self._progress.pass_key if in_worker else time.monotonic_ns()
        return measured(self, epoch, number, by_loader=self._in_loader)

    @property
    def _meters(self) -> list[Meter]:
        return list({id(meter): meter for meter in (self._meter, *(reader.meter for reader in self._readers))}.values())

    @abstractmethod
    def stats(self) -> DatasetStats:
        """Return the cost of reading so far."""

    def state_dict(self, after: Batch | int | Place | None = None) -> dict[str, Any]:
        """Return the state after the batch ``after``, as a small dict of JSON values.

        ``after`` is the last batch the trainer has consumed, or its global ``index``; None means the last one yielded.
        The state is the same on every rank: it counts all ranks' batches of that step as consumed. Raises UsageError if
        a DataLoader's workers have read the dataset, because only the loader knows what they yielded; use a ``Loader``.
        """
        info, iteration = get_worker_info(), self._iteration
        worker = [info.id, info.num_workers, iteration.share.start if iteration else 0] if info else None
        return self._state_at(self._place(after), worker).to_dict()

    def proof(self) -> dict[str, Any]:
        """Return what this rank received of the epoch so far, like ``state_dict()``, for ``pqcache.prove``.

        Raises UsageError unless the dataset was made with ``proof=True``.
        """
        self._check_proves()
        return self.state_dict()

    def _check_proves(self) -> None:
        """Raise UsageError unless proofs are kept."""
        if self._tally is None:
            reason = "the dataset does not keep sums of the rows that it gives"
            raise UsageError("proof()", reason, "make it with ParquetDataset(..., proof=True)")

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""

    def _check_refreshes(self) -> None:
        """Raise UsageError unless epochs can begin on newer snapshots."""
        reason = "a mix goes on within its datasets from epoch to epoch, each in one snapshot"
        advice = "construct the mix again without a state, or with the new data under another name and changed=True"
        raise UsageError("refresh", reason, advice)

    def _refresh(self) -> None:
        """Begin the next epoch on the cache's current snapshot; stay on this one with a warning if that fails."""

    def _load_epoch(self, state: Mapping[str, Any], snapshot: str) -> None:
        """Continue with the epoch after ``state`` on the cache's ``snapshot``, which is "current"."""
        self._check_refreshes()

    @abstractmethod
    def _state_at(self, place: Place, worker: list[int] | None) -> SavedPlace: ...

    @abstractmethod
    def _total(self, epoch: int, ranks: int, start: int) -> int:
        """The batches (or rows) of an epoch that begins at ``start``, over all these ranks."""

    @abstractmethod
    def _rows_of(self, epoch: int, index: int, lanes: int, ranks: int) -> RowPlaces:
        """The rows of a batch of an epoch read on these lanes and ranks."""

    @abstractmethod
    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        """Yield (place, batch) for the ``indices`` of ``share``."""

    def _place(self, after: Batch | int | Place | None) -> Place:
        """The place to continue from once every rank has consumed ``after``, a batch or its index."""
        if isinstance(after, Place):
            return after
        worker, record, iteration = get_worker_info(), self._progress.record, self._iteration
        if worker is None and self._progress.is_lost:
            raise UsageError(
                "state_dict()",
                "a DataLoader's workers read the dataset, and which of their batches were consumed only a loader knows",
                "use pqcache.torch.Loader and its state_dict()",
            )
        readers = worker.num_workers if worker else 1
        lanes = self._lanes or self._ranks()[0] * readers
        if after is None:
            if iteration is None or not (worker or iteration.goes_on or iteration.record.generation >= record.moved):
                share = self._share(self._progress.next.place(lanes), readers=readers)
                return Place(record.epoch, share.start, lanes, share.divisions)
            if iteration.reads_ahead:
                raise UsageError(
                    "state_dict()",
                    "the loader of Ray's prepare_data_loader, or Accelerate's, reads one batch ahead of the trainer",
                    "use pqcache.torch.Loader and its state_dict(), which knows that",
                )
            share = iteration.share
            return Place(iteration.record.epoch, iteration.following, share.lanes, share.divisions)
        if not isinstance(after, Mapping):
            epoch, index = iteration.record.epoch if iteration and iteration.goes_on else record.epoch, int(after)
        elif isinstance(after, Batch) and has_moved(after.position):
            raise UsageError(
                "state_dict(after=batch)",
                "the batch is from another snapshot than the dataset reads now",
                "take the state before the next epoch begins, or use pqcache.torch.Loader and its state_dict()",
            )
        elif isinstance(after, Batch) and after.index >= 0:
            epoch, index, lanes = after.epoch, after.index, after.position.lanes
        else:
            raise UsageError(
                "state_dict(after=batch)",
                "the batch does not know its index: it was made anew from the one that the dataset yielded",
                "use pqcache.torch.Loader and its state_dict(), or pass after=index",
            )
        known = [begun for begun in (iteration and iteration.record, record) if begun and begun.epoch == epoch]
        share = self._share(known[0].place(lanes) if known else Place(epoch, 0, lanes))
        return Place(epoch, share.after(share.place_of(index)), lanes, share.divisions)

    def _layout(self, lanes: int) -> int:
        """A fingerprint of everything that batches depend on and a state may change; 0 lanes mean any number."""
        text = repr(self._layout_values(lanes)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") + 1

    def _layout_values(self, lanes: int) -> Any:
        ranks, _ = self._ranks()
        return lanes, [(r.snapshot, r.exclusions, r.window(lanes, ranks) if lanes else None) for r in self._readers]

    def _resume(self, state: SavedPlace) -> None:
        """Set the epoch and the first batch from a checked ``state``."""
        place, record = state.place, self._progress.record
        if state.worker is not None:
            self._restore(place, state.worker, record)
            return
        ended = state.batch > 0 and not self._share(place).rounds()
        following = Place(state.epoch + 1, 0, state.lanes) if ended else place
        if record.is_named and not self._has_loader and not self._progress.has_begun:
            if record.epoch not in (place.epoch, following.epoch):
                raise _other_epoch(record.epoch, state.epoch)
            if record.epoch == place.epoch:  # it may have ended without a batch left
                following = place
        self._iteration = None
        self._progress.load(following, self._layout(state.lanes), ended=state.batch if following != place else 0)

    def _restore(self, place: Place, saved: list[int], record: Record) -> None:
        """Continue in a worker of torchdata's StatefulDataLoader with this worker's own state.

        Called after ``set_epoch``. If the epoch had ended, the loader starts new workers without a state.
        """
        worker, workers, start = saved
        share = self._share(place._replace(batch=start), worker=worker, workers=workers)
        left = share.indices(place.batch)
        if record.is_named and record.epoch == place.epoch + 1 and not left:
            return
        if record.is_named and record.epoch != place.epoch:
            raise _other_epoch(record.epoch, place.epoch)
        of_epoch = record._replace(epoch=place.epoch, start=start, divisions=share.divisions, layout=0)
        self._restored = _Iteration(of_epoch, share, place.batch)
        if share.has_last and not left:
            ended = Place(place.epoch, share.end, 0) if record.is_named else Place(place.epoch + 1, 0, 0)
            self._progress.move(ended)
        elif share.has_last and not record.is_named:
            self._progress.move(Place(place.epoch, 0, 0))

    def _begin_pass(self, workers: int, is_read: bool = False) -> tuple[EpochShare, int]:
        """The share of this rank (in a worker, its own) of the next pass, and its epoch.

        If the current epoch ``is_read``, the next pass is of the epoch after it.
        """
        self._check_started()
        info, record = get_worker_info(), self._progress.next
        readers = info.num_workers if info else max(1, workers)
        begin = record.place(self._lanes or self._ranks()[0] * readers)
        if is_read:
            begin = Place(record.epoch + 1, 0, begin.lanes)
        if info:
            return self._share(begin, worker=info.id, workers=readers), begin.epoch
        return self._share(begin, readers=readers), begin.epoch

    def _check_ranks(self, share: EpochShare, epoch: int) -> None:
        """Raise the same UsageError on all ranks unless all begin this epoch in the same way."""
        if not self._meets_ranks:
            return
        state = self.state_dict(after=Place(epoch, share.start, share.lanes, share.divisions))
        contents = {reader.snapshot: reader.content for reader in self._readers}
        begun = _compared({"exclude": None, **state, "drop_last": self.drop_last, "pad": self.pad}, contents)
        if not self._is_shuffled:  # these only decide the order
            begun = {name: value for name, value in begun.items() if name not in MIXING}
        check_alike(begun, self._patience)

    @property
    def _meets_ranks(self) -> bool:
        """Whether this is one of several torch.distributed ranks that read this dataset together."""
        return self._chosen_ranks is None and is_rank()

    @property
    def _patience(self) -> float:
        """How long to wait for other ranks before a warning, in seconds."""
        return self.stall_timeout or STALL_TIMEOUT

    def rows_of(self, epoch: int, index: int) -> RowPlaces:
        """Return the location of each row of a batch: file, row group, and position in both.

        ``index`` counts the batches (or rows) of the epoch over all ranks, as ``batch.index`` does. This is arithmetic
        and reads nothing, except with ``filters``, ``split`` and the like, which read their columns in the batch's row
        groups. If you left out ``lanes``, those of the latest iteration apply; set ``lanes``, or call ``batch.rows()``.
        Raises UsageError if the epoch has no such batch.
        """
        ranks, _ = self._ranks()
        return self._rows_of(epoch, index, self._lanes or ranks * max(1, self._progress.workers), ranks)

    def _rows_of_batches(self) -> tuple[int, int] | None:
        """The rows of a batch and of the epoch's last one; None if other batches differ in size."""
        return None

    def batches_of(self, epoch: int) -> int:
        """The batches (or rows) of a complete epoch on this rank; with weights they differ between epochs."""
        return self._share(Place(epoch, 0, self._ranks()[0])).count()

    def _share(self, begin: Place, *, worker: int = 0, workers: int = 1, readers: int | None = None) -> EpochShare:
        """The share of this rank with ``readers`` readers, or of one of its workers, from a place on."""
        ranks, rank = self._ranks()
        epoch, start, lanes, divisions = begin
        if self._can_divide:
            divisions = next_divisions(divisions, lanes, Division(start, ranks, readers or workers))
        return EpochShare(
            total=self._total(epoch, ranks, start),
            lanes=lanes,
            shuffled=self._is_shuffled,
            divisions=divisions,
            ranks=ranks,
            rank=rank,
            workers=workers,
            worker=worker,
            start=start,
            drop_last=self.drop_last,
            pad=self.pad,
        )

    def _ranks(self) -> tuple[int, int]:
        """The number of ranks that share the batches, and this one."""
        return self._ranks_of_all()

    def _ranks_of_all(self) -> tuple[int, int]:
        """The number of all ranks and this one: as chosen, from this worker's trainer, or from torch.distributed."""
        if self._chosen_ranks is not None:
            return self._chosen_ranks
        if get_worker_info() is not None and self._ranks_of_trainer is not None:
            return self._ranks_of_trainer  # a spawned worker has no process group
        return of_torch() or (1, 0)

    def _check_started(self) -> None:
        """Raise UsageError if a launcher started several processes that would each read all rows."""
        if self._chosen_ranks is None:
            check_launched(self._ranks_of_all()[0])

    def __getstate__(self) -> dict[str, Any]:
        """Pass the ranks of this process on to its workers.

        Other processes determine theirs again: a rank spawned by a framework is not the process that made the dataset.
        """
        return {**self.__dict__, "_iteration": None, "_ranks_of_trainer": self._ranks_of_all()}


def _compared(state: Mapping[str, Any], contents: Mapping[str, str], within: str = "") -> dict[str, tuple[Any, Any]]:
    """The values that all ranks must share, and how to show them. Snapshots are compared by content."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in state.items():
        if name in ("columns", "batches", "proof"):  # a rank may read more columns, and a node may hold more rows
            continue
        if isinstance(value, Mapping):
            found |= _compared(value, contents, f"{within}{name}.")
        elif name == "exclude":
            found[within + name] = (digest_of(value), "none" if value is None else f"rows {digest_of(value)}")
        else:
            found[within + name] = (contents.get(value, value) if name == "snapshot" else value, value)
    return found
