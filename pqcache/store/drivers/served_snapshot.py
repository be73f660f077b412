"""A source that is a cache's snapshot on another machine, served by ``pqcache serve``: ``pqcache+http://HOST/NAME``.

The first listing chooses the current snapshot, and later ones stay with it: its manifest, verified by its checksum, is
the listing. Identities are those of a local snapshot. The server leases the snapshot as long as it gets requests for
it. If it is gone nevertheless, the next listing takes the snapshot that is current then.

Server and client read the token in the same way, from a file or the environment, never from a command line. It is
compared in constant time, and no error shows a part of it.
"""

from __future__ import annotations

import hmac
import http.client
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urlsplit

from pqcache.errors import (
    DamagedError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import Capabilities, check_options
from pqcache.store.drivers.http_client import MAX_ANSWER, HttpConnections, HttpSource
from pqcache.store.drivers.local import files_below, identity_of, table_below
from pqcache.store.manifest import FileEntry, Identity, SourceFile, TableVersion
from pqcache.store.urls import quoted, url_scheme
from pqcache.system.disk import checksum_text, new_checksum, open_regular
from pqcache.units import printable

SCHEME = "pqcache+http"
TLS_SCHEME = "pqcache+https"
PORT = 8700
PROTOCOL = 1
OPTIONS = {
    "token": "the token of the server",
    "token_file": "a file with the token of the server",
}
_PINNED = re.compile(r"snapshots/(\d{8}T\d{6}Z-\d+)(?:/(.*))?")
_REASON = 4096  # bytes of the reason in an answer
_ERRORS = (OSError, http.client.HTTPException, ValueError, RecursionError)  # the last of JSON that is too deep


@dataclass(frozen=True)
class _Pinned:
    """A snapshot: its files, by path relative to the source, and their table."""

    id: str
    files: Mapping[str, FileEntry]
    table: TableVersion | None


class ServedSource(HttpSource):
    """A RemoteSource over HTTP."""

    capabilities = Capabilities(reads_versions=True, lists_only_data_files=True, lists_one_version=True)
    raises = _ERRORS
    chunk = 1 << 20  # the server is near, and each call takes time

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        check_options(f"{SCHEME}://", options, OPTIONS)
        super().__init__(url, "", options, timeout)
        host, _, path = url.partition("://")[2].partition("/")
        parts = urlsplit(f"//{host}")
        if "@" in host:
            raise UsageError(self.url, "has a user", f"give the token with -o token_file=FILE, or {TOKEN}")
        self._name, _, self._below = path.strip("/").partition("/")
        if not (parts.hostname and self._name):
            raise UsageError(self.url, "names no cache", f"write {SCHEME}://HOST:{PORT}/NAME")
        pinned = _PINNED.fullmatch(self._below)
        self._fixed = pinned[1] if pinned else ""
        self._below = (pinned[2] or "") if pinned else self._below
        self._headers = _headers(_token(options))
        wait = self.first_timeout
        make: Callable[[], http.client.HTTPConnection]
        if url_scheme(url) == TLS_SCHEME:
            make = partial(http.client.HTTPSConnection, parts.hostname, parts.port, timeout=wait)
        else:
            make = partial(http.client.HTTPConnection, parts.hostname, parts.port or PORT, timeout=wait)
        self._connections = HttpConnections(make, timeout)
        self._pinned: _Pinned | None = None
        self._lock = threading.Lock()

    @property
    def table_version(self) -> TableVersion | None:
        return self._snapshot().table

    def _list(self) -> Iterator[SourceFile]:
        for path, entry in self._snapshot().files.items():
            yield SourceFile(path, identity_of(entry))

    def _stat(self, path: str) -> Identity:
        return identity_of(self._entry(self._snapshot(), path))

    def close(self) -> None:
        self._connections.close()

    def pinned_url(self, url: str) -> str:
        root = self.url.partition("://")[0] + "://" + self.url.partition("://")[2].partition("/")[0]
        return "/".join(filter(None, [root, self._name, "snapshots", self._snapshot().id, self._below]))

    def _snapshot(self) -> _Pinned:
        with self._lock:
            if self._pinned is None:
                with self.errors(""):
                    self._pinned = self._find()
            return self._pinned

    def _find(self) -> _Pinned:
        """The snapshot in the URL, else the current one."""
        name = self._fixed
        if not name:
            with self._get("current") as response:
                about = json.loads(response.read(_REASON))
            if not isinstance(about, dict) or about.get("protocol") != PROTOCOL:
                spoken = about.get("protocol") if isinstance(about, dict) else None
                reason = f"the server speaks version {spoken!r} of the protocol, this pqcache speaks {PROTOCOL}"
                raise SourceError(self.url, printable(reason), "install the same pqcache on both machines")
            name = about.get("snapshot")
            if not isinstance(name, str):
                raise ValueError("no snapshot is named")
        try:
            with self._get(f"snapshots/{quote(name, safe='')}/manifest") as response:
                data = response.read(MAX_ANSWER + 1)
                tag = response.headers.get("ETag", "").strip('"')
        except _SnapshotGone as gone:
            if self._fixed:
                raise
            reason = f"snapshot {printable(name)} was current, and was removed before it was read"
            raise SourceUnavailable(self.url, reason, "sync again") from gone
        seen = new_checksum()
        seen.update(data)
        if len(data) > MAX_ANSWER or checksum_text(seen) != tag:
            raise SourceUnavailable(self.url, "the manifest was damaged in transit, or cut short")
        from pqcache.store.manifest_file import parse_manifest  # and pyarrow, which takes its time to import

        try:
            manifest = parse_manifest(data, self.url)
        except DamagedError as error:
            raise SourceError(self.url, error.reason, "run 'pqcache verify --repair' on the served cache") from error
        files = files_below(manifest.files, self._below, self.url)
        return _Pinned(name, files, table_below(manifest, self._below))

    def _entry(self, pinned: _Pinned, path: str) -> FileEntry:
        try:
            return pinned.files[path]
        except KeyError:
            raise SourceNotFound(f"{self.url}/{path}", "no such file in the snapshot", "check the path") from None

    @contextmanager
    def _opened(self, path: str, offset: int, length: int, tag: str) -> Iterator[http.client.HTTPResponse]:
        pinned = self._snapshot()
        resource = f"snapshots/{pinned.id}/files/{quote(self._entry(pinned, path).path, safe='/=')}"
        last = offset + length - 1
        headers = {"Range": f"bytes={offset}-{last}", **({"If-Match": f'"{tag}"'} if tag else {})}
        try:
            with self._get(resource, headers) as response:
                found = response.headers.get("Content-Range", ""), response.headers.get("Content-Length")
                if not found[0].startswith(f"bytes {offset}-{last}/") or found[1] != str(length):
                    raise SourceUnavailable(self.name_of(path), "the server sent another range than was asked for")
                yield response
        except _SnapshotGone as gone:
            with self._lock:
                if self._pinned is pinned:
                    self._pinned = None
            raise SourceNotFound(self.name_of(path), gone.reason, gone.advice) from gone

    @contextmanager
    def _get(self, resource: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Yields the response to a GET; SourceError unless it is a success."""
        connection = self._connections.take()
        try:
            target = f"/{quote(self._name, safe='')}/{resource}"
            connection.request("GET", target, headers={**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status not in (200, 206):
                raise self._refused(resource, response)
            yield response
        except BaseException:
            connection.close()
            raise
        self._connections.put_back(connection, response)

    def _refused(self, resource: str, response: http.client.HTTPResponse) -> SourceError:
        status, place = response.status, self.url
        if "/files/" in resource:
            place = f"{self.url} ({printable(resource.partition('/files/')[2])})"
        reason = _reason(response)
        if status == 401:
            return SourceDenied(place, reason, f"give the server's token with -o token_file=FILE, or {TOKEN}")
        if status == 403:
            return SourceDenied(place, reason, "start the server with a token, or as a user who may read it")
        if status == 404:
            return SourceNotFound(place, reason, "check the URL")
        if status == 410:
            return _SnapshotGone(place, reason, "sync again")
        if status == 412:
            return SourceChanged(place, reason)
        if status in (408, 429, 502, 503, 504):
            return SourceUnavailable(place, reason, "try again later, or let fewer clients in at once")
        if 300 <= status < 400:
            return SourceError(place, "the server redirects, which pqcache does not follow here", "check the URL")
        return SourceError(place, reason, "check the server, and run 'pqcache verify' on the served cache")

    def explain(self, name: str, error: BaseException) -> SourceError:
        if isinstance(error, ConnectionRefusedError):
            return SourceUnavailable(name, "cannot connect", "check that 'pqcache serve' runs there, and the port")
        if isinstance(error, ValueError | RecursionError) or type(error) in (
            http.client.BadStatusLine,
            http.client.UnknownProtocol,
        ):
            return SourceError(name, "the server there is not 'pqcache serve'", "check the host and the port")
        return SourceUnavailable(name, first_line(error), self.network_advice)


class _SnapshotGone(SourceNotFound):
    """The snapshot no longer exists."""


def _reason(response: http.client.HTTPResponse) -> str:
    try:
        value = json.loads(response.read(_REASON))
        return printable(" ".join(str(value["error"]).split()))
    except (*_ERRORS, KeyError, TypeError):
        return f"the server answers {response.status}"


def _token(options: Mapping[str, str]) -> str:
    token, file = options.get("token"), options.get("token_file")
    if token is not None and file is not None:
        raise UsageError("-o token and -o token_file", "exclude each other", "give one of them")
    if token is not None:
        return checked_token(token, "-o token")
    if file is not None and not os.path.isabs(file):
        raise UsageError(
            f"-o token_file={file}", "is a relative path", "later runs may start elsewhere: give an absolute path"
        )
    return read_token(file)


def _headers(token: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


TOKEN = "PQCACHE_TOKEN"  # the environment's variable
_SHORTEST = 16  # characters
_LONGEST = 4096


def read_token(file: str | os.PathLike[str] | None) -> str:
    """The token in ``file``, else in the environment; empty if there is neither.

    Raises UsageError if the file is unreadable or readable by others, or the token too short.
    """
    if file is None:
        text = os.environ.get(TOKEN, "").strip()
        return checked_token(text, TOKEN) if text else ""
    try:
        with open(file, "rb", opener=open_regular) as opened:
            mode, content = os.fstat(opened.fileno()).st_mode, opened.read(_LONGEST + 1)
    except OSError as error:
        raise UsageError(file, f"cannot be read ({error.strerror})", "name the file that holds the token") from None
    token = checked_token(content.decode("latin-1").strip(), str(file))
    if mode & stat.S_IROTH:
        raise UsageError(file, "holds a token, and every user can read it", f"chmod 600 {quoted(file)}")
    return token


def checked_token(text: str, where: str) -> str:
    """Reject tokens that are easily guessed or aren't a single word; ``where`` is for the error."""
    if not _SHORTEST <= len(text) <= _LONGEST:
        reason = f"has a token of {len(text)} characters, and takes {_SHORTEST} to {_LONGEST:,}"
        raise UsageError(where, reason, "make one with: openssl rand -hex 32")
    if not (text.isascii() and text.isprintable()) or " " in text:
        reason = "has a token with spaces or non-ASCII characters"
        raise UsageError(where, reason, "make one with: openssl rand -hex 32")
    return text


def is_same_token(given: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
