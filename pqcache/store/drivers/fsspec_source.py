"""A source on any other store with an installed fsspec implementation: sftp://, hf://, oss://, http:// ...

Directories are listed one by one, because fsspec's own walk skips unreadable ones. Nothing is cached. Calls get a time
limit, as clients have none or wait for minutes. An asynchronous file system runs on one of fsspec's threads, which does
not survive a fork: fsspec starts another one in the child, and refuses file systems made before.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from pqcache.errors import (
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.options import TIMEOUT
from pqcache.store.drivers.base import PARQUET_SUFFIXES, Capabilities, check_options
from pqcache.store.drivers.remote import RemoteSource, answer_error, chain_of
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import is_secret, redact, url_scheme
from pqcache.system.threads import in_parallel

# local ones, wrappers of another file system, and those with a driver of pqcache's own
_REFUSED = {
    "local": "use a path", "asynclocal": "use a path", "s3a": "use s3://", "viewfs": "use hdfs://",
    "arrow_hdfs": "use hdfs://", "adl": "use abfss://", "root": "mount it, and use a path",
    **dict.fromkeys(
        ("simplecache", "filecache", "blockcache", "cached", "reference", "dir", "generic", "async_wrapper",
         "asyncwrapper", "data", "zip", "tar", "libarchive", "dask", "pyscript", "git", "jlab", "jupyter"),
        "name the store itself",
    ),
}  # fmt: skip
_PARAMIKO = (
    "port", "username", "password", "key_filename", "passphrase", "timeout", "banner_timeout", "auth_timeout",
    "allow_agent", "look_for_keys", "compress", "gss_auth", "gss_kex", "gss_host", "host_key_policy",
)  # fmt: skip
_PASSED_ON = {"sftp": _PARAMIKO, "ssh": _PARAMIKO}  # options that a constructor takes without naming them
_OURS = {  # parameters that no user has to set, or that pqcache relies on
    "self", "args", "asynchronous", "loop", "use_listings_cache", "skip_instance_cache", "listings_expiry_time", "fs",
    "fo", "batch_size", "block_size", "cache_options", "cache_type", "default_cache_type", "default_fill_cache",
    "encoded", "get_client", "global_store", "same_scheme", "simple_links", "size_policy",
}  # fmt: skip
_OPENS = {"http": {"encoded": True, "simple_links": False}, "https": {"encoded": True, "simple_links": False}}

log = logging.getLogger("pqcache.store")


def is_known(url: str) -> bool:
    """Whether fsspec has an implementation for ``url``; raises UsageError if the scheme isn't a store's."""
    from fsspec.registry import available_protocols

    scheme = url_scheme(url)
    if scheme in _REFUSED:
        raise UsageError(redact(url), f"{scheme}:// is not a store of its own", _REFUSED[scheme])
    return scheme in available_protocols()


def open_file_system(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    A missing package, an unknown option or a malformed URL raises UsageError.
    """
    import fsspec
    from fsspec.registry import known_implementations

    scheme, shown = url_scheme(url), redact(url)
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        name = getattr(error, "name", "") or getattr(error.__cause__, "name", "")
        name = name or str(known_implementations[scheme]["class"])
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(shown, f"needs {package}", f"install it with: pip install {package}") from error
    known = dict.fromkeys([*_parameters(kind), *_PASSED_ON.get(scheme, ())], "")
    check_options(f"{scheme}://", options, known)
    logging.getLogger(kind.__module__.partition(".")[0]).addHandler(logging.NullHandler())  # errors are reported once
    given = {**kind._get_kwargs_from_urls(url), **{name: parsed(name, value) for name, value in options.items()}}
    given = {**_OPENS.get(scheme, {}), **given, "use_listings_cache": False, "skip_instance_cache": True}
    if scheme in _PASSED_ON:  # its client would get them too
        del given["use_listings_cache"]
    try:
        made = kind(**given)
    except (TypeError, ValueError) as error:
        raise UsageError(shown, f"{kind.__name__} refuses its options", "check -o KEY=VALUE and the URL") from error
    path = str(kind._strip_protocol(url))
    return made, path.rstrip("/")


def parsed(name: str, value: str) -> Any:
    """The value of an option: a number, a boolean or an object of JSON. A secret is text unless it is an object.

    >>> parsed("port", "22"), parsed("anon", "True"), parsed("password", "22"), parsed("host", "x")
    (22, True, '22', 'x')
    """
    if value.lower() in ("true", "false"):
        value = value.lower()
    if is_secret(name) and value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _parameters(kind: type) -> list[str]:
    names: dict[str, None] = {}
    for base in kind.__mro__[:-1]:
        made = base.__dict__.get("__init__")
        if made is None:
            continue
        for name, parameter in inspect.signature(made).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in _OURS:
                names[name] = None
    return list(names)


# the first that is there is the tag; each changes with the bytes of the file
_TAGS = (
    "generation", "etag", "ETag", "e_tag", "lfs", "xet_hash", "blob_id", "md5", "md5Hash", "content_md5", "Content-MD5",
    "checksum", "sha256", "sha", "content_hash", "version_id",
)  # fmt: skip
_TIMES = (
    "mtime", "modified", "last_modified", "LastModified", "Last-Modified", "modification_time", "modifiedTime",
    "updated", "last_write_time", "modify", "created",
)  # fmt: skip
_MILLISECONDS = 1e11  # a larger number of seconds would be a date after the year 5000


def identity_of(info: Mapping[str, Any]) -> Identity | None:
    """None without a size, or without anything else that changes with the bytes.

    Times are rounded to microseconds, as file systems return floats.
    """
    size = info.get("size")
    tag = next((text for name in _TAGS if (text := _tag(info.get(name)))), "")
    moment = next((time for name in _TIMES if (time := _nanoseconds(info.get(name)))), 0)
    if not isinstance(size, int) or not (tag or moment):
        return None
    return Identity(size, moment, tag)


def _tag(value: Any) -> str:
    """The checksum in Hugging Face's description of a large file, a mapping or an object."""
    if isinstance(value, Mapping):
        value = value.get("sha256")
    elif hasattr(value, "sha256"):
        value = value.sha256
    return "" if value is None else str(value).strip('"')


def _nanoseconds(value: Any) -> int:
    """Nanoseconds since 1970; 0 for anything but a time."""
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, datetime):
        value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    seconds = value / 1000 if value > _MILLISECONDS else value
    return round(seconds * 1e6) * 1000


def _parsed(text: str) -> Any:
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            return parse(text.replace("Z", "+00:00") if parse is datetime.fromisoformat else text)
        except ValueError:
            continue
    return None


# A page without links to data may be an empty directory, or one with other files. It may also be a form for logging in,
# which servers send with the status 200. That must not look as if everything in the directory had been deleted.
_PASSWORD = re.compile(rb"<input\b[^>]*\btype\s*=\s*[\"']?password", re.IGNORECASE)
_SAYS_SO = re.compile(rb"index of|directory listing|parent directory", re.IGNORECASE)
_LINK = re.compile(rb"<a\b[^>]*\bhref\s*=\s*[\"']?([^\"'\s>]+)", re.IGNORECASE)


def is_listing(page: bytes, url: str) -> bool:
    """Whether a page without links to data is a listing of the directory ``url``, which ends in ``/``.

    Its text must say so, as servers' listings do, or it must link to the parent directory, and it must not ask for a
    password.

    >>> is_listing(b'<h1>Index of /lake/</h1>', 'http://host/lake/')
    True
    >>> is_listing(b'<a href="/">home</a> <a href="help.html">help</a>', 'http://host/lake/')
    False
    """
    if _PASSWORD.search(page):
        return False
    return _SAYS_SO.search(page) is not None or any(_is_above(link, url) for link in _LINK.findall(page))


def _is_above(link: bytes, url: str) -> bool:
    """A link to the server's root counts only if it is relative."""
    text = link.decode(errors="replace")
    above = urlsplit(urljoin(url, "..")).path
    return (text.strip("./") == "" and ".." in text) or (above != "/" and urlsplit(urljoin(url, text)).path == above)


_DENIED = ("AuthenticationException", "BadHostKeyException", "ClientAuthenticationError", "GatedRepoError")
_MISSING = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError")
_CONNECTION = ("ClientConnectionError", "ClientPayloadError", "SSHException", "TransportError", "gaierror")
_NOTHING = "no such file or directory"
_BROKEN = "HttpProcessingError"  # aiohttp's, for an answer that is malformed or cut off; its status is 400
_ADVICE = "check the credentials (-o KEY=VALUE goes to the file system of fsspec)"


def _status(error: BaseException) -> int:
    """The HTTP status in a client's error; 0 if it has none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and re.fullmatch(r"[45]\d\d", str(value)):
                return int(value)
    return 0


def _is_connection(error: BaseException) -> bool:
    """Whether a connection failed: errors of Python, aiohttp, requests, httpx or paramiko."""
    return isinstance(error, ConnectionError | EOFError) or any(
        base.__name__ in _CONNECTION or (base.__name__ == "RequestException" and base.__module__.startswith("requests"))
        for base in type(error).__mro__
    )


_FIRST_CHUNK, _MIN_CHUNK, _MAX_CHUNK = 256 << 10, 64 << 10, 4 << 20  # bytes
_FAST, _SLOW = 0.5, 4.0  # seconds for a chunk, from which on the next one is larger or smaller
_HTTP = ("http", "https")
_INFO = {"hf": {"refresh": True, "expand_info": True}}  # makes ``info`` and ``ls`` ask the store, for all it knows
_LS = {"hf": {"refresh": True}}
_CONNECTIONS = {"sftp": "client", "ssh": "client", "ftp": "ftp"}  # the attribute with a file system's only connection
_LOOKED_AT = 64  # files of a listing without details that are asked for at a time, and how many at once
_AT_ONCE = 16
_SAFE = "/!$&'()*+,;=:@~"  # not encoded in a path of HTTP


class FsspecSource(RemoteSource):
    capabilities = Capabilities(may_give_only_sizes=True)

    def __init__(self, url: str, options: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        super().__init__(url, "", options, timeout)
        self._scheme = url_scheme(url)
        if self._scheme in _HTTP and "?" in url:
            raise UsageError(self.url, "has a query", "name a directory or a file without one")
        with self.errors(""):
            self._fs, self._root = self.within(lambda: open_file_system(url, options), self.first_timeout)

    def _list(self) -> Iterator[SourceFile]:
        if self._is_file():
            only = self._decoded(self.take_only_file())
            self._only = only
            yield SourceFile(only, self.stat(only))
        else:
            yield from self.walk(self._entries)

    def _stat(self, path: str) -> Identity:
        info = self._info(self.key_of(path))
        known = identity_of(info)
        if known is None and isinstance(info.get("size"), int):
            known = Identity(info["size"], 0)  # `check_identities` refuses to take it for a file's
        if known is None:
            reason = "the store does not say how large it is"
            raise SourceError(self.name_of(path), reason, "copy it elsewhere first")
        return known

    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]:
        size, left = _FIRST_CHUNK, length
        with self._fs.open(self.key_of(path), "rb", cache_type="none") as file:
            if offset:
                file.seek(offset)
            while left > 0:
                began = time.monotonic()
                chunk = file.read(min(size, left))
                if not chunk:
                    return
                if len(chunk) > left:
                    raise SourceUnavailable(self.name_of(path), "the server sent more than was asked for")
                left -= len(chunk)
                yield chunk
                # one request must end within the time limit, also on a slow line
                seconds = time.monotonic() - began
                if seconds < _FAST:
                    size = min(_MAX_CHUNK, 2 * size)
                elif seconds > _SLOW:
                    size = max(_MIN_CHUNK, size // 2)

    def close(self) -> None:
        connection = getattr(self._fs, _CONNECTIONS.get(self._scheme, ""), None)
        if connection is not None:
            with self.errors(""):
                self.within(connection.close, self.first_timeout)

    def explain(self, name: str, error: BaseException) -> PqcacheError:
        # a file system may say "not found" whatever went wrong, so its causes count first: a failed connection, or the
        # status of an answer
        chain = chain_of(error)
        if any(isinstance(found, TimeoutError) or "Timeout" in type(found).__name__ for found in chain):
            return SourceUnavailable(name, "no answer in time", self.network_advice)
        is_broken = any(base.__name__ == _BROKEN for found in chain for base in type(found).__mro__)
        for found in chain:
            status = _status(found)
            if is_broken or _is_connection(found):
                return SourceUnavailable(name, "the connection failed", self.network_advice)
            if not status:
                continue
            return answer_error(name, 503 if status == 416 else status, str(status), _ADVICE, _NOTHING)
        names = [base.__name__ for found in chain for base in type(found).__mro__]
        if any(isinstance(found, PermissionError) for found in chain) or any(each in names for each in _DENIED):
            return SourceDenied(name, "access denied", _ADVICE)
        if any(each in names for each in _MISSING):
            return SourceNotFound(name, _NOTHING, "check the URL")
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return SourceNotFound(name, _NOTHING, "check the URL")
        if "range requests" in str(error) or "Cannot seek" in str(error):
            return SourceError(name, "the server does not serve parts of a file", "copy it to another store first")
        if isinstance(error, OSError):
            return SourceUnavailable(name, first_line(error), self.network_advice)
        return SourceError(name, f"{type(error).__name__}: {first_line(error)}", "check the URL and the options")

    def _entries(self, directory: str) -> Iterator[tuple[str, SourceFile | None]]:
        """Raises SourceError if a web server's page is not a listing."""
        name = self.key_of(directory)
        name = f"{name}/" if self._scheme in _HTTP else name
        start = f"{name.rstrip('/')}/"
        listed = self.within(lambda: self._fs.ls(name, detail=True, **_LS.get(self._scheme, {})))
        below = [info for info in listed if self._is_below(str(info["name"]), start)]
        if self._scheme in _HTTP and not any(map(_is_data, below)):
            self._check_page(directory, name)
        incomplete = []
        for info in below:
            found = str(info["name"])
            rest = self._decoded(found[len(start) :].rstrip("/"))
            path = f"{directory}/{rest}" if directory else rest
            if info["type"] not in ("file", "directory"):  # a link
                info = self.within(partial(self._info, found))
            if info["type"] == "directory":
                yield path, None
            elif (known := identity_of(info)) is None:
                incomplete.append(path)
            else:
                yield path, SourceFile(path, known)
        for first in range(0, len(incomplete), _LOOKED_AT):
            some = incomplete[first : first + _LOOKED_AT]
            stats = in_parallel([partial(self.stat, path) for path in some], _AT_ONCE)
            for path, known in zip(some, stats, strict=True):
                yield path, SourceFile(path, known)

    def _check_page(self, directory: str, name: str) -> None:
        page = self.within(lambda: self._fs.cat_file(name))
        if not is_listing(page, name):
            reason = "the server answers with a page that is not a directory listing, perhaps a login form"
            raise SourceError(self.name_of(directory), reason, "give credentials with -o, or check the URL")

    def _is_below(self, found: str, start: str) -> bool:
        """Only web pages may list names elsewhere."""
        rest = found[len(start) :].rstrip("/") if found.startswith(start) else ""
        if self._scheme in _HTTP:  # a page also links to itself in another order, and to directories above
            segment = unquote(rest)
            return bool(rest) and not any(mark in rest for mark in "?#/") and segment not in (".", "..")
        if found.rstrip("/") == start.rstrip("/"):
            return False  # an object that stands for the directory
        if not rest or "/" in rest:
            raise SourceError(self.url, f"lists {found}, which is not in it", "the listing cannot be trusted")
        return True

    def _is_file(self) -> bool:
        if self._scheme not in _HTTP:
            return bool(self.within(lambda: self._info(self._root), self.first_timeout)["type"] == "file")
        if self._root.endswith(PARQUET_SUFFIXES):
            return True
        # a directory is a page that lists it
        answer = self.within(lambda: self._info(f"{self._root}/"), self.first_timeout)
        return str(answer.get("mimetype", "text/html")) != "text/html"

    def _info(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._fs.info(name, **_INFO.get(self._scheme, {}))
        return found

    def key_of(self, path: str) -> str:
        if self._scheme in _HTTP:
            path = quote(path, safe=_SAFE)
        return f"{self._root}/{path}" if path else self._root

    def _decoded(self, name: str) -> str:
        return unquote(name) if self._scheme in _HTTP else name


def _is_data(info: Mapping[str, Any]) -> bool:
    return info["type"] == "directory" or str(info["name"]).lower().endswith(PARQUET_SUFFIXES)
