"""Retries calls to a store whose error may pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pqcache.errors import SourceUnavailable
from pqcache.events import OnEvent, Retried

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

RETRIES = 4
_FIRST_WAIT = 0.3  # seconds at most; each further wait may be twice as long


class SourceTooSlow(SourceUnavailable):
    """A server sends too few bytes a second: it is tried again as often as one that sends none."""


def with_retries(
    call: Callable[[], T],
    path: str,
    retries: int,
    on_event: OnEvent,
    progress: Callable[[], int] = lambda: 0,
    within: float = math.inf,
) -> T:
    """Return what ``call`` returns; after SourceUnavailable call it again, with growing jittered waits in between.

    The error is raised after ``retries`` tries in a row during which ``progress`` (a number that grows) did not change
    or the server was too slow, or when ``within`` seconds have passed. ``on_event`` gets a Retried before each wait,
    about ``path``.
    """
    began, seen, idle = time.monotonic(), progress(), 0
    failed: list[SourceUnavailable] = []
    try:
        return call()
    except SourceUnavailable as error:
        failed.append(error)  # tenacity, which takes time to import, is needed from here on only
    import tenacity

    def again() -> T:
        if failed:
            raise failed.pop()
        return call()

    def is_enough(state: tenacity.RetryCallState) -> bool:
        nonlocal seen, idle
        before, seen = seen, progress()
        slow = state.outcome is not None and isinstance(state.outcome.exception(), SourceTooSlow)
        idle = 0 if seen > before and not slow else idle + 1
        return idle > retries or time.monotonic() - began > within

    def report(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0.0
        on_event(Retried(path, str(error), round(wait, 1)))

    return tenacity.Retrying(
        stop=is_enough,
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT, max=20),
        retry=tenacity.retry_if_exception_type(SourceUnavailable),
        before_sleep=report,
        reraise=True,
    )(again)
