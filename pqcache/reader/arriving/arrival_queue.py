"""Runs what reads row groups on threads as these arrive, whichever is first, so that no thread waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from pqcache.errors import SourceChanged
from pqcache.reader.arriving.arrivals import POLL, Arrivals, Ints, Patience
from pqcache.system.fork_safe_threads import ForkSafeThreadPool, pass_on

P = ParamSpec("P")
T = TypeVar("T")
_IDLE = 0.25  # seconds between looks while nobody waits


class _Waiting(NamedTuple):
    row_group: int  # of the index
    future: Future[Any]
    job: Callable[[], Any]


class ArrivalQueue:
    """Submits jobs to ``threads``, each when the file of its row group has arrived.

    ``row_groups`` are the rows in the index of the row groups that ``submit`` counts.
    """

    def __init__(self, arrivals: Arrivals, row_groups: Ints, threads: ForkSafeThreadPool) -> None:
        self._arrivals, self._row_groups, self._threads = arrivals, row_groups, threads
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_closed = False
        self._wake = threading.Event()
        self._blocked_since: float | None = None  # the thread that uses the results
        self._arrived_last = 0.0
        self.waited_seconds = 0.0  # of that thread
        threading.Thread(target=self._watch, name="pqcache-arrivals", daemon=True).start()

    def submit(self, number: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` on a thread when row group ``number`` is there; what will never come is its error."""
        row_group = int(self._row_groups[number])
        if self._arrivals.arrived(self._row_groups[number : number + 1])[0]:
            return self._threads.submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot read after the end of an epoch")
            self._waiting.append(_Waiting(row_group, future, partial(fn, *args, **kwargs)))
        self._wake.set()
        return future

    def result(self, future: Future[T]) -> T:
        """Return the result of a job, or of what follows from jobs, and count the time that arrivals took meanwhile."""
        if future.done() or not self._waiting:
            return future.result()
        begun = self._blocked_since = time.monotonic()
        try:
            return future.result()
        finally:
            self._blocked_since = None
            waited = max(0.0, self._arrived_last - begun)
            self.waited_seconds += waited
            self._arrivals.add_waited(waited)

    def close(self) -> None:
        """Cancel the jobs whose row groups are not there."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = self._waiting, []
        self._wake.set()
        for waiting in left:
            waiting.future.cancel()

    def _watch(self) -> None:
        patience = Patience(self._arrivals)
        while not (self._is_closed or (self._arrivals.is_complete and not self._waiting)):
            began = time.monotonic()
            first = self._start_arrived(patience)
            try:
                since = self._blocked_since
                patience.look(first, None if since is None else max(since, self._arrived_last))
            except Exception as error:  # noqa: BLE001 - raised where the results are asked for
                self._fail(error, first)
            self._wake.wait(max(POLL, 4 * (time.monotonic() - began)) if first is not None else _IDLE)
            self._wake.clear()

    def _start_arrived(self, patience: Patience) -> int | None:
        """Submit what has arrived; return the first row group that has not, or None if nobody waits for any."""
        with self._lock:
            groups = np.array([waiting.row_group for waiting in self._waiting], np.int64)
            there = self._arrivals.arrived(groups) if len(groups) else np.zeros(0, np.bool_)
            started = [waiting for waiting, is_there in zip(self._waiting, there, strict=True) if is_there]
            self._waiting = [waiting for waiting, is_there in zip(self._waiting, there, strict=True) if not is_there]
            first = self._waiting[0].row_group if self._waiting else None
        if started:
            patience.end()
            self._arrived_last = time.monotonic()
        for waiting in started:
            try:
                self._threads.submit(waiting.job).add_done_callback(partial(pass_on, waiting.future))
            except RuntimeError:  # the pool is being shut down
                waiting.future.cancel()
        return first

    def _fail(self, error: Exception, row_group: int | None) -> None:
        """Give an error to the jobs of a row group; to all where it is not about one file."""
        with self._lock:
            only = isinstance(error, SourceChanged)
            failed = [waiting for waiting in self._waiting if not only or waiting.row_group == row_group]
            self._waiting = [waiting for waiting in self._waiting if only and waiting.row_group != row_group]
        for waiting in failed:
            with suppress(InvalidStateError):  # it was cancelled
                waiting.future.set_exception(error)


@contextmanager
def arrival_queue(
    arrivals: Arrivals | None, row_groups: Ints, threads: ForkSafeThreadPool
) -> Iterator[ArrivalQueue | None]:
    """Yield a queue for a dataset that is still arriving, which is closed at the end; None for any other."""
    if arrivals is None or arrivals.is_complete:
        yield None
        return
    queue = ArrivalQueue(arrivals, row_groups, threads)
    try:
        yield queue
    finally:
        queue.close()
