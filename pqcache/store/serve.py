"""Serves caches of this machine as sources for other machines, read-only, over HTTP."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pqcache.errors import PqcacheError, UsageError
from pqcache.options import COMMANDS, ServeArguments, Unpack, all_values, documented
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.registry import installed
from pqcache.store.drivers.served_snapshot import SCHEME, TOKEN, read_token

if TYPE_CHECKING:
    from typing_extensions import Self

    from pqcache.store.http_server import Counts, ServedCache


@documented(ServeArguments, *COMMANDS["serve"])
def serve(caches: Sequence[str | os.PathLike[str]], **given: Unpack[ServeArguments]) -> CacheServer:
    """Return a running server of the current snapshots of ``caches``, on threads of this process.

    Each cache is served by the name of its directory, to other runs of pqcache: ``pqcache+http://HOST:PORT/NAME`` is a
    source. Only files in its manifests are served. A snapshot being copied by a client is leased.

    Args:
        caches: directories of caches, of different names.
        given: the options, as the table in pqcache.options has them.

    >>> from pqcache import sync
    >>> token = Path("token").absolute()
    >>> token.touch(0o600)
    >>> _ = token.write_text("f00dfeed" * 4)
    >>> with serve(["cache/shop"], port=0, token_file=token) as server:
    ...     report = sync(server.urls["shop"], "cache/copy", options={"token_file": str(token)})
    >>> report.added, report.rows
    (6, 600)

    Needs the extra ``serve``. Raises UsageError, CacheError, or PqcacheError if the server can't listen on the address.
    """
    options = all_values(given, *COMMANDS["serve"])
    token, address = read_token(options.token_file), (options.bind, options.port)
    return CacheServer(caches, address, token, connections=options.connections)


class CacheServer:
    """A running server; ``close`` ends it.

    Attributes:
        urls: sources for clients on this machine, by the names of the caches.
        address: where it listens.
        has_token: whether clients need a token.
        counts: requests and bytes so far.
    """

    def __init__(
        self,
        caches: Sequence[str | os.PathLike[str]],
        address: tuple[str, int],
        token: str,
        *,
        connections: int = 256,
        idle_seconds: float = 60.0,
        stall_seconds: float = 30.0,
        lease_seconds: float = 600.0,
    ) -> None:
        with installed("pqcache serve", "aiohttp", "serve"):
            from pqcache.store.http_server import HttpServer, is_loopback
        self.has_token = bool(token)
        listening = _resolve(address)
        if not token and not is_loopback(listening[1][0]):
            reason = "other machines can connect to this address, which takes a token"
            raise UsageError(f"--bind {address[0]}", reason, f"name a file with one: --token-file FILE, or set {TOKEN}")
        self._caches = _served(caches, only_public=not token, lease_seconds=lease_seconds)
        try:
            for cache in self._caches.values():
                cache.check()
            self._listener = _listen(*listening)
        except BaseException:
            self._close_caches()
            raise
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        place = f"{_host_of(self.address[0])}:{self.address[1]}"
        self.urls = {name: f"{SCHEME}://{place}/{name}" for name in self._caches}
        self._began = time.monotonic()
        _all.add(self)
        self._http = HttpServer(
            self._listener,
            self._caches,
            token,
            connections=connections,
            idle_seconds=idle_seconds,
            stall_seconds=stall_seconds,
        )

    @property
    def counts(self) -> Counts:
        return self._http.counts

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._began

    def wait(self) -> None:
        """Return when another thread has closed the server; otherwise raise the error that ended it."""
        self._http.wait()

    def close(self) -> None:
        """End all connections and leases within a few seconds."""
        self._http.close()
        self._close_caches()

    def close_in_child(self) -> None:
        """Close a forked child's copies, because clients would wait for a listener that never accepts."""
        self._listener.close()
        for cache in self._caches.values():
            cache.close_leases()

    def _close_caches(self) -> None:
        for cache in self._caches.values():
            cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _served(
    caches: Sequence[str | os.PathLike[str]], only_public: bool, lease_seconds: float
) -> Mapping[str, ServedCache]:
    """Caches by name; raises CacheError for a path that isn't a cache, UsageError if two share a name."""
    from pqcache.store.http_server import ServedCache

    found: dict[str, ServedCache] = {}
    if not caches:
        raise UsageError("", "no cache is named", "name the directories of caches")
    for path in caches:
        cache = CacheDirectory.open(path)
        name = Path(os.path.abspath(cache.path)).name
        if name in found:
            places = f"{found[name].cache.path} and {path}"
            raise UsageError(places, f"are both named {name}", "serve one of them on another port, or rename it")
        found[name] = ServedCache(cache, only_public, lease_seconds)
    return found


def _resolve(address: tuple[str, int]) -> tuple[int, tuple[str, int]]:
    host, port = address
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}", "not a port", "write a number up to 65535")
    try:
        found = socket.getaddrinfo(host or "::", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such host"
        raise UsageError(
            f"--bind {host}", f"not an address of this machine ({reason})", "write it like 10.0.0.7"
        ) from None
    family, _, _, _, place = found[0]
    return family, (str(place[0]), int(place[1]))


def _listen(family: int, address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        advice = "choose another with --port, or an address of this machine with --bind"
        raise PqcacheError(f"{address[0]}:{address[1]}", f"cannot be listened on ({error.strerror})", advice) from error
    return listener


def _host_of(address: str) -> str:
    """The host to show in URLs; this machine's name if the server listens on all addresses."""
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return socket.gethostname()
    return f"[{address}]" if ":" in address else address


_all: weakref.WeakSet[CacheServer] = weakref.WeakSet()


def _in_child() -> None:
    for server in list(_all):
        server.close_in_child()


os.register_at_fork(after_in_child=_in_child)
