"""A plan as people read it: what happens to each partition, and to each file with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

from pqcache.events import Planned
from pqcache.store.hive import parent
from pqcache.store.manifest import Identity, Manifest
from pqcache.store.sync.plan import Plan
from pqcache.units import format_count, format_size


@dataclass(frozen=True, kw_only=True)
class PartitionChange:
    """What a run did to one partition directory, or would do: numbers of source files, and bytes to fetch."""

    directory: str
    added: int
    changed: int
    removed: int
    rewritten: bool
    fetched_bytes: int

    @property
    def text(self) -> str:
        """What happens, in a few words."""
        counts = ((self.added, "new"), (self.changed, "changed"), (self.removed, "removed"))
        parts = [format_count(count, f"{what} file") for count, what in counts if count]
        parts += [f"{format_size(self.fetched_bytes)} to fetch"] if self.fetched_bytes else []
        return ", ".join([*parts, *(["rewritten"] if self.rewritten else [])])


def partition_changes(plan: Plan) -> tuple[PartitionChange, ...]:
    """Return what a plan changes, by partition directory, in the order of their names."""
    counts: dict[str, list[int]] = {}
    for at, paths in enumerate((plan.added, plan.changed, plan.removed)):
        for path in paths:
            counts.setdefault(parent(path), [0, 0, 0])[at] += 1
    planned = {item.directory: item for item in plan.directories if item.copy or item.rewrite}
    found = []
    for directory in sorted({*counts, *planned}):
        added, changed, removed = counts.get(directory, (0, 0, 0))
        item = planned.get(directory)
        found.append(
            PartitionChange(
                directory=directory,
                added=added,
                changed=changed,
                removed=removed,
                rewritten=item is not None and bool(item.rewrite),
                fetched_bytes=sum(file.identity.size for file in item.downloads) if item is not None else 0,
            )
        )
    return tuple(found)


def planned_files(plan: Plan, manifest: Manifest | None, listed: Collection[str]) -> Iterator[Planned]:
    """Yield what a plan does with each source file that is not left as it is, and why.

    ``listed`` has the paths of everything at the source: what is removed and still there was left out.
    """
    held = {file.path: file.identity for entry in (manifest.files if manifest else ()) for file in entry.sources}
    for item in plan.directories:
        for file in item.downloads:
            before = held.get(file.path)
            action, reason = "add", "is new at the source"
            if before is not None:
                action, reason = "change", _difference(before, file.identity)
            yield Planned(file.path, action, reason, file.identity.size)
        if item.rewrite and not item.downloads:
            yield Planned(item.directory, "rewrite", "its files, their row groups or options are other ones", 0)
    there = frozenset(listed)
    for path in plan.removed:
        reason = "is left out by the options" if path in there else "is gone at the source"
        yield Planned(path, "remove", reason, 0)


def _difference(before: Identity, after: Identity) -> str:
    """Return how a file differs from the one that is held."""
    if before.size != after.size:
        return f"has {after.size:,} bytes, not {before.size:,}"
    if before.mtime_ns != after.mtime_ns:
        return f"was modified at {_time(after.mtime_ns)}, not {_time(before.mtime_ns)}"
    if before.tag != after.tag:
        return "has another ETag, or inode and ctime"
    return "is held damaged, or with other columns, rows or options"


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).isoformat(timespec="milliseconds")
