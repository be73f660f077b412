"""Threads beside which a process may fork, as DataLoader does to start its workers.

Arrow's allocator, mimalloc, takes a lock where a thread first asks it for memory, where that thread ends, and now and
then between, and does nothing about forks: a child that is forked while another thread holds the lock never gets it,
and hangs as soon as a thread of its own reads. So a fork waits until none of these threads is at work or ending, and
they wait for the fork. Neither waits for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 10.0  # seconds that a fork waits for threads, and a thread for forks, at most


class _Gate:
    """Which threads are at work, which stand before it, and which wait to fork; all by the system's numbers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.working: set[int] = set()
        self.standing: set[int] = set()
        self.forking: set[int] = set()


_gate = _Gate()
_ended: dict[int, threading.Event] = {}  # by thread: whether its pool has ended
_interrupted = False  # while a fork waited


class ForkSafeThreadPool(ThreadPoolExecutor):
    """A pool of threads for jobs that use Arrow and wait for nobody."""

    def __init__(self, count: int) -> None:
        self._end = threading.Event()
        super().__init__(count, "pqcache", initializer=_begin, initargs=(self._end,))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call ``fn``, and then what was added to the future to be called."""
        future: Future[T] = Future()
        super().submit(_at_work, future, partial(fn, *args, **kwargs)).add_done_callback(
            lambda job: future.cancel() if job.cancelled() else None
        )
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end."""
        self._end.set()
        super().shutdown(wait, cancel_futures=cancel_futures)
        for thread in _ending():
            if not _exists(thread):
                _ended.pop(thread, None)


def _begin(ended: threading.Event) -> None:
    _ended[threading.get_native_id()] = ended


def _at_work(future: Future[Any], fn: Callable[[], Any]) -> None:
    gate, thread = _gate, threading.get_native_id()
    with gate.changed:
        gate.standing.add(thread)
        gate.changed.wait_for(lambda: not gate.forking, _PATIENCE)
        gate.standing.discard(thread)
        gate.working.add(thread)
    try:
        if future.set_running_or_notify_cancel():
            _run(future, fn)
        del future, fn  # and all that they hold
    finally:
        with gate.changed:
            gate.working.discard(thread)
            gate.changed.notify_all()


def _run(future: Future[Any] | None, fn: Callable[[], Any]) -> None:
    assert future is not None
    try:
        result = fn()
    except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
        future.set_exception(error)
        future = None  # which has the error, which has this frame
    else:
        future.set_result(result)


def _ending() -> list[int]:
    return [thread for thread, ended in list(_ended.items()) if ended.is_set()]


def _exists(thread: int) -> bool:
    """Return whether the system still has a thread; False where it does not tell."""
    return os.path.exists(f"/proc/self/task/{thread}")


def _before_fork() -> None:
    global _interrupted
    until = time.monotonic() + _PATIENCE
    _gate.forking.add(threading.get_native_id())
    while True:
        try:
            _wait_for_threads(until)
            return
        except KeyboardInterrupt:  # nobody would see it here, and the threads are still at work
            _interrupted = True


def _wait_for_threads(until: float) -> None:
    with _gate.changed:
        _gate.changed.wait_for(lambda: not _gate.working - _gate.forking, max(0.0, until - time.monotonic()))
    for thread in _ending():  # it gives its memory back after Python has forgotten it
        while _exists(thread) and thread not in _gate.standing and time.monotonic() < until:
            time.sleep(0.0001)
        if thread not in _gate.standing:
            _ended.pop(thread, None)


def _after_fork() -> None:
    global _interrupted
    with _gate.changed:
        _gate.forking.discard(threading.get_native_id())
        _gate.changed.notify_all()
    if _interrupted:
        _interrupted = False
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()  # once the fork is over


def _in_child() -> None:
    global _gate, _interrupted
    _gate, _interrupted = _Gate(), False
    _ended.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
