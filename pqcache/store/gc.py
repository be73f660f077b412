"""Removes old snapshots that nobody reads: after each sync, and for ``pqcache gc``."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pqcache.errors import disk_errors
from pqcache.events import Collected, OnEvent, Warned, ignore
from pqcache.options import COMMANDS, GcArguments, Unpack, all_values, documented
from pqcache.store.arriving import arriving_snapshots, remove_empty
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.history import recorded_run
from pqcache.store.layout import LEASE
from pqcache.store.snapshot import Snapshot, read_kept
from pqcache.system.disk import freed_bytes, remove_tree
from pqcache.system.locks import open_to_lock, try_lock
from pqcache.units import Stopwatch


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
