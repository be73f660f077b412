"""Calls on threads: several at once, and a pool whose process may fork, as DataLoader does to start workers.

Arrow's allocator, mimalloc, takes a lock when a thread first asks for memory, when that thread ends, and at times in
between, and does not release it in a child. A child that is forked while another thread holds the lock hangs as soon as
a thread of its own allocates. So a fork waits until no thread of these pools is running a job or ending, and they begin
no job during a fork. Both waits have a time limit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]

_MAX_WAIT = 10.0  # seconds that a fork waits for threads, and a thread for forks
_of_thread = threading.local()


class _Gate:
    """The threads that run a job, wait to begin one, or wait to fork, by the system's thread ids."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        self.forking: set[int] = set()


_gate = _Gate()
_shutdown: dict[int, threading.Event] = {}  # by thread: whether its pool is shut down
_interrupted = False  # by Ctrl-C, while a fork waited


class ForkSafeThreadPool(ThreadPoolExecutor):
    """A thread pool for jobs that use Arrow and do not wait for other threads.

    Jobs of `submit` run on ``at_once`` of the ``count`` threads (None for all), as Arrow's allocator keeps some memory
    for each thread. Those of `submit_first` run on any of them.
    """

    def __init__(self, count: int, at_once: int | None = None) -> None:
        self._is_shutdown = threading.Event()
        self._first: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._idle = max(0, count - (at_once or count))  # of those threads that run ``_first`` alone
        name, ended = "pqcache", (self._is_shutdown,)
        self._others = ThreadPoolExecutor(self._idle, name, _register, ended) if self._idle else None
        super().__init__(count - self._idle, name, _register, ended)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` on a thread; callbacks of the future are part of the job."""
        return self._submit(self._jobs, partial(fn, *args, **kwargs))

    def submit_first(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` on the next thread that is free, before the waiting jobs of `submit`."""
        return self._submit(self._first, fn)

    def submit_after(self, futures: Sequence[Future[Any]], fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` as `submit_first` does once all ``futures`` are done, so that no thread waits for them.

        It is cancelled if one of them is, or if the pool is shut down first.
        """
        result: Future[T] = Future()
        left, lock, jobs = [len(futures)], threading.Lock(), [fn]  # taken out, or futures and jobs hold each other

        def one_done(future: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                if not jobs or (left[0] and not future.cancelled()):
                    return
                job = jobs.pop()
            try:
                if not future.cancelled():
                    self.submit_first(job).add_done_callback(partial(pass_on, result))
                    return
            except RuntimeError:  # shut down
                pass
            result.cancel()

        for future in futures:
            future.add_done_callback(one_done)
        return result

    def _submit(self, queue: deque[Job], fn: Callable[[], T]) -> Future[T]:
        job: tuple[Future[T], Callable[[], T]] = Future(), fn
        queue.append(job)
        try:
            super().submit(self._run_jobs)
            if self._others is not None and queue is self._first:
                self._others.submit(self._run_jobs, True)
        except RuntimeError:  # shut down; a thread that is at work may have taken the job
            with _gate.changed:
                if job in queue:
                    queue.remove(job)
                    raise
        return job[0]

    def _run_jobs(self, only_first: bool = False) -> None:
        """Run jobs until there are none, so that no job is missed."""
        while self._run_next(only_first):
            pass

    def _run_next(self, only_first: bool) -> bool:
        """Run the next job; False if there was none."""
        gate, thread = _gate, threading.get_native_id()
        with gate.changed:
            gate.waiting.add(thread)
            gate.changed.wait_for(lambda: not gate.forking, _MAX_WAIT)
            gate.waiting.discard(thread)
            queue = self._next_queue(only_first)
            if not queue:
                return False
            future, fn = queue.popleft()
            self._idle -= only_first
            gate.running.add(thread)
        try:
            if future.set_running_or_notify_cancel():
                _run(future, fn)
            del future, fn  # and what they refer to
        finally:
            with gate.changed:
                self._idle += only_first
                gate.running.discard(thread)
                gate.changed.notify_all()
        return True

    def _next_queue(self, only_first: bool) -> deque[Job]:
        """A thread's next queue, perhaps empty: first jobs are left to idle threads that run no other jobs."""
        return self._first if only_first or len(self._first) > self._idle else self._jobs

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once the submitted jobs are done; the rest is as for ThreadPoolExecutor."""
        self._is_shutdown.set()
        shutdowns = [super().shutdown, *([self._others.shutdown] if self._others else [])]
        for shutdown in shutdowns:  # all of them at once, as a fork waits until threads that are to end have ended
            shutdown(wait=False, cancel_futures=cancel_futures)
        if cancel_futures:
            with _gate.changed:
                left = [*self._first, *self._jobs]
                self._first.clear()
                self._jobs.clear()
            for future, _ in left:
                future.cancel()
        if wait:
            for shutdown in shutdowns:
                shutdown()
        for thread in _ending():
            if not _exists(thread):
                _shutdown.pop(thread, None)


def pass_on(future: Future[Any], job: Future[Any]) -> None:
    """Give ``future`` the outcome of ``job``."""
    if job.cancelled():
        future.cancel()
    elif future.set_running_or_notify_cancel():
        error = job.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(job.result())


@contextmanager
def letting_forks_go_on() -> Iterator[None]:
    """Let forks proceed while the body waits for something; the body must not use Arrow."""
    gate, thread = _gate, threading.get_native_id()
    with gate.changed:
        is_running = thread in gate.running
        if is_running:
            gate.waiting.add(thread)
            gate.running.discard(thread)
            gate.changed.notify_all()
    try:
        yield
    finally:
        if is_running:
            with gate.changed:
                gate.changed.wait_for(lambda: not gate.forking, _MAX_WAIT)
                gate.waiting.discard(thread)
                gate.running.add(thread)


def is_shut_down() -> bool:
    """Whether this is a thread of a pool that is shut down, so that its result is not needed."""
    event = _shutdown.get(threading.get_native_id())
    return event is not None and event.is_set()


def _register(is_shutdown: threading.Event) -> None:
    _shutdown[threading.get_native_id()] = is_shutdown


def _run(future: Future[Any] | None, fn: Callable[[], Any]) -> None:
    assert future is not None
    try:
        result = fn()
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)
        future = None  # it refers to the error, which refers to this frame
    else:
        future.set_result(result)


def _ending() -> list[int]:
    known = ((thread, _shutdown.get(thread)) for thread in list(_shutdown))  # at once, as other threads begin and end
    return [thread for thread, is_shutdown in known if is_shutdown is not None and is_shutdown.is_set()]


def _exists(thread: int) -> bool:
    """Whether a thread still exists; False on systems without /proc."""
    return os.path.exists(f"/proc/self/task/{thread}")


def _before_fork() -> None:
    global _interrupted
    until = time.monotonic() + _MAX_WAIT
    _gate.forking.add(threading.get_native_id())
    while True:
        try:
            _wait_for_threads(until)
            return
        except KeyboardInterrupt:  # raised here it would be lost, and threads are still running
            _interrupted = True


def _wait_for_threads(until: float) -> None:
    with _gate.changed:
        _gate.changed.wait_for(lambda: not _gate.running - _gate.forking, max(0.0, until - time.monotonic()))
    for thread in _ending():  # it frees its memory after Python's part of it has ended
        while _exists(thread) and thread not in _gate.waiting and time.monotonic() < until:
            time.sleep(0.0001)
        if thread not in _gate.waiting:
            _shutdown.pop(thread, None)


def _after_fork() -> None:
    global _interrupted
    with _gate.changed:
        _gate.forking.discard(threading.get_native_id())
        _gate.changed.notify_all()
    delay, main = 0.01, threading.main_thread().ident
    while _interrupted:
        try:  # raise it once the fork is over; in here it would be lost
            threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT)).start()
            _interrupted = False
        except KeyboardInterrupt:  # the timer was too fast
            delay *= 2


def _in_child() -> None:
    global _gate, _interrupted
    _gate, _interrupted = _Gate(), False
    _shutdown.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def stop_with(stop: threading.Event) -> None:
    """Begin a thread of a pool that ends with ``stop``."""
    _of_thread.stop = stop


def told_to_stop() -> bool:
    """Whether this thread's result is no longer needed, because another thread of its pool has failed."""
    stop: threading.Event | None = getattr(_of_thread, "stop", None)
    return stop is not None and stop.is_set()


def in_parallel(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Run calls on threads; return their results in order.

    After an error no further calls begin and running ones stop retrying; once these have ended, the first error is
    raised.
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
