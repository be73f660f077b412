"""Epochs, ranks and checkpoints, the same for a dataset and for a mix."""

from __future__ import annotations

import os
import time
import warnings
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.meter import Meter
from pqcache.reader.options import check_numbers
from pqcache.reader.order.division import Division, next_divisions
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.processes import MIXING, check_alike, check_launched, is_rank, of_this_process
from pqcache.reader.reading_stats import DatasetStats
from pqcache.torch.batch import Batch
from pqcache.torch.batch_groups import GroupSizes, grouped, sizes_in_worker
from pqcache.torch.checkpoint import MixState, Place, State, divisions_in
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.distributed import ranks_and_rank
from pqcache.torch.foreign_loaders import check_batching, check_dividing, reads_ahead, warn_of_lost_place
from pqcache.torch.iteration_meter import IterationMeter, NoIterationMeter, describe_reading, measured
from pqcache.torch.lightning_loaders import check_fit, check_saving, restore_place
from pqcache.torch.progress import IterationStart, Progress
from pqcache.torch.shared_memory import begin_worker
from pqcache.units import parse_count, parse_duration

STALL_TIMEOUT = 60.0  # seconds
Count = int | str  # a whole number, or text of one

_REPEATS = (
    "this epoch has the same order as the one before: call set_epoch(epoch) on the dataset before each epoch, or use "
    "pqcache.torch.Loader, which does"
)


def count_or_none(value: Count | None) -> int | None:
    """Return a number that may be given as text; UsageError for other text."""
    return None if value is None else parse_count(value)


class GivenByLoader(NamedTuple):
    """How many batches of the dataset's epoch a Loader has given, and whether that is all; as of a ``version``."""

    version: int
    batches: int
    is_all: bool


class ResumableDataset(IterableDataset[Batch]):
    """An iterable dataset whose epochs are divided among ranks and workers, and can go on at any batch.

    A subclass says how many batches an epoch has (``_total``), what to check before an epoch (``_check``) and how to
    read the batches of one worker (``_read``).
    """

    def __init__(
        self,
        *,
        drop_last: bool,
        pad: bool,
        lanes: Count | None,
        num_replicas: Count | None,
        rank: Count | None,
        stall_timeout: str | float | None,
    ) -> None:
        super().__init__()
        self.stall_timeout = None if stall_timeout is None else parse_duration(stall_timeout)
        if self.stall_timeout == 0:
            raise UsageError(f"stall_timeout={stall_timeout!r}", "every batch takes longer", "give a time, or None")
        self._passes = 0  # of this process, which a worker counts
        self._measured_by_loader = False  # what this process iterates
        if drop_last and not pad:
            reason = (
                "both say what becomes of the last round: drop_last=True leaves it out, pad=False does not fill it up"
            )
            raise UsageError("drop_last=True and pad=False", reason, "choose one of them")
        self.drop_last, self.pad = drop_last, pad
        self._lanes, ranks, this_rank = count_or_none(lanes), count_or_none(num_replicas), count_or_none(rank)
        check_numbers(lanes=self._lanes, num_replicas=ranks)
        if (ranks is None) != (this_rank is None):
            raise UsageError("num_replicas and rank", "give both or neither")
        self._chosen_ranks = None if ranks is None or this_rank is None else (ranks, this_rank)
        self._ranks_of_trainer: tuple[int, int] | None = None  # in a pickle
        self._progress = Progress()
        self._read_ahead = False  # by a wrapper of the loader, in this process
        self._has_loader = False  # a Loader, which counts epochs
        self.given_by_loader = GivenByLoader(-1, 0, False)
        self.groups: GroupSizes | None = None  # in workers of a Loader that takes several batches together

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._progress.epoch

    @property
    def progress(self) -> Progress:
        """The epoch and where it begins, as a Loader looks at it."""
        return self._progress

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, persistent workers included; it selects the order of the batches.

        After ``load_state_dict`` the state's own epoch goes on where it was; any other begins at its first batch. An
        epoch below 0 raises UsageError.
        """
        check_dividing(self._ranks()[0])
        warn_of_lost_place()
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches (or rows) of a complete epoch on this rank; the same on all unless pad=False."""
        if self.yields_batches:
            check_batching()
        self._check_started()
        check_fit(self._progress, self._is_shuffled, self._has_loader, self._ranks()[0])
        return self._share(self.epoch, lanes=self._ranks()[0]).count()

    def __getitem__(self, index: Any) -> Any:
        """Raise UsageError: `random_split` and `Subset` take what an iterable dataset has in an order of its own."""
        reason = "it is iterated, and has no item by number, which random_split and Subset ask for"
        advice = "for a part of its rows pass split=Split(KEY, 0.0, 0.8), or limit=; for certain rows rows="
        raise UsageError(f"{type(self).__name__}[{index!r}]", reason, advice)

    @property
    def batches_per_rank(self) -> tuple[int, ...]:
        """The number of batches (or rows) of a complete epoch on each rank: equal unless ``pad=False``."""
        share = self._share(self.epoch, lanes=self._ranks()[0])
        return tuple(replace(share, rank=rank).count() for rank in range(share.ranks))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            begin_worker()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        ranks, _ = self._ranks()
        self._check_started()
        check_dividing(ranks)
        self._read_ahead = reads_ahead()
        if self.yields_batches:
            check_batching()
        self._check()
        trains = torch.is_grad_enabled()  # to evaluate on the same order each time is as it should be
        if worker == 0 and trains and self._is_shuffled and self._progress.repeats(workers if info else 0):
            warnings.warn(_REPEATS, UserWarning, stacklevel=2)
        begin = self._progress.begin(workers if info else 0)
        lanes = self._lanes or ranks * workers
        share = self._share(begin.epoch, lanes=lanes, begin=begin, worker=worker, workers=workers)
        self.check_ranks(share, begin.epoch)
        indices = share.indices(begin.next)
        self._progress.next = indices[0] if indices else share.end
        loads = self._progress.reading_loads
        read = self._iterate(share, indices, begin, info is not None, loads)
        batches = of_this_process(read, type(self).__name__)
        return batches if (sizes := sizes_in_worker(self.groups)) is None else grouped(batches, sizes)

    def _iterate(
        self, share: EpochShare, indices: range, begin: IterationStart, in_worker: bool, loads: int
    ) -> Generator[Any]:
        """Yield the batches of an iteration that began after so many ``loads`` of a state."""
        progress, epoch = self._progress, begin.epoch
        try:
            with self._measured(epoch) as meter, closing(self._read(share, indices, epoch)) as batches:
                for index, batch in meter.over(batches):
                    progress.check_loads(loads)
                    is_last = index == indices[-1]
                    progress.given(begin, index + indices.step if in_worker else share.after(index), is_last)
                    if is_last:  # a trainer that counts steps does not ask for more
                        progress.finish(share.worker)
                        meter.is_complete = not in_worker or progress.is_finished(share.workers)
                    yield batch
        finally:
            progress.ended(begin)
        progress.check_loads(loads)
        if not in_worker:  # with pad=False another rank may have had one batch more
            progress.given(begin, share.end, is_last=True)
        if not indices:
            progress.finish(share.worker)

    def _measured(self, epoch: int) -> AbstractContextManager[IterationMeter | NoIterationMeter]:
        """Return what measures an iteration of this process, unless a Loader does."""
        info = get_worker_info()
        if info is None and self._measured_by_loader:
            return nullcontext(NoIterationMeter())
        self._passes += 1
        number = time.monotonic_ns() if info is None else (info.seed - info.id + self._passes) % (1 << 62) + 1
        return measured(self, epoch, number, by_loader=self._measured_by_loader)

    @contextmanager
    def measured_by_loader(self, epoch: int, workers: int) -> Iterator[IterationMeter]:
        """Measure an iteration of a Loader with so many workers."""
        self._measured_by_loader = True
        try:
            with measured(self, epoch, time.monotonic_ns(), workers, by_loader=True) as meter:
                yield meter
        finally:
            self._measured_by_loader = False

    def describe_reading(self) -> list[str]:
        """Return what the processes of this pass read now, as lines; of a worker only what it reads itself."""
        return describe_reading(self.readers, only=None if get_worker_info() is None else os.getpid())

    @property
    def meters(self) -> list[Meter]:
        """All that count for this dataset."""
        return list({id(meter): meter for meter in (self.meter, *(reader.meter for reader in self.readers))}.values())

    @property
    @abstractmethod
    def meter(self) -> Meter:
        """What counts the trainer's waits."""

    @property
    @abstractmethod
    def readers(self) -> Sequence[DatasetReader]:
        """What reads, of a mix several."""

    @abstractmethod
    def stats(self) -> DatasetStats:
        """Return what reading has taken so far."""

    def _place(self, after: Batch | int | Place | None) -> Place:
        """Return the place to go on from when ``after``, a batch or its index, was consumed on every rank."""
        if isinstance(after, Place):
            return after
        ranks, _ = self._ranks()
        worker = get_worker_info()
        if after is None:
            if worker is None and self._progress.workers:
                raise UsageError(
                    "state_dict()",
                    "it cannot know which of the workers' batches were consumed",
                    "pass after=batch, the last batch that was",
                )
            if self._read_ahead:
                raise UsageError(
                    "state_dict()",
                    "Ray's prepare_data_loader reads one batch ahead of what the trainer has consumed",
                    "use pqcache.torch.Loader and its state_dict(), which knows that",
                )
            readers = worker.num_workers if worker else 1
            lanes, following = self._lanes or ranks * readers, self._progress.next
            if self._progress.running is not None:  # also of another epoch than was set for the next iteration
                begin, following = self._progress.running
            elif worker:
                begin = self._progress.current
            else:
                begin = self._progress.read or self._progress.begin_of(self.epoch)
            share = self._share(begin.epoch, lanes=lanes, begin=begin, readers=readers)
            return Place(begin.epoch, following, lanes, share.divisions)
        if self._progress.unordered:
            raise UsageError(
                "state_dict(after=batch)",
                "the DataLoader has in_order=False: a batch does not tell which others were consumed before it",
                "use pqcache.torch.Loader, or leave in_order=False out",
            )
        if isinstance(after, (Batch, Mapping)):
            if not isinstance(after, Batch) or after.index < 0:
                raise UsageError(
                    "state_dict(after=batch)",
                    "the batch does not know its index: it was made anew from the one that the dataset yielded",
                    "use pqcache.torch.Loader and its state_dict(), or pass after=index",
                )
            epoch, index, lanes = after.epoch, after.index, after.position.lanes
        else:
            running = self._progress.running
            if running is None and self._progress.workers and self._progress.is_set_since:
                raise UsageError(
                    f"state_dict(after={after})",
                    "an epoch was set since the iteration began, and an index does not say which epoch it is of",
                    "pass after=batch, the last batch that was consumed",
                )
            epoch = self.epoch if running is None else running[0].epoch
            index, lanes = int(after), self._lanes or ranks * max(1, self._progress.workers)
        begin = self._progress.begin_of(epoch)
        share = self._share(epoch, lanes=lanes, begin=begin, readers=max(1, self._progress.workers))
        return Place(epoch, share.after(share.place_of(index)), lanes, share.divisions)

    def _worker_state(self) -> list[int] | None:
        """Return what marks a state as one worker's; None in the trainer. See ``State.worker``."""
        info = get_worker_info()
        return [info.id, info.num_workers, self._progress.current.start] if info else None

    def _layout(self) -> Any:
        """Return the lanes, windows and snapshots that running workers read; None where there are none."""
        if get_worker_info() is not None or not self._progress.workers:
            return None
        ranks, _ = self._ranks()
        lanes = self._lanes or ranks * self._progress.workers
        return lanes, [(reader.snapshot, reader.window(lanes, ranks)) for reader in self.readers]

    def _resume(self, state: State | MixState, layout: Any) -> None:
        """Set the epoch and the first batch from ``state``; the caller has checked the rest.

        ``layout`` is what ``_layout`` returned before the state was loaded.
        """
        begin = IterationStart(state.epoch, state.batch, None, divisions_in(state))
        remaining = self._share(state.epoch, lanes=state.lanes, begin=begin).rounds()
        in_worker = get_worker_info() is not None
        ended = state.batch > 0 and not remaining
        self._progress.resume(state, in_worker, ended, changed=self._layout() != layout)
        if in_worker and state.worker is not None:
            begin = IterationStart(state.epoch, state.worker[2], None, divisions_in(state))
            share = self._share(state.epoch, lanes=state.lanes, begin=begin, readers=state.worker[1])
            last = state.batch - share.ranks * state.worker[1]  # what this worker gave last
            if share.indices()[-1:] == range(last, last + 1):
                self._progress.note_end(state.epoch, share.after(last))

    def set_loader(self) -> None:
        """Note that a Loader reads this dataset, and counts its epochs."""
        self._has_loader = True

    def restore_in_fit(self) -> None:
        """Take over the place that Lightning's ``Trainer.fit`` resumes at, if it has not said it yet."""
        restore_place(self._progress, self._ranks()[0])

    @property
    def is_resumed(self) -> bool:
        """Whether the next iteration goes on where a state was taken."""
        return self._progress.is_resumed

    def begin_pass(self, workers: int, is_read: bool = False) -> tuple[EpochShare, int]:
        """Return what is read here in the pass that begins next with so many workers, and the epoch's number.

        That is the part of this rank; in a worker, its own. It is of the next epoch if the present one ``is_read``.
        """
        self._check_started()
        info, epoch = get_worker_info(), self._progress.epoch + is_read
        begin = IterationStart(epoch, 0, None) if is_read else self._progress.next_start(workers)
        readers = info.num_workers if info else max(1, workers)
        lanes = self._lanes or self._ranks()[0] * readers
        if info:
            return self._share(epoch, lanes=lanes, begin=begin, worker=info.id, workers=readers), epoch
        return self._share(epoch, lanes=lanes, begin=begin, readers=readers), epoch

    def check_ranks(self, share: EpochShare, epoch: int) -> None:
        """Raise UsageError, the same on all ranks, unless each of them begins this epoch in the same way."""
        if self._chosen_ranks is not None or not is_rank():
            return
        state = self.state_dict(after=Place(epoch, share.start, share.lanes, share.divisions))
        contents = {reader.snapshot: reader.content for reader in self.readers}
        begun = _compared({**state, "drop_last": self.drop_last, "pad": self.pad}, contents)
        if not self._is_shuffled:  # rows come in the order of the files, whatever these are
            begun = {name: value for name, value in begun.items() if name not in MIXING}
        check_alike(begun, self.stall_timeout or STALL_TIMEOUT)

    def rows_of(self, epoch: int, index: int) -> RowPlaces:
        """Return where each row of a batch lies: its file, row group, and position in both.

        ``index`` counts the batches (or rows) of the epoch over all ranks, as ``batch.index`` does. It is arithmetic:
        nothing is read, but with ``filters``, ``split`` and the like the columns that these look at, of the batch's row
        groups only. Where ``lanes`` was left out, they are those of the latest iteration, so set it, or
        call ``batch.rows()``. A batch that the epoch does not have raises UsageError.
        """
        ranks, _ = self._ranks()
        return self._rows_of(epoch, index, self._lanes or ranks * max(1, self._progress.workers), ranks)

    def rows_of_batches(self) -> tuple[int, int] | None:
        """Return the rows of a batch and of the epoch's last one; None where that is not all there is to say."""
        return None

    def batches_of(self, epoch: int) -> int:
        """Return the number of batches (or rows) of a complete epoch on this rank; weights make epochs differ."""
        return self._share(epoch, lanes=self._ranks()[0]).count()

    @property
    def is_shuffled(self) -> bool:
        """Whether epochs differ in their order."""
        return self._is_shuffled

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs may differ in their number of batches."""
        return False

    @property
    def _can_divide(self) -> bool:
        """Whether ranks x workers need not divide the lanes."""
        return self._is_shuffled and self.yields_batches

    def _share(
        self,
        epoch: int,
        *,
        lanes: int,
        begin: IterationStart | None = None,
        worker: int = 0,
        workers: int = 1,
        readers: int | None = None,
    ) -> EpochShare:
        """Return what this rank, or one worker of it, reads of an epoch that begins at ``begin`` (None: at 0).

        Of the rank, ``readers`` are the workers that it has.
        """
        ranks, rank = self._ranks()
        start, divisions = (0, ()) if begin is None else (begin.start, begin.divisions)
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
        """Return the number of ranks that share the batches and this one."""
        return self._ranks_of_all()

    def _ranks_of_all(self) -> tuple[int, int]:
        """Return the number of ranks and this one, as chosen or as torch.distributed has them."""
        return ranks_and_rank(self._chosen_ranks, self._ranks_of_trainer)

    def _check_started(self) -> None:
        """Raise UsageError where this is one of several processes of a launcher, each of which would read all rows."""
        if self._chosen_ranks is None:
            check_launched(self._ranks_of_all()[0])

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled, for workers with the ranks of this process.

        Other processes ask again: a rank that a framework spawns is not the process that made the dataset.
        """
        check_saving()
        return {**self.__dict__, "_ranks_of_trainer": self._ranks_of_all()}

    @abstractmethod
    def state_dict(self, after: Batch | int | Place | None = None) -> dict[str, Any]:
        """Return the state after ``after``."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""

    @property
    @abstractmethod
    def yields_batches(self) -> bool:
        """Whether batches are yielded, not rows."""

    @property
    @abstractmethod
    def _is_shuffled(self) -> bool:
        """Whether epochs differ in their order."""

    @abstractmethod
    def _total(self, epoch: int, ranks: int, start: int = 0) -> int:
        """Return the number of batches (or rows) of an epoch that begins at ``start``, over all these ranks."""

    @abstractmethod
    def _rows_of(self, epoch: int, index: int, lanes: int, ranks: int) -> RowPlaces:
        """Return the rows of a batch of an epoch that is read on so many lanes and ranks."""

    @abstractmethod
    def _check(self) -> None:
        """Raise ParquetError before an epoch whose batches cannot be made."""

    @abstractmethod
    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        """Yield (global index, batch) for the ``indices`` of ``share``."""


def _compared(state: Mapping[str, Any], contents: Mapping[str, str], within: str = "") -> dict[str, tuple[Any, Any]]:
    """What ranks have to agree on, by name, and how it is shown: of a snapshot its content is compared."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in state.items():
        if name == "columns":  # a rank may read more of the same rows
            continue
        if isinstance(value, Mapping):
            found |= _compared(value, contents, f"{within}{name}.")
        else:
            found[within + name] = (contents.get(value, value) if name == "snapshot" else value, value)
    return found
