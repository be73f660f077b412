"""The columns of a finished batch, in the order of the plan, with their masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pqcache.parquet.schema_merge import is_text
from pqcache.reader.columns.batch_layout import FinishedBatch
from pqcache.reader.columns.column_data import ColumnData
from pqcache.reader.columns.column_forms import number_dtype, storage_type
from pqcache.reader.columns.row_bytes import PackedBytes
from pqcache.reader.packing.packed_rows import PackedRows
from pqcache.reader.read_plan import ReadPlan
from pqcache.torch.column_options import check_mask
from pqcache.torch.ragged import RaggedKind, in_sequences
from pqcache.torch.tensors import Conversion, is_binary, mask_name, to_value
from pqcache.torch.unmade_batch import PackedArrays, UnmadeBatch


class BatchValues:
    """Makes the columns of a plan's batches what a batch has, with masks of those that are ``masked``.

    What is the same for all batches is found out once.
    """

    def __init__(self, plan: ReadPlan, conversion: Conversion, masked: frozenset[str]) -> None:
        self._plan, self._conversion, self._masked = plan, conversion, masked
        self._names = (*plan.columns, *(plan.packs.spec.ids if isinstance(plan.packs, PackedRows) else ()))
        self._plain = not conversion.mask and plan.sequences is None
        types = {field.name: storage_type(field.type) for field in plan.row_schema}
        self._texts: dict[str, RaggedKind] = {
            name: "bytes" if is_binary(kind) else "str" for name, kind in types.items() if is_text(kind)
        }
        self._items = {name: dtype for name, kind in types.items() if (dtype := _list_dtype(kind)) is not None}

    def of(self, columns: FinishedBatch, position: Any) -> UnmadeBatch:
        """Return a batch with its columns in their order, and their masks behind them."""
        if not self._plain:
            return self._with_masks(columns, position)
        others = {name: self._value(name, column)[0] for name, column in columns.others.items()}
        return UnmadeBatch(self._names, columns.numbers, others, position)

    def _value(self, name: str, column: ColumnData) -> tuple[Any, torch.Tensor | None]:
        """Return a column as `to_value` does, texts and lists without nulls as arrays."""
        packed = column.values
        if column.valid is None and isinstance(packed, PackedBytes):
            if (kind := self._texts.get(name)) is not None:
                return PackedArrays(packed.data, packed.ends, kind), None
            if (item := self._items.get(name)) is not None:
                return PackedArrays(packed.data.view(item), packed.ends // item.itemsize, "list"), None
        return to_value(column, name, self._conversion)

    def _with_masks(self, columns: FinishedBatch, position: Any) -> UnmadeBatch:
        """Return all columns with masks; rows of sequences together."""
        plan, masked = self._plan, self._masked
        numbers = [name for forms, _ in columns.numbers for name in forms]  # without nulls
        masks = {name: torch.ones(columns.rows, dtype=torch.bool) for name in numbers if name in masked}
        values: dict[str, Any] = {}
        for name, column in columns.others.items():
            value, mask = self._value(name, column)
            mask = torch.ones(len(column), dtype=torch.bool) if mask is None and name in masked else mask
            axis = plan.axis(name)
            if axis is not None:
                value = in_sequences(value.ragged() if isinstance(value, PackedArrays) else value, axis)
            values[name] = value
            if mask is not None:
                masks[name] = mask if axis is None else in_sequences(mask, axis)
        names: list[str] = []
        for name in self._names:
            names.append(name)
            if name in masked or (self._conversion.mask and name in masks):  # nulls that no footer tells of
                check_mask(name, self._names)
                names.append(mask_name(name))
                values[mask_name(name)] = masks[name]
        return UnmadeBatch(names, columns.numbers, values, position)


def _list_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the dtype of the items of a list type of which the items are plain numbers; else None."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return number_dtype(kind.value_type) if lists else None
