"""Small batches that a worker sends to the trainer together, so that what a message costs is shared by many.

Each worker's messages have numbers, and the trainer says from which number on they hold how many batches. So messages
of one number are equally large, and what the trainer keeps of the others while it waits for one worker is at most a
message of each. A worker sends fewer where batches become large or slow: the order does not depend on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from pqcache.torch.batch_values import UnmadeBatch
from pqcache.torch.ragged import Ragged
from pqcache.torch.worker_memory import WorkerMemory

MOST_BATCHES = 16  # of a message
_MOST_BYTES = 8 << 20
MOST_SECONDS = 0.03  # for which a batch is kept back, about
_GROWTH = 4  # times as many batches from one change to the next
_FIRST = 2  # messages of one batch at the beginning of a pass
_SMOOTHING = 0.25  # the share of the latest message in the average time of a batch


class BatchGroup(list[Any]):
    """Batches of a ``worker``, which are sent together; behind them perhaps the error of the next one, as torch's.

    ``wanted`` is how many may be sent together by their size and the time that they take.
    """

    def __init__(self, items: Iterable[Any] = (), worker: int = 0, wanted: int = 1) -> None:
        super().__init__(items)
        self.worker, self.wanted = worker, wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchGroup, (list(self), self.worker, self.wanted)


class GroupSizes:
    """How many batches the messages of a loader's workers hold, by their number, in memory shared with the workers.

    Packed into one integer so that updates are atomic.
    """

    def __init__(self, most: int) -> None:
        self.most, self.seconds = most, MOST_SECONDS
        self._memory = WorkerMemory((1,))

    def _set(self, before: int, change: int, after: int) -> None:
        self._memory.numbers[0] = change << 16 | before << 8 | after

    def _get(self) -> tuple[int, int, int]:
        cell = int(self._memory.numbers[0])
        return cell >> 8 & 255, cell >> 16, cell & 255

    def begin(self) -> None:
        """Begin a pass: with single batches, then with as many as the pass before had at its end."""
        self._set(1, _FIRST, max(1, self._get()[2]))

    def at(self, number: int) -> int:
        """Return how many batches a worker's message of this number holds."""
        before, change, after = self._get()
        return after if number >= change else before

    def adapt(self, wanted: int, number: int, prepared: int) -> None:
        """Note how many were ``wanted`` by all workers in their messages of a number; others follow from later ones on.

        Each worker may have begun with as many more messages as are ``prepared``.
        """
        _, change, size = self._get()
        if number < change:
            return
        found = min(self.most, _GROWTH * size, wanted)
        if found >= 2 * size or found < size:
            self._set(size, number + prepared + 2, found)


def sizes_in_worker(sizes: GroupSizes | None) -> GroupSizes | None:
    """Return the sizes of a dataset whose batches this process, a worker, sends in groups; None elsewhere.

    What reads the dataset in another thread or process while a loader begins may see the sizes too.
    """
    return None if get_worker_info() is None else sizes


def grouped(batches: Generator[Any], sizes: GroupSizes) -> Generator[BatchGroup]:
    """Yield the batches of this worker in groups; an error comes behind the batches before it."""
    info = get_worker_info()
    assert info is not None
    number, average, ended = 0, 0.0, False
    with closing(batches):
        while not ended:
            group, begun, most, size = BatchGroup(worker=info.id), time.monotonic(), sizes.at(number), _MOST_BYTES
            taken = 0.0
            try:
                for batch in batches:
                    group.append(batch)
                    taken = time.monotonic() - begun
                    if len(group) == 1:
                        size = bytes_of(batch)
                        most = min(most, _MOST_BYTES // max(1, size))
                    if len(group) >= most or taken > sizes.seconds:
                        break
                else:
                    ended = True
            except Exception:  # noqa: BLE001 - raised in the trainer, once it has taken the batches before
                ended = True
                where = f"in DataLoader worker process {info.id}"
                group.append(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]
            if not group:
                return
            pace = taken / len(group)
            average = pace if number <= 1 else average + _SMOOTHING * (pace - average)  # the first takes longer
            by_time = sizes.seconds / max(average, 1e-6)
            group.wanted = max(1, int(min(MOST_BATCHES, _MOST_BYTES // max(1, size), by_time)))
            yield group
            number += 1


def ungrouped(groups: Iterator[BatchGroup], sizes: GroupSizes, workers: int, prepared: int) -> Generator[Any]:
    """Yield the batches of groups, one of each worker in turn; raise the error of a batch when it is its turn.

    Workers have begun with at most so many ``prepared`` messages.
    """
    waiting: list[deque[Any]] = [deque() for _ in range(workers)]
    received, wanted = 0, MOST_BATCHES
    turn = 0
    while True:
        mine = waiting[turn % workers]
        while not mine:
            group = next(groups, None)
            if group is None:
                break
            waiting[group.worker].extend(group)
            received, wanted = received + 1, min(wanted, group.wanted)
            if received % workers == 0:
                sizes.adapt(wanted, received // workers - 1, prepared)
                wanted = MOST_BATCHES
            del group  # so that a batch is freed when the trainer has done with it
        if mine:
            batch = mine.popleft()
            if isinstance(batch, ExceptionWrapper):
                batch.reraise()  # type: ignore[no-untyped-call]
            yield batch
            del batch
        elif not any(waiting):
            return
        turn += 1


def bytes_of(value: Any) -> int:
    """Return about how many bytes a batch takes; of what is not known, so many that it is sent alone."""
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and value.layout is torch.strided):
        return int(value.nbytes)
    if isinstance(value, Ragged):
        return bytes_of(value.values) + bytes_of(value.offsets)
    if isinstance(value, UnmadeBatch):
        return int(value.bytes)
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(bytes_of, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 16 if value is None or isinstance(value, bool | int | float) else _MOST_BYTES
