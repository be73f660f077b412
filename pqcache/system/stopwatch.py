"""Measures the seconds that a run takes."""

from __future__ import annotations

import time


class Stopwatch:
    """Counts the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start, rounded to milliseconds."""
        return round(time.monotonic() - self._start, 3)
