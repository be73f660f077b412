"""A target on S3 or a compatible store, through botocore."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pqcache.errors import (
    SourceError,
    SourceNotFound,
)
from pqcache.store.drivers.base import TIMEOUT
from pqcache.store.drivers.s3 import S3Source, new_client, new_session
from pqcache.store.drivers.target import HIDDEN, StagedFile, StoreTarget
from pqcache.store.manifest import SourceFile

log = logging.getLogger("pqcache.store")

_PART, _MAX_PARTS, _PARALLEL_PARTS = 16 << 20, 10_000, 4  # of a multipart upload; bytes, parts, threads
_UPLOADS = f"{HIDDEN}/uploads"  # a record for each multipart upload that is neither completed nor aborted


class S3Target(StoreTarget):
    """A Target over botocore.

    S3 cannot rename. So every file is a multipart upload, which readers do not see until it is completed, and those of
    a partition are completed one after the other once all of them are uploaded. Until then a small object beside the
    records of the target names each upload, so that a later run aborts what a killed one has left, and nothing else:
    not what others upload to the same bucket.
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
            log.debug("s3: %s is no record of an upload", self._source.name_of(file.path))
            return
        if key.startswith(self._prefix):
            self._abort([(key, upload)])

    def _abort(self, uploads: Sequence[tuple[str, str]]) -> None:
        """Abort uploads and remove their records; the record of one that may still be there is kept. Never fails."""
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
        """Remove the records of completed or aborted uploads; a leftover record is harmless."""
        try:
            self.remove([_record_of(upload) for upload in uploads])
        except SourceError as error:
            log.debug("s3: records of uploads are left: %s", error)


def _record_of(upload: str) -> str:
    return f"{_UPLOADS}/{hashlib.sha256(upload.encode()).hexdigest()[:32]}.json"
