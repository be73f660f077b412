"""The epoch and its first batch, shared between the trainer's process and its workers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pqcache.errors import UsageError
from pqcache.torch.checkpoint import MixState, State

_MAX_WORKERS = 4096
# what each value of the shared tensor is; after _FINISHED there is one for each worker
_VERSION, _EPOCH, _START, _WORKERS, _ENDED_EPOCH, _ENDED_AT, _FINISHED = range(7)


class Begin(NamedTuple):
    """Where an iteration begins: at global batch ``start`` of an epoch, and a restored worker at its batch ``next``."""

    epoch: int
    start: int
    next: int | None


class Progress:
    """The epoch and where it begins, in memory that the trainer shares with its workers, persistent ones included.

    Shared are: the epoch, with a version that changes each time it is set; the batch at which it begins; the number
    of workers; which of them have reached the epoch's end (when all have, the next iteration begins at 0); and, after a
    state from the end of an epoch, the number of that epoch plus 1 (else 0) and the batch at which it ended.

    Not shared are ``next``, the next batch of this process, and the place that torchdata's StatefulDataLoader restores
    in each worker.
    """

    def __init__(self) -> None:
        self._shared = torch.zeros(_FINISHED + _MAX_WORKERS, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._restored: tuple[int, Begin] | None = None  # with the version at which it was restored
        self.next = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        restored = self._restored_begin()
        return int(self._shared[_EPOCH]) if restored is None else restored.epoch

    @property
    def start(self) -> int:
        """The batch at which this epoch begins: 0, or where it was resumed."""
        restored = self._restored_begin()
        return int(self._shared[_START]) if restored is None else restored.start

    @property
    def workers(self) -> int:
        """The number of workers of the latest iteration; 0 for none."""
        return int(self._shared[_WORKERS])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; one that was resumed still begins where its state was taken. UsageError below 0."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch})", "epochs count from 0")
        self._shared[_VERSION] += 1
        if epoch != int(self._shared[_EPOCH]):
            start = int(self._shared[_ENDED_AT]) if epoch + 1 == int(self._shared[_ENDED_EPOCH]) else 0
            self._shared[_EPOCH] = epoch
            self._shared[_START] = start
            self._shared[_FINISHED:] = 0
            self.next = start
        self._shared[_ENDED_EPOCH] = 0

    def resume(self, state: State | MixState, in_worker: bool, ended: bool) -> None:
        """Set epoch and start to a state's; a state from the end of an epoch (``ended``) begins the next epoch.

        Where ``set_epoch`` then names the ended epoch all the same, that one has no batches left.
        """
        if in_worker and state.worker is not None:
            begin = Begin(state.epoch, state.worker[2], state.batch)
            self._restored = int(self._shared[_VERSION]), begin
            return
        self._shared[_VERSION] += 1
        self._shared[_EPOCH] = state.epoch + ended
        self._shared[_START] = self.next = 0 if ended else state.batch
        self._shared[_ENDED_EPOCH] = state.epoch + 1 if ended else 0
        self._shared[_ENDED_AT] = state.batch
        self._shared[_FINISHED:] = 0

    def begin(self, workers: int) -> Begin:
        """Return where an iteration with so many workers (0: in the trainer) begins, and note their number."""
        self._shared[_WORKERS] = workers
        restored = self._restored_begin()
        if restored is not None:
            return restored
        finished = self._shared[_FINISHED : _FINISHED + max(1, workers)]
        start = 0 if bool(finished.all()) else int(self._shared[_START])
        return Begin(int(self._shared[_EPOCH]), start, None)

    def finish(self, worker: int) -> None:
        """Note that a worker has reached the end of the epoch."""
        self._restored = None
        if worker < _MAX_WORKERS:
            self._shared[_FINISHED + worker] = 1

    def _restored_begin(self) -> Begin | None:
        """Return where a restored worker begins: until it reaches the end, or until another epoch is set."""
        if self._restored is None:
            return None
        version, begin = self._restored
        if version != int(self._shared[_VERSION]) and int(self._shared[_EPOCH]) != begin.epoch:
            self._restored = None
            return None
        return begin
