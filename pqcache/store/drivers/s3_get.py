"""Downloads ranges of S3 objects: requests are signed by botocore and sent by Python's own HTTP client.

For each call, botocore's client resolves the endpoint, headers and signature anew, which takes longer than all else
about a small download. So the first GET goes through the client, endpoint rules, redirects and all, and an event
handler keeps what the client was about to sign. Later requests differ in key, range and ETag only. They are signed by
the client's signer and sent on connections of ``http.client``. Where the client does more than is known here, where a
proxy is in between, and where an answer needs the client's rules, the request goes through the client.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from botocore import UNSIGNED
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies, percent_encode

from pqcache.store.drivers.http_connections import HttpConnections
from pqcache.store.drivers.http_speed_floor import response_class

log = logging.getLogger("pqcache.store")

_SHARED_HEADERS = {"user-agent", "x-amz-request-payer", "accept-encoding"}
_CALL_HEADERS = {"range", "if-match", "amz-sdk-invocation-id", "amz-sdk-request"}
_SIGNATURES = {UNSIGNED, "s3v4"}


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


@dataclass(frozen=True, kw_only=True)
class _Template:
    """What all GETs of a bucket share, and the connections that they are sent on."""

    url: str  # before the key
    headers: Mapping[str, str]
    sign: Callable[[AWSRequest], None]
    connections: HttpConnections


@dataclass(frozen=True, kw_only=True)
class _Unsigned:
    """A request of the client's before it is signed, and how it will be."""

    url: str
    headers: Mapping[str, str]
    signer: Any  # botocore.signers.RequestSigner
    signature: Any
    name: str
    region: str


class RangeReader:
    """Sends GETs for ranges of one bucket's objects; raises what botocore's client or ``http.client`` raises."""

    def __init__(self, client: Any, bucket: str, extra: Mapping[str, str], ca_bundle: str | None) -> None:
        self._client, self._bucket, self._extra, self._ca_bundle = client, bucket, extra, ca_bundle
        self._template: _Template | None = None
        self._learning = threading.Lock()
        self._signed = threading.local()  # its ``last`` is what the client signed last on this thread
        self._obstacle = ""
        client.meta.events.register_last("before-sign.s3.GetObject", self._note)

    def open(self, key: str, first: int, last: int, tag: str) -> Response:
        """Return the response to a GET of the bytes ``first`` to ``last``; with ``tag``, of that version only."""
        template = self._template
        if template is None or not (tag.isascii() and tag.isprintable()):
            return self._open_by_client(key, first, last, tag)
        headers = {**template.headers, "Range": f"bytes={first}-{last}", **({"If-Match": f'"{tag}"'} if tag else {})}
        request = AWSRequest("GET", template.url + _quoted(key), headers)
        template.sign(request)
        return self._send(template, request) or self._open_by_client(key, first, last, tag)

    def close(self) -> None:
        """Close connections that are not in use."""
        if self._template is not None:
            self._template.connections.close()

    def _send(self, template: _Template, request: AWSRequest) -> Response | None:
        """Return the response to a signed request, or None where the client has to ask."""
        connection = template.connections.take()
        try:
            target = request.url[request.url.index("/", len("https://")) :]
            connection.request("GET", target, headers=dict(request.headers.items()))
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise

        if response.status < 300:
            return Response(response.headers, response, partial(template.connections.put_back, connection, response))
        response.close()
        connection.close()
        if response.status >= 500 or response.status == 429:  # to ask again at once would not help
            raise ClientError(
                {"Error": {"Code": response.reason}, "ResponseMetadata": {"HTTPStatusCode": response.status}},
                "GetObject",
            )
        log.debug("s3: the server answers %d to a GET; asking through botocore's client", response.status)
        if response.status <= 400:  # a redirect, or the bucket is in another region: the client finds out
            self._template = None
            template.connections.close()
        return None

    def _open_by_client(self, key: str, first: int, last: int, tag: str) -> Response:
        condition = {"IfMatch": f'"{tag}"'} if tag else {}
        found = self._client.get_object(
            Bucket=self._bucket, Key=key, Range=f"bytes={first}-{last}", **condition, **self._extra
        )
        with self._learning:
            if self._template is None:
                self._learn(key)
        return Response(found["ResponseMetadata"]["HTTPHeaders"], found["Body"], found["Body"].close)

    def _note(self, request: AWSRequest, signature_version: Any, request_signer: Any, **given: Any) -> None:
        signing = request.context.get("signing", {})
        self._signed.last = _Unsigned(
            url=request.url,
            headers={name.lower(): _text(value) for name, value in request.headers.items()},
            signer=request_signer,
            signature=signature_version,
            name=signing.get("signing_name", given["signing_name"]),
            region=signing.get("region", given["region_name"]),
        )

    def _learn(self, key: str) -> None:
        """Make the template from what the client signed last, if that was a plain GET of ``key``."""
        last: _Unsigned = self._signed.last
        obstacle = _obstacle(last, key)
        if not obstacle:
            self._template = self._template_like(last, key)
        elif obstacle != self._obstacle:
            log.debug("s3: every GET goes through botocore's client: %s", obstacle)
        self._obstacle = obstacle

    def _template_like(self, request: _Unsigned, key: str) -> _Template:
        config, server = self._client.meta.config, urlsplit(request.url)
        make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if server.scheme == "https":
            make = partial(http.client.HTTPSConnection, context=_tls_context(self._ca_bundle))

        def sign(unsigned: AWSRequest) -> None:
            if request.signature is not UNSIGNED:
                request.signer.get_auth_instance(request.name, request.region, request.signature).add_auth(unsigned)

        def connect() -> http.client.HTTPConnection:
            connection = make(server.hostname, server.port, timeout=config.connect_timeout)
            connection.response_class = response_class(config.read_timeout)
            try:
                connection.connect()
                connection.sock.settimeout(config.read_timeout)
            except BaseException:
                connection.close()
                raise
            return connection

        headers = {name: request.headers[name] for name in sorted(_SHARED_HEADERS & set(request.headers))}
        return _Template(
            url=request.url.removesuffix(_quoted(key)), headers=headers, sign=sign, connections=HttpConnections(connect)
        )


def _obstacle(request: _Unsigned, key: str) -> str:
    """Return why requests like this one cannot be sent without the client; empty if they can."""
    if unknown := set(request.headers) - _SHARED_HEADERS - _CALL_HEADERS:
        return f"it sends the header {min(unknown)}"
    if request.signature not in _SIGNATURES:
        return f"the signature is {request.signature}"
    if not request.url.endswith(f"/{_quoted(key)}"):
        return "its URL does not end with the key"
    if urlsplit(request.url).scheme in get_environ_proxies(request.url):
        return "there is a proxy"
    return ""


def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """Return a context that trusts whom botocore's client trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=get_cert_path(ca_bundle or True))
    return context


def _quoted(key: str) -> str:
    """Return a key as botocore writes it into a URL."""
    return str(percent_encode(key, safe="/~"))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
