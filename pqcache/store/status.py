"""The state of the caches below a directory: their contents and age, and the result of the last run.

The age follows from the history: each record of a sync has the time of the listing, and the partitions that differ
from the listing.
"""

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
from pqcache.store.cache_root import ListedTable, tables_below
from pqcache.store.config import read_config
from pqcache.store.expect import FAILED, Finding, lines_of, stale
from pqcache.store.history import DONE, INTERRUPTED, ROLLBACK, RUNNING_NOW, log
from pqcache.store.layout import CONFIG
from pqcache.store.manifest import Totals
from pqcache.store.publish import unmet_of
from pqcache.store.snapshot import Snapshot, read_kept, read_summary, rolled_back_from
from pqcache.store.urls import redact
from pqcache.units import format_count, format_seconds, parse_duration

_INTERVALS = 10  # intervals between runs that tell when the next is due
_FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class CacheStatus:
    """The state of one cache; times are ISO 8601 in UTC, and unknown values are None.

    Attributes:
        cache: its directory.
        source: its source, without secrets.
        snapshot: the current snapshot.
        rows: the number of rows in it.
        files: the number of files in it.
        bytes: the size of these files.
        disk_bytes: the size of the whole cache on disk, with all snapshots; shared files count once.
        synced: when the source was last listed and found equal to the cache.
        as_of: the time from which its age counts: ``synced``, or an earlier time for partitions in ``skipped``.
        age: seconds since ``as_of``.
        reasons: why the cache may differ from its source; empty if the last sync found or made them equal.
        last_run: the end of the last sync.
        last_result: done, failed, refused, or interrupted.
        last_error: the error of the last sync.
        failing_since: the end of the first sync in the current series of failures.
        skipped: the partitions that ``skip_bad`` left out of the current snapshot, or kept in an old version.
        held: since when the cache is held, and ``by`` whom; else None.
        candidate: the snapshot waiting to be published.
        running: the run at work: its ``command``, when it ``began``, and its ``phase``.
        leased: the snapshots held by readers.
        next_due: when the next sync is due, by the usual interval.
        stale: whether the newest file is older than a ``freshness`` rule allows.
        error: why the cache, or its section in ``pqcache.toml``, can't be read; else None.
    """

    cache: str
    source: str | None = None
    snapshot: str | None = None
    rows: int | None = None
    files: int | None = None
    bytes: int | None = None
    disk_bytes: int | None = None
    synced: str | None = None
    as_of: str | None = None
    age: float | None = None
    reasons: tuple[str, ...] = ()
    last_run: str | None = None
    last_result: str | None = None
    last_error: str | None = None
    failing_since: str | None = None
    skipped: tuple[str, ...] = ()
    held: Mapping[str, str] | None = None
    candidate: str | None = None
    running: Mapping[str, str | None] | None = None
    leased: tuple[str, ...] = ()
    next_due: str | None = None
    stale: bool = False
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class StatusReport:
    """The caches and declared tables below the roots, and their total size on disk; shared files count once."""

    caches: tuple[CacheStatus, ...]
    disk_bytes: int

    def raise_if_older(self, max_age: str | float) -> None:
        """Raise PqcacheError if the data of a cache is older than ``max_age``, missing or unreadable.

        Also raises it for an unmet ``freshness`` rule.
        """
        limit, stale = parse_duration(max_age), []
        for found in self.caches:
            name = found.cache.rpartition("/")[2]
            if found.error is not None or found.age is None or found.age > limit or found.stale:
                age = () if found.age is None else (format_seconds(found.age),)
                stale.append(f"{name} ({'; '.join((*age, *found.reasons))})")
        if stale:
            reason = f"{len(stale):,} of {len(self.caches):,} older than {format_seconds(limit)}"
            raise PqcacheError(", ".join(stale), reason, "'pqcache log CACHE' shows why")


def status(*roots: str | os.PathLike[str]) -> StatusReport:
    """Report the status of each cache below ``roots``, by default below the directory ``PQCACHE_ROOT``.

    Without that variable it is ``pqcache`` in ``XDG_CACHE_HOME``, or in ``~/.cache``. A root may be a cache itself. An
    unreadable cache is reported with its ``error``. Tables declared in the ``pqcache.toml`` of a root are reported even
    before they have a cache.

    >>> [(found.rows, found.last_result) for found in status("cache").caches]
    [(600, 'done')]

    Raises CacheError if there is no cache.
    """
    seen: dict[tuple[int, int], int] = {}
    found = [_status(path, seen, time.time(), table) for path, table in tables_below(*roots, lenient=True).items()]
    return StatusReport(tuple(found), sum(seen.values()))


def cache_status(cache: str | os.PathLike[str]) -> CacheStatus:
    return _status(Path(cache).absolute(), {}, time.time())


def _status(path: Path, seen: dict[tuple[int, int], int], now: float, table: ListedTable | None = None) -> CacheStatus:
    """The status of a cache, or of a declared ``table``; ``seen`` collects sizes of files on disk."""
    cache = CacheDirectory(path)
    if table is not None and table.error is not None:
        return _unreadable(path, f"{table.error.subject}: {table.error.reason}")
    try:
        if table is not None and not cache.exists():
            reason = f"declared in {path.parent / CONFIG}, and has no cache yet"
            return CacheStatus(cache=str(path), source=redact(table.source), reasons=(reason,))
        config = read_config(path)
        values: dict[str, Any] = {"disk_bytes": _disk_bytes(path, seen), "source": redact(config.source)}
        unmet: tuple[Finding, ...] = ()
        current = cache.current()
        if current is not None:
            totals = _totals(current)
            values |= {"snapshot": current.id, "rows": totals.rows, "files": totals.files, "bytes": totals.size}
            unmet = stale(config.rules, current, now)
            values["stale"] = any(finding.level == FAILED for finding in unmet)
        leased = tuple(snapshot.id for snapshot in cache.snapshots() if _is_leased(snapshot))
        values |= _runs(cache, current, now)
        values["reasons"] += tuple(lines_of(unmet))
        return CacheStatus(cache=str(path), leased=leased, **values)
    except PqcacheError as error:
        return _unreadable(path, f"{error.subject}: {error.reason}")
    except OSError as error:
        return _unreadable(path, f"{error.filename or path}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001  one damaged cache must not hide the others
        return _unreadable(path, f"{path}: is damaged ({type(error).__name__}: {first_line(error)})")


def _unreadable(path: Path, error: str) -> CacheStatus:
    return CacheStatus(cache=str(path), error=error, reasons=(error,))


def _totals(snapshot: Snapshot) -> Totals:
    summary = read_summary(snapshot)
    return summary.totals if summary is not None else snapshot.manifest().totals


def _runs(cache: CacheDirectory, current: Snapshot | None, now: float) -> dict[str, Any]:
    """Values from the history: syncs, age, and the run at work."""
    records = log(cache.path)
    syncs = [record for record in records if record["command"] == "sync"]
    ended = [record for record in syncs if record["result"] != RUNNING_NOW]
    values: dict[str, Any] = {"next_due": next_due(syncs)}
    reasons = []
    if records and (last := records[-1])["result"] == RUNNING_NOW:
        values["running"] = {name: last.get(name) for name in ("command", "began", "phase")}
    if ended:
        last = ended[-1]
        values |= {"last_run": last["time"], "last_result": last["result"], "last_error": last.get("error")}
    if current is None:
        reasons.append("never synced")
    else:
        ages, is_rolled_back = _ages(records)
        known = ages.get(current.id) or _Age.of(current)
        as_of = min(known.behind.values(), default=known.listed)
        values |= {
            "as_of": _text(as_of),
            "age": max(0.0, round(now - as_of, 1)),
            "skipped": tuple(sorted(known.behind)),
        }
        values["synced"] = None if known.equal is None else _text(known.equal)
        if is_rolled_back and (was := rolled_back_from(cache.path, current)):
            reasons.append(f"rolled back from {was}")
        if hold := read_kept(cache.path).hold:
            values["held"] = {"since": hold.time, "by": hold.by}
            reasons.append(f"held since {hold.time} by {hold.by}")
        if names := values["skipped"]:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            reasons.append(f"{format_count(len(names), 'partition')} skipped: {', '.join(names[:3])}{more}")
    failed = list(itertools.takewhile(lambda record: record["result"] != DONE, reversed(ended)))
    error = str(failed[0].get("error") or "") if failed else ""
    if (candidate := cache.candidate()) is not None:
        values["candidate"] = candidate.id
        rows = format_count(_totals(candidate).rows, "row")
        why = "".join(f"; {text}" for text in unmet_of(candidate) if text not in error)
        reasons.append(f"{candidate.id} with {rows} is not published{why}")
    if failed:
        values["failing_since"] = failed[-1]["time"]
        what = f"last sync {failed[0]['result']}" if len(failed) == 1 else f"failing since {failed[-1]['time']}"
        reasons.append(f"{what}: {error}" if error else what)
    return {**values, "reasons": tuple(reasons)}


@dataclass(frozen=True)
class _Age:
    """When the source was last listed for a snapshot, and when it was last equal to it.

    ``behind`` has the skipped partitions, each with the last listing that agreed with the snapshot.
    """

    listed: float
    equal: float | None
    behind: Mapping[str, float]

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Age:
        """The age of a snapshot missing from the history, by the time in its name."""
        made = snapshot.made.timestamp()
        return cls(made, made, {})


def _ages(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, _Age], bool]:
    """The age of each snapshot in a history, and whether no sync was done since the last rollback.

    Only a completed sync resets the age: a sync killed after publishing didn't record its skipped partitions, and other
    commands don't list the source.
    """
    ages: dict[str, _Age] = {}
    current, waiting, is_rolled_back = "", "", False  # waiting: the candidate, from which a run starts
    for record in records:
        if record["command"] == ROLLBACK and record["result"] in (DONE, INTERRUPTED):
            current, is_rolled_back = record.get("snapshot", current), True
            waiting = "" if waiting == current else waiting
        if not (record.get("candidate") or record.get("snapshot")) or "published" not in record:
            continue
        staged = record.get("candidate")
        snapshot = Snapshot(Path(staged or record["snapshot"]))
        is_new = record["published"] or (staged and staged != waiting)
        before = ages.get(waiting or current if is_new else snapshot.id)
        if staged:
            waiting = staged
        else:
            current, waiting = snapshot.id, "" if record["published"] or record["command"] == "sync" else waiting
        if record["command"] == "sync" and (record["result"] == DONE or staged):
            listed = _seconds(record.get("listed") or record["time"])
            before = before or _Age(min(listed, snapshot.made.timestamp()), None, {})
            skipped = [item["partition"] for item in record.get("skipped") or ()]
            behind = {name: before.behind.get(name, before.listed) for name in skipped}
            ages[snapshot.id] = _Age(listed, before.equal if behind else listed, behind)
            is_rolled_back = is_rolled_back and bool(staged)
        else:
            ages[snapshot.id] = before or _Age.of(snapshot)
    return ages, is_rolled_back


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def next_due(syncs: Sequence[Mapping[str, Any]]) -> str | None:
    """When the next sync is due: the last start plus the usual interval; None without one.

    The interval is the median of the last ten, if half of them are about equal. Runs turned away by another one don't
    count.
    """
    counted = [record for record in syncs if record.get("exit_code") != 75]
    begun = sorted({_seconds(record.get("began") or record["time"]) for record in counted})
    intervals = [after - before for before, after in itertools.pairwise(begun)][-_INTERVALS:]
    if len(intervals) < _FEWEST:
        return None
    usual = statistics.median(intervals)
    if usual < 60 or sum(abs(interval - usual) <= usual / 4 for interval in intervals) * 2 < len(intervals):
        return None  # started by a person, not by a clock
    return _text(begun[-1] + usual)


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
