"""Tensors on their way to another process: found in shared memory where they are there, else copied into one buffer.

What is pickled is where each tensor lies: a buffer, an offset, a dtype and a shape.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from pqcache.system.buffer_pool import Buffer, aligned
from pqcache.torch.host_tensors import AnyArray, array_of
from pqcache.torch.ragged import Ragged, RaggedKind
from pqcache.torch.shared_memory import Slot, SlotReference, received, shared_pool
from pqcache.torch.unmade_batch import PackedArrays, UnmadeBatch

log = logging.getLogger("pqcache.torch")

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bool"),
    )
}
_TORCH = {dtype: kind for kind, dtype in _NUMPY.items()}
_INLINE = 64 * 1024  # bytes; fewer are cheaper through the pipe than by shared memory
_SMALL = 16 * 1024  # bytes of an array from which on a call of its own is worth its time
_PADDING = bytes(aligned(1))


class TensorLocation(NamedTuple):
    """Where a tensor lies: in which buffer (-1: the one of copies), and how it is read from there."""

    buffer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


class RaggedLocation(NamedTuple):
    """Where the tensors of a Ragged lie."""

    values: Any
    offsets: Any
    kind: RaggedKind


# plain tuples, which are pickled in less time than classes
Fields = tuple[Any, ...]  # of a TensorLocation
Names = tuple[str, ...]
Strided = tuple[Names, Fields, int]  # tensors like the first, each so many bytes behind the one before
Packed = tuple[str, Fields, Fields, RaggedKind]  # a Ragged of two tensors
Columns = tuple[Names, list[tuple[str, Fields]], list[Strided], list[Packed], dict[str, Any]]  # the names of all first


class Packet(NamedTuple):
    """The columns of batches as they are pickled, and what their locations refer to.

    In others than tensors, locations are in place of the tensors. ``copied`` holds the tensors that were not in shared
    memory: in a slot, or as bytes.
    """

    batches: list[Columns]
    slots: list[SlotReference]
    copied: SlotReference | bytearray


def pack(batches: Sequence[dict[str, Any] | UnmadeBatch]) -> Packet | None:
    """Return the columns for another process; None where too many receivers hold the memory that they lie in."""
    locator = _Locator()
    known: dict[Any, Any] = {}
    located = [_of_batch(batch, locator, known) for batch in batches]
    slots = [(slot, slot.send()) for slot in locator.slots]
    sent = [(slot, reference) for slot, reference in slots if reference is not None]
    copied = locator.copy() if len(sent) == len(slots) else None
    if copied is None:
        log.debug("a batch is pickled, not sent by shared memory: its memory is on its way to too many receivers")
        for slot, reference in sent:
            slot.take_back(reference)
        return None
    return Packet(located, [reference for _, reference in sent], copied)


def unpack(packet: Packet) -> list[dict[str, Any]]:
    """Return the columns that ``pack`` was given, over the sender's memory: no view of one another."""
    buffers = [received(slot) for slot in packet.slots]
    if isinstance(packet.copied, SlotReference):
        buffers.append(received(packet.copied))
    elif packet.copied:
        buffers.append(np.frombuffer(packet.copied, np.uint8))
    found = []
    for names, plain, strided, packed, others in packet.batches:
        restored: dict[str, Any] = dict.fromkeys(names)
        for name, location in plain:
            restored[name] = _tensor(location, buffers)
        for alike in strided:
            restored.update(_restored_strided(alike, buffers))
        for name, values, offsets, kind in packed:
            restored[name] = Ragged(_tensor(values, buffers), _tensor(offsets, buffers), kind)
        for name, located in others.items():
            restored[name] = _restored(located, buffers)
        found.append(restored)
    return found


class _Locator:
    """Finds each tensor of a batch in shared memory, or reserves space for a copy of it in one more buffer."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self._copies: list[tuple[AnyArray | torch.Tensor, int, int]] = []  # with their bytes and offset in their buffer
        self._copied_bytes = 0
        self._pool = shared_pool()

    def locate(self, value: Any) -> Any:
        """Return ``value`` with its tensors replaced by their locations."""
        if type(value) is torch.Tensor:
            return self._located(value)
        if isinstance(value, Ragged):
            return RaggedLocation(self.locate(value.values), self.locate(value.offsets), value.kind)
        if type(value) is PackedArrays:
            return RaggedLocation(self._located_array(value.values), self._located_array(value.offsets), value.kind)
        if type(value) is dict:
            return {name: self.locate(inner) for name, inner in value.items()}
        return value

    def locate_rows(self, rows: AnyArray) -> tuple[Fields, int]:
        """Return where the first of an array's rows is, as a tensor, and how many bytes the next ones are apart.

        Each row is contiguous.
        """
        stride, size = rows.strides[0], rows[0].nbytes
        address, dtype = rows.__array_interface__["data"][0], _TORCH[rows.dtype]
        number, offset = self._found(address, stride * (len(rows) - 1) + size)
        if number < 0:
            offset, stride = self._reserved(rows, rows.nbytes), size
        return (number, dtype, rows.shape[1:], offset, size), stride

    def _located_array(self, array: AnyArray) -> TensorLocation:
        """Return where a contiguous array lies or is copied to."""
        number, offset = self._placed(array, array.__array_interface__["data"][0], array.nbytes)
        return TensorLocation(number, _TORCH[array.dtype], array.shape, offset, array.nbytes)

    def _located(self, value: torch.Tensor) -> TensorLocation | torch.Tensor:
        """Return where a tensor lies or is copied to; one that is more than values as it is."""
        if not is_plain(value):
            if not value.is_conj() and not value.is_neg():
                return value
            return self._located(value.resolve_conj().resolve_neg())  # torch's pickling loses that, and the values
        number, offset = self._placed(value, value.data_ptr() if value.is_contiguous() else None, value.nbytes)
        return TensorLocation(number, value.dtype, tuple(value.shape), offset, value.nbytes)

    def _placed(self, source: AnyArray | torch.Tensor, address: int | None, size: int) -> tuple[int, int]:
        """Return the buffer and the offset in it where ``source`` lies, from its address on, or is copied to."""
        number, offset = self._found(address, size) if size and address is not None else (-1, 0)
        return (number, offset) if number >= 0 or not size else (-1, self._reserved(source, size))

    def _found(self, address: int, size: int) -> tuple[int, int]:
        """Return in which of ``slots`` so many bytes lie, and from which offset on; -1 where they lie elsewhere."""
        for number, slot in enumerate(self.slots):  # the tensors of a batch are in few
            if slot.holds(address, size):
                return number, address - slot.begin
        found = None if self._pool is None else self._pool.slot_of(address, size)
        if found is None:
            return -1, 0
        self.slots.append(found)
        return len(self.slots) - 1, address - found.begin

    def _reserved(self, source: AnyArray | torch.Tensor, size: int) -> int:
        """Return the offset in the buffer of copies at which ``source`` will be."""
        offset = self._copied_bytes
        array = array_of(source) if isinstance(source, torch.Tensor) else source
        self._copies.append((source if array is None else array, size, offset))
        self._copied_bytes += aligned(size)
        return offset

    def copy(self) -> SlotReference | bytearray | None:
        """Return the tensors that are not in shared memory, copied into one buffer; None where it cannot be sent."""
        slot, size = None, self._copied_bytes
        if size > _INLINE and self._pool is not None:
            buffer: Buffer = self._pool.borrow(size)
            slot = self._pool.slot_of(buffer.ctypes.data, size)
        if slot is None:
            buffer = np.empty(size, np.uint8)
            if size > _INLINE:
                log.debug("%d bytes of a batch go through the pipe: no shared memory is left for them", size)
        for small, group in groupby(self._copies, _is_small):
            if small:
                _copy_joined(list(group), buffer)
                continue
            for source, length, offset in group:
                _copy(source, buffer[offset : offset + length])
        return bytearray(buffer) if slot is None else slot.send()


def _is_small(copied: tuple[AnyArray | torch.Tensor, int, int]) -> bool:
    return isinstance(copied[0], np.ndarray) and copied[1] <= _SMALL


def _copy_joined(copies: Sequence[tuple[Any, int, int]], buffer: Buffer) -> None:
    """Copy arrays to their places one behind the other, by one call: one for each takes several times as long."""
    parts: list[Any] = []
    for array, size, _ in copies:
        parts += (np.ascontiguousarray(array), _PADDING[: aligned(size) - size])
    joined = np.frombuffer(b"".join(parts), np.uint8)
    begin = copies[0][2]
    np.copyto(buffer[begin : begin + len(joined)], joined)


def _copy(source: AnyArray | torch.Tensor, place: Buffer) -> None:
    if isinstance(source, np.ndarray):  # most calls of torch give up the interpreter's lock, and wait for it
        np.copyto(place.view(source.dtype).reshape(source.shape), source)
    else:
        torch.from_numpy(place).view(source.dtype).view(source.shape).copy_(source)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than values in host memory, with a type, a shape and strides."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _of_batch(batch: dict[str, Any] | UnmadeBatch, locator: _Locator, known: dict[Any, Any]) -> Columns:
    """Return the locations of a batch's columns, sorted by what they are of.

    Names that are ``known`` of another batch are the same objects, which are pickled once.
    """
    if isinstance(batch, UnmadeBatch):
        names, located = tuple(batch.names), locator.locate(batch.others)
        strided = [(tuple(forms), *locator.locate_rows(numbers)) for forms, numbers in batch.numbers]
    else:
        names, located, strided = tuple(batch), locator.locate(batch), []
    strided += _strided(located)
    found = {name for alike, _, _ in strided for name in alike}
    tensors, packed, others = [], [], {}
    for name, at in located.items():
        if type(at) is RaggedLocation and type(at.values) is type(at.offsets) is TensorLocation:
            packed.append((name, tuple(at.values), tuple(at.offsets), at.kind))
        elif type(at) is not TensorLocation:
            others[name] = at
        elif name not in found:
            tensors.append((name, tuple(at)))
    strided = [(known.setdefault(alike, alike), first, stride) for alike, first, stride in strided]
    return known.setdefault(names, names), tensors, strided, packed, others


def _strided(located: dict[str, Any]) -> Iterator[Strided]:
    """Yield groups of equally spaced tensors, which are received all at once."""
    alike: defaultdict[Any, list[str]] = defaultdict(list)
    for name, location in located.items():
        if type(location) is TensorLocation and location.bytes and location.dtype in _NUMPY:
            alike[location.buffer, location.dtype, location.shape].append(name)
    for names in alike.values():
        strides = {located[after].offset - located[before].offset for before, after in pairwise(names)}
        if len(strides) == 1 and min(strides) > 0 and min(strides) % located[names[0]].dtype.itemsize == 0:
            yield tuple(names), tuple(located[names[0]]), min(strides)


def _restored_strided(tensors: Strided, buffers: list[Buffer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor by name; none is a view of another, so that each may be changed in place."""
    names, (buffer, dtype, shape, offset, _), stride = tensors
    dtype = _NUMPY[dtype]
    inner = np.ndarray(shape, dtype, buffers[buffer], offset).strides
    arrays = np.ndarray((len(names), *shape), dtype, buffers[buffer], offset, (stride, *inner))
    return zip(names, map(torch.from_numpy, arrays), strict=True)


def _restored(located: Any, buffers: list[Buffer]) -> Any:
    if type(located) is TensorLocation:
        return _tensor(located, buffers)
    if type(located) is RaggedLocation:
        return Ragged(_restored(located.values, buffers), _restored(located.offsets, buffers), located.kind)
    if type(located) is dict:
        return {name: _restored(inner, buffers) for name, inner in located.items()}
    return located


def _tensor(location: tuple[Any, ...], buffers: list[Buffer]) -> torch.Tensor:
    buffer, dtype, shape, offset, size = location
    if not size:
        return torch.empty(shape, dtype=dtype)
    known = _NUMPY.get(dtype)
    if known is not None:  # in less than half the time of torch's views
        return torch.from_numpy(np.ndarray(shape, known, buffers[buffer], offset))
    return torch.from_numpy(buffers[buffer][offset : offset + size]).view(dtype).view(shape)
