"""Rollback: make an older snapshot of a cache the current one again."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from pqcache.errors import DamagedError, disk_errors
from pqcache.events import OnEvent, Published, ignore
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.history import ROLLBACK
from pqcache.store.pins import Rollback, read_kept, write_kept
from pqcache.store.run_record import recorded_run
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.held import find_damaged
from pqcache.system.disk import replace_symlink
from pqcache.units import format_count, parse_duration


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
    >>> report.snapshot == report.previous  # there is no other one yet
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
