"""Memory that row groups are encoded into, used again and again: fresh memory costs a page fault for every 4 KiB."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]
_KEPT = 8  # blocks that wait to be used


class Arenas:
    """Lends blocks of memory; one comes back by itself when nothing refers to it or to a part of it any more."""

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._lock = threading.Lock()

    def lend(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes, whatever is in them; the smallest that is there will do."""
        with self._lock:
            fitting = [number for number, block in enumerate(self._free) if len(block) >= size]
            best = min(fitting, key=lambda number: len(self._free[number]), default=None)
            block = np.empty(size + size // 4, np.uint8) if best is None else self._free.pop(best)
        lent = block[:]
        weakref.finalize(lent, self._back, block).atexit = False
        return lent

    def _back(self, block: Block) -> None:
        with self._lock:
            self._free.append(block)
            if len(self._free) > _KEPT:
                del self._free[0]  # the one that was not used for the longest time
