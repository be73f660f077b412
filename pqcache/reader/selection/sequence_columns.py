"""Columns whose rows are sequences: gathered when a row group is decoded, split into rows again in a batch.

A sequence of a column is held as one row, which is scattered and gathered like any other: numbers side by side, strings
and lists with their bytes end to end and their lengths in a second column, everything else as an Arrow list. Where
values may be null, another column says which are.
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
from pqcache.reader.columns.column_data import (
    WORDS,
    Bytes,
    ColumnData,
    from_arrow,
    is_views,
    pack_bytes,
    take,
)
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.columns.row_bytes import PackedBytes
from pqcache.reader.order.epoch_order import Ints


@dataclass(frozen=True)
class SequenceColumn:
    """How the sequences of one column are held: ``steps`` of each, whose rows are held as ``form`` says."""

    form: ColumnForm
    steps: tuple[int, ...]
    nullable: bool

    @cached_property
    def forms(self) -> tuple[ColumnForm, ...]:
        """The forms of the columns that hold the sequences."""
        name, count = self.form.name, len(self.steps)
        if self.form.kind == "other":
            return (ColumnForm(name=name, type=pa.list_(self.form.type, count), kind="other"),)
        if self.form.kind == "fixed":
            found = [_fixed(name, self.form.width * count)]
        else:
            found = [
                ColumnForm(name=name, type=pa.large_binary(), kind="bytes", width=1),
                _fixed(f"\0lengths:{name}", 4 * count),
            ]
        return (*found, _fixed(f"\0valid:{name}", count)) if self.nullable else tuple(found)

    def gather(self, column: ColumnData, rows: Ints, path: Path) -> list[ColumnData]:
        """Return sequences of ``column``, of file ``path``: ``rows`` are (sequences, length) positions in it."""
        if self.steps != tuple(range(rows.shape[1])):
            rows = rows[:, self.steps]
        count, flat = len(rows), rows.reshape(-1)
        if self.form.kind == "other":
            taken = pc.take(column.values, pa.array(flat), boundscheck=False)
            return [ColumnData(self.forms[0], pa.FixedSizeListArray.from_arrays(taken, len(self.steps)))]
        if isinstance(column.values, pa.Array) and not is_views(column):
            raise ParquetError(
                path,
                f"column {self.form.name!r} has nulls inside its lists, which sequences cannot hold",
                "leave it out with columns=",
            )
        if self.form.kind == "fixed":
            values = np.ascontiguousarray(column.values.take(flat, axis=0, mode="clip"))
            found = [ColumnData(self.forms[0], _rows(values, count))]
        else:
            each = pack_bytes(take(ColumnData(self.form, column.values), flat))
            ends = pa.py_buffer(np.ascontiguousarray(each.ends[:: len(self.steps)]))
            bytes_ = pa.Array.from_buffers(pa.large_binary(), count, [None, ends, pa.py_buffer(each.data)])
            lengths = np.diff(each.ends).astype(np.int32)
            found = [from_arrow(bytes_, self.forms[0]), ColumnData(self.forms[1], _rows(lengths, count))]
        if self.nullable:
            valid = np.ones(len(flat), np.bool_) if column.valid is None else column.valid.take(flat)
            found.append(ColumnData(self.forms[-1], _rows(valid, count)))
        elif column.valid is not None:
            raise ParquetError(
                path,
                f"column {self.form.name!r} has nulls where the file says that it has none",
                "write the file again",
            )
        return found

    def rows(self, columns: Iterator[ColumnData]) -> ColumnData:
        """Return the column's rows, those of a sequence one after the other, from the columns that hold it."""
        first = next(columns)
        if self.form.kind == "other":
            return ColumnData(self.form, first.values.flatten())
        values: Any
        if self.form.kind == "fixed":
            values = _words(first.values, self.form.width)
        else:
            lengths = _flat(next(columns).values).view(np.int32)
            values = PackedBytes(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pack_bytes(first).data)
        return ColumnData(self.form, values, _flat(next(columns).values).view(np.bool_) if self.nullable else None)


def _fixed(name: str, width: int) -> ColumnForm:
    return ColumnForm(name=name, type=pa.binary(width), kind="fixed", width=width)


def _flat(values: Bytes) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _words(values: Bytes, width: int) -> Bytes:
    """Return the bytes of ``values`` as rows of ``width`` bytes."""
    flat = _flat(values)
    return flat.view(WORDS[width]) if width in WORDS else flat.reshape(-1, width)


def _rows(values: Bytes, rows: int) -> Bytes:
    """Return the bytes of ``values`` as so many rows."""
    return _words(values, values.nbytes // rows) if rows else values
