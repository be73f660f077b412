"""Retries calls to a store whose error may pass."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pqcache.errors import SourceUnavailable
from pqcache.events import OnEvent, Retried

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

_FIRST_WAIT = 0.3  # seconds at most; each further wait is up to twice as long
_LONGEST_WAIT = 30.0


class SourceTooSlow(SourceUnavailable):
    """Too few bytes a second: tried again as often as a server that sends none."""


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
    """Return what ``call`` returns; after SourceUnavailable call it again, with growing jittered waits in between.

    The error is raised when ``patience`` ends. A failure after which ``progress`` (a number that grows) has changed
    begins a new row, unless the server was too slow. ``on_event`` gets a Retried before each wait, about ``path``.
    """
    seen, idle, began, since = progress(), 0, time.monotonic(), math.inf
    failed: list[SourceUnavailable] = []
    try:
        return call()
    except SourceUnavailable as error:
        failed.append(error)  # what takes time to import is needed from here on only
    import tenacity

    from pqcache.system.parallel import told_to_stop

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
        """In short steps, so that a thread that is not needed any more ends soon."""
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
