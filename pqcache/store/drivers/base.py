"""A source: one dataset at one URL, whatever the store it lives in.

``open_source`` picks the driver; every driver lists, stats and reads in the same terms and raises the same
errors, so nothing else in pqcache knows which store it talks to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable
from urllib.parse import quote, unquote, urlsplit

from pqcache.errors import UsageError
from pqcache.store.manifest import Identity, SourceFile

_SECRET = re.compile(
    r"secret|password|passwd|token|delegation|signature|credential|access_?key|(^|_)key$", re.IGNORECASE
)
_QUERY = re.compile(r"(?<=[?&])([^=&/?]*)=([^&/#]*)")  # NAME=VALUE behind a question mark
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")

TIMEOUT = 30.0  # seconds without a byte
FIRST = 10.0  # seconds until the first answer: a server that is down should not take three tries of TIMEOUT
HDFS_NATIVE = "hdfs-native"
HDFS3 = "hdfs3"


class Source(Protocol):
    """One dataset at a source. All methods may be called from several threads at once.

    ``url`` is fit to be shown: it never holds a password. Paths are relative to it, with ``/`` between
    segments.
    """

    url: str

    def list(self) -> Iterator[SourceFile]:
        """Yield every file below the source, hidden ones included; a failure raises SourceError."""

    def stat(self, path: str) -> Identity:
        """Return a file's identity now; raises SourceNotFound when it is gone."""

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        """Yield ``length`` bytes from ``offset`` in pieces of at most a few MiB.

        The range must lie within the file. Fewer bytes than asked for mean that the connection broke. Given
        the identity's ``tag``, a store that can raises SourceChanged when it holds another version.
        """

    def close(self) -> None:
        """Give connections back."""


@runtime_checkable
class ExactSource(Source, Protocol):
    """A source whose ``read`` with a tag gives that version or fails, and that tells of many files at once."""

    def stat_all(self, paths: Sequence[str]) -> Mapping[str, Identity]:
        """Return the identities that files have now; those that are gone are missing."""


class FillingSource(Source, Protocol):
    """A source that can read into memory that it is given, which saves a copy of everything."""

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        """Fill ``buffer`` as often as there is need; yield each time how many bytes of it are the file's next.

        They are fewer than it holds only at the end, or before an error. Everything else is as for ``read``.
        """


def open_source(
    url: str, options: Mapping[str, str] | None = None, timeout: float = TIMEOUT, hdfs_driver: str = HDFS_NATIVE
) -> Source:
    """Open the dataset at ``url`` with the store options ``options`` (``-o key=value``).

    A server that sends nothing for ``timeout`` seconds counts as unavailable. Nothing is contacted yet. An
    unknown scheme, a malformed URL or a missing extra raises UsageError.
    """
    check_url(url)
    known = dict(options or {})
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        from pqcache.store.drivers.local import LocalSource

        return LocalSource(local_path(url), known)
    if scheme == "s3":
        from pqcache.store.drivers.s3 import S3Source

        return S3Source(url, known, timeout)
    if scheme == "hdfs" and hdfs_driver == HDFS3:
        from pqcache.store.drivers.hdfs3 import Hdfs3Source

        return Hdfs3Source(url, known, timeout)
    if scheme == "hdfs":
        from pqcache.store.drivers.hdfs import HdfsSource

        return HdfsSource(url, known, timeout)
    if scheme == "webhdfs":
        from pqcache.store.drivers.webhdfs import WebHdfsSource

        return WebHdfsSource(url, known, timeout)
    raise UsageError(f"{redact(url)}: unknown scheme {scheme}://; use hdfs://, webhdfs://, s3://, file:// or a path")


def file_url(source: Source, path: str) -> str:
    """Return the URL of one of a source's files; a source may be that one file."""
    return source.url if source.url.endswith(f"/{path}") else f"{source.url}/{path}"


def url_scheme(url: str) -> str:
    """Return the lower-case scheme of a URL, or an empty string for a path."""
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", url)
    return match[1].lower() if match else ""


def check_url(url: str) -> None:
    """Raise UsageError for what cannot be a path or a URL, and for a secret where it would be part of a path."""
    scheme = url_scheme(url)
    if not url.partition("://")[2 if scheme == "file" else 0].strip():
        raise UsageError("an empty path; name a directory or a URL")
    try:
        _ = urlsplit(url.partition("?")[0]).port if scheme else None
    except ValueError as error:
        place = "BUCKET" if scheme == "s3" else "HOST:PORT"
        raise UsageError(f"{redact(url)}: {error}; write {scheme}://{place}/PATH") from None
    if scheme and any(is_secret(match[1]) for match in _QUERY.finditer(url)):
        raise UsageError(f"{redact(url)}: has a secret in its path; give it as an option instead: -o token=...")


def local_path(url: str) -> str:
    """Return the path in a ``file://`` URL, or the path itself."""
    if url_scheme(url) != "file":
        return url
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{redact(url)}: a file URL has three slashes: file:///PATH")
    return unquote(parts.path)


def is_secret(option: str) -> bool:
    """Return whether an option of this name must never be stored or shown."""
    return _SECRET.search(option) is not None


def redact(url: str) -> str:
    """Return ``url`` without the passwords and tokens in it, and for S3 without the key as well."""
    scheme = url_scheme(url)
    if not scheme:
        return url
    url = _QUERY.sub(lambda match: f"{match[1]}=***" if is_secret(match[1]) else match[0], url)
    rest = url.partition("://")[2]
    try:
        host = urlsplit(url).netloc
    except ValueError:  # no telling where a password would end
        return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else url
    if "@" not in rest:
        return url
    if "@" not in host and ":" in host and (scheme == "s3" or not host.rpartition(":")[2].isdigit()):
        return f"{scheme}://***@{rest.rpartition('@')[2]}"  # an unescaped '/' in the password
    user, at, place = host.rpartition("@")
    user = "" if scheme == "s3" else user.partition(":")[0]
    return f"{scheme}://{user}{at if user else ''}{place}{rest[len(host) :]}"


def userinfo(url: str) -> tuple[str, str]:
    """Return the user and the password in a URL; both may be empty."""
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    return unquote(user), unquote(password)


def option_names(driver: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise UsageError when ``options`` holds a name that is not in ``known`` (name -> what it means)."""
    for name in options:
        if name not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise UsageError(f"-o {name}=...: {driver} has no such option; it has: {choices}")


def check_path(path: str) -> str | None:
    """Return what is wrong with a source path, or None if it is safe to use below the cache.

    Object keys are hostile input: no name may leave the cache or be two things at once on disk.
    """
    directory, slash, name = path.rpartition("/")
    short = len(name) <= 255 // 4  # however many bytes its characters take
    if short and name.isprintable() and name not in ("", ".", "..") and (not slash or _is_safe(directory)):
        return None  # as nearly all are, and there may be a million
    if _CONTROL.search(path):
        return "has a control character in its name"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    segments = path.split("/")
    if path.startswith("/") or "" in segments:
        return "has an empty segment in its path"
    if "." in segments or ".." in segments:
        return "has a '.' or '..' segment in its path"
    if any(len(segment.encode()) > 255 for segment in segments):
        return "has a name longer than 255 bytes"
    return None


@lru_cache(1 << 14)
def _is_safe(directory: str) -> bool:
    return check_path(directory) is None


def printable(path: str) -> str:
    """Return ``path`` with what steers a terminal percent-encoded, fit for one line of output."""
    shown = path.encode("utf-8", "backslashreplace").decode()
    return _UNSAFE.sub(lambda match: quote(match[0], safe=""), shown)
