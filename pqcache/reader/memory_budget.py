"""What memory has room for: how many row groups are mixed, how many decoded at once, and in what pieces."""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqcache.errors import UsageError
from pqcache.units import format_size

WINDOW = 16  # row groups, where memory allows
BEYOND = 4  # row groups' worth of memory besides those held: one ahead, one being decoded, read and dealt
_WINDOW_OF_PIECES = 4
_PIECES_AT_MOST = 64  # of a row group: each costs decoding all that is before it


class Sized(Protocol):
    """Row groups of which it is known what they take: see ``View``."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]: ...

    @property
    def decoded(self) -> npt.NDArray[np.int64]: ...

    @property
    def decoded_rows(self) -> npt.NDArray[np.int64]: ...


def largest_window(
    sizes: npt.NDArray[np.int64], memory: int, lanes: int, decoded: npt.NDArray[np.int64] | None = None
) -> int:
    """Return how many row groups each of ``lanes`` lanes can hold within ``memory`` bytes, at most 16.

    Of a window about half the rows are still there at any time; beside them there are a row group ahead and
    one being decoded, which takes ``decoded`` bytes (None: ``sizes``). 0 when they are too large even for a window
    of one.
    """
    if not len(sizes):
        return 1
    beyond = BEYOND * int((sizes if decoded is None else decoded).max())
    fitting = [w for w in range(1, WINDOW + 1) if held(sizes, w) + beyond <= memory / lanes]
    return max(fitting, default=0)


def fit_window(view: Sized, memory: int, lanes: int, name: object = "the dataset") -> tuple[int, int]:
    """Return the window for ``lanes`` lanes within ``memory`` bytes, and the rows of a piece (0: whole row groups).

    Row groups too large even for a window of one are read in pieces, of which four are mixed, and a warning
    says how to do better; so little memory that pieces would be tiny raises UsageError.
    """
    window = largest_window(view.sizes, memory, lanes, view.decoded)
    if window:
        return window, 0
    largest = int(np.argmax(view.decoded))
    size, rows = int(view.decoded[largest]), int(view.decoded_rows[largest])
    pieces = -(-size * (_WINDOW_OF_PIECES // 2 + 1 + BEYOND) * lanes // max(1, memory))
    text = (
        f"{name}: a row group takes {format_size(size)} decoded, too much for memory={format_size(memory)} "
        f"and {lanes} lanes"
    )
    least = int(held(view.sizes, 1) + BEYOND * size) * lanes
    advice = (
        "run 'pqcache repartition' with a smaller --row-group-size, read fewer columns, or give "
        f"memory={format_size(1.01 * least)!r}"
    )
    if pieces > min(rows, _PIECES_AT_MOST):
        raise UsageError("", text, advice)
    warnings.warn(f"{text}: read in {pieces} pieces, which is slow; {advice}", stacklevel=2)
    return _WINDOW_OF_PIECES, -(-rows // pieces)


def held(sizes: npt.NDArray[np.int64], window: int) -> float:
    """Return the bytes of the rows that a window holds at most: about half of each of its row groups."""
    largest = np.sort(sizes)[::-1][:window]
    return float(largest.mean()) * (window / 2 + 1) if len(largest) else 0.0


class DecodeBudget(NamedTuple):
    """What memory has room for: so many row groups decoded at once, by as many threads, and whether long rows may
    ``stay`` where they were decoded until the last of their row group is used. That saves copying them into hands.
    ``places`` is for how many row groups of the largest size there is room then; 0 if not for all that are needed.
    """

    threads: int
    stay: bool = False
    places: int = 0


def decode_budget(view: Sized, memory: float, lanes: int, of: int, window: int, threads: int) -> DecodeBudget:
    """Return what there is room for in a process with ``lanes`` lanes ``of`` all; at most ``threads`` are used.

    What the windows leave of ``memory`` goes to decoding: each takes its row group twice, decoded and dealt.
    """
    if not len(view.sizes):
        return DecodeBudget(1)
    largest = int(view.decoded.max())
    spare = memory - lanes * (held(view.sizes, window) + 2 * largest)
    used = int(max(1, min(threads, spare / max(1, 2 * largest))))
    stored = np.minimum(view.decoded, 2 * view.sizes)  # of filtered rows, where they are less than half only those
    windows = int(np.sort(stored)[::-1][: lanes * window].sum())
    share = int(stored.sum()) * lanes // of + lanes * largest  # all that these lanes read; they may begin in the middle
    stay = min(windows, share) + 2 * (lanes + used) * largest <= memory
    places = lanes * min(window, -(-len(view.sizes) // of) + 1) + 2 * (lanes + used)
    return DecodeBudget(used, stay, places if stay and places * largest <= memory else 0)
