"""Memory that is used again.

A fresh page costs about two microseconds, which is more than filling it: an epoch that takes new memory for
every row group and batch spends a third of its time in the kernel. So blocks go round.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]

_SMALLEST = 4096
_MAPPED = 1 << 18  # bytes of a block
_SLACK = 16 << 20  # bytes
_WASTED = 2 << 20  # bytes that may be too many in a block, at most


def block_size(size: int) -> int:
    """Return the size of block to use for ``size`` bytes: at most an eighth more, so that blocks fit again.

    >>> block_size(1), block_size(5000), block_size(1 << 20)
    (4096, 5120, 1048576)
    """
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << (int(size - 1).bit_length() - 4)
    return -(-size // step) * step


def _fresh(size: int) -> Block:
    """Return new memory; a large piece is a mapping of its own, which leaves no gap that fits nothing when it goes."""
    if size < _MAPPED or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(size, np.uint8)
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many mappings, or too little memory, of which MemoryError tells
        return np.empty(size, np.uint8)
    with suppress(AttributeError, OSError):  # a hint, which not every system takes
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def _remove_entry(alive: dict[int, Any], sizes: dict[int, int], key: int, _: Any) -> None:
    alive.pop(key, None)
    sizes.pop(key, None)


class BufferPool:
    """Blocks of memory that come back, by hand or by themselves; usable from any thread.

    They stay until the pool is gone, and are hardly more bytes than were in use at one time.

    There is no lock: arrays are freed anywhere, also in the middle of ``acquire``, and a fork may come. The operations
    of a deque are atomic.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[Block]] = defaultdict(deque)
        self._alive: dict[int, weakref.ref[Block]] = {}  # all blocks there are
        self._sizes: dict[int, int] = {}  # theirs, apart as they are added up
        self._most = 0  # bytes that were in use at one time

    def acquire(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes with anything in it; ``release`` it back."""
        wanted = block_size(size)
        block = self._idle(wanted, wanted + wanted // 4)
        if block is None and (excess := self._excess(wanted)) > 0:
            if wanted <= _WASTED:
                block = self._idle(wanted, 2 * wanted)  # rather much too large than others gone and new memory
            if block is None:
                self._drop(excess)
        if block is None:
            block = _fresh(wanted)
            self._sizes[id(block)] = wanted
            self._alive[id(block)] = weakref.ref(block, partial(_remove_entry, self._alive, self._sizes, id(block)))
        return block

    def _idle(self, wanted: int, most: int) -> Block | None:
        """Return the smallest idle block of ``wanted`` to ``most`` bytes."""
        while wanted <= most:
            try:
                return self._free[wanted].pop()
            except IndexError:
                wanted = block_size(wanted + 1)
        return None

    def _excess(self, wanted: int) -> int:
        """Return how many bytes too much there are with ``wanted`` more."""
        whole = wanted + sum(self._sizes.values())
        idle = sum(size * len(self._free[size]) for size in list(self._free))
        self._most = max(self._most, whole - idle)
        return whole - self._most - min(_SLACK, self._most // 8)

    def _drop(self, excess: int) -> None:
        """Let idle blocks go, none larger than what is too much: a small one more must not cost a large one."""
        for size in sorted(self._free, reverse=True):
            while size <= excess:
                try:
                    self._free[size].pop()
                except IndexError:  # there are no more
                    break
                excess -= size

    def release(self, block: Block) -> None:
        """Take a block back; nobody may look at it any more."""
        self._free[block.nbytes].append(block)

    def borrow(self, size: int) -> Block:
        """Return ``size`` bytes that come back by themselves when the last array over them is gone."""
        return np.asarray(_Borrowed(self, self.acquire(size), size))


class Arena:
    """One block with ``count`` places of ``size`` bytes: what lies in several of them can be taken from by one call.

    Of places that nobody has used yet nothing is in memory.
    """

    def __init__(self, pool: BufferPool, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.block = _fresh(size * count)
        self._pool = pool
        self._begin = int(self.block.ctypes.data)
        self._free = deque(self.block[at : at + size] for at in reversed(range(0, size * count, size)))

    def borrow(self, size: int) -> Block:
        """Return the first ``size`` bytes of a place, or memory elsewhere where none is free or they are too small.

        They come back by themselves.
        """
        if size <= self.size:
            try:  # the place last used, so that no more of them than are needed are ever touched
                return np.asarray(_Borrowed(self, self._free.pop(), size))
            except IndexError:
                pass
        return self._pool.borrow(size)

    def release(self, block: Block) -> None:
        """Take a place back."""
        self._free.append(block)

    def offset_of(self, values: npt.NDArray[Any]) -> int | None:
        """Return at which byte of the block ``values`` begin; None if they lie elsewhere."""
        begin = int(values.ctypes.data) - self._begin
        return begin if 0 <= begin < len(self.block) else None


class _Borrowed:
    """What arrays over a lent block keep alive, and whose end gives the block back."""

    def __init__(self, pool: BufferPool | Arena, block: Block, size: int) -> None:
        self._pool, self._block = pool, block
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        self._pool.release(self._block)


def aligned(size: int) -> int:
    """Return ``size`` block_size up to where any dtype may begin."""
    return -(-size // 64) * 64
