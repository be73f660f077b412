"""An S3 server on 127.0.0.1 that lists and reads a dict of objects, and answers listings as a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.store.drivers.web_server import Asked, reply, serving

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


class FakeS3:
    """A running server: ``options`` make a client use it, ``queries`` are those of the listings it was asked for.

    Objects in ``archived`` are listed and cannot be read. The next requests, which it counts, get ``refusals``.
    """

    options: Mapping[str, str]

    def __init__(self, answer: Answer, objects: Mapping[str, bytes]) -> None:
        self.answer, self.objects = answer, objects
        self.queries: list[Query] = []
        self.archived: set[str] = set()
        self.refusals: Iterator[tuple[int, str]] = iter(())
        self.asked = 0

    def respond(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        if refusal := next(self.refusals, None):
            return reply(handler, refusal[1].encode(), refusal[0])
        parts = urlsplit(asked.path)
        if key := unquote(parts.path).lstrip("/").partition("/")[2]:
            return self._object(handler, key)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.queries.append(query)
        return reply(handler, self.answer(query).encode(), Content_Type="application/xml")

    def _object(self, handler: BaseHTTPRequestHandler, key: str) -> None:
        data = self.objects.get(key)
        if data is None:
            return reply(handler, status=404)
        if key in self.archived and handler.command == "GET":
            error = "<Error><Code>InvalidObjectState</Code><StorageClass>DEEP_ARCHIVE</StorageClass></Error>"
            return reply(handler, error.encode(), 403, Content_Type="application/xml")
        about = {"ETag": '"e-1"', "Last_Modified": "Fri, 20 Nov 2026 04:00:03 GMT"}
        wanted = handler.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            return reply(handler, data, **about)
        first, last = map(int, wanted.split("-"))
        return reply(handler, data[first : last + 1], 206, Content_Range=f"bytes {first}-{last}/{len(data)}", **about)


@contextmanager
def fake_s3(answer: Answer, objects: Mapping[str, bytes] | None = None) -> Iterator[FakeS3]:
    """Run a server that answers listings with ``answer``."""
    fake = FakeS3(answer, objects or {})
    with serving(fake.respond) as server:
        fake.options = {"endpoint": server.url, "key": "k", "secret": "s", "region": "us-east-1", "addressing": "path"}
        yield fake
