"""The columns of a finished batch as tensors, in the order of the plan, with their masks."""

from __future__ import annotations

from typing import Any

import torch

from pqcache.reader.columns.batch_layout import FinishedBatch
from pqcache.reader.packing.packed_rows import PackedRows
from pqcache.reader.read_plan import ReadPlan
from pqcache.torch.column_options import check_mask
from pqcache.torch.ragged import in_sequences
from pqcache.torch.tensors import Nulls, mask_name, to_value


def values_of(columns: FinishedBatch, plan: ReadPlan, nulls: Nulls, masked: frozenset[str]) -> dict[str, Any]:
    """Return the columns of a batch, in their order, with the masks of those that are ``masked`` behind them."""
    values: dict[str, Any] = {}
    masks: dict[str, torch.Tensor] = {}
    for numbers in columns.numbers:  # separate tensors: views of one could not be changed in place
        values.update(zip(numbers.forms, map(torch.from_numpy, numbers.values), strict=True))
    masks.update((name, torch.ones(columns.rows, dtype=torch.bool)) for name in masked & values.keys())
    for name, column in columns.others.items():
        value, mask = to_value(column, name, nulls)
        mask = torch.ones(len(column), dtype=torch.bool) if mask is None and name in masked else mask
        axis = plan.axis(name)
        values[name] = value if axis is None else in_sequences(value, axis)
        if mask is not None:
            masks[name] = mask if axis is None else in_sequences(mask, axis)
    ordered: dict[str, Any] = {}
    ids = plan.packs.spec.ids if isinstance(plan.packs, PackedRows) else ()
    for name in (*plan.columns, *ids):
        ordered[name] = values[name]
        if name in masked or (nulls.mask and name in masks):  # nulls that no footer tells of
            check_mask(name, values)
            ordered[mask_name(name)] = masks[name]
    return ordered
