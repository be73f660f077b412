"""Causes of errors that the clients of all stores share: dead hosts, certificates, clocks and expired credentials."""

from __future__ import annotations

import re
import socket
import ssl

from pqcache.errors import AccessExpired, SourceError
from pqcache.store.drivers.retries import SourceTooSlow
from pqcache.store.drivers.time_limits import FLOOR, TooSlow

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
    """Return pqcache's error about ``name`` if a library's error has a cause of these inside, however deep.

    None is also for whatever a driver has to tell apart by the words of its own client.
    """
    pending: list[object] = [error]
    texts = []
    for found in pending:
        if isinstance(found, TooSlow):
            advice = "check the network and the server's load"
            return SourceTooSlow(name, f"the server sends fewer than {FLOOR:,} bytes a second ({found})", advice)
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
    return SourceError(name, "cannot connect: the name of the host is not known", "check the URL and the endpoint")
