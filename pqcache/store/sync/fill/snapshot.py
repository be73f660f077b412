"""Publish the first snapshot of a cache so that it can be read while its files are fetched.

1. The footer of each file is read at the source, which gives manifest and index, and the source is listed again: two
   equal listings prove that it was in this state at one moment. That is the state that will be published.
2. The snapshot is renamed into ``arriving/``, and its files are fetched, each as a whole. All are of the listed
   versions: a file that has changed never arrives.
3. When all files are there, the snapshot is published under the ID that it has.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pqcache.errors import CacheError, SourceChanged, UsageError, disk_errors
from pqcache.events import Published, Warned
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot, arriving_snapshots
from pqcache.store.arriving.publish_arriving import publish_arriving
from pqcache.store.gc import remove_snapshot
from pqcache.store.layout import ARRIVING, RUN
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, SourceFile
from pqcache.store.manifest_digest import table_digest
from pqcache.store.ownership import file_mode, make_directories
from pqcache.store.publish import new_snapshot_id
from pqcache.store.sync.build_snapshot import write_metadata
from pqcache.store.sync.cache_run import CacheRun, RunResult, report_fetching
from pqcache.store.sync.download.download_file import Vanished
from pqcache.store.sync.fill.fetch import RANGES, Fetch, abandon, checked_files
from pqcache.store.sync.fill.prepare import prepare
from pqcache.store.sync.plan import Plan, plan_sync
from pqcache.store.sync.safety_checks import check_space
from pqcache.store.sync.snapshot_job import Origin, SnapshotJob, keys_of
from pqcache.store.tmp_directory import make_workdir, take_over_or_remove
from pqcache.system.disk import fsync_path, link_or_copy, open_plain, tree_size
from pqcache.system.locks import lock_as_writer, try_lock, unlock_as_writer
from pqcache.units import format_size

log = logging.getLogger("pqcache.sync")


def fill_snapshot(run: CacheRun, plan: Plan, metadata: SnapshotMetadata, origin: Origin) -> RunResult:
    """Publish what ``plan`` fetches, all of it; readers may have it open meanwhile.

    A snapshot that an earlier run has left is continued. Where a file changes at the source, Vanished is raised: a run
    from a new listing will find the complete files.
    """
    try:
        return _fill_once(run, plan, metadata, origin)
    except _Outdated as outdated:
        log.debug("the snapshot of an earlier run is given up: %s", outdated)
    return _fill_once(run, plan, metadata, origin)


class _Outdated(Exception):
    """A file of an earlier run's snapshot has changed at the source; the snapshot was abandoned."""


def _fill_once(run: CacheRun, plan: Plan, metadata: SnapshotMetadata, origin: Origin) -> RunResult:
    cache = run.cache
    with disk_errors(cache.path), ExitStack() as stack:
        job = SnapshotJob(
            run=run,
            workdir=make_workdir(cache),
            plan=plan,
            metadata=metadata,
            previous=None,
            origin=origin,
            table=None,
            reindex=False,
        )
        _check_locks(job)
        take_over_or_remove(cache, job.workdir, *keys_of(job))
        for part in (job.workdir / "fetch").glob(f"*{RANGES}"):  # which ranges of it are there is not known
            part.unlink()
        left, reused_id = _find_left(job)
        if left is None:
            snapshot, entries = _begin(job, origin, reused_id, stack)
        else:
            job, snapshot, entries = _continue(job, left, stack)
        checksums = checked_files(snapshot, entries)
        here = sum(entries[file].size for file in checksums) + tree_size(job.workdir / "fetch")
        report_fetching(job.on_event, sum(entry.size for entry in entries), here, len(entries) - len(checksums))
        fetch = Fetch(job, snapshot, entries, checksums)
        try:
            fetch.run()
        except SourceChanged as error:
            if left is not None:
                raise _Outdated(error) from error
            advice = "nothing was published, sync again when the source is complete"
            raise Vanished(error.subject, error.reason, advice) from error
        done = [replace(entry, checksum=fetch.checksums[file]) for file, entry in enumerate(entries)]
        manifest = write_metadata(job, snapshot.path, done)
        published = publish_arriving(cache, snapshot)
    job.on_event(Published(published.id))
    return RunResult(plan=job.plan, published=published, totals=manifest.totals)


def _begin(
    job: SnapshotJob, origin: Origin, reused_id: str, stack: ExitStack
) -> tuple[ArrivingSnapshot, list[FileEntry]]:
    """Start a new snapshot; ``stack`` holds its lock."""
    cache = job.run.cache
    _check_space(job, job.plan, tree_size(job.workdir))
    target, entries = prepare(job, origin.source)
    origin.confirm(entries)
    _announce_rewriting(job, job.plan)
    hold_run(target, job.workdir, stack)
    make_directories(cache.path / ARRIVING)
    if reused_id:
        _retire_others(job, None)
    final = cache.path / ARRIVING / (reused_id or new_snapshot_id(cache))
    target.rename(final)
    fsync_path(final.parent)
    snapshot = ArrivingSnapshot(final)
    _retire_others(job, snapshot)
    return snapshot, entries


def _continue(
    job: SnapshotJob, snapshot: ArrivingSnapshot, stack: ExitStack
) -> tuple[SnapshotJob, ArrivingSnapshot, list[FileEntry]]:
    """Continue an earlier run's snapshot; return a job for just that, the snapshot, and its entries."""
    hold_run(snapshot.path, job.workdir, stack)
    _retire_others(job, snapshot)
    manifest = snapshot.manifest()
    metadata = SnapshotMetadata(
        source=manifest.source,
        where=manifest.where,
        shard=manifest.shard,
        listing=manifest.listing,
        table=manifest.table,
    )
    plan = plan_sync([file for entry in manifest.files for file in entry.sources], (), job.plan.recipe)
    _check_space(job, plan, tree_size(snapshot.path) + tree_size(job.workdir))
    _announce_rewriting(job, plan)
    log.debug("%s is continued", snapshot.path)
    return replace(job, metadata=metadata, plan=plan), snapshot, list(manifest.files)


def _find_left(job: SnapshotJob) -> tuple[ArrivingSnapshot | None, str]:
    """An earlier run's snapshot to continue, or the ID for a new one; empty for a new ID.

    A snapshot is continued if it is of the listed files and this user may write it. One of other files is continued
    only if a reader has it open and it was asked for in the same way: what it misses may still be at the source. Of all
    others complete files are taken over, as if this run had downloaded them. The ID is kept, as states name it, if only
    the user is another one.
    """
    wanted, reused_id = set(job.plan.downloads), ""
    for snapshot in reversed(arriving_snapshots(job.run.cache)):
        try:
            manifest = snapshot.manifest()
            snapshot.index()
            is_same = {file for entry in manifest.files for file in entry.sources} == wanted
            if not snapshot.is_abandoned() and _is_same_request(manifest, job):
                if os.geteuid() in (0, snapshot.path.stat().st_uid) and (is_same or snapshot.is_leased()):
                    return snapshot, ""
                if is_same and not snapshot.is_leased():
                    reused_id = reused_id or snapshot.id
            if manifest.source == job.metadata.source:
                _take_over_files(job, snapshot, manifest, wanted)
        except (CacheError, OSError, ValueError, LookupError) as error:
            log.debug("%s is of no use: %s", snapshot.path, error)
    return None, reused_id


def _take_over_files(job: SnapshotJob, snapshot: ArrivingSnapshot, manifest: Manifest, wanted: set[SourceFile]) -> None:
    """Move an earlier run's files to the places of downloads, where they are checked like those."""
    for file in checked_files(snapshot, manifest.files):
        entry, place = manifest.files[file], job.download_path(manifest.files[file].sources[0])
        if entry.recipe == job.plan.recipe.text and entry.sources[0] in wanted and not place.exists():
            link_or_copy(snapshot.path / entry.path, place)


def _retire_others(job: SnapshotJob, kept: ArrivingSnapshot | None) -> None:
    """Remove arriving snapshots but ``kept``; abandon those with readers, which need not wait."""
    found = [ArrivingSnapshot(path) for path in (job.run.cache.path / ARRIVING).iterdir() if path.is_dir()]
    for snapshot in found:
        if snapshot != kept and not remove_snapshot(job.run.cache, snapshot):
            abandon(snapshot)


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


def _check_space(job: SnapshotJob, plan: Plan, already: int) -> None:
    """Check the space for what is still to fetch beyond ``already``, and for rewritten files."""
    rewritten = plan.download_bytes if job.rewrite is not None else 0
    check_space(job.run, plan, already - rewritten)  # beside the files as they are


def _announce_rewriting(job: SnapshotJob, plan: Plan) -> None:
    if job.rewrite is not None:
        size = format_size(2 * plan.download_bytes)
        about = f"the files arrive as they are and are rewritten then, in {size} of space"
        job.on_event(Warned(f"{job.run.cache.path}: {about}"))


def hold_run(snapshot: Path, scratch: Path, stack: ExitStack) -> None:
    """Say that this process fetches a snapshot, as long as ``stack`` is open.

    The file that says so is always a new one, made in ``scratch``: others can open and lock one that is in the cache,
    and the lock of the cache keeps other runs away.
    """
    new = scratch / Path(RUN).name
    descriptor = open_plain(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode())
    stack.callback(os.close, descriptor)
    lock_as_writer(descriptor)
    stack.callback(unlock_as_writer, descriptor)
    os.write(descriptor, str(os.getpid()).encode())
    new.replace(snapshot / RUN)


def _check_locks(job: SnapshotJob) -> None:
    """Raise UsageError without locks: readers could not know whether a run is at work."""
    with open(job.workdir / "lock", "xb") as one, open(job.workdir / "writer", "xb") as other:
        if try_lock(one.fileno(), exclusive=True) is None or lock_as_writer(other.fileno()) is None:
            reason = f"the file system of {job.run.cache.path} has no locks, by which readers see that a run is at work"
            raise UsageError("--fill", reason, "sync without it, or put the cache on a local disk")
