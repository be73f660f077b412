"""``sample=`` and ``limit=``: a part of the rows that is read in about that part of the time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.order.epoch_order import Ints, permutation
from pqcache.reader.selection.row_filter import SelectedRowGroups
from pqcache.reader.selection.selection import Selection

FEWEST = 16  # row groups of a sample, if there are as many: rows of fewer say little of the dataset
_SAMPLE = 5  # what a random stream is for, after those of the order, of mixes and of weights


def check_sample(sample: Any, limit: Any) -> None:
    """Raise UsageError unless ``sample`` is a share and ``limit`` a number of rows."""
    number = isinstance(sample, int | float | np.integer | np.floating) and not isinstance(sample, bool)
    if sample is not None and not (number and 0 < sample <= 1):
        raise UsageError(f"sample={sample!r}", "give a number above 0, up to 1", "0.01 is one row of a hundred")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 1):
        raise UsageError(f"limit={limit!r}", "give a number of rows of at least 1")


@dataclass(frozen=True, kw_only=True)
class PartOfRowGroups:
    """So many rows of each row group as ``counts`` says for ``groups``; a `Selection`.

    They are among those that ``base`` chooses (None: all): the first ones, or with a ``seed`` random ones.
    """

    data: LocalDataset
    base: Selection | None
    groups: Ints
    counts: Ints
    seed: int | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of ``base``."""
        return self.base.columns if self.base else ()

    @property
    def fingerprint(self) -> str:
        """A name for the rows."""
        about = json.dumps(["part", self.base.fingerprint if self.base else None, self.seed]).encode()
        return hashlib.blake2b(about + self.groups.tobytes() + self.counts.tobytes(), digest_size=16).hexdigest()

    def positions(self, group: int, parts: Iterable[pa.Table]) -> Ints:
        """Return the rows of a row group, in ascending order."""
        rows = np.arange(int(self.data.index.rows[group])) if self.base is None else self.base.positions(group, parts)
        count = int(self.counts[np.searchsorted(self.groups, group)])
        if self.seed is None or count == len(rows):
            return rows[:count]
        return rows[np.sort(permutation(len(rows), self.seed, 0, _SAMPLE, 0, group)[:count])]


def sample_rows(data: LocalDataset, found: SelectedRowGroups, share: float, seed: int) -> SelectedRowGroups:
    """Return a share of the rows that were ``found``: complete row groups, chosen at random.

    Where these would be fewer than 16, random rows of 16 row groups.
    """
    rows = found.rows(data.index.rows)
    wanted = max(1, round(share * int(rows.sum()))) if rows.sum() else 0
    order = permutation(len(rows), seed, 0, _SAMPLE, 1)
    before = np.cumsum(rows[order]) - rows[order]
    complete = np.clip(wanted - before, 0, rows[order])
    few = min(FEWEST, len(rows))
    if np.count_nonzero(complete) < few:
        ends = np.cumsum(rows[order][:few])
        complete = np.zeros(len(rows), np.int64)
        complete[:few] = np.diff(ends * wanted // int(ends[-1]), prepend=0) if wanted <= ends[-1] else rows[order][:few]
    counts = np.zeros(len(rows), np.int64)
    counts[order] = complete
    return _part(data, found, counts, seed)


def limit_rows(data: LocalDataset, found: SelectedRowGroups, limit: int) -> SelectedRowGroups:
    """Return the first rows of those that were ``found``, in the order of the files."""
    rows = found.rows(data.index.rows)
    return _part(data, found, np.clip(limit - (np.cumsum(rows) - rows), 0, rows), None)


def _part(data: LocalDataset, found: SelectedRowGroups, counts: Ints, seed: int | None) -> SelectedRowGroups:
    part = PartOfRowGroups(data=data, base=found.selection, groups=found.row_groups, counts=counts, seed=seed)
    return SelectedRowGroups(found.row_groups, part, counts).without_empty(data.index.rows)
