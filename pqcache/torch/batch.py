"""A batch: a dict of columns that knows its place in the epoch and travels as one piece of shared memory.

Every tensor that crosses from a DataLoader worker to the trainer costs about a third of a millisecond (a file
descriptor through a socket), hardly anything per byte. So a batch lays all its tensors out in one buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from pqcache.torch.ragged import Kind, Ragged, moved, pinned

_ALIGN = 64  # bytes; so that any dtype may begin there
_INLINE = 64 * 1024  # bytes; a smaller batch is cheaper through the pipe than by shared memory


@dataclass(frozen=True)
class Place:
    """Where in the training a batch belongs; ``index`` is global in the epoch."""

    epoch: int = 0
    index: int = -1
    lanes: int = 0
    window: int = 0


class Batch(dict[str, Any]):
    """A dict of column name to tensor, Ragged or dict; ``index`` is its global number in the epoch."""

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


class _Slot(NamedTuple):
    """Where a tensor lies in the shared buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


class _RaggedSlot(NamedTuple):
    values: Any
    offsets: Any
    kind: Kind


def _lay_out(value: Any, found: list[tuple[torch.Tensor, int]], end: int) -> tuple[Any, int]:
    """Return ``value`` with its tensors replaced by their place in the buffer, which ends at ``end``."""
    if isinstance(value, Ragged):
        values, end = _lay_out(value.values, found, end)
        offsets, end = _lay_out(value.offsets, found, end)
        return _RaggedSlot(values, offsets, value.kind), end
    if type(value) is dict:
        laid = {}
        for name, inner in value.items():
            laid[name], end = _lay_out(inner, found, end)
        return laid, end
    if type(value) is not torch.Tensor or not _plain(value):
        return value, end
    size = value.numel() * value.element_size()
    found.append((value, end))
    return _Slot(value.dtype, tuple(value.shape), end, size), end + -(-size // _ALIGN) * _ALIGN


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


def _take_up(laid: Any, buffer: torch.Tensor) -> Any:
    """Return what ``_lay_out`` was given, over ``buffer``."""
    if type(laid) is _Slot:
        if not laid.bytes:
            return torch.empty(laid.shape, dtype=laid.dtype)
        return buffer[laid.offset : laid.offset + laid.bytes].view(laid.dtype).view(laid.shape)
    if type(laid) is _RaggedSlot:
        return Ragged(_take_up(laid.values, buffer), _take_up(laid.offsets, buffer), laid.kind)
    if type(laid) is dict:
        return {name: _take_up(inner, buffer) for name, inner in laid.items()}
    return laid


def _reduce(batch: Batch) -> tuple[Any, ...]:
    found: list[tuple[torch.Tensor, int]] = []
    laid, size = _lay_out(dict(batch), found, 0)
    if size <= _INLINE:
        data = bytearray(size)
        buffer = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    else:
        storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
        buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    for tensor, offset in found:
        length = tensor.numel() * tensor.element_size()
        buffer[offset : offset + length].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return _rebuild, (laid, data if size <= _INLINE else buffer, batch.place)


def _rebuild(laid: Any, data: Any, place: Place) -> Batch:
    if isinstance(data, bytearray):
        data = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Batch(_take_up(laid, data), place)


ForkingPickler.register(Batch, _reduce)
