"""A time limit for clients that have none: what comes from a blocking iterator, or an error."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")
_AHEAD = 4  # items that may wait to be taken
_IDLE = 1.0  # seconds after which a thread without work ends


class Stalled(Exception):
    """Nothing came within the time limit."""


class _End(Generic[T]):
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Thread(threading.Thread):
    """A thread that makes calls for others, one after the other: to start one takes as long as asking for a file."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.start()

    @classmethod
    def take(cls) -> _Thread:
        """Return a thread that has nothing to do."""
        with suppress(IndexError):
            return cls.idle.pop()
        return cls()

    def call(self, what: Callable[[], None]) -> None:
        """Have it make a call; then it is free for others."""
        self._calls.put(what)

    def run(self) -> None:
        while True:
            try:
                what = self._calls.get(timeout=_IDLE)
            except queue.Empty:
                try:
                    self.idle.remove(self)
                except ValueError:  # taken just now
                    what = self._calls.get()
                else:
                    return
            what()
            del what
            self.idle.append(self)


os.register_at_fork(after_in_child=_Thread.idle.clear)  # a child has only the thread that forked


def with_time_limit(make: Callable[[], Iterator[T]], seconds: float) -> Iterator[T]:
    """Yield what ``make()`` yields; raise Stalled when ``seconds`` pass without anything.

    ``make`` runs in a thread of its own, a few items ahead of whoever takes them. A stalled thread is left
    behind: it ends with its call, or with the process.
    """
    items: SimpleQueue[T | _End[T]] = SimpleQueue()
    room: SimpleQueue[None] = SimpleQueue()  # as a semaphore, but in C
    left = threading.Event()
    for _ in range(_AHEAD):
        room.put(None)

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in make():
                room.get()
                if left.is_set():
                    break
                items.put(item)
        except BaseException as failure:  # noqa: BLE001  handed to the taker, which raises it
            error = failure
        items.put(_End(error))

    _Thread.take().call(produce)
    try:
        while True:
            try:
                item = items.get(timeout=seconds)
            except queue.Empty:
                raise Stalled from None
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            room.put(None)
            yield item
    finally:
        left.set()
        room.put(None)
