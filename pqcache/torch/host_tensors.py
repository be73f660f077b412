"""Copies of tensors in host memory, made by numpy.

torch divides larger copies among its threads and waits for all of them. Where other processes use the cores, as workers
do, a copy of a batch takes many times as long as on one thread, and the time of the processor with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

AnyArray = npt.NDArray[Any]


def array_of(tensor: torch.Tensor) -> AnyArray | None:
    """Return a tensor as an array over the same memory; None on another device, with a gradient, or of other types."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.requires_grad:
        return None
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # a type that numpy lacks, a sparse tensor, one that is conjugated when read
        return None


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own with the same values."""
    array = array_of(tensor)
    return tensor.clone() if array is None else torch.from_numpy(array.copy())


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all tensors, which have one type and shape of rows, one after the other."""
    arrays = [array_of(tensor) for tensor in tensors]
    known = [array for array in arrays if array is not None]
    return torch.cat(list(tensors)) if len(known) < len(arrays) else torch.from_numpy(np.concatenate(known))


def padded(values: torch.Tensor, offsets: torch.Tensor, length: int | None, value: float) -> torch.Tensor:
    """Return a tensor (items, length, ...) of items of ``values``, which begin and end at ``offsets``."""
    array, ends = array_of(values), array_of(offsets)
    if array is None or ends is None:
        return _padded_by_torch(values, offsets.to(values.device), length, value)
    lengths = np.diff(ends)
    longest = int(lengths.max(initial=0))
    length = longest if length is None else length
    where = np.arange(length)
    inside = where < lengths[:, None]
    filler = torch.full((1,), value, dtype=values.dtype).numpy()
    found = np.empty((len(lengths), length, *array.shape[1:]), array.dtype)
    found[...] = filler
    if longest <= length:
        found[inside] = array[ends[0] : ends[-1]]
    else:
        found[inside] = array[(ends[:-1, None] + where)[inside]]
    return torch.from_numpy(found)


def _padded_by_torch(values: torch.Tensor, offsets: torch.Tensor, length: int | None, value: float) -> torch.Tensor:
    lengths = offsets.diff()
    if length is None:
        length = int(lengths.max()) if len(lengths) else 0
    shape = (len(lengths), length, *values.shape[1:])
    if not len(values):
        return torch.full(shape, value, dtype=values.dtype, device=values.device)
    where = torch.arange(length, device=values.device)
    positions = (offsets[:-1, None] + where).clamp(max=len(values) - 1)
    outside = (where >= lengths[:, None]).reshape(*shape[:2], *(1 for _ in shape[2:]))
    return values[positions].masked_fill(outside, value)
