"""Downloads source files safely to local disk, several at once.

A download goes to a temporary name by ranged reads. After a lost connection it continues where it stopped. Its length
and footer are checked, it is made durable, and the source is asked again whether the file has changed since it was
listed.

A copy is usually not read soon. So complete blocks bypass the page cache from one reused buffer, if the file system
supports it: this saves fresh pages, and keeps the pages that training reads.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pqcache.errors import (
    DISK_FULL,
    CacheError,
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceError,
    SourceIncomplete,
    SourceNotFound,
    SourceUnavailable,
    disk_error,
)
from pqcache.events import Advanced, Fetched, OnEvent, ignore
from pqcache.store.drivers.base import Source, ended_early
from pqcache.store.drivers.timeouts import FEW_TRIES, Patience, with_retries
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.row_group_index import index_columns
from pqcache.store.sync.bad_partitions import BadPartitionsSoFar, Blame, blame_nobody, place_of
from pqcache.store.sync.download.subset import EVERYTHING, Subset
from pqcache.store.sync.plan import DirectoryPlan
from pqcache.store.urls import quoted
from pqcache.system.disk import (
    DIRECT_IO_BLOCK,
    add_file,
    checksum_of,
    checksum_text,
    enable_direct_io,
    is_checksum,
    new_checksum,
    write_at,
)
from pqcache.system.threads import stop_with
from pqcache.units import Stopwatch

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pqcache.store.row_group_index import IndexColumns


CHUNK = 1 << 20  # bytes written at once
MIN_DIRECT = 64 << 10  # bytes of a file; for fewer, writing past the page cache costs more than it saves
MAX_VERSIONS = 3  # how often a file may change while it is downloaded before the run gives up
MD5 = re.compile(r"[0-9a-f]{32}")
_SYNC_INTERVAL = 32 << 20  # bytes of a file
_TAIL = 64 << 10  # read of a file's end; most footers fit

log = logging.getLogger("pqcache.sync")
_of_thread = threading.local()


Task = tuple[DirectoryPlan, SourceFile]
T = TypeVar("T")
R = TypeVar("R")
_BATCH = 8  # files that a thread handles before it wakes the one that indexes them


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """How source files are downloaded.

    Attributes:
        subset: the columns and rows to take from each file.
        patience: when to stop retrying after transient errors.
        checksum: compare the copy with the store's own checksum if it has one: the ETag of an S3 object that was
            uploaded in one part.
        confirm: ask the source for a file's identity after each download. Without it, the source is asked only after a
            failure, or if the file has no tag: with a tag, a source reads that version or fails.
        stopped: asked between chunks; true raises KeyboardInterrupt.
        on_event: called with what happens.
    """

    subset: Subset = EVERYTHING
    patience: Patience = FEW_TRIES
    checksum: bool = False
    confirm: bool = True
    stopped: Callable[[], bool] = lambda: False
    on_event: OnEvent = ignore


@dataclass(frozen=True)
class Downloaded:
    """A source file as it was downloaded, with the copy's footer, Arrow schema and checksum.

    ``columns`` are those of the index, if the copy was indexed already.
    """

    file: SourceFile
    metadata: pq.FileMetaData
    schema: pa.Schema
    checksum: str
    columns: IndexColumns | None = None


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """One version of a source file that is downloaded to ``part``."""

    source: Source
    file: SourceFile
    part: Path
    options: DownloadOptions
    use_page_cache: bool

    @property
    def size(self) -> int:
        try:
            return os.stat(self.part).st_size
        except FileNotFoundError:
            return 0

    def advance(self, amount: int) -> None:
        """Report downloaded bytes; a negative number has to be downloaded again."""
        self.options.on_event(Advanced("fetch", amount))


class Vanished(SourceIncomplete):
    """The source file is gone."""


class _Moved(PqcacheError):
    def __init__(self, path: str, identity: Identity) -> None:
        super().__init__(path, "the file changed at its source")
        self.identity = identity


def download_file(
    source: Source,
    file: SourceFile,
    target: Callable[[SourceFile], Path],
    options: DownloadOptions,
    use_page_cache: bool = True,
) -> Downloaded:
    """Copy ``file`` to ``target(file)``.

    A file that changes meanwhile is downloaded again, and the returned identity is the copy's. Raises SourceIncomplete
    for a file that vanished or keeps changing. Without ``use_page_cache``, the copy bypasses the page cache, as it is
    not read soon.
    """
    for attempt in range(MAX_VERSIONS + 1):
        final = target(file)
        part = Path(f"{final}.part")
        if os.path.exists(final) and not part.exists():  # complete, from a run that died: check it like any other
            final.rename(part)
            part.chmod(part.stat().st_mode | 0o200)
        transfer = _Transfer(source=source, file=file, part=part, options=options, use_page_cache=use_page_cache)
        try:
            downloaded = _download_version(transfer)
        except SourceNotFound as error:
            raise Vanished(
                file.path,
                f"vanished from {source.url} while it was copied",
                "nothing was published, sync again when the source is complete",
            ) from error
        except _Moved as moved:
            transfer.advance(-transfer.size)
            part.unlink(missing_ok=True)
            if attempt == MAX_VERSIONS:
                break
            file = SourceFile(file.path, moved.identity, file.block_size)
            continue
        part.chmod(copy_mode(source, file, part.stat()))
        part.replace(final)
        return downloaded
    raise SourceIncomplete(
        file.path,
        f"keeps changing at {source.url} while it is copied",
        "nothing was published, sync again when its writer has finished",
    )


def copy_mode(source: Source, file: SourceFile, status: os.stat_result) -> int:
    """Read permissions of a copy, given the ``status`` of the original."""
    left = status.st_mode & 0o444  # by the umask
    return left & source.copy_mode(file.path, status.st_gid)


def _download_version(transfer: _Transfer) -> Downloaded:
    """Raises _Moved if the source has another version by the end."""
    file, options = transfer.file, transfer.options

    def receive() -> tuple[str, bytes]:
        if not options.subset.is_all or transfer.source.shape_of(file.path) is not None:
            _download_subset(transfer)
            return checksum_of(transfer.part), b""
        received = _download_rest(transfer)
        if options.checksum:
            _check_md5(transfer)
        if is_checksum(file.identity.tag) and received[0] != file.identity.tag:
            transfer.part.unlink()
            transfer.advance(-file.identity.size)
            raise SourceError(
                transfer.source.url_of(file.path),
                "differs from the manifest of its cache: it is damaged there",
                "nothing was published, run 'pqcache verify --repair' on the cache that it comes from",
            )
        return received

    for last in (False, True):
        error: PqcacheError | None = None
        try:
            checksum, tail = with_retries(receive, file.path, options.patience, options.on_event, lambda: transfer.size)
            metadata, schema = _footer(transfer, tail)
        except (SourceChanged, SourceUnavailable) as failure:
            error = failure  # it may have failed because the file changed meanwhile: ask before raising it
        except ParquetError as failure:
            error = failure
            transfer.advance(-transfer.size)
            transfer.part.unlink(missing_ok=True)  # it may be damaged: no later run must resume from it
        if error is None and not options.confirm and file.identity.tag:
            return Downloaded(file, metadata, schema, checksum)
        now = with_retries(lambda: transfer.source.stat(file.path), file.path, options.patience, options.on_event)
        if not file.identity.is_still(now):
            raise _Moved(file.path, now)
        if error is None:
            return Downloaded(file, metadata, schema, checksum)
        if last or not isinstance(error, ParquetError):
            raise error
    raise AssertionError("unreachable")


def _download_subset(transfer: _Transfer) -> None:
    """Download the wanted columns and rows, unless an earlier run did."""
    if transfer.part.exists() and not transfer.options.subset.ignore_case:  # whose columns may be spelled otherwise
        return
    from pqcache.store.sync.download.download_columns import (
        download_columns,  # and pyarrow.parquet, which a copy can wait for
    )

    options = transfer.options
    download_columns(
        transfer.source, transfer.file, transfer.part, options.subset, transfer.advance, stopped=options.stopped
    )


def _download_rest(transfer: _Transfer) -> tuple[str, bytes]:
    """Download the bytes that ``part`` lacks, durably; returns checksum and last bytes of the complete file.

    Bytes are written at their own offsets, so a thread left behind in a stalled read can only write the same bytes to
    the same offsets.
    """
    source, file, part = transfer.source, transfer.file, transfer.part
    size, tail = file.identity.size, b""
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            held = os.fstat(descriptor).st_size
            if held > size:
                os.ftruncate(descriptor, size)
            written = durable = size if held >= size else held // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK
            seen = new_checksum()
            add_file(seen, descriptor, written)
            direct = not transfer.use_page_cache and size >= MIN_DIRECT
            if direct and not enable_direct_io(descriptor):
                direct = False
                log.debug("%s is written through the page cache: its file system has no direct writes", part)
            for chunk in read_chunks(source, file, written, size - written):
                if transfer.options.stopped():
                    raise KeyboardInterrupt
                chunk = chunk[: size - written]
                seen.update(chunk)  # while it is in the processor's cache
                write_at(descriptor, chunk, written, direct)
                written += len(chunk)
                transfer.advance(len(chunk))
                if written == size:
                    tail = bytes(chunk[-_TAIL:])
                elif not direct and written - durable >= _SYNC_INTERVAL:
                    os.fdatasync(descriptor)  # the disk has work while others download, and little at the end
                    durable = written
            if written < size:
                raise ended_early(source, file, f"{written:,} of {size:,} bytes")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in DISK_FULL:  # what fsync could not write is not reported twice: do not build on it
            part.unlink(missing_ok=True)
        raise disk_error(part, error) from error
    return checksum_text(seen), tail


def read_chunks(source: Source, file: SourceFile, offset: int, length: int) -> Iterator[memoryview]:
    """Yield a range of a source's file in chunks of 1 MiB, each valid until the next one.

    Bytes received before an error are yielded before it is raised, so every attempt makes progress.
    """
    if length > 0:
        buffer = _buffer()
        for count in source.read_into(buffer, file.path, offset, length, file.identity.tag):
            yield buffer[:count]


def _buffer() -> memoryview:
    """This thread's page-aligned buffer."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = memoryview(mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    buffer: memoryview = _of_thread.buffer
    return buffer


def _check_md5(transfer: _Transfer) -> None:
    """Download again if the file's tag is an MD5 that does not match."""
    file = transfer.file
    if not MD5.fullmatch(file.identity.tag):
        return
    if md5_of(transfer.part) != file.identity.tag:
        transfer.part.unlink()
        transfer.advance(-file.identity.size)
        raise SourceUnavailable(
            transfer.source.url_of(file.path), "was damaged in transit: its MD5 differs from the store's"
        )


def md5_of(path: Path) -> str:
    """Hexadecimal, as in an ETag."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _footer(transfer: _Transfer, tail: bytes) -> tuple[pq.FileMetaData, pa.Schema]:
    """Footer and Arrow schema of a copy that ends in ``tail``."""
    from pqcache.parquet.footer import read_local_tail
    from pqcache.parquet.validation import footer_in

    complete = len(tail) >= 12 and int.from_bytes(tail[-8:-4], "little") + 12 <= len(tail)
    url = transfer.source.url_of(transfer.file.path)
    try:
        if complete:
            return footer_in(tail, url, size=transfer.file.identity.size)
        local = read_local_tail(transfer.part)
        return footer_in(local.data, url, size=local.size)
    except ParquetError as error:
        raise error.renamed(transfer.part, url) from error


@dataclass(frozen=True, kw_only=True)
class Downloader:
    """Downloads files of ``source`` for the cache at ``cache``.

    ``target`` returns the local path for a version of a file, and ``path`` its path in a snapshot. ``blame`` makes the
    context in which a place's file is downloaded.
    """

    source: Source | None
    cache: Path
    target: Callable[[SourceFile], Path]
    path: Callable[[SourceFile], str]
    options: DownloadOptions
    blame: Blame = blame_nobody

    def download(self, file: SourceFile, is_rewritten: bool) -> Downloaded:
        """Download a file, and index it unless it ``is_rewritten`` next."""
        if self.source is None:
            raise CacheError(file.path, "is no longer in the cache", f"run 'pqcache sync {quoted(self.cache)}'")
        watch = Stopwatch()
        with self.blame(place_of(file.path)):
            found = download_file(self.source, file, self.target, self.options, use_page_cache=is_rewritten)
            seconds = watch.seconds
            if not is_rewritten:
                local = self.target(found.file)
                columns = index_columns(self.path(found.file), found.metadata, found.schema, local)
                found = replace(found, columns=columns)
        self.options.on_event(Fetched(found.file.path, found.file.identity.size, seconds))
        return found


def download_all(
    threads: ThreadPoolExecutor, downloader: Downloader, tasks: Sequence[Task], jobs: int, stop: threading.Event
) -> Iterator[tuple[Task, Downloaded]]:
    """Yield each task with the copy of its file, in order; any error ends all downloads and is raised at once, except
    that BadPartitions is raised after all others are downloaded.
    """
    bad, failed = BadPartitionsSoFar(), Future[None]()

    def download(task: Task) -> Downloaded | None:
        directory, file = task
        try:
            with bad.collected():
                return None if stop.is_set() else downloader.download(file, is_rewritten=bool(directory.rewrite))
        except BaseException as error:  # noqa: BLE001  raised by in_batches
            with suppress(InvalidStateError):  # the first counts
                failed.set_exception(error)
            stop.set()
        return None

    for task, copy in in_batches(threads, download, tasks, jobs, failed):
        if copy is not None:
            yield task, copy
    bad.raise_any()


def in_batches(
    threads: ThreadPoolExecutor,
    call: Callable[[T], R],
    items: Sequence[T],
    jobs: int,
    failed: Future[None] | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield each item with the result of ``call``, in order, while threads are a few batches ahead.

    With many items a thread takes several at once: waking the consumer costs more than a small file's footer. An error
    in ``failed`` is raised at once, even if earlier items hang.
    """
    size = max(1, min(_BATCH, len(items) // (8 * jobs)))
    batches = (items[begin : begin + size] for begin in range(0, len(items), size))
    waiting: deque[tuple[Sequence[T], Future[list[R]]]] = deque()

    def call_each(batch: Sequence[T]) -> list[R]:
        return [call(item) for item in batch]

    def first() -> Iterator[tuple[T, R]]:
        batch, results = waiting.popleft()
        if failed is not None:
            either: tuple[Future[Any], ...] = (results, failed)
            wait(either, return_when=FIRST_COMPLETED)
            if failed.done():
                failed.result()
        return zip(batch, results.result(), strict=True)

    for batch in batches:
        if len(waiting) == 8 * jobs:
            yield from first()
        waiting.append((batch, threads.submit(call_each, batch)))
    while waiting:
        yield from first()


@contextmanager
def stoppable_threads(threads: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that is told to stop on an error, but not awaited, as a read may hang."""
    executor = ThreadPoolExecutor(max(1, threads), initializer=stop_with, initargs=(stop,))
    try:
        yield executor
    except BaseException:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
