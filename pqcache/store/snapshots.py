"""The snapshots of a cache: list, pin and unpin them, and roll back to one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from pqcache.errors import CacheError, DamagedError, UsageError, disk_errors
from pqcache.events import OnEvent, Published, ignore
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.gc import removable_snapshots
from pqcache.store.history import ROLLBACK
from pqcache.store.layout import LEASE
from pqcache.store.pins import Rollback, check_name, read_kept, write_kept
from pqcache.store.run_record import recorded_run
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.held import find_damaged
from pqcache.store.urls import quoted
from pqcache.system.disk import allocated, freed_bytes, replace_symlink
from pqcache.system.locks import readers_of
from pqcache.units import format_count, parse_duration


@dataclass(frozen=True, kw_only=True)
class SnapshotView:
    """A snapshot of a cache as a list shows it.

    Attributes:
        snapshot: its ID.
        created: when it was made, in ISO 8601.
        current: whether readers open it when they ask for none.
        pinned: whether it is kept until it is unpinned.
        name: the name of the pin, or None.
        leases: how many readers hold it, as far as this machine knows; None where the file system has no locks.
        files, rows, bytes: what it holds; None where its manifest is damaged.
        version: the version of the Delta or Iceberg table that it was made from, or None.
        damage: why nothing is known of it, or None.
        own_bytes: on disk that it shares with nothing else: what its removal frees.
        replaced_bytes: on disk that the next snapshot has no more; None for the last, or if the next one is gone.
    """

    snapshot: str
    created: str | None
    current: bool
    pinned: bool
    name: str | None
    leases: int | None
    files: int | None
    rows: int | None
    bytes: int | None
    version: str | None
    damage: str | None = None
    own_bytes: int = 0
    replaced_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)


@dataclass(frozen=True)
class PinReport:
    """What is pinned in a cache: the names of pins by the IDs of their snapshots, empty for none, and which changed.

    ``removable_bytes`` are those on disk that the next sync or gc frees by removing old snapshots.
    """

    cache: str
    snapshot: str
    pins: Mapping[str, str]
    removable_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def snapshots(cache: str | os.PathLike[str]) -> list[SnapshotView]:
    """Return the snapshots of a cache, oldest first.

    >>> [(view.current, view.leases, view.rows) for view in snapshots("cache/shop")]
    [(True, 0, 600)]

    Raises CacheError where there is no cache.
    """
    target = CacheDirectory.open(os.fspath(cache))
    pins, current = read_kept(target.path).pins, target.current()
    kept = target.snapshots()
    found, newer = [], None
    for snapshot in reversed(kept):
        files = allocated(snapshot.path)
        own = sum(size for size, is_alone in files.values() if is_alone)
        replaced = None
        if newer is not None and newer[0] == snapshot.number + 1:
            replaced = sum(size for key, (size, _) in files.items() if key not in newer[1])
        found.append(replace(_view(snapshot, current, pins), own_bytes=own, replaced_bytes=replaced))
        newer = snapshot.number, files
    return found[::-1]


def pin(
    cache: str | os.PathLike[str],
    snapshot: str,
    *,
    name: str | None = None,
    wait: str | float = 0.0,
    on_event: OnEvent = ignore,
) -> PinReport:
    """Keep a snapshot of a cache, by its ID, number or name, until it is unpinned; ``name`` names it.

    Pinned snapshots are kept beside those that ``keep`` counts. A pin that is there already gets the new name.

    >>> report = pin("cache/shop", "1", name="first")
    >>> list(report.pins.values())
    ['first']

    Raises UsageError for a name that another snapshot has, CacheError, or CacheLocked when another run is at work.
    """
    target = CacheDirectory.open(os.fspath(cache))
    if name is not None:
        check_name(name)
    with disk_errors(target.path), recorded_run(target, "pin", parse_duration(wait), on_event) as record:
        kept, found = read_kept(target.path), target.snapshot(snapshot)
        other = kept.id_of(name or "")
        if other not in (None, found.id):
            raise UsageError(
                f"--name {name}", f"is the name of {other}", f"unpin it first: pqcache unpin {quoted(cache)} {name}"
            )
        kept = replace(kept, pins={**kept.pins, found.id: name or kept.pins.get(found.id, "")})
        write_kept(target.path, kept)
        record.end({"snapshot": found.id, "pinned": kept.pins[found.id]})
        removable = _removable_bytes(target)
    return PinReport(str(target.path), found.id, kept.pins, removable)


def unpin(
    cache: str | os.PathLike[str], snapshot: str, *, wait: str | float = 0.0, on_event: OnEvent = ignore
) -> PinReport:
    """Let a pinned snapshot, by its ID, number or name, be removed as any other.

    >>> unpin("cache/shop", pin("cache/shop", "1").snapshot).pins
    {}

    Raises UsageError for one that is not pinned, CacheError, or CacheLocked when another run is at work.
    """
    target = CacheDirectory.open(os.fspath(cache))
    with disk_errors(target.path), recorded_run(target, "unpin", parse_duration(wait), on_event) as record:
        kept = read_kept(target.path)
        found = snapshot if snapshot in kept.pins else kept.id_of(snapshot) or target.snapshot(snapshot).id
        if found not in kept.pins:
            raise UsageError(found, "is not pinned", f"'pqcache snapshots {quoted(cache)}' lists what is")
        kept = replace(kept, pins={known: name for known, name in kept.pins.items() if known != found})
        write_kept(target.path, kept)
        record.end({"snapshot": found})
        removable = _removable_bytes(target)
    return PinReport(str(target.path), found, kept.pins, removable)


def _removable_bytes(cache: CacheDirectory) -> int:
    surplus = removable_snapshots(cache, read_config(cache.path).keep)
    return freed_bytes(*(snapshot.path for snapshot in surplus if not snapshot.is_leased()))


def _view(snapshot: Snapshot, current: Snapshot | None, pins: Mapping[str, str]) -> SnapshotView:
    view = SnapshotView(
        snapshot=snapshot.id,
        created=None,
        current=snapshot == current,
        pinned=snapshot.id in pins,
        name=pins.get(snapshot.id) or None,
        leases=readers_of(snapshot.path / LEASE),
        files=None,
        rows=None,
        bytes=None,
        version=None,
    )
    try:
        manifest = snapshot.manifest()
    except (DamagedError, CacheError) as error:
        return replace(view, damage=str(error))
    version = None if manifest.table is None else manifest.table.version or None
    held = manifest.totals
    view = replace(view, files=held.files, rows=held.rows, bytes=held.size)
    return replace(view, created=manifest.created, version=version)


@dataclass(frozen=True)
class RollbackReport:
    """The snapshot that is current now, and the one that was before; the same where there was nothing to do."""

    cache: str
    snapshot: str
    previous: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def rollback(
    cache: str | os.PathLike[str], snapshot: str, *, wait: str | float = 0.0, on_event: OnEvent = ignore
) -> RollbackReport:
    """Make a snapshot of a cache, by its ID, number or name, the current one, in one step.

    The history records it. Readers that have another snapshot open keep it. The next sync publishes what the source
    holds then, as always: correct the source first, or pin the snapshot and open it by its name.

    >>> report = rollback("cache/shop", "1")
    >>> report.snapshot == report.previous  # it is the only one so far
    True

    Raises CacheError for a snapshot that is not kept, DamagedError for one that is damaged, or CacheLocked when another
    run is at work; then the current snapshot is as it was.
    """
    target = CacheDirectory.open(os.fspath(cache))
    with disk_errors(target.path), recorded_run(target, ROLLBACK, parse_duration(wait), on_event) as record:
        current, found = target.snapshot(), target.snapshot(snapshot)
        values = {"snapshot": found.id, "previous": current.id}
        if found != current:
            _check(found)
            _switch(target, current, found, record.run)
        record.end(values)
        kept = read_kept(target.path)
        if kept.rollback is not None:
            write_kept(target.path, replace(kept, rollback=None))
    on_event(Published(found.id))
    return RollbackReport(str(target.path), found.id, current.id)


def _switch(cache: CacheDirectory, current: Snapshot, found: Snapshot, run: str) -> None:
    """Note the switch on disk first, for a run that is killed."""
    kept, snapshots = read_kept(cache.path), cache.snapshots()
    left = {s.id for s in snapshots if found.number < s.number <= current.number}
    begun = Rollback(datetime.now(timezone.utc).isoformat(timespec="seconds"), found.id, current.id, run)
    kept = replace(
        kept,
        rolled_back=tuple(sorted({*kept.rolled_back, *left} - {found.id})),
        rollback=begun,
        last_number=max(kept.last_number, *(s.number for s in snapshots)),
    )
    write_kept(cache.path, kept)
    replace_symlink(cache.path / "current", f"snapshots/{found.id}", cache.tmp_dir)


def _check(snapshot: Snapshot) -> None:
    entries = snapshot.checked_manifest().files
    snapshot.checked_index()
    if damaged := find_damaged(snapshot, entries):
        number = format_count(len(damaged), "file")
        reason = f"{number} of it are missing or not as they were written, like {min(damaged)}"
        raise DamagedError(snapshot.path, reason, "roll back to another one")
