"""Contexts whose durations are counted; each is used once."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Counters(Protocol):
    """What durations are added to."""

    def add(self, counter: int, amount: int) -> None:
        """Add nanoseconds to a counter."""


class Timer:
    """Adds the duration of its body to a counter."""

    __slots__ = ("_begun", "_counter", "_meter")

    def __init__(self, meter: Counters, counter: int) -> None:
        self._meter, self._counter = meter, counter

    def __enter__(self) -> None:
        self._begun = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        self._meter.add(self._counter, time.monotonic_ns() - self._begun)


class TimerOfMany(Timer):
    """Adds the duration so many times."""

    __slots__ = ("_times",)

    def __init__(self, meter: Counters, counter: int, times: int) -> None:
        super().__init__(meter, counter)
        self._times = times

    def __exit__(self, *error: object) -> None:
        self._meter.add(self._counter, (time.monotonic_ns() - self._begun) * self._times)


class TimerWithSpan(Timer):
    """Shows the duration as a span too, where somebody looks at spans."""

    __slots__ = ("_span",)

    def __init__(self, meter: Counters, counter: int, span: AbstractContextManager[Any]) -> None:
        super().__init__(meter, counter)
        self._span = span

    def __enter__(self) -> None:
        self._span.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._span.__exit__(*error)
