"""A batch: a dict of columns that knows its place in the epoch and travels as one piece of shared memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

from pqcache.system.buffer_pool import Block, aligned
from pqcache.torch.ragged import Kind, Ragged, moved, pinned
from pqcache.torch.shared_memory import Sent, Slot, received, shared_pool

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bool"),
    )
}
_INLINE = 64 * 1024  # bytes; a smaller batch is cheaper through the pipe than by shared memory


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the training a batch belongs; ``index`` is global in the epoch; ``source`` a dataset of a Mix."""

    epoch: int = 0
    index: int = -1
    lanes: int = 0
    window: int = 0
    source: str | None = None


class Batch(dict[str, Any]):
    """A dict of column name to tensor, Ragged or dict; ``index`` is its global number in the epoch.

    Tensors have shape (rows,) or (rows, length), and a Ragged has rows items. It pickles as one shared buffer, and
    moves as a whole:

    >>> batch = Batch({"price": torch.ones(4)}, Place(epoch=1, index=7))
    >>> batch.index, batch.epoch, batch.to("cpu", non_blocking=True)["price"].shape
    (7, 1, torch.Size([4]))
    """

    place: Place

    def __init__(self, columns: Mapping[str, Any], place: Place = Place()) -> None:
        super().__init__(columns)
        self.place = place

    @property
    def index(self) -> int:
        """The batch's global index in the epoch, counted over all ranks and workers."""
        return self.place.index

    @property
    def epoch(self) -> int:
        """The epoch the batch belongs to."""
        return self.place.epoch

    @property
    def source(self) -> str | None:
        """The name of the dataset that the batch comes from, in a Mix; else None."""
        return self.place.source

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on another device."""
        return Batch({k: moved(v, device, non_blocking) for k, v in self.items()}, self.place)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; DataLoader(pin_memory=True) calls this."""
        return Batch({k: pinned(v) for k, v in self.items()}, self.place)

    def __copy__(self) -> Batch:
        return Batch(self, self.place)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return Batch({k: copy.deepcopy(v, memo) for k, v in self.items()}, self.place)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (dict(self), self.place)


class _At(NamedTuple):
    """Where a tensor lies: in which buffer, and how it is read from there."""

    buffer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


class _RaggedAt(NamedTuple):
    values: Any
    offsets: Any
    kind: Kind


class _Run(NamedTuple):
    """Tensors like the one at ``first``, each ``step`` bytes behind the one before."""

    names: tuple[str, ...]
    first: _At
    step: int


class _Packing:
    """Finds each tensor of a batch in shared memory, or a place for it in a buffer of what lies elsewhere."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.loose: list[tuple[torch.Tensor, int]] = []
        self.end = 0  # of the buffer for loose tensors, which is number -1
        self._pool = shared_pool()

    def lay_out(self, value: Any) -> Any:
        """Return ``value`` with its tensors replaced by where they are."""
        if isinstance(value, Ragged):
            return _RaggedAt(self.lay_out(value.values), self.lay_out(value.offsets), value.kind)
        if type(value) is dict:
            return {name: self.lay_out(inner) for name, inner in value.items()}
        if type(value) is not torch.Tensor or not _plain(value):
            return value
        size = value.numel() * value.element_size()
        slot = None
        if self._pool is not None and size and value.is_contiguous():
            slot = self._pool.slot_of(value.data_ptr(), size)
        if slot is not None:
            if slot not in self.slots:
                self.slots.append(slot)
            offset = value.data_ptr() - slot.begin
            return _At(self.slots.index(slot), value.dtype, tuple(value.shape), offset, size)
        self.loose.append((value, self.end))
        self.end += aligned(size)
        return _At(-1, value.dtype, tuple(value.shape), self.loose[-1][1], size)

    def pack_loose(self, block: Block) -> None:
        """Copy the tensors that lie elsewhere into their buffer."""
        buffer = torch.from_numpy(block)
        for tensor, offset in self.loose:
            size = tensor.numel() * tensor.element_size()
            buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _runs(laid: dict[str, Any]) -> list[_Run]:
    """Take tensors that lie at equal distances out of what was laid out: the receiver finds them all at once."""
    alike: defaultdict[Any, list[str]] = defaultdict(list)
    for name, at in laid.items():
        if type(at) is _At and at.bytes and at.dtype in _NUMPY:
            alike[at.buffer, at.dtype, at.shape].append(name)
    found = []
    for names in alike.values():
        steps = {laid[after].offset - laid[before].offset for before, after in pairwise(names)}
        if len(steps) == 1 and min(steps) > 0 and min(steps) % laid[names[0]].dtype.itemsize == 0:
            found.append(_Run(tuple(names), laid[names[0]], min(steps)))
            for name in names:
                laid[name] = None
    return found


def _take_up_run(run: _Run, buffers: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a run, each one its own and no view of another, so that it may be changed in place."""
    at, dtype, bytes_ = run.first, _NUMPY[run.first.dtype], buffers[run.first.buffer].numpy()
    first = np.ndarray(at.shape, dtype, bytes_, at.offset)
    all_ = np.ndarray((len(run.names), *at.shape), dtype, bytes_, at.offset, (run.step, *first.strides))
    return zip(run.names, map(torch.from_numpy, all_), strict=True)


def _take_up(laid: Any, buffers: list[torch.Tensor]) -> Any:
    """Return what was laid out, over the buffers."""
    if type(laid) is _At:
        if not laid.bytes:
            return torch.empty(laid.shape, dtype=laid.dtype)
        data = buffers[laid.buffer][laid.offset : laid.offset + laid.bytes]
        return data.view(laid.dtype).view(laid.shape)
    if type(laid) is _RaggedAt:
        return Ragged(_take_up(laid.values, buffers), _take_up(laid.offsets, buffers), laid.kind)
    if type(laid) is dict:
        return {name: _take_up(inner, buffers) for name, inner in laid.items()}
    return laid


def _reduce(batch: Batch) -> tuple[Any, ...]:
    """Pickle a batch for another process."""
    packing = _Packing()
    laid = packing.lay_out(dict(batch))
    runs = _runs(laid)
    pool = shared_pool()
    slot = None
    if packing.end > _INLINE and pool is not None:
        block = pool.borrow(packing.end)
        slot = pool.slot_of(block.ctypes.data, packing.end)
    if slot is None:
        block = np.empty(packing.end, np.uint8)
    packing.pack_loose(block)
    loose: Any = bytearray(block) if slot is None else slot.send()
    sent = [slot.send() for slot in packing.slots]
    if loose is None or None in sent:  # on its way to very many receivers
        return batch.__reduce__()
    return _rebuild, (laid, runs, sent, loose, batch.place)


def _rebuild(laid: dict[str, Any], runs: list[_Run], sent: list[Sent], loose: Any, place: Place) -> Batch:
    buffers = [received(slot) for slot in sent]
    if isinstance(loose, Sent):
        buffers.append(received(loose))
    elif loose:
        buffers.append(torch.frombuffer(loose, dtype=torch.uint8))
    found = _take_up(laid, buffers)
    for run in runs:
        found.update(_take_up_run(run, buffers))
    return Batch(found, place)


ForkingPickler.register(Batch, _reduce)
