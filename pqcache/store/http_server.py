"""Answers requests about caches over HTTP; docs/serve.md describes the requests.

aiohttp reads the requests on one thread. Each is answered on another, which waits for the disk and, in `sendfile`, for
the client: so each file costs the interpreter only a few calls, and no client waits for another. A request names a
cache, a snapshot and a file of its manifest, so a requested path is never used as a path of the file system.

A snapshot is leased from the first request for it until some time after the last. So it is not removed while a client
copies it, and a dead client doesn't hold it for long.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from aiohttp import web

from pqcache.errors import CacheError, CacheLocked, PqcacheError
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.local import identity_of
from pqcache.store.drivers.served_snapshot import PROTOCOL, TOKEN, is_same_token
from pqcache.store.drivers.timeouts import SpeedFloor
from pqcache.store.layout import FILES
from pqcache.store.manifest import Identity, Manifest
from pqcache.store.snapshot import Lease, Snapshot, closed_on_error
from pqcache.system.disk import checksum_of, open_plain, real_path
from pqcache.system.threads import ForkSafeThreadPool
from pqcache.versions import __version__

_LONGEST_LINE = 64 << 10  # bytes: a path of MAX_PATH characters, percent-encoded, fits
_AT_ONCE = 1 << 24  # bytes that one call sends at most, so that the server can end in between
_STRANGERS = 64  # connections beside those that have shown the token
_BACKLOG = 128  # connections that are not accepted yet
_TICK = 1.0  # seconds between looks at the leases
_END_SECONDS = 2.0  # for requests in progress
log = logging.getLogger("pqcache.serve")


class RequestRefused(Exception):
    """Answer a request with this status and reason."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


@dataclass(kw_only=True)
class LeasedSnapshot:
    """A snapshot in use by requests.

    ``files`` are those of its manifest, ``manifest_identity`` identifies the manifest's own file. ``users`` counts the
    requests in progress, ``last_used`` is when the last one ended.
    """

    snapshot: Snapshot
    lease: Lease
    created: str
    files: Mapping[str, Identity]
    manifest_identity: Identity
    users: int = 0
    last_used: float = 0.0


class ServedCache:
    """The snapshots of one cache; with ``only_public``, for servers without a token, only files that every user can
    read.
    """

    def __init__(self, cache: CacheDirectory, only_public: bool, lease_seconds: float) -> None:
        self.cache = CacheDirectory(Path(os.path.realpath(cache.path)))
        self._only_public, self._lease_seconds = only_public, lease_seconds
        self._leased: dict[str, LeasedSnapshot] = {}
        self._lock = threading.Lock()
        self._arrow = ForkSafeThreadPool(1)  # which reads manifests, as a process that forks may serve

    @contextmanager
    def lease(self, name: str | None) -> Iterator[LeasedSnapshot]:
        """Lease the named snapshot, or the current one, until some time after the block.

        Raises RequestRefused if it is gone.
        """
        with self._lock:
            found = self._leased.get(name) if name is not None else None
            if found is None:
                found = self._find(name)
            found.users += 1
        try:
            yield found
        finally:
            with self._lock:
                found.users -= 1
                found.last_used = time.monotonic()

    def open_file(self, leased: LeasedSnapshot, path: str, size: int) -> BinaryIO:
        """Open a snapshot's file; raises RequestRefused if it is private, or differs from the manifest.

        Only a regular file is opened, and links are not followed.
        """
        name = _name_of(leased, path)
        try:
            descriptor = open_plain(Path(name), os.O_RDONLY)
        except OSError as error:
            raise RequestRefused(*self._why_not(leased, path, error)) from None
        try:
            if real_path(descriptor, name) != name:
                raise RequestRefused(500, f"{path} is reached by a link")
            if self._only_public:
                check_public(name, os.fstat(descriptor))
            if (found := os.fstat(descriptor).st_size) != size:
                raise RequestRefused(500, f"{path} has {found:,} bytes and not {size:,}: it is damaged")
        except BaseException:
            os.close(descriptor)
            raise
        return open(descriptor, "rb", buffering=0)

    def check(self) -> None:
        """Raise CacheError if a file of the current snapshot would not be served without a token."""
        if not self._only_public or self.cache.current() is None:
            return
        with self.lease(None) as leased:
            for path in (FILES, *leased.files):
                name = _name_of(leased, path)
                try:
                    check_public(name, os.stat(name))
                except FileNotFoundError:
                    continue  # which the request about it says
                except RequestRefused as refused:
                    advice = f"set a token that clients need: --token-file FILE, or {TOKEN}"
                    raise CacheError(self.cache.path, refused.reason, advice) from None

    def end_leases(self, now: float) -> None:
        """End leases of snapshots that have been idle for a while."""
        with self._lock:
            over = [s for s in self._leased.values() if not s.users and now - s.last_used > self._lease_seconds]
            for leased in over:
                del self._leased[leased.snapshot.id]
                leased.lease.close()

    def close(self) -> None:
        self.close_leases()
        self._arrow.shutdown()

    def close_leases(self) -> None:
        """Close the leases of this process; a parent's remain."""
        for leased in self._leased.values():
            leased.lease.close()

    def _find(self, name: str | None) -> LeasedSnapshot:
        """Lease a snapshot; its manifest is read with the first lease."""
        if name is None:
            if self.cache.current() is None:
                raise RequestRefused(404, "nothing is published in this cache yet")
            snapshot, lease = self.cache.lease()
        else:
            snapshot, lease = self._lease_kept(name)
        known = self._leased.get(snapshot.id)
        if known is not None:
            lease.close()
            return known
        with closed_on_error(lease):
            manifest: Manifest = self._arrow.submit(snapshot.checked_manifest).result()
            path = snapshot.path / FILES
            leased = LeasedSnapshot(
                snapshot=snapshot,
                lease=lease,
                created=manifest.created,
                files={entry.path: identity_of(entry) for entry in manifest.files},
                manifest_identity=Identity(path.stat().st_size, 0, checksum_of(path)),
            )
        self._leased[snapshot.id] = leased
        return leased

    def _lease_kept(self, name: str) -> tuple[Snapshot, Lease]:
        try:
            snapshot = self.cache.snapshot(name)
            return snapshot, snapshot.lease()
        except CacheLocked:
            raise
        except CacheError:
            raise RequestRefused(410, f"snapshot {name} was removed") from None

    def _why_not(self, leased: LeasedSnapshot, path: str, error: OSError) -> tuple[int, str]:
        if not leased.snapshot.path.is_dir():  # a file system without locks, or somebody's rm
            with self._lock:
                if self._leased.pop(leased.snapshot.id, None) is not None:
                    leased.lease.close()
            return 410, f"snapshot {leased.snapshot.id} was removed"
        if isinstance(error, FileNotFoundError):
            return 500, f"{path} is missing: it is damaged"
        if isinstance(error, PermissionError):
            return 403, f"the server's user may not read {path}"
        return 503, f"{path} cannot be read ({error.strerror})"


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_public(name: str, status: os.stat_result) -> None:
    """Raise RequestRefused unless every user of this machine can read the file."""
    if not status.st_mode & stat.S_IROTH:
        raise RequestRefused(403, f"{os.path.basename(name)} is not readable by every user, and there is no token")
    directory = os.path.dirname(name)
    while directory != "/":
        if not os.stat(directory).st_mode & stat.S_IXOTH:
            raise RequestRefused(403, f"{directory} is closed to other users, and there is no token")
        directory = os.path.dirname(directory)


def _name_of(leased: LeasedSnapshot, path: str) -> str:
    return f"{leased.snapshot.path}/{path}"


@dataclass
class Counts:
    """How many requests were answered, and the bytes of their bodies."""

    requests: int = 0
    bytes: int = 0


class HttpServer:
    """Serves caches by name on a listening socket until ``close``; with a ``token``, only to clients that send it.

    A client is disconnected after receiving nothing, or fewer than 1,000 bytes a second, for ``stall_seconds``, or
    requesting nothing for ``idle_seconds``.
    """

    def __init__(
        self,
        listener: socket.socket,
        caches: Mapping[str, ServedCache],
        token: str,
        *,
        connections: int,
        idle_seconds: float,
        stall_seconds: float,
    ) -> None:
        self.counts, self.idle_seconds, self.stall_seconds = Counts(), idle_seconds, stall_seconds
        self._listener, self._caches, self._token, self._limit = listener, caches, token, connections
        self._connections: dict[_Connection, bool] = {}  # the oldest first, and whether they have shown the token
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_default_executor(ThreadPoolExecutor(connections + 1, "pqcache-serve"))  # one looks at leases
        self._closing, self._ended = asyncio.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pqcache-serve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for ``close``; otherwise raise the error that ended the server."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        with suppress(RuntimeError):  # of a loop that is closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * _END_SECONDS)

    def admit(self, connection: _Connection) -> None:
        """Accept a client; if there are too many, disconnect the oldest without a token."""
        self._connections[connection] = False
        if len(self._connections) > self._limit + _STRANGERS:
            stranger = next(each for each, is_known in self._connections.items() if not is_known)
            self.forget(stranger)
            stranger.end()

    def forget(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except BaseException as error:  # noqa: BLE001  wait() raises it
            self._failure = error
        finally:
            self._loop.close()
            self._ended.set()

    async def _serve(self) -> None:
        http = web.Server(self._answer)
        server = await self._loop.create_server(
            lambda: _Connection(http, self, self._loop), sock=self._listener, backlog=_BACKLOG
        )
        while not self._closing.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _TICK)
            for cache in self._caches.values():
                await asyncio.to_thread(cache.end_leases, time.monotonic())
        server.close()
        for connection in list(self._connections):
            connection.end()
        await http.shutdown(_END_SECONDS)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        target = f"{request.remote}: {request.method} {request.raw_path}"
        try:
            self._check_client(request)
            response = await asyncio.to_thread(self._find, request)
        except RequestRefused as refused:
            response = _refusal(refused)
        except OSError as error:
            log.debug("%s: ended by %s", target, error)
            raise ConnectionResetError from error  # with which aiohttp ends the connection
        size = 0 if request.method == "HEAD" else response.content_length or 0
        self.counts.requests += 1
        self.counts.bytes += size
        log.debug("%s: %d, %d bytes", target, response.status, size)
        return response

    def _check_client(self, request: web.BaseRequest) -> None:
        """Raise RequestRefused unless the client has the token, or the Host header names this machine."""
        if self._token:
            kind, _, given = request.headers.get("Authorization", "").partition(" ")
            if kind.lower() != "bearer" or not is_same_token(given.strip(), self._token):
                raise RequestRefused(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        elif not is_loopback(_hostname(request.host)):  # a page in a browser that names this machine so
            raise RequestRefused(403, "without a token the host of a URL has to be 127.0.0.1, [::1] or localhost")
        if self._connections.get(request.protocol) is False:  # type: ignore[call-overload]
            if sum(self._connections.values()) >= self._limit:
                raise RequestRefused(503, "there are too many connections, try again", {"Retry-After": "5"})
            self._connections[request.protocol] = True  # type: ignore[index]
        if request.method not in ("GET", "HEAD"):
            raise RequestRefused(405, "only reading is possible", {"Allow": "GET, HEAD"})

    def _find(self, request: web.BaseRequest) -> web.StreamResponse:
        """Respond to a request; a file is sent before this returns."""
        name, *rest = (unquote(segment) for segment in request.rel_url.raw_path[1:].split("/"))
        cache = self._caches.get(name)
        if cache is None:
            raise RequestRefused(404, f"no cache of this name is served, but {', '.join(self._caches)}")
        try:
            if rest == ["current"]:
                with cache.lease(None) as leased:
                    about = {"protocol": PROTOCOL, "pqcache": __version__}
                    return web.json_response({**about, "snapshot": leased.snapshot.id, "created": leased.created})
            if len(rest) >= 3 and rest[0] == "snapshots":
                with cache.lease(rest[1]) as leased:
                    path = "/".join(rest[3:])
                    if rest[2:] == ["manifest"]:
                        return self._send_file(request, cache, leased, FILES, leased.manifest_identity)
                    if rest[2] == "files" and path in leased.files:
                        return self._send_file(request, cache, leased, path, leased.files[path])
        except PqcacheError as error:
            raise RequestRefused(503 if isinstance(error, CacheLocked) else 500, error.reason) from None
        raise RequestRefused(404, "there is no such file")

    def _send_file(
        self, request: web.BaseRequest, cache: ServedCache, leased: LeasedSnapshot, path: str, identity: Identity
    ) -> web.StreamResponse:
        tag, size = f'"{identity.tag}"', identity.size
        if request.headers.get("If-Match", "*") not in ("*", tag):
            raise RequestRefused(412, "the file has another version", {"ETag": tag})
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": tag}
        try:
            first, end, _ = request.http_range.indices(size)
        except ValueError:
            first = end = size
        if is_part := "Range" in request.headers:
            if first >= end:
                raise RequestRefused(416, "the file has no such bytes", {"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        response.content_length = end - first
        with (
            cache.open_file(leased, path, size) as file,
            asyncio.run_coroutine_threadsafe(_send_head(request, response), self._loop).result() as client,
        ):
            if request.method != "HEAD":
                _send_range(client, file, first, end, self.stall_seconds)
        return response


class _Connection(web.RequestHandler):
    """A connection that ends if its client stalls; files are sent separately once its buffer is empty."""

    def __init__(self, http: web.Server, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            http,
            loop=loop,
            logger=log,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=server.idle_seconds,
            lingering_time=0,
            max_line_size=_LONGEST_LINE,
        )
        self._server = server
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._client = transport
        transport.set_write_buffer_limits(0)  # so that writing is paused whenever something is left
        self._server.admit(self)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._loop.call_later(self._server.stall_seconds, self.end)

    def resume_writing(self) -> None:
        self._stop_timer()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.forget(self)
        self._stop_timer()
        with suppress(OSError):  # forked children have copies of the socket, and threads that send files
            self._client.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        super().connection_lost(exc)

    def end(self) -> None:
        self._client.abort()

    def _stop_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        log.debug("%s: %d %s", request.remote, status, message, exc_info=exc)
        if request.writer.output_size:
            raise ConnectionResetError
        return _refusal(RequestRefused(status, message or "the server failed"))


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _refusal(refused: RequestRefused) -> web.Response:
    response = web.json_response({"error": refused.reason}, status=refused.status, headers=refused.headers)
    response.force_close()
    return response


async def _send_head(request: web.BaseRequest, response: web.StreamResponse) -> socket.socket:
    """Send the head; return a copy of the client's socket, which outlives the connection."""
    await response.prepare(request)
    await request.writer.drain()
    if request.transport is None:
        raise ConnectionResetError("the client is gone")
    client: socket.socket = request.transport.get_extra_info("socket").dup()
    return client


def _send_range(client: socket.socket, file: BinaryIO, offset: int, end: int, stall_seconds: float) -> None:
    poll, floor, waited = select.poll(), SpeedFloor(stall_seconds), 0.0
    poll.register(client, select.POLLOUT)
    while offset < end:
        try:
            sent = os.sendfile(client.fileno(), file.fileno(), offset, min(end - offset, _AT_ONCE))
        except BlockingIOError:
            began = time.monotonic()
            if not poll.poll(stall_seconds * 1000):
                raise TimeoutError("the client takes nothing") from None
            waited += time.monotonic() - began
            continue
        if not sent:
            raise OSError("the file is shorter now")
        offset += sent
        floor.count(sent, waited)
        waited = 0.0
