"""Rows of different lengths in two tensors, and changes to values of a batch wherever they are in it.

numpy makes the copies in host memory. torch divides large ones among its threads and waits for all of them, which takes
many times as long while other processes, such as workers, use the cores.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt
import torch

RaggedKind = Literal["list", "str", "bytes"]


class Ragged:
    """A sequence of lists, strings or bytes: item i is ``values[offsets[i]:offsets[i + 1]]``.

    ``values`` is a tensor, or for nested columns a Ragged or a dict of columns; ``offsets`` is an int64 tensor
    (rows + 1,) that begins with 0. ``kind`` is the type of an item: "list" (a view of ``values``), "str" or "bytes"
    (made on access, from uint8 ``values``). Slices are Ragged and share memory.

    >>> lists = Ragged(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 2, 2, 6]))
    >>> len(lists), lists.lengths().tolist(), lists[2]
    (3, [2, 0, 4], tensor([3, 4, 5, 6]))
    >>> lists.to_padded(length=3)
    tensor([[1, 2, 0],
            [0, 0, 0],
            [3, 4, 5]])
    >>> lists[1:].to_list()
    [[], [3, 4, 5, 6]]

    Raises IndexError for a missing item, and TypeError from methods that need ``values`` to be a tensor if it is not.
    """

    __slots__ = ("_ends", "kind", "offsets", "values")

    def __init__(self, values: Any, offsets: torch.Tensor, kind: RaggedKind = "list") -> None:
        self.values = values
        self.offsets = offsets
        self.kind = kind
        self._ends: list[int] | None = None

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @overload
    def __getitem__(self, item: int) -> Any: ...
    @overload
    def __getitem__(self, item: slice) -> Ragged: ...
    def __getitem__(self, item: int | slice) -> Any:
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step != 1:
                raise ValueError("slices of Ragged have step 1")
            stop = max(start, stop)
            ends = self._positions()
            values = part(self.values, ends[start], ends[stop])
            return Ragged(values, self.offsets[start : stop + 1] - ends[start], self.kind)
        view = self.view(item)
        if self.kind == "list":
            return view
        data: bytes = view.numpy().tobytes()
        return data.decode() if self.kind == "str" else data

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "list":
            return (self.view(i) for i in range(len(self)))
        return iter(self.to_list())

    def view(self, item: int) -> Any:
        """Return item ``item`` as a slice of ``values``, sharing memory, whatever ``kind`` is."""
        ends = self._positions()
        rows = len(ends) - 1
        if not -rows <= item < rows:
            raise IndexError(f"item {item} of {rows}")
        item %= rows
        return part(self.values, ends[item], ends[item + 1])

    def lengths(self) -> torch.Tensor:
        """Return the number of values (characters count as UTF-8 bytes) of each item: int64 (rows,)."""
        return self.offsets.diff()

    def to_list(self) -> list[Any]:
        """Return plain Python: a list of lists, of str or of bytes."""
        ends = self._positions()
        if self.kind == "list":
            values = to_rows(self.values)
            return [values[a:b] for a, b in itertools.pairwise(ends)]
        data: bytes = self.values.cpu().numpy().tobytes()
        pieces = [data[a:b] for a, b in itertools.pairwise(ends)]
        return [piece.decode() for piece in pieces] if self.kind == "str" else pieces

    def to_padded(self, value: float = 0, length: int | None = None) -> torch.Tensor:
        """Return a tensor (rows, length, ...) in which short items end in ``value`` and long ones are cut.

        ``length`` None means the longest item's.
        """
        return _padded(self._tensor("to_padded"), self.offsets, length, value)

    def to_nested(self) -> torch.Tensor:
        """Return a jagged torch nested tensor over the same memory."""
        return torch.nested.nested_tensor_from_jagged(self._tensor("to_nested"), self.offsets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Ragged:
        """Return the Ragged on another device, as ``Tensor.to``."""
        values = to_device(self.values, device, non_blocking)
        return Ragged(values, self.offsets.to(device, non_blocking=non_blocking), self.kind)

    def pin_memory(self) -> Ragged:
        """Return the Ragged in pinned memory, from which copies to a GPU overlap with its work."""
        return Ragged(pin_tensors(self.values), self.offsets.pin_memory(), self.kind)

    def __repr__(self) -> str:
        what = {"str": "strings", "bytes": "binary values", "list": "lists"}[self.kind]
        total = self.values.numel() if isinstance(self.values, torch.Tensor) else len(self.values)
        return f"Ragged({len(self)} {what}, {total} values)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets, self.kind)

    def _positions(self) -> list[int]:
        if self._ends is None:
            self._ends = cast("list[int]", self.offsets.tolist())
        return self._ends

    def _tensor(self, method: str) -> torch.Tensor:
        if not isinstance(self.values, torch.Tensor):
            raise TypeError(f"{method}: items of a nested column are not tensors; take .values apart first")
        return self.values


def part(value: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of a column, sharing memory."""
    if isinstance(value, dict):
        return {name: part(inner, start, stop) for name, inner in value.items()}
    return value[start:stop]


def item(value: Any, row: int) -> Any:
    if isinstance(value, dict):
        return {name: item(inner, row) for name, inner in value.items()}
    return value[row]


def in_sequences(value: Any, length: int) -> Any:
    """Rows in sequences of ``length``: a tensor with one more axis, or a Ragged of Ragged items."""
    if isinstance(value, dict):
        return {name: in_sequences(inner, length) for name, inner in value.items()}
    if isinstance(value, Ragged):
        return Ragged(value, torch.arange(len(value) // length + 1) * length)
    return value.reshape(value.shape[0] // length, length, *value.shape[1:])


def to_rows(value: Any) -> list[Any]:
    """A column as a plain list; rows of a struct are dicts."""
    if isinstance(value, dict):
        columns = {name: to_rows(inner) for name, inner in value.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return cast("list[Any]", value.tolist() if isinstance(value, torch.Tensor) else value.to_list())


def to_device(value: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Move all tensors, also those inside lists, tuples, dicts and dataclasses, to another device.

    Objects of other classes move themselves if they have ``to``, and are returned as they are if not.
    """

    def moved(inner: Any) -> Any:
        return inner.to(device, non_blocking=non_blocking)

    return change_inside(value, lambda inner: _has(inner, "to"), moved)


def pin_tensors(value: Any) -> Any:
    """Pin the memory of all tensors that `to_device` would move."""
    return change_inside(value, lambda inner: _has(inner, "pin_memory"), lambda inner: inner.pin_memory())


def _has(value: Any, method: str) -> bool:
    return not isinstance(value, type) and callable(getattr(value, method, None))


def change_inside(value: Any, applies: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Make a ``change`` to everything inside a value that it ``applies`` to; containers keep their type.

    Containers are mappings, lists, tuples and dataclasses. One that is changed itself is not searched.
    """
    if applies(value):
        return change(value)
    if isinstance(value, Mapping):
        return _like(value, {name: change_inside(inner, applies, change) for name, inner in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(change_inside(inner, applies, change) for inner in value))
    if isinstance(value, (list, tuple)):
        return _like(value, [change_inside(inner, applies, change) for inner in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, change_inside(getattr(value, field.name), applies, change))
        return made
    return value


def _like(value: Any, content: Any) -> Any:
    """Put ``content``, a dict or list, into a container of the type of ``value``, as torch's own pinning does."""
    if type(value) in (dict, list, tuple):
        return type(value)(content)
    try:
        if isinstance(value, MutableMapping):
            made = copy.copy(value)
            made.update(content)
            return made
        return type(value)(content)
    except TypeError:  # it is made in another way
        return content


def _array_of(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """An array over a tensor's memory; None if it has a gradient, is on a device, or numpy lacks its type."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.requires_grad:
        return None
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # a type that numpy lacks, a sparse tensor, one that is conjugated when read
        return None


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    array = _array_of(tensor)
    return tensor.clone() if array is None else torch.from_numpy(array.copy())


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the rows of tensors of one type and shape of rows."""
    arrays = [_array_of(tensor) for tensor in tensors]
    known = [array for array in arrays if array is not None]
    return torch.cat(list(tensors)) if len(known) < len(arrays) else torch.from_numpy(np.concatenate(known))


def _padded(values: torch.Tensor, offsets: torch.Tensor, length: int | None, value: float) -> torch.Tensor:
    array, ends = _array_of(values), _array_of(offsets)
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
