"""Groups of batches: those made together, and small ones sent in one message, which is cheaper than one message each.

Without a transform, a Loader's worker leaves splitting the columns to the trainer, so that fewer tensors are pickled.

Large or slow batches are sent in smaller messages. Workers may send different numbers of batches; the trainer takes
them in turn. It tells each worker how many of its batches are waiting, so that a fast one does not run far ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.packing import POSITIONS
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_hashes import Hashes
from pqcache.reader.stats import RECEIVE, SEND
from pqcache.reader.window import Group
from pqcache.torch.batch import CU_SEQLENS, Batch, Position, Ragged, meter_of
from pqcache.torch.state import Hashed
from pqcache.torch.tensors import Conversion, mask_name, to_value
from pqcache.torch.transport import Message, WorkerMemory, message_of, value_of

MOST_BATCHES = 16  # of a message
_MOST_BYTES = 8 << 20
MOST_SECONDS = 0.03  # for which a batch is kept back, about
_FIRST = 2  # messages of one batch at the beginning of a pass


@dataclass(eq=False)
class TensorGroup:
    """The columns of batches made together: batch i is rows ``ends[i]`` up to ``ends[i + 1]``.

    ``names`` are the columns of packed sequences, including ``cu_seqlens``, which each batch computes from the others.
    """

    columns: dict[str, Any]
    ends: list[int]
    row_bytes: float
    names: Sequence[str] | None = None
    hashes: Hashes | None = None  # for a proof, as in `Group`
    hash_ends: Sequence[int] = ()

    @staticmethod
    def of(group: Group, plan: ReadPlan, conversion: Conversion, masked: frozenset[str]) -> TensorGroup:
        lengths, rows = dict(plan.dense), group.rows
        columns: dict[str, Any] = {}
        for name in rows.schema.names:
            axis = plan.axis(name)
            columns[name], mask = to_value(rows.column(name), name, conversion, lengths.get(name, 0), axis)
            if name in masked or (conversion.mask and mask is not None):
                check_mask(name, plan.columns)  # no footer counted these nulls
                shape = (rows.num_rows,) if axis is None else (rows.num_rows, axis)
                columns[mask_name(name)] = torch.ones(shape, dtype=torch.bool) if mask is None else mask
        names = None if plan.pack is None else (*plan.columns, *plan.pack.ids)
        row_bytes = bytes_of(columns) / max(1, rows.num_rows)
        return TensorGroup(columns, group.ends, row_bytes, names, group.hashes, group.hash_ends)

    def rows(self, number: int) -> int:
        return self.ends[number + 1] - self.ends[number]

    def with_hashes(self, number: int, batch: Any) -> Any:
        """A batch with the hashes of its rows, if there are any."""
        if self.hashes is None:
            return batch
        hashes = self.hashes[self.hash_ends[number] : self.hash_ends[number + 1]]
        return Hashed(batch, hashes, len(hashes) - self.rows(number))

    @cached_property
    def batches(self) -> list[dict[str, Any]]:
        """The columns of each batch; no tensor is a view of another."""
        found, names = divided(self.columns, self.ends), self.names
        return found if names is None else [_with_ids(batch, names) for batch in found]

    def part(self, low: int, high: int) -> TensorGroup:
        first, last = self.ends[low], self.ends[high]
        (columns,) = divided(self.columns, [first, last])
        return TensorGroup(columns, [end - first for end in self.ends[low : high + 1]], self.row_bytes, self.names)


class UnmadeBatch(NamedTuple):
    """Batch ``number`` of a group that isn't split yet."""

    group: TensorGroup
    number: int
    position: Position


def divided(columns: dict[str, Any], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Rows ``ends[i]`` up to ``ends[i + 1]`` of columns, for each i."""
    split = {name: _split(value, ends) for name, value in columns.items()}
    return [dict(zip(split, values, strict=True)) for values in zip(*split.values(), strict=True)]


def _split(value: Any, ends: Sequence[int]) -> list[Any]:
    if isinstance(value, dict):
        return divided(value, ends)
    if isinstance(value, Ragged):
        offsets = value.offsets.numpy()
        inside = offsets[ends].tolist()
        bounds = zip(ends[:-1], ends[1:], inside[:-1], strict=True)
        of_rows = [torch.from_numpy(offsets[low : high + 1] - first) for low, high, first in bounds]
        return [Ragged(v, o, value.kind) for v, o in zip(_split(value.values, inside), of_rows, strict=True)]
    array = value.numpy()  # parts of a tensor would be views of it, which autograd does not let change in place
    return [torch.from_numpy(array[low:high]) for low, high in pairwise(ends)]


def check_mask(name: str, columns: Container[str]) -> None:
    if mask_name(name) in columns:
        reason = f"it would add {mask_name(name)!r}, which is a column already"
        raise UsageError("nulls='mask'", reason, "leave one of the two out with columns=, or fill nulls by column")


def _with_ids(batch: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    if CU_SEQLENS in names:
        positions = batch[POSITIONS]
        begins = np.flatnonzero(positions.numpy().reshape(-1) == 0)  # of documents
        batch[CU_SEQLENS] = torch.from_numpy(np.append(begins, positions.numel()).astype(np.int32))
    return {name: batch[name] for name in names}


def bytes_of(value: Any) -> int:
    """Estimate the bytes of a batch; an unknown object counts as too large to be sent with others."""
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and value.layout is torch.strided):
        return int(value.nbytes)
    if isinstance(value, Ragged):
        return bytes_of(value.values) + bytes_of(value.offsets)
    if isinstance(value, UnmadeBatch):
        return int(value.group.row_bytes * value.group.rows(value.number))
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(bytes_of, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 16 if value is None or isinstance(value, bool | int | float) else _MOST_BYTES


class BatchGroup(list[Any]):
    """Batches of a ``worker`` sent together, perhaps followed by the error of the next one in torch's wrapper."""

    def __init__(self, items: Iterable[Any] = (), worker: int = 0) -> None:
        super().__init__(items)
        self.worker = worker


def _reduced(group: BatchGroup) -> tuple[Any, ...]:
    hashed = [(len(item.hashes), item.excluded) for item in group if type(item) is Hashed]
    hashes = [item.hashes for item in group if type(item) is Hashed]
    if hashed:
        group = BatchGroup((item.value if type(item) is Hashed else item for item in group), group.worker)
    positions = [item.position if type(item) in (Batch, UnmadeBatch) else None for item in group]
    with meter_of(positions[0] or Position()).timed(SEND):
        content: list[Any] = []
        for whole, items in groupby(group, key=lambda item: item.group if type(item) is UnmadeBatch else None):
            if whole is None:
                content += [dict(item) if type(item) is Batch else item for item in items]
            else:
                numbers = [item.number for item in items]  # consecutive
                content.append(whole.part(numbers[0], numbers[-1] + 1))
        if hashed:
            content.append(np.concatenate(hashes))
        return _rebuilt, (message_of(content), positions, group.worker, hashed)


def _rebuilt(
    message: Message, positions: list[Position | None], worker: int, hashed: Sequence[tuple[int, int]]
) -> BatchGroup:
    """``hashed`` has how many hashes each batch has at the end of the message, and how many of them are excluded."""
    with meter_of(positions[0] or Position()).timed(RECEIVE):
        values: list[Any] = []
        content = value_of(message)
        hashes = content.pop() if hashed else np.zeros(0, np.uint64)
        for value in content:
            values += value.batches if isinstance(value, TensorGroup) else [value]
        batches = [value if at is None else Batch(value, at) for value, at in zip(values, positions, strict=True)]
        low = 0
        for number, (all_rows, excluded) in enumerate(hashed):
            batches[number] = Hashed(batches[number], hashes[low : low + all_rows], excluded)
            low += all_rows
        return BatchGroup(batches, worker)


ForkingPickler.register(BatchGroup, _reduced)


class GroupSizes:
    """How many batches a worker sends at once: up to ``most``, fewer if the trainer has more than that waiting."""

    def __init__(self, most: int, workers: int) -> None:
        self.most, self.seconds = most, MOST_SECONDS
        self.waiting = WorkerMemory((workers,))  # batches by worker; the trainer writes it

    def at(self, number: int, worker: int) -> int:
        return 1 if number < _FIRST else max(1, min(self.most, 2 * self.most - int(self.waiting.numbers[worker])))


def sizes_in_worker(sizes: GroupSizes | None) -> GroupSizes | None:
    return None if get_worker_info() is None else sizes


def grouped(batches: Generator[Any], sizes: GroupSizes) -> Generator[BatchGroup]:
    """Yield the batches of this worker in groups; an error follows the batches before it."""
    info = get_worker_info()
    assert info is not None
    ended = False
    with closing(batches):
        for number in count():
            group, begun, most = BatchGroup(worker=info.id), time.monotonic(), sizes.at(number, info.id)
            try:
                for batch in batches:
                    if not group:
                        most = min(most, _MOST_BYTES // max(1, bytes_of(batch)))
                    group.append(batch)
                    if len(group) >= most or time.monotonic() - begun > sizes.seconds:
                        break
                else:
                    ended = True
            except Exception:  # noqa: BLE001 - raised in the trainer, once it has taken the batches before
                ended = True
                where = f"in DataLoader worker process {info.id}"
                group.append(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]
            if group:
                yield group
            if ended:
                return


def ungrouped(groups: Iterator[BatchGroup], sizes: GroupSizes) -> Generator[Any]:
    """Yield batches from groups, one from each worker in turn; an error is raised in its turn."""
    waiting: list[deque[Any]] = [deque() for _ in sizes.waiting.numbers]
    sizes.waiting.numbers[:] = 0
    for turn in count():
        mine = waiting[turn % len(waiting)]
        while not mine and (group := next(groups, None)) is not None:
            waiting[group.worker].extend(group)
            sizes.waiting.numbers[:] = [len(batches) for batches in waiting]
            del group  # so that a batch is freed when the trainer has done with it
        if mine:
            batch = mine.popleft()
            if isinstance(batch, ExceptionWrapper):
                try:
                    batch.reraise()  # type: ignore[no-untyped-call]
                except Exception as error:  # noqa: BLE001 - raised without torch's frame, which holds it in a cycle
                    raise error.with_traceback(None) from None
            yield batch
            del batch
        elif not any(waiting):
            return
