"""A cache that is served: its snapshots, each leased from the first request about it to some time after the last.

So a snapshot that a client copies is not removed meanwhile, whatever the cache publishes, and a client that died holds
nothing for long. What a client may ask for is what the snapshot's manifest names.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pqcache.errors import CacheError, CacheLocked
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.local import identity_of
from pqcache.store.drivers.served_snapshot import TOKEN
from pqcache.store.layout import FILES
from pqcache.store.manifest import Identity, Manifest
from pqcache.store.snapshot import Lease, Snapshot, closed_on_error
from pqcache.system.checksum import checksum_of
from pqcache.system.disk import open_plain, real_path
from pqcache.system.fork_safe_threads import ForkSafeThreadPool


class RequestRefused(Exception):
    """Answer a request with this status and reason."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


@dataclass(kw_only=True)
class LeasedSnapshot:
    """A snapshot that requests are about.

    ``files`` are those of its manifest, ``manifest_identity`` is that of the manifest's own file. ``users`` are the
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
    """The snapshots of one cache; with ``only_public``, as there is no token, files that every user can read."""

    def __init__(self, cache: CacheDirectory, only_public: bool, lease_seconds: float) -> None:
        self.cache = CacheDirectory(Path(os.path.realpath(cache.path)))
        self._only_public, self._lease_seconds = only_public, lease_seconds
        self._leased: dict[str, LeasedSnapshot] = {}
        self._lock = threading.Lock()
        self._arrow = ForkSafeThreadPool(1)  # which reads manifests, as a process that forks may serve

    @contextmanager
    def lease(self, name: str | None) -> Iterator[LeasedSnapshot]:
        """Lease the snapshot of this name, or the current one, until the block ends and some time longer.

        RequestRefused says that it is gone, or that there is none.
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
        """Open a snapshot's file; RequestRefused where it is not as the manifest has it, or private.

        Nothing but a regular file at this very place is opened, whatever links there are on the way.
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
            raise RequestRefused(410, f"snapshot {name} is not kept any more") from None

    def _why_not(self, leased: LeasedSnapshot, path: str, error: OSError) -> tuple[int, str]:
        """Status and reason if a file cannot be opened."""
        if not leased.snapshot.path.is_dir():  # a file system without locks, or somebody's rm
            with self._lock:
                if self._leased.pop(leased.snapshot.id, None) is not None:
                    leased.lease.close()
            return 410, f"snapshot {leased.snapshot.id} is not kept any more"
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
