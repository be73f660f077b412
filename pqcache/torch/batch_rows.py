"""Rows of a batch: counted, taken, copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pqcache.reader.order.epoch_order import Ints
from pqcache.torch.batch import Batch
from pqcache.torch.host_tensors import copy_of
from pqcache.torch.ragged import Ragged

CU_SEQLENS = "cu_seqlens"


def row_count(value: Any) -> int:
    """Return the number of rows of a batch, or of one of its columns."""
    return row_count(next(iter(value.values()))) if isinstance(value, dict) else len(value)


def take_rows(batch: Batch, rows: Sequence[int], packed: bool = False) -> Batch:
    """Return rows of a batch as a new one, which shares no memory with it; ``packed`` ones have ``cu_seqlens``."""
    positions = np.array(rows, np.int64)
    taken = {name: _taken(value, positions) for name, value in batch.items() if not packed or name != CU_SEQLENS}
    if packed and CU_SEQLENS in batch:
        length = len(next(iter(batch.values()))[0])
        ends = sequence_ends(batch[CU_SEQLENS], length, positions)
        taken = {name: taken.get(name, ends) for name in batch}
    return Batch(taken, batch.position)


def copied(value: Any) -> Any:
    """Return a column, or a dict of columns, or of values of one row, with tensors of its own."""
    if isinstance(value, Batch):
        return Batch({name: copied(inner) for name, inner in value.items()}, value.position)
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, Ragged):
        return Ragged(copied(value.values), copy_of(value.offsets), value.kind)
    return copy_of(value) if isinstance(value, torch.Tensor) else value


def _taken(value: Any, rows: Ints) -> Any:
    if isinstance(value, dict):
        return {name: _taken(inner, rows) for name, inner in value.items()}
    if isinstance(value, Ragged):
        offsets = value.offsets.numpy()
        lengths = np.diff(offsets)[rows]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        items = np.repeat(offsets[rows] - ends[:-1], lengths) + np.arange(ends[-1])
        return Ragged(_taken(value.values, items), torch.from_numpy(ends), value.kind)
    return torch.from_numpy(value.numpy()[rows])  # torch does not take rows of all types


def sequence_ends(cu_seqlens: torch.Tensor, length: int, rows: Sequence[int] | Ints) -> torch.Tensor:
    """Return ``cu_seqlens`` of some sequences of a packed batch, which are all of one length."""
    ends = cu_seqlens.cpu().numpy()
    sequence = ends[:-1] // length
    lengths = [np.diff(ends)[sequence == row] for row in rows]
    found = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))])
    return torch.from_numpy(found.astype(np.int32)).to(cu_seqlens.device)
