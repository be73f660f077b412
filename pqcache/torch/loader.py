"""Loader: a DataLoader that tracks its position and reads each epoch in a different order."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
import torch.autograd.profiler as profiler
from torch.utils.data import DataLoader, Sampler, get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order import EpochShare
from pqcache.reader.ranks import leave_to_parent, of_this_process
from pqcache.torch.batch import to_device
from pqcache.torch.batch_groups import MOST_BATCHES, GroupSizes, ungrouped
from pqcache.torch.foreign_loaders import (
    check_fit,
    check_skipping,
    filled,
    has_one_loader,
    is_last,
    lightning_fit,
    reads_ahead,
    rows_of_last_round,
    shown_to_accelerate,
)
from pqcache.torch.iteration_meter import measured
from pqcache.torch.resumable import LoaderIteration, ResumableDataset
from pqcache.torch.state import Hashed, Place
from pqcache.units import is_whole

Timed = Callable[[], AbstractContextManager[Any]]  # measures the time of copies
ChangedBatches = Callable[[Iterator[Any], Timed], Iterator[Any]]

PREFETCH = 4  # messages of each worker: torch's 2 leave workers idle where batches are small

_UNEVEN = (
    "pad=False: some ranks have one batch less than others, and gradients are on. Training with DDP or FSDP "
    "would wait forever: leave pad=False out there, and evaluate within torch.no_grad()"
)
_AGAIN = (
    "another Loader of this dataset left its epoch unfinished, and this one begins it again, with the same batches: "
    "use one Loader for all epochs, or call loader.set_epoch(epoch) before each"
)
_BY_DATASET = "give it to the dataset, which makes the batches"
_BY_FILTERS = "the dataset has an order of its own; filters= and rows= choose rows"
_REFUSED: dict[str, tuple[Any, str]] = {  # DataLoader's arguments: the harmless value, and advice
    "batch_size": (None, _BY_DATASET),
    "shuffle": (None, _BY_DATASET),
    "drop_last": (False, _BY_DATASET),
    "sampler": (None, _BY_FILTERS),
    "batch_sampler": (None, _BY_FILTERS),
    "generator": (None, "give the dataset another seed="),
    "in_order": (True, "batches would not come in the order that states count on; leave it out"),
}


class Loader(DataLoader[Any]):
    """The batches of a ParquetDataset or a Mix, epoch after epoch, with a position that you can save.

    It is a ``DataLoader``, so training frameworks accept it. Beyond that:

    - Each iteration reads the next epoch, even in a new Loader of the same dataset. ``set_epoch`` chooses another one
      for the next iteration; call it before you take the first batch. Through ``loader.sampler``, where frameworks look
      for it, it only moves forward, except in a Lightning ``fit`` with a single loader.
    - ``state_dict()`` is the position after the last batch that you were given, with any number of workers, and
      ``load_state_dict`` continues there, as in torchdata's StatefulDataLoader. After the last batch of an epoch the
      position is the start of the next one. Loading a state ends a running iteration: its next batch raises UsageError.
    - Accelerate's ``prepare`` returns it unchanged, because the dataset already divides its rows among the ranks. It
      tells Accelerate which batch is the last, for ``accumulate`` and ``gather_for_metrics``; with several processes
      the last batch is filled up with rows that ``gather_for_metrics`` cuts off again.

    Args:
        dataset: a ParquetDataset with a batch_size, or a Mix.
        num_workers: processes that read.
        prefetch_factor: the most batches that each worker prepares in advance. Default: 4, or 32 MB of small ones.
        device: moves each batch there, with all tensors in containers, before you get it. Default: batches stay on the
            CPU. `Prefetch` copies them to a GPU in advance.
        refresh: "epoch" begins each epoch on the cache's current snapshot, as a new dataset would; ``len`` changes with
            it. All ranks move to rank 0's if each can open a copy of it; else all stay, with a warning. A state from
            the middle of an epoch finishes that one first. Default: all epochs read the same snapshot.
        pin_memory: puts batches into pinned memory first, so that you don't wait for the copy to a GPU.
        persistent_workers: False starts new workers in each epoch. Default: they live as long as the loader.
        timeout: as for DataLoader, and so are worker_init_fn and multiprocessing_context.
        collate_fn: called on each batch.

    DataLoader's batch_size, shuffle, sampler and drop_last raise UsageError: they belong to the dataset.

    >>> from pqcache.torch import ParquetDataset
    >>> loader = Loader(ParquetDataset("cache/shop", columns=["id", "price"], batch_size=256, seed=1))
    >>> len(loader)
    3
    >>> for batch in loader:  # epoch 0
    ...     state = loader.state_dict()
    >>> loader.epoch, state["epoch"], state["batch"]
    (1, 0, 3)
    >>> [batch.epoch for batch in loader]
    [1, 1, 1]
    """

    _is_accelerate_prepared = True  # Accelerator.prepare returns such a loader unchanged
    use_stateful_dataloader = True  # and save_state and load_state keep its state
    end_of_dataloader, remainder = False, -1  # what Accelerate reads while the loader is iterated

    def __init__(
        self,
        dataset: ResumableDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        device: torch.device | str | None = None,
        refresh: Literal["epoch"] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **refused: Any,
    ) -> None:
        _check(dataset, refused)
        if refresh is not None:
            if refresh != "epoch":
                raise UsageError(f"Loader(refresh={refresh!r})", 'choose "epoch"', "or leave it out")
            dataset._check_refreshes()
        dataset._has_loader, self.refresh = True, refresh
        if collate_fn is not None and dataset._tally is not None:
            collate_fn = partial(_collated, collate_fn)
        self.__dict__["sampler"] = _EpochSampler(self)  # Ray's prepare_data_loader copies what is in __dict__
        self.device = None if device is None else torch.device(device)
        self._iteration: LoaderIteration | None = None  # the latest one
        self._process = os.getpid()  # whose workers are running
        together = MOST_BATCHES if prefetch_factor is None else max(1, min(MOST_BATCHES, prefetch_factor // 2))
        self._groups = GroupSizes(together, num_workers) if num_workers and collate_fn is None else None
        messages = prefetch_factor if self._groups is None or prefetch_factor is None else prefetch_factor // together
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=(messages or PREFETCH) if num_workers else None,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0 and persistent_workers is not False,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            collate_fn=unchanged if collate_fn is None else collate_fn,
        )

    @property  # type: ignore[override]
    def dataset(self) -> ResumableDataset:
        """The dataset that is read."""
        check_skipping()
        return self._dataset

    @dataset.setter
    def dataset(self, value: ResumableDataset) -> None:
        self._dataset = self.__dict__["dataset"] = value  # Lightning looks for it among the instance's own

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._dataset.epoch + self._is_read

    @property  # type: ignore[override]
    def sampler(self) -> _EpochSampler:
        """The object on which frameworks call ``set_epoch``."""
        sampler: _EpochSampler = self.__dict__["sampler"]
        return sampler

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Ignore DataLoader's sampler for datasets without one; keep the loader's own."""

    def __repr__(self) -> str:
        return f"<Loader with num_workers={self.num_workers} of {self.dataset!r}>"

    def __len__(self) -> int:
        """Return the number of batches of this iteration, or of the next if none is running."""
        if not self._dataset._epochs_differ:
            return len(self.dataset)  # torch's own would remember it, and warn of an epoch with more batches
        iteration = self._iteration
        return self._dataset.batches_of(iteration.record.epoch if iteration and iteration.goes_on else self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; see ``ParquetDataset.set_epoch``.

        A resumed epoch that was read from after resuming begins at its first batch.
        """
        self._dataset._progress.set_epoch(epoch, anew=self._is_read)

    @property
    def _is_read(self) -> bool:
        """Whether the next iteration reads the epoch after the dataset's, because this loader has begun that one.

        The same holds if any loader has finished it, so that a new Loader for each epoch reads one after the other.
        """
        generation, latest = self._dataset._progress.record.generation, self._dataset._loader_iteration
        is_begun = self._iteration is not None and self._iteration.record.generation == generation
        return is_begun or (latest is not None and latest.record.generation == generation and latest.is_all)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, the same on every rank, as a dict of JSON values."""
        if get_worker_info() is not None:
            return self._dataset.state_dict()  # it knows what the other workers read
        if self._iteration is not None and self._is_at(self._iteration):
            return self._dataset.state_dict(after=self._iteration.place)
        share, epoch = self._dataset._begin_pass(self.num_workers, self._is_read)
        return self._dataset.state_dict(after=Place(epoch, share.start, share.lanes, share.divisions))

    def proof(self) -> dict[str, Any]:
        """Return what this rank received of the epoch so far, like ``state_dict()``, for ``pqcache.prove``.

        Raises UsageError unless the dataset was made with ``proof=True``.
        """
        self._dataset._check_proves()
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], snapshot: str | None = None) -> None:
        """Continue where ``state`` was taken, even with other numbers of workers and ranks.

        Accepts states of the dataset's own ``state_dict`` too. With ``snapshot="current"`` the next epoch begins on the
        cache's current snapshot. Raises like ``ParquetDataset.load_state_dict``.
        """
        if snapshot is None:
            self._dataset.load_state_dict(state)
        else:
            self._dataset._load_epoch(state, snapshot)

    def skip(self, batches: int) -> None:
        """Leave out the next ``batches`` of each rank without reading them; call it on every rank.

        The position in ``state_dict`` moves, and the next iteration continues after them. A running iteration ends: its
        next batch raises UsageError. Raises UsageError if the epoch has fewer batches left.
        """
        self.load_state_dict(self.state_dict())  # after the last batch of an epoch the next one begins
        if self.refresh is not None:
            self._dataset._refresh()
        share, epoch = self._dataset._begin_pass(self.num_workers)
        if not is_whole(batches) or not 0 <= batches <= share.rounds():
            reason = f"each rank has {share.rounds():,} batches left in epoch {epoch}"
            raise UsageError(f"skip({batches!r})", reason, "give a number from 0 to that")
        batch = min(share.start + batches * share.ranks, share.end)
        begin = Place(epoch, share.start, share.lanes, share.divisions)
        end = begin._replace(batch=batch)
        if self._dataset._tally is not None:
            self._dataset._tally.skip(begin, end)
        self.load_state_dict(self._dataset.state_dict(after=end))

    def _is_at(self, iteration: LoaderIteration) -> bool:
        """Whether the position is in this iteration; an epoch set meanwhile begins after it."""
        record = self._dataset._progress.record
        if record.generation == iteration.record.generation:
            return True
        is_left = iteration.given - iteration.held_back < iteration.count
        return iteration.goes_on and record.loaded == iteration.record.loaded and is_left

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return of_this_process(self._iterate(held_back=int(reads_ahead())), "Loader")

    def _iterate_through(self, change: ChangedBatches) -> Iterator[Any]:
        """Iterate, applying ``change`` to batches before they count as given to the trainer."""
        return of_this_process(self._iterate(int(reads_ahead()), change), "Loader")

    def _iterate(self, held_back: int, change: ChangedBatches | None = None) -> Generator[Any]:
        """Yield the batches of the next epoch; nothing begins before the first is requested."""
        dataset, progress = self._dataset, self._dataset._progress
        if self._is_read:
            progress.set_epoch(progress.record.epoch + 1)
        elif self._begins_again():
            warnings.warn(_AGAIN, UserWarning, stacklevel=3)
        if self.refresh is not None:
            dataset._refresh()
        if os.getpid() != self._process:
            leave_to_parent(self._iterator)
            self._process, self._iterator = os.getpid(), None
        elif self._iteration is None or progress.record.loaded != self._iteration.record.loaded:
            self._iterator = None  # its workers do not know of the state's snapshot, window and lanes
        share, epoch = dataset._begin_pass(self.num_workers)
        this = self._iteration = dataset._loader_iteration = LoaderIteration(
            progress.record, share, len(share), held_back
        )
        if self.num_workers:  # else the dataset does it
            dataset._check_ranks(share, epoch)
        if not share.pad and share.left % share.ranks and torch.is_grad_enabled():
            warnings.warn(_UNEVEN, UserWarning, stacklevel=3)
        dataset._in_loader = True
        if dataset._tally is not None:
            dataset._tally.begin(epoch, share)
        try:
            metered = measured(dataset, epoch, time.monotonic_ns(), self.num_workers, by_loader=True)
            with metered as meter, shown_to_accelerate(self) as is_shown:
                batches = self._batches(this)
                if dataset._tally is not None:
                    batches = map(dataset._tally.take, batches)
                if change is not None:
                    batches = change(batches, meter.transferring)
                for batch in meter.over(batches):
                    self._check_current(this)
                    this.given += 1
                    if dataset._tally is not None:
                        dataset._tally.give()
                    if this.is_all:
                        progress.finish(this.record)
                        self.end_of_dataloader = meter.is_complete = True
                        if is_shown:
                            batch = self._last(batch, share)
                    yield batch if self.device is None else meter.moved(_moved, batch, self.device, self.pin_memory)
                self._check_current(this)
        finally:
            dataset._in_loader = this.goes_on = False
        progress.finish(this.record)
        this.is_done, this.held_back = True, 0  # with pad=False another rank may have had one batch more

    def _begins_again(self) -> bool:
        """Whether another Loader has left the epoch after more than its first batch."""
        latest, generation = self._dataset._loader_iteration, self._dataset._progress.record.generation
        is_left = latest is not None and latest.record.generation == generation and latest.given > 1
        return is_left and self._dataset._is_shuffled and torch.is_grad_enabled()

    def _batches(self, iteration: LoaderIteration) -> Iterator[Any]:
        check = partial(self._check_current, iteration)
        if self._groups is None:
            return _without_spans(super().__iter__(), check)
        self._dataset._groups = self._groups  # in the copies that workers get now
        try:
            groups = _without_spans(super().__iter__(), check)
        finally:
            self._dataset._groups = None
        return ungrouped(groups, self._groups)

    def _last(self, batch: Any, share: EpochShare) -> Any:
        """The last batch for Accelerate, padded to the size of other ranks'; ``remainder`` counts its real rows.

        Without ``pad`` it is unchanged, as every row should come once.
        """
        rows = self._dataset._rows_of_batches()
        if rows is None or not share.pad or share.divisions:
            return batch
        self.remainder = rows_of_last_round(share, *rows)
        size, last = rows
        return filled(batch, last, size) if share.ranks > 1 and last < size and is_last(share) else batch

    def _check_current(self, iteration: LoaderIteration) -> None:
        """Raise UsageError if another iteration has begun since, or a state was loaded."""
        if self._iteration is not iteration:
            reason = "another iteration of it has begun, which has taken the workers of this one"
            raise UsageError("Loader", reason, "make a second Loader of a second dataset")
        self._dataset._progress.check(iteration.record)


class _EpochSampler(Sampler[None]):
    """A sampler that draws nothing, and passes ``set_epoch`` on to its loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)  # a circle would keep the loader's workers alive

    def __reduce__(self) -> tuple[Any, ...]:
        return _EpochSampler, (self._loader(),)

    def __iter__(self) -> Iterator[None]:
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's next iteration, unless that is a later one.

        In a resumed process, frameworks count from 0 again. Only Lightning's Trainer, with a single loader, may go
        back.
        """
        loader = self._loader()
        if loader is None:
            return
        fit = lightning_fit()
        counts_right = fit is not None and not fit.restarting and has_one_loader(fit)
        if epoch > loader.epoch or (epoch < loader.epoch and counts_right):
            loader.set_epoch(epoch)
        if fit is not None:
            check_fit(fit, loader)


def _check(dataset: object, refused: Mapping[str, Any]) -> None:
    if not isinstance(dataset, ResumableDataset):
        raise UsageError(f"Loader({type(dataset).__name__})", "it loads a ParquetDataset or a Mix", "give it one")
    for name, value in refused.items():
        if name not in _REFUSED:
            raise TypeError(f"Loader() got an unexpected keyword argument {name!r}")
        harmless, advice = _REFUSED[name]
        if value != harmless:
            raise UsageError(f"Loader({name}={value!r})", "the loader does not decide this", advice)
    if not dataset._yields_batches:
        raise UsageError("Loader", "the dataset has batch_size=None and yields rows", "give the dataset a batch_size")


def unchanged(batch: Any) -> Any:
    """A collate_fn that keeps DataLoader from converting batches."""
    return batch


def _collated(collate_fn: Callable[[Any], Any], item: Any) -> Any:
    return item._replace(value=collate_fn(item.value)) if type(item) is Hashed else collate_fn(item)


def _without_spans(batches: Any, check: Callable[[], None]) -> Iterator[Any]:
    """Iterate over torch's iterator without its profiler's span around each batch, unless the profiler is active.

    A span costs about as much as a small batch. ``check`` is called before each batch.
    """
    while True:
        check()
        try:
            batch = next(batches) if profiler._is_profiler_enabled else batches._next_data()
        except StopIteration:
            return
        yield batch
        del batch


def _moved(batch: Any, device: torch.device, pinned: bool) -> Any:
    known = isinstance(batch, (torch.Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(batch)
    if not known and not hasattr(batch, "to"):
        raise UsageError(
            f"device={str(device)!r}",
            f"the transform returns {type(batch).__name__}, which has no to(device)",
            "return a Batch, or move it in the training loop",
        )
    return to_device(batch, device, non_blocking=pinned)
