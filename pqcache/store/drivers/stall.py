"""A time limit for clients that have none: what comes from a blocking iterator, or an error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_AHEAD = 8  # items that may wait to be taken


class Stalled(Exception):
    """Nothing came within the time limit."""


class _End(Generic[T]):
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def watched(make: Callable[[], Iterator[T]], seconds: float) -> Iterator[T]:
    """Yield what ``make()`` yields; raise Stalled when ``seconds`` pass without anything.

    ``make`` runs in a thread of its own, a few items ahead of whoever takes them. A stalled thread is left
    behind: it ends with its call, or with the process.
    """
    items: queue.Queue[T | _End[T]] = queue.Queue(_AHEAD)
    left = threading.Event()

    def put(item: T | _End[T]) -> bool:
        while not left.is_set():
            try:
                items.put(item, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in make():
                if not put(item):
                    return
        except BaseException as failure:  # noqa: BLE001  handed to the taker, which raises it
            error = failure
        put(_End(error))

    threading.Thread(target=produce, daemon=True).start()
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
            yield item
    finally:
        left.set()
