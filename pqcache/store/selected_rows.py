"""Rows of a snapshot by where they are: what a lookup finds, and what an epoch can be made of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqcache.errors import UsageError

Ints = npt.NDArray[np.int64]


def ranges_of(begins: Ints, counts: Ints) -> Ints:
    """Concatenated ranges of ``counts[i]`` numbers from ``begins[i]`` on."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Rows of a snapshot by where they are: for some of its row groups the positions of rows in them.

    ``groups``    int64, row groups by their row in the index, ascending, each once
    ``offsets``   int64, one more than ``groups``: those of ``groups[i]`` are ``rows[offsets[i]:offsets[i + 1]]``
    ``rows``      int64, positions in their row group, counted from 0, ascending, each once
    ``snapshot``  the snapshot that they are in, as ``Snapshot.id`` names it; empty where that is not known

    `SelectedRows.of` makes one of pairs in any order. Arrays that do not fit together raise UsageError.
    """

    groups: Ints
    offsets: Ints
    rows: Ints
    snapshot: str = ""

    def __post_init__(self) -> None:
        for name in ("groups", "offsets", "rows"):
            found = np.asarray(getattr(self, name))
            if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
                raise UsageError("SelectedRows", f"{name} is not a one-dimensional array of integers")
            object.__setattr__(self, name, found.astype(np.int64, copy=False))
        if len(self.offsets) != len(self.groups) + 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.rows):
            raise UsageError("SelectedRows", "offsets has one item more than groups, from 0 to the number of rows")
        if np.any(self.counts < 0) or np.any(np.diff(self.groups) <= 0) or np.any(self.groups[:1] < 0):
            raise UsageError("SelectedRows", "groups must be ascending, each once, and their offsets ascending too")
        first = np.zeros(len(self.rows), np.bool_)
        first[self.offsets[:-1][self.counts > 0]] = True
        if np.any(self.rows < 0) or np.any(np.diff(self.rows)[~first[1:]] <= 0):
            raise UsageError("SelectedRows", "the rows of a row group must be ascending, each once")

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of(groups: npt.ArrayLike, rows: npt.ArrayLike, snapshot: str = "") -> SelectedRows:
        """Return the rows of pairs (row group, position) in any order; a pair that occurs twice counts once."""
        arrays = [np.asarray(groups), np.asarray(rows)]
        if any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in arrays):
            raise UsageError("SelectedRows.of", "groups and rows must be one-dimensional, of integers")
        if len(arrays[0]) != len(arrays[1]):
            raise UsageError("SelectedRows.of", f"{len(arrays[0])} groups and {len(arrays[1])} rows make no pairs")
        if any(len(part) and part.max() > np.iinfo(np.int64).max for part in arrays):
            raise UsageError("SelectedRows.of", "groups and rows must be numbers below 2**63")
        pairs = np.unique(np.stack([part.astype(np.int64) for part in arrays]), axis=1)
        found, counts = np.unique(pairs[0], return_counts=True)
        return SelectedRows(found, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), pairs[1], snapshot)

    @property
    def counts(self) -> Ints:
        """Rows of each of ``groups``."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Names the rows."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.groups, self.offsets, self.rows):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def positions(self, group: int) -> Ints:
        """Return the rows of one row group; none of one that is not among ``groups``."""
        at = int(np.searchsorted(self.groups, group))
        if at == len(self.groups) or self.groups[at] != group:
            return np.zeros(0, np.int64)
        return self.rows[self.offsets[at] : self.offsets[at + 1]]

    def check(self, rows: Ints) -> None:
        """Raise UsageError if there are no such rows in row groups of ``rows`` rows."""
        if len(self.groups) and self.groups[-1] >= len(rows):
            raise UsageError("rows", f"there is no row group {self.groups[-1]}, the dataset has {len(rows):,}")
        last = self.rows[self.offsets[1:][self.counts > 0] - 1]
        beyond = last >= rows[self.groups[self.counts > 0]]
        if np.any(beyond):
            group = int(self.groups[self.counts > 0][beyond][0])
            raise UsageError("rows", f"row group {group} has {rows[group]:,} rows, and no row {last[beyond][0]:,}")
