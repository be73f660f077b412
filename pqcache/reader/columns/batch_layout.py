"""Where a batch's columns are in memory: fixed-width columns of one type side by side, all others one by one.

A dataset may have many columns of numbers; a call for each of them in each batch takes longer than copying their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqcache.reader.columns.column_data import WORDS, Bytes, ColumnData
from pqcache.reader.columns.column_forms import ColumnForm, number_dtype
from pqcache.system.buffer_pool import Buffer, aligned

LONG = 512  # bytes of a row from which on saving a copy is worth more than copying columns side by side
_GROUP = 64  # bytes per row of a group of columns; each group takes a call, which may wait for the interpreter's lock


def is_long(form: ColumnForm) -> bool:
    """Return whether a column has long rows of fixed width."""
    return form.kind == "fixed" and form.width >= LONG


class ColumnGroup(NamedTuple):
    """Fixed-width columns in one array: ``width`` bytes a row, and ``dtype`` if they are plain numbers.

    ``positions`` are where they are among all columns.
    """

    width: int
    positions: tuple[int, ...]
    dtype: np.dtype[Any] | None


@dataclass(frozen=True)
class BatchLayout:
    """How the fixed-width columns of some rows are placed in a buffer: those of one width and dtype in one array.

    All columns of an array are gathered by one call.
    """

    groups: tuple[ColumnGroup, ...]

    @staticmethod
    def of(forms: Sequence[ColumnForm]) -> BatchLayout:
        """Return the layout for columns; a group is small, so that its part of a buffer fits into the cache."""
        alike: dict[tuple[int, Any], list[int]] = {}
        for position, form in enumerate(forms):
            if form.kind == "fixed":
                dtype = None if form.stored else number_dtype(form.type, form.dense > 0)
                alike.setdefault((form.width, dtype), []).append(position)
        groups = []
        for (width, dtype), positions in alike.items():
            each = max(1, _GROUP // width)
            groups += [
                ColumnGroup(width, tuple(positions[i : i + each]), dtype) for i in range(0, len(positions), each)
            ]
        return BatchLayout(tuple(sorted(groups, key=lambda group: group.width >= LONG)))

    @cached_property
    def short(self) -> BatchLayout:
        """The groups of rows that are not long; they come first."""
        return BatchLayout(tuple(group for group in self.groups if group.width < LONG))

    def bytes(self, rows: int) -> int:
        """Return the size of a buffer for ``rows`` rows."""
        return sum(aligned(rows * group.width * len(group.positions)) for group in self.groups)

    def arrays(self, buffer: Buffer, rows: int) -> list[Bytes]:
        """Return each group's array over ``buffer``: (columns, rows) of words, or (columns, rows, width)."""
        found: list[Bytes] = []
        at = 0
        for width, positions, _ in self.groups:
            size = rows * width * len(positions)
            data = buffer[at : at + size]
            if width in WORDS:
                found.append(data.view(WORDS[width]).reshape(len(positions), rows))
            else:
                found.append(data.reshape(len(positions), rows, width))
            at += aligned(size)
        return found

    def values(self, arrays: Sequence[Bytes], position: int) -> Bytes | None:
        """Return the rows of a column in what `arrays` returned; None if it has no place there."""
        for group, array in zip(self.groups, arrays, strict=True):
            if position in group.positions:
                found: Bytes = array[group.positions.index(position)]
                return found
        return None


@dataclass(frozen=True)
class GatheredBatch:
    """A batch as it was gathered: the layout's arrays, and the columns that are not in them or had nulls."""

    rows: int
    layout: BatchLayout
    arrays: list[Bytes]
    columns: dict[int, ColumnData]

    def placed(self, position: int, form: ColumnForm) -> ColumnData | None:
        """Return a column as it is in the arrays; None if it has no place there."""
        values = self.layout.values(self.arrays, position)
        return None if values is None else ColumnData(form, values)

    def column(self, position: int, form: ColumnForm) -> ColumnData:
        """Return a column, from ``columns`` or the arrays."""
        found = self.columns.get(position)
        if found is None:
            found = self.placed(position, form)
        assert found is not None
        return found


@dataclass(frozen=True)
class GatheredBatches:
    """Batches of ``sizes`` rows, gathered one behind the other: the layout's arrays, over all of their rows.

    ``columns`` are those of each batch that are not in them or had nulls. All batches have the same ones.
    """

    sizes: Sequence[int]
    layout: BatchLayout
    arrays: list[Bytes]
    columns: list[dict[int, ColumnData]]

    def one_by_one(self) -> Iterator[GatheredBatch]:
        """Yield each batch; its arrays are parts of those of all."""
        start = 0
        for size, columns in zip(self.sizes, self.columns, strict=True):
            stop = start + size
            yield GatheredBatch(size, self.layout, [array[:, start:stop] for array in self.arrays], columns)
            start = stop


class NumberColumns(NamedTuple):
    """Columns of one dtype and without nulls: ``values`` has shape (columns, rows) or (columns, rows, length)."""

    forms: dict[str, ColumnForm]
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class FinishedBatch:
    """A batch: columns of plain numbers by array, as there may be many, and all other columns by name."""

    rows: int
    numbers: list[NumberColumns]
    others: dict[str, ColumnData]

    @property
    def bytes(self) -> int:
        """The bytes of the columns."""
        size = 0
        for _, values in self.numbers:  # a loop takes half the time of sum()
            size += values.nbytes
        for column in self.others.values():
            size += column.values.nbytes
        return size

    def columns(self) -> dict[str, ColumnData]:
        """Return all columns one by one."""
        found = dict(self.others)
        for forms, values in self.numbers:
            found |= {name: ColumnData(form, row) for (name, form), row in zip(forms.items(), values, strict=True)}
        return found
