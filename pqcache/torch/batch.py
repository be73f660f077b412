"""A batch: a dict of columns that knows its position in the epoch, and pickles through shared memory."""

from __future__ import annotations

import copy
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.meter import NO_METER, RECEIVE, SEND, Meter
from pqcache.torch.batch_groups import BatchGroup
from pqcache.torch.batch_values import TensorGroup, UnmadeBatch
from pqcache.torch.ragged import pin_tensors, to_device
from pqcache.torch.transport import Message, message_of, value_of


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where in the training a batch belongs; ``index`` is global in the epoch; ``source`` a dataset of a Mix.

    ``dataset`` is the number of the dataset that knows its rows; see `register`. ``piece`` is 0, or the rows of the
    pieces in which row groups are read.
    ``parts`` are the datasets of a batch that has rows of several, with their numbers of rows.
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

    Tensors have shape (rows,) or (rows, length), and a Ragged has rows items. A worker sends it through
    shared memory, and ``to`` and ``pin_memory`` move all of its tensors:

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

        They are those of the batch as the dataset made it, before a transform that leaves some out or adds others. A
        batch whose dataset is gone raises UsageError.
        """
        return _rows_at(self.position)

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
    """What can say which rows the batch at a position has; ``token`` is its present number."""

    token: int

    @property
    def meter(self) -> Meter:
        """What counts for this dataset."""

    def rows_at(self, position: Position) -> RowPlaces:
        """Return the rows of a batch of this dataset."""


_known: weakref.WeakValueDictionary[int, RowsAt] = weakref.WeakValueDictionary()


def register(dataset: RowsAt, token: int = 0) -> int:
    """Return a number by which a batch names its dataset; ``token`` is that of the dataset which this is a copy of.

    A copy in another process keeps the number, so that batches of a worker find the trainer's dataset.
    """
    if not token or token in _known:
        token = secrets.randbits(63)
    _known[token] = dataset
    return token


def _meter_of(position: Position) -> Meter:
    """Return what counts for the dataset of the batch at a `Position`; nothing does where it is not known any more."""
    dataset = _known.get(position.dataset)
    return NO_METER if dataset is None else dataset.meter


def _rows_at(position: Position) -> RowPlaces:
    """Return the rows of the batch at a `Position`; UsageError where its dataset is not known any more."""
    dataset = _known.get(position.dataset)
    if dataset is None or dataset.token != position.dataset:
        raise UsageError(
            "batch.rows()",
            "the dataset that it was read from is gone, or has loaded another snapshot since",
            "keep the dataset, or call rows_of(batch.epoch, batch.index) of one that is made alike",
        )
    return dataset.rows_at(position)


def _reduce(batch: Batch) -> tuple[Any, ...]:
    """How multiprocessing pickles a batch."""
    with _meter_of(batch.position).timed(SEND):
        return _opened, (message_of(dict(batch)), batch.position)


def _reduce_unmade(batch: UnmadeBatch) -> tuple[Any, ...]:
    """How multiprocessing pickles a batch that is a Batch where it arrives."""
    return _reduce(Batch(batch.columns(), batch.position))


def _reduce_group(group: BatchGroup) -> tuple[Any, ...]:
    """How multiprocessing pickles batches that a worker sends together: those of one group as such."""
    if not group or not all(type(item) is UnmadeBatch for item in group):
        return group.__reduce__()
    with _meter_of(group[0].position).timed(SEND):
        parts: list[TensorGroup] = []
        first = 0
        for at, (whole, number, _) in enumerate(group):
            following = group[at + 1] if at + 1 < len(group) else None
            if following is None or following.group is not whole or following.number != number + 1:
                parts.append(whole.part(group[first].number, number + 1))
                first = at + 1
        content = [(part.columns, part.ends, part.bytes, part.names) for part in parts]
        positions = [item.position for item in group]
        return _opened_group, (message_of(content), positions, group.worker, group.wanted)


def _opened(message: Message, position: Position) -> Batch:
    with _meter_of(position).timed(RECEIVE):
        return Batch(value_of(message), position)


def _opened_group(message: Message, positions: list[Position], worker: int, wanted: int) -> BatchGroup:
    with _meter_of(positions[0]).timed(RECEIVE):
        groups = [TensorGroup(*content) for content in value_of(message)]
        batches = [batch for group in groups for batch in group.batches()]
        return BatchGroup(map(Batch, batches, positions), worker, wanted)


ForkingPickler.register(Batch, _reduce)
ForkingPickler.register(UnmadeBatch, _reduce_unmade)
ForkingPickler.register(BatchGroup, _reduce_group)
