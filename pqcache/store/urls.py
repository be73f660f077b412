"""Parses and checks URLs of sources and targets, and removes secrets before they are shown."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pqcache.errors import UsageError

_SECRET = re.compile(
    r"secret|password|passwd|passphrase|token|delegation|signature|credential|access_?key|(^|_)key$|(^|_)sas(_|$)"
    r"|connection_?string|headers$|cookies$|^auth$|kwargs$",  # these may hold one among other values
    re.IGNORECASE,
)
_QUERY = re.compile(r"(?<=[?&])([^=&/?]*)=([^&/#]*)")  # NAME=VALUE behind a question mark
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&/?;#]*)=([^&/;#]*)")  # also behind what ends a path on the web
_WEB = ("http", "https", "webhdfs", "pqcache+http", "pqcache+https")
_ALIASES = {"s3a": "s3", "s3n": "s3"}  # as Hadoop calls S3


def url_scheme(url: str) -> str:
    """The scheme in lower case, empty for a path; ``s3`` also for ``s3a`` and ``s3n``."""
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", url)
    scheme = match[1].lower() if match else ""
    return _ALIASES.get(scheme, scheme)


def with_usual_scheme(url: str) -> str:
    """Replace Hadoop's ``s3a://`` and ``s3n://`` by ``s3://``.

    >>> with_usual_scheme("s3a://lake/shop"), with_usual_scheme("hdfs://nn/shop")
    ('s3://lake/shop', 'hdfs://nn/shop')
    """
    name = url.partition("://")[0].lower()
    return f"{_ALIASES[name]}{url[len(name) :]}" if name in _ALIASES else url


def check_url(url: str) -> None:
    """Raise UsageError unless ``url`` is a path or URL, or if it has secrets in a query, which is part of the path."""
    scheme = url_scheme(url)
    if not url.partition("://")[2 if scheme == "file" else 0].strip():
        raise UsageError("", "an empty path", "name a directory or a URL")
    if re.match(r"[\w+.-]+(://[^?]*?)?::[\w+.-]+://", url):
        raise UsageError(redact(url), "is a chain of file systems", "name the store itself, without '::'")
    try:
        _ = urlsplit(url.partition("?")[0]).port if scheme not in ("", "hive") else None  # that one has several hosts
    except ValueError:  # whose text has the port, which is the password where that has a '/'
        place = "BUCKET" if scheme == "s3" else "HOST:PORT"
        raise UsageError(redact(url), "has no valid host and port", f"write {scheme}://{place}/PATH") from None
    if scheme and any(is_secret(match[1]) for match in _values(scheme).finditer(url)):
        raise UsageError(redact(url), "has a secret in its path", "give it as an option instead: -o token=...")


def is_local(url: str) -> bool:
    return url_scheme(url) in ("", "file")


def local_path(url: str) -> str:
    """The path in a ``file://`` URL, or the path itself."""
    if url_scheme(url) != "file":
        return url
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(redact(url), "has a host", "write file:///PATH with three slashes")
    return unquote(parts.path)


def absolute_path(url: str) -> str:
    return os.path.abspath(os.path.expanduser(local_path(url)))


def local_directory(url: str) -> Path:
    """The absolute directory of a local source, or of its single file."""
    path = Path(absolute_path(url))
    return path.parent if path.is_file() else path


def is_secret(option: str) -> bool:
    """Whether an option with this name must never be stored or shown."""
    return _SECRET.search(option) is not None and option != "token_file"  # which names a file, and is remembered


def redact(url: str) -> str:
    """Remove passwords and tokens, and for S3 also keys."""
    scheme = url_scheme(url)
    if not scheme:
        return url
    url = _values(scheme).sub(lambda match: f"{match[1]}=***" if is_secret(match[1]) else match[0], url)
    rest = url.partition("://")[2]
    try:
        host = urlsplit(url).netloc
    except ValueError:  # where a password would end is unknown
        return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else url
    if "@" not in rest:
        return url
    if "@" not in host and ":" in host and (scheme in ("s3", "hive") or not host.rpartition(":")[2].isdigit()):
        return f"{scheme}://***@{rest.rpartition('@')[2]}"  # an unescaped '/' in the password
    user, at, place = host.rpartition("@")
    user = "" if scheme == "s3" else user.partition(":")[0]
    return f"{scheme}://{user}{at if user else ''}{place}{rest[len(host) :]}"


def remembered_url(url: str) -> str:
    """A URL for a cache to remember: without secrets, and with an absolute path."""
    if url_scheme(url) not in ("", "file"):
        return redact(with_usual_scheme(url))
    return absolute_path(url)


def _values(scheme: str) -> re.Pattern[str]:
    """Finds names and values in URLs of a scheme."""
    return _PARAMETER if scheme in _WEB else _QUERY


def userinfo(url: str) -> tuple[str, str]:
    """User and password in a URL; both may be empty."""
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    return unquote(user), unquote(password)


def quoted(path: str | os.PathLike[str]) -> str:
    return shlex.quote(os.fspath(path))
