"""Make an arriving snapshot: all metadata of what it will be, from the footers at the source, and files with holes."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, SourceChanged, SourceNotFound, SourceUnavailable
from pqcache.events import Advanced, Started
from pqcache.parquet.decoded_size import Read, reading_ahead
from pqcache.parquet.footer.footer import MAGIC, TAIL, footer_and_magic, read_tail
from pqcache.parquet.projection import number_of
from pqcache.parquet.row_group_stats import footer_in, read_footer
from pqcache.store.arriving.arrival_map import ArrivalMap
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.drivers.retries import with_retries
from pqcache.store.hive import parent
from pqcache.store.layout import ARRIVED, FILES, LEASE, ROW_GROUPS, RUN, WANTED
from pqcache.store.manifest import FileEntry, SourceFile
from pqcache.store.manifest_file import write_manifest
from pqcache.store.ownership import file_mode, make_directories
from pqcache.store.row_group_index import IndexBuilder, read_index, with_dictionaries, write_index
from pqcache.store.sync.build_snapshot import manifest_of, readable_by
from pqcache.store.sync.cache_run import report_fetching
from pqcache.store.sync.download.download_columns import project_file, write_nulls
from pqcache.store.sync.download.download_file import Vanished, copy_mode
from pqcache.store.sync.download.download_pool import stoppable_threads
from pqcache.store.sync.download.subset import Subset
from pqcache.store.sync.fill.arriving_files import ArrivingFiles, KnownRanges
from pqcache.store.sync.fill.checks import digests_of, end_digest, has_md5, is_as_stored, open_copy
from pqcache.store.sync.fill.chunk_ranges import row_group_ranges
from pqcache.store.sync.fill.obstacle import NeedsRewriting
from pqcache.store.sync.fill.reuse import FoundFile
from pqcache.store.sync.fill.source_ranges import WHOLE, known_from, parts_of, source_ranges
from pqcache.store.sync.snapshot_job import SnapshotJob
from pqcache.system.boot import boot_id
from pqcache.system.disk import fsync_path, limit_mode, link_or_copy, write_at

T = TypeVar("T")
R = TypeVar("R")
Ints = npt.NDArray[np.int64]
Part = tuple[int, bytes]  # where bytes are in a file, and the bytes

_WHOLE = 128 << 10  # bytes of a file that is fetched with its footer: another request would take longer
_READ_AHEAD = 64 << 10  # bytes that are fetched to see a dictionary
_BATCH = 8  # footers that a thread reads before it wakes the one that makes the index

_SEEN = 16  # footers after which the next ones are expected to be about as long
_LEAST_TAIL, _MOST_TAIL = 8 << 10, 1 << 20

log = logging.getLogger("pqcache.sync")


@dataclass(frozen=True, kw_only=True)
class _PreparedFile:
    """A file of ``size`` bytes, of which those from ``tail`` on are there.

    These are all of them where there is a ``checksum``; else ``end`` is theirs. ``sources`` says where the others are,
    see `source_ranges`.
    """

    file: SourceFile
    metadata: pq.FileMetaData
    schema: pa.Schema
    size: int
    tail: int
    sources: Ints = field(default_factory=lambda: WHOLE)
    checksum: str = ""
    end: int = 0


class _FooterLengths:
    """How many bytes to read first: files of a table have the same columns, and footers of about the same length."""

    def __init__(self) -> None:
        self._seen = self._longest = 0

    def expected(self) -> int:
        """Return twice the longest length so far."""
        return TAIL if self._seen < _SEEN else min(max(2 * self._longest, _LEAST_TAIL), _MOST_TAIL)

    def add(self, length: int) -> None:
        """Add the length of a footer; threads may do so at once, as a lost one changes little."""
        self._seen, self._longest = self._seen + 1, max(self._longest, length)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is kept of a prepared file; footers are large."""

    entry: FileEntry
    row_groups: Ints
    tail: int
    sources: Ints
    checksum: str
    end: int


def prepare(job: SnapshotJob, source: Source, found: Mapping[SourceFile, FoundFile]) -> tuple[Path, list[FileEntry]]:
    """Make the snapshot in the run's directory; return where it is, and its entries.

    Nothing is there but the ends of files, and the complete copies in ``found``. Raises NeedsRewriting where the files
    cannot be read as one table before they are rewritten.
    """
    target, files, options = job.workdir / "snapshot", job.plan.downloads, job.run.options
    here = sum(file.identity.size for file in found)
    report_fetching(job.on_event, job.plan.download_bytes, here, len(files) - len(found))
    job.on_event(Started("read", len(files), "files"))
    for directory in ("_pqcache", *dict.fromkeys(parent(file.path) for file in files)):
        make_directories(target / directory)

    lengths = _FooterLengths()

    def prepare_one(file: SourceFile) -> _PreparedFile:
        one = _take_over(job, target, file, found[file]) if file in found else None
        return one or _fetch_end(job, source, target, file, lengths)

    index, known, stop = IndexBuilder(job.table_schema, units=job.units), list[_Known](), threading.Event()
    size = max(1, min(_BATCH, len(files) // (4 * options.jobs)))
    batches = [files[first : first + size] for first in range(0, len(files), size)]

    def prepare_batch(batch: Sequence[SourceFile]) -> list[_PreparedFile]:
        return [prepare_one(file) for file in batch]

    with stoppable_threads(options.jobs, stop) as threads:
        for batch in _in_order(threads, prepare_batch, batches, 2 * options.jobs):
            for one in batch:
                with _agreeing(job):
                    index.add(job.plan.path_of(one.file), one.metadata, one.schema)
                known.append(_known(job, one))
            job.on_event(Advanced("read", len(batch)))
    known.sort(key=lambda item: item.entry.path)
    _write_metadata(job, source, target, known, index)
    return target, [item.entry for item in known]


@contextmanager
def _agreeing(job: SnapshotJob) -> Iterator[None]:
    """Turn what keeps files from having one index into NeedsRewriting where they are rewritten afterwards."""
    try:
        yield
    except ParquetError as error:
        if job.rewrite is None:
            raise
        raise NeedsRewriting(error) from error


def _in_order(threads: ThreadPoolExecutor, call: Callable[[T], R], items: Sequence[T], ahead: int) -> Iterator[R]:
    """Yield what ``call`` returns for each item, of which ``ahead`` at most are begun or wait to be yielded."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        if len(waiting) == ahead:
            yield waiting.popleft().result()
        waiting.append(threads.submit(call, item))
    while waiting:
        yield waiting.popleft().result()


def _fetch_end(
    job: SnapshotJob, source: Source, target: Path, file: SourceFile, lengths: _FooterLengths
) -> _PreparedFile:
    """Make a file of the size that it will have, and fetch its end."""
    origin = job.origin
    assert origin is not None
    as_it_is = origin.subset.is_all and source.shape_of(file.path) is None
    make = partial(_copied, lengths=lengths) if as_it_is else partial(_projected, subset=origin.subset)
    options, received = job.run.options, 0

    def read(offset: int, length: int) -> bytes:
        nonlocal received
        data = _read_all(source, file, offset, length)
        received += length
        return data

    def make_once() -> tuple[_PreparedFile, list[Part]]:
        nonlocal received
        received = 0
        return make(source, file, read)

    with _vanishing(source, file):
        made, parts = with_retries(make_once, file.path, options.patience, options.on_event)
    path = target / job.plan.path_of(file)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        status = os.fstat(descriptor)
        limit_mode(path, copy_mode(source, file, status), status)
        os.ftruncate(descriptor, made.size)
        for offset, data in parts:
            write_at(descriptor, memoryview(data), offset, direct=False)
    finally:
        os.close(descriptor)
    job.on_event(Advanced("fetch", received))
    return made


def _read_all(source: Source, file: SourceFile, offset: int, length: int) -> bytes:
    data = read_range(source, file.path, offset, length, file.identity.tag)
    if len(data) < length:
        reason = f"the connection ended after {len(data):,} of {length:,} bytes"
        raise SourceUnavailable(source.url_of(file.path), reason)
    return data


def _copied(
    source: Source, file: SourceFile, read: Callable[[int, int], bytes], lengths: _FooterLengths
) -> tuple[_PreparedFile, list[Part]]:
    """Return a file as it is at the source, and what is known of it; a small one is read completely."""
    url, size = source.url_of(file.path), file.identity.size
    if size > _WHOLE:
        tail = read_tail(read, size, url, lengths.expected())
        lengths.add(size - tail.limit)
        start, data = tail.start, tail.data
    else:
        start, data = 0, read(0, size) if size else b""
        tail = read_tail(lambda offset, length: data[offset : offset + length], size, url)
    metadata, schema = footer_in(tail.data, url, size=size)
    end = end_digest(data)
    return _PreparedFile(file=file, metadata=metadata, schema=schema, size=size, tail=start, end=end), [(start, data)]


def _projected(
    source: Source, file: SourceFile, read: Callable[[int, int], bytes], subset: Subset
) -> tuple[_PreparedFile, list[Part]]:
    """Return the file of the wanted columns, and what is known of it."""
    end, projection = project_file(source, file, subset, lambda offset, length: iter([read(offset, length)]))
    if not projection.fields[2][1].values[1:]:  # none of the wanted columns
        sink = pa.BufferOutputStream()
        write_nulls(subset, number_of(end.fields, 3, end.name), sink)
        data = sink.getvalue().to_pybytes()
        metadata, schema = footer_in(data, end.name, size=len(data))
        made = _PreparedFile(
            file=file,
            metadata=metadata,
            schema=schema,
            size=len(data),
            tail=len(MAGIC),
            end=end_digest(data[len(MAGIC) :]),
        )
        return made, [(0, data)]
    footer = footer_and_magic(projection.fields)
    size, sources = projection.size + len(footer), source_ranges(projection, len(MAGIC))
    tail = known_from(sources, projection.size, end.start)
    parts = parts_of(sources, tail, projection.size) if tail < projection.size else ()
    data = b"".join(end.tail[item.offset - end.start : item.end - end.start] for item in parts) + footer
    metadata, schema = footer_in(footer, end.name, size=size)
    made = _PreparedFile(
        file=file, metadata=metadata, schema=schema, size=size, tail=tail, sources=sources, end=end_digest(data)
    )
    return made, [(0, MAGIC), (tail, data)]


def _take_over(job: SnapshotJob, target: Path, file: SourceFile, found: FoundFile) -> _PreparedFile | None:
    """Put a complete copy into the snapshot; None where it is not as it should be."""
    try:
        metadata, schema = read_footer(found.path)
    except ParquetError as error:
        log.debug("%s is fetched again: %s", file.path, error)
        return None
    checksum, is_copy = found.checksum, not (job.plan.recipe.text or file.identity.is_shaped)
    with_md5 = is_copy and has_md5(file, job.run.config.checksum)
    if not found.is_checked or with_md5:
        with open_copy(found.path) as descriptor:
            digests = digests_of(descriptor, 0, with_md5)
        checksum = digests.checksum
        as_recorded = not found.checksum or checksum == found.checksum
        if not as_recorded or (is_copy and not is_as_stored(digests, file)):
            log.debug("%s is fetched again: what an earlier run has left is damaged", file.path)
            return None
    link_or_copy(found.path, target / job.plan.path_of(file))
    size = found.path.stat().st_size
    return _PreparedFile(file=file, metadata=metadata, schema=schema, size=size, tail=0, checksum=checksum)


def _known(job: SnapshotJob, one: _PreparedFile) -> _Known:
    entry = FileEntry(
        path=job.plan.path_of(one.file),
        size=one.size,
        rows=one.metadata.num_rows,
        row_groups=one.metadata.num_row_groups,
        sources=(one.file,),
        recipe=job.plan.recipe.text,
    )
    row_groups = row_group_ranges(one.metadata, one.size)
    return _Known(
        entry=entry, row_groups=row_groups, tail=one.tail, sources=one.sources, checksum=one.checksum, end=one.end
    )


@contextmanager
def _pages_at_source(job: SnapshotJob, source: Source, known: _Known) -> Iterator[Read]:
    """Yield what reads the pages of a file at the source, by where they will be here."""
    (file,), options = known.entry.sources, job.run.options

    def fetch(offset: int, size: int) -> bytes:
        parts = list(parts_of(known.sources, offset, min(offset + size, known.entry.size)))
        return b"".join(_read_all(source, file, part.offset, part.length) for part in parts)

    def patiently(offset: int, size: int) -> bytes:
        return with_retries(partial(fetch, offset, size), file.path, options.patience, options.on_event)

    with _vanishing(source, file):
        yield reading_ahead(patiently, _READ_AHEAD)


@contextmanager
def _vanishing(source: Source, file: SourceFile) -> Iterator[None]:
    """Raise Vanished where a file is not as it was listed."""
    try:
        yield
    except (SourceNotFound, SourceChanged) as error:
        what = "vanished from" if isinstance(error, SourceNotFound) else "changed at"
        advice = "nothing was published, sync again when the source is complete"
        raise Vanished(file.path, f"{what} {source.url} while it was copied", advice) from error


def _write_metadata(
    job: SnapshotJob, source: Source, target: Path, known: Sequence[_Known], index: IndexBuilder
) -> None:
    """Write manifest, index and map of a snapshot whose files are made; only complete files count as arrived."""
    entries = [item.entry for item in known]
    paths = [entry.path for entry in entries]
    with _agreeing(job):
        made = index.finish(paths)
    by_path = {target / path: item for path, item in zip(paths, known, strict=True)}
    made = with_dictionaries(
        made, target, lambda path: _pages_at_source(job, source, by_path[path]), follow=False, jobs=job.run.options.jobs
    )
    write_index(made, target / ROW_GROUPS)
    write_manifest(manifest_of(job, entries), target / FILES)
    readable = readable_by(target, entries)
    for name in (ROW_GROUPS, FILES):
        limit_mode(target / name, readable)
        fsync_path(target / name)
    row_groups = np.concatenate([item.row_groups for item in known])
    KnownRanges(
        row_groups=row_groups,
        tails=np.array([item.tail for item in known], np.int64),
        ends=np.array([item.end for item in known], np.int64),
        sources=np.concatenate([item.sources for item in known]),
        first=np.cumsum([0, *(len(item.sources) for item in known)]),
    ).write(target)
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
    with closing(ArrivingFiles(ArrivingSnapshot(target), entries)) as arriving:
        arriving.mark_all()
        for file, item in enumerate(known):
            if item.checksum:
                arriving.finish(file, item.checksum)
