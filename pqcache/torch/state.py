"""Where a training is: what state_dict holds, and what workers and trainer tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from pqcache.errors import UsageError

FORMAT = 1
_WORKERS_AT_MOST = 4096
_VERSION, _EPOCH, _START, _WORKERS, _DONE, _DONE_AT, _FINISHED = range(7)


@dataclass(frozen=True)
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

    def of_worker(self, worker: int, workers: int, start: int) -> State:
        """Return the same, marked as one worker's own."""
        return replace(self, worker=[worker, workers, start])

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        found = {"format": FORMAT, **asdict(self)}
        if self.worker is None:
            del found["worker"]
        return found

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> State:
        """Read what ``to_dict`` wrote; anything else raises UsageError."""
        if not isinstance(state, Mapping) or "format" not in state:
            raise UsageError("not a state of ParquetDataset: load what its state_dict() returned")
        if state["format"] != FORMAT:
            raise UsageError(f"the state is of format {state['format']}, this pqcache reads {FORMAT}; upgrade pqcache")
        try:
            return State(**{key: value for key, value in state.items() if key != "format"})
        except TypeError as error:
            raise UsageError(f"not a state of ParquetDataset ({error})") from error

    def check(self, mine: Mapping[str, Any], row_groups: str) -> None:
        """Raise UsageError for the first option in which the dataset differs from the state."""
        for name, value in mine.items():
            there = getattr(self, name)
            if value != there:
                raise UsageError(
                    f"the state was taken with {name}={there!r}, this dataset has {name}={value!r}; "
                    "construct it as it was, or start the epoch afresh"
                )
        if row_groups != self.row_groups:
            raise UsageError("the state was taken with other filters or rows; construct the dataset with the same ones")

    def check_worker(self, worker: int | None, workers: int) -> None:
        """Raise UsageError for one worker's own state where it does not belong."""
        if self.worker is not None and self.worker[:2] != [worker, workers]:
            raise UsageError(
                f"this is the state of worker {self.worker[0]} of {self.worker[1]}; StatefulDataLoader must "
                "have the same num_workers again. To change it, save ds.state_dict(after=batch) instead"
            )


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
            raise UsageError(f"set_epoch({epoch}): epochs count from 0")
        self._shared[_VERSION] += 1
        if epoch != int(self._shared[_EPOCH]):
            start = int(self._shared[_DONE_AT]) if epoch + 1 == int(self._shared[_DONE]) else 0
            self._shared[_EPOCH] = epoch
            self._shared[_START] = start
            self._shared[_FINISHED:] = 0
            self.next = start
        self._shared[_DONE] = 0

    def resume(self, state: State, in_worker: bool, ended: bool) -> None:
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
