"""Batches on their way from a worker to the trainer: pickled without their tensors, whose bytes lie in shared memory.

The bytes of a message are written once, one tensor behind the other, into a slot of shared memory (`shared_memory`),
and what goes through DataLoader's pipe is the pickle that says where each lies. The receiver makes tensors over the
slot, which is free again when the last of them is gone. Little messages, and all where no shared memory is left, carry
their bytes with them.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

from pqcache.system.buffer_pool import aligned
from pqcache.torch.ragged import Ragged, RaggedKind
from pqcache.torch.shared_memory import SharedPool, SlotReference, received, worker_pool

log = logging.getLogger("pqcache.torch")

_INLINE = 64 * 1024  # bytes; fewer are cheaper through the pipe than by shared memory
_KNOWN = frozenset(
    getattr(torch, name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "bool"),
    )
)


class Message(NamedTuple):
    """A pickle, the size of each buffer that it refers to, and their bytes, each aligned: in a slot or with it."""

    pickled: bytes
    sizes: Sequence[int]
    content: SlotReference | bytes


class _Sent(NamedTuple):
    """A tensor as an array; one of a dtype that numpy lacks as its bytes, with ``dtype`` and ``shape``."""

    array: Any
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


class _SentRagged(NamedTuple):
    values: Any
    offsets: Any
    kind: RaggedKind


def message_of(value: Any) -> Message:
    """Write a value for another process: tensors in dicts and Ragged by their bytes, all else as torch pickles it."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    ForkingPickler(file, 5, True, buffers.append).dump(_sent(value))
    raw = [buffer.raw() for buffer in buffers]
    sizes = [part.nbytes for part in raw]
    total = sum(map(aligned, sizes))
    pool = worker_pool() if total > _INLINE else None
    place = np.empty(total, np.uint8) if pool is None else pool.borrow(total)
    at = 0
    for part, size in zip(raw, sizes, strict=True):
        if size:
            np.copyto(place[at : at + size], np.frombuffer(part, np.uint8))
        at += aligned(size)
    content: SlotReference | bytes | None = None
    if isinstance(pool, SharedPool):
        slot = pool.slot_of(place.ctypes.data, total)
        content = None if slot is None else slot.send()
        if content is None:
            log.debug("%d bytes of a batch go through the pipe: no shared memory is left for them", total)
    return Message(file.getvalue(), sizes, place.tobytes() if content is None else content)


def value_of(message: Message) -> Any:
    """Read a message, once: tensors are over the sender's memory, and no view of one another."""
    content = message.content
    place = received(content) if isinstance(content, SlotReference) else np.frombuffer(bytearray(content), np.uint8)
    at, buffers = 0, []
    for size in message.sizes:
        buffers.append(place[at : at + size])
        at += aligned(size)
    return _received(pickle.loads(message.pickled, buffers=buffers))


def _sent(value: Any) -> Any:
    if type(value) is torch.Tensor:
        if not is_plain(value):
            if not value.is_conj() and not value.is_neg():
                return value
            return _sent(value.resolve_conj().resolve_neg())  # torch's pickling loses that, and the values
        if value.dtype in _KNOWN:
            array = value.numpy()
            return _Sent(array if array.flags.c_contiguous else array.copy())
        flat = value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else np.zeros(0, np.uint8)
        return _Sent(flat, value.dtype, tuple(value.shape))
    if type(value) is Ragged:
        return _SentRagged(_sent(value.values), _sent(value.offsets), value.kind)
    return _changed_inside(value, _sent)


def _received(value: Any) -> Any:
    if type(value) is _Sent:
        tensor = torch.from_numpy(value.array)
        return tensor if value.dtype is None else tensor.view(value.dtype).view(value.shape)
    if type(value) is _SentRagged:
        return Ragged(_received(value.values), _received(value.offsets), value.kind)
    return _changed_inside(value, _received)


def _changed_inside(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a plain dict, list or tuple with each item changed; anything else as it is."""
    if type(value) is dict:
        return {name: change(inner) for name, inner in value.items()}
    return type(value)(map(change, value)) if type(value) in (list, tuple) else value


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than values in host memory, with a type, a shape and strides."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
