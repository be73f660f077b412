"""A snapshot: one immutable, published version of a dataset, and the lease that keeps it from being removed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.errors import MALFORMED, CacheError, CacheLocked, DamagedError, open_error
from pqcache.store.layout import CHECKSUMS, FILES, LEASE, ROW_GROUPS, SUMMARY
from pqcache.system.checksum import checksum_matches, checksum_of
from pqcache.system.disk import open_plain, read_regular
from pqcache.system.locks import lock_holder, open_to_lock, try_lock, unlock

if TYPE_CHECKING:
    from pqcache.store.manifest import Manifest
    from pqcache.store.row_group_index import Index

LEASE_WAIT = 10.0  # seconds; gc holds the lock against which a lease waits for one rename


@dataclass(frozen=True)
class Snapshot:
    """One immutable, published version of a dataset."""

    path: Path

    @property
    def id(self) -> str:
        """The snapshot's name: when it was published and its number, ``20261120T040003Z-0007``."""
        return self.path.name

    @property
    def made(self) -> datetime:
        """When it was published, as its name says."""
        return datetime.strptime(self.id.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)

    @property
    def number(self) -> int:
        """The snapshot's number, which grows even where the clock steps back."""
        number = self.id.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def manifest(self) -> Manifest:
        """Read and return the manifest: the list of files and where each came from."""
        from pqcache.store.manifest_file import read_manifest  # and pyarrow, which not every command needs

        return read_manifest(self.path / FILES)

    def index(self) -> Index:
        """Return the row-group index, memory-mapped."""
        from pqcache.store.row_group_index import read_index  # as above

        return read_index(self.path / ROW_GROUPS)

    def checked_manifest(self) -> Manifest:
        """Return the manifest after comparing it with its checksum; damage raises DamagedError."""
        self.check(FILES)
        return self.manifest()

    def checked_index(self) -> Index:
        """Return the index after comparing it with its checksum; damage raises DamagedError."""
        self.check(ROW_GROUPS)
        return self.index()

    def check(self, name: str) -> None:
        """Compare the manifest, the index or the summary with its checksum; damage raises DamagedError."""
        checksums, path = self.path / CHECKSUMS, self.path / name
        try:
            recorded = json.loads(read_regular(checksums))[name]
            if checksum_matches(recorded, path):
                return
        except FileNotFoundError as error:
            raise DamagedError(error.filename, "is missing", "the next sync builds it again") from error
        except PermissionError as error:
            raise CacheError(
                f"{error.filename or path}", "permission denied", "make it readable for this user"
            ) from error
        except KeyError as error:
            raise DamagedError(checksums, f"has no checksum of {name}", "the next sync builds it again") from error
        except (OSError, *MALFORMED) as error:
            raise DamagedError(checksums, f"cannot be read ({error})", "the next sync builds it again") from error
        raise DamagedError(path, "is not as it was written", "the next sync builds it again")

    def is_leased(self) -> bool:
        """Return whether a reader holds this snapshot; False also where the file system has no locks."""
        try:
            descriptor = open_to_lock(self.path / LEASE)
        except FileNotFoundError:
            return False
        try:
            return try_lock(descriptor, exclusive=True) is False
        finally:
            os.close(descriptor)

    def lease(self) -> Lease:
        """Keep this snapshot from being removed until the lease is closed or the process ends."""
        return Lease(self)


class Lease:
    """A shared lock on a snapshot; the kernel drops it when the process ends, however it ends."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._process = os.getpid()
        try:
            self._file = open(open_plain(snapshot.path / LEASE, os.O_RDONLY), "rb")  # noqa: SIM115
        except OSError as error:
            if (known := open_error(error)) is not None:
                raise CacheError(snapshot.path / LEASE, *known) from error
            raise CacheError(
                snapshot.path, f"the snapshot is gone ({error.strerror})", "open the cache again"
            ) from error
        deadline = time.monotonic() + LEASE_WAIT
        while try_lock(self._file.fileno(), exclusive=False) is False:  # without locks gc removes nothing
            if time.monotonic() >= deadline:
                holder = lock_holder(self._file.fileno()) or "another process"
                self._file.close()
                reason = f"{holder} keeps it locked, as only gc does, and for a moment"
                raise CacheLocked(snapshot.path / LEASE, reason, "end that process, or try again")
            time.sleep(0.01)
        try:  # gc may have moved it away between open and flock
            current = os.stat(snapshot.path / LEASE)
        except OSError:
            current = None
        if current is None or current.st_ino != os.fstat(self._file.fileno()).st_ino:
            self._file.close()
            raise CacheError(snapshot.path, "the snapshot was just removed", "open the cache again")

    def close(self) -> None:
        self._file.close()

    def release(self) -> None:
        """Close the lease, in processes that were forked from this one too: they have the same lock."""
        if self._process == os.getpid():
            unlock(self._file.fileno())
        self.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def closed_on_error(lease: Lease | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if lease is not None:
            lease.close()
        raise


def write_checksums(snapshot: Path) -> None:
    """Checksums of manifest, index and summary; the caller makes them durable."""
    found = {name: checksum_of(snapshot / name) for name in (FILES, ROW_GROUPS, SUMMARY)}
    (snapshot / CHECKSUMS).write_text(json.dumps(found) + "\n")
