"""Accepts connections and answers their requests, each connection on a thread of its own.

The threads wait for their clients and send files, both without the interpreter's lock. Their number is limited; who
comes when there are that many is asked to come again. A process may fork beside them: the child closes its copies of
the sockets, as clients would wait for a listener that nobody accepts from.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from pqcache.store.drivers.time_limits import TooSlow
from pqcache.store.serve.answers import Answers
from pqcache.store.serve.http_messages import HttpAnswer, HttpRequest, RequestRefused, parse_request, refusal
from pqcache.store.serve.sending import end_politely, receive_head, send_answer

CONNECTIONS = 256
_NO_TOKEN = 401
_TICK = 1.0  # seconds between looks at what has expired
_REFUSED_KEPT = 64  # sockets of refused clients that are not closed at once, so that they get the answer
_END_SECONDS = 2.0  # for the threads to end

log = logging.getLogger("pqcache.serve")


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """What clients may take of a server.

    Attributes:
        connections: how many there may be at once.
        head_seconds: from the first byte of a request to the end of its headers, and to the first request.
        idle_seconds: between two requests of a connection.
        stall_seconds: in which a client that is sent a file takes nothing, or fewer than 1,000 bytes a second.
        lease_seconds: that a snapshot is kept after the last request about it.
    """

    connections: int = CONNECTIONS
    head_seconds: float = 10.0
    idle_seconds: float = 60.0
    stall_seconds: float = 30.0
    lease_seconds: float = 600.0


@dataclass
class Counts:
    """How many requests were answered, and the bytes of their bodies."""

    requests: int = 0
    bytes: int = 0


class Connections:
    """The connections to one listening socket, until ``close``."""

    def __init__(
        self, listener: socket.socket, answers: Answers, limits: ServeLimits, tick: Callable[[], None]
    ) -> None:
        self.counts = Counts()
        self._listener, self._answers, self._limits, self._tick = listener, answers, limits, tick
        self._open: dict[socket.socket, threading.Thread] = {}
        self._admitted: set[socket.socket] = set()  # those of clients that have shown the token
        self._refused: list[tuple[float, socket.socket]] = []
        self._lock = threading.Lock()
        self._ending = False
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        _all.add(self)
        self._thread = threading.Thread(target=self._run, name="pqcache-serve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when ``close`` was called; raise what ended the server otherwise."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End all connections; a second call does nothing."""
        if self._ending:
            return
        self._ending = True
        self._wake.send(b"x")
        self._thread.join()
        with self._lock:
            left = dict(self._open)
        for client in left:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_SECONDS
        for thread in left.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close the sockets of this process; a parent's copies remain as they are."""
        _all.discard(self)
        for opened in (self._listener, self._wake, self._woken, *self._open, *(each for _, each in self._refused)):
            opened.close()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for each in (self._listener, self._woken):
                    selector.register(each, selectors.EVENT_READ)
                while not self._ending:
                    ready = [key.fileobj for key, _ in selector.select(_TICK)]
                    self._close_refused()
                    self._tick()
                    if self._listener in ready:
                        self._accept()
        except BaseException as error:  # noqa: BLE001  wait() raises it
            self._failure = error
        finally:
            self._ended.set()

    def _accept(self) -> None:
        try:
            client, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # too many open files, as a rule: those of ended connections are closed soon
            log.debug("no connection can be accepted: %s", error)
            time.sleep(0.1)
            return
        thread = threading.Thread(target=self._serve, args=(client, address[0]), daemon=True)
        with self._lock:
            is_free = len(self._open) < self._limits.connections or self._drop_stranger()
            if is_free:
                self._open[client] = thread
        try:
            if is_free:
                thread.start()
                return
        except RuntimeError as error:  # the system has no more threads
            log.debug("no thread can be started: %s", error)
            del self._open[client]
        self._refuse(client)

    def _drop_stranger(self) -> bool:
        """End the oldest connection that has not shown the token yet, so that nobody without it can take them all."""
        stranger = next((client for client in self._open if client not in self._admitted), None)
        if stranger is None:
            return False
        del self._open[stranger]
        with suppress(OSError):
            stranger.shutdown(socket.SHUT_RDWR)
        return True

    def _refuse(self, client: socket.socket) -> None:
        """Ask a client to come again; it is sent what fits into the socket's buffer, and never waited for."""
        answer = refusal(RequestRefused(503, "there are too many connections, try again", {"Retry-After": "5"}))
        with suppress(OSError):
            client.setblocking(False)
            client.send(answer.head(is_last=True) + answer.body)
            client.shutdown(socket.SHUT_WR)
        self._refused.append((time.monotonic() + _TICK, client))
        self._close_refused()

    def _close_refused(self) -> None:
        now = time.monotonic()
        while self._refused and (self._refused[0][0] < now or len(self._refused) > _REFUSED_KEPT):
            self._refused.pop(0)[1].close()

    def _serve(self, client: socket.socket, address: str) -> None:
        """Answer the requests of one connection, one after the other."""
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received, idle = b"", self._limits.head_seconds
            while not self._ending:
                try:
                    head, received = receive_head(client, received, idle, self._limits.head_seconds)
                    if head is None:
                        return
                    is_last = self._answer_one(client, address, parse_request(head))
                except RequestRefused as refused:
                    answer, is_last = refusal(refused), True
                    log.debug("%s: %d %s", address, refused.status, refused.reason)
                    send_answer(client, answer, answer.head(is_last), self._limits.stall_seconds)
                if is_last:
                    end_politely(client)
                    return
                idle = self._limits.idle_seconds
        except OSError as error:
            log.debug("%s: ended by %s", address, error)
        except Exception:
            log.debug("%s: ended", address, exc_info=True)
        finally:
            with self._lock:
                self._open.pop(client, None)
                self._admitted.discard(client)
                client.close()

    def _answer_one(self, client: socket.socket, address: str, request: HttpRequest) -> bool:
        """Answer a request; return whether the connection ends then."""
        with ExitStack() as stack:
            try:
                self._answers.check_client(request)
                with self._lock:
                    self._admitted.add(client)
                answer = self._answers.answer(request, stack)
            except RequestRefused as refused:
                answer = refusal(refused)
            is_last = request.is_last or self._ending or answer.status == _NO_TOKEN
            head = answer.head(is_last)
            if request.method == "HEAD":
                answer = HttpAnswer(status=answer.status)
            try:
                send_answer(client, answer, head, self._limits.stall_seconds)
            except TooSlow as slow:
                log.debug("%s: %s is taken too slowly: %s", address, request.target, slow)
                raise
            with self._lock:
                self.counts.requests += 1
                self.counts.bytes += answer.length
            log.debug("%s: %s %s: %d, %d bytes", address, request.method, request.target, answer.status, answer.length)
        return is_last


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _in_child() -> None:
    for connections in list(_all):
        connections.close_sockets()


os.register_at_fork(after_in_child=_in_child)
