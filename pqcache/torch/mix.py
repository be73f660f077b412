"""Mix: several ParquetDatasets as one, each giving its share of the batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces, checked_index
from pqcache.reader.meter import Meter
from pqcache.reader.options import check_rank, check_seed
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture_schedule import DatasetPass, MixSchedule, batches_per_epoch
from pqcache.reader.reading_stats import DatasetStats, mix_stats
from pqcache.torch.batch import Batch, Position
from pqcache.torch.batch_origins import register
from pqcache.torch.checkpoint import MixState, State, check_lanes, check_options, check_worker
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.resumable import STALL_TIMEOUT, Count, Place, ResumableDataset
from pqcache.torch.shared_meter import new_meter
from pqcache.torch.transform_errors import BatchOrigin
from pqcache.torch.transforms import Item, TransformRunner

_NO_PLACE = {"epoch": 0, "batch": 0}  # of a dataset's state: the mix has its own


class Mix(ResumableDataset):
    """Batches of several datasets in fixed proportions, for ``DataLoader(mix, batch_size=None)``.

    Each batch comes from one dataset, whose name is ``batch.source``; so their columns may differ. Which one is not
    drawn at random: after any number of batches each dataset has given its share of them, to within one or two.
    The sequence of batches is the same for every number of ranks and workers whose product divides ``lanes``.

    A dataset is read pass after pass: one that an epoch does not exhaust goes on where it stopped in the next epoch,
    and one that is exhausted within an epoch begins its next pass, in another order. So of each pass every row
    comes exactly once, and epoch ``e`` can be had without reading those before it.

    ``datasets``      ParquetDatasets by name, without ``lanes`` and ranks of their own. Their other options hold,
                      ``transform`` and ``batch_size`` too; each one's ``memory`` is in addition to the others'.
    ``weights``       each dataset's share of the batches, by name, in any unit; None: in proportion to their sizes, so
                      that an epoch is each row of each dataset exactly once
    ``epoch_length``  "first_exhausted": an epoch ends when one dataset has been read once, and no other more often.
                      "all_exhausted": when each has been read at least once. Or a number of batches, of all ranks.
    ``seed``          selects the order of draws among ranks and workers; the datasets have seeds of their own
    ``drop_last``     False: ranks are made equal by repeating the epoch's first batches. True: the remainder of an
                      epoch is dropped.
    ``pad``, ``lanes``, ``num_replicas``, ``rank``, ``stall_timeout``   as in ParquetDataset

    Options that make no sense raise UsageError.
    """

    def __init__(
        self,
        datasets: Mapping[str, ParquetDataset],
        weights: Mapping[str, float] | None = None,
        epoch_length: str | int = "first_exhausted",
        *,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        lanes: Count | None = None,
        num_replicas: Count | None = None,
        rank: Count | None = None,
        stall_timeout: str | float | None = STALL_TIMEOUT,
    ) -> None:
        super().__init__(
            drop_last=drop_last,
            pad=pad,
            lanes=lanes,
            num_replicas=num_replicas,
            rank=rank,
            stall_timeout=stall_timeout,
        )
        check_seed(seed)
        check_rank(*self._ranks(), self._lanes)
        if not isinstance(datasets, Mapping) or not datasets:
            raise UsageError("datasets", 'give at least one by name, like {"web": ParquetDataset(...)}')
        for name, dataset in datasets.items():
            if not isinstance(dataset, ParquetDataset):
                raise UsageError("datasets", f"{name!r} is no ParquetDataset")
        if len({id(dataset) for dataset in datasets.values()}) < len(datasets):
            raise UsageError("datasets", "one of them is there under two names", "construct it twice")
        self.datasets = dict(datasets)
        self.weights, self.epoch_length, self.seed = weights, epoch_length, seed
        self._readers = {name: _reader_of(name, dataset) for name, dataset in datasets.items()}
        self._meter = new_meter()
        self.token = register(self)
        self._count()

    def stats(self) -> DatasetStats:
        """Return what reading has taken, of all datasets together and of each in ``datasets``."""
        parts = [(reader.meter.counts(), reader.meter.memory()) for reader in self._readers.values()]
        return mix_stats(self._meter.counts(), {name: d.stats() for name, d in self._readers.items()}, parts)

    @property
    def meter(self) -> Meter:
        """What counts the trainer's waits."""
        return self._meter

    @property
    def readers(self) -> Sequence[DatasetReader]:
        """What reads the datasets."""
        return list(self._readers.values())

    @property
    def counts(self) -> dict[str, int]:
        """How many batches of an epoch come from each dataset, over all ranks."""
        return dict(zip(self.datasets, self._schedule.counts, strict=True))

    def state_dict(self, after: Batch | int | Place | None = None) -> dict[str, Any]:
        """Return the state after ``after``, as a small dict of JSON values; see ``ParquetDataset.state_dict``."""
        place, (ranks, _) = self._place(after), self._ranks()
        states = {name: reader.state(place.lanes, ranks).to_dict() for name, reader in self._readers.items()}
        return MixState(
            counts=self.counts,
            datasets={name: {k: v for k, v in state.items() if k not in _NO_PLACE} for name, state in states.items()},
            seed=self.seed,
            lanes=place.lanes,
            epoch=place.epoch,
            batch=place.batch,
            worker=self._worker_state(),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore epoch, next batch, lanes, window and snapshot from ``state``.

        The numbers of ranks and workers may be others that divide its lanes.

        Each dataset's snapshot is opened if it is still kept. What does not fit raises UsageError, or CacheError for a
        snapshot that is gone, and says why.
        """
        loaded = MixState.from_dict(state)
        check_worker(loaded.worker)
        check_lanes(loaded.lanes, self._ranks()[0])
        if list(loaded.datasets) != list(self.datasets):
            raise UsageError(
                "state",
                f"it is of a mix of {', '.join(loaded.datasets)}, this one is of {', '.join(self.datasets)}",
                "construct it with the same datasets in the same order",
            )
        before = [reader.token for reader in self._readers.values()]
        for name, reader in self._readers.items():
            try:
                reader.load_state(State.from_dict({**loaded.datasets[name], **_NO_PLACE}))
            except UsageError as error:
                raise error.within(f"dataset {name!r}") from error
        if [reader.token for reader in self._readers.values()] != before:  # of other snapshots
            self.token = register(self)
        self._count()
        options = {"seed": self.seed, "lanes": self._lanes or loaded.lanes, "counts": self.counts}
        check_options(loaded, options, "mix")
        self._lanes = loaded.lanes
        self._resume(loaded)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, token=register(self, state["token"]))

    @property
    def yields_batches(self) -> bool:
        return True

    @property
    def _is_shuffled(self) -> bool:
        return True

    def rows_at(self, position: Position) -> RowPlaces:
        """Return the rows of the batch at a position; it is one of the dataset ``position.source``."""
        return self._rows_of(position.epoch, position.index % self._schedule.total, position.lanes, 0, position)

    def _rows_of(self, epoch: int, index: int, lanes: int, ranks: int, position: Position | None = None) -> RowPlaces:
        wanted = np.array([checked_index(index, self._schedule.total)])
        schedule = replace(self._schedule, lanes=lanes)
        (number,) = schedule.datasets(epoch, wanted)
        reader = list(self._readers.values())[int(number)]
        (reading,) = schedule.passes(int(number), self._sizes[number], epoch, wanted)
        at = reader.place_of(reading.number, int(reading.batches[0]), lanes, ranks) if position is None else position
        index_in_pass = int(reading.lane_batches[0] * lanes + reading.lanes[0])
        if not reader.options.shuffle:
            index_in_pass = int(reading.batches[0])
        at = replace(at, epoch=reading.number, index=index_in_pass)
        return replace(reader.rows_at(at, reading), epoch=epoch, index=index)

    def _total(self, ranks: int, start: int = 0) -> int:
        return self._schedule.total

    def _check(self) -> None:
        for reader in self._readers.values():
            reader.check_nulls()

    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        schedule = replace(self._schedule, lanes=share.lanes)
        passes = _PassReader(self._readers, schedule, self._sizes, share, (epoch, self.token))
        with closing(passes):
            unpadded = [index for index in indices if index < share.total]
            yield from passes.read(unpadded, unpadded)
            for index in indices[len(unpadded) :]:  # padding: single batches from the epoch's start
                passes.close()
                yield from passes.read([index % share.total], [index])

    def _count(self) -> None:
        """Set how many batches a pass over each dataset has, and how many of them an epoch takes."""
        sizes = {name: reader.total(1) for name, reader in self._readers.items()}
        self._sizes = list(sizes.values())
        self._schedule = MixSchedule(batches_per_epoch(sizes, self.weights, self.epoch_length), 1, self.seed)


def _reader_of(name: str, dataset: ParquetDataset) -> DatasetReader:
    try:
        return dataset.reader_for_mix()
    except UsageError as error:
        raise error.within(f"dataset {name!r}") from error


class _PassReader:
    """Reads the current pass of each dataset; at the end of one, also the next."""

    def __init__(
        self,
        readers: Mapping[str, DatasetReader],
        schedule: MixSchedule,
        sizes: list[int],
        share: EpochShare,
        of_mix: tuple[int, int],  # the epoch, and the number by which batches name the mix
    ) -> None:
        self._readers, self._schedule, self._sizes, self._share = readers, schedule, sizes, share
        self._epoch, self._token = of_mix
        self._open: dict[tuple[int, int], Generator[tuple[BatchOrigin, Batch]]] = {}
        self._transforms: dict[tuple[int, int], TransformRunner] = {}

    def read(self, indices: list[int], numbers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield (number, transformed batch) for batches ``indices`` of the epoch, in order."""
        wanted = np.array(indices, np.int64)
        names = list(self._readers)
        drawn = np.zeros((3, len(wanted)), np.int64)  # dataset, pass, batch in the pass
        passes: dict[tuple[int, int], DatasetPass] = {}
        for source, size in enumerate(self._sizes):
            for reading in self._schedule.passes(source, size, self._epoch, wanted):
                drawn[:, reading.positions] = source
                drawn[1, reading.positions] = reading.number
                drawn[2, reading.positions] = reading.batches
                passes[source, reading.number] = reading
        remaining = {key: len(reading.positions) for key, reading in passes.items()}
        for number, source, pass_number, index in zip(numbers, *drawn.tolist(), strict=True):
            key, reader = (source, pass_number), self._readers[names[source]]
            if key not in self._open:
                self._open[key] = reader.read_pass(passes.pop(key), self._share)
            origin, batch = next(self._open[key])
            remaining[key] -= 1
            if not remaining[key]:
                self._open.pop(key).close()
            position = replace(
                batch.position, epoch=self._epoch, index=number, source=names[source], dataset=self._token
            )
            seed = (pass_number, index)
            item = Item(value=Batch(batch, position), position=position, place=batch.index, numbers=seed)
            if key not in self._transforms:
                self._transforms[key] = reader.transforms(origin)
            yield number, self._transforms[key].one(item)

    def close(self) -> None:
        """Stop reading."""
        for batches in self._open.values():
            batches.close()
        self._open.clear()
