"""Mix: several ParquetDatasets as one, each giving its share of the batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces, checked_index
from pqcache.reader.meter import TENSORS, Meter
from pqcache.reader.options import check_rank, check_seed
from pqcache.reader.order.epoch_share import EpochShare, batches_at
from pqcache.reader.order.mixture import DatasetPass, MixHistory, MixPeriod, batches_of_all, batches_per_epoch
from pqcache.reader.reading_stats import DatasetStats, mix_stats
from pqcache.torch.batch import Batch, Position, joined, register
from pqcache.torch.checkpoint import MixState, Place, State, check_options, check_worker
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.iteration_meter import new_meter
from pqcache.torch.resumable import STALL_TIMEOUT, Count, ResumableDataset
from pqcache.torch.transforms import BatchOrigin, Item, TransformRunner

Result = Callable[[], Any]  # waits for a transform
Submit = Callable[[Result], Result]
Parts = dict[str, tuple[Position, Result]]  # of a batch, by dataset
_NO_PLACE = {"epoch": 0, "batch": 0}  # of a dataset's state: the mix has its own


class Mix(ResumableDataset):
    """Batches of several datasets in fixed proportions, for ``Loader(mix)``.

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
    ``within_batch``  True: each batch has rows of every dataset, as many as that dataset's ``batch_size``: these are
                      the proportions. Columns have to be the same. ``batch.parts`` says how many, in their order.
                      False: a batch is of one dataset
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
        within_batch: bool = False,
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
        check_rank(*self._ranks(), None)
        if not isinstance(datasets, Mapping) or not datasets:
            raise UsageError("datasets", 'give at least one by name, like {"web": ParquetDataset(...)}')
        for name, dataset in datasets.items():
            if not isinstance(dataset, ParquetDataset):
                raise UsageError("datasets", f"{name!r} is no ParquetDataset")
        if len({id(dataset) for dataset in datasets.values()}) < len(datasets):
            raise UsageError("datasets", "one of them is there under two names", "construct it twice")
        if within_batch and weights is not None:
            reason = "with within_batch=True the batch sizes of the datasets are their shares of each batch"
            raise UsageError("weights", reason, "leave it out")
        self.datasets = dict(datasets)
        self.weights, self.epoch_length, self.seed, self.within_batch = weights, epoch_length, seed, within_batch
        self._readers = {name: _reader_of(name, dataset) for name, dataset in datasets.items()}
        self._meter = new_meter()
        self.token = register(self)
        self._count()

    def __repr__(self) -> str:
        return f"<Mix of {', '.join(f'{name!r}: {dataset!r}' for name, dataset in self.datasets.items())}>"

    def stats(self) -> DatasetStats:
        """Return what reading has taken, of all datasets together and of each in ``datasets``."""
        parts = [reader.meter.counts() for reader in self._readers.values()]
        datasets = {name: d.stats() for name, d in self._readers.items()}
        return mix_stats(self._meter.counts(), datasets, parts, within_batch=self.within_batch)

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
        return dict(self._history.periods[-1].counts)

    def drawn(self, after: Batch | int | Place | None = None) -> dict[str, float]:
        """Return how often each dataset was read until ``after``, a place as for ``state_dict``.

        1.5 is one pass and a half. It counts all ranks' batches, of all epochs since the dataset is in the mix.
        """
        place = self._place(after)
        history, total = replace(self._history, lanes=place.lanes), self._history.total
        done = np.arange(min(place.batch, total))
        if place.divisions:
            done = batches_at(total, place.lanes, place.divisions)[: len(done)]
        return {name: history.drawn(name, place.epoch, done) / size for name, size in self._sizes.items()}

    def state_dict(self, after: Batch | int | Place | None = None) -> dict[str, Any]:
        """Return the state after ``after``, as a small dict of JSON values; see ``ParquetDataset.state_dict``."""
        place, (ranks, _) = self._place(after), self._ranks()
        of_datasets = Place(0, 0, place.lanes)
        states = {name: reader.state(of_datasets, ranks).to_dict() for name, reader in self._readers.items()}
        worker = self._worker_state()
        return MixState(
            counts=self.counts,
            datasets={name: {k: v for k, v in state.items() if k not in _NO_PLACE} for name, state in states.items()},
            seed=self.seed,
            worker=worker,
            periods=[[since, dict(counts)] for since, counts in self._history.periods] if self._is_changed else None,
            within_batch=self.within_batch or None,
            **place.in_state(worker),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], changed: bool = False) -> None:
        """Restore epoch, next batch, lanes, window and snapshot from ``state``.

        The numbers of ranks and workers may be others; see ``ParquetDataset.load_state_dict``.

        With ``changed`` this mix may have other weights, another epoch_length, and other datasets than the one whose
        state it is; that holds from the next epoch on. Datasets of both go on in their passes where they stopped. The
        state has to be from the end of an epoch, or from before its first batch, else UsageError.

        Each dataset's snapshot is opened if it is still kept. What does not fit raises UsageError, or CacheError for a
        snapshot that is gone, and says why.
        """
        loaded = MixState.from_dict(state)
        check_worker(loaded.worker)
        if not changed and list(loaded.datasets) != list(self.datasets):
            raise UsageError(
                "state",
                f"it is of a mix of {', '.join(loaded.datasets)}, this one is of {', '.join(self.datasets)}",
                "construct it with the same datasets in the same order, or give changed=True at the end of an epoch",
            )
        before = [reader.token for reader in self._readers.values()]
        for name, reader in self._readers.items():
            if name not in loaded.datasets:
                continue
            try:
                reader.load_state(State.from_dict({**loaded.datasets[name], **_NO_PLACE}))
            except UsageError as error:
                raise error.within(f"dataset {name!r}") from error
        if [reader.token for reader in self._readers.values()] != before:  # of other snapshots
            self.token = register(self)
        self._count()
        options = {
            "seed": self.seed,
            "lanes": self._lanes or loaded.lanes,
            "within_batch": self.within_batch or None,
        }
        check_options(loaded, options | ({} if changed else {"counts": self.counts}), "mix")
        periods = periods_of(loaded)
        self._history = replace(self._history, periods=self._continued(periods, loaded) if changed else periods)
        self._lanes = loaded.lanes
        begun = self._history.periods[-1].since
        later = replace(loaded, epoch=begun, batch=0, divisions=None) if begun > loaded.epoch else loaded
        self._resume(later)

    def _parts_of_layout(self, lanes: int) -> Any:
        return super()._parts_of_layout(lanes), self._history.periods

    def _continued(self, periods: tuple[MixPeriod, ...], state: MixState) -> tuple[MixPeriod, ...]:
        """Return the periods of a state, and after them that of this mix."""
        counts = self.counts
        if list(counts.items()) == list(periods[-1].counts.items()):
            return periods
        ended = state.batch > 0
        if ended:
            before = MixHistory(periods, self.seed, together=self.within_batch).total
            left = before - state.batch
            if left > 0 and not (self.drop_last and left < self._ranks()[0]):
                raise UsageError(
                    "state",
                    f"it is within epoch {state.epoch}, before batch {state.batch} of {before}",
                    "go on with the mix as it was, and change it with the state from the end of an epoch",
                )
        since = state.epoch + ended
        return (*(period for period in periods if period.since < since), MixPeriod(since, counts))

    @property
    def _is_changed(self) -> bool:
        return len(self._history.periods) > 1 or self._history.periods[0].since > 0

    _history: MixHistory

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, token=register(self, state["token"]))

    @property
    def yields_batches(self) -> bool:
        return True

    @property
    def is_shuffled(self) -> bool:
        return True

    def rows_at(self, position: Position) -> RowPlaces:
        """Return the rows of the batch at a position; it is one of the dataset ``position.source``."""
        return self._rows_of(position.epoch, position.index % self._history.total, position.lanes, 0, position)

    def _rows_of(self, epoch: int, index: int, lanes: int, ranks: int, position: Position | None = None) -> RowPlaces:
        if self.within_batch:
            raise UsageError(
                "rows_of()",
                "with within_batch=True the rows of a batch are in several datasets",
                "keep a column that names the row",
            )
        name, reading = self._drawn_at(epoch, checked_index(index, self._history.total), lanes)
        reader = self._readers[name]
        batch = int(reading.batches[0])
        at = position or reader.place_of(reading.number, batch, lanes, ranks, of_mix=True)
        index_in_pass = int(reading.lane_batches[0] * lanes + reading.lanes[0])
        if not reader.options.shuffle:
            index_in_pass = batch
        at = replace(at, epoch=reading.number, index=index_in_pass)
        return replace(reader.rows_at(at, reading), epoch=epoch, index=index)

    def _drawn_at(self, epoch: int, index: int, lanes: int) -> tuple[str, DatasetPass]:
        """Return the dataset that a batch of an epoch is drawn from, and what it takes of which pass."""
        history, wanted = replace(self._history, lanes=lanes), np.array([index])
        passes = {name: history.passes(name, size, epoch, wanted) for name, size in self._sizes.items()}
        ((name, (reading,)),) = ((name, found) for name, found in passes.items() if found)
        return name, reading

    def _total(self, epoch: int, ranks: int, start: int = 0) -> int:
        return self._history.total

    def _check(self) -> None:
        for reader in self._readers.values():
            reader.check_nulls()

    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        history = replace(self._history, lanes=share.lanes)
        passes = PassReader(self._readers, history, self._sizes, share, (epoch, self.token), self._meter)
        with closing(passes):
            unpadded = range(indices.start, min(indices.stop, max(share.total, indices.start)), indices.step)
            batches = list(share.batches(unpadded))
            for place, (_, batch) in zip(unpadded, passes.read(batches, batches), strict=True):
                yield place, batch
            for index in indices[len(unpadded) :]:  # padding: single batches from the epoch's start
                passes.close()
                yield from passes.read([index % share.total], [index])

    def _count(self) -> None:
        """Set how many batches a pass over each dataset has, and how many of them an epoch takes."""
        self._sizes = {name: reader.batches_at(0, of_mix=True) for name, reader in self._readers.items()}
        if self.within_batch:
            counts = dict.fromkeys(self._sizes, batches_of_all(self._sizes, self.epoch_length))
        else:
            found = batches_per_epoch(self._sizes, self.weights, self.epoch_length)
            counts = dict(zip(self._sizes, found, strict=True))
        self._history = MixHistory((MixPeriod(0, counts),), self.seed, together=self.within_batch)


def _reader_of(name: str, dataset: ParquetDataset) -> DatasetReader:
    try:
        return dataset.reader_for_mix()
    except UsageError as error:
        raise error.within(f"dataset {name!r}") from error


def periods_of(state: MixState) -> tuple[MixPeriod, ...]:
    """Return the periods of a state; a mix that was never changed has one."""
    try:
        found = tuple(MixPeriod(int(since), dict(counts)) for since, counts in state.periods or [[0, state.counts]])
    except (TypeError, ValueError) as error:
        raise UsageError("state", f"it is not a state of Mix ({error})") from error
    return found


class PassReader:
    """Reads the current pass of each dataset; at the end of one, also the next."""

    def __init__(
        self,
        readers: Mapping[str, DatasetReader],
        history: MixHistory,
        sizes: Mapping[str, int],
        share: EpochShare,
        of_mix: tuple[int, int],  # the epoch, and the number by which batches name the mix
        meter: Meter,  # of the mix, which counts batches of several datasets
    ) -> None:
        self._readers, self._history, self._sizes, self._share = readers, history, sizes, share
        self._epoch, self._token = of_mix
        self._meter = meter
        self._open: dict[tuple[str, int], Generator[tuple[BatchOrigin, Batch]]] = {}
        self._transforms: dict[tuple[str, int], TransformRunner] = {}
        self._submits: dict[str, Submit] = {}  # by dataset, whose transform may have threads
        self._threads = ExitStack()

    def read(self, indices: list[int], numbers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield (number, transformed batch) for batches ``indices`` of the epoch, in order."""
        wanted = np.array(indices, np.int64)
        waiting: dict[tuple[str, int], DatasetPass] = {}
        draws: list[dict[str, tuple[int, int]]] = [{} for _ in indices]  # by dataset: pass, batch in it
        for name, size in self._sizes.items():
            for reading in self._history.passes(name, size, self._epoch, wanted):
                waiting[name, reading.number] = reading
                for place, batch in zip(reading.positions.tolist(), reading.batches.tolist(), strict=True):
                    draws[place][name] = reading.number, batch
        left = {key: len(reading.positions) for key, reading in waiting.items()}
        coming: deque[tuple[int, Parts]] = deque()  # batches that are read, and in their transforms
        for number, draw in zip(numbers, draws, strict=True):
            parts: Parts = {}
            for name, (pass_number, batch) in draw.items():
                parts[name] = self._next(name, pass_number, batch, number, waiting)
                left[name, pass_number] -= 1
                if not left[name, pass_number]:
                    self._open.pop((name, pass_number)).close()
            coming.append((number, parts))
            while len(coming) >= max(runner.ahead for runner in self._transforms.values()):
                yield self._made(*coming.popleft())
        while coming:
            yield self._made(*coming.popleft())

    def _made(self, number: int, parts: Parts) -> tuple[int, Any]:
        """Return a batch of the mix, once the transforms of its parts have returned."""
        if not self._history.together:
            ((_, result),) = parts.values()
            return number, result()
        position = replace(next(iter(parts.values()))[0], source=None)
        results = {name: result() for name, (_, result) in parts.items()}
        with self._meter.timed(TENSORS):
            batch = joined(results, position)
        self._meter.made(1, 0, 0)  # its rows are counted by the datasets
        return number, batch

    def _next(
        self, name: str, pass_number: int, seed: int, number: int, waiting: dict[tuple[str, int], DatasetPass]
    ) -> tuple[Position, Result]:
        """Return the position of the batch that comes next in a pass, and what waits for its transform."""
        key, reader = (name, pass_number), self._readers[name]
        if key not in self._open:
            self._open[key] = reader.read_pass(waiting.pop(key), self._share)
        origin, batch = next(self._open[key])
        position = replace(batch.position, epoch=self._epoch, index=number, source=name, dataset=self._token)
        if key not in self._transforms:
            self._transforms[key] = reader.transforms(origin)
        runner = self._transforms[key]
        if name not in self._submits:
            self._submits[name] = self._threads.enter_context(runner.threads())
        item = Item(value=Batch(batch, position), position=position, place=batch.index, numbers=(pass_number, seed))
        return position, self._submits[name](partial(runner.one, item))

    def close(self) -> None:
        """Stop reading."""
        self._threads.close()
        self._submits.clear()
        for batches in self._open.values():
            batches.close()
        self._open.clear()
