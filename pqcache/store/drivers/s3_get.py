"""Downloads ranges of S3 objects: botocore signs each URL, and ``http.client`` fetches it.

A GET through botocore's client takes four times the CPU time of a small download. So the client only makes the URL,
signed for a few minutes, by its own rules for endpoints, addressing and credentials. An answer that needs those rules,
as a redirect or an error, is asked for once more through the client, and so is everything behind a proxy.
"""

from __future__ import annotations

import http.client
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from pqcache.store.drivers.http_connections import HttpConnections
from pqcache.store.drivers.http_speed_floor import response_class

log = logging.getLogger("pqcache.store")

_VALID = 300  # seconds that a URL may be used for, from when it is made
_EXPRESS = "--x-s3"  # ends the names of directory buckets, which have sessions of their own


class Body(Protocol):
    """The body of a response; both methods return nothing at its end, and where the connection broke."""

    def read(self, size: int, /) -> bytes: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


@dataclass(frozen=True)
class Response:
    """Headers, by lower-case name, and body of a response; ``close`` it in the end."""

    headers: Mapping[str, str] | http.client.HTTPMessage
    body: Body
    close: Callable[[], None]


class RangeReader:
    """Sends GETs for ranges of one bucket's objects; raises what botocore's client or ``http.client`` raises."""

    def __init__(self, client: Any, bucket: str, extra: Mapping[str, str], ca_bundle: str | None) -> None:
        self._client, self._bucket, self._extra, self._ca_bundle = client, bucket, extra, ca_bundle
        self._headers = {"x-amz-request-payer": payer} if (payer := extra.get("RequestPayer")) else {}
        self._servers: dict[str, HttpConnections | None] = {}  # by scheme and host; None for one behind a proxy

    def open(self, key: str, first: int, last: int, tag: str) -> Response:
        """Return the response to a GET of the bytes ``first`` to ``last``; with ``tag``, of that version only."""
        found = None
        if tag.isascii() and tag.isprintable() and not self._bucket.endswith(_EXPRESS):
            found = self._get(key, {"Range": f"bytes={first}-{last}", **({"If-Match": f'"{tag}"'} if tag else {})})
        return found or self._get_by_client(key, first, last, tag)

    def close(self) -> None:
        """Close connections that are not in use."""
        for connections in self._servers.values():
            if connections is not None:
                connections.close()

    def _get(self, key: str, headers: Mapping[str, str]) -> Response | None:
        """Return the response to a GET; None if the client has to ask."""
        asked = {"Bucket": self._bucket, "Key": key, **self._extra}
        url = self._client.generate_presigned_url("get_object", Params=asked, ExpiresIn=_VALID)
        server, slash, target = url.partition("://")[2].partition("/")
        server = f"{url.partition('://')[0]}://{server}"
        if server not in self._servers:
            self._servers[server] = None if _has_proxy(server) else HttpConnections(partial(self._connect, server))
        connections = self._servers[server]
        if connections is None:
            return None
        connection = connections.take()
        try:
            connection.request("GET", slash + target, headers={**headers, **self._headers})
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        if response.status < 300:
            return Response(response.headers, response, partial(connections.put_back, connection, response))
        response.close()
        connection.close()
        if response.status >= 500 or response.status == 429:  # to ask again at once would not help
            raise ClientError(
                {"Error": {"Code": response.reason}, "ResponseMetadata": {"HTTPStatusCode": response.status}},
                "GetObject",
            )
        log.debug("s3: the server answers %d to a GET; asking through botocore's client", response.status)
        return None

    def _get_by_client(self, key: str, first: int, last: int, tag: str) -> Response:
        condition = {"IfMatch": f'"{tag}"'} if tag else {}
        found = self._client.get_object(
            Bucket=self._bucket, Key=key, Range=f"bytes={first}-{last}", **condition, **self._extra
        )
        return Response(found["ResponseMetadata"]["HTTPHeaders"], found["Body"], found["Body"].close)

    def _connect(self, server: str) -> http.client.HTTPConnection:
        config, parts = self._client.meta.config, urlsplit(server)
        make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            make = partial(http.client.HTTPSConnection, context=_tls_context(self._ca_bundle))
        connection = make(parts.hostname, parts.port, timeout=config.connect_timeout)
        connection.response_class = response_class(config.read_timeout)
        try:
            connection.connect()
            connection.sock.settimeout(config.read_timeout)
        except BaseException:
            connection.close()
            raise
        return connection


def _has_proxy(server: str) -> bool:
    return urlsplit(server).scheme in get_environ_proxies(server)


def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """Return a context that trusts whom botocore's client trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=get_cert_path(ca_bundle or True))
    return context
