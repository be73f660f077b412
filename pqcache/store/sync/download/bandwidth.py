"""A limit for the bytes that all threads of a run download together in a second, also by the time of day."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import datetime

from pqcache.errors import UsageError
from pqcache.units import parse_size

OFF = "off"
_SLICE = 1.0  # seconds: after which a thread that waits looks at the timetable again
_ENTRY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d),(\S+)")


class BandwidthLimit:
    """One token bucket for all threads: each waits, after it has received bytes, until their time has passed.

    A connection is slowed by not being read; a wait is no stall of the server.
    """

    def __init__(
        self,
        text: str | int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._timetable = parse_timetable(text)
        self._clock, self._sleep, self._now = clock, sleep, now
        self._lock = threading.Lock()
        self._free = -float("inf")  # when all bytes that were received are paid for

    def rate(self) -> int | None:
        """Bytes a second that are allowed now, by local time; None for any number."""
        moment = self._now()
        minute = moment.hour * 60 + moment.minute
        current = self._timetable[-1][1]  # from the day before
        for begins, rate in self._timetable:
            if begins <= minute:
                current = rate
        return current

    def take(self, amount: int) -> None:
        """Wait until ``amount`` received bytes are within the limit."""
        with self._lock:
            rate = self.rate()
            if rate is None:
                return
            due = self._free = max(self._free, self._clock()) + amount / rate
        while (left := due - self._clock()) > 0:
            self._sleep(min(left, _SLICE))
            if left > _SLICE and self.rate() != rate:  # the next bytes pay by the new rate, from now on
                with self._lock:
                    self._free = min(self._free, self._clock())
                return


def parse_timetable(text: str | int) -> list[tuple[int, int | None]]:
    """Return the limits of a day: minutes since midnight from which on each holds, and bytes a second, None for any.

    >>> parse_timetable("100MB")
    [(0, 104857600)]
    >>> parse_timetable("08:00,10M 19:00,off")
    [(480, 10485760), (1140, None)]
    """
    words = str(text).split()
    if len(words) == 1 and ":" not in words[0]:
        return [(0, _rate(words[0]))]
    found = {}
    for word in words:
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise _error(text)
        found[int(match[1]) * 60 + int(match[2])] = _rate(match[3])
    if not found:
        raise _error(text)
    return sorted(found.items())


def _rate(text: str) -> int | None:
    if text == OFF:
        return None
    try:
        rate = parse_size(text)
    except UsageError:
        raise _error(text) from None
    if rate < 1:
        raise UsageError(f"--bwlimit {text}", "lets nothing through", f"write a size, or '{OFF}' for no limit")
    return rate


def _error(text: str | int) -> UsageError:
    return UsageError(
        f"--bwlimit {text!r}", "not bytes a second", "write it like 100MB, or by the time of day: '08:00,10M 19:00,off'"
    )
