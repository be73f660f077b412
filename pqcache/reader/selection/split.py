"""``split=``: the rows whose key has a hash in an interval, so that a row is always on the same side."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pqcache.errors import UsageError
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.key_hashes import Hashes, check_key, hash_of, hash_words, key_hashes
from pqcache.reader.selection.selection import ChosenColumn, Counts, Parts, Selection, digest_of
from pqcache.store.selected_rows import Ints

_FORM = 1  # of the canonical form of values


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows whose key has a hash in an interval: ``ParquetDataset(..., split=Split("user_id", 0.0, 0.9))``.

    The hash of a key, as a number from 0 to 1, depends on nothing but its value and the salt. So a row is in the same
    part every night, on every node and in every layout of the files, and all rows of a key are in one part. Parts that
    share no number share no row. docs/splits.md says how values are hashed.

    ``key``         a column, or a field of a struct (``user.id``), of numbers, booleans, text, binary, dates or times.
                    None: each row for itself, by its file and its number in it, which holds for one snapshot
    ``low``, ``high``   the interval, from ``low`` up to, but not including, ``high``; 0 and 1 are the ends
    ``salt``        text that selects another hash, for a division that has nothing to do with the first
    ``outside``     take the rows outside of the interval instead

    >>> train = Split("user_id", 0.0, 0.9)
    >>> train.complement()
    Split(key='user_id', low=0.9, high=1.0, salt='', outside=False)
    >>> [(fold.low, fold.high) for fold in Split.folds("user_id", 4)]
    [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)]

    Numbers that make no sense raise UsageError here, names and types where it is used.
    """

    key: str | None = field(kw_only=False)
    low: float = field(default=0.0, kw_only=False)
    high: float = field(default=1.0, kw_only=False)
    salt: str = ""
    outside: bool = False

    def __post_init__(self) -> None:
        if self.key is not None and not isinstance(self.key, str):
            raise UsageError("split", f"key={self.key!r}: name one column, or give None for single rows")
        for name in ("low", "high"):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1:
                raise UsageError("split", f"{name}={value!r}: give a number from 0 to 1")
            object.__setattr__(self, name, float(value))
        if not self.low < self.high:
            raise UsageError("split", f"low={self.low} and high={self.high}: low must be less than high")
        if not isinstance(self.salt, str):
            raise UsageError("split", f"salt={self.salt!r}: give text")

    def complement(self) -> Split:
        """Return the split of all other rows. There are none if the interval is from 0 to 1: UsageError."""
        if self.outside:
            return replace(self, outside=False)
        if self.low == 0 and self.high == 1:
            raise UsageError("split", "it takes all rows, so its complement has none")
        if self.low == 0:
            return replace(self, low=self.high, high=1.0)
        if self.high == 1:
            return replace(self, low=0.0, high=self.low)
        return replace(self, outside=True)

    @staticmethod
    def folds(key: str | None, k: int, salt: str = "") -> list[Split]:
        """Return ``k`` splits of equal size that share no row; train on ``folds[i].complement()``."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 2:
            raise UsageError("Split.folds", f"k={k!r}: give a whole number of at least 2")
        return [Split(key, i / k, (i + 1) / k, salt=salt) for i in range(k)]

    @property
    def bounds(self) -> tuple[int, int]:
        """The hashes of the interval: from the first to the last, both included."""
        low, high = (math.ceil(Fraction(end) * (1 << 64)) for end in (self.low, self.high))
        return low, high - 1

    @property
    def seed(self) -> int:
        """The seed of the hashes: 0, or the hash of the salt."""
        return hash_of(self.salt.encode()) if self.salt else 0

    def chooses(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return which hashes are in this part."""
        first, last = self.bounds
        inside: npt.NDArray[np.bool_] = (hashes >= np.uint64(first)) & (hashes <= np.uint64(last))
        return ~inside if self.outside else inside


def split_rows(found: Selection, split: Split, known: Counts | None) -> Selection:
    """Return those of the rows that are in a part of a `Split`; where there are none, a warning."""
    data = found.data
    key = None if split.key is None else ChosenColumn(data, split.key, "split")
    if key is not None:
        check_key(key.name, key.type)
    about = None if key is None else [*key.path, *([str(key.type)] if key.in_paths else [])]
    name = digest_of(["split", _FORM, about, *split.bounds, split.outside, split.salt])
    firsts, files, rows_in = first_rows_of(data), data.index.numbers("file"), data.index.rows

    def step(group: int, parts: Parts, rows: Ints | None) -> Ints:
        if key is None:  # each row by its number in its file
            path = data.index.paths[int(files[group])].encode("utf-8", "surrogateescape")
            numbers = np.arange(int(rows_in[group]), dtype=np.uint64) + np.uint64(firsts[group])
            chosen = split.chooses(hash_words(numbers, hash_of(path, split.seed)))
        elif key.in_paths:
            value = key.values_of(np.array([group]))
            chosen = np.repeat(split.chooses(key_hashes(value, split.seed)), int(rows_in[group]))
        else:
            hashes = [key_hashes(key.values(group, part), split.seed) for part in parts]
            chosen = split.chooses(np.concatenate([np.zeros(0, np.uint64), *hashes]))
        return np.flatnonzero(chosen) if rows is None else rows[chosen[rows]]

    part = found.then(step, name, () if key is None else key.columns, known=known)
    if len(part.counts) and not part.counts.any():
        warnings.warn(f"{data.root}: no row is left by split, so there are no batches", stacklevel=2)
    return part.without_empty()


def first_rows_of(data: LocalDataset) -> Ints:
    """Return, for each row group of the index, the number of its first row in its file."""
    files, rows = data.index.numbers("file"), data.index.rows
    before = np.cumsum(rows) - rows
    first_of_file = np.flatnonzero(np.diff(files, prepend=-1))
    of_file = np.cumsum(np.diff(files, prepend=-1) != 0) - 1
    return np.asarray(before - before[first_of_file[of_file]], np.int64) if len(files) else before
