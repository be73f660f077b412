"""A target on Google Cloud Storage or Azure Blob Storage, through obstore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore

from pqcache.errors import SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.base import TIMEOUT, read_range
from pqcache.store.drivers.object_store import ObjectStoreSource, new_store
from pqcache.store.drivers.target import HIDDEN, STAGING, StagedFile
from pqcache.store.drivers.time_limits import with_time_limit
from pqcache.store.manifest import SourceFile

log = logging.getLogger("pqcache.store")

T = TypeVar("T")
_PART, _MAX_PARTS, _PARALLEL_PARTS = 8 << 20, 10_000, 4  # of an upload; bytes, parts, parts at once
_PART_TIMEOUT = 120.0  # seconds for one part, however slow the network
_UPLOAD_TIMEOUT = 30 * 24 * 3600.0  # seconds for a file: each of its parts has a limit
_CLIENT_TRIES = 2  # of one request, before the caller tries the whole file again
_DELETED_AT_ONCE = 256  # as many as Azure takes in one request
_TAIL = 4096  # bytes that are compared after a copy
_LISTINGS = 5  # of what is to be removed, until there is nothing


class ObjectStoreTarget:
    """A Target over obstore; see ``pqcache.store.drivers.base.Target``.

    These stores cannot rename, and obstore cannot leave an upload to be completed later. So the files of an attempt
    are staged in ``_pqcache/tmp``, and copied within the store to where readers see them, one after the other: each
    of them appears complete. The copy is made by the store, so that no byte is sent again.
    """

    scratch = None

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        self._source = ObjectStoreSource(url, options, timeout)
        self._timeout = timeout
        place = self._source.place
        if place.is_anonymous:  # with which obstore asks Google's machines for an account all the same
            advice = "give -o token=TOKEN (any for an emulator)" if place.scheme == "gs" else "give -o account_key=KEY"
            raise UsageError(self._source.url, "is written with credentials only", f"{advice}, or in the environment")
        self._store = new_store(place, max(timeout, _PART_TIMEOUT), _CLIENT_TRIES)
        self.url = self._source.url
        self.unfinished = f"{self.url}/{HIDDEN}"

    def list(self) -> Iterator[SourceFile]:
        yield from self._source.list()

    def begin(self) -> None:
        self.remove([file.path for file in self.list() if file.path.startswith(f"{STAGING}/")])

    def read_start(self, path: str, size: int) -> bytes:
        return read_range(self._source, path, 0, size)

    def write(self, path: str, data: bytes) -> None:
        self._call(path, lambda key: obstore.put(self._store, key, data, use_multipart=False))

    def remove(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), _DELETED_AT_ONCE):
            some = paths[first : first + _DELETED_AT_ONCE]
            keys = [self._source.key_of(path) for path in some]
            try:
                self._call("", partial(self._delete, keys))
            except SourceNotFound:  # one of them: which others are removed is not known
                for path in some:
                    with suppress(SourceNotFound):
                        self._call(path, lambda key: self._delete([key]))

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        size, staged = file.stat().st_size, f"{STAGING}/{token}/{path.rpartition('/')[2]}"
        part = max(_PART, -(-size // _MAX_PARTS))

        def put(key: str) -> None:
            obstore.put(self._store, key, file, chunk_size=part, max_concurrency=_PARALLEL_PARTS)

        self._call(staged, put, _UPLOAD_TIMEOUT)
        if (stored := self._source.stat(staged).size) != size:
            raise SourceUnavailable(self._source.name_of(staged), f"has {stored:,} bytes of {size:,} that were sent")
        return StagedFile(path, file, size, staged)

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        for item in staged:
            to = self._source.key_of(item.path)
            with suppress(SourceNotFound):  # published by an earlier call, whose answer was lost
                self._call(item.handle, partial(self._copy, to))
            self._check_copy(item)
        self.discard(token, staged)

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        try:
            self.remove([item.handle for item in staged])
        except SourceError as error:
            log.debug("%s: staged files are left: %s", self.url, error)

    def finish(self) -> None:
        for _ in range(_LISTINGS):  # an empty directory, which some accounts of Azure have, is listed once it is empty
            hidden = [file.path for file in self.list() if f"{file.path}/".startswith(f"{HIDDEN}/")]
            if not hidden:
                return
            self.remove(hidden)

    def abandon(self) -> None:
        self.finish()

    def close(self) -> None:
        self._source.close()

    def _copy(self, to: str, key: str) -> None:
        obstore.copy(self._store, key, to)

    def _delete(self, keys: Sequence[str], _: str = "") -> None:
        obstore.delete(self._store, keys)

    def _check_copy(self, item: StagedFile) -> None:
        """Raise SourceUnavailable unless readers see the file: Azure may copy on after it has answered."""
        name, found = self._source.name_of(item.path), self._source.stat(item.path)
        start = max(0, item.size - _TAIL)
        tail = read_range(self._source, item.path, start, item.size - start) if found.size == item.size else b""
        with item.file.open("rb") as file:
            file.seek(start)
            if tail != file.read():
                raise SourceUnavailable(name, "is not the file that was copied there", "see whether others write there")

    def _call(self, path: str, call: Callable[[str], T], seconds: float | None = None) -> T:
        """Return what ``call`` does with the name of an object, within a time limit; its errors become pqcache's."""
        with self._source.errors(path):
            limit = max(self._timeout, _PART_TIMEOUT) * (_CLIENT_TRIES + 1) if seconds is None else seconds
            return next(with_time_limit(lambda: iter([call(self._source.key_of(path))]), limit))
