"""Threads beside which a process may fork, as DataLoader does to start its workers.

Arrow's allocator, mimalloc, takes a lock where a thread first asks it for memory, where that thread ends, and now and
then between, and does nothing about forks: a child that is forked while another thread holds the lock never gets it,
and hangs as soon as a thread of its own reads. So a fork waits until none of these threads is at work or ending.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 10.0  # seconds that a fork waits at most


class _Gate:
    """Which threads are at work, and whether others may begin."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.working: set[int] = set()
        self.forks = 0  # that wait or go on


_gate = _Gate()
_ended: dict[int, threading.Event] = {}  # by the system's number of a thread: whether its pool has ended


class Threads(ThreadPoolExecutor):
    """A pool of threads for jobs that use Arrow and wait for nobody."""

    def __init__(self, count: int) -> None:
        self._end = threading.Event()
        super().__init__(count, "pqcache", initializer=_begin, initargs=(self._end,))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call ``fn``."""
        return super().submit(_at_work, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end."""
        self._end.set()
        super().shutdown(wait, cancel_futures=cancel_futures)
        for thread in _ending():
            if not _exists(thread):
                _ended.pop(thread, None)


def _begin(ended: threading.Event) -> None:
    _ended[threading.get_native_id()] = ended


def _at_work(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    gate, thread = _gate, threading.get_ident()
    with gate.changed:
        gate.changed.wait_for(lambda: not gate.forks)
        gate.working.add(thread)
    try:
        return fn(*args, **kwargs)
    finally:
        with gate.changed:
            gate.working.discard(thread)
            gate.changed.notify_all()


def _ending() -> list[int]:
    return [thread for thread, ended in list(_ended.items()) if ended.is_set()]


def _exists(thread: int) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")


def _before_fork() -> None:
    until = time.monotonic() + _PATIENCE
    me = threading.get_ident()
    with _gate.changed:
        _gate.forks += 1
        _gate.changed.wait_for(lambda: not _gate.working - {me}, _PATIENCE)
    for thread in _ending():  # it gives its memory back after Python has forgotten it
        while _exists(thread) and time.monotonic() < until:
            time.sleep(0.0001)


def _after_fork() -> None:
    with _gate.changed:
        _gate.forks -= 1
        _gate.changed.notify_all()


def _in_child() -> None:
    global _gate
    _gate = _Gate()
    _ended.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
