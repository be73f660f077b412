"""How far the snapshot is that is arriving in a cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pqcache.errors import CacheError
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot, find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.snapshot import Snapshot

_MOVING = 2.0  # seconds: more than a snapshot takes from ``arriving/`` to where ``current`` points to it


@dataclass(frozen=True, kw_only=True)
class ArrivalProgress:
    """How much of a snapshot is there: bytes, complete files, and row groups.

    ``changed`` counts files that are not at the source any more as they were listed. ``run`` is the process that
    fetches it, like ``process 12 of alice``; empty where none does. ``abandoned`` says that nothing more will come.
    """

    bytes: int
    total_bytes: int
    files: int
    row_groups: int
    changed: int
    run: str
    abandoned: bool


@contextmanager
def leased_snapshot(cache: CacheDirectory) -> Iterator[tuple[Snapshot, ArrivalProgress | None]]:
    """The current snapshot, else the arriving one with its progress."""
    until = time.monotonic() + _MOVING
    while True:
        arriving = find_arriving(cache) if cache.current() is None else None
        try:
            if arriving is None:
                snapshot, lease, progress = *cache.lease(), None
            else:
                snapshot, lease, progress = arriving, arriving.lease(), _progress(arriving)
            break
        except (CacheError, OSError):  # it is published just now
            if arriving is None or time.monotonic() > until:
                raise
            time.sleep(0.01)
    with lease:
        yield snapshot, progress


def _progress(snapshot: ArrivingSnapshot) -> ArrivalProgress:
    files, errors = snapshot.manifest().files, snapshot.errors()
    there = snapshot.arrived(entry.path for entry in files)
    arrived = [entry for entry in files if entry.path in there]
    return ArrivalProgress(
        bytes=sum(entry.size for entry in arrived),
        total_bytes=sum(entry.size for entry in files),
        files=len(arrived),
        row_groups=sum(entry.row_groups for entry in arrived),
        changed=len(errors.keys() - {""}),
        run=(snapshot.filled_by() or "a process") if snapshot.is_being_filled() else "",
        abandoned="" in errors,
    )
