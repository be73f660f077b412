"""Batches of several rows as columns: made when a row group is decoded, split into rows again in a batch.

A batch is held as one item, which is scattered and gathered like a row: numbers side by side, strings and lists with
their bytes end to end and their lengths in a second column, everything else as an Arrow list. Where values may be null,
another column says which are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import ParquetError
from pqcache.reader.columns.column_data import ColumnData, as_rows, from_arrow, is_views, pack_bytes, take
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.columns.row_bytes import PackedBytes
from pqcache.reader.order.epoch_order import Ints


@dataclass(frozen=True)
class GroupedColumn:
    """How the batches of one column are held, whose rows are held as ``form`` says."""

    form: ColumnForm
    nullable: bool

    @cached_property
    def forms(self) -> tuple[ColumnForm, ...]:
        """The forms of the columns that hold the batches."""
        name = self.form.name
        if self.form.kind == "other":
            return (ColumnForm(name=name, type=pa.list_(self.form.type), kind="other"),)
        found = [_bytes(name)] if self.form.kind == "fixed" else [_bytes(name), _bytes(f"\0lengths:{name}")]
        return (*found, _bytes(f"\0valid:{name}")) if self.nullable else tuple(found)

    def gather(self, column: ColumnData, rows: Ints, ends: Ints, path: Path) -> list[ColumnData]:
        """Return batches of ``column``, of file ``path``: ``rows`` are positions in it, cut at ``ends``."""
        if self.form.kind == "other":
            taken = pc.take(column.values, pa.array(rows), boundscheck=False)
            return [ColumnData(self.forms[0], pa.ListArray.from_arrays(pa.array(ends, pa.int32()), taken))]
        if isinstance(column.values, pa.Array) and not is_views(column):
            reason = f"column {self.form.name!r} has nulls inside its lists, which batches by tokens cannot hold"
            raise ParquetError(path, reason, "leave it out with columns=")
        if self.form.kind == "fixed":
            values = np.ascontiguousarray(column.values.take(rows, axis=0, mode="clip"))
            found = [self._items(0, values.reshape(-1).view(np.uint8), ends * self.form.width)]
        else:
            each = pack_bytes(take(ColumnData(self.form, column.values), rows))
            found = [self._items(0, each.data, each.ends[ends])]
            found.append(self._items(1, np.diff(each.ends).astype(np.int32).view(np.uint8), ends * 4))
        if self.nullable:
            valid = np.ones(len(rows), np.bool_) if column.valid is None else column.valid.take(rows)
            found.append(self._items(-1, valid.view(np.uint8), ends))
        elif column.valid is not None:
            reason = f"column {self.form.name!r} has nulls where the file says that it has none"
            raise ParquetError(path, reason, "write the file again")
        return found

    def _items(self, position: int, data: npt.NDArray[np.uint8], ends: Ints) -> ColumnData:
        buffers = [None, pa.py_buffer(np.ascontiguousarray(ends)), pa.py_buffer(data)]
        return from_arrow(pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers), self.forms[position])

    def rows(self, columns: Iterator[ColumnData]) -> ColumnData:
        """Return the rows of the batches, one batch after the other, from the columns that hold them."""
        first = next(columns)
        if self.form.kind == "other":
            return ColumnData(self.form, first.values.flatten())
        values: Any = pack_bytes(first).data
        if self.form.kind == "fixed":
            values = as_rows(values, self.form.width)
        else:
            lengths = pack_bytes(next(columns)).data.view(np.int32)
            values = PackedBytes(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), values)
        return ColumnData(self.form, values, pack_bytes(next(columns)).data.view(np.bool_) if self.nullable else None)


def _bytes(name: str) -> ColumnForm:
    return ColumnForm(name=name, type=pa.large_binary(), kind="bytes", width=1)
