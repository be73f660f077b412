"""HTTP connections whose answers have a floor of speed: a server that drips counts as unavailable.

The bytes are counted where they leave the socket, below all that http.client and urllib3 do with them: a read of
these libraries ends only when it has all bytes it was asked for.
"""

from __future__ import annotations

import functools
import http.client
import io
import time
from typing import Any

from pqcache.store.drivers.time_limits import SpeedFloor

MAX_ANSWER = 1 << 30  # bytes of an answer that is taken into memory


class _Stream(io.RawIOBase):
    """The bytes of a socket's answer, counted."""

    def __init__(self, raw: io.RawIOBase, seconds: float) -> None:
        self._raw = raw
        self._floor = SpeedFloor(seconds)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int | None:
        began = time.monotonic()
        count: int | None = self._raw.readinto(buffer)
        if count:
            self._floor.count(count, time.monotonic() - began)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


@functools.lru_cache
def response_class(seconds: float) -> type[http.client.HTTPResponse]:
    """Return a class of responses that raise TooSlow.

    Answers to requests that write are excepted: a server may drip spaces while it completes an upload.
    """

    class FlooredResponse(http.client.HTTPResponse):
        def __init__(self, sock: Any, debuglevel: int = 0, method: str | None = None, url: str | None = None) -> None:
            super().__init__(sock, debuglevel, method, url)
            if method in ("GET", "HEAD"):
                self.fp = io.BufferedReader(_Stream(self.fp.detach(), seconds))

    return FlooredResponse


def pool_classes(classes: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the connection pools of urllib3, by scheme, as ones whose responses raise TooSlow."""
    return {scheme: _pool_class(pool, seconds) for scheme, pool in classes.items()}


def _pool_class(pool: Any, seconds: float) -> Any:
    connection = type("Connection", (pool.ConnectionCls,), {"response_class": response_class(seconds)})
    return type("Pool", (pool,), {"ConnectionCls": connection})
