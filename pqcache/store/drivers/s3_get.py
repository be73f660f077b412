"""GETs from S3 by botocore's own signer and connections, without what its client works out anew for each request.

A client's call takes 1.4 ms of CPU, of which building the same URL, user agent and context again is most; a signature
takes 0.1. So the first GET goes through the client, endpoint rules, redirects and all, and those after it are made
like the one that was answered, but for key, range and ETag. Where that one looks in any way strange, all of them go
through the client.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import botocore.parsers
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError
from botocore.utils import percent_encode

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^/]+/\d{8}/([^/]+)/s3/aws4_request,")
_LONG_WAY = {301, 302, 303, 307, 308, 400}  # redirects, and what a bucket in another region answers
_SIGNED = {"authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"}
_OF_A_CALL = {"range", "if-match", "amz-sdk-invocation-id", "amz-sdk-request", "host", "content-length"}
_USUAL = {"user-agent", "x-amz-request-payer", "accept-encoding"}


@dataclass(frozen=True)
class _Like:
    """What all GETs of a bucket share: the URL before the key, headers, and the region they are signed for."""

    base: str
    headers: Mapping[str, str]
    region: str  # empty: not signed


@dataclass(frozen=True)
class Answer:
    """The head of an answer, and what its body is read from."""

    content_range: str
    etag: str
    body: Any


class Getter:
    """Gets ranges of one bucket's objects; raises what the client would."""

    def __init__(self, client: Any, credentials: Any, bucket: str, extra: Mapping[str, str]) -> None:
        self._client, self._credentials, self._bucket, self._extra = client, credentials, bucket, extra
        self._http: Any = getattr(getattr(client, "_endpoint", None), "http_session", None)  # its TLS and its proxies
        self._shape = client.meta.service_model.operation_model("GetObject").output_shape
        self._sent = threading.local()
        self._like: _Like | None = None
        self._strange = self._http is None
        client.meta.events.register("before-send.s3.GetObject", self._note)

    def get(self, key: str, first: int, last: int, tag: str) -> Answer:
        """Return the answer to a GET of the bytes ``first`` to ``last``; with ``tag``, of that version only."""
        like = self._like
        if like is None:
            return self._by_client(key, first, last, tag)
        headers = {**like.headers, "Range": f"bytes={first}-{last}", **({"If-Match": f'"{tag}"'} if tag else {})}
        request = AWSRequest("GET", like.base + _quoted(key), headers)
        if like.region:
            S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", like.region).add_auth(request)
        prepared = request.prepare()
        prepared.stream_output = True
        answer = self._http.send(prepared)
        if answer.status_code in _LONG_WAY:
            answer.raw.close()
            return self._by_client(key, first, last, tag)
        if answer.status_code >= 300:
            found = {"status_code": answer.status_code, "headers": answer.headers, "body": answer.content}
            parsed = botocore.parsers.create_parser("rest-xml").parse(found, self._shape)
            raise ClientError(parsed, "GetObject")
        return Answer(answer.headers.get("Content-Range", ""), answer.headers.get("ETag", ""), answer.raw)

    def _by_client(self, key: str, first: int, last: int, tag: str) -> Answer:
        found = self._client.get_object(
            Bucket=self._bucket,
            Key=key,
            Range=f"bytes={first}-{last}",
            **({"IfMatch": f'"{tag}"'} if tag else {}),
            **self._extra,
        )
        if self._like is None and not self._strange:
            self._like = _like(self._sent.request, key)
            self._strange = self._like is None
        return Answer(found.get("ContentRange", ""), found.get("ETag", ""), found["Body"])

    def _note(self, request: Any, **_: Any) -> None:
        self._sent.request = request


def _like(request: Any, key: str) -> _Like | None:
    """Return what is to be done like ``request``, which was answered; None where it is not a plain GET of ``key``."""
    headers = {name.lower(): _text(value) for name, value in request.headers.items()}
    quoted, region = _quoted(key), ""
    if "authorization" in headers:
        scope = _SCOPE.match(headers["authorization"])
        if scope is None:
            return None
        region = scope[1]
    if not request.url.endswith(f"/{quoted}") or set(headers) - _SIGNED - _OF_A_CALL - _USUAL:
        return None
    return _Like(request.url[: -len(quoted)], {name: headers[name] for name in sorted(_USUAL & set(headers))}, region)


def _quoted(key: str) -> str:
    """Return a key as botocore writes it into a URL."""
    return str(percent_encode(key, safe="/~"))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
