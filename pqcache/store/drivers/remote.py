"""The common part of network drivers: time limits, and errors without secrets."""

from __future__ import annotations

import re
import socket
import ssl
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from pqcache.errors import (
    AccessExpired,
    PqcacheError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
)
from pqcache.store.drivers.base import FIRST_ANSWER_TIMEOUT, DirectoryLimit, Source
from pqcache.store.drivers.timeouts import FLOOR, SourceTooSlow, TooLarge, TooSlow, with_time_limit, within
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.urls import is_secret, redact, userinfo

T = TypeVar("T")
E = TypeVar("E", bound=PqcacheError)

_SHORTEST_SECRET = 4  # characters; to remove shorter ones would make a text unreadable
_LONGEST_REASON = 2000  # characters
_USER = re.compile(r"://[^?#\s\"'<>]*@")  # in a URL
_QUERY = re.compile(r"[?;#&][^\s\"'<>()?;#&=]*=[^\s\"'<>()]*")


class RemoteSource(Source):
    """A Source over a network: the driver calls the store's client, and this class does the rest.

    A driver implements `_list`, `_stat` and `_read` (see their public namesakes in `Source`), `explain` and `close`.
    The first three raise whatever the client raises, or a SourceError if the driver knows more.

    - **Retries** are the caller's. The client's own are off.
    - **Time.** `_stat` and `_read` run on a thread that is abandoned after the timeout, and `_read` fails below a
      minimum speed. `_list` calls `within` for each of its requests, as one listing may take hours. If the client
      times out by itself, the driver sets ``has_time_limit``; HTTP clients get their connections from
      ``http_client.py``, which have the same minimum speed.
    - **Secrets** are taken out of the client's errors: the values of options, users in URLs, and queries.

    Attributes:
        timeout: seconds without a byte after which the store is unavailable.
        first_timeout: the same for the first answer of a listing.
        has_time_limit: whether the client raises an error after ``timeout`` seconds without a byte.
        at_once: how many chunks of a read are passed between threads at once: many if they are small.
        raises: exceptions of the client; any other one is a bug.
        network_advice: the advice if there is no answer.
    """

    has_time_limit = False
    at_once = 1
    raises: tuple[type[BaseException], ...] = (Exception,)
    network_advice = "check the host, the port and the network"

    def __init__(self, url: str, root: str, options: Mapping[str, str], timeout: float) -> None:
        self.url = redact(url).rstrip("/")
        self.timeout, self.first_timeout = timeout, min(FIRST_ANSWER_TIMEOUT, timeout)
        self._root, self._only = root, ""  # where the dataset is in the store; its name if it is a single file
        self._secrets = [*(value for name, value in options.items() if is_secret(name)), userinfo(url)[1]]

    @abstractmethod
    def _list(self) -> Iterator[SourceFile]: ...

    @abstractmethod
    def _stat(self, path: str) -> Identity: ...

    @abstractmethod
    def _read(self, path: str, offset: int, length: int, tag: str) -> Iterator[bytes]: ...

    @abstractmethod
    def explain(self, name: str, error: BaseException) -> PqcacheError:
        """Translate an exception of the client to pqcache's error about the URL ``name``."""

    def list(self) -> Iterator[SourceFile]:
        with self.errors(""):
            if self._only:
                yield SourceFile(self._only, self.stat(self._only))
            else:
                yield from self._list()

    def stat(self, path: str) -> Identity:
        with self.errors(path):
            return self._stat(path) if self.has_time_limit else self.within(partial(self._stat, path))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        if length <= 0:
            return
        read = partial(self._read, path, offset, length, tag)
        with self.errors(path):
            yield from read() if self.has_time_limit else with_time_limit(read, self.timeout, len, self.at_once)

    def within(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Call with a time limit, by default the timeout; raises Stalled."""
        return within(seconds or self.timeout, call)

    def walk(self, entries: Callable[[str], Iterable[tuple[str, SourceFile | None]]]) -> Iterator[SourceFile]:
        """Yield all files below the root; ``entries`` yields the paths in a directory, with None for directories."""
        pending, limit = [""], DirectoryLimit(self.url)
        while pending:
            directory = pending.pop()
            with self.errors(directory):
                for path, file in entries(directory):
                    if file is None:
                        pending.append(limit.enter(path))
                    else:
                        yield file

    def url_of(self, path: str) -> str:
        return f"{self.url.rpartition('/')[0]}/{path}" if self._only else super().url_of(path)

    def key_of(self, path: str) -> str:
        if not path:
            return self._root
        return f"{self._root.rstrip('/')}/{path}" if self._root else path

    def name_of(self, path: str) -> str:
        """URL of a file or directory, for display."""
        return self.url_of(path) if path else self.url

    def take_only_file(self) -> str:
        """Record that the URL is a single file; return its path, which is its name."""
        directory, slash, self._only = self._root.rpartition("/")
        self._root = directory or slash
        return self._only

    @contextmanager
    def errors(self, path: str) -> Iterator[None]:
        """Translate the client's errors inside the block."""
        try:
            yield
        except PqcacheError:
            raise
        except BaseException as error:
            if not isinstance(error, self.raises) and type(error).__name__ != "PanicException":  # of a client in Rust
                raise
            shown = censored(self._error(self.name_of(path), error), self._secrets, error)
            raise shown from shown.__cause__

    def _error(self, name: str, error: BaseException) -> PqcacheError:
        if (known := known_cause(name, error)) is not None:
            return known
        if isinstance(error, TimeoutError):
            return SourceUnavailable(name, "no answer in time", self.network_advice)
        return self.explain(name, error)


def censored(error: E, secrets: Iterable[str], cause: BaseException) -> E:
    """Remove ``secrets``, users in URLs, and queries from the message of a client or a server.

    The error keeps its ``cause`` for tracebacks, unless a traceback would reveal one of these.
    """
    hidden = sorted((text for text in secrets if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)
    reason = _without(error.reason, hidden)
    if len(reason) > _LONGEST_REASON:  # cut only now, as a half of a secret would not be found
        reason = f"{reason[:_LONGEST_REASON]}..."
    found = type(error)(error.subject, reason, error.advice)
    said = "\n".join(f"{one} {one.args}" for one in chain_of(cause))
    found.__cause__ = cause if _without(said, hidden) == said else None
    return found


def _without(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return _USER.sub("://***@", _QUERY.sub("?***", text))


def chain_of(error: BaseException) -> list[BaseException]:
    """An error, its causes and contexts."""
    found = [error]
    for one in found:
        found += [e for e in (one.__cause__, one.__context__) if e is not None and e not in found]
    return found


def answer_error(name: str, status: int, said: str, denied: str, missing: str = "no such object") -> SourceError:
    """The error for an HTTP ``status``, or an equivalent failure; ``said`` is for the reason.

    ``denied`` is the advice if access is denied, ``missing`` the reason if nothing is found.
    """
    if status in (401, 403):
        return SourceDenied(name, f"access denied ({said})", denied)
    if status in (404, 410):
        return SourceNotFound(name, missing, "check the URL")
    if status == 412:
        return SourceChanged(name, "is not the version that was listed")
    if status >= 500 or status in (408, 429):
        return SourceUnavailable(name, f"the server answers {said}", "try again later")
    return SourceError(name, f"the server answers {said}", "check the URL and the options")


# causes of errors that the clients of all stores share: dead hosts, certificates, clocks and expired credentials
_NO_HOST = re.compile(r"Name or service not known|No address associated with hostname|nodename nor servname", re.I)
_SKEWED = re.compile(
    r"RequestTimeTooSkewed|RequestInTheFuture|clock skew too great|reasonable timeframe|date header too old|"
    r"signature expired|signature not yet current",
    re.I,
)
_EXPIRED = re.compile(
    r"ExpiredToken|RequestExpired|TokenRefreshRequired|ExpiredAuthenticationToken|AuthorizationExpired|"
    r"signature not valid in the specified time frame|"
    r"\btoken \([^/\n]{0,200}?\) can't be found in cache|"
    r"\b(token|ticket|credentials?|security context|referenced context|session|access key)\b"
    r"[^/\n]{0,200}?\bexpired\b|"
    r"\bexpired (token|ticket|credentials?|session)\b",
    re.I,
)
_TAG = re.compile(r"</?\w+/?>")  # of an answer in XML
_PLACE = re.compile(r"\S*/\S*|\"[^\"\n]*/[^\"\n]*\"")  # names of files may have any of these words


def known_cause(name: str, error: BaseException | str) -> SourceError | None:
    """Translate an error with a known cause at any depth; None if the driver has to examine its client's message."""
    pending: list[object] = [error]
    texts = []
    for found in pending:
        if isinstance(found, TooSlow):
            advice = "check the network and the server's load"
            return SourceTooSlow(name, f"the server sends fewer than {FLOOR:,} bytes a second ({found})", advice)
        if isinstance(found, TooLarge):
            return SourceError(name, f"the server's answer has {found}", "check the endpoint")
        if isinstance(found, socket.gaierror) and found.errno == socket.EAI_NONAME:
            return _no_host(name)
        if isinstance(found, ssl.SSLCertVerificationError):
            reason = f"the certificate is not trusted ({found.verify_message})"
            return SourceError(name, reason, "name the authority's file in SSL_CERT_FILE")
        if isinstance(found, BaseException) and len(pending) < 100:
            pending += [found.__cause__, found.__context__, *found.args]
        if isinstance(found, BaseException | str):
            texts.append(f"{type(found).__name__} {found}")
    said = _PLACE.sub(" ", _TAG.sub(" ", "\n".join(texts)))
    if _NO_HOST.search(said):
        return _no_host(name)
    if match := _SKEWED.search(said):
        reason = f"the clocks of this machine and of the server differ too much ({match[0]})"
        return AccessExpired(name, reason, "set this machine's clock, then sync again")
    if match := _EXPIRED.search(said):
        reason = f"the credentials have expired ({match[0]})"
        return AccessExpired(name, reason, "get a new token or ticket (kinit, aws sso login), then sync again")
    return None


def _no_host(name: str) -> SourceError:
    return SourceError(name, "cannot connect: unknown host", "check the URL and the endpoint")
