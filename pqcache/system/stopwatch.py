"""Seconds that a run takes."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start, to the millisecond."""
        return round(time.monotonic() - self._start, 3)
