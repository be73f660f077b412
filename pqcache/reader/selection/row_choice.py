"""What is read of the rows that ``filters=`` and ``rows=`` leave.

``split=`` is first, then ``sample=``, ``limit=``, and ``weights=`` or ``balance=``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from pqcache.errors import UsageError
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.row_filter import SelectedRowGroups, count_rows
from pqcache.reader.selection.sample import check_sample, limit_rows, sample_rows
from pqcache.reader.selection.selection import Intersection, Selection
from pqcache.reader.selection.split import Split, SplitSelection
from pqcache.reader.selection.stored_counts import Counts
from pqcache.reader.selection.weights import RowWeights, check_weights


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
        check_sample(self.sample, self.limit)
        check_weights(self.weights, self.balance)

    def of(self, data: LocalDataset, found: SelectedRowGroups, counts: Counts | None = None) -> SelectedRowGroups:
        """Return the row groups with rows that are chosen among those ``found``, and how many of each.

        ``counts`` are those that are known already, and what is counted is added to it. What makes no sense raises
        UsageError; where no row is left, a warning.
        """
        found = found if self.split is None else _split(data, found, self.split, counts)
        found = found if self.sample is None else sample_rows(data, found, self.sample, self.seed)
        return found if self.limit is None else limit_rows(data, found, self.limit)

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

    def weights_of(
        self, data: LocalDataset, found: SelectedRowGroups, counts: Counts | None = None
    ) -> RowWeights | None:
        """Return how often each row comes among those ``found``; None where all come once."""
        given = (self.balance,) if self.balance is not None else self.weights
        return None if given is None else RowWeights(data, found, given, counts)


def _split(data: LocalDataset, found: SelectedRowGroups, split: Split, counts: Counts | None) -> SelectedRowGroups:
    of_split = SplitSelection(data, split)
    selection: Selection = of_split if found.selection is None else Intersection(found.selection, of_split)
    selected = count_rows(data, selection, found.row_groups, counts)
    if len(selected) and not selected.any():
        warnings.warn(f"{data.root}: no row is left by split, so there are no batches", stacklevel=2)
    return SelectedRowGroups(found.row_groups, selection, selected).without_empty(data.index.rows)
