"""A batch, a dict of columns that knows its position in the epoch, and Ragged, its rows of different lengths.

Copies in host memory are made with numpy: torch divides large ones among its threads and waits for all of them, which
takes many times as long while other processes, such as workers, use the cores.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, Protocol, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.order import Ints
from pqcache.reader.stats import NO_METER, RECEIVE, SEND, Meter
from pqcache.torch.transport import Message, message_of, value_of

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
        """Return an item as a slice of ``values`` that shares memory, for any ``kind``."""
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
        """Return a tensor (rows, length, ...) with short items padded with ``value`` and long ones cut.

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

    Other objects move themselves if they have ``to``, and are returned unchanged otherwise.
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
    """Apply ``change`` to all values in a container for which ``applies`` is true; containers keep their type.

    Containers are mappings, lists, tuples and dataclasses. A changed container is not searched.
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
    """Put ``content``, a dict or list, into a container of the same type as ``value``, like torch's own pinning."""
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
    """Concatenate the rows of tensors with the same dtype and row shape."""
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


CU_SEQLENS = "cu_seqlens"


@dataclass(frozen=True, kw_only=True)
class Position:
    """A batch's position in the training; ``index`` is global in the epoch, ``source`` is a dataset of a Mix.

    ``dataset`` is the token of the dataset that knows its rows; see ``register``. ``piece`` is the number of rows per
    piece, or 0 if row groups are read whole. ``parts`` are the datasets of a joined batch, with their numbers of rows.
    """

    epoch: int = 0
    index: int = -1
    lanes: int = 0
    window: int = 0
    source: str | None = None
    dataset: int = 0
    piece: int = 0
    parts: tuple[tuple[str, int], ...] = ()


class Batch(dict[str, Any]):
    """A dict of column name to tensor, Ragged or dict; ``index`` is its global number in the epoch.

    Tensors have shape (rows,) or (rows, length), and a Ragged has one item for each row. Workers send batches through
    shared memory. ``to`` and ``pin_memory`` move all tensors:

    >>> batch = Batch({"price": torch.ones(4)}, Position(epoch=1, index=7))
    >>> batch.index, batch.epoch, batch.to("cpu", non_blocking=True)["price"].shape
    (7, 1, torch.Size([4]))
    """

    position: Position

    def __init__(self, columns: Mapping[str, Any], position: Position = Position()) -> None:
        super().__init__(columns)
        self.position = position

    @property
    def index(self) -> int:
        """The batch's global index in the epoch, counted over all ranks and workers."""
        return self.position.index

    @property
    def epoch(self) -> int:
        """The epoch the batch belongs to."""
        return self.position.epoch

    @property
    def source(self) -> str | None:
        """The name of the batch's dataset in a Mix; else None."""
        return self.position.source

    @property
    def parts(self) -> dict[str, int]:
        """In a Mix with ``within_batch``, the number of rows from each dataset, in order; else empty."""
        return dict(self.position.parts)

    def rows(self) -> RowPlaces:
        """Return the location of each row of the batch: file, row group, and position in both; see ``rows_of``.

        These are the rows that the dataset read, even if a transform left some out or added others. Raises UsageError
        if the dataset is gone.
        """
        dataset = _known.get(self.position.dataset)
        if dataset is None or has_moved(self.position):
            raise UsageError(
                "batch.rows()",
                "the dataset that it was read from is gone, or has loaded another snapshot since",
                "keep the dataset, or call rows_of(batch.epoch, batch.index) of another dataset with the same options",
            )
        return dataset.rows_at(self.position)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on another device."""
        return Batch({k: to_device(v, device, non_blocking) for k, v in self.items()}, self.position)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; DataLoader(pin_memory=True) calls this."""
        return Batch({k: pin_tensors(v) for k, v in self.items()}, self.position)

    def __copy__(self) -> Batch:
        return Batch(self, self.position)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return Batch({k: copy.deepcopy(v, memo) for k, v in self.items()}, self.position)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (dict(self), self.position)


class RowsAt(Protocol):
    """A dataset that can look up the rows of its batches, which refer to it by its current ``token``."""

    token: int

    @property
    def meter(self) -> Meter:
        """The meter of this dataset."""

    def rows_at(self, position: Position) -> RowPlaces:
        """The location of the rows of one of this dataset's batches."""


_known: weakref.WeakValueDictionary[int, RowsAt] = weakref.WeakValueDictionary()


def register(dataset: RowsAt, token: int = 0) -> int:
    """Return the number by which batches refer to their dataset; a copy passes the ``token`` of its original.

    A copy in another process keeps that number, so that a worker's batches find the trainer's dataset.
    """
    if not token or token in _known:
        token = secrets.randbits(63)
    _known[token] = dataset
    return token


def has_moved(position: Position) -> bool:
    """Whether the dataset of a batch has since opened another snapshot."""
    dataset = _known.get(position.dataset)
    return dataset is not None and dataset.token != position.dataset


def meter_of(position: Position) -> Meter:
    dataset = _known.get(position.dataset)
    return NO_METER if dataset is None else dataset.meter


def _reduced(batch: Batch) -> tuple[Any, ...]:
    with meter_of(batch.position).timed(SEND):
        return _rebuilt, (message_of(dict(batch)), batch.position)


def _rebuilt(message: Message, position: Position) -> Batch:
    with meter_of(position).timed(RECEIVE):
        return Batch(value_of(message), position)


ForkingPickler.register(Batch, _reduced)


def row_count(value: Any) -> int:
    return row_count(next(iter(value.values()))) if isinstance(value, dict) else len(value)


def take_rows(batch: Batch, rows: Sequence[int], packed: bool = False) -> Batch:
    """Copy some rows of a batch into a new one; ``packed`` batches have ``cu_seqlens``."""
    positions = np.array(rows, np.int64)
    taken = {name: _taken(value, positions) for name, value in batch.items() if not packed or name != CU_SEQLENS}
    if packed and CU_SEQLENS in batch:
        length = len(next(iter(batch.values()))[0])
        ends = sequence_ends(batch[CU_SEQLENS], length, positions)
        taken = {name: taken.get(name, ends) for name in batch}
    return Batch(taken, batch.position)


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
    """The ``cu_seqlens`` of some sequences of a packed batch, all of one ``length``."""
    ends = cu_seqlens.cpu().numpy()
    sequence = ends[:-1] // length
    lengths = [np.diff(ends)[sequence == row] for row in rows]
    found = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))])
    return torch.from_numpy(found.astype(np.int32)).to(cu_seqlens.device)


def copied(value: Any) -> Any:
    if isinstance(value, Batch):
        return Batch({name: copied(inner) for name, inner in value.items()}, value.position)
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, Ragged):
        return Ragged(copied(value.values), copy_of(value.offsets), value.kind)
    return copy_of(value) if isinstance(value, torch.Tensor) else value


def joined(parts: Mapping[str, Any], position: Position) -> Batch:
    """Join batches of several datasets, one after the other; UsageError if their columns differ."""
    for name, part in parts.items():
        if not isinstance(part, dict):
            reason = f"the transform of {name!r} returns {type(part).__name__}"
            raise UsageError("within_batch=True", reason, "return a dict of columns, which can be joined")
    (first, columns), *others = parts.items()
    for name, part in others:
        if part.keys() != columns.keys():
            raise _different(first, name, f"columns {', '.join(columns)} and {', '.join(part)}")
    values = {column: _joined(column, {name: part[column] for name, part in parts.items()}) for column in columns}
    return Batch(values, replace(position, parts=tuple((name, row_count(part)) for name, part in parts.items())))


def _joined(column: str, parts: Mapping[str, Any]) -> Any:
    (name, first), *others = parts.items()
    values = list(parts.values())
    if column == CU_SEQLENS:
        lengths = torch.cat([value.diff() for value in values])
        return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    for other, value in others:
        if (before := _kind(first)) != (kind := _kind(value)):
            raise _different(name, other, f"{column!r} as {before} and as {kind}")
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise _different(name, others[0][0], f"other fields in {column!r}")
        return {key: _joined(f"{column}.{key}", {n: value[key] for n, value in parts.items()}) for key in first}
    if isinstance(first, Ragged):
        ends, offsets = 0, [torch.zeros(1, dtype=torch.int64)]
        for value in values:
            offsets.append(value.offsets[1:] + ends)
            ends += int(value.offsets[-1])
        inner = _joined(column, {name: value.values for name, value in parts.items()})
        return Ragged(inner, torch.cat(offsets), first.kind)
    if isinstance(first, list):
        return [item for value in values for item in value]
    if not isinstance(first, torch.Tensor):
        raise UsageError("within_batch=True", f"{column!r} is {_kind(first)}, which cannot be joined")
    return concatenated(values)


def _kind(value: Any) -> str:
    """The properties that columns must share to be joined."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]} {tuple(value.shape[1:])}"
    return f"Ragged of {value.kind}" if isinstance(value, Ragged) else type(value).__name__


def _different(one: str, other: str, what: str) -> UsageError:
    return UsageError(
        "within_batch=True",
        f"{one!r} and {other!r} have {what}",
        "read the same columns of one type, or let a transform make them so",
    )
