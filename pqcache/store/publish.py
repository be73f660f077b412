"""Publishes a snapshot built in ``tmp/``, or makes it the candidate.

Publishing is a single step. A candidate waits in ``candidate/ID`` because the cache is held, or because rules aren't
met. The next sync starts from it and replaces it; `CacheDirectory.publish_candidate` makes it the current snapshot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from pqcache.errors import MALFORMED, CacheLocked
from pqcache.store.arriving import arriving_snapshots
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.gc import remove_snapshot
from pqcache.store.layout import CANDIDATE, LEASE, UNMET
from pqcache.store.ownership import directory_mode, file_mode
from pqcache.store.snapshot import Snapshot, read_kept
from pqcache.system.disk import fsync_path, fsync_tree, make_directory, read_regular, replace_symlink

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
