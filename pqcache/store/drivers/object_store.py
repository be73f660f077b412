"""A source on Google Cloud Storage or Azure Blob Storage, through obstore: no event loop, and reads of one version.

obstore's threads do not survive a fork. A child whose parent has used it gets an error instead of waiting forever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore

from pqcache.errors import (
    PqcacheError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.store.drivers.base import FIRST_ANSWER_TIMEOUT, TIMEOUT, Capabilities, Source
from pqcache.store.drivers.network_errors import known_cause
from pqcache.store.drivers.object_store_config import BucketConfig, place_of
from pqcache.store.drivers.time_limits import Stalled, with_time_limit
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import redact

_PAGE = 1000  # objects that a listing passes between threads at once
_STORES = {"gs": GCSStore, "az": AzureStore}
_ERRORS = (BaseError, OSError, ValueError, Stalled)
_process = {"used": False, "forked": False}


class ObjectStoreSource(Source):
    """A Source over obstore; see ``pqcache.store.drivers.base.Source``."""

    capabilities = Capabilities(reads_versions=True)

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        self.url = redact(url).rstrip("/")
        self.place = place_of(url, options)
        self._root, self._only = self.place.root, ""
        self._timeout = timeout
        self._check_process()
        _process["used"] = True
        try:
            self._store = new_store(self.place, timeout)
        except (BaseError, ValueError, OSError) as error:
            advice = f"check the {self.place.credentials}"
            reason = re.sub(r"(Invalid Access Key).*", r"\1", first_line(error))  # the rest has a letter of it
            raise UsageError(self.url, _without_urls(reason), advice) from error

    def list(self) -> Iterator[SourceFile]:
        with self.errors(""):
            if self._only:
                yield SourceFile(self._only, self.stat(self._only))
                return
            start = len(self._root) + 1 if self._root else 0
            found, empty, directories = False, [], set()
            for page in with_time_limit(self._pages, min(FIRST_ANSWER_TIMEOUT, self._timeout)):
                for item in page:
                    found, path = True, item["path"][start:]
                    directories.add(path.rpartition("/")[0])
                    if item["size"]:
                        yield SourceFile(path, _identity(item))
                    else:
                        empty.append(SourceFile(path, _identity(item)))
            for file in empty:  # obstore leaves out the last '/' in the name of an object that stands for a directory
                if file.path not in _with_parents(directories):
                    yield file
            if not found and self._root:
                directory, _, name = self._root.rpartition("/")
                with suppress(SourceNotFound):
                    file = SourceFile(name, self._stat(self._root))
                    self._root, self._only = directory, name
                    yield file

    def stat(self, path: str) -> Identity:
        with self.errors(path):
            return self._stat(self.key_of(path))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        if length <= 0:
            return

        def chunks() -> Iterator[bytes]:
            condition = {"if_match": f'"{tag}"'} if tag else {}
            found = obstore.get(
                self._store, self.key_of(path), options={"range": (offset, offset + length), **condition}
            )
            if tag and _tag(found.meta) != tag:
                raise SourceChanged(self.name_of(path), "is not the version that was listed")
            if tuple(found.range) != (offset, offset + length):
                raise SourceUnavailable(self.name_of(path), "the server sent another range than was asked for")
            yield from found.stream(min_chunk_size=1)  # as they come: a slow connection is no stalled one

        with self.errors(path):
            yield from with_time_limit(chunks, self._timeout, len)

    def close(self) -> None:
        pass

    def _pages(self) -> Iterator[Any]:
        yield from obstore.list(self._store, f"{self._root}/" if self._root else None, chunk_size=_PAGE)

    def _stat(self, key: str) -> Identity:
        with self.errors(key[len(self._root) + 1 :] if self._root else key):
            return _identity(next(with_time_limit(lambda: iter([obstore.head(self._store, key)]), self._timeout)))

    def key_of(self, path: str) -> str:
        """Return the name of the object that a path is."""
        return f"{self._root}/{path}" if self._root else path

    def name_of(self, path: str) -> str:
        """Return the URL of a path, fit to be shown."""
        return f"{self.place.base}/{self.key_of(path)}".rstrip("/")

    def _check_process(self) -> None:
        if _process["forked"]:
            reason = "obstore was used before this process was forked, and cannot be used in it"
            raise SourceError(self.url, reason, "fork before the first use, or start processes with 'spawn'")

    @contextmanager
    def errors(self, path: str) -> Iterator[None]:
        """Turn what obstore raises into pqcache's errors."""
        self._check_process()
        try:
            yield
        except PqcacheError:
            raise
        except _ERRORS as error:
            raise _source_error(self.name_of(path), error, self.place) from error


def _forget_parent() -> None:
    _process["forked"] = _process["used"]


os.register_at_fork(after_in_child=_forget_parent)


def new_store(place: BucketConfig, timeout: float, retries: int = 0) -> Any:
    """Return obstore's client, which tries a request again ``retries`` times: a source's caller does that itself."""
    client = {
        "allow_http": place.allow_http,
        "connect_timeout": timedelta(seconds=5),
        "read_timeout": timedelta(seconds=timeout),  # so that a thread that was given up ends
        "timeout": timedelta(days=30),  # of a whole download, however large
    }
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=timeout)}
    return _STORES[place.scheme](place.bucket, config=place.config, client_options=client, retry_config=retry)


def _identity(item: Mapping[str, Any]) -> Identity:
    modified: datetime = item["last_modified"]  # a listing has milliseconds where an answer about one object has none
    return Identity(item["size"], int(modified.timestamp()) * 1_000_000_000, _tag(item))


def _tag(item: Mapping[str, Any]) -> str:
    return (item["e_tag"] or "").strip('"')


def _with_parents(directories: set[str]) -> set[str]:
    found: set[str] = set()
    for directory in directories:
        while directory and directory not in found:
            found.add(directory)
            directory = directory.rpartition("/")[0]
    return found


def _source_error(name: str, error: Exception, place: BucketConfig) -> PqcacheError:
    """Return pqcache's error; obstore's text has the URL of the request, which may hold a signature."""
    text = str(error)
    if (known := known_cause(name, error)) is not None:
        return known
    advice = f"check {place.endpoint_words} and the network"
    if isinstance(error, Stalled) or "kind: Timeout" in text:  # by the client's own limit, which is the same
        return SourceUnavailable(name, "no answer in time", advice)
    match = re.search(r"status code: (\d{3})", text)
    status = int(match[1]) if match else 0
    code = found[1] if (found := re.search(r"<Code>(\w+)</Code>", text)) else str(status)
    if "token request" in text and status < 500:
        return SourceDenied(name, "no credentials found, and this machine has no account of its own", place.advice)
    if code in ("ContainerNotFound", "NoSuchBucket"):
        return SourceNotFound(name, f"no such {place.bucket_word}", "check the URL")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return SourceNotFound(name, "no such object", "check the URL")
    if code in ("BlobArchived", "BlobBeingRehydrated"):
        return SourceDenied(name, f"is archived ({code})", "rehydrate it in the store")
    if isinstance(error, PreconditionError) or status == 412:
        return SourceChanged(name, "is not the version that was listed")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return SourceDenied(name, f"access denied ({code})" if status else "access denied", place.advice)
    if status >= 500 or status in (408, 429) or code == "PendingCopyOperation":
        return SourceUnavailable(name, f"the server answers {code}", "try again later")
    if status:
        return SourceError(name, f"the server answers {status} {code}".rstrip(), place.advice)
    if (reason := re.search(r"HTTP error: ([^\n]*)", text)) is not None:
        kind = SourceError if "InvalidCertificate" in text else SourceUnavailable
        return kind(name, _unreachable(text, _without_urls(reason[1])), advice)
    return SourceError(name, _without_urls(first_line(text)))


def _unreachable(text: str, reason: str) -> str:
    """Return which host did not answer and why, from obstore's text, of which ``reason`` is all that it says itself."""
    asked = re.search(r"Error performing [A-Z]+ (https?://\S+)", text)
    host = urlsplit(asked[1]).netloc.rpartition("@")[2] if asked is not None else ""
    if (system := re.search(r'message: "([^"]+)"', text)) is not None:
        reason = system[1].lower()
    elif "InvalidCertificate" in text:
        reason = "its certificate is not valid"
    if not host:
        return reason
    return f"{host} cannot be reached ({reason})" if "kind: Connect" in text else f"{host}: {reason}"


def _without_urls(text: str) -> str:
    return re.sub(r"\s*\(?\bhttps?://\S+", "", text)
