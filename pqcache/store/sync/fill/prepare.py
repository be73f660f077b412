"""Make an arriving snapshot: all metadata of what it will be, from the footers at the source."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, SourceChanged, SourceNotFound, SourceUnavailable
from pqcache.events import Advanced, Started
from pqcache.parquet.decoded_size import reading_ahead
from pqcache.parquet.footer.footer import MAGIC, TAIL, footer_and_magic, read_tail
from pqcache.parquet.projection import ByteRange, number_of
from pqcache.parquet.row_group_stats import footer_in
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.drivers.retries import with_retries
from pqcache.store.hive import parent
from pqcache.store.layout import ARRIVED, FILES, LEASE, ROW_GROUPS, RUN, WANTED
from pqcache.store.manifest import FileEntry, SourceFile
from pqcache.store.manifest_file import write_manifest
from pqcache.store.ownership import file_mode, make_directories
from pqcache.store.row_group_index import IndexBuilder, OpenFile, with_dictionaries, write_index
from pqcache.store.sync.build_snapshot import manifest_of
from pqcache.store.sync.decide import NeedsRewriting
from pqcache.store.sync.download.download_columns import project_file, write_nulls
from pqcache.store.sync.download.download_file import Vanished, copy_mode
from pqcache.store.sync.download.download_pool import stoppable_threads
from pqcache.store.sync.download.subset import Subset
from pqcache.store.sync.snapshot_job import SnapshotJob
from pqcache.system.disk import fsync_path, limit_mode

T = TypeVar("T")
R = TypeVar("R")
Ints = npt.NDArray[np.int64]

_READ_AHEAD = 64 << 10  # bytes that are fetched to see a dictionary
_BATCH = 8  # footers that a thread reads before it wakes the one that makes the index
_SEEN = 16  # footers after which the next ones are expected to be about as long
_LEAST_TAIL, _MOST_TAIL = 8 << 10, 1 << 20
_WHOLE: Ints = np.zeros((0, 3), np.int64)


@dataclass(frozen=True, kw_only=True)
class _End:
    """The footer of a file as it will be here, its size, and where its bytes are at the source.

    ``ranges`` has (start here, start at the source, length) for each range of a file of which only some columns are
    fetched; empty for one that is copied.
    """

    metadata: pq.FileMetaData
    schema: pa.Schema
    size: int
    ranges: Ints


class _FooterLengths:
    """How many bytes to read first: a table's files have the same columns, and footers of similar length."""

    def __init__(self) -> None:
        self._seen = self._longest = 0

    def expected(self) -> int:
        """Twice the longest length so far."""
        return TAIL if self._seen < _SEEN else min(max(2 * self._longest, _LEAST_TAIL), _MOST_TAIL)

    def add(self, length: int) -> None:
        """Threads may do so at once, as a lost length changes little."""
        self._seen, self._longest = self._seen + 1, max(self._longest, length)


def prepare(job: SnapshotJob, source: Source) -> tuple[Path, list[FileEntry]]:
    """Make the snapshot in the run's directory, without its files; return where it is, and its entries.

    Raises NeedsRewriting if the files cannot be read as one table before they are rewritten, and Vanished if one is not
    as it was listed.
    """
    target, files, options = job.workdir / "snapshot", job.plan.downloads, job.run.options
    job.on_event(Started("read", len(files), "files"))
    for directory in ("_pqcache", WANTED, *dict.fromkeys(parent(file.path) for file in files)):
        make_directories(target / directory)
    for name in (LEASE, RUN, ARRIVED):
        (target / name).touch(file_mode())
    lengths, stop = _FooterLengths(), threading.Event()
    index, entries = IndexBuilder(job.table_schema, units=job.units), list[FileEntry]()
    size = max(1, min(_BATCH, len(files) // (4 * options.jobs)))
    batches = [files[first : first + size] for first in range(0, len(files), size)]

    def read_batch(batch: Sequence[SourceFile]) -> list[tuple[SourceFile, _End]]:
        return [(file, _read_end(job, source, file, lengths)) for file in batch]

    with stoppable_threads(options.jobs, stop) as threads:
        for batch in _in_order(threads, read_batch, batches, 2 * options.jobs):
            for file, end in batch:
                with _agreeing(job):
                    index.add(job.plan.path_of(file), end.metadata, end.schema)
                entries.append(_entry(job, file, end))
            job.on_event(Advanced("read", len(batch)))
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
    """Raise NeedsRewriting for files without a common index that are to be rewritten."""
    try:
        yield
    except ParquetError as error:
        if job.rewrite is None:
            raise
        raise NeedsRewriting(error) from error


def _in_order(threads: ThreadPoolExecutor, call: Callable[[T], R], items: Sequence[T], ahead: int) -> Iterator[R]:
    """Yield results in order, with at most ``ahead`` items started or waiting to be yielded."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        if len(waiting) == ahead:
            yield waiting.popleft().result()
        waiting.append(threads.submit(call, item))
    while waiting:
        yield waiting.popleft().result()


def _read_end(job: SnapshotJob, source: Source, file: SourceFile, lengths: _FooterLengths) -> _End:
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
    """Open files at the source by their paths here, to look at dictionaries."""
    options = job.run.options

    @contextmanager
    def opened(path: str) -> Iterator[tuple[pq.FileMetaData, pa.Schema, Callable[[int, int, bool], bytes]]]:
        file = files[path]
        end = _read_end(job, source, file, _FooterLengths())

        def fetch(offset: int, size: int) -> bytes:
            parts = _parts_of(end.ranges, offset, min(offset + size, end.size))
            return b"".join(_read_all(source, file, part.offset, part.length) for part in parts)

        def patiently(offset: int, size: int) -> bytes:
            return with_retries(partial(fetch, offset, size), file.path, options.patience, options.on_event)

        with _vanishing(source, file):
            yield end.metadata, end.schema, reading_ahead(patiently, _READ_AHEAD)

    return opened


def _parts_of(ranges: Ints, start: int, end: int) -> Iterator[ByteRange]:
    """Yield where ``[start, end)`` of a file is at the source, in order."""
    if not len(ranges):
        yield ByteRange(start, end - start)
    for here, source, length in ranges.tolist():
        low, high = max(start, here), min(end, here + length)
        if low < high:
            yield ByteRange(source + low - here, high - low)


@contextmanager
def _vanishing(source: Source, file: SourceFile) -> Iterator[None]:
    """Raise Vanished if a file is not as it was listed."""
    try:
        yield
    except (SourceNotFound, SourceChanged) as error:
        what = "vanished from" if isinstance(error, SourceNotFound) else "changed at"
        advice = "nothing was published, sync again when the source is complete"
        raise Vanished(file.path, f"{what} {source.url} while it was copied", advice) from error
