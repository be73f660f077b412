"""A source and a target on S3 or a compatible store, through botocore, which starts faster than boto3.

Credentials, region, profile and endpoint come from ``-o``, or from the same sources as for other AWS tools (``AWS_*``
variables, ``~/.aws``, instance roles).

Listings are parsed here, page by page, as botocore's own parser is slow: an event handler takes the entries out of each
response before the client parses the rest.

Some S3-compatible stores end listings too early or never. So keys must be in order, as S3 guarantees, and each page but
the last must lead to another: by its token, or by its last key as in version 1 of the API, which older stores use for
any request.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import logging
import math
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus, urlsplit
from xml.etree import ElementTree

import botocore.exceptions
import botocore.session
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies, parse_timestamp

from pqcache.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import HIDDEN, Capabilities, StagedFile, StoreTarget, check_options, is_true
from pqcache.store.drivers.http_client import Body, HttpConnections, HttpSource, pool_classes
from pqcache.store.drivers.remote import answer_error
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact, userinfo
from pqcache.units import printable

log = logging.getLogger("pqcache.store")

_MAX_PAGE = 32 << 20  # bytes of a page of a listing, which has 1,000 keys
_VALID = 300  # seconds that a URL may be used for, from when it is made
_EXPRESS = "--x-s3"  # ends the names of directory buckets: their listings have no order, and sessions are their own
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
_ENTRIES = "pqcache"  # the key of a page under which the handler puts them
_ADVICE = "the listing cannot be trusted: nothing was published, check the store, or list it with another tool"
MAX_KEYS = 20_000_000  # of a listing; more would not fit into memory
MAX_EMPTY_PAGES = 100  # in a row
_PART, _MAX_PARTS, _PARALLEL_PARTS = 16 << 20, 10_000, 4  # of a multipart upload; bytes, parts, threads
_UPLOADS = f"{HIDDEN}/uploads"  # a record for each multipart upload that is neither completed nor aborted


class S3Source(HttpSource):
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
        """Shares connections with this source as long as that is open."""
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
    """Headers, by lower-case name, and body of a response; ``close`` it after use."""

    headers: Mapping[str, str] | http.client.HTTPMessage
    body: Body
    close: Callable[[], None]


class RangeReader:
    """Sends GETs for ranges of one bucket's objects. Errors are those of botocore's client and ``http.client``."""

    def __init__(self, client: Any, bucket: str, extra: Mapping[str, str], ca_bundle: str | None) -> None:
        self._client, self._bucket, self._extra, self._ca_bundle = client, bucket, extra, ca_bundle
        self._headers = {"x-amz-request-payer": payer} if (payer := extra.get("RequestPayer")) else {}
        self._servers: dict[str, HttpConnections | None] = {}  # by scheme and host; None for one behind a proxy

    def open(self, key: str, first: int, last: int, tag: str) -> Response:
        """GET the bytes ``first`` to ``last``; with ``tag``, only of that version."""
        found = None
        if tag.isascii() and tag.isprintable() and not self._bucket.endswith(_EXPRESS):
            found = self._get(key, {"Range": f"bytes={first}-{last}", **({"If-Match": f'"{tag}"'} if tag else {})})
        return found or self._get_by_client(key, first, last, tag)

    def close(self) -> None:
        for connections in self._servers.values():
            if connections is not None:
                connections.close()

    def _get(self, key: str, headers: Mapping[str, str]) -> Response | None:
        """None if the request has to go through the client."""
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=get_cert_path(ca_bundle or True))
    return context


def new_session(url: str, options: Mapping[str, str]) -> Any:
    """A session shared by all clients, as it loads the description of S3."""
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
    """Make a client that waits ``timeout`` seconds for an answer. A bad endpoint or region raises UsageError."""
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
    """The signature version, which signed URLs use only if it is set."""
    return str((session.get_scoped_config().get("s3") or {}).get("signature_version", "s3v4"))


def _set_limits(client: Any, timeout: float, max_answer: float) -> None:
    """Limit the minimum speed and size of a client's responses, also through a proxy."""
    pools = getattr(client._endpoint.http_session, "_pool_classes_by_scheme", None)
    if not isinstance(pools, dict):
        log.debug(
            "s3: the connection pools of this botocore are unknown: answers have no floor of speed and no largest size"
        )
        return
    pools.update(pool_classes(pools, timeout, max_answer))  # it is the dict of all managers


class _KeyChecker:
    """Checks the keys of a listing: each is new, below the prefix, and in order."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.last, self.count = "", 0
        self._place, self._prefix = f"s3://{bucket}/{prefix}".rstrip("/"), prefix
        self._seen: set[str] | None = set() if bucket.endswith(_EXPRESS) else None

    def check(self, key: str) -> None:
        if self._seen is not None:
            is_new = key not in self._seen
            self._seen.add(key)
        else:
            is_new = key > self.last or not self.count  # as their bytes in UTF-8
        if not is_new and (key == self.last or self._seen is not None):
            raise self.error(f"lists {printable(key)} twice")
        if not is_new:
            raise self.error(f"lists {printable(key)} after {printable(self.last)}, out of order or repeated")
        if not key.startswith(self._prefix):
            raise self.error(f"lists {printable(key)}, which is not below it")
        self.last, self.count = key, self.count + 1
        if self.count > MAX_KEYS:
            raise SourceError(self._place, f"lists more than {MAX_KEYS:,} keys", "name a part of it")

    def error(self, reason: str) -> SourceError:
        return SourceError(self._place, reason, _ADVICE)


def list_bucket(client: Any, bucket: str, prefix: str, extra: Mapping[str, str]) -> Iterator[tuple[str, Identity]]:
    """Yield key and identity of each object below ``prefix``; ``extra`` are request parameters.

    A listing that contradicts itself raises SourceError; errors of the client are not translated.
    """
    keys = _KeyChecker(bucket, prefix)
    request = {"Bucket": bucket, "Prefix": prefix, **extra}
    call, empty = client.list_objects_v2, 0
    position: dict[str, str] = {}
    while True:
        page, before = call(**request, **position), keys.count
        if _ENTRIES not in page:
            raise keys.error("answers with something that is not a listing")
        try:
            for key, known in entries(page):
                keys.check(key)
                yield key, known
        except KeyError as error:
            raise keys.error(f"lists an object without {error.args[0]}") from error
        except (ValueError, OverflowError) as error:
            raise keys.error(f"lists an object whose size or date cannot be read ({first_line(error)})") from error
        token = page.get("NextContinuationToken")
        if not page.get("IsTruncated", bool(token)):
            return
        empty = empty + 1 if keys.count == before else 0
        if empty and (not token or empty > MAX_EMPTY_PAGES):
            raise keys.error("has no end: pages without a key lead to others" if token else "ends in an empty page")
        if token:
            position = {"ContinuationToken": token}
        else:
            if call != client.list_objects:
                log.debug("s3: %s is listed with version 1 of the API: a page has no token", bucket)
            call, position = client.list_objects, {"Marker": keys.last}


def take_entries(client: Any) -> None:
    """Make a client parse listings into the form that ``entries`` reads."""
    for name in ("ListObjectsV2", "ListObjects"):
        client.meta.events.register(f"before-parse.s3.{name}", _take)


def entries(page: Mapping[str, Any]) -> Iterator[tuple[str, Identity]]:
    encoded = page.get("EncodingType") == "url"
    for fields in page[_ENTRIES]:
        key = fields["Key"]
        if encoded:
            slash = "%2F" if "%2F" in key else "/"  # Ceph encodes a slash, Amazon does not
            directory, slash, name = key.rpartition(slash)
            key = _decoded(directory + slash) + unquote_plus(name)
        size = int(fields["Size"])
        if not 0 <= size < 1 << 63:
            raise ValueError(f"{size:,} bytes")
        yield key, Identity(size, _nanoseconds(fields["LastModified"]), fields["ETag"].strip('"'))


def identity(size: int, modified: datetime, etag: str) -> Identity:
    """From values parsed by botocore."""
    return Identity(size, int(modified.timestamp()) * 1_000_000_000, etag.strip('"'))


def _take(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    if response_dict["status_code"] >= 300:
        return
    try:
        root = ElementTree.fromstring(response_dict["body"])
    except ElementTree.ParseError:
        return  # botocore reports it
    space = root.tag.rpartition("ListBucketResult")[0]
    if root.tag != f"{space}ListBucketResult":
        return
    skip, contents = len(space), f"{space}Contents"
    found = [{child.tag[skip:]: child.text or "" for child in item} for item in root.iter(contents)]
    rest = ElementTree.Element(root.tag)
    rest.extend(child for child in root if child.tag != contents)
    response_dict["body"] = ElementTree.tostring(rest)
    customized_response_dict[_ENTRIES] = found


_decoded = lru_cache(1024)(unquote_plus)


@lru_cache(1024)
def _nanoseconds(text: str) -> int:
    """Parse a time like 2026-11-20T04:00:03.000Z, rounded down to a second."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        moment = parse_timestamp(text)
    return int(moment.timestamp()) * 1_000_000_000


class S3Target(StoreTarget):
    """A Target over botocore.

    S3 cannot rename. So every file is a multipart upload, which readers do not see until it is completed. Those of a
    partition are completed one after the other once all are uploaded. Until then a small object beside the target's
    records names each upload, so that a later run aborts those left by a killed one, but not other uploads to the
    bucket.
    """

    _source: S3Source

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        super().__init__(S3Source(url, options, timeout))
        self._client = new_client(new_session(url, options), url, options, timeout, attempts=5)
        self._bucket = {"Bucket": self._source._bucket, **self._source._extra}
        self._prefix = f"{self._source._root}/" if self._source._root else ""

    def begin(self) -> None:
        self._abort_left(self.list())

    def write(self, path: str, data: bytes) -> None:
        with self._source.errors(path):
            self._client.put_object(**self._bucket, Key=self._source.key_of(path), Body=data)

    def remove(self, paths: Sequence[str]) -> None:
        with self._source.errors(""):
            for first in range(0, len(paths), 1000):
                keys = [{"Key": self._source.key_of(path)} for path in paths[first : first + 1000]]
                answer = self._client.delete_objects(**self._bucket, Delete={"Objects": keys, "Quiet": True})
                for failed in answer.get("Errors", ()):
                    subject = f"s3://{self._bucket['Bucket']}/{failed['Key']}"
                    raise SourceError(subject, f"cannot be removed ({failed['Code']})")

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        size = file.stat().st_size
        length = max(_PART, -(-size // _MAX_PARTS))
        key = self._source.key_of(path)
        with self._source.errors(path):
            upload = self._client.create_multipart_upload(**self._bucket, Key=key)["UploadId"]
            try:
                self.write(_record_of(upload), json.dumps({"key": key, "upload": upload}).encode())
                with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
                    first = range(0, size, length)
                    etags = list(pool.map(lambda offset: self._part(file, key, upload, offset, length), first))
            except BaseException:
                self._abort([(key, upload)])
                raise
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        return StagedFile(path, file, size, (upload, parts))

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        for item in staged:
            upload, parts = item.handle
            try:
                with self._source.errors(item.path):
                    self._client.complete_multipart_upload(
                        **self._bucket,
                        Key=self._source.key_of(item.path),
                        UploadId=upload,
                        MultipartUpload={"Parts": parts},
                    )
            except SourceNotFound:  # completed by an earlier call, whose answer was lost
                if self._source.stat(item.path).size != item.size:
                    raise
        self._forget([item.handle[0] for item in staged])

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        self._abort([(self._source.key_of(item.path), item.handle[0]) for item in staged])

    def finish(self) -> None:
        hidden = [file for file in self._source.list() if file.path.startswith(f"{HIDDEN}/")]
        self._abort_left(hidden)
        self.remove([file.path for file in hidden])

    def abandon(self) -> None:
        self.finish()

    def close(self) -> None:
        super().close()
        self._client.close()

    def _part(self, file: Path, key: str, upload: str, offset: int, length: int) -> str:
        with file.open("rb", buffering=0) as data:
            body = os.pread(data.fileno(), length, offset)
        answer = self._client.upload_part(
            **self._bucket,
            Key=key,
            UploadId=upload,
            PartNumber=offset // length + 1,
            Body=body,
            ContentMD5=base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode(),
        )
        return str(answer["ETag"])

    def _abort_left(self, files: Iterable[SourceFile]) -> None:
        """Abort recorded uploads, of this run or of killed ones."""
        for file in [file for file in files if file.path.startswith(f"{_UPLOADS}/")]:
            with suppress(SourceNotFound):  # removed by another run
                self._abort_recorded(file)

    def _abort_recorded(self, file: SourceFile) -> None:
        data = self.read_start(file.path, file.identity.size)
        try:
            record = json.loads(data)
            key, upload = str(record["key"]), str(record["upload"])
        except (ValueError, TypeError, KeyError):
            log.debug("s3: %s is not a record of an upload", self._source.name_of(file.path))
            return
        if key.startswith(self._prefix):
            self._abort([(key, upload)])

    def _abort(self, uploads: Sequence[tuple[str, str]]) -> None:
        """Abort uploads, and keep the records of those that may remain. Never fails."""
        gone = []
        for key, upload in uploads:
            try:
                with suppress(SourceNotFound), self._source.errors(""):
                    self._client.abort_multipart_upload(**self._bucket, Key=key, UploadId=upload)
            except SourceError as error:
                log.debug("s3: the upload of %s is not aborted: %s", key, error)
                continue
            gone.append(upload)
        self._forget(gone)

    def _forget(self, uploads: Sequence[str]) -> None:
        """Remove records of completed or aborted uploads; leftovers are harmless."""
        try:
            self.remove([_record_of(upload) for upload in uploads])
        except SourceError as error:
            log.debug("s3: records of uploads are left: %s", error)


def _record_of(upload: str) -> str:
    return f"{_UPLOADS}/{hashlib.sha256(upload.encode()).hexdigest()[:32]}.json"
