"""Persistent HTTP connections with a minimum speed of responses.

A server that trickles bytes counts as unavailable. The bytes are counted as they leave the socket, below http.client
and urllib3, whose reads end only with the last byte.
"""

from __future__ import annotations

import functools
import http.client
import io
import math
import select
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pqcache.errors import SourceError
from pqcache.store.drivers.remote import RemoteSource
from pqcache.store.drivers.timeouts import SpeedFloor, TooLarge

MAX_ANSWER = 1 << 30  # bytes of an answer that is taken into memory


class _Stream(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, seconds: float, most: float) -> None:
        self._raw = raw
        self._floor = SpeedFloor(seconds)
        self._most, self._count = most, 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int | None:
        began = time.monotonic()
        count: int | None = self._raw.readinto(buffer)
        if count:
            self._floor.count(count, time.monotonic() - began)
            self._count += count
            if self._count > self._most:
                raise TooLarge(f"more than {self._most:,} bytes")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


@functools.lru_cache
def response_class(seconds: float, most: float = math.inf) -> type[http.client.HTTPResponse]:
    """A class of responses that raise TooSlow, and TooLarge beyond ``most`` bytes.

    This does not apply to requests that write: a server may drip spaces while it completes an upload.
    """

    class FlooredResponse(http.client.HTTPResponse):
        def __init__(self, sock: Any, debuglevel: int = 0, method: str | None = None, url: str | None = None) -> None:
            super().__init__(sock, debuglevel, method, url)
            if method in ("GET", "HEAD"):
                self.fp = io.BufferedReader(_Stream(self.fp.detach(), seconds, most))

    return FlooredResponse


def pool_classes(classes: dict[str, Any], seconds: float, most: float = math.inf) -> dict[str, Any]:
    """urllib3's connection pools by scheme, with responses of `response_class`."""

    def limited(pool: Any) -> Any:
        members = {"response_class": response_class(seconds, most)}
        return type("Pool", (pool,), {"ConnectionCls": type("Connection", (pool.ConnectionCls,), members)})

    return {scheme: limited(pool) for scheme, pool in classes.items()}


class HttpConnections:
    """A pool of connections opened by ``make``. A thread takes one, and puts it back after use."""

    def __init__(self, make: Callable[[], http.client.HTTPConnection], timeout: float) -> None:
        self._make, self._timeout = make, timeout
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def take(self) -> http.client.HTTPConnection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connected()
            if connection.sock is not None and not _is_readable(connection.sock.fileno()):
                return connection
            connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        connection = self._make()
        connection.response_class = response_class(self._timeout)
        try:
            connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(self._timeout)
        except BaseException:
            connection.close()
            raise
        return connection

    def put_back(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """Reuse the connection if the response was read to its end, else close both."""
        if response.isclosed() and not response.will_close:
            self._idle.append(connection)
        else:
            response.close()
            connection.close()
        if self._closed:  # meanwhile, while a thread that nobody waits for was reading
            self.close()

    def close(self) -> None:
        """Close the idle connections, and those in use when they are put back."""
        self._closed = True
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread closes them too
                return
            connection.close()


class Body(Protocol):
    """The body of a response; both methods return nothing at its end, or if the connection broke."""

    def read(self, size: int, /) -> bytes: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


class HttpSource(RemoteSource):
    """A RemoteSource that receives bodies into the caller's memory, which saves a copy.

    Attributes:
        chunk: bytes received by one call; they are lost if the connection breaks meanwhile.
    """

    has_time_limit = True
    chunk = 256 << 10

    @abstractmethod
    def _opened(self, path: str, offset: int, length: int, tag: str) -> AbstractContextManager[Body]:
        """Request a range of a file, whose body is read inside the block."""

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        with self._opened(path, offset, length, tag) as body:
            while length > 0 and (chunk := body.read(min(self.chunk, length))):
                length -= len(chunk)
                yield chunk

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        if length <= 0:
            return
        have = 0
        try:
            with self.errors(path), self._opened(path, offset, length, tag) as body:
                while length > 0 and (count := body.readinto(buffer[have : have + min(self.chunk, length)])):
                    have, length = have + count, length - count
                    if have == len(buffer):
                        yield have
                        have = 0
        except SourceError:
            if have:
                yield have
            raise
        if have:
            yield have


def _is_readable(descriptor: int) -> bool:
    """Whether something arrived unexpectedly, such as the end of the connection."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
