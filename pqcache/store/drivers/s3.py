"""A source on S3 or a compatible store, through botocore, which starts faster than boto3.

Credentials, region, profile and endpoint come from where every AWS tool finds them (``AWS_*`` variables, ``~/.aws``,
instance roles), or from ``-o``.
"""

from __future__ import annotations

import http.client
import logging
import math
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions
import botocore.session
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from pqcache.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.store.drivers.base import TIMEOUT, Capabilities, check_options
from pqcache.store.drivers.http_client import Body, HttpConnections, HttpSource, pool_classes
from pqcache.store.drivers.remote import answer_error
from pqcache.store.drivers.s3_list import identity, list_bucket, take_entries
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact, userinfo

log = logging.getLogger("pqcache.store")

_MAX_PAGE = 32 << 20  # bytes of a page of a listing, which has 1,000 keys
_VALID = 300  # seconds that a URL may be used for, from when it is made
_EXPRESS = "--x-s3"  # ends the names of directory buckets, which have sessions of their own
OPTIONS = {
    "endpoint": "URL of a compatible store, as AWS_ENDPOINT_URL",
    "profile": "profile in ~/.aws/config, as AWS_PROFILE",
    "region": "region, as AWS_DEFAULT_REGION",
    "anon": "true reads public buckets without credentials",
    "key": "access key id, as AWS_ACCESS_KEY_ID",
    "secret": "secret access key, as AWS_SECRET_ACCESS_KEY",
    "token": "session token, as AWS_SESSION_TOKEN",
    "addressing": "path or virtual; by default what the endpoint needs",
    "requester_pays": "true pays for the requests",
}
_STATUSES = {  # of codes that some stores send with another status
    **dict.fromkeys(("NoSuchKey", "NoSuchBucket", "NoSuchUpload", "NotFound"), 404),
    **dict.fromkeys(("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), 403),
    **dict.fromkeys(("InvalidToken", "AllAccessDisabled", "AccountProblem"), 403),
    **dict.fromkeys(("SlowDown", "RequestTimeout"), 503),
}
_DENIED_ADVICE = (
    "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, -o profile=NAME, or -o anon=true for public data)"
)
_NO_CREDENTIALS = (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError)


class S3Source(HttpSource):
    """A RemoteSource over botocore."""

    capabilities = Capabilities(reads_versions=True)
    raises = (  # a body is read through urllib3 or http.client, which raise errors of their own
        http.client.HTTPException,
        botocore.exceptions.BotoCoreError,
        botocore.exceptions.ClientError,
        urllib3.exceptions.HTTPError,
        OSError,
    )
    network_advice = "check the endpoint and the network"

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        check_options("s3://", options, OPTIONS)
        super().__init__(url, url.partition("://")[2].partition("/")[2].strip("/"), options, timeout)
        self._bucket = urlsplit(url.replace("?", "%3F").replace("#", "%23")).netloc.rpartition("@")[2]
        self._is_borrower = False
        if not self._bucket:
            raise UsageError(redact(url), "no bucket", "write s3://BUCKET/PATH")
        if ":" in self._bucket:
            raise UsageError(
                self.url, "has a secret with a '/'", "write it as %2F, or give -o key=KEY -o secret=SECRET instead"
            )
        if "@" in options.get("endpoint", ""):
            raise UsageError("-o endpoint", "holds a user or a password", "give -o key=KEY -o secret=SECRET instead")
        self._extra = {"RequestPayer": "requester"} if is_true(options, "requester_pays") else {}
        session = new_session(url, options)
        self._client = new_client(session, url, options, timeout)
        self._lister = new_client(session, url, options, self.first_timeout, max_answer=_MAX_PAGE)
        take_entries(self._client)
        take_entries(self._lister)
        ca_bundle = session.get_config_variable("ca_bundle")
        self._ranges = RangeReader(self._client, self._bucket, self._extra, ca_bundle)

    def _list(self) -> Iterator[SourceFile]:
        prefix = f"{self._root}/" if self._root else ""
        found = False
        for key, known in list_bucket(self._lister, self._bucket, prefix, self._extra):
            found = True
            path = key[len(prefix) :]
            if path and not (path.endswith("/") and known.size == 0):
                yield SourceFile(path, known)
        if not found and self._root:
            with suppress(ClientError):
                known = self._stat("")
                yield SourceFile(self.take_only_file(), known)

    def _stat(self, path: str) -> Identity:
        head = self._client.head_object(Bucket=self._bucket, Key=self.key_of(path), **self._extra)
        try:
            return identity(head["ContentLength"], head["LastModified"], head["ETag"])
        except KeyError as error:
            reason = f"the server answers without {error.args[0]}, as S3 never does"
            raise SourceError(self.name_of(path), reason, "check the endpoint") from error

    def below(self, path: str) -> S3Source:
        """Return a source of the directory ``path``, which uses the connections of this one as long as it is open."""
        source = copy(self)
        source.url, source._root, source._is_borrower = f"{self.url}/{path}", self.key_of(path), True
        return source

    def close(self) -> None:
        if self._is_borrower:
            return
        self._ranges.close()
        self._client.close()
        self._lister.close()

    def explain(self, name: str, error: BaseException) -> SourceError:
        if isinstance(error, botocore.exceptions.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code == "InvalidObjectState":
                found = error.response["Error"].get("StorageClass")  # such as DEEP_ARCHIVE
                return SourceDenied(name, f"is archived ({found or code})", "restore it in the store")
            missing = "no such bucket" if code == "NoSuchBucket" else "no such object"
            said = f"{status} {code}" if code != str(status) else code
            return answer_error(name, _STATUSES.get(code, status), said, _DENIED_ADVICE, missing)
        if isinstance(error, _NO_CREDENTIALS):
            return SourceDenied(
                name,
                "no credentials found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or -o anon=true for public data",
            )
        return SourceUnavailable(name, first_line(error), self.network_advice)

    @contextmanager
    def _opened(self, path: str, offset: int, length: int, tag: str) -> Iterator[Body]:
        last = offset + length - 1
        with closing(self._ranges.open(self.key_of(path), offset, last, tag)) as response:
            headers = response.headers
            # a body of another length was changed on its way, as by compression: no part of it is the file's
            exact = headers.get("content-length", str(length)) == str(length)
            if not exact or not headers.get("content-range", "").startswith(f"bytes {offset}-{last}/"):
                raise SourceUnavailable(self.name_of(path), "the server sent another range than was asked for")
            if tag and headers.get("etag", "").strip('"') != tag:
                raise SourceChanged(self.name_of(path), "is not the version that was listed")
            yield response.body


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
            self._servers[server] = None if _has_proxy(server) else self._connections(server)
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

    def _connections(self, server: str) -> HttpConnections:
        config, parts = self._client.meta.config, urlsplit(server)
        make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            make = partial(http.client.HTTPSConnection, context=_tls_context(self._ca_bundle))
        return HttpConnections(
            partial(make, parts.hostname, parts.port, timeout=config.connect_timeout), config.read_timeout
        )


def _has_proxy(server: str) -> bool:
    return urlsplit(server).scheme in get_environ_proxies(server)


def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """Return a context that trusts whom botocore's client trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=get_cert_path(ca_bundle or True))
    return context


def new_session(url: str, options: Mapping[str, str]) -> Any:
    """Return the session of all clients, which loads the description of S3 once."""
    user, password = userinfo(url)
    key, secret = options.get("key") or user, options.get("secret") or password
    if bool(key) != bool(secret):
        raise UsageError(redact(url), "has a key or a secret without the other", "give both, or neither")
    session = botocore.session.Session(profile=options.get("profile"))
    if key:
        session.set_credentials(key, secret, options.get("token"))
    return session


def new_client(
    session: Any,
    url: str,
    options: Mapping[str, str],
    timeout: float,
    *,
    attempts: int = 1,
    max_answer: float = math.inf,
) -> Any:
    """Return a client that waits ``timeout`` seconds for an answer; a bad endpoint or region raises UsageError."""
    config = Config(
        connect_timeout=5,
        read_timeout=timeout,
        # a download is retried by its caller, which knows how far it got
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=64,
        signature_version=UNSIGNED if is_true(options, "anon") else _signature(session),
        s3={"addressing_style": options["addressing"]} if "addressing" in options else None,
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
    )
    try:
        region = options.get("region") or session.get_config_variable("region") or "us-east-1"
        client = session.create_client("s3", region_name=region, endpoint_url=options.get("endpoint"), config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(redact(url), str(error)) from error
    _set_limits(client, timeout, max_answer)
    return client


def _signature(session: Any) -> str:
    """Return the version of signatures, which URLs are not signed by unless it is said."""
    return str((session.get_scoped_config().get("s3") or {}).get("signature_version", "s3v4"))


def _set_limits(client: Any, timeout: float, max_answer: float) -> None:
    """Let a client's answers have a floor of speed and a largest size, also through a proxy."""
    pools = getattr(client._endpoint.http_session, "_pool_classes_by_scheme", None)
    if not isinstance(pools, dict):
        log.debug(
            "s3: the connection pools of this botocore are unknown: answers have no floor of speed and no largest size"
        )
        return
    pools.update(pool_classes(pools, timeout, max_answer))  # it is the dict of all managers


def is_true(options: Mapping[str, str], name: str) -> bool:
    """Return whether an option is on; without it, it is off."""
    return options.get(name, "").lower() in ("1", "true", "yes")
