"""HTTP servers on 127.0.0.1 that a test writes the answers of, and that remember what they were asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Asked:
    """A request; ``path`` includes the query."""

    path: str
    headers: Message


@dataclass
class Server:
    """What a running server was asked; ``answer`` is called with each request and its handler."""

    answer: Callable[[Asked, BaseHTTPRequestHandler], None]
    port: int = 0
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(answer: Callable[[Asked, BaseHTTPRequestHandler], None]) -> Iterator[Server]:
    """Run a server on a free port."""
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.asked.append(Asked(self.path, self.headers))
            with suppress(OSError):
                server.answer(server.asked[-1], self)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    class Threads(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # with socketserver's 5, of many connections at once some are reset

        def handle_error(self, *_: object) -> None:
            pass

    with Threads(("127.0.0.1", 0), Handler) as http:
        server.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()


def reply(
    handler: BaseHTTPRequestHandler, body: bytes = b"", status: int = 200, drip: float = 0.0, **headers: str
) -> None:
    """Answer; with ``drip`` one byte of the body each so many seconds."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    if not drip:
        handler.wfile.write(body)
        return
    for position in range(len(body)):
        handler.wfile.write(body[position : position + 1])
        handler.wfile.flush()
        time.sleep(drip)
