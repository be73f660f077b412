"""What is answered to a request about the caches that are served; docs/serve.md describes the requests.

A request says which cache, which snapshot and which file of its manifest. These are looked up by their names, so no
path of a request ever becomes a path of the file system.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

from pqcache.errors import CacheLocked, PqcacheError
from pqcache.store.access_token import is_same_token
from pqcache.store.drivers.served_snapshot import PROTOCOL
from pqcache.store.layout import FILES
from pqcache.store.manifest import Identity
from pqcache.store.serve.http_messages import (
    FileRange,
    HttpAnswer,
    HttpRequest,
    RequestRefused,
    json_answer,
    parse_range,
)
from pqcache.store.serve.served_cache import LeasedSnapshot, ServedCache
from pqcache.versions import __version__


@dataclass(frozen=True)
class Answers:
    """Answers requests about caches, by their names; with a ``token``, to those who send it."""

    caches: Mapping[str, ServedCache]
    token: str

    def check_client(self, request: HttpRequest) -> None:
        """Raise RequestRefused unless the client may ask: it has the token, or names this machine."""
        if self.token:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not is_same_token(given.strip(), self.token):
                raise RequestRefused(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        elif not is_loopback(_hostname(request.headers["host"])):  # a page in a browser that names this machine so
            raise RequestRefused(403, "without a token the host of a URL has to be 127.0.0.1, [::1] or localhost")

    def answer(self, request: HttpRequest, stack: ExitStack) -> HttpAnswer:
        """Return the answer to a request; ``stack`` holds what it needs until it is sent. Raises RequestRefused."""
        name, *rest = request.segments
        cache = self.caches.get(name)
        if cache is None:
            raise RequestRefused(404, f"no cache of this name is served, but {', '.join(self.caches)}")
        try:
            if rest == ["current"]:
                return _about(stack.enter_context(cache.lease(None)))
            if len(rest) >= 3 and rest[0] == "snapshots":
                leased = stack.enter_context(cache.lease(rest[1]))
                if rest[2:] == ["manifest"]:
                    return _part(cache, leased, FILES, leased.manifest_identity, request, stack)
                path = "/".join(rest[3:])
                if rest[2] == "files" and path in leased.files:
                    return _part(cache, leased, path, leased.files[path], request, stack)
        except PqcacheError as error:
            raise RequestRefused(503 if isinstance(error, CacheLocked) else 500, error.reason) from None
        raise RequestRefused(404, "there is no such file")


def is_loopback(host: str) -> bool:
    """Return whether a host, by address or name, is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _about(leased: LeasedSnapshot) -> HttpAnswer:
    about = {"protocol": PROTOCOL, "pqcache": __version__, "snapshot": leased.snapshot.id, "created": leased.created}
    return json_answer(200, about)


def _part(
    cache: ServedCache,
    leased: LeasedSnapshot,
    path: str,
    identity: Identity,
    request: HttpRequest,
    stack: ExitStack,
) -> HttpAnswer:
    """Return a file, or the range of it that is asked for."""
    tag, wanted, size = f'"{identity.tag}"', request.headers.get("if-match", "*"), identity.size
    if wanted not in ("*", tag):
        raise RequestRefused(412, "the file has another version", {"ETag": tag})
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": tag}
    status, offset, length = 200, 0, size
    if (asked := request.headers.get("range")) is not None:
        offset, length = parse_range(asked, size)
        status, headers["Content-Range"] = 206, f"bytes {offset}-{offset + length - 1}/{size}"
    descriptor = cache.open_file(leased, path)
    stack.callback(os.close, descriptor)
    part = FileRange(descriptor=descriptor, offset=offset, length=length)
    return HttpAnswer(status=status, file=part, headers=headers)
