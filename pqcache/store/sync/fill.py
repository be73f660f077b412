"""Publishes the first snapshot of a cache so that it can be read while its files are fetched.

1. The footer of each file is read at the source, which gives manifest and index, and the source is listed again: two
   equal listings prove that it was in this state at one moment. This state will be published.
2. The snapshot is renamed into ``arriving/``, and its files are fetched, each as a whole. All are of the listed
   versions: a file that has changed never arrives.
3. When all files have arrived, the snapshot is published under the same ID.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import (
    CacheError,
    ContractNotMet,
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    disk_error,
    disk_errors,
)
from pqcache.events import Advanced, Awaited, Published, Started, Warned
from pqcache.parquet.decoded_size import reading_ahead
from pqcache.parquet.footer import MAGIC, TAIL, footer_and_magic, read_tail
from pqcache.parquet.projection import ByteRange, number_of
from pqcache.parquet.validation import footer_in
from pqcache.store.arriving import ArrivingSnapshot, Wanted, WantedLists, arriving_snapshots, publish_arriving
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.drivers.timeouts import with_retries
from pqcache.store.expect import Finding, unmet
from pqcache.store.gc import remove_snapshot
from pqcache.store.layout import ARRIVED, ARRIVING, FILES, LEASE, ROW_GROUPS, RUN, WANTED
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, SourceFile, table_digest
from pqcache.store.manifest_file import write_manifest
from pqcache.store.ownership import file_mode, make_directories
from pqcache.store.partition_paths import parent
from pqcache.store.publish import new_snapshot_id
from pqcache.store.row_group_index import (
    IndexBuilder,
    OpenFile,
    doubtful_columns,
    unfit_in_file,
    with_dictionaries,
    write_index,
)
from pqcache.store.sync.bad_partitions import blame_nobody
from pqcache.store.sync.build_snapshot import downloader_of, manifest_of, write_metadata
from pqcache.store.sync.cache_run import CacheRun, RunResult, report_fetching
from pqcache.store.sync.decide import NeedsRewriting
from pqcache.store.sync.download.download_columns import project_file, write_nulls
from pqcache.store.sync.download.download_file import (
    Downloaded,
    Vanished,
    copy_mode,
    in_batches,
    read_chunks,
    stoppable_threads,
)
from pqcache.store.sync.download.subset import Subset
from pqcache.store.sync.judge import judged
from pqcache.store.sync.plan import Plan, plan_sync
from pqcache.store.sync.safety_checks import check_space
from pqcache.store.sync.snapshot_job import Origin, SnapshotJob, keys_of, make_workdir, take_over_or_remove
from pqcache.system.disk import (
    checksum_of,
    fsync_path,
    limit_mode,
    link_or_copy,
    open_plain,
    read_regular,
    tree_size,
    write_at,
)
from pqcache.system.locks import lock_as_writer, try_lock, unlock_as_writer
from pqcache.system.processes import boot_id
from pqcache.units import format_size

log = logging.getLogger("pqcache.sync")


Ints = npt.NDArray[np.int64]
_READ_AHEAD = 64 << 10  # bytes that are fetched to see a dictionary
_SEEN = 16  # footers after which the next ones are expected to be about as long
_LEAST_TAIL, _MOST_TAIL = 8 << 10, 1 << 20
_WHOLE: Ints = np.zeros((0, 3), np.int64)
RANGES = ".ranges"  # ends the name of a large file while ranges of it are missing
_LOOK = 0.02  # seconds between looks at what readers want
_REPORT = 0.5  # seconds between reports of what readers wait for
_RANGE = 8 << 20  # bytes of a large file that one of several threads fetches at once
_LARGE = 2 * _RANGE
_OPEN_AGAIN = "open the dataset again when the source was copied anew"


def fill_snapshot(run: CacheRun, plan: Plan, metadata: SnapshotMetadata, origin: Origin) -> RunResult:
    """Publish the files that ``plan`` fetches; readers may open them meanwhile.

    The snapshot of an earlier run is continued. Raises Vanished if a file changes at the source: a run from a new
    listing will find the complete files.
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
        job = SnapshotJob(run=run, workdir=make_workdir(cache), plan=plan, metadata=metadata, origin=origin)
        _check_locks(job)
        take_over_or_remove(cache, job.workdir, *keys_of(job))
        for part in (job.workdir / "fetch").glob(f"*{RANGES}"):  # which ranges of it are there is not known
            part.unlink()
        left, reused_id = _find_left(job)
        findings: tuple[Finding, ...] = ()
        if left is None:
            snapshot, entries, findings = _begin(job, origin, reused_id, stack)
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
    return RunResult(plan=job.plan, published=published, totals=manifest.totals, findings=findings)


def _begin(
    job: SnapshotJob, origin: Origin, reused_id: str, stack: ExitStack
) -> tuple[ArrivingSnapshot, list[FileEntry], tuple[Finding, ...]]:
    """Start a new snapshot, unless the rules of ``[expect]`` reject it; ``stack`` holds its lock."""
    cache = job.run.cache
    _check_space(job, job.plan, tree_size(job.workdir))
    target, entries = prepare(job, origin.source)
    origin.confirm(entries)
    findings = judged(job.run, target, entries)
    if lines := unmet(findings):
        advice = "nothing was published, correct the source, or sync without --fill to have a look at the snapshot"
        raise ContractNotMet(cache.path, "; ".join(lines), advice)
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
    return snapshot, entries, findings


def _continue(
    job: SnapshotJob, snapshot: ArrivingSnapshot, stack: ExitStack
) -> tuple[SnapshotJob, ArrivingSnapshot, list[FileEntry]]:
    """Continue an earlier run's snapshot; return a job for exactly that, the snapshot, and its entries."""
    hold_run(snapshot.path, job.workdir, stack)
    _retire_others(job, snapshot)
    manifest = snapshot.manifest()
    plan = plan_sync([file for entry in manifest.files for file in entry.sources], (), job.plan.recipe)
    _check_space(job, plan, tree_size(snapshot.path) + tree_size(job.workdir))
    _announce_rewriting(job, plan)
    log.debug("%s is continued", snapshot.path)
    return replace(job, metadata=manifest, plan=plan), snapshot, list(manifest.files)


def _find_left(job: SnapshotJob) -> tuple[ArrivingSnapshot | None, str]:
    """An earlier run's snapshot to continue, or the ID for a new one; empty for a new ID.

    A snapshot is continued if it has the listed files and this user may write to it. One with other files is continued
    only if a reader has it open and its request was the same: its missing files may still be at the source. From all
    others, complete files are taken over as if this run had downloaded them. If only the user differs, the ID is kept,
    as states refer to it.
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
    """Move an earlier run's files to the download directory, where they are checked like downloads."""
    for file in checked_files(snapshot, manifest.files):
        entry, place = manifest.files[file], job.download_path(manifest.files[file].sources[0])
        if entry.recipe == job.plan.recipe.text and entry.sources[0] in wanted and not place.exists():
            link_or_copy(snapshot.path / entry.path, place)


def _retire_others(job: SnapshotJob, kept: ArrivingSnapshot | None) -> None:
    """Remove arriving snapshots except ``kept``; abandon those with readers, so that these stop waiting."""
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
    """Check the space for the bytes to fetch beyond ``already``, and for rewritten files."""
    rewritten = plan.download_bytes if job.rewrite is not None else 0
    check_space(job.run, plan, already - rewritten)  # beside the files as they are


def _announce_rewriting(job: SnapshotJob, plan: Plan) -> None:
    if job.rewrite is not None:
        size = format_size(2 * plan.download_bytes)
        about = f"the files arrive as they are and are rewritten then, in {size} of space"
        job.on_event(Warned(f"{job.run.cache.path}: {about}"))


def hold_run(snapshot: Path, scratch: Path, stack: ExitStack) -> None:
    """Mark this process as fetching a snapshot while ``stack`` is open.

    The marker is always a new file, made in ``scratch``, as others could open and lock a file in the cache; the cache's
    lock keeps other runs away.
    """
    new = scratch / Path(RUN).name
    descriptor = open_plain(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode())
    stack.callback(os.close, descriptor)
    lock_as_writer(descriptor)
    stack.callback(unlock_as_writer, descriptor)
    os.write(descriptor, str(os.getpid()).encode())
    new.replace(snapshot / RUN)


def _check_locks(job: SnapshotJob) -> None:
    """Raise UsageError without file locks, as readers could not tell whether a run is at work."""
    with open(job.workdir / "lock", "xb") as one, open(job.workdir / "writer", "xb") as other:
        if try_lock(one.fileno(), exclusive=True) is None or lock_as_writer(other.fileno()) is None:
            reason = f"the file system of {job.run.cache.path} has no locks, by which readers see that a run is at work"
            raise UsageError("--fill", reason, "sync without it, or put the cache on a local disk")


@dataclass(frozen=True, kw_only=True)
class _End:
    """The footer and size of a local file to come, and the location of its bytes at the source.

    ``ranges`` has (local start, start at the source, length) for each range if only some columns are fetched; empty if
    the file is copied.
    """

    metadata: pq.FileMetaData
    schema: pa.Schema
    size: int
    ranges: Ints


class _FooterLengths:
    """Predicts how many bytes to read first, as footers of a table's files have similar lengths."""

    def __init__(self) -> None:
        self._seen = self._longest = 0

    def expected(self) -> int:
        """Twice the longest length so far."""
        return TAIL if self._seen < _SEEN else min(max(2 * self._longest, _LEAST_TAIL), _MOST_TAIL)

    def add(self, length: int) -> None:
        """Add a length; concurrent calls may lose one, which changes little."""
        self._seen, self._longest = self._seen + 1, max(self._longest, length)


def prepare(job: SnapshotJob, source: Source) -> tuple[Path, list[FileEntry]]:
    """Make the snapshot in the run's directory, without its files; return its path and entries.

    Raises NeedsRewriting if the files cannot be read as one table before they are rewritten, and Vanished if one
    differs from the listing.
    """
    target, files, options = job.workdir / "snapshot", job.plan.downloads, job.run.options
    job.on_event(Started("read", len(files), "files"))
    for directory in ("_pqcache", WANTED, *dict.fromkeys(parent(file.path) for file in files)):
        make_directories(target / directory)
    for name in (LEASE, RUN, ARRIVED):
        (target / name).touch(file_mode())
    lengths, stop = _FooterLengths(), threading.Event()
    index, entries = IndexBuilder(job.table_schema, units=job.units), list[FileEntry]()
    with stoppable_threads(options.jobs, stop) as threads:
        read = partial(_read_end, job, source, lengths)
        for file, end in in_batches(threads, read, files, options.jobs):
            with _agreeing(job):
                index.add(job.plan.path_of(file), end.metadata, end.schema)
            entries.append(_entry(job, file, end))
            job.on_event(Advanced("read", 1))
    entries.sort(key=lambda entry: entry.path)
    with _agreeing(job):
        made = index.finish([entry.path for entry in entries])
    by_path = {entry.path: entry.sources[0] for entry in entries}
    made = with_dictionaries(made, _opener(job, source, by_path), follow=False, jobs=options.jobs)
    write_index(made, target / ROW_GROUPS)
    write_manifest(manifest_of(job, entries), target / FILES)
    status, readable = (target / LEASE).stat(), 0o444
    for file in files:
        readable &= copy_mode(source, file, status)
    for name in (ROW_GROUPS, FILES):
        limit_mode(target / name, readable)
        fsync_path(target / name)
    return target, entries


def _entry(job: SnapshotJob, file: SourceFile, end: _End) -> FileEntry:
    return FileEntry(
        path=job.plan.path_of(file),
        size=end.size,
        rows=end.metadata.num_rows,
        row_groups=end.metadata.num_row_groups,
        sources=(file,),
        recipe=job.plan.recipe.text,
    )


@contextmanager
def _agreeing(job: SnapshotJob) -> Iterator[None]:
    """Raise NeedsRewriting for files without a common index that will be rewritten."""
    try:
        yield
    except ParquetError as error:
        if job.rewrite is None:
            raise
        raise NeedsRewriting(error) from error


def _read_end(job: SnapshotJob, source: Source, lengths: _FooterLengths, file: SourceFile) -> _End:
    assert job.origin is not None
    options, read = job.run.options, partial(_read_all, source, file)
    if job.origin.subset.is_all and source.shape_of(file.path) is None:
        call = partial(_copied, source, file, read, lengths)
    else:
        call = partial(_projected, source, file, read, job.origin.subset)
    with _vanishing(source, file):
        return with_retries(call, file.path, options.patience, options.on_event)


def _read_all(source: Source, file: SourceFile, offset: int, length: int) -> bytes:
    data = read_range(source, file.path, offset, length, file.identity.tag)
    if len(data) < length:
        reason = f"the connection ended after {len(data):,} of {length:,} bytes"
        raise SourceUnavailable(source.url_of(file.path), reason)
    return data


def _copied(source: Source, file: SourceFile, read: Callable[[int, int], bytes], lengths: _FooterLengths) -> _End:
    url, size = source.url_of(file.path), file.identity.size
    tail = read_tail(read, size, url, lengths.expected())
    lengths.add(size - tail.limit)
    metadata, schema = footer_in(tail.data, url, size=size)
    return _End(metadata=metadata, schema=schema, size=size, ranges=_WHOLE)


def _projected(source: Source, file: SourceFile, read: Callable[[int, int], bytes], subset: Subset) -> _End:
    end, projection = project_file(source, file, subset, lambda offset, length: iter([read(offset, length)]))
    if not projection.fields[2][1].values[1:]:  # none of the wanted columns
        sink = pa.BufferOutputStream()
        write_nulls(subset, number_of(end.fields, 3, end.name), sink)
        data = sink.getvalue().to_pybytes()
        metadata, schema = footer_in(data, end.name, size=len(data))
        return _End(metadata=metadata, schema=schema, size=len(data), ranges=_WHOLE)
    footer = footer_and_magic(projection.fields)
    size = projection.size + len(footer)
    metadata, schema = footer_in(footer, end.name, size=size)
    lengths = np.array([item.length for item in projection.ranges], np.int64)
    sources = np.array([item.offset for item in projection.ranges], np.int64)
    ranges = np.stack([len(MAGIC) + np.cumsum(lengths) - lengths, sources, lengths], axis=1)
    return _End(metadata=metadata, schema=schema, size=size, ranges=ranges)


def _opener(job: SnapshotJob, source: Source, files: dict[str, SourceFile]) -> OpenFile:
    """Open files at the source by their paths in the cache, to examine dictionaries."""
    options = job.run.options

    @contextmanager
    def opened(path: str) -> Iterator[tuple[pq.FileMetaData, pa.Schema, Callable[[int, int, bool], bytes]]]:
        file = files[path]
        end = _read_end(job, source, _FooterLengths(), file)

        def fetch(offset: int, size: int) -> bytes:
            parts = _parts_of(end.ranges, offset, min(offset + size, end.size))
            return b"".join(_read_all(source, file, part.offset, part.length) for part in parts)

        def patiently(offset: int, size: int) -> bytes:
            return with_retries(partial(fetch, offset, size), file.path, options.patience, options.on_event)

        with _vanishing(source, file):
            yield end.metadata, end.schema, reading_ahead(patiently, _READ_AHEAD)

    return opened


def _parts_of(ranges: Ints, start: int, end: int) -> Iterator[ByteRange]:
    """Yield the ranges of ``[start, end)`` at the source, in order."""
    if not len(ranges):
        yield ByteRange(start, end - start)
    for here, source, length in ranges.tolist():
        low, high = max(start, here), min(end, here + length)
        if low < high:
            yield ByteRange(source + low - here, high - low)


@contextmanager
def _vanishing(source: Source, file: SourceFile) -> Iterator[None]:
    """Raise Vanished if a file differs from the listing."""
    try:
        yield
    except (SourceNotFound, SourceChanged) as error:
        what = "vanished from" if isinstance(error, SourceNotFound) else "changed at"
        advice = "nothing was published, sync again when the source is complete"
        raise Vanished(file.path, f"{what} {source.url} while it was copied", advice) from error


class _Queue:
    """Orders files: first those that readers wait for, then the readers' wishes in turns, then the rest in order."""

    def __init__(self, files: Sequence[int]) -> None:
        self._left = dict.fromkeys(files)
        self._readers: list[tuple[Wanted, Iterator[int]]] = []
        self._turn = 0

    def want(self, wanted: Sequence[Wanted]) -> None:
        known = {id(reader): files for reader, files in self._readers}
        self._readers = [(item, known.get(id(item)) or iter(item.files.tolist())) for item in wanted]

    def take(self) -> int | None:
        for urgent in (True, False):
            readers = [files for wanted, files in self._readers if wanted.urgent is urgent]
            for position in range(len(readers)):
                files = readers[(self._turn + position) % len(readers)]
                if (file := next((file for file in files if file in self._left), None)) is not None:
                    self._turn += position + 1
                    return self._given(file)
        file = next(iter(self._left), None)
        return None if file is None else self._given(file)

    def _given(self, file: int) -> int:
        del self._left[file]
        return file


@dataclass
class _LargeFile:
    """A file that several threads fetch into ``part``; ``left`` counts the missing ranges."""

    file: int
    part: Path
    left: int


class Fetch:
    """Fetches the missing files of ``entries``; ``checksums`` has those of the others, by position.

    Threads take files from a queue that follows the readers' wishes. A file is downloaded, checked and made durable in
    the run's directory as usual, then renamed into the snapshot. Several threads share a large one.
    """

    def __init__(
        self,
        job: SnapshotJob,
        snapshot: ArrivingSnapshot,
        entries: Sequence[FileEntry],
        checksums: dict[int, str],
    ) -> None:
        assert job.origin is not None
        self.checksums = checksums
        self._job, self._source, self._snapshot, self._entries = job, job.origin.source, snapshot, entries
        self._doubtful = doubtful_columns(snapshot.index())
        self._lists = WantedLists(snapshot.wanted_directory)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        lost = snapshot.read_errors()
        self._moved = next(iter(lost.values()), None)
        self._queue = _Queue([n for n, entry in enumerate(entries) if n not in checksums and entry.path not in lost])
        self._ranges: deque[Callable[[], None]] = deque()
        self._looked = 0.0
        self._awaited = Awaited(0, 0)
        self._downloader = replace(downloader_of(job, self._stop.is_set), blame=blame_nobody)

    def run(self) -> None:
        """Fetch all files, or raise the first error.

        If a file has changed at the source, the others are still fetched while a reader has the snapshot open. Then, or
        at once without readers, SourceChanged is raised, and no more files will arrive.
        """
        for file in self.checksums:  # fetched by an earlier run, perhaps beside other files
            self._check_values(file)
        jobs = self._job.run.options.jobs
        try:
            with stoppable_threads(jobs, self._stop) as threads:
                running = {threads.submit(self._work) for _ in range(jobs)}
                while running:
                    done, running = wait(running, timeout=_REPORT, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    self._report()
                    if self._moved is not None and not self._snapshot.is_leased():
                        break
                if self._moved is not None:
                    raise self._moved
        except PqcacheError as error:
            if isinstance(error, ParquetError | SourceChanged) or type(error) is SourceError:
                abandon(self._snapshot, error)
            raise

    def _work(self) -> None:
        while not self._stop.is_set() and (task := self._next()) is not None:
            task()

    def _next(self) -> Callable[[], None] | None:
        """The next job: a range of a large file, or the next file."""
        with self._lock:
            if self._ranges:
                return self._ranges.popleft()
            self._look()
            file = self._queue.take()
            if file is None:
                return None
            if not self._is_large(file):
                return partial(self._fetch, file)
            size = self._entries[file].size
            part = Path(f"{self._job.download_path(self._entries[file].sources[0])}{RANGES}")
            starts = range(0, size, _RANGE)
            large = _LargeFile(file, part, len(starts))
            self._ranges.extend(partial(self._fetch_range, large, start, min(start + _RANGE, size)) for start in starts)
            return self._ranges.popleft()

    def _is_large(self, file: int) -> bool:
        entry = self._entries[file]
        is_copy = not entry.recipe and self._source.shape_of(entry.sources[0].path) is None
        is_there = os.path.exists(self._job.download_path(entry.sources[0]))
        return is_copy and entry.size >= _LARGE and not is_there

    def _fetch_range(self, large: _LargeFile, start: int, end: int) -> None:
        """Fetch a range of a large file; after the last one, the file is checked like any other."""
        file, position, options = self._entries[large.file].sources[0], start, self._job.run.options

        def receive() -> None:
            nonlocal position
            descriptor = os.open(large.part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                for chunk in read_chunks(self._source, file, position, end - position):
                    if self._stop.is_set():
                        raise KeyboardInterrupt
                    write_at(descriptor, chunk, position, direct=False)
                    position += len(chunk)
                    self._job.on_event(Advanced("fetch", len(chunk)))
            except OSError as error:
                raise disk_error(large.part, error) from error
            finally:
                os.close(descriptor)
            if position < end:
                reason = f"the connection ended after {position - start:,} of {end - start:,} bytes from {start:,}"
                raise SourceUnavailable(self._source.url_of(file.path), reason)

        if self._is_lost(large.file):
            return
        try:
            with_retries(receive, file.path, options.patience, options.on_event, lambda: position)
        except (SourceNotFound, SourceChanged) as error:
            self._lose(large.file, error)
            return
        with self._lock:
            large.left -= 1
            is_last = not large.left
        if is_last:
            fsync_path(large.part)  # under its new name it counts as complete, also after a restart of the machine
            large.part.rename(self._job.download_path(file))
            self._fetch(large.file)

    def _fetch(self, file: int) -> None:
        entry = self._entries[file]
        try:
            copy = self._download(entry.sources[0])
        except (Vanished, SourceChanged, SourceNotFound) as error:
            self._lose(file, error)
            return
        path = self._job.download_path(copy.file)
        if path.stat().st_size != entry.size:
            self._lose(file, SourceChanged(copy.file.path, "", ""))
            return
        self._check_values(file, path)
        with self._lock:
            if self._stop.is_set():
                return
            note_checked(self._snapshot, entry.path, copy.checksum)
            self.checksums[file] = copy.checksum
            path.rename(self._snapshot.path / entry.path)

    def _download(self, file: SourceFile) -> Downloaded:
        def target(version: SourceFile) -> Path:
            if version.identity != file.identity:  # what the index is of is not there any more
                raise SourceChanged(file.path, "", "")
            return self._job.download_path(file)

        # through the page cache, as readers wait for it
        return replace(self._downloader, target=target).download(file, is_rewritten=True)

    def _check_values(self, file: int, path: Path | None = None) -> None:
        """Raise ParquetError if a complete file has a value that does not fit the other files' types."""
        fields, entry = self._doubtful.get(file, []), self._entries[file]
        reason = unfit_in_file(path or self._snapshot.path / entry.path, fields) if fields else None
        if reason is not None:
            advice = "write it again with the other type, or publish the rest with --skip-bad and without --fill"
            raise ParquetError(entry.path, reason, advice)

    def _is_lost(self, file: int) -> bool:
        return self._moved is not None and self._entries[file].path in self._snapshot.read_errors()

    def _lose(self, file: int, error: PqcacheError) -> None:
        """Record that a file has changed at the source since it was listed."""
        entry = self._entries[file]
        what = "changed" if isinstance(error, SourceChanged) else "vanished"
        url = self._source.url_of(entry.sources[0].path)
        with self._lock:
            if self._stop.is_set() or self._is_lost(file):
                return
            self._moved = SourceChanged(url, f"{what} while it was copied", _OPEN_AGAIN)
            self._snapshot.give_up(self._moved, entry.path)
        self._job.on_event(Warned(f"{url}: {self._moved.reason}"))

    def _look(self) -> None:
        """Read the readers' wishes, unless that was done recently."""
        if (now := time.monotonic()) - self._looked >= _LOOK:
            self._looked = now
            self._queue.want(self._lists.read())

    def _report(self) -> None:
        with self._lock:
            self._look()
            waiting = [
                set(wanted.files.tolist()) - self.checksums.keys() for wanted in self._lists.known if wanted.urgent
            ]
        known = range(len(self._entries))
        missing = [sum(self._entries[file].size for file in files if file in known) for files in waiting]
        awaited = Awaited(sum(map(bool, missing)), sum(missing))
        if awaited != self._awaited:
            self._awaited = awaited
            self._job.on_event(awaited)


def abandon(snapshot: ArrivingSnapshot, error: PqcacheError | None = None) -> None:
    try:
        snapshot.give_up(error)
    except (OSError, ValueError) as failure:
        log.debug("%s cannot be abandoned: %s", snapshot.path, failure)


def note_checked(snapshot: ArrivingSnapshot, path: str, checksum: str) -> None:
    """Record the checksum of a complete, durable file."""
    descriptor = open_plain(snapshot.path / ARRIVED, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, b"\n" + json.dumps([path, checksum, boot_id()]).encode() + b"\n")  # behind a torn line
    finally:
        os.close(descriptor)


def checked_files(snapshot: ArrivingSnapshot, entries: Sequence[FileEntry]) -> dict[int, str]:
    """Checksums, by position, of the files that have arrived; files that differ from the record are removed.

    Files are read again if the machine was restarted meanwhile.
    """
    recorded: dict[str, tuple[str, str]] = {}
    for line in read_regular(snapshot.path / ARRIVED).splitlines():
        try:
            path, checksum, boot = json.loads(line)
        except ValueError:  # empty, or torn
            continue
        recorded[path] = checksum, boot
    found: dict[int, str] = {}
    there = snapshot.arrived(entry.path for entry in entries)
    for position, entry in enumerate(entries):
        if entry.path not in there:
            continue
        place = snapshot.path / entry.path
        checksum, boot = recorded.get(entry.path, ("", ""))
        if checksum and (boot == boot_id() or checksum_of(place) == checksum):
            found[position] = checksum
        else:
            log.debug("%s is fetched again: it is not as it was written", place)
            place.unlink()
    return found
