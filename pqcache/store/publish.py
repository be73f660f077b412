"""Publishes a snapshot built in ``tmp/`` or makes it the candidate, and removes old snapshots without readers.

Publishing is a single step. A candidate waits in ``candidate/ID`` because the cache is held, or because rules aren't
met. The next sync starts from it and replaces it; `CacheDirectory.publish_candidate` makes it the current snapshot.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pqcache.errors import MALFORMED, CacheLocked, disk_errors
from pqcache.events import Collected, OnEvent, Warned, ignore
from pqcache.options import COMMANDS, GcArguments, Unpack, all_values, documented
from pqcache.store.arriving import arriving_snapshots, remove_empty
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.history import recorded_run
from pqcache.store.layout import CANDIDATE, LEASE, UNMET
from pqcache.store.ownership import directory_mode, file_mode
from pqcache.store.snapshot import Snapshot, read_kept
from pqcache.system.disk import (
    freed_bytes,
    fsync_path,
    fsync_tree,
    make_directory,
    read_regular,
    remove_tree,
    replace_symlink,
)
from pqcache.system.locks import open_to_lock, try_lock
from pqcache.units import Stopwatch

_PUBLISHING = 60.0  # seconds: more than a run takes between a snapshot's rename and the swap of current


def publish(cache: CacheDirectory, built: Path, previous: Snapshot | None) -> Snapshot:
    """Make the snapshot built in ``tmp/`` the current one, in place of ``previous``.

    Every file in it must be durable already; directories are made durable here, before the rename makes them visible.
    Raises CacheLocked if another run has published meanwhile, as can happen with broken locks.
    """
    (built / LEASE).touch(file_mode())
    fsync_tree(built)
    if cache.current() != previous:
        raise CacheLocked(cache.path, "another run has published meanwhile", "sync again")
    if previous is not None:
        _remove_orphans(cache, previous)
    final = cache.snapshots_dir / new_snapshot_id(cache)
    built.rename(final)
    fsync_path(cache.snapshots_dir)
    replace_symlink(cache.path / "current", f"snapshots/{final.name}", cache.tmp_dir)
    return Snapshot(final)


def stage(cache: CacheDirectory, built: Path, unmet: Sequence[str] = ()) -> Snapshot:
    """Make the snapshot built in ``tmp/`` the candidate; ``unmet`` are the rules it doesn't meet.

    The end of the run removes the previous candidate.
    """
    (built / LEASE).touch(file_mode())
    if unmet:
        (built / UNMET).write_text(json.dumps(list(unmet)) + "\n")
    fsync_tree(built)
    place = cache.path / CANDIDATE
    make_directory(place, directory_mode())
    final = place / new_snapshot_id(cache)
    built.rename(final)
    fsync_path(place)
    return Snapshot(final)


def unmet_of(candidate: Snapshot) -> tuple[str, ...]:
    """Rules that keep the candidate from being published; empty if it only waits for the end of a hold."""
    try:
        return tuple(map(str, json.loads(read_regular(candidate.path / UNMET))))
    except FileNotFoundError:
        return ()
    except MALFORMED as error:
        return (f"{UNMET} is damaged ({error})",)


def new_snapshot_id(cache: CacheDirectory, now: datetime | None = None) -> str:
    """A new ID: the time, and a number that always grows."""
    moment = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
    return f"{moment}-{next_number(cache):04d}"


def next_number(cache: CacheDirectory) -> int:
    numbers = [snapshot.number for snapshot in (*cache.snapshots(), *cache.candidates(), *arriving_snapshots(cache))]
    return max([*numbers, read_kept(cache.path).last_number]) + 1


def _remove_orphans(cache: CacheDirectory, previous: Snapshot) -> None:
    """Remove snapshots of runs that died before publishing, which would count as old ones."""
    kept = read_kept(cache.path)
    for snapshot in cache.snapshots():
        was_current = snapshot.number <= previous.number or snapshot.id in kept.rolled_back or snapshot.id in kept.pins
        if not was_current and abs(time.time() - snapshot.path.stat().st_mtime) > _PUBLISHING:
            remove_snapshot(cache, snapshot, without_lock=True)


@dataclass(frozen=True)
class GcReport:
    """The removed and the kept snapshots, and the bytes freed on disk; with ``dry_run``, that would be freed."""

    cache: str
    dry_run: bool
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@documented(GcArguments, *COMMANDS["gc"])
def gc(cache: str | os.PathLike[str], *, on_event: OnEvent = ignore, **given: Unpack[GcArguments]) -> GcReport:
    """Remove all but the newest snapshots; the current one, pinned ones and those with readers are kept.

    On a file system without locks, readers are unknown, and nothing is removed without ``older_than``.

    Args:
        cache: the cache's directory.
        on_event: called with what happens.
        given: the options, as the table in pqcache.options has them.

    >>> gc("cache/shop", keep=1).removed
    ()

    Raises UsageError, CacheError, or CacheLocked when another run is at work.
    """
    options = all_values(given, *COMMANDS["gc"])
    age, dry_run = options.older_than, options.dry_run
    target, watch = CacheDirectory.open(os.fspath(cache)), Stopwatch()
    with disk_errors(target.path), ExitStack() as stack:
        if dry_run:
            stack.enter_context(target.lock(options.wait, on_event))
        else:
            record = stack.enter_context(recorded_run(target, "gc", options.wait, on_event))
        count = options.keep or read_config(target.path).keep
        surplus = [snapshot for snapshot in removable_snapshots(target, count, age) if not snapshot.is_leased()]
        if dry_run:
            removed, freed = surplus, freed_bytes(*(snapshot.path for snapshot in surplus))
        else:
            removed, freed = [], 0
            for snapshot in surplus:
                alone = freed_bytes(snapshot.path)  # those before it are gone
                if remove_snapshot(target, snapshot, without_lock=age > 0):
                    removed.append(snapshot)
                    freed += alone
            remove_empty(target)
        for snapshot in target.snapshots() if age else ():
            if _age(snapshot) < 0:
                reason = "its time is in the future, so its age is unknown"
                on_event(Warned(f"{snapshot.path}: kept: {reason}; without --older-than it counts as any other"))
        gone = {snapshot.id for snapshot in removed}
        kept = tuple(snapshot.id for snapshot in target.snapshots() if snapshot.id not in gone)
        report = GcReport(str(Path(target.path)), dry_run, tuple(sorted(gone)), kept, freed)
        if not dry_run:
            for snapshot in removed:
                on_event(Collected(snapshot.id))
            current = target.current()
            held = {"snapshot": current.id if current is not None else None, "published": False}
            record.end({**held, "collected": list(report.removed), "seconds": watch.seconds})
    return report


def remove_old_snapshots(cache: CacheDirectory, keep: int, older_than: float = 0.0) -> list[Snapshot]:
    """Remove all but the newest ``keep`` snapshots, which include the current one but not pinned ones.

    Leased snapshots are kept, and those published less than ``older_than`` seconds ago. Without locks, nothing is
    removed unless ``older_than`` rules out readers. Returns the removed snapshots.
    """
    found = removable_snapshots(cache, keep, older_than)
    removed = [snapshot for snapshot in found if remove_snapshot(cache, snapshot, without_lock=older_than > 0)]
    remove_empty(cache)
    return removed


def removable_snapshots(cache: CacheDirectory, keep: int, older_than: float = 0.0) -> list[Snapshot]:
    """The snapshots that ``remove_old_snapshots`` would remove if nobody reads them.

    These include replaced candidates, and arriving snapshots that no run will continue: abandoned ones, and all of them
    once a snapshot is published.
    """
    current, candidate = cache.current(), cache.candidate()
    dead: list[Snapshot] = [s for s in arriving_snapshots(cache) if current is not None or s.is_abandoned()]
    dead += [snapshot for snapshot in cache.candidates() if snapshot != candidate]
    if current is None:
        return dead
    others = old_snapshots(cache, current)
    surplus = others[: max(0, len(others) + 1 - max(1, keep))]
    return dead + [snapshot for snapshot in surplus if not older_than or _age(snapshot) >= older_than]


def old_snapshots(cache: CacheDirectory, current: Snapshot) -> list[Snapshot]:
    """Snapshots in the order of removal, without the current one and pinned ones."""
    kept = read_kept(cache.path)
    found = [s for s in cache.snapshots() if s.id not in kept.pins and s.number != current.number]
    known = [s for s in found if s.number < current.number or s.id in kept.rolled_back]
    return sorted(known, key=lambda snapshot: snapshot.id not in kept.rolled_back)


def _age(snapshot: Snapshot) -> float:
    """Seconds since publication; negative if a clock was wrong."""
    return time.time() - snapshot.path.stat().st_mtime


def remove_snapshot(cache: CacheDirectory, snapshot: Snapshot, without_lock: bool = False) -> bool:
    """Remove a snapshot that nobody reads, holding the exclusive lock until it is renamed.

    Returns whether it was removed. On a file system without locks it is removed only ``without_lock``.
    """
    try:
        file = open_to_lock(snapshot.path / LEASE)
    except FileNotFoundError:
        file = None
    try:
        if file is not None:
            held = try_lock(file, exclusive=True)
            if held is False or (held is None and not without_lock):
                return False
        trash = cache.tmp_dir / f"removed-{snapshot.id}-{os.urandom(4).hex()}"
        snapshot.path.rename(trash)
    finally:
        if file is not None:
            os.close(file)
    remove_tree(trash)
    return True
