"""Waits for what another thread or process does in a moment."""

import time
from collections.abc import Callable


def becomes_true(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Ask until ``condition()`` is true, for at most ``seconds``; return what it was last."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when ``condition()`` is true, or fail."""
    assert becomes_true(condition)
