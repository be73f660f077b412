"""Mix: several ParquetDatasets as one, each giving its share of the batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pqcache.errors import UsageError
from pqcache.options import Unpack, documented, parsed
from pqcache.reader.batch_rows import RowPlaces, checked_index
from pqcache.reader.mixture import DatasetPass, MixHistory, MixPeriod, batches_of_all, batches_per_epoch
from pqcache.reader.order import EpochShare, batches_at, check_rank
from pqcache.reader.stats import TENSORS, DatasetStats, Meter, mix_stats
from pqcache.torch.batch import Batch, Position, joined, register
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.dataset_options import IterationArguments, IterationOptions
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.iteration_meter import new_meter
from pqcache.torch.resumable import ResumableDataset
from pqcache.torch.state import MixState, Place, State
from pqcache.torch.transforms import Item, TransformRunner

Result = Callable[[], Any]  # waits for a transform
_NO_PLACE = {"epoch": 0, "batch": 0}  # of a dataset's state: the mix has its own


@documented(IterationArguments, IterationOptions)
class Mix(ResumableDataset):
    """Batches of several datasets in fixed proportions, for ``Loader(mix)``.

    Each batch comes from one dataset, which ``batch.source`` names, so their columns may differ. The choice is not
    random: after any number of batches each dataset has given its share, to within one or two batches. The sequence
    of batches is the same for all numbers of ranks and workers whose product divides ``lanes``.

    Without new rows for a dataset's ``since`` there are no batches at all.

    A dataset is read pass after pass. If an epoch does not exhaust it, the next epoch continues where this one stopped;
    if it runs out within an epoch, its next pass begins, in a different order. So every row comes exactly once in each
    pass, and any epoch can be read without those before it. ``seed`` selects the order of draws among ranks and
    workers; each dataset has its own seed.

    Args:
        datasets: ParquetDatasets by name, without lanes and ranks of their own. Their other options apply, including
            transform and batch_size, and each one needs its own memory.
        weights: each dataset's share of the batches, by name, in any unit. Default: in proportion to their sizes, so
            that an epoch has each row of each dataset exactly once.
        epoch_length: "first_exhausted": an epoch ends when one dataset has been read once, and no other more often.
            "all_exhausted": when each has been read at least once. Or a number of batches over all ranks.
        within_batch: True: each batch has rows of every dataset, as many as that dataset's batch_size; these sizes are
            the proportions. All need the same columns. batch.parts has the number of rows of each dataset, in their
            order. False: a batch has rows of one dataset.
        given: see pqcache.torch.dataset_options

    Raises UsageError for invalid options.
    """

    _history: MixHistory

    def __init__(
        self,
        datasets: Mapping[str, ParquetDataset],
        weights: Mapping[str, float] | None = None,
        epoch_length: str | int = "first_exhausted",
        *,
        within_batch: bool = False,
        **given: Unpack[IterationArguments],
    ) -> None:
        options = IterationOptions(**parsed(given, IterationOptions))
        super().__init__(options)
        check_rank(*self._ranks())
        if not isinstance(datasets, Mapping) or not datasets:
            raise UsageError("datasets", 'give at least one by name, like {"web": ParquetDataset(...)}')
        for name, dataset in datasets.items():
            if not isinstance(dataset, ParquetDataset):
                raise UsageError("datasets", f"{name!r} is not a ParquetDataset")
        if len({id(dataset) for dataset in datasets.values()}) < len(datasets):
            raise UsageError("datasets", "one dataset has two names", "construct it twice")
        if within_batch and weights is not None:
            reason = "with within_batch=True the batch sizes of the datasets are their shares of each batch"
            raise UsageError("weights", reason, "leave it out")
        self.datasets = dict(datasets)
        self.weights, self.epoch_length, self.within_batch = weights, epoch_length, within_batch
        self.seed = options.seed
        self._by_name = {name: _reader_of(name, dataset) for name, dataset in datasets.items()}
        self._readers, self._meter = list(self._by_name.values()), new_meter()
        self.token = register(self)
        self._count()

    def __repr__(self) -> str:
        return f"<Mix of {', '.join(f'{name!r}: {dataset!r}' for name, dataset in self.datasets.items())}>"

    def stats(self) -> DatasetStats:
        """Return the cost of reading all datasets together, and each one's in ``datasets``."""
        counts = [reader.meter.counts() for reader in self._readers]
        datasets = {name: reader.stats() for name, reader in self._by_name.items()}
        return mix_stats(self._meter.counts(), datasets, counts, within_batch=self.within_batch)

    @property
    def meter(self) -> Meter:
        return self._meter

    @property
    def counts(self) -> dict[str, int]:
        """How many batches of an epoch come from each dataset, over all ranks."""
        return dict(self._history.periods[-1].counts)

    def drawn(self, after: Batch | int | Place | None = None) -> dict[str, float]:
        """Return how often each dataset was read until ``after``, a place as for ``state_dict``.

        1.5 is one and a half passes. Counts the batches of all ranks, in all epochs since the dataset joined the mix.
        """
        place = self._place(after)
        history, total = replace(self._history, lanes=place.lanes), self._history.total
        done = np.arange(min(place.batch, total))
        if place.divisions:
            done = batches_at(total, place.lanes, place.divisions)[: len(done)]
        return {name: history.drawn(name, place.epoch, done) / max(size, 1) for name, size in self._sizes.items()}

    def load_state_dict(self, state: Mapping[str, Any], changed: bool = False) -> None:
        """Restore epoch, next batch, lanes, window and snapshot from ``state``.

        The numbers of ranks and workers may differ; see ``ParquetDataset.load_state_dict``.

        With ``changed`` this mix may have other weights, another epoch_length and other datasets than the mix of the
        state, from the next epoch on. Datasets in both continue where they stopped. The state has to be from the end of
        an epoch, or from before its first batch.

        Each dataset's snapshot is opened if it is still kept. Raises UsageError if the state does not fit, and
        CacheError if a snapshot is gone.
        """
        loaded = MixState.from_dict(state)
        loaded.check_worker()
        if not changed and list(loaded.datasets) != list(self.datasets):
            raise UsageError(
                "state",
                f"it belongs to a mix of {', '.join(loaded.datasets)}, and this one mixes {', '.join(self.datasets)}",
                "construct it with the same datasets in the same order, or give changed=True at the end of an epoch",
            )
        before = [reader.token for reader in self._by_name.values()]
        for name, reader in self._by_name.items():
            if name not in loaded.datasets:
                continue
            try:
                reader.load_state(State.from_dict({**loaded.datasets[name], **_NO_PLACE}), of_mix=True)
            except UsageError as error:
                raise error.within(f"dataset {name!r}") from error
        if [reader.token for reader in self._by_name.values()] != before:  # of other snapshots
            self.token = register(self)
        self._count()
        loaded.check_options(seed=self.seed, lanes=self._lanes or loaded.lanes, within_batch=self.within_batch or None)
        if not changed:
            loaded.check_options(counts=self.counts)
        periods = _periods_of(loaded)
        self._history = replace(self._history, periods=self._continued(periods, loaded) if changed else periods)
        self._lanes = loaded.lanes
        begun = self._history.periods[-1].since
        later = replace(loaded, epoch=begun, batch=0, divisions=None) if begun > loaded.epoch else loaded
        self._resume(later)

    def _layout_values(self, lanes: int) -> Any:
        return super()._layout_values(lanes), self._history.periods

    def _continued(self, periods: tuple[MixPeriod, ...], state: MixState) -> tuple[MixPeriod, ...]:
        """The periods of a state, and one more if the counts of this mix differ."""
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, token=register(self, state["token"]))

    def rows_at(self, position: Position) -> RowPlaces:
        return self._rows_of(position.epoch, position.index % self._history.total, position.lanes, 0, position)

    def _rows_of(self, epoch: int, index: int, lanes: int, ranks: int, position: Position | None = None) -> RowPlaces:
        if self.within_batch:
            raise UsageError(
                "rows_of()",
                "with within_batch=True the rows of a batch are in several datasets",
                "keep a column that names the row",
            )
        history, indices = replace(self._history, lanes=lanes), np.array([checked_index(index, self._history.total)])
        passes = {name: history.passes(name, size, epoch, indices) for name, size in self._sizes.items()}
        ((name, (reading,)),) = ((name, found) for name, found in passes.items() if found)
        reader = self._by_name[name]
        batch = int(reading.batches[0])
        at = position or reader.place_of(reading.number, batch, lanes, ranks, of_mix=True)
        index_in_pass = int(reading.lane_batches[0] * lanes + reading.lanes[0])
        if not reader.options.shuffle:
            index_in_pass = batch
        at = replace(at, epoch=reading.number, index=index_in_pass)
        return replace(reader.rows_at(at, reading), epoch=epoch, index=index)

    def _total(self, epoch: int, ranks: int, start: int) -> int:
        return self._history.total

    def _state_at(self, place: Place, worker: list[int] | None) -> MixState:
        of_datasets, (ranks, _) = Place(0, 0, place.lanes), self._ranks()
        states = {name: reader.state(of_datasets, ranks).to_dict() for name, reader in self._by_name.items()}
        periods = self._history.periods
        is_changed = len(periods) > 1 or periods[0].since > 0
        return MixState(
            counts=self.counts,
            datasets={name: {k: v for k, v in state.items() if k not in _NO_PLACE} for name, state in states.items()},
            seed=self.seed,
            periods=[[since, dict(counts)] for since, counts in periods] if is_changed else None,
            within_batch=self.within_batch or None,
            **place.in_state(worker),
        )

    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        unpadded = range(indices.start, min(indices.stop, max(share.total, indices.start)), indices.step)
        batches = list(share.batches(unpadded))
        with closing(self._drawn(share, epoch, batches, batches)) as found:
            yield from zip(unpadded, found, strict=True)
        for index in indices[len(unpadded) :]:  # padding: single batches from the epoch's start
            with closing(self._drawn(share, epoch, [index % share.total], [index])) as found:
                yield index, next(found)

    def _drawn(self, share: EpochShare, epoch: int, indices: list[int], numbers: list[int]) -> Generator[Any]:
        """Yield transformed batches by their ``indices`` in an epoch, under the ``numbers`` that the trainer sees."""
        history, drawn = replace(self._history, lanes=share.lanes), np.array(indices, np.int64)
        draws: list[list[tuple[str, DatasetPass, int]]] = [[] for _ in indices]
        for name, size in self._sizes.items():
            for reading in history.passes(name, size, epoch, drawn):
                for place, batch in zip(reading.positions.tolist(), reading.batches.tolist(), strict=True):
                    draws[place].append((name, reading, batch))
        passes: dict[tuple[str, int], tuple[TransformRunner, Generator[tuple[Position, Any]]]] = {}
        left: Counter[tuple[str, int]] = Counter()  # batches of these passes
        submits: dict[str, Callable[[Result], Result]] = {}  # by dataset, whose transform may have threads
        ahead, coming = 1, deque[dict[str, tuple[Position, Result]]]()  # batches that are read, in their transforms
        with ExitStack() as stack:
            for number, draw in zip(numbers, draws, strict=True):
                parts = {}
                for name, reading, batch in draw:
                    key = name, reading.number
                    if key not in passes:
                        runner, found = passes[key] = self._by_name[name].open_pass(reading, share)
                        stack.enter_context(closing(found))
                        left[key], ahead = len(reading.positions), max(ahead, runner.ahead)
                        if name not in submits:
                            submits[name] = stack.enter_context(runner.threads())
                    runner, found = passes[key]
                    at, value = next(found)
                    position = replace(at, epoch=epoch, index=number, source=name, dataset=self.token)
                    value = Batch(value, position)
                    item = Item(value=value, position=position, place=at.index, numbers=(reading.number, batch))
                    parts[name] = position, submits[name](partial(runner.one, item))
                    left[key] -= 1
                    if not left[key]:
                        found.close()
                coming.append(parts)
                while len(coming) >= ahead:
                    yield self._made(coming.popleft())
            while coming:
                yield self._made(coming.popleft())

    def _made(self, parts: dict[str, tuple[Position, Result]]) -> Any:
        if not self.within_batch:
            ((_, result),) = parts.values()
            return result()
        position = replace(next(iter(parts.values()))[0], source=None)
        results = {name: result() for name, (_, result) in parts.items()}
        with self._meter.timed(TENSORS):
            batch = joined(results, position)
        self._meter.made(1, 0, 0)  # its rows are counted by the datasets
        return batch

    def _count(self) -> None:
        """Count the batches in a pass over each dataset, and those taken by an epoch."""
        self._sizes = {name: reader.batches_at(0, of_mix=True) for name, reader in self._by_name.items()}
        if any(not size and self.datasets[name].options.since is not None for name, size in self._sizes.items()):
            counts = dict.fromkeys(self._sizes, 0)  # nothing is new, of which a warning was given
        elif self.within_batch:
            counts = dict.fromkeys(self._sizes, batches_of_all(self._sizes, self.epoch_length))
        else:
            found = batches_per_epoch(self._sizes, self.weights, self.epoch_length)
            counts = dict(zip(self._sizes, found, strict=True))
        self._history = MixHistory((MixPeriod(0, counts),), self.seed, together=self.within_batch)


def _reader_of(name: str, dataset: ParquetDataset) -> DatasetReader:
    try:
        return dataset._reader_for_mix()
    except UsageError as error:
        raise error.within(f"dataset {name!r}") from error


def _periods_of(state: MixState) -> tuple[MixPeriod, ...]:
    """The periods of a state: one if the mix was never changed."""
    try:
        found = tuple(MixPeriod(int(since), dict(counts)) for since, counts in state.periods or [[0, state.counts]])
    except (TypeError, ValueError) as error:
        raise UsageError("state", f"it is not a state of Mix ({error})") from error
    return found
