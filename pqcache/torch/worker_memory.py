"""Numbers that a trainer shares with its workers, but not with other trainers that are forked or spawned from it.

A process that gets a dataset by a fork or a pickle may become a DataLoader's worker, or a trainer itself: a rank that
Lightning's ``ddp_fork`` or ``torch.multiprocessing`` starts. ``get_worker_info()`` tells which, once the dataset is
used. A trainer then takes memory of its own, with the numbers as they were when its process started; it has to do so
before it starts workers.
"""

from __future__ import annotations

import multiprocessing.context
import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

Numbers = npt.NDArray[np.int64]


class WorkerMemory:
    """Integers in shared memory. A copy, pickled or not, shares them only with its own workers.

    Copies and other trainers begin with the same numbers if they are ``kept``, else with 0.
    """

    def __init__(self, shape: tuple[int, ...], kept: bool = True) -> None:
        self._kept = kept
        self._parents: list[torch.Tensor] = []  # held: torch may remove them when one of their processes lets them go
        self.started = 0  # processes that were started with it, this one included
        self._use(_shared_copy(np.zeros(shape, np.int64)))

    def _use(self, tensor: torch.Tensor) -> None:
        self._tensor, self._numbers = tensor, tensor.numpy()
        self._made_by = os.getpid()
        self._begin = self._first(self._numbers)
        self._is_inherited = False
        _all[id(self)] = self

    def _first(self, numbers: Numbers) -> Numbers:
        return numbers.copy() if self._kept else np.zeros_like(numbers)

    @property
    def is_own(self) -> bool:
        """Whether this process made the memory: a trainer, or a worker that makes its own dataset."""
        return self._made_by == os.getpid()

    @property
    def seen(self) -> Numbers:
        """The numbers, to be read only. Works before torch has told a worker that it is one, too."""
        return self._begin if self._is_inherited and get_worker_info() is None else self._numbers

    @property
    def numbers(self) -> Numbers:
        """The numbers that this process shares, to be read and written."""
        if self._is_inherited and get_worker_info() is None:
            with _lock:
                if self._is_inherited:
                    self._parents.append(self._tensor)
                    self._use(_shared_copy(self._begin))
        return self._numbers

    def bequeath(self) -> None:
        """Keep the numbers that a process about to be forked begins with if it is a trainer."""
        self._begin = self._first(self.numbers)
        self.started += 1

    def inherit(self) -> None:
        self._is_inherited = True

    def __getstate__(self) -> dict[str, Any]:
        numbers = self.numbers  # of a rank its own
        is_starting = multiprocessing.context.get_spawning_popen() is not None  # a process, which may be a worker
        self.started += is_starting
        state = {"kept": self._kept, "started": self.started, "begin": self._first(numbers)}
        return {**state, "shared": self._tensor if is_starting else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kept, self.started, self._parents, shared = state["kept"], state["started"], [], state["shared"]
        self._use(_shared_copy(state["begin"]) if shared is None else shared)
        if shared is not None:
            self._begin, self._made_by, self._is_inherited = state["begin"], 0, True


def _shared_copy(values: Numbers) -> torch.Tensor:
    """Copy into shared memory, whatever device and mode torch is set to.

    numpy copies: ``share_memory_`` uses threads, and hangs in a forked process whose parent had some.
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
