"""Snapshots, the immutable versions of a dataset, and the leases and pins that protect them from removal.

``snapshots.json``, written as a whole under the cache's lock, has the pinned snapshots, those left by a rollback, and
whether the cache is held. A sync uses `read_summary` and `digest_of_held` to see whether a snapshot matches its source.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.errors import MALFORMED, CacheError, CacheLocked, DamagedError, UsageError, open_error
from pqcache.store.layout import CANDIDATE, CHECKSUMS, FILES, LEASE, ROW_GROUPS, SNAPSHOTS, SUMMARY
from pqcache.store.manifest import FORMAT, Manifest, Summary, Totals, digest_of_lines
from pqcache.store.ownership import file_mode, is_own, is_trusted_cache
from pqcache.store.urls import quoted
from pqcache.system.disk import checksum_matches, checksum_of, open_directory, open_plain, read_regular, write_durably
from pqcache.system.locks import lock_holder, open_to_lock, try_lock, unlock

if TYPE_CHECKING:
    from pqcache.store.row_group_index import Index


LEASE_WAIT = 10.0  # seconds; gc holds the lock against which a lease waits for one rename


@dataclass(frozen=True)
class Snapshot:
    """An immutable, published version of a dataset."""

    path: Path

    @property
    def id(self) -> str:
        """The snapshot's name: time of publication and number, like ``20261120T040003Z-0007``."""
        return self.path.name

    @property
    def made(self) -> datetime:
        """The time of publication, by its name."""
        return datetime.strptime(self.id.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)

    @property
    def number(self) -> int:
        """The snapshot's number, which grows even if the clock steps back."""
        number = self.id.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def manifest(self) -> Manifest:
        """Read the manifest: the files and their sources."""
        from pqcache.store.manifest_file import read_manifest  # and pyarrow, which not every command needs

        return read_manifest(self.path / FILES)

    def index(self) -> Index:
        """Read the row-group index, memory-mapped."""
        from pqcache.store.row_group_index import read_index  # as above

        return read_index(self.path / ROW_GROUPS)

    def checked_manifest(self) -> Manifest:
        """Read the manifest after comparing it with its checksum; raises DamagedError if they differ."""
        self.check(FILES)
        return self.manifest()

    def checked_index(self) -> Index:
        """Read the index after comparing it with its checksum; raises DamagedError if they differ."""
        self.check(ROW_GROUPS)
        return self.index()

    def check(self, name: str) -> None:
        """Compare the manifest, the index or the summary with its checksum; raises DamagedError if they differ."""
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
        """Whether a reader holds this snapshot; always False on a file system without locks."""
        try:
            descriptor = open_to_lock(self.path / LEASE)
        except FileNotFoundError:
            return False
        try:
            return try_lock(descriptor, exclusive=True) is False
        finally:
            os.close(descriptor)

    def lease(self) -> Lease:
        """Protect this snapshot from removal until the lease is closed or the process ends."""
        return Lease(self)


class Lease:
    """A shared lock on a snapshot; the kernel drops it when the process ends in any way."""

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
                reason = f"{holder} keeps it locked, which only gc does, and only briefly"
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
        """Close the lease, also for forks of this process, which share the lock."""
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
    """Write the checksums of manifest, index and summary; the caller makes them durable."""
    found = {name: checksum_of(snapshot / name) for name in (FILES, ROW_GROUPS, SUMMARY)}
    (snapshot / CHECKSUMS).write_text(json.dumps(found) + "\n")


_FORMAT = 1
_OURS = "_pqcache"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Rollback:
    """A switch to another snapshot: when it began (ISO 8601), the new one, and the previous one.

    ``run`` is the ID of its run in the history. With ``publishes``, ``snapshot`` was the candidate, and a hold ends.
    """

    time: str
    snapshot: str
    previous: str
    run: str = ""
    publishes: bool = False


@dataclass(frozen=True)
class Hold:
    """Since when (ISO 8601) the cache is held, and by which user."""

    time: str
    by: str


@dataclass(frozen=True, kw_only=True)
class KeptSnapshots:
    """The snapshots that a cache keeps beside its newest ones, and its hold.

    Attributes:
        pins: names of pinned snapshots by ID; empty for a pin without a name.
        rolled_back: formerly current snapshots that were rolled back; they are removed first.
        rollback: a rollback that has begun and isn't in the history yet.
        last_number: the highest number of a snapshot at a rollback; new ones get higher numbers.
        hold: keeps runs from publishing, if set.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    rolled_back: tuple[str, ...] = ()
    rollback: Rollback | None = None
    last_number: int = 0
    hold: Hold | None = None

    def id_of(self, name: str) -> str | None:
        return next((snapshot for snapshot, known in self.pins.items() if known == name and name), None)


def read_kept(cache: Path) -> KeptSnapshots:
    """Read the kept snapshots; raises CacheError if that fails, so that no pinned snapshot is removed."""
    path = cache / SNAPSHOTS
    try:
        values: dict[str, Any] = json.loads(read_regular(path))
        if values["format"] != _FORMAT:
            raise CacheError(path, f"written in format {values['format']}, which this pqcache does not read")
        rollback, hold = values["rollback"], values.get("hold")
        return KeptSnapshots(
            pins={str(snapshot): str(name) for snapshot, name in values["pins"].items()},
            rolled_back=tuple(map(str, values["rolled_back"])),
            rollback=None if rollback is None else Rollback(**rollback),
            last_number=int(values.get("last_number", 0)),
            hold=None if hold is None else Hold(**hold),
        )
    except FileNotFoundError:
        return KeptSnapshots()
    except (OSError, *MALFORMED) as error:
        advice = "remove it, if no snapshot has to remain pinned, nor the cache held"
        raise CacheError(path, f"cannot be read ({error})", advice) from error


def write_kept(cache: Path, kept: KeptSnapshots) -> None:
    """Write the kept snapshots durably, without those that no longer exist."""
    here = {path.name for path in (cache / "snapshots").iterdir()}
    values = {
        "format": _FORMAT,
        "pins": {snapshot: name for snapshot, name in sorted(kept.pins.items()) if snapshot in here},
        "rolled_back": sorted(here.intersection(kept.rolled_back)),
        "rollback": None if kept.rollback is None else asdict(kept.rollback),
        "last_number": kept.last_number,
        "hold": None if kept.hold is None else asdict(kept.hold),
    }
    write_durably(cache / SNAPSHOTS, f"{json.dumps(values)}\n".encode(), cache / "tmp", file_mode())


def check_name(name: str) -> None:
    """Raise UsageError for an invalid name of a pin."""
    if _NAME.fullmatch(name) is None or name in ("current", CANDIDATE):
        advice = "begin with a letter, then letters, digits, '.', '_' and '-'"
        raise UsageError(f"--name {name}", "no name for a snapshot", advice)


def check_not_held(cache: Path) -> None:
    """Raise CacheError if the cache is held."""
    if (hold := read_kept(cache).hold) is not None:
        reason = f"held since {hold.time} by {hold.by}, and this would publish a snapshot"
        raise CacheError(cache, reason, f"end the hold with 'pqcache rollback {quoted(cache)} --release' first")


def rolled_back_from(cache: Path, current: Snapshot | None) -> str | None:
    """The newest snapshot left by a rollback to ``current``."""
    found = [Snapshot(cache / "snapshots" / name) for name in read_kept(cache).rolled_back]
    newer = [snapshot for snapshot in found if current is not None and snapshot.number > current.number]
    return max(newer, key=lambda snapshot: snapshot.number).id if newer else None


def read_summary(snapshot: Snapshot) -> Summary | None:
    """Read the summary; None if it, the manifest or the index isn't as it was written."""
    reason: object = "its summary is of another format"
    try:
        for name in (SUMMARY, FILES, ROW_GROUPS):
            snapshot.check(name)
        values = json.loads(read_regular(snapshot.path / SUMMARY))
        if values.pop("format") == FORMAT:
            return Summary(**{**values, "totals": Totals(**values["totals"])})
    except (DamagedError, OSError, *MALFORMED) as error:
        reason = error
    import logging  # a sync with nothing to do does not need it

    logging.getLogger("pqcache.sync").debug("%s: files are compared one by one: %s", snapshot.path, reason)
    return None


def rows_in_summary(snapshot: Snapshot) -> int | None:
    """The rows in the summary; None if it can't be read."""
    try:
        return int(json.loads(read_regular(snapshot.path / SUMMARY))["totals"]["rows"])
    except (OSError, *MALFORMED):
        return None


def digest_of_held(snapshot: Path) -> str | None:
    """The digest of a snapshot's present files, like ``Summary.held``; None if they can't be examined."""
    try:
        return digest_of_lines(_held(snapshot))
    except OSError:
        return None


def _held(snapshot: Path) -> Iterator[str]:
    pending, trusted = [""], is_trusted_cache(snapshot.parent.parent)
    while pending:
        directory = pending.pop()
        with open_directory(f"{snapshot}/{directory}") as found:
            for item in found:
                path = directory + item.name
                status = item.stat(follow_symlinks=False)
                if not (trusted or is_own(status)):
                    yield path  # what others can change, which is not kept
                elif stat.S_ISREG(status.st_mode):
                    yield f"{path}\0{status.st_size}"
                elif not stat.S_ISDIR(status.st_mode):
                    yield path  # a link, which no file of a snapshot is
                elif path != _OURS:
                    pending.append(f"{path}/")
