"""Transport between workers and trainer: messages (a pickle, and tensor bytes in shared memory) and shared numbers.

A worker writes the tensors of a message end to end into a free slot, and sends the pickle and a reference to the slot
through DataLoader's pipe. The trainer maps each slot once and makes tensors over it. When the last of them is gone, it
marks the slot as free and the worker reuses it, so that after a few batches no pages are new and no descriptors have to
be passed. Small messages go through the pipe whole. So do all others on systems without memfd (anything but Linux), and
when all slots are in use because the trainer keeps many batches.

A child that is forked while the trainer has tensors over a slot maps it too, for an unknown time. Such a slot is
retired: it is never used again, and its memory is freed when the last process has unmapped it.

`WorkerMemory` holds numbers that a trainer shares with its workers, but not with other trainers that are forked or
spawned from it. A process that gets a dataset by a fork or a pickle may become a worker, or a trainer itself, like a
rank of Lightning's ``ddp_fork``; ``get_worker_info()`` tells which once the dataset is used. A trainer then takes
memory of its own, with the numbers as they were when its process started, before it starts workers.
"""

from __future__ import annotations

import gc
import io
import logging
import mmap
import multiprocessing
import multiprocessing.context
import os
import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from pqcache.system.buffers import MAX_SLACK, Buffer, aligned
from pqcache.system.processes import has_ended

log = logging.getLogger("pqcache.torch")

_INLINE = 64 << 10  # bytes of a message; fewer are cheaper through the pipe than by shared memory
_MOST_SLOTS = 256  # file descriptors that a worker may take for them
_HEADER = max(4096, mmap.PAGESIZE)  # a page, so that what follows begins at one: the token of a slot, and its state
_TOKEN = slice(0, 16)
_STATE = 16
_FREE, _SENT, _RETIRED = 0, 1, 2
_ENDING = 5.0  # seconds to wait at most for the end of a process that has closed its descriptors
_NUMPY_TYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bool"),
    )
)


class SlotReference(NamedTuple):
    """A reference by which the receiver finds a slot; ``token`` distinguishes it from earlier slots with the same
    descriptor.
    """

    process: int
    descriptor: int
    token: bytes
    size: int


class Message(NamedTuple):
    """A pickle, the sizes of its buffers, and their bytes, each buffer aligned."""

    pickled: bytes
    sizes: Sequence[int]
    content: SlotReference | bytes


class _Pickler(ForkingPickler):
    """Keeps the bytes of tensors and arrays out of the pickle; everything else is pickled as by torch."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        if value.is_conj() or value.is_neg():  # torch's pickling loses that, and the values
            value = value.resolve_conj().resolve_neg()
        if not is_plain(value):
            return NotImplemented
        if value.dtype in _NUMPY_TYPES:
            array = value.numpy()
            return _tensor, (array if array.flags.c_contiguous else array.copy(),)
        flat = value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else np.zeros(0, np.uint8)
        return _tensor, (flat, value.dtype, tuple(value.shape))


def _tensor(array: Any, dtype: torch.dtype | None = None, shape: tuple[int, ...] = ()) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype).view(shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists only of values in host memory with a type, a shape and strides."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def message_of(value: Any) -> Message:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, 5, True, buffers.append).dump(value)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    sizes = list(map(len, arrays))
    total = sum(map(aligned, sizes))
    slot = _slots().take(total) if total > _INLINE else None
    place = np.empty(total, np.uint8) if slot is None else slot.bytes[_HEADER:]
    at = 0
    for array in arrays:
        place[at : at + len(array)] = array
        at += aligned(len(array))
    return Message(file.getvalue(), sizes, place.tobytes() if slot is None else slot.reference)


def value_of(message: Message) -> Any:
    """Read a message, once. Its tensors use the sender's memory, and none is a view of another."""
    content = message.content
    place = _bytes_of(content) if isinstance(content, SlotReference) else np.frombuffer(bytearray(content), np.uint8)
    at, buffers = 0, []
    for size in message.sizes:
        buffers.append(place[at : at + size])
        at += aligned(size)
    return pickle.loads(message.pickled, buffers=buffers)


class Slot:
    """A piece of shared memory into which this process writes one message at a time."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("pqcache-batch", os.MFD_CLOEXEC)
        self.reference = SlotReference(os.getpid(), descriptor, os.urandom(16), size)
        os.ftruncate(descriptor, _HEADER + size)
        self._map = mmap.mmap(descriptor, _HEADER + size)
        self._map[_TOKEN] = self.reference.token
        self.bytes: Buffer = np.frombuffer(self._map, np.uint8)
        self.size, self.touched = size, 0  # bytes in all, and of them those that take memory

    @property
    def state(self) -> int:
        """FREE, SENT from when it is chosen until the receiver releases it, or RETIRED."""
        return self._map[_STATE]

    def take(self, size: int) -> None:
        self._map[_STATE] = _SENT
        self.touched = max(self.touched, size)

    def empty(self) -> None:
        """Return the memory to the system until the slot is written to again."""
        try:
            self._map.madvise(mmap.MADV_REMOVE, _HEADER, self.size)
            self.touched = 0
        except OSError as error:
            log.debug("this system takes no part of shared memory back (%s)", error)

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last array over it, in any process."""
        os.close(self.reference.descriptor)


class Slots:
    """The slots of this process. Idle ones are emptied once all together take much more memory than was ever in use at
    once.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.all: list[Slot] = []
        self._most = 0  # bytes of the slots that were in use at one time
        self._lock = threading.Lock()  # a queue pickles on a thread of its own

    def take(self, size: int) -> Slot | None:
        """Choose a free slot for a message of ``size`` bytes; None if the limit is reached.

        Sizes of slots are powers of two, so that there are few of them. A slot of twice the size is acceptable, as
        message sizes may vary around a power of two.
        """
        capacity = 1 << (size - 1).bit_length()
        with self._lock:
            for slot in [slot for slot in self.all if slot.state == _RETIRED]:
                self.all.remove(slot)
                slot.close()
            free = [slot for slot in self.all if slot.state == _FREE]
            fitting = [slot for slot in free if slot.size in (capacity, 2 * capacity)]
            chosen = min(fitting, key=lambda slot: (not slot.touched, slot.size), default=None) or self._new(capacity)
            if chosen is not None:
                chosen.take(size)
                self._empty([slot for slot in free if slot is not chosen])
            return chosen

    def _new(self, size: int) -> Slot | None:
        if not hasattr(os, "memfd_create") or not Path(f"/proc/{os.getpid()}/fd").is_dir():
            log.debug("batches are copied through the pipe: this system has no memfd_create or no /proc")
            return None
        if len(self.all) >= _MOST_SLOTS:
            log.debug("a batch is copied through the pipe: all %d shared slots are in use", _MOST_SLOTS)
            return None
        try:
            slot = Slot(size)
        except OSError as error:
            log.debug("a batch is copied through the pipe: no shared memory (%s)", error)
            return None
        self.all.append(slot)
        return slot

    def _empty(self, idle: Sequence[Slot]) -> None:
        total = sum(slot.touched for slot in self.all)
        self._most = max(self._most, total - sum(slot.touched for slot in idle))
        for slot in sorted(idle, key=lambda slot: slot.touched):
            if total <= self._most + MAX_SLACK:
                return
            total -= slot.touched
            slot.empty()


class _Lease:
    """Kept alive by the tensors over a received slot; when the last is gone, the sender may use the slot again."""

    _slot: mmap.mmap | None = None  # until it is made: an interrupt may come first

    def __init__(self, slot: mmap.mmap) -> None:
        address = np.frombuffer(slot, np.uint8).ctypes.data + _HEADER
        size = len(slot) - _HEADER
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}
        self._slot = slot
        _leases[id(self)] = self

    def retire(self) -> None:
        if self._slot is not None:
            self._slot[_STATE] = _RETIRED
            _mapped.pop(self._slot[_TOKEN], None)

    def __del__(self) -> None:
        if self._slot is not None and self._slot[_STATE] == _SENT:
            self._slot[_STATE] = _FREE


def _bytes_of(slot: SlotReference) -> Buffer:
    known = _mapped.get(slot.token)
    if known is None:
        for token, (process, _) in _mapped.copy().items():  # a copy is made at once, and other threads receive too
            if not Path(f"/proc/{process}").exists():  # workers come and go with epochs
                _mapped.pop(token, None)
        known = _mapped[slot.token] = slot.process, _map(slot)
    return np.asarray(_Lease(known[1]))


def _map(slot: SlotReference) -> mmap.mmap:
    try:
        descriptor = os.open(f"/proc/{slot.process}/fd/{slot.descriptor}", os.O_RDWR)
    except OSError as error:
        raise _gone(slot.process) from error
    try:
        mapped = mmap.mmap(descriptor, _HEADER + slot.size)
    finally:
        os.close(descriptor)
    if mapped[_TOKEN] != slot.token:
        raise _gone(slot.process)
    return mapped


def _gone(process: int) -> RuntimeError:
    """Wait for the end of a worker whose memory is gone, so that DataLoader, which checks next, names it in its error.

    A worker closes its descriptors before it ends.
    """
    deadline = time.monotonic() + _ENDING
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return RuntimeError("a worker's shared memory is gone; it may have been killed")


def _slots() -> Slots:
    global _own
    if _own is None or _own.process != os.getpid():
        _own = Slots()
    return _own


def _retire_leased() -> None:
    for reference in _leases.valuerefs():
        if (lease := reference()) is not None:
            lease.retire()


_own: Slots | None = None
_mapped: dict[bytes, tuple[int, mmap.mmap]] = {}  # by token: slots that were received, and their senders' processes
_leases: weakref.WeakValueDictionary[int, _Lease] = weakref.WeakValueDictionary()  # by id
os.register_at_fork(before=_retire_leased)


def begin_worker() -> None:
    """Prepare this process, a worker of a DataLoader.

    Python's garbage collector must not touch the trainer's objects: it would write to all of them, and so copy the
    memory that the worker shares with the trainer since the fork.

    The worker also ends when its trainer is killed. torch only compares the parent's id, which does not change for the
    child of a fork server. And an ending worker would wait forever for the thread that writes batches to the trainer's
    pipe: as the worker holds the reading end too, that thread gets no error when nobody reads.
    """
    global _begun
    if _begun != os.getpid():
        _begun = os.getpid()
        gc.freeze()
        Finalize(None, _end_if_alone, (os.getppid(),), exitpriority=0)  # before those threads are waited for, at -5
        if (trainer := multiprocessing.parent_process()) is not None:
            threading.Thread(target=_end_with, args=(trainer,), name="pqcache trainer", daemon=True).start()


def _end_if_alone(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


def _end_with(trainer: BaseProcess) -> None:
    trainer.join()  # sleeps until the trainer's end of a pipe is closed
    os._exit(1)


_begun = 0  # the process id of the worker that was prepared


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
        """Whether this process made the memory: it is a trainer, or a worker with its own dataset."""
        return self._made_by == os.getpid()

    @property
    def seen(self) -> Numbers:
        """The numbers, read-only. Works even before torch has told a worker that it is one."""
        return self._begin if self._is_inherited and get_worker_info() is None else self._numbers

    @property
    def numbers(self) -> Numbers:
        """The numbers that this process shares, for reading and writing."""
        if self._is_inherited and get_worker_info() is None:
            with _lock:
                if self._is_inherited:
                    self._parents.append(self._tensor)
                    self._use(_shared_copy(self._begin))
        return self._numbers

    def bequeath(self) -> None:
        """Keep the initial numbers for a process about to be forked, in case it is a trainer."""
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
    """Copy into shared memory, regardless of torch's default device and mode.

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
