"""Reused memory, and numbers that a process shares with its forks.

The first access to a fresh page costs more than filling it, so an epoch that took new memory for every row group and
batch would spend much of its time in the kernel.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

_MIN_BLOCK = 4096  # bytes
_MIN_MAPPED = 1 << 16  # bytes of a block from which on it is a mapping of its own
MAX_SLACK = 16 << 20  # bytes, about, that a pool may have beyond the most that were in use
_MOST_SHARED = 1 << 28  # bytes


def buffer_size(size: int) -> int:
    """The size of the block for ``size`` bytes, at most an eighth more, so that blocks suit other requests too.

    >>> buffer_size(1), buffer_size(5000), buffer_size(1 << 20)
    (4096, 5120, 1048576)
    """
    if size <= _MIN_BLOCK:
        return _MIN_BLOCK
    step = 1 << (int(size - 1).bit_length() - 4)
    return -(-size // step) * step


def _allocate(size: int) -> Buffer:
    """New memory; a large block is a mapping of its own, which leaves no hole in the heap when it is freed."""
    if size < _MIN_MAPPED or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(size, np.uint8)
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many mappings; too little memory raises MemoryError below
        return np.empty(size, np.uint8)
    with suppress(AttributeError, OSError):  # a hint that not every system knows
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def _remove_entry(entries: tuple[dict[int, Any], ...], key: int, _: Any) -> None:
    for entry in entries:
        entry.pop(key, None)


class _Idle(NamedTuple):
    """A released block; those with a smaller ``number`` were released earlier."""

    number: int
    buffer: Buffer


class BufferPool:
    """Blocks of memory to acquire and release, or to borrow; all methods may be called from any thread.

    Released blocks are kept until the pool is freed. The pool hardly exceeds the most bytes ever in use at once: if a
    new block would, those idle for the longest time are freed.

    It needs no lock, as a deque's operations are atomic: arrays may be freed anywhere, even within ``acquire``, and the
    process may fork.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[_Idle]] = defaultdict(deque)  # by size, that released last at the end
        self._released = count()
        self._alive: dict[int, weakref.ref[Buffer]] = {}  # all blocks, by id
        self._sizes: dict[int, int] = {}  # their bytes
        self._wasted: dict[int, int] = {}  # the bytes that requests for which one is much too large leave
        self._peak = 0  # bytes that were in use at one time

    @property
    def size(self) -> int:
        """The bytes of all blocks."""
        return sum(self._sizes.values())

    def acquire(self, size: int) -> Buffer:
        """A block of at least ``size`` bytes, not cleared; ``release`` it afterwards."""
        wanted = buffer_size(size)
        buffer = self._idle(wanted, wanted + wanted // 4)
        if buffer is None:  # better too large a block than new memory, while not much is wasted
            slack = MAX_SLACK - sum(self._wasted.values())
            buffer = self._idle(wanted, wanted + min(wanted, slack))
            if buffer is not None:
                self._wasted[id(buffer)] = buffer.nbytes - wanted
        if buffer is None:
            if (excess := self._excess(wanted)) > 0:
                self._free_idle(excess)
            buffer = _allocate(wanted)
            self._sizes[id(buffer)] = wanted
            entries = self._alive, self._sizes, self._wasted
            self._alive[id(buffer)] = weakref.ref(buffer, partial(_remove_entry, entries, id(buffer)))
        return buffer

    def _idle(self, wanted: int, most: int) -> Buffer | None:
        """The smallest idle block of ``wanted`` to ``most`` bytes."""
        while wanted <= most:
            try:
                return self._free[wanted].pop().buffer
            except IndexError:
                wanted = buffer_size(wanted + 1)
        return None

    def _excess(self, wanted: int) -> int:
        """How many bytes too large the pool would be with ``wanted`` more."""
        total = wanted + sum(self._sizes.values())
        idle = sum(size * len(self._free[size]) for size in list(self._free))
        self._peak = max(self._peak, total - idle)
        return total - self._peak - MAX_SLACK

    def _free_idle(self, excess: int) -> None:
        """Free at least ``excess`` bytes, if available, of the blocks idle for the longest time."""
        while excess > 0:
            with suppress(IndexError):  # another thread took the last one of this size
                idle = [(blocks[0].number, size) for size in list(self._free) if (blocks := self._free[size])]
                if not idle:
                    return
                _, size = min(idle)
                self._free[size].popleft()
                excess -= size

    def release(self, buffer: Buffer) -> None:
        """Give a block back to the pool; the caller must not use it any more."""
        self._wasted.pop(id(buffer), None)
        self._free[buffer.nbytes].append(_Idle(next(self._released), buffer))

    def borrow(self, size: int) -> Buffer:
        """An array of ``size`` bytes, which are released with the last array over them."""
        return np.asarray(_Borrowed(self, self.acquire(size), size))


class _Borrowed:
    """The base object of arrays over a borrowed block; releases the block when it is freed."""

    _pool: BufferPool | None = None  # until it is made: an interrupt may come first

    def __init__(self, pool: BufferPool, buffer: Buffer, size: int) -> None:
        self._buffer, self._pool = buffer, pool
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (buffer.ctypes.data, False),
        }

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.release(self._buffer)


def aligned(size: int) -> int:
    """Round ``size`` up to an offset at which an array of any dtype may begin."""
    return -(-size // 64) * 64


class SharedNumbers:
    """``length`` numbers for each of ``names``, initially 0; concurrent writers must write the same value."""

    def __init__(self, names: Sequence[str], length: int) -> None:
        self.names = {name: position for position, name in enumerate(names)}
        size = 8 * len(names) * length
        if 0 < size <= _MOST_SHARED:  # pages that nobody writes to take no memory
            data = np.frombuffer(mmap.mmap(-1, size), np.int64)
        else:
            data = np.zeros(size // 8, np.int64)
        self._numbers = data.reshape(len(names), length)

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        """The numbers of a name, for reading and writing."""
        found: npt.NDArray[np.int64] = self._numbers[self.names[name]]
        return found
