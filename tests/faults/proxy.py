"""An HTTP proxy that breaks answers on purpose, in front of a real S3 gateway or WebHDFS server.

What no rule matches passes through unchanged. The Host header is kept as the client sent it, because an S3 client
signs it. WebHDFS sends its clients on to a DataNode; that address is rewritten to lead through the proxy too.

    with Proxy(server.endpoint) as proxy:
        proxy.rule(reset(after=1000), method="GET", path=r"part-00001", count=1)
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.store.drivers.web_server import Asked, serving

_TO = "/_to/"  # /_to/PORT/... goes to that port of 127.0.0.1


@dataclass(frozen=True)
class Request:
    """What the client asked; ``target`` is percent-decoded path and query."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last byte asked for, if it is a ranged request."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(match[1]), int(match[2])) if match else None


@dataclass
class Answer:
    """What the server said; a fault may change it before it is sent."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def set(self, name: str, value: str) -> None:
        """Replace a header."""
        self.headers = [(k, v) for k, v in self.headers if k.lower() != name.lower()] + [(name, value)]

    def head(self, length: int | None = None) -> bytes:
        """The bytes of the status line and the headers; ``length`` is what Content-Length claims."""
        phrase = http.client.responses.get(self.status, "")
        lines = [f"HTTP/1.1 {self.status} {phrase}"]
        lines += [f"{k}: {v}" for k, v in self.headers if k.lower() not in ("transfer-encoding", "connection")]
        if length is not None:
            lines = [line for line in lines if not line.lower().startswith("content-length:")]
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection:
    """The client's side of a connection, for faults to write to."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self._sock = sock
        self._stopping = stopping

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def reset(self) -> None:
        """Close so that the other side sees "connection reset by peer"."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def wait(self, seconds: float) -> None:
        """Do nothing for a while, or until the proxy stops."""
        self._stopping.wait(seconds)


# A fault sends the answer its own way. It returns True if the connection can go on after it.
Fault = Callable[[Request, Answer, Connection], bool]


@dataclass
class _Rule:
    fault: Fault
    method: str
    path: re.Pattern[str]
    first: int
    count: int | None
    seen: int = 0
    used: int = 0


@dataclass
class Proxy:
    """A proxy on a free port of 127.0.0.1; use it in a ``with`` block."""

    upstream: str  # http://127.0.0.1:P
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._serving = serving(self._exchange)
        self._port = urlsplit(self.upstream).port or 80

    def __enter__(self) -> Proxy:
        self._server = self._serving.__enter__()
        self.port, self.url = self._server.port, self._server.url
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._serving.__exit__(None, None, None)

    def rule(
        self, fault: Fault, *, method: str = "", path: str = "", first: int = 0, count: int | None = None
    ) -> _Rule:
        """Apply ``fault`` to ``count`` requests (None: all) of those that match, from the ``first`` one on."""
        rule = _Rule(fault, method, re.compile(path), first, count)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and all counts."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def _fault(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.method in ("", request.method) and rule.path.search(request.target):
                    number, rule.seen = rule.seen, rule.seen + 1
                    if number >= rule.first and (rule.count is None or rule.used < rule.count):
                        rule.used += 1
                        return rule.fault
        return None

    def _exchange(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        headers = asked.headers.items()
        body = handler.rfile.read(int(asked.headers.get("Content-Length", 0)))
        request = Request(handler.command, unquote(asked.path), {name.lower(): value for name, value in headers})
        fault = self._fault(request) or unchanged
        answer = self._ask(handler.command, asked.path, headers, body)
        if not fault(request, answer, Connection(handler.connection, self._stopping)):
            handler.close_connection = True

    def _ask(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        port = self._port
        if target.startswith(_TO):
            number, _, rest = target.removeprefix(_TO).partition("/")
            port, target = int(number), f"/{rest}"
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as upstream:
            upstream.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() != "connection":
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            answer = Answer(response.status, response.getheaders(), response.read())
        if answer.status == 307:
            location = urlsplit(dict(answer.headers)["Location"])
            query = f"?{location.query}" if location.query else ""
            answer.set("Location", f"{self.url}{_TO}{location.port}{location.path}{query}")
        return answer


def _length(request: Request, answer: Answer) -> int | None:
    """What Content-Length has to say; a HEAD's is as the server gave it."""
    return None if request.method == "HEAD" else len(answer.body)


def unchanged(request: Request, answer: Answer, client: Connection) -> bool:
    """Pass the answer on."""
    client.send(answer.head(_length(request, answer)) + (b"" if request.method == "HEAD" else answer.body))
    return True


def reset(after: int) -> Fault:
    """Send the head and ``after`` bytes of the body, then reset the connection; -1 sends not even the head."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        if after >= 0:
            client.send(answer.head(_length(request, answer)) + answer.body[:after])
            time.sleep(0.02)  # a reset discards what the client has not read yet
        client.reset()
        return False

    return fault


def truncate(after: int) -> Fault:
    """Promise the whole body, send ``after`` bytes, and close in an orderly way."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        client.send(answer.head(_length(request, answer)) + answer.body[:after])
        return False

    return fault


def stall(after: int, seconds: float = 60) -> Fault:
    """Send ``after`` bytes of the body, or with -1 nothing at all, and then nothing for a long time."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        if after >= 0:
            client.send(answer.head(_length(request, answer)) + answer.body[:after])
        client.wait(seconds)
        return False

    return fault


def drip(piece: int, seconds: float) -> Fault:
    """Send the body in pieces of so many bytes, one every so many seconds."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        client.send(answer.head(_length(request, answer)))
        for start in range(0, len(answer.body), piece):
            client.send(answer.body[start : start + piece])
            client.wait(seconds)
        return True

    return fault


def status(code: int, retry_after: int | None = None, body: bytes = b"") -> Fault:
    """Answer with an error in place of what the server said."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        headers = [("Content-Type", "text/plain")]
        if retry_after is not None:
            headers.append(("Retry-After", str(retry_after)))
        return unchanged(request, Answer(code, headers, body), client)

    return fault


def flip(position: int) -> Fault:
    """Change one byte of the body, counted from its end when negative."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        body = bytearray(answer.body)
        body[position] ^= 0xFF
        return unchanged(request, Answer(answer.status, answer.headers, bytes(body)), client)

    return fault


def other_version(content: bytes) -> Fault:
    """Send the same range of another file, with the headers of the one that was asked for."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        first, last = request.range or (0, len(content) - 1)
        return unchanged(request, Answer(answer.status, answer.headers, content[first : last + 1]), client)

    return fault


def ignore_range(content: bytes) -> Fault:
    """Answer a ranged request with 200 and the whole file, as a server or proxy that knows no ranges does."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        full = Answer(200, [(k, v) for k, v in answer.headers if k.lower() != "content-range"], content)
        return unchanged(request, full, client)

    return fault


def edit(change: Callable[[bytes], bytes]) -> Fault:
    """Send a body that ``change`` made from the server's."""

    def fault(request: Request, answer: Answer, client: Connection) -> bool:
        return unchanged(request, Answer(answer.status, answer.headers, change(answer.body)), client)

    return fault


def both(action: Callable[[Request], None], fault: Fault = unchanged) -> Fault:
    """Call ``action`` when the answer is about to be sent; for changes at the source at precise moments."""

    def acting(request: Request, answer: Answer, client: Connection) -> bool:
        action(request)
        return fault(request, answer, client)

    return acting


def no_objects(listing: bytes) -> bytes:
    """Return an S3 or WebHDFS listing without its entries."""
    listing = re.sub(rb"<Contents>.*</Contents>", b"", listing, flags=re.DOTALL)
    listing = re.sub(rb"<KeyCount>\d+</KeyCount>", b"<KeyCount>0</KeyCount>", listing)
    return re.sub(rb'"FileStatus":\[.*\]', b'"FileStatus":[]', listing, flags=re.DOTALL)


def first_page(keys: int) -> Callable[[bytes], bytes]:
    """Return what cuts an S3 listing after so many keys and says that there is more, as a full page does."""

    def cut(listing: bytes) -> bytes:
        found = re.findall(rb"<Contents>.*?</Contents>", listing, flags=re.DOTALL)
        if len(found) <= keys:  # one page, as of a directory that is not there
            return listing
        last = re.search(rb"<Key>(.*?)</Key>", found[keys - 1])
        assert last is not None
        for item in found[keys:]:
            listing = listing.replace(item, b"")
        token = urllib.parse.unquote_to_bytes(last[1])  # keys may be encoded, tokens are not
        more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>" + token + b"</NextContinuationToken>"
        return listing.replace(b"<IsTruncated>false</IsTruncated>", more)

    return cut


def half_page(listing: bytes) -> bytes:
    """Return an S3 listing that lost its second half and does not say so."""
    found = re.findall(rb"<Contents>.*?</Contents>", listing, flags=re.DOTALL)
    for item in found[len(found) // 2 :]:
        listing = listing.replace(item, b"")
    return listing
