"""A limit on the bandwidth of a server: a relay in a process of its own, in front of ports of this machine.

    with BandwidthLimit([s3.endpoint], rate=200e6) as line:
        line.url(s3.endpoint)  # in place of the endpoint

All connections share the rate, of what the server sends. What a server says about its other ports in the header
``Location``, as WebHDFS does, leads through the relay too if these are named. ``python -m benchmarks.bandwidth
PORT...`` is the process: it prints its own ports, and takes the rate as lines of JSON from standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from tests.servers.processes import free_ports

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_CHUNK = 256 << 10  # bytes moved at once
_BURST = 0.02  # seconds of the rate that may be sent at once
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)


class BandwidthLimit:
    """A relay in front of servers at ``endpoints``; ``rate`` is in bytes a second, None for no limit."""

    def __init__(self, endpoints: Sequence[str], rate: float | None = None) -> None:
        self._ports = [urlsplit(endpoint).port or 0 for endpoint in endpoints]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bandwidth", *map(str, self._ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        own = json.loads(self._process.stdout.readline())
        self._own = dict(zip(self._ports, own, strict=True))
        self.set(rate)

    def url(self, endpoint: str) -> str:
        """Return a URL of a server with the relay's port in place of the server's."""
        port = urlsplit(endpoint).port or 0
        return endpoint.replace(f":{port}", f":{self._own[port]}", 1)

    def set(self, rate: float | None = None, away: bool = False) -> None:
        """Change the rate; ``away`` ends all connections and takes no other."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"rate": rate, "away": away}) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> BandwidthLimit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bucket:
    """Tokens for the bytes that may be sent now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._next = 0.0

    def set(self, rate: float | None) -> None:
        with self._lock:
            self._rate, self._next = rate, time.monotonic()

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may be sent."""
        with self._lock:
            if self._rate is None:
                return
            now = time.monotonic()
            self._next = max(self._next, now - _BURST) + count / self._rate
            wait = self._next - now
        if wait > 0:
            time.sleep(wait)


class _Relay:
    def __init__(self, ports: Sequence[int]) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", port), backlog=256) for port in free_ports(len(ports))]
        self.own = [listener.getsockname()[1] for listener in self._listeners]
        self._own = dict(zip(ports, self.own, strict=True))
        self._bucket, self._away, self._lock = _Bucket(), False, threading.Lock()
        self._open: set[socket.socket] = set()
        for port, listener in zip(ports, self._listeners, strict=True):
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def set(self, rate: float | None, away: bool) -> None:
        self._bucket.set(rate)
        with self._lock:
            self._away = away
            ended = list(self._open) if away else []
        for sock in ended:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            client, _ = listener.accept()
            if self._away:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", port))
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK):
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        move = self._move if len(self._own) == 1 else self._move_and_rename
        with contextlib.suppress(OSError):
            move(server, client)
        for sock in (server, client):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _move(self, server: socket.socket, client: socket.socket) -> None:
        """Move all that the server sends, within the kernel."""
        reading, writing = os.pipe()
        try:
            fcntl.fcntl(writing, _F_SETPIPE_SZ, 2 * _CHUNK)
            while count := os.splice(server.fileno(), writing, _CHUNK):
                self._bucket.take(count)
                while count:
                    count -= os.splice(reading, client.fileno(), count)
        finally:
            os.close(reading)
            os.close(writing)

    def _move_and_rename(self, server: socket.socket, client: socket.socket) -> None:
        while data := server.recv(_CHUNK):
            if b"Location: http" in data[:4096]:
                data = re.sub(rb"(Location: https?://[^/:\r]*:)(\d+)", self._renamed, data, count=1)
            self._bucket.take(len(data))
            client.sendall(data)

    def _renamed(self, found: re.Match[bytes]) -> bytes:
        port = int(found[2])
        return found[1] + str(self._own.get(port, port)).encode()


def main() -> None:
    """Relay until standard input ends."""
    relay = _Relay([int(word) for word in sys.argv[1:]])
    print(json.dumps(relay.own), flush=True)
    for line in sys.stdin:
        relay.set(**json.loads(line))
        print("set", flush=True)


if __name__ == "__main__":
    main()
