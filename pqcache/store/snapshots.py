"""Lists, pins and unpins the snapshots of a cache, and rolls back to one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pqcache.errors import CacheError, DamagedError, UsageError, disk_errors
from pqcache.events import OnEvent, Published, ignore
from pqcache.options import COMMANDS, RollbackArguments, Unpack, all_values, documented
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.gc import removable_snapshots
from pqcache.store.history import ROLLBACK, now_text, recorded_run
from pqcache.store.layout import CANDIDATE, LEASE
from pqcache.store.publish import unmet_of
from pqcache.store.snapshot import Hold, Rollback, Snapshot, check_name, read_kept, write_kept
from pqcache.store.sync.decide import find_damaged
from pqcache.store.urls import quoted
from pqcache.system.disk import allocated, freed_bytes, replace_symlink
from pqcache.system.locks import readers_of, user_name
from pqcache.units import format_count, parse_duration


@dataclass(frozen=True, kw_only=True)
class SnapshotView:
    """A snapshot in the list of a cache.

    Attributes:
        snapshot: its ID.
        created: when it was made, in ISO 8601.
        current: whether readers open it by default.
        candidate: whether it waits to be published.
        pinned: whether it is kept until it is unpinned.
        name: the name of the pin, or None.
        leases: the number of readers that hold it, as far as known on this machine; None on a file system without
            locks.
        files, rows, bytes: its content; None if its manifest is damaged.
        version: the version of the Delta or Iceberg table that it was made from, or None.
        damage: why nothing else is known of it, or None.
        own_bytes: bytes on disk that only it uses, freed by its removal.
        replaced_bytes: bytes on disk that the next snapshot no longer uses; None for the last, or if the next is gone.
    """

    snapshot: str
    created: str | None
    current: bool
    candidate: bool
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
    """The pins of a cache: names by IDs of snapshots, empty for pins without names, and the one that changed.

    ``removable_bytes`` will be freed on disk by the next sync or gc, which removes old snapshots.
    """

    cache: str
    snapshot: str
    pins: Mapping[str, str]
    removable_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def snapshots(cache: str | os.PathLike[str]) -> list[SnapshotView]:
    """List the snapshots of a cache, oldest first.

    >>> [(view.current, view.leases, view.rows) for view in snapshots("cache/shop")]
    [(True, 0, 600)]

    Raises CacheError if there is no cache.
    """
    target = CacheDirectory.open(os.fspath(cache))
    pins, current = read_kept(target.path).pins, target.current()
    kept, candidate = target.snapshots(), target.candidate()
    if candidate is not None:
        kept.append(candidate)
    found, newer = [], None
    for snapshot in reversed(kept):
        files = allocated(snapshot.path)
        own = sum(size for size, is_alone in files.values() if is_alone)
        replaced = None
        if newer is not None and newer[0] == snapshot.number + 1:
            replaced = sum(size for key, (size, _) in files.items() if key not in newer[1])
        view = replace(_view(snapshot, current, pins), candidate=snapshot == candidate)
        found.append(replace(view, own_bytes=own, replaced_bytes=replaced))
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

    Pinned snapshots don't count for ``keep``. An existing pin gets the new name.

    >>> report = pin("cache/shop", "1", name="first")
    >>> list(report.pins.values())
    ['first']

    Raises UsageError for a name that another snapshot has, CacheError, or CacheLocked when another run is at work.
    """
    target = CacheDirectory.open(os.fspath(cache))
    if name is not None:
        check_name(name)
    with disk_errors(target.path), recorded_run(target, "pin", parse_duration(wait), on_event) as record:
        kept, found = read_kept(target.path), _published(target, snapshot)
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
    """Unpin a snapshot, by its ID, number or name, so that it can be removed like others.

    >>> unpin("cache/shop", pin("cache/shop", "1").snapshot).pins
    {}

    Raises UsageError if it isn't pinned, CacheError, or CacheLocked when another run is at work.
    """
    target = CacheDirectory.open(os.fspath(cache))
    with disk_errors(target.path), recorded_run(target, "unpin", parse_duration(wait), on_event) as record:
        kept = read_kept(target.path)
        found = snapshot if snapshot in kept.pins else kept.id_of(snapshot) or target.snapshot(snapshot).id
        if found not in kept.pins:
            raise UsageError(found, "is not pinned", f"'pqcache snapshots {quoted(cache)}' lists the pins")
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
        candidate=False,
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
    """The snapshot that is current now, and the previous one; the same if nothing changed.

    ``hold`` is the time (ISO 8601) since which the cache is held, and ``candidate`` the snapshot waiting to be
    published, or None. ``published`` says whether the current snapshot was the candidate before.
    """

    cache: str
    snapshot: str | None
    previous: str | None
    hold: str | None = None
    candidate: str | None = None
    published: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@documented(RollbackArguments, *COMMANDS["rollback"])
def rollback(
    cache: str | os.PathLike[str],
    snapshot: str | None = None,
    *,
    on_event: OnEvent = ignore,
    **given: Unpack[RollbackArguments],
) -> RollbackReport:
    """Make a snapshot of a cache, by its ID, number or name, the current one, in one step.

    The history records it. Readers keep other snapshots that they have open. As always, the next sync publishes the
    present state of the source, unless the cache is held: then it makes a candidate without publishing it.

    Args:
        cache: the cache's directory.
        snapshot: the one to go back to; not needed with some of the options below.
        on_event: called with what happens.
        given: the options, as the table in pqcache.options has them.

    >>> report = rollback("cache/shop", "1")
    >>> report.snapshot == report.previous  # it is the only one so far
    True

    Raises UsageError, CacheError if the snapshot is gone, DamagedError if it is damaged, or CacheLocked when another
    run is at work; then the current snapshot stays.
    """
    options = all_values(given, *COMMANDS["rollback"])
    publishes = options.release or options.accept
    asked = [f"--{name}" for name in ("hold", "release", "accept") if getattr(options, name)]
    if len(asked) > 1 or (publishes and snapshot is not None):
        raise UsageError(" and ".join([*asked, *([] if len(asked) > 1 else ["SNAPSHOT"])]), "exclude each other")
    target = CacheDirectory.open(os.fspath(cache))
    if snapshot is None and not asked:
        raise UsageError("rollback", "needs a snapshot", f"'pqcache snapshots {quoted(cache)}' lists them")
    with disk_errors(target.path), recorded_run(target, ROLLBACK, options.wait, on_event) as record:
        before, current = read_kept(target.path), target.current() if publishes else target.snapshot()
        found = (_candidate(target, options.accept) if publishes else _published(target, snapshot)) or current
        if found is not None and found != current:
            _check(found)
        if options.hold and before.hold is None:
            write_kept(target.path, replace(before, hold=Hold(now_text(), user_name(os.geteuid()))))
        if found is not None and found != current:
            _switch(target, current, found, record.run, publishes)
        values = {"snapshot": _id(found), "previous": _id(current)}
        record.end(values)
        kept = read_kept(target.path)
        after = replace(kept, rollback=None, hold=None if publishes else kept.hold)
        if after != kept:
            write_kept(target.path, after)
        waiting = target.candidate()
    if found is not None:
        on_event(Published(found.id))
    return RollbackReport(
        cache=str(target.path),
        **values,
        hold=None if after.hold is None else after.hold.time,
        candidate=_id(waiting),
        published=publishes and found != current,
    )


def _id(snapshot: Snapshot | None) -> str | None:
    return None if snapshot is None else snapshot.id


def _published(cache: CacheDirectory, name: str | None) -> Snapshot:
    found = cache.snapshot(name)
    if found.path.parent != cache.snapshots_dir:
        advice = f"'pqcache rollback {quoted(cache.path)} --release' publishes it"
        raise UsageError(found.id, "is the candidate, which is not published", advice)
    return found


def _candidate(cache: CacheDirectory, accepts: bool) -> Snapshot | None:
    """The candidate to publish; raises UsageError if rules aren't met, unless that is accepted."""
    found = cache.candidate()
    if found is None and accepts:
        raise UsageError("--accept", "no snapshot waits to be published", f"run 'pqcache sync {quoted(cache.path)}'")
    if found is not None and not accepts and (unmet := unmet_of(found)):
        advice = f"look at it with 'pqcache inspect {quoted(cache.path)} --candidate', and publish it with --accept"
        raise UsageError(found.id, f"does not meet the rules of [expect]: {'; '.join(unmet)}", advice)
    return found


def _switch(cache: CacheDirectory, current: Snapshot | None, found: Snapshot, run: str, publishes: bool) -> None:
    """Switch snapshots, after a note on disk in case this run is killed."""
    kept, snapshots = read_kept(cache.path), cache.snapshots()
    left = {s.id for s in snapshots if current is not None and found.number < s.number <= current.number}
    begun = Rollback(now_text(), found.id, "" if current is None else current.id, run, publishes)
    last = kept.last_number if publishes else max(kept.last_number, *(s.number for s in snapshots))
    kept = replace(
        kept,
        rolled_back=tuple(sorted({*kept.rolled_back, *left} - {found.id})),
        rollback=begun,
        last_number=last,
    )
    write_kept(cache.path, kept)
    if publishes:
        cache.publish_candidate(found.id)
    else:
        replace_symlink(cache.path / "current", f"snapshots/{found.id}", cache.tmp_dir)


def _check(snapshot: Snapshot) -> None:
    entries = snapshot.checked_manifest().files
    snapshot.checked_index()
    if damaged := find_damaged(snapshot, entries):
        number = format_count(len(damaged), "file")
        reason = f"{number} of it missing or not as written, like {min(damaged)}"
        is_candidate = snapshot.path.parent.name == CANDIDATE
        advice = "run 'pqcache sync', which rebuilds it" if is_candidate else "roll back to another one"
        raise DamagedError(snapshot.path, reason, advice)
