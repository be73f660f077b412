"""Runs several calls at once, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_of_thread = threading.local()


def stop_with(stop: threading.Event) -> None:
    """Begin a thread of a pool that ``stop`` ends."""
    _of_thread.stop = stop


def told_to_stop() -> bool:
    """Return whether nobody wants any more what this thread is doing, because another one of its pool has failed."""
    stop: threading.Event | None = getattr(_of_thread, "stop", None)
    return stop is not None and stop.is_set()


def in_parallel(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Return what each call returns, in order.

    The first error is raised once all calls that had begun have ended, which retry no more; the others are not begun.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(threads, initializer=stop_with, initargs=(stop,)) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
