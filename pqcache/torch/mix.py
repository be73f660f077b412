"""Mix: several ParquetDatasets as one, each giving its share of the batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.options import check_numbers, check_rank, check_seed
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture_schedule import DatasetPass, MixSchedule, batches_per_epoch
from pqcache.torch.batch import Batch, Place
from pqcache.torch.checkpoint import MixState, Progress, State, check_lanes, check_worker, replicas_and_rank
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.shared_memory import end_with_trainer

_NO_PLACE = {"epoch": 0, "batch": 0}  # the mix has it


class Mix(IterableDataset[Batch]):
    """Whole batches of several datasets in fixed proportions, for ``DataLoader(mix, batch_size=None)``.

    Each batch comes from one dataset, whose name is ``batch.source``; so their columns may differ. Which one is not
    drawn at random: after any number of batches each dataset has given its share of them, to within a batch or two.
    The sequence of batches is the same for every number of ranks and workers whose product divides ``lanes``.

    A dataset is read pass after pass: one that an epoch does not exhaust goes on where it stopped in the next epoch,
    and one that is exhausted within an epoch begins its next pass, which is shuffled anew. So of each pass every row
    comes exactly once, and epoch ``e`` can be had without reading those before it.

    ``datasets``      ParquetDatasets by name, without ``lanes`` and ranks of their own. Their other options hold,
                      ``transform`` and ``batch_size`` too; each one's ``memory`` is beside the others'.
    ``weights``       each dataset's share of the batches, by name, in any unit; None: in proportion to their sizes, so
                      that an epoch is each row of each dataset exactly once
    ``epoch_length``  "first_exhausted": an epoch ends when one dataset has been read once, and no other more often.
                      "all_exhausted": when each has been read at least once. Or a number of batches, of all ranks.
    ``seed``          turns the order of draws among ranks and workers; the datasets have seeds of their own
    ``drop_last``     False: ranks are made equal by repeating the epoch's first batches. True: what is left over of an
                      epoch is dropped.
    ``lanes``, ``num_replicas``, ``rank``   as in ParquetDataset

    Options that make no sense raise UsageError.
    """

    def __init__(
        self,
        datasets: Mapping[str, ParquetDataset],
        weights: Mapping[str, float] | None = None,
        epoch_length: str | int = "first_exhausted",
        seed: int = 0,
        drop_last: bool = False,
        lanes: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        check_numbers(lanes=lanes, num_replicas=num_replicas)
        check_seed(seed)
        if (num_replicas is None) != (rank is None):
            raise UsageError("", "give both num_replicas and rank, or neither")
        if not isinstance(datasets, Mapping) or not datasets:
            raise UsageError("datasets", 'give at least one by name, like {"web": ParquetDataset(...)}')
        for name, dataset in datasets.items():
            if not isinstance(dataset, ParquetDataset):
                raise UsageError("datasets", f"{name!r} is no ParquetDataset")
            dataset._check_for_mix(name)
        if len({id(dataset) for dataset in datasets.values()}) < len(datasets):
            raise UsageError("datasets", "one of them is there under two names", "construct it twice")
        self.datasets = dict(datasets)
        self.weights, self.epoch_length, self.seed, self.drop_last = weights, epoch_length, seed, drop_last
        self._lanes = lanes
        self._replicas = None if num_replicas is None or rank is None else (num_replicas, rank)
        check_rank(*self._rank(), lanes)
        self._count()
        self._progress = Progress()

    @property
    def counts(self) -> dict[str, int]:
        """How many batches of an epoch come from each dataset, over all ranks."""
        return dict(zip(self.datasets, self._draws.counts, strict=True))

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._progress.epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on each rank."""
        replicas, rank = self._rank()
        return EpochShare(
            total=self._draws.total, lanes=replicas, ranks=replicas, rank=rank, drop_last=self.drop_last
        ).rounds()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, persistent workers included; the datasets need no call of their own.

        After ``load_state_dict`` the state's own epoch goes on where it was; any other begins at its start.
        """
        self._progress.set_epoch(epoch)

    def state_dict(self, after: Batch | int | None = None) -> dict[str, Any]:
        """Return where to go on, as a small dict for JSON; see ``ParquetDataset.state_dict``."""
        replicas, _ = self._rank()
        place = self._progress.consumed(after, self._lanes, replicas, lambda _: self._draws.total, self.drop_last)
        return MixState(
            counts=self.counts,
            datasets={name: _without_place(ds._state(place.lanes, replicas)) for name, ds in self.datasets.items()},
            seed=self.seed,
            lanes=place.lanes,
            epoch=place.epoch,
            batch=place.index,
            worker=self._progress.of_worker(),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, also with other numbers of ranks and workers that divide its lanes.

        Each dataset's snapshot is opened if it is still kept. What does not fit raises UsageError, or CacheError for a
        snapshot that is gone, and says why.
        """
        loaded = MixState.from_dict(state)
        in_worker = check_worker(loaded.worker)
        replicas, _ = self._rank()
        check_lanes(loaded.lanes, replicas)
        if list(loaded.datasets) != list(self.datasets):
            raise UsageError(
                "",
                f"the state is of a mix of {', '.join(loaded.datasets)}, this one is of {', '.join(self.datasets)}",
                "construct it with the same datasets in the same order",
            )
        for name, dataset in self.datasets.items():
            try:
                dataset._take_over(State.from_dict({**loaded.datasets[name], **_NO_PLACE}), replicas)
            except UsageError as error:
                raise error.within(f"dataset {name!r}") from error
        self._count()
        loaded.check({"seed": self.seed, "lanes": self._lanes or loaded.lanes, "counts": self.counts})
        self._lanes = loaded.lanes
        left = EpochShare(
            total=self._draws.total,
            lanes=loaded.lanes,
            ranks=replicas,
            rank=0,
            start=loaded.batch,
            drop_last=self.drop_last,
        ).rounds()
        self._progress.resume(loaded, in_worker, ended=loaded.batch > 0 and not left)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if info is not None:
            end_with_trainer()
        replicas, rank = self._rank()
        lanes = self._lanes or replicas * workers
        for dataset in self.datasets.values():
            dataset._refuse_nulls()
        place = self._progress.begin(worker, workers if info else 0)
        part = EpochShare(
            total=self._draws.total,
            lanes=lanes,
            ranks=replicas,
            rank=rank,
            workers=workers,
            worker=worker,
            start=place.start,
            drop_last=self.drop_last,
        )
        indices = part.indices(place.next)
        self._progress.next = indices[0] if indices else part.after(part.total)
        return self._batches(part, indices, place.epoch)

    def _batches(self, part: EpochShare, indices: range, epoch: int) -> Generator[Any]:
        readers = _Readers(self, part, epoch)
        in_worker = get_worker_info() is not None
        try:
            whole = [index for index in indices if index < part.total]
            for index, result in readers.read(whole, whole):
                self._progress.next = index + indices.step if in_worker else part.after(index)
                yield result
            for index in indices[len(whole) :]:  # padding: single batches from the epoch's start
                readers.close()
                for _, result in readers.read([index % part.total], [index]):
                    self._progress.next = index + indices.step if in_worker else part.after(index)
                    yield result
        finally:
            readers.close()
        self._progress.finish(part.worker)

    def _count(self) -> None:
        """Find how many batches an epoch has of each dataset."""
        sizes = {name: dataset._total(1) for name, dataset in self.datasets.items()}
        self._sizes = list(sizes.values())
        self._draws = MixSchedule(batches_per_epoch(sizes, self.weights, self.epoch_length), 1, self.seed)

    def _rank(self) -> tuple[int, int]:
        return replicas_and_rank(self._replicas)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replicas": self._rank()}


class _Readers:
    """One pass of each dataset being read, at a pass's end two."""

    def __init__(self, mix: Mix, part: EpochShare, epoch: int) -> None:
        self._mix, self._part, self._epoch = mix, part, epoch
        self._draws = replace(mix._draws, lanes=part.lanes)
        self._open: dict[tuple[int, int], Generator[Batch]] = {}

    def read(self, indices: list[int], numbers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield batches ``indices`` of the epoch, in order, each under its number."""
        wanted = np.array(indices, np.int64)
        names = list(self._mix.datasets)
        whose = np.zeros((3, len(wanted)), np.int64)  # dataset, pass, batch in the pass
        passes: dict[tuple[int, int], DatasetPass] = {}
        for source, size in enumerate(self._mix._sizes):
            for reading in self._draws.passes(source, size, self._epoch, wanted):
                whose[:, reading.positions] = source
                whose[1, reading.positions] = reading.number
                whose[2, reading.positions] = reading.batches
                passes[source, reading.number] = reading
        left = {key: len(reading.positions) for key, reading in passes.items()}
        for number, source, pass_number, batch in zip(numbers, *whose.tolist(), strict=True):
            key = source, pass_number
            dataset = self._mix.datasets[names[source]]
            if key not in self._open:
                self._open[key] = dataset._read_pass(
                    passes.pop(key), self._part.lanes, self._part.ranks, self._part.workers
                )
            found = next(self._open[key])
            left[key] -= 1
            if not left[key]:
                self._open.pop(key).close()
            place = Place(
                epoch=self._epoch, index=number, lanes=self._part.lanes, window=found.place.window, source=names[source]
            )
            yield number, dataset._transformed(Batch(found, place), place, (pass_number, batch))

    def close(self) -> None:
        """Stop reading."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()


def _without_place(state: State) -> dict[str, Any]:
    return {key: value for key, value in state.to_dict().items() if key not in _NO_PLACE}
