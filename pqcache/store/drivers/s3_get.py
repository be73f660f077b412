"""GETs from S3 by botocore's own signer and connections, without what its client works out anew for each request.

A client's call takes 1.4 ms of CPU, of which building the same URL, user agent and context again is most; a signature
takes 0.1, and what urllib3 does for a request as much again. So the first GET goes through the client, endpoint rules,
redirects and all, and those after it are made like the one that was answered, but for key, range and ETag, on
connections that are made like that one's and spoken to by Python's own HTTP client. Where the first one looks in any
way strange, or a proxy is in between, all of them go through the client.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import botocore.parsers
import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError
from botocore.utils import percent_encode
from urllib3.util.connection import is_connection_dropped

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d{8}/([^/]+)/s3/aws4_request,")
_LONG_WAY = {301, 302, 303, 307, 308, 400}  # redirects, and what a bucket in another region answers
_SIGNED = {"authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"}
_OF_A_CALL = {"range", "if-match", "amz-sdk-invocation-id", "amz-sdk-request", "host", "content-length"}
_USUAL = {"user-agent", "x-amz-request-payer", "accept-encoding"}


@dataclass(frozen=True, kw_only=True)
class _Like:
    """What all GETs of a bucket share: the URL before the key, headers, and the region they are signed for."""

    base: str
    origin: int  # how much of the URL is scheme and host
    headers: Mapping[str, str]
    region: str  # empty: not signed
    connections: _Connections


class _Connections:
    """Connections like the client's own, with its TLS and its timeouts, used again and again."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: list[Any] = []

    def get(self, target: str, headers: Mapping[str, str]) -> tuple[Any, http.client.HTTPResponse]:
        """Send a GET; return the connection and the answer, of which the head has come."""
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]
        connection = self._connected()
        try:
            connection.sock.sendall("\r\n".join(lines).encode("ascii"))
            answer = http.client.HTTPResponse(connection.sock, method="GET")
            answer.begin()
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def keep(self, connection: Any) -> None:
        """Take a connection back of which an answer has been read to its end."""
        self._idle.append(connection)

    def close(self) -> None:
        """Close those that are not in use."""
        while self._idle:
            self._idle.pop().close()

    def _connected(self) -> Any:
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if not is_connection_dropped(connection):
                    return connection
                connection.close()
        connection = self._pool._new_conn()
        try:
            connection.connect()
            connection.sock.settimeout(self._pool.timeout.read_timeout)
        except BaseException as error:
            connection.close()
            if isinstance(error, ValueError):  # a certificate of another host's
                raise urllib3.exceptions.SSLError(error) from error
            raise
        return connection


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The head of an answer, ``read`` or ``readinto`` for its body, ``close`` for when that is no longer wanted."""

    content_range: str
    content_length: str  # empty: not said
    etag: str
    read: Callable[[int], bytes]
    readinto: Callable[[memoryview], int]
    close: Callable[[], None]


class Getter:
    """Gets ranges of one bucket's objects; raises what the client would."""

    def __init__(self, client: Any, credentials: Any, bucket: str, extra: Mapping[str, str]) -> None:
        self._client, self._credentials, self._bucket, self._extra = client, credentials, bucket, extra
        self._shape = client.meta.service_model.operation_model("GetObject").output_shape
        self._sent = threading.local()
        self._like: _Like | None = None
        self._strange = False
        client.meta.events.register("before-send.s3.GetObject", self._note)

    def get(self, key: str, first: int, last: int, tag: str) -> Answer:
        """Return the answer to a GET of the bytes ``first`` to ``last``; with ``tag``, of that version only."""
        like = self._like
        if like is None or not (tag.isascii() and tag.isprintable()):
            return self._by_client(key, first, last, tag)
        headers = {**like.headers, "Range": f"bytes={first}-{last}", **({"If-Match": f'"{tag}"'} if tag else {})}
        request = AWSRequest("GET", like.base + _quoted(key), headers)
        if like.region:
            S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", like.region).add_auth(request)
        connection, answer = like.connections.get(request.url[like.origin :], dict(request.headers.items()))

        def close() -> None:
            if answer.isclosed() and not answer.will_close:
                like.connections.keep(connection)
            else:
                answer.close()
                connection.close()

        if answer.status in _LONG_WAY:
            answer.close()
            connection.close()
            return self._by_client(key, first, last, tag)
        if answer.status >= 300:
            with closing(
                Answer(
                    content_range="",
                    content_length="",
                    etag="",
                    read=answer.read,
                    readinto=answer.readinto,
                    close=close,
                )
            ):
                found = {"status_code": answer.status, "headers": answer.headers, "body": answer.read()}
            parsed = botocore.parsers.create_parser("rest-xml").parse(found, self._shape)
            raise ClientError(parsed, "GetObject")
        return _answer(answer.headers, answer.read, answer.readinto, close)

    def close(self) -> None:
        """Close connections that are not in use."""
        if self._like is not None:
            self._like.connections.close()

    def _by_client(self, key: str, first: int, last: int, tag: str) -> Answer:
        found = self._client.get_object(
            Bucket=self._bucket,
            Key=key,
            Range=f"bytes={first}-{last}",
            **({"IfMatch": f'"{tag}"'} if tag else {}),
            **self._extra,
        )
        if self._like is None and not self._strange:
            self._like = _like(self._sent.request, key, getattr(found["Body"], "_raw_stream", None))
            self._strange = self._like is None
        body = found["Body"]

        def readinto(buffer: memoryview) -> int:  # urllib3's own does no better
            chunk: bytes = body.read(len(buffer))
            buffer[: len(chunk)] = chunk
            return len(chunk)

        return _answer(found["ResponseMetadata"]["HTTPHeaders"], body.read, readinto, body.close)

    def _note(self, request: Any, **_: Any) -> None:
        self._sent.request = request


def _answer(
    headers: Mapping[str, str] | http.client.HTTPMessage,
    read: Callable[[int], bytes],
    readinto: Callable[[memoryview], int],
    close: Callable[[], None],
) -> Answer:
    content_range, length, etag = (headers.get(name, "") for name in ("content-range", "content-length", "etag"))
    return Answer(
        content_range=content_range, content_length=length, etag=etag, read=read, readinto=readinto, close=close
    )


def _like(request: Any, key: str, answer: Any) -> _Like | None:
    """Return what is to be done like ``request``, which got ``answer``; None where it is not a plain GET of ``key``."""
    pool = getattr(answer, "_pool", None)
    if not isinstance(pool, urllib3.HTTPConnectionPool) or not hasattr(pool, "_new_conn") or pool.proxy is not None:
        return None
    headers = {name.lower(): _text(value) for name, value in request.headers.items()}
    quoted, region = _quoted(key), ""
    if "authorization" in headers:
        scope = _SCOPE.match(headers["authorization"])
        if scope is None:
            return None
        region = scope[1]
    if not request.url.endswith(f"/{quoted}") or set(headers) - _SIGNED - _OF_A_CALL - _USUAL:
        return None
    base, usual = request.url[: -len(quoted)], {name: headers[name] for name in sorted(_USUAL & set(headers))}
    origin = base.index("/", base.index("://") + 3)
    host = base[:origin].rpartition("/")[2].rpartition("@")[2]
    return _Like(
        base=base, origin=origin, headers={"host": host, **usual}, region=region, connections=_Connections(pool)
    )


def _quoted(key: str) -> str:
    """Return a key as botocore writes it into a URL."""
    return str(percent_encode(key, safe="/~"))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
