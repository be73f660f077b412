"""An S3 server on 127.0.0.1 that lists and reads a dict of objects, and answers listings as a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

Query = Mapping[str, str]
Answer = Callable[[Query], str]  # the XML that answers a listing


def page(keys: Sequence[str], truncated: bool = False, rest: str = "", size: int = 3) -> str:
    """Return a page of a listing."""
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-20T04:00:03.000Z</LastModified>"
        f'<ETag>"e-1"</ETag><Size>{size}</Size></Contents>'
        for key in keys
    )
    head = f"<Name>b</Name><IsTruncated>{str(truncated).lower()}</IsTruncated>"
    return f"<ListBucketResult>{head}{contents}{rest}</ListBucketResult>"


def listing_of(objects: Mapping[str, bytes]) -> Answer:
    """Return what answers listings of a bucket with ``objects``, in one page."""

    def answer(query: Query) -> str:
        keys = sorted(key for key in objects if key.startswith(query.get("prefix", "")))
        contents = "".join(
            f"<Contents><Key>{quote(key)}</Key><LastModified>2026-11-20T04:00:03.000Z</LastModified>"
            f'<ETag>"e-1"</ETag><Size>{len(objects[key])}</Size></Contents>'
            for key in keys
        )
        head = "<Name>b</Name><IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>"
        return f"<ListBucketResult>{head}{contents}</ListBucketResult>"

    return answer


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with socketserver's 5, of many connections at once some are reset


class FakeS3:
    """A running server: ``options`` make a client use it, ``queries`` are those of the listings it was asked for.

    Objects in ``archived`` are listed and cannot be read.
    """

    def __init__(self, answer: Answer, objects: Mapping[str, bytes]) -> None:
        self.queries: list[Query] = []
        self.archived: set[str] = set()
        self.answer, self.objects = answer, objects
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake._get(self)

            def do_HEAD(self) -> None:
                fake._get(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.options = {"endpoint": endpoint, "key": "k", "secret": "s", "region": "us-east-1", "addressing": "path"}

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        if key and handler.command in ("GET", "HEAD"):
            return self._object(handler, key)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.queries.append(query)
        return self._send(handler, 200, self.answer(query).encode(), {"Content-Type": "application/xml"})

    def _object(self, handler: BaseHTTPRequestHandler, key: str) -> None:
        data = self.objects.get(key)
        if data is None:
            return self._send(handler, 404, b"", {})
        if key in self.archived and handler.command == "GET":
            error = "<Error><Code>InvalidObjectState</Code><StorageClass>DEEP_ARCHIVE</StorageClass></Error>"
            return self._send(handler, 403, error.encode(), {"Content-Type": "application/xml"})
        about = {"ETag": '"e-1"', "Last-Modified": "Fri, 20 Nov 2026 04:00:03 GMT"}
        wanted = handler.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            return self._send(handler, 200, data, about)
        first, last = map(int, wanted.split("-"))
        about["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._send(handler, 206, data[first : last + 1], about)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)


@contextmanager
def fake_s3(answer: Answer, objects: Mapping[str, bytes] | None = None) -> Iterator[FakeS3]:
    """Run a server that answers listings with ``answer``."""
    fake = FakeS3(answer, objects or {})
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        fake.server.server_close()
        thread.join()
