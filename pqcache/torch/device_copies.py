"""Copies batches to a device beside its work: packed into pinned memory that is reused, on a stream of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pqcache.system.buffer_pool import aligned
from pqcache.torch.batch import Batch
from pqcache.torch.ragged import Ragged, change_inside, to_device
from pqcache.torch.transport import is_plain
from pqcache.units import format_size

log = logging.getLogger("pqcache.torch")

Bytes = npt.NDArray[np.uint8]
_SLOTS = 2  # batches in pinned memory: one that is being copied, and one that is being packed
_PAGE = 4096  # bytes; pinned memory is taken in powers of two from here on, as torch's allocator rounds up to these


@dataclass(frozen=True)
class DeviceBlock:
    """Memory of a device that is being copied to, with an event after the copy."""

    bytes: torch.Tensor
    copied: Any


class CopyStream(Protocol):
    """What copies to a device, beside the stream that the trainer's work is on."""

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned memory; RuntimeError where there is none."""

    def copy(self, pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        """Begin to copy pinned pieces, one after the other, to a new block of so many bytes."""

    def wait(self, copied: Any) -> None:
        """Wait in this thread until the copy before an event has ended."""

    def wait_on_device(self, block: DeviceBlock) -> None:
        """Let the trainer's stream wait for the copy, and keep the block until its work up to then has ended."""

    def move(self, value: Any) -> Any:
        """Return a value with all that is not on the device moved there, on the trainer's stream."""


class DeviceStream:
    """A stream of a GPU, of CUDA or ROCm: torch calls both ``cuda``."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = getattr(torch, device.type)
        index = self._api.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = self._api.Stream(device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned memory; RuntimeError where there is none."""
        with self._api.device(self._device):  # or it would be set up on another one
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        """Begin to copy pinned pieces to a new block, which torch's allocator gives to this stream."""
        with self._api.device(self._device), self._api.stream(self._stream):  # a thread has a device of its own
            block, begin = torch.empty(size, dtype=torch.uint8, device=self._device), 0
            for piece in pieces:
                block[begin : begin + len(piece)].copy_(piece, non_blocking=True)
                begin += len(piece)
            copied = self._api.Event()
            copied.record(self._stream)
        return DeviceBlock(block, copied)

    def wait(self, copied: Any) -> None:
        """Wait in this thread until the copy before an event has ended."""
        copied.synchronize()

    def wait_on_device(self, block: DeviceBlock) -> None:
        """Let the current stream wait for the copy; its memory is used again after what that stream does with it."""
        current = self._api.current_stream(self._device)
        current.wait_event(block.copied)
        block.bytes.record_stream(current)

    def move(self, value: Any) -> Any:
        """Return a value with all that is not on the device moved there."""
        return to_device(value, self._device)


class PinnedSlot:
    """Pinned memory for one batch of at most ``limit`` bytes: pieces that are added as batches need them."""

    def __init__(self, stream: CopyStream, limit: int) -> None:
        self._stream, self.limit = stream, limit // _PAGE * _PAGE
        self._pieces: list[torch.Tensor] = []
        self._arrays: list[Bytes] = []
        self._copied: Any = None  # the event after the copy of the latest batch
        self.size = 0

    def copy(self, arrays: Sequence[Bytes], begins: Sequence[int], size: int) -> DeviceBlock | None:
        """Begin to copy arrays to a block in which they begin there; None where they do not fit."""
        if not self._holds(size):
            return None
        if self._copied is not None:
            self._stream.wait(self._copied)
        for array, begin in zip(arrays, begins, strict=True):
            self._write(array, begin)
        block = self._stream.copy(list(self._filled(size)), size)
        self._copied = block.copied
        return block

    def _holds(self, size: int) -> bool:
        """Return whether a batch of this size fits, after adding memory for one that is up to a quarter larger."""
        if size > self.limit:
            return False
        while self.size < size:
            unit = max(_PAGE, _power_of_two(size) // 8)
            wanted = min(self.limit, -(-(size + size // 4) // unit) * unit) - self.size
            try:
                piece = self._stream.pinned(_power_of_two(wanted))
            except RuntimeError as error:
                log.warning("Prefetch: no more than %s could be pinned: %s", format_size(self.size), error)
                self.limit = self.size
                return False
            self._pieces.append(piece)
            self._arrays.append(piece.numpy())
            self.size += len(piece)
        return True

    def _write(self, array: Bytes, begin: int) -> None:
        for piece in self._arrays:
            if not len(array):
                return
            if begin < len(piece):
                count = min(len(array), len(piece) - begin)
                piece[begin : begin + count] = array[:count]
                array, begin = array[count:], begin + count
            begin -= len(piece)

    def _filled(self, size: int) -> Iterator[torch.Tensor]:
        for piece in self._pieces:
            if size <= 0:
                return
            yield piece[:size]
            size -= len(piece)


class DeviceCopier:
    """Copies batches to a device through at most ``memory`` bytes of pinned memory."""

    def __init__(self, stream: CopyStream, memory: int) -> None:
        self._stream = stream
        self._slots = [PinnedSlot(stream, memory // _SLOTS) for _ in range(_SLOTS)]
        self._lock = threading.Lock()  # each iteration has a thread of its own
        self._has_warned = False  # of a batch that does not fit

    @property
    def pinned_bytes(self) -> int:
        """How much memory is pinned."""
        return sum(slot.size for slot in self._slots)

    def begin(self, batch: Any) -> tuple[Any, DeviceBlock | None]:
        """Begin to copy a batch; return it with its tensors on the device, for ``finish``.

        What cannot be packed is left where it is: tensors that are sparse, have a gradient or are on a device, and
        objects that move themselves. So is a whole batch that does not fit into pinned memory.
        """
        tensors: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        _change_plain(batch, collect)
        begins, size = [], 0
        for tensor in tensors:
            begins.append(size)
            size += aligned(tensor.numel() * tensor.element_size())
        if not size:
            return batch, None
        with self._lock:
            self._slots.reverse()
            slot = self._slots[0]
            block = slot.copy([_bytes_of(tensor) for tensor in tensors], begins, size)
        if block is None:
            self._warn(size, slot.limit)
            return batch, None
        pairs = zip(tensors, begins, strict=True)
        return _change_plain(batch, lambda tensor: _like(*next(pairs), block.bytes)), block

    def finish(self, batch: Any, block: DeviceBlock | None) -> Any:
        """Return a batch that was begun, for work on the current stream of the device."""
        if block is not None:
            self._stream.wait_on_device(block)
        return self._stream.move(batch)

    def _warn(self, size: int, limit: int) -> None:
        log.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "Prefetch: a batch of %s does not fit into the %s of pinned memory for each, half of memory=: it is copied "
            "without, while the trainer waits",
            format_size(size),
            format_size(limit),
        )
        self._has_warned = True


def _change_plain(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with ``change`` made to its plain tensors in host memory, in a fixed order."""

    def applied(inner: Any) -> Any:
        if type(inner) is Ragged:
            return Ragged(_change_plain(inner.values, change), _change_plain(inner.offsets, change), inner.kind)
        return change(inner) if type(inner) is torch.Tensor and is_plain(inner) else inner

    return change_inside(value, _moves_itself, applied)


def _moves_itself(value: Any) -> bool:
    """Return whether a value is moved whole: a tensor, a Ragged, or an object that has ``to`` and is no Batch."""
    return callable(getattr(value, "to", None)) and not isinstance(value, (Batch, type))


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    if not tensor.numel():  # with strides that view() refuses
        return np.zeros(0, np.uint8)
    found: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _like(tensor: torch.Tensor, begin: int, block: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the type and shape of one, over a block: no view of another, so that each may be changed."""
    made = torch.empty(0, dtype=tensor.dtype, device=block.device)
    return made.set_(block.untyped_storage(), begin // tensor.element_size(), tensor.shape)  # type: ignore[call-overload, no-any-return]


def _power_of_two(size: int) -> int:
    """Return the largest power of two that is not above ``size``."""
    return 1 << (size.bit_length() - 1)
