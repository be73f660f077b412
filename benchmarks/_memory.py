"""Memory that every process in turn finds alike."""

from __future__ import annotations

import mmap

import psutil

_PAGE = 4096


def make_ready(size: int = 4 << 30) -> None:
    """Take ``size`` bytes of memory, or a third of what is free, and give them back.

    A virtual machine's host takes free memory back, some seconds after it was given up. Whoever wants it first then
    waits up to 3 s per GB (on hardware, and when it was just used, 0.1 to 0.4), so that the figures of who comes first
    and of who takes most say more about the host than about the loader or engine.
    """
    size = min(size, psutil.virtual_memory().available // 3)
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, _PAGE):
            memory[at] = 1
