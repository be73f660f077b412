"""A dataset on S3 or a compatible store, through botocore: the leanest client that was measured.

It is what boto3 is made of, without what boto3 takes to start.

Credentials, region, profile and endpoint come from where every AWS tool finds them (``AWS_*`` variables,
``~/.aws``, instance roles), or from ``-o``.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pqcache.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.store.drivers.base import FIRST_ANSWER_TIMEOUT, HIDDEN, TIMEOUT, StagedFile, check_options
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact, userinfo

try:
    import botocore.exceptions
    import botocore.session
    import urllib3.exceptions
    from botocore import UNSIGNED
    from botocore.config import Config

    from pqcache.store.drivers.s3_get import Body, RangeReader
    from pqcache.store.drivers.s3_list import entries, identity, take_entries
except ImportError as error:
    raise UsageError("s3://", "needs botocore", "install it with: pip install 'pqcache[s3]'") from error

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
_PART, _MOST_PARTS, _PARTS_AT_ONCE = 16 << 20, 10_000, 4  # of a multipart upload
_CHUNK = 256 << 10  # measured: of larger ones each is fresh memory, whose page faults cost more than the copy
_WORTH_A_PAGE = 8  # files for which one page of a listing is cheaper than a HEAD for each
_DENIED = {
    "403", "401", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken",
    "InvalidToken", "TokenRefreshRequired", "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed",
}  # fmt: skip
_MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NoSuchUpload", "NotFound"}


class S3Source:
    """A Source over botocore; see ``pqcache.store.drivers.base.Source``."""

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        check_options("s3://", options, OPTIONS)
        parts = urlsplit(url.replace("?", "%3F").replace("#", "%23"))
        self.url = redact(url).rstrip("/")
        self._bucket = parts.netloc.rpartition("@")[2]
        self._root = url.partition("://")[2].partition("/")[2].strip("/")
        self._only = ""
        if not self._bucket:
            raise UsageError("s3://", "no bucket", "write s3://BUCKET/PATH")
        if ":" in self._bucket:
            raise UsageError(self.url, "write a '/' in the secret as %2F, or give -o key=KEY -o secret=SECRET")
        if "@" in options.get("endpoint", ""):
            raise UsageError("-o endpoint", "holds a user or a password", "give -o key=KEY -o secret=SECRET instead")
        self._extra = {"RequestPayer": "requester"} if _is_true(options, "requester_pays") else {}
        session = _session(url, options)
        self._client = _client(session, url, options, timeout)
        self._lister = _client(session, url, options, min(FIRST_ANSWER_TIMEOUT, timeout))
        take_entries(self._client)
        take_entries(self._lister)
        ca_bundle = session.get_config_variable("ca_bundle")
        self._ranges = RangeReader(self._client, self._bucket, self._extra, ca_bundle)

    def list(self) -> Iterator[SourceFile]:
        prefix = f"{self._root}/" if self._root else ""
        found = False
        try:
            if self._only:
                yield SourceFile(self._only, self.stat(self._only))
                return
            pages = self._lister.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, **self._extra
            )
            for page in pages:
                for key, known in entries(page):
                    found = True
                    path = key[len(prefix) :]
                    if path and not (path.endswith("/") and known.size == 0):
                        yield SourceFile(path, known)
            if not found and self._root and self._is_file():
                yield SourceFile(self._only, self.stat(self._only))
        except _ERRORS as error:
            raise self._error("", error) from error

    def stat(self, path: str) -> Identity:
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=self._key(path), **self._extra)
        except _ERRORS as error:
            raise self._error(path, error) from error
        return identity(head["ContentLength"], head["LastModified"], head["ETag"])

    def stat_all(self, paths: Sequence[str]) -> Mapping[str, Identity]:
        """Ask by listings, as long as a page of one tells of several files, and one by one for what they lack."""
        found: dict[str, Identity] = {}
        left = sorted(paths)
        start = len(self._key(""))
        while len(left) >= _WORTH_A_PAGE:
            wanted, before = set(left), len(left)
            try:
                page = self._client.list_objects_v2(
                    Bucket=self._bucket,
                    Prefix=self._key(""),
                    StartAfter=self._key(left[0])[:-1],  # comes before it, with hardly anything between
                    MaxKeys=2 * before,
                    **self._extra,
                )
            except _ERRORS as error:
                raise self._error("", error) from error
            for key, known in entries(page):
                if (path := key[start:]) in wanted:
                    found[path] = known
            left = [path for path in left if path not in found]
            if before - len(left) < _WORTH_A_PAGE:
                break
        for path in left:
            with suppress(SourceNotFound):
                found[path] = self.stat(path)
        return found

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        if length <= 0:
            return
        try:
            with self._opened(path, offset, length, tag) as body:
                while length > 0 and (chunk := body.read(min(_CHUNK, length))):
                    length -= len(chunk)
                    yield chunk
        except _ERRORS as error:
            raise self._error(path, error) from error

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        if length <= 0:
            return
        have = 0
        try:
            with self._opened(path, offset, length, tag) as body:
                while length > 0 and (count := body.readinto(buffer[have : have + min(_CHUNK, length)])):
                    have, length = have + count, length - count
                    if have == len(buffer):
                        yield have
                        have = 0
        except _ERRORS as error:
            if have:
                yield have
            raise self._error(path, error) from error
        if have:
            yield have

    def close(self) -> None:
        self._ranges.close()
        self._client.close()
        self._lister.close()

    def _is_file(self) -> bool:
        """Return whether the URL names one object; if so, its directory becomes the root."""
        try:
            self._client.head_object(Bucket=self._bucket, Key=self._root, **self._extra)
        except botocore.exceptions.ClientError:
            return False
        self._root, _, self._only = self._root.rpartition("/")
        return True

    @contextmanager
    def _opened(self, path: str, offset: int, length: int, tag: str) -> Iterator[Body]:
        last = offset + length - 1
        with closing(self._ranges.open(self._key(path), offset, last, tag)) as response:
            headers = response.headers
            # a body of another length was changed on its way, as by compression: no part of it is the file's
            exact = headers.get("content-length", str(length)) == str(length)
            if not exact or not headers.get("content-range", "").startswith(f"bytes {offset}-{last}/"):
                raise SourceUnavailable(self._name(path), "the server sent another range than was asked for")
            if tag and headers.get("etag", "").strip('"') != tag:
                raise SourceChanged(self._name(path), "is not the version that was listed")
            yield response.body

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}" if self._root else path

    def _name(self, path: str) -> str:
        return f"s3://{self._bucket}/{self._key(path)}".rstrip("/")

    def _error(self, path: str, error: Exception) -> SourceError:
        name = self._name(path)
        if isinstance(error, botocore.exceptions.ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code in _MISSING or status == 404:
                what = "no such bucket" if code == "NoSuchBucket" else "no such object"
                return SourceNotFound(name, f"{what}", "check the URL")
            if status == 412:
                return SourceChanged(name, "is not the version that was listed")
            if code in _DENIED or status in (401, 403):
                return SourceDenied(
                    name,
                    f"access denied ({code})",
                    "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, -o profile=NAME, or -o anon=true "
                    "for public data)",
                )
            if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout"):
                return SourceUnavailable(name, f"the server answers {status} {code}", "try again later")
            return SourceError(name, f"the server answers {status} {code}")
        if isinstance(error, _NO_CREDENTIALS):
            return SourceDenied(
                name,
                "no credentials found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or -o anon=true for public data",
            )
        reason = first_line(error)
        reason = re.sub(r"://[^/@\s\"]*@", "://***@", reason)  # AWS_ENDPOINT_URL may hold a password
        return SourceUnavailable(name, f"{reason}", "check the endpoint and the network")


class S3Target:
    """A Target over botocore; see ``pqcache.store.repartition.target.Target``.

    S3 cannot rename. So every file is a multipart upload, which nobody sees until it is completed, and those of a
    partition are completed one right after the other, once all of them have arrived.
    """

    scratch = None

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        self._source = S3Source(url, options, timeout)
        self._client = _client(_session(url, options), url, options, timeout, attempts=5)
        self._bucket = {"Bucket": self._source._bucket, **self._source._extra}
        self._prefix = f"{self._source._root}/" if self._source._root else ""
        self.url = self._source.url

    def list(self) -> Iterator[SourceFile]:
        yield from self._source.list()

    def begin(self) -> None:
        with suppress(SourceDenied), self._errors(""):  # who may not list uploads leaves them to a lifecycle rule
            pages = self._client.get_paginator("list_multipart_uploads").paginate(**self._bucket, Prefix=self._prefix)
            for page in pages:
                for upload in page.get("Uploads", ()):
                    self._abort(upload["Key"], upload["UploadId"])

    def read(self, path: str, size: int) -> bytes:
        return b"".join(self._source.read(path, 0, size))

    def write(self, path: str, data: bytes) -> None:
        with self._errors(path):
            self._client.put_object(**self._bucket, Key=self._source._key(path), Body=data)

    def remove(self, paths: Sequence[str]) -> None:
        with self._errors(""):
            for first in range(0, len(paths), 1000):
                keys = [{"Key": self._source._key(path)} for path in paths[first : first + 1000]]
                answer = self._client.delete_objects(**self._bucket, Delete={"Objects": keys, "Quiet": True})
                for failed in answer.get("Errors", ()):
                    raise SourceError(
                        f"{self._bucket['Bucket']}/{failed['Key']}", f"cannot be removed ({failed['Code']})"
                    )

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        size = file.stat().st_size
        length = max(_PART, -(-size // _MOST_PARTS))
        key = self._source._key(path)
        with self._errors(path):
            upload = self._client.create_multipart_upload(**self._bucket, Key=key)["UploadId"]
            try:
                with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:  # the interpreter's lock is free while they are sent
                    first = range(0, size, length)
                    etags = list(pool.map(lambda offset: self._part(file, key, upload, offset, length), first))
            except BaseException:
                self._abort(key, upload)
                raise
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        return StagedFile(path, file, size, (upload, parts))

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        for item in staged:
            upload, parts = item.handle
            try:
                with self._errors(item.path):
                    self._client.complete_multipart_upload(
                        **self._bucket,
                        Key=self._source._key(item.path),
                        UploadId=upload,
                        MultipartUpload={"Parts": parts},
                    )
            except SourceNotFound:  # completed before, the answer was lost
                if self._source.stat(item.path).size != item.size:
                    raise

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        for item in staged:
            self._abort(self._source._key(item.path), item.handle[0])

    def finish(self) -> None:
        hidden = [file.path for file in self._source.list() if file.path.startswith(f"{HIDDEN}/")]
        self.remove(hidden)

    def abandon(self) -> None:
        self.finish()

    def close(self) -> None:
        self._source.close()
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

    def _abort(self, key: str, upload: str) -> None:
        with suppress(*_ERRORS):
            self._client.abort_multipart_upload(**self._bucket, Key=key, UploadId=upload)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise self._source._error(path, error) from error


def _session(url: str, options: Mapping[str, str]) -> Any:
    """Return the session that all clients come from: it loads the description of S3 once."""
    user, password = userinfo(url)
    key, secret = options.get("key") or user, options.get("secret") or password
    if bool(key) != bool(secret):
        raise UsageError(f"{redact(url)}", "a key and a secret go together", "give both, or neither")
    session = botocore.session.Session(profile=options.get("profile"))
    if key:
        session.set_credentials(key, secret, options.get("token"))
    return session


def _client(session: Any, url: str, options: Mapping[str, str], timeout: float, attempts: int = 1) -> Any:
    config = Config(
        connect_timeout=5,
        read_timeout=timeout,
        # of downloads transfer.py retries, and knows where one stopped
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=64,
        signature_version=UNSIGNED if _is_true(options, "anon") else None,
        s3={"addressing_style": options["addressing"]} if "addressing" in options else None,
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
    )
    try:
        region = options.get("region") or session.get_config_variable("region") or "us-east-1"
        return session.create_client("s3", region_name=region, endpoint_url=options.get("endpoint"), config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(f"{redact(url)}", f"{error}") from error


_NO_CREDENTIALS = (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError)
# a body is read from urllib3's own object, and from Python's below it, which raise their own errors
_ERRORS = (
    http.client.HTTPException,
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    urllib3.exceptions.HTTPError,
    OSError,
)


def _is_true(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "").lower() in ("1", "true", "yes")
