"""What runs that ended before they published have left: a snapshot to continue with, and complete files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pqcache.errors import CacheError, PqcacheError
from pqcache.store.arriving.arrival_map import ArrivalMap, ArrivalState, FileState
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot, arriving_snapshots
from pqcache.store.gc import remove_snapshot
from pqcache.store.manifest import Manifest, SourceFile
from pqcache.store.manifest_digest import table_digest
from pqcache.store.sync.fill.arriving_files import ArrivingFiles, read_checked, write_changed
from pqcache.store.sync.snapshot_job import SnapshotJob
from pqcache.system.boot import boot_id

log = logging.getLogger("pqcache.sync")


@dataclass(frozen=True)
class FoundFile:
    """A complete copy of a file; its recorded ``checksum`` may be empty, and it may not have been compared."""

    path: Path
    checksum: str = ""
    is_checked: bool = False


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What is left: a snapshot that is ``arriving``, or complete ``files``, and perhaps an ``id`` to keep.

    The ID is that of a snapshot of the same files, of which only complete files are of use: the machine was restarted,
    or they are another user's.
    """

    arriving: ArrivingFiles | None = None
    files: dict[SourceFile, FoundFile]
    id: str = ""


def find_leftovers(job: SnapshotJob) -> Leftovers:
    """Return what of earlier runs serves a run that makes a snapshot arrive.

    A snapshot is continued if it is of the listed files and this user may write them. One of other files is continued
    only where a reader has it open and it was asked for in the same way: what it misses may still be at the source.
    """
    wanted = set(job.plan.downloads)
    files: dict[SourceFile, FoundFile] = {}
    same_id = ""
    for snapshot in reversed(arriving_snapshots(job.run.cache)):
        try:
            manifest, state = snapshot.manifest(), snapshot.map()
            same_boot = state.boot == boot_id()
            same_files = {file for entry in manifest.files for file in entry.sources} == wanted
            if state.state in (ArrivalState.ARRIVING, ArrivalState.COMPLETE) and _is_same_request(manifest, job):
                if same_boot and _is_writable(snapshot) and (same_files or snapshot.is_leased()):
                    return Leftovers(arriving=ArrivingFiles(snapshot, manifest.files), files={})
                if same_files and not snapshot.is_leased():
                    same_id = same_id or snapshot.id
            if manifest.source == job.metadata.source:
                for file, found in _complete_files(snapshot, manifest, state, job.plan.recipe.text, same_boot):
                    files.setdefault(file, found)
        except (CacheError, OSError, ValueError, LookupError) as error:
            log.debug("%s is of no use: %s", snapshot.path, error)
    for file in wanted:
        if file not in files and (path := job.download_path(file)).is_file():
            files[file] = FoundFile(path)
    return Leftovers(files={file: found for file, found in files.items() if file in wanted}, id=same_id)


def _is_writable(snapshot: ArrivingSnapshot) -> bool:
    """Return whether this user may change the files of a snapshot: only their owner may, also in a group's cache."""
    return os.geteuid() in (0, snapshot.path.stat().st_uid)


def _complete_files(
    snapshot: ArrivingSnapshot, manifest: Manifest, state: ArrivalMap, recipe: str, is_checked: bool
) -> Iterator[tuple[SourceFile, FoundFile]]:
    """Yield the files of a snapshot that are complete, as ``recipe`` would fetch them."""
    checksums = read_checked(snapshot.path)
    for position, entry in enumerate(manifest.files):
        if entry.recipe == recipe and state.files[position] == FileState.ARRIVED and position in checksums:
            yield entry.sources[0], FoundFile(snapshot.path / entry.path, checksums[position], is_checked)


def retire_others(job: SnapshotJob, kept: ArrivingSnapshot | None) -> None:
    """Remove all arriving snapshots but ``kept``; those that are read are abandoned: their readers need not wait."""
    for snapshot in arriving_snapshots(job.run.cache):
        if (kept is None or snapshot.id != kept.id) and not remove_snapshot(job.run.cache, snapshot):
            abandon(snapshot)


def abandon(snapshot: ArrivingSnapshot, error: PqcacheError | None = None) -> None:
    """Say to the readers of a snapshot that nothing more will come, and why."""
    try:
        if error is not None:
            write_changed(snapshot.path, "", (error.subject, error.reason, error.advice))
    except (OSError, ValueError) as failure:
        log.debug("%s: why it is abandoned cannot be said: %s", snapshot.path, failure)
    try:
        snapshot.map(writable=True).state = ArrivalState.ABANDONED
    except (CacheError, OSError) as failure:
        log.debug("%s cannot be abandoned: %s", snapshot.path, failure)


def _is_same_request(manifest: Manifest, job: SnapshotJob) -> bool:
    about, recipe = job.metadata, job.plan.recipe.text
    return (
        manifest.source,
        manifest.where,
        manifest.shard,
        manifest.listing,
        table_digest(manifest.table),
        {entry.recipe for entry in manifest.files},
    ) == (about.source, about.where, about.shard, about.listing, table_digest(about.table), {recipe})
