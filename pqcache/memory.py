"""Memory that is used again.

A fresh page costs about two microseconds, which is more than filling it: an epoch that takes new memory for
every row group and batch spends a third of its time in the kernel. So blocks go round.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]

_SMALLEST = 4096


def rounded(size: int) -> int:
    """Return the size of block to use for ``size`` bytes: at most an eighth more, so that blocks fit again.

    >>> rounded(1), rounded(5000), rounded(1 << 20)
    (4096, 5120, 1048576)
    """
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << (int(size - 1).bit_length() - 4)
    return -(-size // step) * step


class Pool:
    """Blocks of memory that come back, by hand or by themselves; usable from any thread.

    They stay until the pool is gone, and are no more bytes than were in use at one time.

    Without a lock, as arrays end anywhere, also in the middle of ``take``; a deque's own steps are atomic.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[Block]] = defaultdict(deque)

    def take(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes with anything in it; ``give`` it back."""
        wanted = rounded(size)
        larger = wanted
        while larger <= 2 * wanted:  # rather too large a block than new memory
            try:
                block = self._free[larger].pop()
            except IndexError:
                larger = rounded(larger + 1)
                continue
            return block
        self._drop(wanted)
        return np.empty(wanted, np.uint8)

    def _drop(self, size: int) -> None:
        """Let idle blocks of other sizes go before a new one is made, so that the whole does not grow."""
        for blocks in list(self._free.values()):
            while size > 0:
                try:
                    dropped = blocks.pop().nbytes
                except IndexError:
                    break
                size -= dropped

    def give(self, block: Block) -> None:
        """Take a block back; nobody may look at it any more."""
        self._free[block.nbytes].append(block)

    def lend(self, size: int) -> Block:
        """Return ``size`` bytes that come back by themselves when the last array over them is gone."""
        return np.asarray(_Loan(self, self.take(size), size))


class _Loan:
    """What arrays over a lent block keep alive, and whose end gives the block back."""

    def __init__(self, pool: Pool, block: Block, size: int) -> None:
        self._pool, self._block = pool, block
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (block.ctypes.data, False),
        }

    def __del__(self) -> None:
        self._pool.give(self._block)


def aligned(size: int) -> int:
    """Return ``size`` rounded up to where any dtype may begin."""
    return -(-size // 64) * 64
