"""What is read of the rows that ``filters=`` and ``rows=`` leave.

``split=`` is first, then ``sample=``, ``limit=``, and ``weights=`` or ``balance=``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import permutation
from pqcache.reader.selection.selection import Counts, Parts, Selection, digest_of
from pqcache.reader.selection.split import Split, split_rows
from pqcache.reader.selection.weights import RowWeights, check_weights
from pqcache.store.selected_rows import Ints

FEWEST = 16  # row groups of a sample, if there are as many: rows of fewer say little of the dataset
_SAMPLE = 5  # what a random stream is for, after those of the order, of mixes and of weights


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """What is read of the rows that ``filters=`` and ``rows=`` leave; ``ParquetDataset`` says what each option is."""

    split: Split | None = None
    sample: float | None = None
    limit: int | None = None
    weights: Any = None
    balance: str | None = None
    seed: int = 0  # of the sample

    def __post_init__(self) -> None:
        if self.split is not None and not isinstance(self.split, Split):
            raise UsageError(f"split={self.split!r}", 'give a Split, like Split("user_id", 0.0, 0.9)')
        number = isinstance(self.sample, int | float | np.integer | np.floating) and not isinstance(self.sample, bool)
        if self.sample is not None and not (number and 0 < self.sample <= 1):
            raise UsageError(
                f"sample={self.sample!r}", "give a number above 0, up to 1", "0.01 is one row of a hundred"
            )
        whole = isinstance(self.limit, int | np.integer) and not isinstance(self.limit, bool)
        if self.limit is not None and not (whole and self.limit >= 1):
            raise UsageError(f"limit={self.limit!r}", "give a number of rows of at least 1")
        check_weights(self.weights, self.balance)

    def of(self, found: Selection, known: Counts | None = None) -> Selection:
        """Return the rows that are chosen among those ``found``, before weights.

        ``known`` are counts of rows, to which what is counted is added. What makes no sense raises UsageError; where no
        row is left, a warning.
        """
        found = found if self.split is None else split_rows(found, self.split, known)
        found = found if self.sample is None else _sample(found, self.sample, self.seed)
        return found if self.limit is None else _first_of(found, _first_rows(found.counts, self.limit), None)

    @property
    def has_weights(self) -> bool:
        """Whether rows may come more than once, or not in every epoch."""
        return self.weights is not None or self.balance is not None

    def check_sequence(self) -> None:
        """Raise UsageError for options that do not go with sequences of rows."""
        if self.has_weights:
            raise UsageError("weights and sequence", "a sequence has no weight", "leave one of them out")
        if self.sample is not None or self.limit is not None:
            reason = "both would leave out rows in the middle of sequences"
            raise UsageError("sample, limit and sequence", reason, "choose partitions with filters=")

    def weights_of(self, found: Selection, known: Counts | None = None) -> RowWeights | None:
        """Return how often each row comes among those ``found``; None where all come once."""
        given = (self.balance,) if self.balance is not None else self.weights
        return None if given is None else RowWeights(found, given, known)


def _sample(found: Selection, share: float, seed: int) -> Selection:
    """A share of the rows: complete row groups, chosen at random, or if these are fewer than 16, random rows of 16."""
    rows = found.counts
    wanted = max(1, round(share * int(rows.sum()))) if rows.sum() else 0
    order = permutation(len(rows), seed, 0, _SAMPLE, 1)
    complete, few = _first_rows(rows[order], wanted), min(FEWEST, len(rows))
    if np.count_nonzero(complete) < few:
        ends = np.cumsum(rows[order][:few])
        complete = np.zeros(len(rows), np.int64)
        complete[:few] = np.diff(ends * wanted // int(ends[-1]), prepend=0) if wanted <= ends[-1] else rows[order][:few]
    counts = np.zeros(len(rows), np.int64)
    counts[order] = complete
    return _first_of(found, counts, seed)


def _first_rows(counts: Ints, most: int) -> Ints:
    """How many of the first ``most`` rows each row group has."""
    return np.asarray(np.clip(most - (np.cumsum(counts) - counts), 0, counts), np.int64)


def _first_of(found: Selection, counts: Ints, seed: int | None) -> Selection:
    """The first ``counts`` rows of each row group, in random order if there is a seed."""
    groups, rows_in = found.row_groups, found.data.index.rows

    def step(group: int, parts: Parts, rows: Ints | None) -> Ints:
        rows = np.arange(int(rows_in[group])) if rows is None else rows
        count = int(counts[np.searchsorted(groups, group)])
        if seed is None or count == len(rows):
            return rows[:count]
        return rows[np.sort(permutation(len(rows), seed, 0, _SAMPLE, 0, group)[:count])]

    name = digest_of(["part", found.name or None, seed], groups, counts)
    return replace(found.then(step, name, counts=counts), name=name).without_empty()
