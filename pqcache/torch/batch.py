"""A batch: a dict of columns that knows its position in the epoch, and pickles through shared memory."""

from __future__ import annotations

import copy
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.meter import NO_METER, RECEIVE, SEND, Meter
from pqcache.reader.order.epoch_order import Ints
from pqcache.torch.ragged import Ragged, concatenated, copy_of, pin_tensors, to_device
from pqcache.torch.transport import Message, message_of, value_of

CU_SEQLENS = "cu_seqlens"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where in the training a batch belongs; ``index`` is global in the epoch; ``source`` a dataset of a Mix.

    ``dataset`` is the token of the dataset that knows its rows; see ``register``. ``piece`` is the number of rows of
    the pieces in which row groups are read, or 0 if they are read whole. ``parts`` are the datasets of a joined batch,
    with their numbers of rows.
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
        """The name of the dataset that the batch comes from, in a Mix; else None."""
        return self.position.source

    @property
    def parts(self) -> dict[str, int]:
        """In a Mix with ``within_batch``, how many rows are of each dataset, in their order; else empty."""
        return dict(self.position.parts)

    def rows(self) -> RowPlaces:
        """Return where each row of the batch lies: file, row group, and position in both; see ``rows_of``.

        These are the rows that the dataset read, whatever a transform left out or added. Raises UsageError if the
        dataset is gone.
        """
        dataset = _known.get(self.position.dataset)
        if dataset is None or has_moved(self.position):
            raise UsageError(
                "batch.rows()",
                "the dataset that it was read from is gone, or has loaded another snapshot since",
                "keep the dataset, or call rows_of(batch.epoch, batch.index) of one that is made alike",
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
    """A dataset that can look up the rows of its batches; they know it by its current ``token``."""

    token: int

    @property
    def meter(self) -> Meter:
        """The meter of this dataset."""

    def rows_at(self, position: Position) -> RowPlaces:
        """Where the rows of a batch of this dataset lie."""


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
    """Whether the dataset of a batch has opened another snapshot since."""
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
    """What columns must have in common to be joined."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]} {tuple(value.shape[1:])}"
    return f"Ragged of {value.kind}" if isinstance(value, Ragged) else type(value).__name__


def _different(one: str, other: str, what: str) -> UsageError:
    return UsageError(
        "within_batch=True",
        f"{one!r} and {other!r} have {what}",
        "read the same columns of one type, or let a transform make them so",
    )
