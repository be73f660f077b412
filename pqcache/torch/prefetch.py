"""Prefetch: copies each batch of a loader to a device while the trainer works on the previous one.

A batch is packed into pinned memory that is reused, and copied from there on a stream of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pqcache.errors import UsageError
from pqcache.system.buffers import aligned
from pqcache.torch.batch import Batch, Ragged, change_inside, to_device
from pqcache.torch.loader import Loader, Timed
from pqcache.torch.transport import is_plain
from pqcache.units import format_size, parse_size

log = logging.getLogger("pqcache.torch")

Bytes = npt.NDArray[np.uint8]
_END = object()
_THREAD = "pqcache-prefetch"
_SLOTS = 2  # batches in pinned memory: one that is being copied, and one that is being packed
_PAGE = 4096  # bytes; pinned memory is taken in powers of two from here on, as torch's allocator rounds up to these


class Prefetch:
    """The batches of a loader on a device, copied one batch ahead while the trainer works.

    A batch is packed into reused pinned memory, and copied with one call on a separate stream. When the trainer
    requests a batch, it gets the one already copied, and the next is fetched from the loader; a thread packs it while
    the trainer works. The device then holds up to three batches. A loader may reuse a batch's memory once the next
    batch is requested; nothing else may write to it while the loop runs.

    >>> from pqcache.torch import Loader, ParquetDataset, Prefetch
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> loader = Prefetch(Loader(ParquetDataset("cache/shop", columns=["id", "price"], batch_size=256)), device)
    >>> for batch in loader:
    ...     state = loader.state_dict()
    >>> batch["price"].device.type == device, len(loader), state["batch"]
    (True, 3, 3)

    ``loader`` is a Loader, or another iterable of batches: a DataLoader, a StatefulDataLoader, a dataset. Batches keep
    their classes: tensors are moved inside a Batch, a Ragged, dicts, lists, tuples and dataclasses. Other objects are
    moved by their own ``to``, if any, while the trainer waits.

    ``device``  where batches are moved to; "cpu" passes them on as they are. Only CUDA and ROCm devices have copies in
                advance; for others batches are moved on request
    ``memory``  the most that is pinned, for two batches, taken as they need it. Larger batches are copied without it,
                with a warning. Leave out ``pin_memory=True`` of the loader, whose memory would come on top

    ``state_dict`` and ``load_state_dict`` use the loader's, for the position after the last batch that the trainer
    received. Call them here: those of other libraries' loaders count the batch ahead. All other attributes, like
    ``epoch`` and ``dataset``, are the loader's. An error of the loader is raised after the batches before it. Raises
    UsageError if torch does not find the device, and for a Loader with a ``device`` of its own.
    """

    def __init__(self, loader: Any, device: torch.device | str, *, memory: int | str = "1GB") -> None:
        self.loader = loader
        self.device = _found(device)
        self.memory = parse_size(memory)
        self._copier: DeviceCopier | None = None
        self._state: Mapping[str, Any] | Exception | None = None  # after the last batch that the trainer was given
        if isinstance(loader, Loader) and loader.device is not None:
            subject = f"Prefetch(Loader(device={str(loader.device)!r}))"
            raise UsageError(subject, "the Loader moves its batches itself", "leave out the Loader's device=")

    def __repr__(self) -> str:
        return f"<Prefetch to {self.device} of {self.loader!r}>"

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not what protocols and copies look for
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            return iter(self.loader)
        if isinstance(self.loader, Loader):
            return self.loader._iterate_through(self._ahead)
        return self._of_other_loader()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that the trainer received."""
        if isinstance(self._state, Exception):
            raise self._state
        if self._state is not None:
            return dict(self._state)
        if not hasattr(self.loader, "state_dict"):
            reason = f"a {type(self.loader).__name__} does not keep its place"
            raise UsageError("Prefetch.state_dict()", reason, "use pqcache.torch.Loader")
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> None:
        """Let the loader continue at ``state``; ``options`` are the loader's, like ``snapshot="current"``."""
        self._state = None
        self.loader.load_state_dict(state, **options)

    def set_epoch(self, epoch: int) -> None:
        """Set the loader's epoch."""
        self._state = None
        self.loader.set_epoch(epoch)

    def _of_other_loader(self) -> Generator[Any]:
        """Keep the state after each batch of a loader that does not count the batches given to the trainer."""
        self._state = None
        batches, keeps_place = iter(self.loader), hasattr(self.loader, "state_dict")
        if not keeps_place:
            yield from self._ahead(batches, nullcontext)
            return
        states: deque[Mapping[str, Any] | Exception] = deque()  # after the batches that the trainer has not been given

        def counted() -> Generator[Any]:
            for batch in batches:
                states.append(_state_or_error(self.loader))
                yield batch

        for batch in self._ahead(counted(), nullcontext):
            self._state = states.popleft()
            yield batch
        self._state = None

    def _ahead(self, batches: Iterator[Any], timed: Timed) -> Generator[Any]:
        """Yield each batch after the copy of the next one has begun; copies are ``timed``."""
        if self._copier is None and (stream := copy_stream(self.device)) is not None:
            self._copier = DeviceCopier(stream, self.memory)
        if self._copier is not None:
            yield from _copied_ahead(batches, self._copier, timed)
            return
        log.debug("Prefetch: the trainer waits for copies to %s: they run ahead for CUDA and ROCm only", self.device)
        for batch in batches:
            with timed():
                moved = to_device(batch, self.device)
            yield moved


def _state_or_error(loader: Any) -> Mapping[str, Any] | Exception:
    try:
        state: Mapping[str, Any] = loader.state_dict()
    except Exception as error:  # noqa: BLE001 - raised where it is asked for
        return error
    return state


def _copied_ahead(batches: Iterator[Any], copier: DeviceCopier, timed: Timed) -> Generator[Any]:
    """Yield the batches of a copier, each while a thread begins with the next one; an error is raised in its turn.

    A batch is packed before the next one is requested, which the loader may write into the same memory. The thread gets
    its batch last, because it needs the interpreter's lock and would delay the trainer here.
    """
    process, failure = os.getpid(), None
    begun: Future[tuple[Any, DeviceBlock | None]] | None = None
    with _packing() as thread:
        while True:
            ready: list[Any] = []  # a local variable would keep what the trainer is done with
            if begun is not None:
                if os.getpid() != process:  # which has no such thread
                    reason, advice = "its iteration was begun before a fork", "iterate anew in the child process"
                    raise UsageError("Prefetch", reason, advice)
                with timed():
                    ready.append(copier.finish(*begun.result()))
                begun = None
            try:
                batch = next(batches, _END)
            except Exception as error:  # noqa: BLE001 - raised below, after the batch before it
                failure, batch = error, _END
            is_last = batch is _END
            if not is_last:
                begun = thread.submit(copier.begin, batch)
            del batch
            if ready:
                yield ready.pop()
            if is_last:
                break
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # which refers to this frame


@contextmanager
def _packing() -> Iterator[ThreadPoolExecutor]:
    """A thread that packs batches and begins their copies, one after the other.

    On the trainer's thread, the device would be idle whenever the program waits for results: data made by another
    process is not in this processor's cache, and takes longer to pack than to copy.
    """
    thread = ThreadPoolExecutor(1, _THREAD)
    try:
        yield thread
    finally:  # the thread may itself collect an abandoned iteration, and cannot wait for its own end
        thread.shutdown(wait=not threading.current_thread().name.startswith(_THREAD))


def copy_stream(device: torch.device) -> DeviceStream | None:
    """A stream for copies beside the device's work; None if these aren't known to be safe there."""
    return DeviceStream(device) if device.type == "cuda" else None


def _found(device: torch.device | str) -> torch.device:
    subject = f"Prefetch(device={str(device)!r})"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(subject, str(error).partition("\n")[0], "give one like 'cuda', 'cuda:1' or 'cpu'") from error
    api: Any = getattr(torch, found.type, None)
    if found.type == "cpu" or not hasattr(api, "is_available"):
        return found
    if not api.is_available():
        advice = "give device='cpu', on which batches are passed on as they are, or install a build of torch for it"
        raise UsageError(subject, f"torch {torch.__version__} finds no such device here", advice)
    if found.index is not None and found.index >= api.device_count():
        raise UsageError(subject, f"there are {api.device_count()} such devices here, counted from 0")
    return found


@dataclass(frozen=True)
class DeviceBlock:
    """Device memory that is being copied to, with an event after the copy."""

    bytes: torch.Tensor
    copied: Any


class DeviceStream:
    """A stream of a CUDA or ROCm GPU: torch calls both ``cuda``."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = getattr(torch, device.type)
        index = self._api.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = self._api.Stream(device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        with self._api.device(self._device):  # or it would be pinned for another one
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        """Begin to copy pinned pieces into a new block, allocated for this stream."""
        with self._api.device(self._device), self._api.stream(self._stream):  # a thread has a device of its own
            block, begin = torch.empty(size, dtype=torch.uint8, device=self._device), 0
            for piece in pieces:
                block[begin : begin + len(piece)].copy_(piece, non_blocking=True)
                begin += len(piece)
            copied = self._api.Event()
            copied.record(self._stream)
        return DeviceBlock(block, copied)

    def wait(self, copied: Any) -> None:
        copied.synchronize()

    def wait_on_device(self, block: DeviceBlock) -> None:
        """Let the current stream wait for a copy, and reuse the block only after that stream's work."""
        current = self._api.current_stream(self._device)
        current.wait_event(block.copied)
        block.bytes.record_stream(current)

    def move(self, value: Any) -> Any:
        return to_device(value, self._device)


class PinnedSlot:
    """Pinned memory for one batch of at most ``limit`` bytes, in pieces added as needed."""

    def __init__(self, stream: DeviceStream, limit: int) -> None:
        self._stream, self.limit = stream, limit // _PAGE * _PAGE
        self._pieces: list[torch.Tensor] = []
        self._copied: Any = None  # the event after the copy of the latest batch

    @property
    def size(self) -> int:
        return sum(map(len, self._pieces))

    def copy(self, arrays: Sequence[Bytes], begins: Sequence[int], size: int) -> DeviceBlock | None:
        """Begin to copy arrays to their places in a new block; None if they don't fit."""
        if not self._holds(size):
            return None
        if self._copied is not None:
            self._stream.wait(self._copied)
        for array, begin in zip(arrays, begins, strict=True):
            self._write(array, begin)
        starts = [0, *accumulate(map(len, self._pieces))]
        filled = [piece[: size - start] for piece, start in zip(self._pieces, starts, strict=False) if start < size]
        block = self._stream.copy(filled, size)
        self._copied = block.copied
        return block

    def _holds(self, size: int) -> bool:
        """Make room for a batch of this size and up to a quarter more; False if that exceeds the limit."""
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
        return True

    def _write(self, array: Bytes, begin: int) -> None:
        for piece in self._pieces:
            if len(array) and begin < len(piece):
                count = min(len(array), len(piece) - begin)
                piece.numpy()[begin : begin + count] = array[:count]
                array, begin = array[count:], begin + count
            begin -= len(piece)


class DeviceCopier:
    """Copies batches to a device through at most ``memory`` bytes of pinned memory."""

    def __init__(self, stream: DeviceStream, memory: int) -> None:
        self._stream = stream
        self._slots = [PinnedSlot(stream, memory // _SLOTS) for _ in range(_SLOTS)]
        self._lock = threading.Lock()  # each iteration has a thread of its own
        self._has_warned = False  # of a batch that does not fit

    def begin(self, batch: Any) -> tuple[Any, DeviceBlock | None]:
        """Begin to copy a batch; return it with its tensors on the device, for ``finish``.

        Leaves in place what cannot be packed: tensors that are sparse, have a gradient or are on a device, objects that
        move themselves, and a batch that does not fit into pinned memory.
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
        """Make a batch from ``begin`` usable on the device's current stream."""
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
    """Apply ``change`` to the plain tensors in host memory, always in the same order."""

    def applied(inner: Any) -> Any:
        if type(inner) is Ragged:
            return Ragged(_change_plain(inner.values, change), _change_plain(inner.offsets, change), inner.kind)
        return change(inner) if type(inner) is torch.Tensor and is_plain(inner) else inner

    return change_inside(value, _moves_itself, applied)


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, (Batch, type))


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    if not tensor.numel():  # with strides that view() refuses
        return np.zeros(0, np.uint8)
    found: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _like(tensor: torch.Tensor, begin: int, block: torch.Tensor) -> torch.Tensor:
    """Make a tensor like another over a block; not a view, so that each may be changed."""
    made = torch.empty(0, dtype=tensor.dtype, device=block.device)
    return made.set_(block.untyped_storage(), begin // tensor.element_size(), tensor.shape)  # type: ignore[call-overload, no-any-return]


def _power_of_two(size: int) -> int:
    """The largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)
