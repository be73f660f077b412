"""Servers of caches on 127.0.0.1 for tests, and requests to them as no client of ours sends them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pqcache.store.serve import CacheServer

TOKEN = "f00dfeed" * 4


@contextmanager
def served(*caches: Path, token: str = TOKEN, port: int = 0, **limits: Any) -> Iterator[CacheServer]:
    """Serve caches, on a free port if none is given."""
    with CacheServer(caches, ("127.0.0.1", port), token, **limits) as server:
        yield server


@dataclass(frozen=True)
class RawAnswer:
    """An answer as it came: all that the server sent until it ended the connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """What the server says is wrong."""
        reason: str = json.loads(self.body)["error"]
        return reason


def connect(server: CacheServer) -> socket.socket:
    """Return a connection to a server."""
    return socket.create_connection(server.address, timeout=20)


def ask(server: CacheServer, target: str, method: str = "GET", token: str = TOKEN, **headers: str) -> RawAnswer:
    """Return the answer to a request whose target is sent as it is."""
    lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return send(server, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


def send(server: CacheServer, data: bytes) -> RawAnswer:
    """Return the answer to bytes."""
    with connect(server) as client:
        client.sendall(data)
        return answer_of(client)


def answer_of(client: socket.socket) -> RawAnswer:
    """Return what a connection gives until its end."""
    received = b""
    while data := client.recv(1 << 16):
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return RawAnswer(int(first.split()[1]), headers, body)


@pytest.fixture
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process and those it starts have the token of ``served``."""
    monkeypatch.setenv("PQCACHE_TOKEN", TOKEN)
