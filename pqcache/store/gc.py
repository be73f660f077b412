"""Remove old snapshots that nobody reads."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pqcache.errors import disk_errors
from pqcache.events import Collected, OnEvent, ignore
from pqcache.store.cache import CacheDirectory
from pqcache.store.config import read_config
from pqcache.units import parse_count, parse_duration


@dataclass(frozen=True)
class GcReport:
    """The snapshots that were removed (with ``dry_run`` those that would be) and those that are kept."""

    cache: str
    dry_run: bool
    removed: tuple[str, ...]
    kept: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def gc(
    cache: str | os.PathLike[str],
    *,
    keep: str | int | None = None,
    older_than: str | float = 0.0,
    wait: str | float = 0.0,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> GcReport:
    """Remove all but the newest ``keep`` snapshots; default: as many as sync keeps.

    The current snapshot, those in use by a reader, and those younger than ``older_than`` are kept. ``wait`` is how
    long to wait for another run to end. Durations are seconds or text like ``"48h"``.

    >>> gc("cache/shop", keep=1).removed
    ()

    Raises CacheError, or CacheLocked when another run is at work.
    """
    target = CacheDirectory.open(os.fspath(cache))
    with disk_errors(target.path), target.lock(parse_duration(wait)):
        count = read_config(target.path).keep if keep is None else parse_count(keep)
        if dry_run:
            removed = target.collectable(count, parse_duration(older_than))
        else:
            removed = target.collect(count, parse_duration(older_than))
            for snapshot in removed:
                on_event(Collected(snapshot.id))
        gone = {snapshot.id for snapshot in removed}
        kept = tuple(snapshot.id for snapshot in target.snapshots() if snapshot.id not in gone)
    return GcReport(str(Path(target.path)), dry_run, tuple(sorted(gone)), kept)
