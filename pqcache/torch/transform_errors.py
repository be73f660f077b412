"""What is added to an error of a transform: the batch, and the files and rows that it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pqcache.reader.batch_rows import documents_of
from pqcache.reader.order.epoch_order import Ints, Order
from pqcache.reader.read_plan import ReadPlan
from pqcache.torch.batch import Position

_MOST = 20  # row groups that are listed


class RowPlace(NamedTuple):
    """Where a row is; with a selection, ``row`` counts the selected ones."""

    file: str
    row_group: int
    row: int


@dataclass(frozen=True)
class BatchOrigin:
    """Where the rows of a dataset's batches lie: those of ``order`` are of the row groups of ``plan``."""

    dataset: str
    plan: ReadPlan
    order: Order
    in_batches: bool = True

    def rows_of(self, index: int) -> list[str]:
        """Return a line for each row group of which a batch has rows."""
        groups, rows = self.order.batch(index)
        lines = [self._line(int(group), rows[groups == group]) for group in np.unique(groups)]
        return lines if len(lines) <= _MOST else [*lines[:_MOST], f"and {len(lines) - _MOST} more row groups"]

    def places(self, index: int) -> list[RowPlace]:
        """Return where each row of a batch is."""
        groups, rows = self.order.batch(index)
        if self.plan.packs is not None and self.plan.pack is None:  # of which each is a batch of several rows
            groups, rows = documents_of(self.plan, self.order, groups, rows)
        starts = np.zeros(len(groups), np.int64) if self.plan.piece_starts is None else self.plan.piece_starts[groups]
        table, numbers = self.plan.data.index, self.plan.row_groups[groups]
        files, row_groups = table.numbers("file")[numbers], table.numbers("row_group")[numbers]
        found = zip(files.tolist(), row_groups.tolist(), (rows + starts).tolist(), strict=True)
        return [RowPlace(table.paths[file], row_group, row) for file, row_group, row in found]

    def _line(self, group: int, rows: Ints) -> str:
        index, number = self.plan.data.index, int(self.plan.row_groups[group])
        start = 0 if self.plan.piece_starts is None else int(self.plan.piece_starts[group])
        first, last = int(rows.min()) + start, int(rows.max()) + start
        path = index.paths[int(index.numbers("file")[number])]
        what = "row" if self.plan.sequence is None and self.plan.packs is None else "sequence"
        span = f"{what} {first}" if first == last else f"{len(rows)} {what}s from {first} to {last}"
        counted = not self.plan.selection.is_all and self.plan.packs is None
        selected = ", counted among those that are selected" if counted else ""
        return f"{path}, row group {int(index.numbers('row_group')[number])}: {span}{selected}"


class InTransform(Exception):
    """The cause that an error of a transform is given on Python 3.10, which has no notes."""


@contextmanager
def located(position: Position, origin: BatchOrigin, index: int) -> Iterator[None]:
    """Add to an error which batch it is about; it is the same error, with its own traceback.

    ``position`` is where the batch is in the training, ``index`` where it is in the order of its dataset.
    """
    try:
        yield
    except Exception as error:
        item = "batch" if origin.in_batches else "row"
        about = "" if position.source is None else f" (of the dataset {position.source!r} of the mix)"
        heading = f"in the transform of {item} {position.index} of epoch {position.epoch}{about}, {origin.dataset}:"
        add_note(error, "\n  ".join([heading, *origin.rows_of(index)]))
        raise


def add_note(error: Exception, text: str) -> None:
    """Add text to what is printed of an error."""
    if hasattr(error, "add_note"):
        error.add_note(text)
        return
    first: BaseException = error
    while (before := first.__cause__ or first.__context__) is not None:
        first = before
    first.__cause__ = InTransform(text)
