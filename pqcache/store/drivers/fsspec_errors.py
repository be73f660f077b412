"""The errors of pqcache for what fsspec's file systems and the clients below them raise."""

from __future__ import annotations

import re

from pqcache.errors import (
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    first_line,
)
from pqcache.store.drivers.network_errors import known_cause
from pqcache.store.drivers.time_limits import Stalled

_DENIED = ("AuthenticationException", "BadHostKeyException", "ClientAuthenticationError", "GatedRepoError")
_MISSING = ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError")
_CONNECTION = ("ClientConnectionError", "ClientPayloadError", "SSHException", "TransportError", "gaierror")
_BROKEN = "HttpProcessingError"  # aiohttp's for what is no answer, or none to its end; it has the status 400
_ADVICE = "check the credentials (-o KEY=VALUE goes to the file system of fsspec)"


def fsspec_error(name: str, error: BaseException) -> PqcacheError:
    """Return pqcache's error about the URL ``name``.

    A file system may say "not found" for whatever went wrong, so what it was caused by counts first: a connection that
    failed, or the status of an answer.
    """
    chain = _chain(error)
    if (known := known_cause(name, error)) is not None:
        return known
    if any(isinstance(found, Stalled | TimeoutError) or "Timeout" in type(found).__name__ for found in chain):
        return SourceUnavailable(name, "no answer in time", "check the host and the network")
    is_broken = any(base.__name__ == _BROKEN for found in chain for base in type(found).__mro__)
    for found in chain:
        status = _status(found)
        if is_broken or _is_connection(found):
            return SourceUnavailable(name, "the connection failed", "check the host, the port and the network")
        if not status:
            continue
        if status in (401, 403):
            return SourceDenied(name, f"access denied ({status})", _ADVICE)
        if status in (404, 410):
            return SourceNotFound(name, "no such file or directory", "check the URL")
        if status >= 500 or status in (408, 416, 429):
            return SourceUnavailable(name, f"the server answers {status}", "try again later")
        return SourceError(name, f"the server answers {status}", "check the URL and the options")
    names = [base.__name__ for found in chain for base in type(found).__mro__]
    if any(isinstance(found, PermissionError) for found in chain) or any(each in names for each in _DENIED):
        return SourceDenied(name, "access denied", _ADVICE)
    if any(each in names for each in _MISSING):
        return SourceNotFound(name, "no such file or directory", "check the URL")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SourceNotFound(name, "no such file or directory", "check the URL")
    if "range requests" in str(error) or "Cannot seek" in str(error):
        return SourceError(name, "the server does not serve parts of a file", "copy it to another store first")
    if isinstance(error, OSError):
        return SourceUnavailable(name, _shown(error), "check the host and the network")
    return SourceError(name, f"{type(error).__name__}: {_shown(error)}", "check the URL and the options")


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those that caused it."""
    found: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and next_one not in found and len(found) < 20:
        found.append(next_one)
        next_one = next_one.__cause__ or next_one.__context__
    return found


def _status(error: BaseException) -> int:
    """Return the HTTP status that a client's error holds; 0 where there is none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and re.fullmatch(r"[45]\d\d", str(value)):
                return int(value)
    return 0


def _is_connection(error: BaseException) -> bool:
    """Return whether an error is about a connection: Python's, or one of aiohttp, requests, httpx or paramiko."""
    return isinstance(error, ConnectionError | EOFError) or any(
        base.__name__ in _CONNECTION or (base.__name__ == "RequestException" and base.__module__.startswith("requests"))
        for base in type(error).__mro__
    )


def _shown(error: BaseException) -> str:
    """Return an error's first line without URLs, which may hold tokens."""
    return re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "...", first_line(error))
