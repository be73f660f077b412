"""Where a training is: what state_dict holds, and what workers and trainer tell each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.torch.batch import Batch, Place

FORMAT = 1
_WORKERS_AT_MOST = 4096
_VERSION, _EPOCH, _START, _WORKERS, _DONE, _DONE_AT, _FINISHED = range(7)


@dataclass(frozen=True, kw_only=True)
class State:
    """A place in a training: all that the rest of it depends on. ``batch`` is the next global index.

    ``worker`` is only in the states that torchdata's StatefulDataLoader takes inside each worker: its number,
    how many there are, and where their epoch began.
    """

    snapshot: str
    row_groups: str
    columns: list[str]
    shuffle: bool
    seed: int
    batch_size: int | None
    lanes: int
    window: int
    piece: int
    epoch: int
    batch: int
    worker: list[int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        found = {"format": FORMAT, **asdict(self)}
        if self.worker is None:
            del found["worker"]
        return found

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> State:
        """Read what ``to_dict`` wrote; anything else raises UsageError."""
        return State(**_checked(state, "ParquetDataset", State))

    def check(self, mine: Mapping[str, Any], row_groups: str) -> None:
        """Raise UsageError for the first option in which the dataset differs from the state."""
        for name, value in mine.items():
            there = getattr(self, name)
            if value != there:
                raise UsageError(
                    "",
                    f"the state was taken with {name}={there!r}, this dataset has {name}={value!r}",
                    "construct it as it was, or start the epoch afresh",
                )
        if row_groups != self.row_groups:
            raise UsageError(
                "",
                "the state was taken with other filters or rows, or another sequence",
                "construct the dataset with the same ones",
            )


@dataclass(frozen=True, kw_only=True)
class MixState:
    """A place in a mix: the batches that each dataset gives in an epoch, and the state of each, without a place."""

    counts: dict[str, int]
    datasets: dict[str, dict[str, Any]]
    seed: int
    lanes: int
    epoch: int
    batch: int
    worker: list[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, Mapping) or not all(isinstance(s, Mapping) for s in self.datasets.values()):
            raise TypeError("it has no states of datasets")

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {key: value for key, value in {"format": FORMAT, **asdict(self)}.items() if value is not None}

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> MixState:
        """Read what ``to_dict`` wrote; anything else raises UsageError."""
        return MixState(**_checked(state, "Mix", MixState))

    def check(self, mine: Mapping[str, Any]) -> None:
        """Raise UsageError for the first option in which the mix differs from the state."""
        for name, value in mine.items():
            if value != getattr(self, name):
                raise UsageError(
                    "",
                    f"the state was taken with {name}={getattr(self, name)!r}, this mix has {name}={value!r}",
                    "construct it as it was, or start the epoch afresh",
                )


def _checked(state: Mapping[str, Any], what: str, kind: type[State] | type[MixState]) -> dict[str, Any]:
    """Return a state's fields; what is not one of this kind and format raises UsageError."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise UsageError(f"not a state of {what}", "load what its state_dict() returned")
    if state["format"] != FORMAT:
        raise UsageError(
            "", f"the state is of format {state['format']}, this pqcache reads {FORMAT}", "upgrade pqcache"
        )
    found = {key: value for key, value in state.items() if key != "format"}
    try:
        kind(**found)
    except TypeError as error:
        raise UsageError("", f"not a state of {what} ({error})") from error
    return found


def check_worker(own: list[int] | None) -> bool:
    """Raise UsageError for one worker's own state where it does not belong; return whether this is a worker."""
    info = get_worker_info()
    if own is not None and own[:2] != ([info.id, info.num_workers] if info else [None, 0]):
        raise UsageError(
            "",
            f"this is the state of worker {own[0]} of {own[1]}",
            "StatefulDataLoader must have the same num_workers again. To change it, save "
            "state_dict(after=batch) instead",
        )
    return info is not None


def check_lanes(lanes: int, replicas: int) -> None:
    """Raise UsageError where so many ranks cannot share a state's lanes."""
    if lanes % replicas:
        raise UsageError(
            "",
            f"the state has lanes={lanes}, which {replicas} ranks cannot share",
            "resume on a number of ranks that divides it",
        )


def replicas_and_rank(given: tuple[int, int] | None) -> tuple[int, int]:
    """Return the number of ranks and this one: as given, or torch.distributed's where it is initialised."""
    if given is not None:
        return given
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


class Begin(NamedTuple):
    """Where an iteration begins: from global batch ``start``; ``next`` is one worker's own next batch."""

    epoch: int
    start: int
    next: int | None


class Progress:
    """Epoch and place, in memory that the trainer shares with its workers, persistent ones included.

    Shared: which epoch is on (with a number that changes each time it is set), the batch at which it is to
    begin, the number of workers seen, and which of them came to the epoch's end; when all have, the next
    iteration is a whole epoch again. Also, after a state from the very end of an epoch, which one that was (plus
    1, 0 for none) and its end. Not shared: the next batch of this process.
    """

    def __init__(self) -> None:
        self._shared = torch.zeros(_FINISHED + _WORKERS_AT_MOST, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._own: tuple[int, Begin] | None = None  # a worker's, from StatefulDataLoader; with the version
        self.next = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        own = self._own_place()
        return int(self._shared[_EPOCH]) if own is None else own.epoch

    @property
    def start(self) -> int:
        """The batch at which this epoch begins: 0, or where it was resumed."""
        own = self._own_place()
        return int(self._shared[_START]) if own is None else own.start

    @property
    def workers(self) -> int:
        """How many workers have been seen; 0 for none."""
        return int(self._shared[_WORKERS])

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; the one that was resumed keeps its place."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch})", "epochs count from 0")
        self._shared[_VERSION] += 1
        if epoch != int(self._shared[_EPOCH]):
            start = int(self._shared[_DONE_AT]) if epoch + 1 == int(self._shared[_DONE]) else 0
            self._shared[_EPOCH] = epoch
            self._shared[_START] = start
            self._shared[_FINISHED:] = 0
            self.next = start
        self._shared[_DONE] = 0

    def resume(self, state: State | MixState, in_worker: bool, ended: bool) -> None:
        """Go to a state's place; from the end of an epoch that is the start of the next one.

        Where that epoch is set all the same, by a training that counts epochs itself, nothing is left of it.
        """
        if in_worker and state.worker is not None:
            place = Begin(state.epoch, state.worker[2], state.batch)
            self._own = int(self._shared[_VERSION]), place
            return
        self._shared[_VERSION] += 1
        self._shared[_EPOCH] = state.epoch + ended
        self._shared[_START] = self.next = 0 if ended else state.batch
        self._shared[_DONE] = state.epoch + 1 if ended else 0
        self._shared[_DONE_AT] = state.batch
        self._shared[_FINISHED:] = 0

    def begin(self, worker: int, workers: int) -> Begin:
        """Return where an iteration begins, and note who iterates."""
        self._shared[_WORKERS] = workers
        own = self._own_place()
        if own is not None:
            return own
        ended = self._shared[_FINISHED : _FINISHED + max(1, workers)]
        start = 0 if bool(ended.all()) else int(self._shared[_START])
        return Begin(int(self._shared[_EPOCH]), start, None)

    def consumed(
        self, after: Batch | int | None, lanes: int | None, replicas: int, total: Callable[[int], int], drop_last: bool
    ) -> Place:
        """Return the place to go on from when ``after`` was consumed, as ``state_dict`` has it: a batch or its index.

        ``lanes`` of None are one for each worker of each rank; ``total`` gives the number of batches of an epoch
        by where it begins.
        """
        worker = get_worker_info()
        if after is None:
            if worker is None and self.workers:
                raise UsageError(
                    "",
                    "state_dict() cannot know which of the workers' batches were consumed",
                    "pass after=batch, the last batch that was",
                )
            return Place(
                epoch=self.epoch, index=self.next, lanes=lanes or replicas * (worker.num_workers if worker else 1)
            )
        place = after.place if isinstance(after, Batch) else None
        index = after.index if isinstance(after, Batch) else int(after)
        epoch = place.epoch if place else self.epoch
        start = self.start if epoch == self.epoch else 0
        lanes = place.lanes if place else lanes or replicas * max(1, self.workers)
        return Place(
            epoch=epoch,
            index=EpochShare(
                total=total(start), lanes=lanes, ranks=replicas, rank=0, start=start, drop_last=drop_last
            ).after(index),
            lanes=lanes,
        )

    def of_worker(self) -> list[int] | None:
        """Return what marks a state as one worker's own; None in the trainer."""
        info = get_worker_info()
        return [info.id, info.num_workers, self.start] if info else None

    def finish(self, worker: int) -> None:
        """Note that this worker has come to the end of the epoch."""
        if self._own is not None:
            self._own = None
        if worker < _WORKERS_AT_MOST:
            self._shared[_FINISHED + worker] = 1

    def _own_place(self) -> Begin | None:
        """Return the worker's own place while it holds: until its end, or until another epoch is set."""
        if self._own is None:
            return None
        version, place = self._own
        if version != int(self._shared[_VERSION]) and int(self._shared[_EPOCH]) != place.epoch:
            self._own = None
            return None
        return place
