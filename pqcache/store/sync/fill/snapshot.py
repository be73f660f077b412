"""Publish the first snapshot of a cache so that it can be read while its files are fetched.

1. The end of each file is read at the source, which gives manifest and index, and the source is listed again: two equal
   listings prove that it was in this state at one moment. That is the state that will be published.
2. The snapshot is renamed into ``arriving/``, and its files are fetched by ranges. What is read is always of the listed
   versions: a file that has changed never arrives.
3. When all files are there, checked and durable, the snapshot is published under the ID that it has.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pqcache.errors import SourceChanged, UsageError, disk_errors
from pqcache.events import Published, Warned
from pqcache.store.arriving.arrival_map import ArrivalState
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot
from pqcache.store.arriving.publish_arriving import publish_arriving
from pqcache.store.layout import ARRIVING, RUN
from pqcache.store.manifest import Manifest, SnapshotMetadata
from pqcache.store.ownership import file_mode, make_directories
from pqcache.store.publish import new_snapshot_id
from pqcache.store.sync.build_snapshot import write_metadata
from pqcache.store.sync.cache_run import CacheRun, RunResult, report_fetching
from pqcache.store.sync.download.download_file import Vanished
from pqcache.store.sync.fill.arriving_files import ArrivingFiles
from pqcache.store.sync.fill.fetch import Fetch
from pqcache.store.sync.fill.prepare import prepare
from pqcache.store.sync.fill.reuse import Leftovers, find_leftovers, retire_others
from pqcache.store.sync.plan import Plan, plan_sync
from pqcache.store.sync.safety_checks import check_space
from pqcache.store.sync.snapshot_job import Origin, SnapshotJob, keys_of
from pqcache.store.tmp_directory import make_workdir, take_over_or_remove
from pqcache.system.disk import fsync_path, open_plain
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
    """The snapshot of an earlier run has a file that is not at the source any more; it has been abandoned."""


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
        left = find_leftovers(job)
        if left.arriving is not None:
            job, files = _continue(job, left.arriving, stack)
        else:
            files = _begin(job, origin, left, stack)
        stack.callback(files.close)
        try:
            Fetch(job, origin.source, files).run()
        except SourceChanged as error:
            if left.arriving is not None:
                raise _Outdated(error) from error
            advice = "nothing was published, sync again when the source is complete"
            raise Vanished(error.subject, error.reason, advice) from error
        manifest = _complete(job, files)
        snapshot = publish_arriving(cache, files.snapshot)
    job.on_event(Published(snapshot.id))
    return RunResult(plan=job.plan, published=snapshot, totals=manifest.totals)


def _begin(job: SnapshotJob, origin: Origin, left: Leftovers, stack: ExitStack) -> ArrivingFiles:
    """Make a new snapshot arrive; ``stack`` holds its lock."""
    cache = job.run.cache
    _check_space(job, job.plan, sum(file.identity.size for file in left.files))
    target, entries = prepare(job, origin.source, left.files)
    origin.confirm(entries)
    _announce_rewriting(job, job.plan)
    hold_run(target, job.workdir, stack)
    make_directories(cache.path / ARRIVING)
    if left.id:
        retire_others(job, None)
    final = cache.path / ARRIVING / (left.id or new_snapshot_id(cache))
    target.rename(final)
    fsync_path(final.parent)
    snapshot = ArrivingSnapshot(final)
    retire_others(job, snapshot)
    return ArrivingFiles(snapshot, entries)


def _continue(job: SnapshotJob, files: ArrivingFiles, stack: ExitStack) -> tuple[SnapshotJob, ArrivingFiles]:
    """Go on with a snapshot of an earlier run; return the job that makes just that, and its files."""
    hold_run(files.snapshot.path, job.workdir, stack)
    retire_others(job, files.snapshot)
    manifest = files.snapshot.manifest()
    metadata = SnapshotMetadata(
        source=manifest.source,
        where=manifest.where,
        shard=manifest.shard,
        listing=manifest.listing,
        table=manifest.table,
    )
    plan = plan_sync([file for entry in manifest.files for file in entry.sources], (), job.plan.recipe)
    _check_space(job, plan, files.map.arrived_bytes)
    _announce_rewriting(job, plan)
    log.debug("%s is continued, %d bytes are there", files.snapshot.path, files.map.arrived_bytes)
    report_fetching(job.on_event, files.map.total_bytes, files.map.arrived_bytes)
    return replace(job, metadata=metadata, plan=plan), files


def _check_space(job: SnapshotJob, plan: Plan, already: int) -> None:
    """Check that there is space for what is fetched, of which ``already`` is there, and for the rewritten files."""
    rewritten = plan.download_bytes if job.rewrite is not None else 0
    check_space(job.run, plan, already - rewritten)  # beside the files as they are


def _announce_rewriting(job: SnapshotJob, plan: Plan) -> None:
    if job.rewrite is not None:
        size = format_size(2 * plan.download_bytes)
        about = f"the files arrive as they are and are rewritten then, in {size} of space"
        job.on_event(Warned(f"{job.run.cache.path}: {about}"))


def _complete(job: SnapshotJob, files: ArrivingFiles) -> Manifest:
    """Write the metadata of a snapshot whose files are complete, with their checksums."""
    files.map.state = ArrivalState.COMPLETE
    entries = [replace(entry, checksum=files.checksums[position]) for position, entry in enumerate(files.entries)]
    return write_metadata(job, files.snapshot.path, entries)


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
    """Raise UsageError where there are no locks: readers could not know whether a run is at work."""
    with open(job.workdir / "lock", "xb") as one, open(job.workdir / "writer", "xb") as other:
        if try_lock(one.fileno(), exclusive=True) is None or lock_as_writer(other.fileno()) is None:
            reason = f"the file system of {job.run.cache.path} has no locks, by which readers see that a run is at work"
            raise UsageError("--fill", reason, "sync without it, or put the cache on a local disk")
