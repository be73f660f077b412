"""A source and a target on S3 or a compatible store, through botocore, which starts faster than boto3.

Credentials, region, profile and endpoint come from where every AWS tool finds them (``AWS_*`` variables, ``~/.aws``,
instance roles), or from ``-o``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from copy import copy
from pathlib import Path
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from pqcache.errors import (
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
)
from pqcache.store.drivers.base import FIRST_ANSWER_TIMEOUT, TIMEOUT, Capabilities, Source, check_options, read_range
from pqcache.store.drivers.s3_client import ERRORS, OPTIONS, is_true, new_client, new_session, source_error
from pqcache.store.drivers.s3_get import Body, RangeReader
from pqcache.store.drivers.s3_list import identity, list_bucket, take_entries
from pqcache.store.drivers.target import HIDDEN, StagedFile
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact

log = logging.getLogger("pqcache.store")

_PART, _MAX_PARTS, _PARALLEL_PARTS = 16 << 20, 10_000, 4  # of a multipart upload; bytes, parts, threads
_CHUNK = 256 << 10  # bytes; a larger one would be fresh memory each time, with page faults
_UPLOADS = f"{HIDDEN}/uploads"  # a record for each multipart upload that is neither completed nor aborted


class S3Source(Source):
    """A Source over botocore; see ``pqcache.store.drivers.base.Source``."""

    capabilities = Capabilities(reads_versions=True)

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        check_options("s3://", options, OPTIONS)
        parts = urlsplit(url.replace("?", "%3F").replace("#", "%23"))
        self.url = redact(url).rstrip("/")
        self._bucket = parts.netloc.rpartition("@")[2]
        self._root = url.partition("://")[2].partition("/")[2].strip("/")
        self._only = ""
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
        self._lister = new_client(session, url, options, min(FIRST_ANSWER_TIMEOUT, timeout))
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
            for key, known in list_bucket(self._lister, self._bucket, prefix, self._extra):
                found = True
                path = key[len(prefix) :]
                if path and not (path.endswith("/") and known.size == 0):
                    yield SourceFile(path, known)
            if not found and self._root and self._is_file():
                yield SourceFile(self._only, self.stat(self._only))
        except ERRORS as error:
            raise source_error(self._name(""), error) from error

    def stat(self, path: str) -> Identity:
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=self._key(path), **self._extra)
        except ERRORS as error:
            raise source_error(self._name(path), error) from error
        try:
            return identity(head["ContentLength"], head["LastModified"], head["ETag"])
        except KeyError as error:
            reason = f"the server answers without {error.args[0]}, as S3 never does"
            raise SourceError(self._name(path), reason, "check the endpoint") from error

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        if length <= 0:
            return
        try:
            with self._opened(path, offset, length, tag) as body:
                while length > 0 and (chunk := body.read(min(_CHUNK, length))):
                    length -= len(chunk)
                    yield chunk
        except ERRORS as error:
            raise source_error(self._name(path), error) from error

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
        except ERRORS as error:
            if have:
                yield have
            raise source_error(self._name(path), error) from error
        if have:
            yield have

    def below(self, path: str) -> S3Source:
        """Return a source of the directory ``path``, which uses the connections of this one as long as it is open."""
        source = copy(self)
        source.url, source._root, source._is_borrower = f"{self.url}/{path}", self._key(path), True
        return source

    def close(self) -> None:
        if self._is_borrower:
            return
        self._ranges.close()
        self._client.close()
        self._lister.close()

    def _is_file(self) -> bool:
        """Return whether the URL names one object; if so, its directory becomes the root."""
        try:
            self._client.head_object(Bucket=self._bucket, Key=self._root, **self._extra)
        except ClientError:
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


class S3Target:
    """A Target over botocore; see ``pqcache.store.drivers.base.Target``.

    S3 cannot rename. So every file is a multipart upload, which readers do not see until it is completed, and those of
    a partition are completed one after the other once all of them are uploaded. Until then a small object beside the
    records of the target names each upload, so that a later run aborts what a killed one has left, and nothing else:
    not what others upload to the same bucket.
    """

    scratch = None

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        self._source = S3Source(url, options, timeout)
        self._client = new_client(new_session(url, options), url, options, timeout, attempts=5)
        self._bucket = {"Bucket": self._source._bucket, **self._source._extra}
        self._prefix = f"{self._source._root}/" if self._source._root else ""
        self.url = self._source.url
        self.unfinished = f"{self.url}/{HIDDEN}"

    def list(self) -> Iterator[SourceFile]:
        yield from self._source.list()

    def begin(self) -> None:
        self._abort_left(self.list())

    def read_start(self, path: str, size: int) -> bytes:
        return read_range(self._source, path, 0, size)

    def write(self, path: str, data: bytes) -> None:
        with self._errors(path):
            self._client.put_object(**self._bucket, Key=self._source._key(path), Body=data)

    def remove(self, paths: Sequence[str]) -> None:
        with self._errors(""):
            for first in range(0, len(paths), 1000):
                keys = [{"Key": self._source._key(path)} for path in paths[first : first + 1000]]
                answer = self._client.delete_objects(**self._bucket, Delete={"Objects": keys, "Quiet": True})
                for failed in answer.get("Errors", ()):
                    subject = f"s3://{self._bucket['Bucket']}/{failed['Key']}"
                    raise SourceError(subject, f"cannot be removed ({failed['Code']})")

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        size = file.stat().st_size
        length = max(_PART, -(-size // _MAX_PARTS))
        key = self._source._key(path)
        with self._errors(path):
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
                with self._errors(item.path):
                    self._client.complete_multipart_upload(
                        **self._bucket,
                        Key=self._source._key(item.path),
                        UploadId=upload,
                        MultipartUpload={"Parts": parts},
                    )
            except SourceNotFound:  # completed by an earlier call, whose answer was lost
                if self._source.stat(item.path).size != item.size:
                    raise
        self._forget([item.handle[0] for item in staged])

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        self._abort([(self._source._key(item.path), item.handle[0]) for item in staged])

    def finish(self) -> None:
        hidden = [file for file in self._source.list() if file.path.startswith(f"{HIDDEN}/")]
        self._abort_left(hidden)
        self.remove([file.path for file in hidden])

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

    def _abort_left(self, files: Iterable[SourceFile]) -> None:
        """Abort the uploads that are recorded among the target's files, by this run or a killed one."""
        for file in [file for file in files if file.path.startswith(f"{_UPLOADS}/")]:
            with suppress(SourceNotFound):  # removed by another run
                self._abort_recorded(file)

    def _abort_recorded(self, file: SourceFile) -> None:
        data = self.read_start(file.path, file.identity.size)
        try:
            record = json.loads(data)
            key, upload = str(record["key"]), str(record["upload"])
        except (ValueError, TypeError, KeyError):
            log.debug("s3: %s is no record of an upload", self._source._name(file.path))
            return
        if key.startswith(self._prefix):
            self._abort([(key, upload)])

    def _abort(self, uploads: Sequence[tuple[str, str]]) -> None:
        """Abort uploads and remove their records; the record of one that may still be there is kept. Never fails."""
        gone = []
        for key, upload in uploads:
            try:
                self._client.abort_multipart_upload(**self._bucket, Key=key, UploadId=upload)
            except ERRORS as error:
                if not isinstance(source_error(key, error), SourceNotFound):
                    log.debug("s3: the upload of %s is not aborted: %s", key, error)
                    continue
            gone.append(upload)
        self._forget(gone)

    def _forget(self, uploads: Sequence[str]) -> None:
        """Remove the records of uploads that are no more; one that is left does no harm."""
        try:
            self.remove([_record_of(upload) for upload in uploads])
        except SourceError as error:
            log.debug("s3: records of uploads are left: %s", error)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            raise source_error(self._source._name(path), error) from error


def _record_of(upload: str) -> str:
    """Return where an upload is recorded."""
    return f"{_UPLOADS}/{hashlib.sha256(upload.encode()).hexdigest()[:32]}.json"
