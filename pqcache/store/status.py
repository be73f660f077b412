"""The state of the caches below a directory: what they hold, how old it is, how the last run ended."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pqcache.errors import PqcacheError, first_line
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.history import DONE
from pqcache.store.manifest import Totals
from pqcache.store.manifest_digest import read_summary
from pqcache.store.run_record import log
from pqcache.store.snapshot import Snapshot
from pqcache.store.tables_of_root import find_caches
from pqcache.store.urls import redact
from pqcache.units import format_seconds, parse_duration

_INTERVALS = 10  # the last so many intervals between runs say when the next is due
_FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class CacheStatus:
    """What is known of one cache; times are ISO 8601 in UTC, and what is not known is None.

    Attributes:
        cache: its directory.
        source: where it comes from, without secrets.
        snapshot: the current one.
        rows: of the current snapshot, as ``files`` and ``bytes``.
        files: of the current snapshot.
        bytes: of the current snapshot's files.
        disk_bytes: that the whole cache takes on disk, all snapshots; files that several share count once.
        synced: when a sync last found or made the cache equal to its source.
        age: seconds since then.
        last_run: when the last sync ended.
        last_result: done, failed, refused, interrupted, or running.
        last_error: why it was not done.
        skipped: the partitions that the last sync that was done could not take, so that they are old or missing.
        leased: the snapshots that readers hold.
        next_due: when the next sync is due, by the usual interval between those before.
        error: why the cache cannot be read, else None.
    """

    cache: str
    source: str | None = None
    snapshot: str | None = None
    rows: int | None = None
    files: int | None = None
    bytes: int | None = None
    disk_bytes: int | None = None
    synced: str | None = None
    age: float | None = None
    last_run: str | None = None
    last_result: str | None = None
    last_error: str | None = None
    skipped: tuple[str, ...] = ()
    leased: tuple[str, ...] = ()
    next_due: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class StatusReport:
    """The caches below the roots, and what all of them take on disk together: files that they share count once."""

    caches: tuple[CacheStatus, ...]
    disk_bytes: int

    def raise_if_older(self, max_age: str | float) -> None:
        """Raise PqcacheError if a cache was last equal to its source more than ``max_age`` ago, or cannot be read."""
        limit, stale = parse_duration(max_age), []
        for found in self.caches:
            name = found.cache.rpartition("/")[2]
            if found.error is not None or found.age is None:
                stale.append(f"{name} (never synced)" if found.error is None else f"{name} (unreadable)")
            elif found.age > limit:
                stale.append(f"{name} ({format_seconds(found.age)})")
        if stale:
            reason = f"{len(stale):,} of {len(self.caches):,} older than {format_seconds(limit)}"
            raise PqcacheError(", ".join(stale), reason, "'pqcache log CACHE' shows why")


def status(*roots: str | os.PathLike[str]) -> StatusReport:
    """Return the status of each cache below ``roots``, by default the directory that ``PQCACHE_ROOT`` names.

    Without that variable it is ``pqcache`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` where it is not set. A root
    may be a cache itself. A cache that cannot be read is reported with its ``error``.

    >>> [(found.rows, found.last_result) for found in status("cache").caches]
    [(600, 'done')]

    Raises CacheError where there is no cache.
    """
    seen: dict[tuple[int, int], int] = {}
    found = [_status(path, seen, time.time()) for path in find_caches(*roots)]
    return StatusReport(tuple(found), sum(seen.values()))


def cache_status(cache: str | os.PathLike[str]) -> CacheStatus:
    return _status(Path(cache).absolute(), {}, time.time())


def _status(path: Path, seen: dict[tuple[int, int], int], now: float) -> CacheStatus:
    """Status of one cache; ``seen`` collects what files take on disk."""
    cache = CacheDirectory(path)
    try:
        values: dict[str, Any] = {"disk_bytes": _disk_bytes(path, seen), "source": redact(read_config(path).source)}
        current = cache.current()
        if current is not None:
            totals = _totals(current)
            values |= {"snapshot": current.id, "rows": totals.rows, "files": totals.files, "bytes": totals.size}
        leased = tuple(snapshot.id for snapshot in cache.snapshots() if _is_leased(snapshot))
        return CacheStatus(cache=str(path), leased=leased, **values, **_runs(log(path), current, now))
    except PqcacheError as error:
        return CacheStatus(cache=str(path), error=f"{error.subject}: {error.reason}")
    except OSError as error:
        return CacheStatus(cache=str(path), error=f"{error.filename or path}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001  one damaged cache must not hide the others
        return CacheStatus(cache=str(path), error=f"{path}: is damaged ({type(error).__name__}: {first_line(error)})")


def _totals(snapshot: Snapshot) -> Totals:
    summary = read_summary(snapshot)
    return summary.totals if summary is not None else snapshot.manifest().totals


def _runs(records: Sequence[Mapping[str, Any]], current: Snapshot | None, now: float) -> dict[str, Any]:
    """Summary of a cache's syncs."""
    syncs = [record for record in records if record.get("command") == "sync"]
    values: dict[str, Any] = {"next_due": next_due(syncs)}
    if syncs:
        last = syncs[-1]
        values |= {"last_run": last["time"], "last_result": last["result"], "last_error": last.get("error")}
    record: Mapping[str, Any] = next((record for record in reversed(syncs) if record["result"] == DONE), {})
    values["skipped"] = tuple(item["partition"] for item in record.get("skipped", ()))
    done = record.get("time")
    if done is None and current is not None:  # a history that is lost says nothing; the snapshot's name has its time
        moment = datetime.strptime(current.id.partition("-")[0], "%Y%m%dT%H%M%SZ")
        done = moment.replace(tzinfo=timezone.utc).isoformat()
    if done is not None:
        values |= {"synced": done, "age": max(0.0, round(now - datetime.fromisoformat(done).timestamp(), 1))}
    return values


def next_due(syncs: Sequence[Mapping[str, Any]]) -> str | None:
    """When the next sync is due: the last start plus the usual interval; None if there is none.

    The interval is the median of the last ten, if half of them are about as long. A run that another one kept away is
    no new beginning.
    """
    begun = sorted({_began(record) for record in syncs if record.get("exit_code") != 75})
    intervals = [after - before for before, after in itertools.pairwise(begun)][-_INTERVALS:]
    if len(intervals) < _FEWEST:
        return None
    usual = statistics.median(intervals)
    if usual < 60 or sum(abs(interval - usual) <= usual / 4 for interval in intervals) * 2 < len(intervals):
        return None  # started by a person, not by a clock
    return datetime.fromtimestamp(begun[-1] + usual, timezone.utc).isoformat(timespec="seconds")


def _began(record: Mapping[str, Any]) -> float:
    moment = datetime.fromisoformat(str(record.get("began") or record["time"])).timestamp()
    return moment if "began" in record else moment - float(record.get("seconds", 0))


def _is_leased(snapshot: Snapshot) -> bool:
    with suppress(OSError):  # another user's, whose leases are not to be seen
        return snapshot.is_leased()
    return False


def _disk_bytes(directory: Path, seen: dict[tuple[int, int], int]) -> int:
    """Bytes allocated on disk below a directory; each file counts once, by ``seen``."""
    own: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a run is at work
                found = os.stat(os.path.join(place, name), follow_symlinks=False)
                own[found.st_dev, found.st_ino] = found.st_blocks * 512
    seen.update(own)
    return sum(own.values())
