"""Make an arriving snapshot: all metadata of what it will be, from the footers at the source, and files with holes."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, SourceChanged, SourceNotFound, SourceUnavailable
from pqcache.events import Advanced, Started
from pqcache.parquet.footer.footer import Tail, read_tail
from pqcache.parquet.row_group_stats import footer_in, read_footer
from pqcache.store.arriving.arrival_map import ArrivalMap
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot
from pqcache.store.drivers.base import Source, file_url, read_range
from pqcache.store.drivers.retries import with_retries
from pqcache.store.hive import parent
from pqcache.store.layout import ARRIVED, FILES, LEASE, ROW_GROUPS, RUN, WANTED
from pqcache.store.manifest import FileEntry, Manifest, SourceFile
from pqcache.store.manifest_file import write_manifest
from pqcache.store.ownership import file_mode, make_directories
from pqcache.store.row_group_index import IndexBuilder, read_index
from pqcache.store.sync.build_snapshot import readable_by
from pqcache.store.sync.download.download_file import Vanished, copy_mode
from pqcache.store.sync.download.download_pool import stoppable_threads
from pqcache.store.sync.fill.arriving_files import ArrivingFiles, KnownRanges
from pqcache.store.sync.fill.checks import is_as_stored
from pqcache.store.sync.fill.chunk_ranges import row_group_ranges
from pqcache.store.sync.fill.reuse import FoundFile
from pqcache.store.sync.snapshot_job import SnapshotJob
from pqcache.system.boot import boot_id
from pqcache.system.checksum import checksum_of
from pqcache.system.disk import fsync_path, limit_mode, link_or_copy

T = TypeVar("T")
R = TypeVar("R")
Ints = npt.NDArray[np.int64]

_WHOLE = 128 << 10  # bytes of a file that is fetched with its footer: another request would take longer
_AHEAD = 16  # footers that wait in memory, for each thread

log = logging.getLogger("pqcache.sync")


@dataclass(frozen=True, kw_only=True)
class _PreparedFile:
    """A file of which the bytes from ``tail`` on are there: all of them, with their checksum, where one was found."""

    file: SourceFile
    metadata: pq.FileMetaData
    schema: pa.Schema
    tail: int
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is kept of a prepared file; footers are large."""

    entry: FileEntry
    row_groups: Ints
    tail: int
    checksum: str


def prepare(job: SnapshotJob, source: Source, found: Mapping[SourceFile, FoundFile]) -> tuple[Path, list[FileEntry]]:
    """Make the snapshot in the run's directory; return where it is, and its entries.

    Nothing is there but the ends of files, and the complete copies in ``found``.
    """
    target, files, options = job.workdir / "snapshot", job.plan.downloads, job.run.options
    job.on_event(Started("fetch", job.plan.download_bytes - sum(file.identity.size for file in found)))
    job.on_event(Started("read", len(files), "files"))
    for directory in ("_pqcache", *dict.fromkeys(parent(file.path) for file in files)):
        make_directories(target / directory)

    def prepare_one(file: SourceFile) -> _PreparedFile:
        one = _take_over(job, target, file, found[file]) if file in found else None
        return one or _fetch_end(job, source, target, file)

    index, known, stop = IndexBuilder(job.table_schema), list[_Known](), threading.Event()
    with stoppable_threads(options.jobs, stop) as threads:
        for one in _in_order(threads, prepare_one, files, _AHEAD * options.jobs):
            index.add(one.file.path, one.metadata, one.schema)
            known.append(_known(job, one))
            job.on_event(Advanced("read", 1))
    known.sort(key=lambda item: item.entry.path)
    _write_metadata(job, target, known, index)
    return target, [item.entry for item in known]


def _in_order(threads: ThreadPoolExecutor, call: Callable[[T], R], items: Sequence[T], ahead: int) -> Iterator[R]:
    """Yield what ``call`` returns for each item, of which ``ahead`` at most are begun or wait to be yielded."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        if len(waiting) == ahead:
            yield waiting.popleft().result()
        waiting.append(threads.submit(call, item))
    while waiting:
        yield waiting.popleft().result()


def _fetch_end(job: SnapshotJob, source: Source, target: Path, file: SourceFile) -> _PreparedFile:
    """Make a file of the size that it has at the source, and fetch its end."""
    url, size, options = file_url(source, file.path), file.identity.size, job.run.options

    def read(offset: int, length: int) -> bytes:
        data = read_range(source, file.path, offset, length, file.identity.tag)
        if len(data) < length:
            raise SourceUnavailable(url, f"the connection ended after {len(data):,} of {length:,} bytes")
        return data

    def read_end() -> tuple[Tail, int, bytes]:
        if size > _WHOLE:
            tail = read_tail(read, size, url)
            return tail, tail.start, tail.data
        data = read(0, size)
        return read_tail(lambda offset, length: data[offset : offset + length], size, url), 0, data

    try:
        tail, start, data = with_retries(read_end, file.path, options.retries, options.on_event)
    except (SourceNotFound, SourceChanged) as error:
        what = "vanished from" if isinstance(error, SourceNotFound) else "changed at"
        advice = "nothing was published, sync again when the source is complete"
        raise Vanished(file.path, f"{what} {source.url} while it was copied", advice) from error
    metadata, schema = footer_in(tail.data, url, size=size)
    path = target / file.path
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        status = os.fstat(descriptor)
        limit_mode(path, copy_mode(source, file, status), status)
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, data, start)
    finally:
        os.close(descriptor)
    job.on_event(Advanced("fetch", len(data)))
    return _PreparedFile(file=file, metadata=metadata, schema=schema, tail=start)


def _take_over(job: SnapshotJob, target: Path, file: SourceFile, found: FoundFile) -> _PreparedFile | None:
    """Put a complete copy into the snapshot; None where it is not as it should be."""
    try:
        metadata, schema = read_footer(found.path)
    except ParquetError as error:
        log.debug("%s is fetched again: %s", file.path, error)
        return None
    checksum = found.checksum if found.is_checked else checksum_of(found.path)
    as_recorded = not found.checksum or checksum == found.checksum
    if not (as_recorded and is_as_stored(found.path, file, checksum, job.run.config.checksum)):
        log.debug("%s is fetched again: what an earlier run has left is damaged", file.path)
        return None
    link_or_copy(found.path, target / file.path)
    return _PreparedFile(file=file, metadata=metadata, schema=schema, tail=0, checksum=checksum)


def _known(job: SnapshotJob, one: _PreparedFile) -> _Known:
    entry = FileEntry(
        path=one.file.path,
        size=one.file.identity.size,
        rows=one.metadata.num_rows,
        row_groups=one.metadata.num_row_groups,
        sources=(one.file,),
        recipe=job.plan.recipe.text,
    )
    return _Known(entry=entry, row_groups=row_group_ranges(one.metadata), tail=one.tail, checksum=one.checksum)


def _write_metadata(job: SnapshotJob, target: Path, known: Sequence[_Known], index: IndexBuilder) -> None:
    """Write manifest, index and map of a snapshot whose files are made; only complete files count as arrived."""
    entries = [item.entry for item in known]
    index.write([entry.path for entry in entries], None, target / ROW_GROUPS)
    manifest = Manifest(
        files=tuple(entries),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=job.metadata.source,
        where=job.metadata.where,
        shard=job.metadata.shard,
        listing=job.metadata.listing,
        table=job.metadata.table,
    )
    write_manifest(manifest, target / FILES)
    readable = readable_by(target, entries)
    for name in (ROW_GROUPS, FILES):
        limit_mode(target / name, readable)
        fsync_path(target / name)
    row_groups = np.concatenate([item.row_groups for item in known])
    KnownRanges(row_groups, np.array([item.tail for item in known], np.int64)).write(target)
    ArrivalMap.create(
        target / ARRIVED,
        files=len(entries),
        row_groups=len(row_groups),
        columns=len(read_index(target / ROW_GROUPS).data_schema),
        total_bytes=sum(entry.size for entry in entries),
        boot=boot_id(),
    )
    make_directories(target / WANTED)
    for name in (LEASE, RUN):
        (target / name).touch(file_mode())
    arriving = ArrivingFiles(ArrivingSnapshot(target), entries)
    arriving.mark_all()
    for file, item in enumerate(known):
        if item.checksum:
            arriving.finish(file, item.checksum)
