"""Memory through which a worker sends batches: written once by the worker, and used where it is by the trainer.

A worker writes each message into a slot, a piece of shared memory. What goes through DataLoader's pipe is which one.
The trainer maps a slot once and marks it free when the last tensor over it is gone; then the worker uses it again. So
after the first few batches there are no new pages and no file descriptors to pass.

A slot begins with a header: a random token, by which it is known again, and one byte for each time it was
sent, which the receiver clears. Where the system has no such memory (other than Linux), or no descriptors are
left because many batches are kept, batches go through the pipe.

A child that is forked while a slot is in use maps it too, and nobody knows for how long. So what is in use at a
fork is retired: the slot is never used again, and its memory is freed when the last process has unmapped it.
"""

from __future__ import annotations

import bisect
import gc
import logging
import mmap
import multiprocessing
import os
import threading
import time
from collections import defaultdict
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pqcache.system.buffer_pool import MAX_SLACK, Buffer, BufferPool
from pqcache.system.process_identity import has_ended

log = logging.getLogger("pqcache.torch")

_SMALLEST = 4096  # bytes of a slot
_HEADER = max(4096, mmap.PAGESIZE)  # a page, so that what follows begins at one
_TOKEN = 16
_SENDS = slice(_TOKEN, 256)
_NO_SENDS = bytes(_SENDS.stop - _SENDS.start)
_MAX_SLOTS = 256  # file descriptors that a worker may take for them
_GONE = "a worker's shared memory is gone; has the worker been killed?"
_ENDING = 5.0  # seconds that a process may take from closing its descriptors to its end
_SENT, _RETIRED = 1, 2  # the byte of a send while the receiver may use the slot, and for ever after a fork


class SlotReference(NamedTuple):
    """How a receiver finds a slot, and which byte of its header it has to clear."""

    pid: int
    descriptor: int
    token: bytes
    size: int
    byte: int


class Slot:
    """A piece of shared memory of this process."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("pqcache-batch", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _HEADER + size)
        self._map = mmap.mmap(self.descriptor, _HEADER + size)
        mapped = np.frombuffer(self._map, np.uint8)
        self.token = os.urandom(_TOKEN)
        mapped[:_TOKEN] = np.frombuffer(self.token, np.uint8)
        self.buffer: Buffer = mapped[_HEADER:]
        self.begin = int(self.buffer.ctypes.data)
        self.end = self.begin + size
        self.borrowed = False
        self.retired = False  # a child of this process has arrays over it
        self.touched = 0  # bytes that take memory
        self.asked = 0  # bytes that were borrowed last

    @property
    def free(self) -> bool:
        """Whether no process holds an array over it."""
        return not self.borrowed and not self.retired and self._map[_SENDS] == _NO_SENDS

    @property
    def done(self) -> bool:
        """Whether it was retired, and neither this process nor a receiver will ask for it again."""
        if self.borrowed:
            return False
        sends = self._map[_SENDS]
        return (self.retired or _RETIRED in sends) and _SENT not in sends

    def empty(self) -> None:
        """Give its memory back to the system; it is still mapped, and takes memory when it is written to."""
        try:
            self._map.madvise(mmap.MADV_REMOVE, _HEADER, len(self.buffer))
        except OSError as error:
            log.debug("this system takes no part of shared memory back (%s)", error)
        else:
            self.touched = 0

    def holds(self, address: int, size: int) -> bool:
        """Return whether ``size`` bytes at ``address`` lie in it."""
        return self.begin <= address <= self.end - size

    def send(self) -> SlotReference | None:
        """Return what a receiver needs to find the slot, marked as sent; None where too many receivers hold it."""
        unused = self._map[_SENDS].find(0)
        if unused < 0:
            return None
        byte = _TOKEN + unused
        self._map[byte] = _SENT
        return SlotReference(os.getpid(), self.descriptor, self.token, len(self.buffer), byte)

    def take_back(self, sent: SlotReference) -> None:
        """Mark it as not sent: nobody will receive that reference."""
        self._map[sent.byte] &= _RETIRED

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array over it, in any process."""
        os.close(self.descriptor)


class SharedPool(BufferPool):
    """A pool of slots; where no more can be made, of private memory.

    All slots together take hardly more memory than was in use at one time, however their sizes change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._most = 0  # bytes of the slots that were in use at one time
        self._slots: list[Slot] = []  # by address
        self._begins: list[int] = []
        self._of_size: defaultdict[int, list[Slot]] = defaultdict(list)  # the older ones first
        self._lock = threading.Lock()

    def borrow(self, size: int) -> Buffer:
        """Return ``size`` bytes of a slot that is free again when no array of either process is over it."""
        with self._lock:  # batches are made on several threads, and pickled on one more
            slot = self._slot(size)
            if slot is None:
                return super().borrow(size)
            slot.borrowed, slot.asked = True, size
            if size > slot.touched:
                self._empty_idle(size - slot.touched)
                slot.touched = size
        return np.asarray(_BorrowedSlot(slot, size))

    def _slot(self, size: int) -> Slot | None:
        """Return a free slot for ``size`` bytes; None when there can be no more.

        Sizes are powers of two, so that there are few. The first slots are used first, as what nobody has written to
        takes no memory. Twice the size is accepted because batches may be a little below and above a power of two, and
        four times the size while little is wasted: batches are small at the beginning of an epoch.
        """
        wanted = 1 << (max(_SMALLEST, size) - 1).bit_length()
        empty = None
        for slot in (*self._of_size[wanted], *self._of_size[2 * wanted]):
            if slot.free:
                if slot.touched:
                    return slot
                empty = empty or slot
        loose = next((slot for slot in self._of_size[4 * wanted] if slot.touched and slot.free), None)
        if loose is not None and self._wasted_in_slots() <= MAX_SLACK:
            return loose
        self._drop_retired()
        return empty or self._new(wanted)

    def _wasted_in_slots(self) -> int:
        """Return how many bytes slots that are in use take beyond what was asked for."""
        return sum(slot.touched - slot.asked for slot in self._slots if not slot.free)

    def _empty_idle(self, wanted: int) -> None:
        """Give memory of idle slots back if all would take much more than was in use, ``wanted`` bytes among it."""
        idle = [slot for slot in self._slots if slot.touched and slot.free]
        total = wanted + sum(slot.touched for slot in self._slots)
        self._most = max(self._most, total - sum(slot.touched for slot in idle))
        excess = total - self._most - MAX_SLACK
        for slot in sorted(idle, key=attrgetter("touched")):
            if excess <= 0:
                break
            excess -= slot.touched
            slot.empty()

    def _new(self, size: int) -> Slot | None:
        """Return a new slot of ``size`` bytes; None where that is not possible."""
        if len(self._slots) >= _MAX_SLOTS:
            log.debug("private memory for a batch, which will be copied: all %d shared slots are in use", _MAX_SLOTS)
            return None
        try:
            slot = Slot(size)
        except OSError as error:
            log.debug("private memory for a batch, which will be copied: no shared memory (%s)", error)
            return None
        number = bisect.bisect(self._begins, slot.begin)
        self._begins.insert(number, slot.begin)
        self._slots.insert(number, slot)
        self._of_size[size].append(slot)
        return slot

    def _drop_retired(self) -> None:
        for slot in [slot for slot in self._slots if slot.done]:
            number = self._slots.index(slot)
            del self._slots[number], self._begins[number]
            self._of_size[len(slot.buffer)].remove(slot)
            slot.close()

    def retire_borrowed(self) -> None:
        """Never use again the slots that this process has arrays over: a child of it is about to map them."""
        for slot in list(self._slots):  # without the lock: this thread may hold it
            slot.retired = slot.retired or slot.borrowed

    def slot_of(self, address: int, size: int) -> Slot | None:
        """Return the slot in which ``size`` bytes at ``address`` lie; None if they lie elsewhere."""
        with self._lock:
            number = bisect.bisect(self._begins, address) - 1
            if number < 0:
                return None
            slot = self._slots[number]
        return slot if slot.holds(address, size) else None


class _BorrowedSlot:
    """What arrays over a slot keep alive in the worker; its end frees the slot on this side."""

    _slot: Slot | None = None  # until it is made: an interrupt may come first

    def __init__(self, slot: Slot, size: int) -> None:
        self._slot = slot
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (slot.begin, False),
        }

    def __del__(self) -> None:
        if self._slot is not None:
            self._slot.borrowed = False


class _MappedSlot:
    """A slot that was received at least once: its ``bytes``, and as what numpy finds those behind the header."""

    def __init__(self, sender: int, descriptor: int, size: int) -> None:
        self.sender = sender  # its process id
        self.bytes = memoryview(mmap.mmap(descriptor, _HEADER + size))
        address = np.frombuffer(self.bytes, np.uint8).ctypes.data + _HEADER
        self.interface = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


class _ReceivedSlot:
    """What tensors over a received slot keep alive in the trainer; its end clears the byte of this send."""

    in_use: ClassVar[dict[int, tuple[memoryview, int]]] = {}  # by id: the slot's bytes and the one of each
    _pid = 0  # until it is made: an interrupt may come first

    def __init__(self, slot: _MappedSlot, byte: int) -> None:
        self._bytes, self._byte, self._pid = slot.bytes, byte, os.getpid()
        self.in_use[id(self)] = slot.bytes, byte
        self.__array_interface__ = slot.interface

    def __del__(self) -> None:
        self.in_use.pop(id(self), None)
        if os.getpid() == self._pid:  # a forked child has a copy of this object, but not of the batch
            self._bytes[self._byte] &= _RETIRED


def begin_worker() -> None:
    """Prepare this process, a worker of a DataLoader.

    Python's garbage collector leaves alone what the trainer had made before the fork: it would write to all of it, so
    that the worker would have a copy of its memory.

    And the worker ends once its trainer was killed. torch only asks whose child a worker is: one of a fork server stays
    that server's. And a worker that ends waits for the thread that writes batches to the trainer's pipe, for ever: it
    holds the pipe's reading end too, so that thread gets no error where nobody else does.
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
_pool: tuple[int, SharedPool] | None = None  # of this process, by its id
_mapped: dict[bytes, _MappedSlot] = {}  # by token


def _retire() -> None:
    """Retire every slot that a child, which is about to be forked, will share with this process."""
    if (pool := shared_pool()) is not None:
        pool.retire_borrowed()
    for mapped, byte in list(_ReceivedSlot.in_use.values()):
        mapped[byte] = _RETIRED
        _mapped.pop(bytes(mapped[:_TOKEN]), None)  # the sender closes it; what is still under way opens it again


os.register_at_fork(before=_retire)


def worker_pool() -> BufferPool:
    """Return the memory in which a worker makes batches, one pool a process: shared where the system supports it."""
    global _pool
    if not hasattr(os, "memfd_create") or not Path(f"/proc/{os.getpid()}/fd").is_dir():
        log.debug("batches are copied through the pipe: this system has no memfd_create or no /proc")
        return BufferPool()
    if _pool is None or _pool[0] != os.getpid():
        _pool = os.getpid(), SharedPool()
    return _pool[1]


def shared_pool() -> SharedPool | None:
    """Return this process's shared memory if it makes batches in it."""
    return _pool[1] if _pool is not None and _pool[0] == os.getpid() else None


def received(sent: SlotReference) -> Buffer:
    """Return a slot's bytes, mapping the slot if it is seen for the first time."""
    known = _mapped.get(sent.token)
    if known is None:
        known = _mapped[sent.token] = _map(sent)
    return np.asarray(_ReceivedSlot(known, sent.byte))


def _map(sent: SlotReference) -> _MappedSlot:
    """Map a slot, and forget those of senders that have ended: workers come and go with epochs."""
    senders = {slot.sender for slot in list(_mapped.values())}  # at once, as other threads receive too
    ended = {pid for pid in senders if not Path(f"/proc/{pid}").exists()}
    for token in list(_mapped):
        if (slot := _mapped.get(token)) is not None and slot.sender in ended:
            _mapped.pop(token, None)
    try:
        descriptor = os.open(f"/proc/{sent.pid}/fd/{sent.descriptor}", os.O_RDWR)
    except OSError as error:
        raise _gone(sent.pid) from error
    try:
        mapped = _MappedSlot(sent.pid, descriptor, sent.size)
    finally:
        os.close(descriptor)
    if mapped.bytes[:_TOKEN] != sent.token:
        raise _gone(sent.pid)
    return mapped


def _gone(process: int) -> RuntimeError:
    """Return the error for a worker whose memory is gone, once it ended: DataLoader, which looks next, names it then.

    A worker closes its descriptors some time before its end: wait for that, at most ``_ENDING`` seconds.
    """
    deadline = time.monotonic() + _ENDING
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return RuntimeError(_GONE)
