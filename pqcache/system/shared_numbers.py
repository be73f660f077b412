"""Numbers that a process shares with those it forks: what one of them finds out, the others need not."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MOST_SHARED = 1 << 28  # bytes


class SharedNumbers:
    """``length`` numbers for each of ``names``, all 0 at first; whoever writes one has to write the same."""

    def __init__(self, names: Sequence[str], length: int) -> None:
        self.names = {name: position for position, name in enumerate(names)}
        size = 8 * len(names) * length
        if 0 < size <= _MOST_SHARED:  # pages that nobody writes to take no memory
            data = np.frombuffer(mmap.mmap(-1, size), np.int64)
        else:
            data = np.zeros(size // 8, np.int64)
        self._numbers = data.reshape(len(names), length)

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        """Return the numbers of a name, to be read and written."""
        found: npt.NDArray[np.int64] = self._numbers[self.names[name]]
        return found
