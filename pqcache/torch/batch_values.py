"""Batches that were gathered together, as tensors: those of a column are made at once, and then divided."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from pqcache.errors import UsageError
from pqcache.reader.packing.documents import POSITIONS
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.window import Group
from pqcache.torch.ragged import Ragged
from pqcache.torch.tensors import Conversion, mask_name, to_value


@dataclass
class TensorGroup:
    """The columns of batches that were made together: batch i is rows ``ends[i]`` up to ``ends[i + 1]``.

    Packed sequences get the columns ``names``, of which ``cu_seqlens`` follows from the others in each batch.
    """

    columns: dict[str, Any]
    ends: list[int]
    bytes: float  # of a row
    names: Sequence[str] | None = None
    _batches: list[dict[str, Any]] | None = None

    def rows(self, number: int) -> int:
        """The rows of a batch."""
        return self.ends[number + 1] - self.ends[number]

    def batches(self) -> list[dict[str, Any]]:
        """The columns of each batch; no tensor is a view of another."""
        if self._batches is None:
            self._batches = divided(self.columns, self.ends)
            if self.names is not None:
                self._batches = [_with_ids(batch, self.names) for batch in self._batches]
        return self._batches

    def part(self, low: int, high: int) -> TensorGroup:
        """Batches ``low`` up to ``high``."""
        first, last = self.ends[low], self.ends[high]
        (columns,) = divided(self.columns, [first, last])
        return TensorGroup(columns, [end - first for end in self.ends[low : high + 1]], self.bytes, self.names)


class UnmadeBatch(NamedTuple):
    """Batch ``number`` of a ``group``, which is not divided yet: workers of a Loader send several together.

    ``position`` is its `Position`.
    """

    group: TensorGroup
    number: int
    position: Any

    @property
    def bytes(self) -> float:
        """The bytes of the batch, about."""
        return self.group.bytes * self.group.rows(self.number)

    def columns(self) -> dict[str, Any]:
        """The columns of the batch."""
        return self.group.batches()[self.number]


class BatchValues:
    """Makes the columns of a plan's batches what a batch has, with masks of those that are ``masked``."""

    def __init__(self, plan: ReadPlan, conversion: Conversion, masked: frozenset[str]) -> None:
        self._plan, self._conversion, self._masked = plan, conversion, masked
        self._lengths = dict(plan.dense)

    def of(self, group: Group) -> TensorGroup:
        """The columns of a group's rows, with their masks behind them."""
        plan, rows = self._plan, group.rows
        columns: dict[str, Any] = {}
        for name in rows.schema.names:
            length, axis = self._lengths.get(name, 0), plan.axis(name)
            columns[name], mask = to_value(rows.column(name), name, self._conversion, length, axis)
            if name in self._masked or (self._conversion.mask and mask is not None):
                check_mask(name, plan.columns)  # nulls that no footer tells of
                shape = (rows.num_rows,) if axis is None else (rows.num_rows, axis)
                columns[mask_name(name)] = torch.ones(shape, dtype=torch.bool) if mask is None else mask
        names = None if plan.pack is None else (*plan.columns, *plan.pack.ids)
        return TensorGroup(columns, group.ends, _bytes(columns) / max(1, rows.num_rows), names)


def check_mask(name: str, columns: Container[str]) -> None:
    """Raise UsageError if the mask of a column has the name of another column."""
    if mask_name(name) in columns:
        reason = f"it would add {mask_name(name)!r}, which is a column already"
        raise UsageError("nulls='mask'", reason, "leave one of the two out with columns=, or fill nulls by column")


def _with_ids(batch: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Packed sequences with the columns of these names; documents begin where positions are 0."""
    if "cu_seqlens" in names:
        positions = batch[POSITIONS]
        begins = np.flatnonzero(positions.numpy().reshape(-1) == 0)
        batch["cu_seqlens"] = torch.from_numpy(np.append(begins, positions.numel()).astype(np.int32))
    return {name: batch[name] for name in names}


def _bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, Ragged):
        return _bytes(value.values) + _bytes(value.offsets)
    return int(value.nbytes)


def divided(columns: dict[str, Any], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Rows ``ends[i]`` up to ``ends[i + 1]`` of columns, for each i."""
    parts = {name: _parts(value, ends) for name, value in columns.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def _parts(value: Any, ends: Sequence[int]) -> list[Any]:
    if isinstance(value, dict):
        return divided(value, ends)
    if isinstance(value, Ragged):
        offsets = value.offsets.numpy()
        inside = offsets[ends].tolist()
        bounds = zip(ends[:-1], ends[1:], inside[:-1], strict=True)
        of_rows = [torch.from_numpy(offsets[low : high + 1] - first) for low, high, first in bounds]
        return [Ragged(v, o, value.kind) for v, o in zip(_parts(value.values, inside), of_rows, strict=True)]
    array = value.numpy()  # parts of a tensor would be views of it, which autograd does not let change in place
    return [torch.from_numpy(array[low:high]) for low, high in pairwise(ends)]
