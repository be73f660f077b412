"""Time limits for clients without one, a minimum speed of responses, and retries.

A timeout only detects servers that send nothing at all. So the rate is bytes per second spent waiting for them, as with
git's http.lowSpeedLimit and http.lowSpeedTime. The receiver's own time does not count, nor does the wait for the first
bytes, which the timeout covers.
"""

from __future__ import annotations

import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from pqcache.errors import SourceUnavailable
from pqcache.events import OnEvent, Retried

if TYPE_CHECKING:
    import tenacity


T = TypeVar("T")
FLOOR = 1000  # bytes a second
_QUEUED = 4  # batches of items that may wait to be taken
_PASS_ON_AFTER = 0.05  # seconds, after which a batch that is not full is passed on
_IDLE_SECONDS = 1.0  # after which a thread without work ends


class Stalled(TimeoutError):
    """Nothing arrived within the time limit."""


class TooSlow(OSError):
    """Fewer bytes than the minimum arrived within a timeout."""


class TooLarge(OSError):
    """A response exceeds its limit in bytes."""


class SpeedFloor:
    """Counts the bytes of one response and the seconds spent waiting for them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = False
        self._bytes, self._waited = 0, 0.0

    def count(self, size: int, waited: float) -> None:
        """Count ``size`` bytes that the receiver waited for; raise TooSlow if there were too few for ``seconds``."""
        if not self._began:
            self._began = True
            return
        self._bytes += size
        self._waited += waited
        if self._waited >= self._seconds:
            if self._bytes < FLOOR * self._waited:
                raise TooSlow(f"{self._bytes:,} bytes in {self._waited:.0f} s")
            self._bytes, self._waited = 0, 0.0


@dataclass
class _LastBatch(Generic[T]):
    items: list[T]
    error: BaseException | None


class _Thread(threading.Thread):
    """Reused for one call after another: starting a thread takes as long as a small request."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.start()

    @classmethod
    def take(cls) -> _Thread:
        with suppress(IndexError):
            return cls.idle.pop()
        return cls()

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call; the thread is idle again afterwards."""
        self._calls.put(call)

    def run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                try:
                    self.idle.remove(self)
                except ValueError:  # taken just now
                    call = self._calls.get()
                else:
                    return
            call()
            del call  # and what it refers to
            self.idle.append(self)


os.register_at_fork(after_in_child=_Thread.idle.clear)  # a child has only the thread that forked


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call with a time limit; raises Stalled after ``seconds``."""
    return next(with_time_limit(lambda: iter([call()]), seconds))


def with_time_limit(
    make: Callable[[], Iterator[T]], seconds: float, size: Callable[[T], int] | None = None, at_once: int = 1
) -> Iterator[T]:
    """Yield the items of ``make()``; raises Stalled when ``seconds`` pass without one.

    With ``size``, which returns an item's bytes, raises TooSlow below the minimum speed. ``at_once`` items are passed
    between threads together, as passing one may take as long as making it; fewer if they arrive slowly.

    ``make`` runs on a thread of its own, a few items ahead of the caller. A stalled thread is abandoned: it ends
    with its call, or with the process.
    """
    batches: SimpleQueue[list[T] | _LastBatch[T]] = SimpleQueue()
    free_slots: SimpleQueue[None] = SimpleQueue()  # a semaphore, but implemented in C
    closed = threading.Event()
    for _ in range(_QUEUED):
        free_slots.put(None)

    def produce() -> None:
        error: BaseException | None = None
        batch: list[T] = []
        since = time.monotonic()
        try:
            for item in make():
                batch.append(item)
                if len(batch) >= at_once or time.monotonic() - since > _PASS_ON_AFTER:
                    free_slots.get()
                    if closed.is_set():
                        break
                    batches.put(batch)
                    batch, since = [], time.monotonic()
        except BaseException as failure:  # noqa: BLE001  the caller raises it
            error = failure
        batches.put(_LastBatch(batch, error))

    floor = SpeedFloor(seconds)
    _Thread.take().submit(produce)
    try:
        while True:
            began = time.monotonic()
            try:
                batch = batches.get(timeout=seconds)
            except queue.Empty:
                raise Stalled from None
            if isinstance(batch, _LastBatch):
                yield from batch.items
                if batch.error is not None:
                    raise batch.error
                return
            if size is not None:
                floor.count(sum(map(size, batch)), time.monotonic() - began)
            free_slots.put(None)
            yield from batch
    finally:
        closed.set()
        free_slots.put(None)


_FIRST_WAIT = 0.3  # seconds at most; each further wait is up to twice as long
_LONGEST_WAIT = 30.0


class SourceTooSlow(SourceUnavailable):
    """Too few bytes per second; retried as often as a server that sends none."""


class Patience(NamedTuple):
    """When to give up: after a number of failures in a row, or a number of seconds since the first began."""

    retries: float = 4
    seconds: float = math.inf


FEW_TRIES = Patience()
PATIENT = Patience(math.inf, 600.0)  # of a sync, which may be alone at night
FIRST_CONTACT = Patience(4, 5.0)  # with a server that may never have existed, while somebody waits for the answer


def patience_of_run(retries: int | None, seconds: float | None) -> Patience:
    if retries is None and seconds is None:
        return PATIENT
    return Patience(math.inf if retries is None else retries, 600.0 if seconds is None else seconds)


def with_retries(
    call: Callable[[], T],
    path: str,
    patience: Patience,
    on_event: OnEvent,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """Call until there is no SourceUnavailable or ``patience`` ends, with growing jittered waits in between.

    Failures count from zero again when ``progress`` (a number that grows) has changed, unless the server was too slow.
    ``on_event`` gets a Retried about ``path`` before each wait.
    """
    seen, idle, began, since = progress(), 0, time.monotonic(), math.inf
    failed: list[SourceUnavailable] = []
    try:
        return call()
    except SourceUnavailable as error:
        failed.append(error)  # most runs never get here, and need not import tenacity
    import tenacity

    from pqcache.system.threads import told_to_stop

    def again() -> T:
        nonlocal began
        if failed:
            raise failed.pop()
        began = time.monotonic()
        return call()

    def count(state: tenacity.RetryCallState) -> None:
        nonlocal seen, idle, since
        before, seen = seen, progress()
        slow = state.outcome is not None and isinstance(state.outcome.exception(), SourceTooSlow)
        got_on = seen > before and not slow
        idle = 0 if got_on else idle + 1
        since = time.monotonic() if got_on else min(since, began)

    def left() -> float:
        return since + patience.seconds - time.monotonic()

    def wait(_: tenacity.RetryCallState) -> float:
        longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(max(idle - 1, 0), 30))
        return max(0.0, min(random.uniform(longest / 2, longest), left()))

    def sleep(seconds: float) -> None:
        """Sleep in short steps, so that an abandoned thread ends soon."""
        while seconds > 0 and not told_to_stop():
            time.sleep(min(seconds, 0.2))
            seconds -= 0.2

    def report(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        seconds = state.next_action.sleep if state.next_action else 0.0
        on_event(Retried(path, str(error), round(seconds, 1)))

    return tenacity.Retrying(
        after=count,
        stop=lambda _: idle > patience.retries or left() <= 0 or told_to_stop(),
        wait=wait,
        sleep=sleep,
        retry=tenacity.retry_if_exception_type(SourceUnavailable),
        before_sleep=report,
        reraise=True,
    )(again)
