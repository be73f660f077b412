"""Which rows of a dataset are read: ``rows=`` and ``filters=``, then ``split=``, ``sample=`` and ``limit=``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.order.epoch_order import permutation
from pqcache.reader.selection.row_filter import filter_rows
from pqcache.reader.selection.selection import Bools, Counts, Selection, digest_of
from pqcache.reader.selection.split import Split, split_rows
from pqcache.reader.selection.weights import check_weights
from pqcache.store.selected_rows import Ints, SelectedRows
from pqcache.units import is_number, is_whole

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
        if self.sample is not None and not (is_number(self.sample) and 0 < self.sample <= 1):
            raise UsageError(
                f"sample={self.sample!r}", "give a number above 0, up to 1", "0.01 is one row of a hundred"
            )
        if self.limit is not None and not (is_whole(self.limit) and self.limit >= 1):
            raise UsageError(f"limit={self.limit!r}", "give a number of rows of at least 1")
        check_weights(self.weights, self.balance)

    @property
    def has_weights(self) -> bool:
        """Whether rows may come more than once, or not in every epoch."""
        return self.weights is not None or self.balance is not None

    def check_sequence(self) -> None:
        """Raise UsageError for options that exclude sequences."""
        if self.has_weights:
            raise UsageError("weights and sequence", "a sequence has no weight", "leave one of them out")
        if self.sample is not None or self.limit is not None:
            reason = "both would leave out rows in the middle of sequences"
            raise UsageError("sample, limit and sequence", reason, "choose partitions with filters=")


def choose_rows(
    data: LocalDataset, rows: SelectedRows | None, filters: Any, choice: RowChoice, known: Counts | None
) -> Selection:
    """The rows that an epoch reads, before weights; warns if none are left.

    ``known`` are counts of rows; new counts are added to it. Invalid options raise UsageError.
    """
    found = Selection.of_all(data)
    if rows is not None:
        found = _among(found, rows)
    if filters is not None:
        found = filter_rows(found, filters, known)
    if rows is not None or filters is not None:
        what = "filters" if rows is None else "rows" if filters is None else "filters and rows"
        found = _some(found, what)
    if choice.split is not None:
        found = _some(split_rows(found, choice.split, known), "split")
    if choice.sample is not None:
        found = _sample(found, choice.sample, choice.seed)
    if choice.limit is not None:
        found = _first_of(found, _first_rows(found.counts, choice.limit), None)
    return found


def _some(found: Selection, option: str) -> Selection:
    if len(found.counts) and not found.counts.any():
        warnings.warn(f"{found.data.root}: no row is left by {option}, so there are no batches", stacklevel=2)
    return found.without_empty()


def _among(found: Selection, rows: SelectedRows) -> Selection:
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as Cache.lookup returns them")
    data = found.data
    if rows.snapshot and rows.snapshot != data.snapshot:
        raise UsageError(
            "rows", f"they were looked up in {rows.snapshot}, and {data.root} is {data.snapshot}", "look them up again"
        )
    rows.check(data.index.rows)

    def test(group: int, first: int, part: pa.Table) -> Bools:
        passes = np.zeros(part.num_rows, np.bool_)
        low, high = np.searchsorted(positions := rows.positions(group), [first, first + part.num_rows])
        passes[positions[low:high] - first] = True
        return passes

    counts = np.zeros(len(data.index), np.int64)
    counts[rows.groups] = rows.counts
    return replace(found.testing(test, rows.fingerprint), counts=counts[found.row_groups])


def _sample(found: Selection, share: float, seed: int) -> Selection:
    """A share of the rows: whole row groups at random, or random rows of 16 if these are fewer."""
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
    """How many of the first ``most`` rows are in each row group."""
    return np.asarray(np.clip(most - (np.cumsum(counts) - counts), 0, counts), np.int64)


def _first_of(found: Selection, counts: Ints, seed: int | None) -> Selection:
    """The first ``counts`` rows of each row group; random ones with a seed."""
    groups, among, earlier = found.row_groups, found.counts, found.pick

    def pick(group: int) -> Ints:
        number = np.searchsorted(groups, group)
        count, rows = int(counts[number]), int(among[number])
        picked = np.arange(rows) if earlier is None else earlier(group)
        if seed is None or count == rows:
            return picked[:count]
        return picked[np.sort(permutation(rows, seed, 0, _SAMPLE, 0, group)[:count])]

    name = digest_of(["part", found.name or None, seed], groups, counts)
    return replace(found, counts=counts, pick=pick, name=name).without_empty()
