"""Download source files to the run's directory, several at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

from pqcache.errors import CacheError
from pqcache.events import Fetched
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import SourceFile
from pqcache.store.row_group_index import index_columns
from pqcache.store.sync.bad_partitions import BadPartitionsSoFar, Blame, blame_nobody, place_of
from pqcache.store.sync.download.download_file import Downloaded, DownloadOptions, download_file
from pqcache.store.sync.plan import DirectoryPlan
from pqcache.store.urls import quoted
from pqcache.system.parallel import stop_with
from pqcache.system.stopwatch import Stopwatch

Task = tuple[DirectoryPlan, SourceFile]

_BATCH = 64  # files that are reported at once
_OPEN_BATCHES = 2  # the footers of as many batches wait in memory


@dataclass(frozen=True, kw_only=True)
class Downloader:
    """Downloads files of ``source`` for the cache at ``cache``.

    ``target`` says where a version of a file goes, and ``path`` what its path is in a snapshot. ``blame`` makes the
    context in which a file of a place is downloaded.
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
            raise CacheError(file.path, "is not in the cache any more", f"run 'pqcache sync {quoted(self.cache)}'")
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


@dataclass
class _DownloadBatch:
    """Files that are reported together, by whichever thread downloads the last of them."""

    tasks: list[Task]
    copies: dict[SourceFile, Downloaded | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    finished: bool = False

    def add(self, file: SourceFile, downloaded: Downloaded | None) -> bool:
        """Add a copy, or None if the file cannot be taken; return whether it was the last."""
        with self.lock:
            self.copies[file] = downloaded
            return len(self.copies) == len(self.tasks)


class _TaskQueue:
    """Tasks for threads to take, and their batches, of which only a few are open."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.open: deque[_DownloadBatch] = deque()
        self._tasks = ((batch, task) for batch in _batches(tasks) for task in batch.tasks)
        self._lock = threading.Lock()
        self._budget = threading.Semaphore(_OPEN_BATCHES)
        self._last: _DownloadBatch | None = None
        self._closed = False
        self.bad = BadPartitionsSoFar()

    def take(self) -> tuple[_DownloadBatch, Task] | None:
        """Return the next task, or None at the end; waits while too many batches are open."""
        with self._lock:
            found = None if self._closed else next(self._tasks, None)
            if found is not None and found[0] is not self._last:
                self._budget.acquire()
                self._last = found[0]
                self.open.append(found[0])
            return None if self._closed else found

    def release(self) -> None:
        """Drop the first open batch once its files were taken over."""
        self.open.popleft()
        self._budget.release()

    def close(self) -> None:
        self._closed = True
        self._budget.release()


def download_all(
    threads: ThreadPoolExecutor, downloader: Downloader, tasks: Iterable[Task], jobs: int
) -> Iterator[tuple[Task, Downloaded]]:
    """Yield each task with the copy of its file, in order; an error anywhere is raised at once.

    Threads take their tasks themselves and report complete batches: to wake this thread for each file would cost more
    than its footer and its checksum together. BadPartitions is raised when all others are downloaded.
    """
    queue = _TaskQueue(tasks)
    reports: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            while (taken := queue.take()) is not None:
                batch, (directory, file) = taken
                copy = None
                with queue.bad.collected():
                    copy = downloader.download(file, is_rewritten=bool(directory.rewrite))
                if batch.add(file, copy):
                    batch.finished = True
                    reports.put(None)
        except BaseException as error:  # noqa: BLE001  raised below
            reports.put(error)

    running = [threads.submit(work) for _ in range(max(1, jobs))]
    for future in running:
        future.add_done_callback(lambda _: reports.put(None))
    try:
        while queue.open or not all(future.done() for future in running):
            if (error := reports.get()) is not None:
                raise error
            while queue.open and queue.open[0].finished:
                batch = queue.open[0]
                for task in batch.tasks:
                    if (copy := batch.copies.pop(task[1])) is not None:
                        yield task, copy
                queue.release()
    finally:
        queue.close()
    queue.bad.raise_any()


def _batches(tasks: Iterable[Task]) -> Iterator[_DownloadBatch]:
    """Yield batches of a few dozen tasks; a directory that is rewritten does not wait for others."""
    batch = _DownloadBatch([])
    for task in tasks:
        if batch.tasks and (
            len(batch.tasks) == _BATCH or (task[0] is not batch.tasks[-1][0] and batch.tasks[-1][0].rewrite)
        ):
            yield batch
            batch = _DownloadBatch([])
        batch.tasks.append(task)
    if batch.tasks:
        yield batch


@contextmanager
def stoppable_threads(threads: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that on an error is asked to stop and not waited for: a read may hang."""
    executor = ThreadPoolExecutor(max(1, threads), initializer=stop_with, initargs=(stop,))
    try:
        yield executor
    except BaseException:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
