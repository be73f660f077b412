"""Prefetch: the batches of a loader on a device, each copied while the trainer works on the one before."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from pqcache.errors import UsageError
from pqcache.torch.device_copies import CopyStream, DeviceBlock, DeviceCopier, DeviceStream
from pqcache.torch.loader import Loader, Timed
from pqcache.torch.ragged import to_device
from pqcache.units import parse_size

log = logging.getLogger("pqcache.torch")
_END = object()
_THREAD = "pqcache-prefetch"


class Prefetch:
    """The batches of a loader on a device, copied there one batch ahead and beside the work of the trainer.

    A batch is packed into pinned memory, which is reused, and copied on a stream of its own with one call. When the
    trainer asks for a batch, the next one is fetched from the loader, and the trainer gets the one that was copied
    meanwhile; a thread packs the next one while the trainer works. The device has up to three batches then. A loader
    may write into the memory of a batch once it is asked for the next one; nobody else may while the loop runs.

    >>> from pqcache.torch import Loader, ParquetDataset, Prefetch
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> loader = Prefetch(Loader(ParquetDataset("cache/shop", columns=["id", "price"], batch_size=256)), device)
    >>> for batch in loader:
    ...     state = loader.state_dict()
    >>> batch["price"].device.type == device, len(loader), state["batch"]
    (True, 3, 3)

    ``loader`` is a Loader, or another iterable of batches: a DataLoader, a StatefulDataLoader, a dataset. Batches are
    those of the loader, also their classes: tensors are moved wherever they are in a Batch, a Ragged, dicts, lists,
    tuples and dataclasses. Other objects are moved by their own ``to``, where they have it, while the trainer waits.

    ``device``  where batches are moved to; for "cpu" they are passed on as they are. Devices other than those of CUDA
                and ROCm have no copies in advance: batches are moved when they are asked for
    ``memory``  the most that is pinned, taken as batches need it, for two batches. A larger one is copied without it,
                with a warning. Leave out ``pin_memory=True`` of the loader, whose memory would come on top

    ``state_dict`` and ``load_state_dict`` are the loader's, of the place after the last batch that the trainer was
    given. So call them here: those of a loader other than pqcache's own count the batch ahead. So is
    everything else, like ``epoch`` and ``dataset``. An error of the loader is raised in its place, after the
    batches before it. A device that torch does not find, and a Loader with a ``device`` of its own, raise UsageError.
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
            return self.loader.iterate_through(self._ahead)
        return self._of_other_loader()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that the trainer was given."""
        if isinstance(self._state, Exception):
            raise self._state
        if self._state is not None:
            return dict(self._state)
        if not hasattr(self.loader, "state_dict"):
            reason = f"a {type(self.loader).__name__} does not keep its place"
            raise UsageError("Prefetch.state_dict()", reason, "use pqcache.torch.Loader")
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the loader go on where ``state`` was taken."""
        self._state = None
        self.loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Set the loader's epoch."""
        self._state = None
        self.loader.set_epoch(epoch)

    def _of_other_loader(self) -> Generator[Any]:
        """Yield the batches of a loader that does not count what the trainer is given: its state is kept for each."""
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
        """Yield the batches, each after the copy of the next one has begun; the time of copies is ``timed``."""
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
    """Return the state of a loader, or why it has none, for whoever asks."""
    try:
        state: Mapping[str, Any] = loader.state_dict()
    except Exception as error:  # noqa: BLE001 - raised where it is asked for
        return error
    return state


def _copied_ahead(batches: Iterator[Any], copier: DeviceCopier, timed: Timed) -> Generator[Any]:
    """Yield the batches that a copier makes, each while a thread begins with the next one; an error comes in its turn.

    A batch has been packed when the loader is asked for the next one, as a loader may write that into the same memory.
    The thread is given a batch last: it needs the interpreter's lock, for which the trainer would wait here.
    """
    with _Packing(copier) as packing:
        is_more, has_begun, failure = True, False, None
        while is_more:
            ready = []  # a local variable would keep what the trainer is done with
            if has_begun:
                with timed():
                    ready.append(copier.finish(*packing.take()))
            try:
                batch = next(batches, _END)
                is_more = batch is not _END
            except Exception as error:  # noqa: BLE001 - raised below, after the batch before it
                is_more, failure, batch = False, error, _END
            if is_more:
                packing.give(batch)
                has_begun = True
            del batch
            if ready:
                yield ready.pop()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # which refers to this frame


class _Packing:
    """A thread that packs batches and begins their copies, one after the other.

    In the trainer's thread that would be time in which the device has nothing to do, as soon as a program waits for a
    result: what another process made is not in the cache of this processor, and takes longer to pack than to copy.
    """

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._begun: SimpleQueue[Any] = SimpleQueue()  # what the copier returned, or its error
        self._process = os.getpid()
        # a daemon, which the program's end stops: it does not wait for other threads of an iteration that is not closed
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._stop = partial(_stop, self._given, self._thread)

    def __enter__(self) -> _Packing:
        self._thread.start()
        atexit.register(self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread().name == _THREAD:  # it collects an iteration that nobody refers to
            self._given.put(_END)
            return
        atexit.unregister(self._stop)
        self._stop()

    def give(self, batch: Any) -> None:
        """Let the thread begin with a batch."""
        self._given.put(batch)

    def take(self) -> tuple[Any, DeviceBlock | None]:
        """Return the next batch that was begun, for the copier to finish; raise what went wrong with it."""
        if os.getpid() != self._process:  # which has no such thread
            raise UsageError("Prefetch", "its iteration was begun before a fork", "iterate anew in the child process")
        begun = self._begun.get()
        try:
            if isinstance(begun, BaseException):
                raise begun
            found: tuple[Any, DeviceBlock | None] = begun
            return found
        finally:
            del begun  # an error refers to this frame

    def _run(self) -> None:
        while (batch := self._given.get()) is not _END:
            try:
                self._begun.put(self._copier.begin(batch))
            except BaseException as error:  # noqa: BLE001 - raised where the batch is taken
                self._begun.put(error)
            del batch


def _stop(given: SimpleQueue[Any], thread: threading.Thread) -> None:
    """End the thread of a `_Packing`; one that is in torch's code when Python ends would abort the process."""
    given.put(_END)
    thread.join()


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return what copies to a device beside its work; None for a device of which that is not known to be safe."""
    return DeviceStream(device) if device.type == "cuda" else None


def _found(device: torch.device | str) -> torch.device:
    """Return a device; UsageError if torch does not find it here."""
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
