"""Numbers that a trainer shares with its workers, and not with other trainers that are forked or spawned from it.

A process that is forked, or to which a dataset is pickled, may become a DataLoader's worker or a trainer itself: a rank
that Lightning's ``ddp_fork`` or ``torch.multiprocessing`` starts. A pickle knows for whom it is made. Of a forked
process it is known when it uses the dataset: ``get_worker_info()`` says so. A trainer goes on with memory of its own,
which begins as the numbers were when it was forked or spawned. It has to have done so before it forks workers.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from pqcache.torch.foreign_loaders import starts_workers

Numbers = npt.NDArray[np.int64]


class WorkerMemory:
    """Integers in shared memory. A copy, also one that was pickled, shares them with its own workers alone.

    Copies and other trainers begin with the same numbers; with 0 unless they are ``kept``.
    """

    def __init__(self, shape: tuple[int, ...], kept: bool = True) -> None:
        self._kept = kept
        self._parents: list[torch.Tensor] = []  # held: torch may remove them when one of their processes lets them go
        self._use(_shared_copy(np.zeros(shape, np.int64)))

    def _use(self, tensor: torch.Tensor) -> None:
        self._tensor, self._numbers = tensor, tensor.numpy()
        self._made_by = os.getpid()
        self._begin = self._first(self._numbers)
        self._is_inherited = False
        _all[id(self)] = self

    def _first(self, numbers: Numbers) -> Numbers:
        """Return with what another trainer begins."""
        return numbers.copy() if self._kept else np.zeros_like(numbers)

    @property
    def is_own(self) -> bool:
        """Whether this is a worker that shares them with nobody: it made them itself."""
        return self._made_by == os.getpid() and get_worker_info() is not None

    @property
    def numbers(self) -> Numbers:
        """What this process shares, to be read and written."""
        if self._is_inherited and get_worker_info() is None:
            with _lock:
                if self._is_inherited:
                    self._parents.append(self._tensor)
                    self._use(_shared_copy(self._begin))
        return self._numbers

    def bequeath(self) -> None:
        """Note with what a process begins that is about to be forked, if it is a trainer."""
        self._begin = self._first(self.numbers)

    def inherit(self) -> None:
        """Note that this process was forked."""
        self._is_inherited = True

    def __getstate__(self) -> dict[str, Any]:
        numbers = self.numbers  # of a rank its own
        return {"kept": self._kept, "values": self._tensor if starts_workers() else self._first(numbers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kept, self._parents, values = state["kept"], [], state["values"]
        if isinstance(values, torch.Tensor) and values.is_shared():  # type: ignore[no-untyped-call]
            self._use(values)
            self._made_by = 0  # another process
        else:
            self._use(_shared_copy(self._first(np.asarray(values))))


def _shared_copy(values: Numbers) -> torch.Tensor:
    """Return a copy in shared memory, whatever device and mode torch is set to.

    It is copied by numpy: ``share_memory_`` copies on threads, which hangs in a forked process where its parent had
    some.
    """
    with torch.inference_mode(False):
        storage = torch.UntypedStorage._new_shared(values.nbytes)  # type: ignore[no-untyped-call]
        tensor = torch.empty(0, dtype=torch.int64, device="cpu")
        tensor.set_(storage, 0, values.shape)  # type: ignore[call-overload]
    tensor.numpy()[...] = values
    return tensor


_all: weakref.WeakValueDictionary[int, WorkerMemory] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # between threads; a forked child has its own


def _living() -> list[WorkerMemory]:
    return [memory for reference in _all.valuerefs() if (memory := reference()) is not None]


def _before_fork() -> None:
    for memory in _living():
        memory.bequeath()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for memory in _living():
        memory.inherit()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
