"""Receives the heads of requests and sends answers on a socket, never waiting for a client without a limit."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress

from pqcache.store.drivers.time_limits import SpeedFloor
from pqcache.store.serve.http_messages import MAX_HEAD, FileRange, HttpAnswer, RequestRefused

_AT_ONCE = 1 << 24  # bytes that one call sends at most, so that the server can end in between
_MORE = getattr(socket, "MSG_MORE", 0)  # the head goes out with the first bytes of the body
_END = b"\r\n\r\n"
_LINGER_SECONDS = 1.0


def receive_head(
    client: socket.socket, received: bytes, idle_seconds: float, head_seconds: float
) -> tuple[bytes | None, bytes]:
    """Return the next request's head, None where the client has ended, and what was received after it.

    ``idle_seconds`` is the time to its first byte, which raises TimeoutError, ``head_seconds`` that from there to its
    end, which raises RequestRefused.
    """
    deadline = time.monotonic() + (head_seconds if received else idle_seconds)
    while _END not in received:
        if len(received) > MAX_HEAD:
            raise RequestRefused(431, f"a request has more than {MAX_HEAD:,} bytes")
        client.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = client.recv(MAX_HEAD)
        except TimeoutError:
            if not received:
                raise
            raise RequestRefused(408, "the request did not come in time") from None
        if not data:
            return None, b""
        if not received:
            deadline = time.monotonic() + head_seconds
        received += data
    head, _, rest = received.partition(_END)
    if len(head) > MAX_HEAD:
        raise RequestRefused(431, f"a request has more than {MAX_HEAD:,} bytes")
    return head, rest


def send_answer(client: socket.socket, answer: HttpAnswer, head: bytes, stall_seconds: float) -> None:
    """Send an answer, without its body where that is empty or not asked for; a client that stalls raises OSError."""
    client.settimeout(stall_seconds)
    if answer.file is None:
        client.sendall(head + answer.body)
        return
    client.sendall(head, _MORE)
    _send_file(client, answer.file, stall_seconds)


def _send_file(client: socket.socket, part: FileRange, stall_seconds: float) -> None:
    poll, floor, waited = select.poll(), SpeedFloor(stall_seconds), 0.0
    poll.register(client, select.POLLOUT)
    offset, left = part.offset, part.length
    while left:
        try:
            sent = os.sendfile(client.fileno(), part.descriptor, offset, min(left, _AT_ONCE))
        except BlockingIOError:
            began = time.monotonic()
            if not poll.poll(stall_seconds * 1000):
                raise TimeoutError("the client takes nothing") from None
            waited += time.monotonic() - began
            continue
        if not sent:
            raise OSError("the file is shorter now")
        offset, left = offset + sent, left - sent
        floor.count(sent, waited)
        waited = 0.0


def end_politely(client: socket.socket) -> None:
    """Wait a moment for the client to end: closed while it still sends, it would lose the answer."""
    deadline = time.monotonic() + _LINGER_SECONDS
    with suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            client.settimeout(left)
            if not client.recv(MAX_HEAD):
                return
