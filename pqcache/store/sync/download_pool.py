"""Source files brought to the run's directory, several at once, each asked for again after its copy.

Where a source reads the very version that it is told, as S3 does, it is asked for some dozens of files at once: a
page of a listing instead of a request for each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue

from pqcache.errors import CacheError
from pqcache.events import Advanced, Fetched, OnEvent
from pqcache.store.drivers.base import Source, VersionedSource
from pqcache.store.drivers.retries import with_retries
from pqcache.store.manifest import SourceFile
from pqcache.store.sync.download import MOVED, Copied, fetch, keeps_changing, vanished
from pqcache.store.sync.plan import DirectoryPlan
from pqcache.store.sync.subset import Subset
from pqcache.system.stopwatch import Stopwatch

Task = tuple[DirectoryPlan, SourceFile]

_TOGETHER = 64  # files that are asked for at once
_BEGUN = 2  # batches: the footers of as many files wait in memory


@dataclass(frozen=True, kw_only=True)
class Bringer:
    """How files are brought; ``target`` says where a version of a file goes."""

    source: Source | None
    cache: Path
    target: Callable[[SourceFile], Path]
    on_event: OnEvent
    stopped: Callable[[], bool]
    retries: int
    checksum: bool
    subset: Subset

    @cached_property
    def is_exact(self) -> bool:
        """Whether what was read is known to be one version, so that asking again can wait."""
        return isinstance(self.source, VersionedSource) and self.subset.is_all

    def bring(self, file: SourceFile, cached: bool) -> Copied:
        """Bring one file; where the source is exact, it is still to be confirmed."""
        watch = Stopwatch()
        copied = self._fetch(file, cached)
        self.on_event(Fetched(copied.file.path, copied.file.identity.size, watch.seconds))
        return copied

    def confirm(self, copies: dict[SourceFile, Copied]) -> None:
        """Ask the source for all ``copies`` again; what has changed since is brought again, in their place."""
        source = self.source
        assert isinstance(source, VersionedSource)
        asked = list(copies)
        for _ in range(MOVED + 1):
            ask = partial(source.stat_all, [file.path for file in asked])
            now = with_retries(ask, asked[0].path, self.retries, self.on_event)
            for file in asked:
                if file.path not in now:
                    raise vanished(source, file.path)
            asked = [file for file in asked if now[file.path] != copies[file].file.identity]
            if not asked:
                return
            for file in asked:
                old = copies[file].file
                self.on_event(Advanced("fetch", -old.identity.size))
                self.target(old).unlink(missing_ok=True)
                copies[file] = self._fetch(SourceFile(file.path, now[file.path], file.block_size), cached=True)
        raise keeps_changing(source, asked[0].path)

    def _fetch(self, file: SourceFile, cached: bool) -> Copied:
        if self.source is None:
            raise CacheError(file.path, "is not in the cache any more", f"run 'pqcache sync {self.cache}'")
        return fetch(
            self.source,
            file,
            self.target,
            self.on_event,
            self.stopped,
            self.retries,
            self.checksum,
            self.subset,
            confirm=not self.is_exact,
            cached=cached,
        )


@dataclass
class _Batch:
    """Files that are asked for together, by whichever thread brings the last of them."""

    tasks: list[Task]
    copies: dict[SourceFile, Copied] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    finished: bool = False

    def add(self, file: SourceFile, copied: Copied) -> bool:
        """Add a copy; return whether it was the last."""
        with self.lock:
            self.copies[file] = copied
            return len(self.copies) == len(self.tasks)


class _Queue:
    """The tasks that threads take one by one, and the batches they belong to, of which only a few are begun."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.begun: deque[_Batch] = deque()
        self._tasks = ((batch, task) for batch in _batches(tasks) for task in batch.tasks)
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_BEGUN)
        self._last: _Batch | None = None
        self._closed = False

    def take(self) -> tuple[_Batch, Task] | None:
        """Return the next task, or None when there is none; waits while too many batches are begun."""
        with self._lock:
            found = None if self._closed else next(self._tasks, None)
            if found is not None and found[0] is not self._last:
                self._room.acquire()
                self._last = found[0]
                self.begun.append(found[0])
            return None if self._closed else found

    def yielded(self) -> None:
        """Say that the first batch has been taken over."""
        self.begun.popleft()
        self._room.release()

    def close(self) -> None:
        """Give out no more tasks."""
        self._closed = True
        self._room.release()


def brought(
    threads: ThreadPoolExecutor, how: Bringer, tasks: Iterable[Task], jobs: int
) -> Iterator[tuple[Task, Copied]]:
    """Yield each task with the copy of its file, confirmed, in order; an error anywhere is raised at once.

    Threads take their tasks themselves and tell of whole batches: to wake this one for each file costs more than its
    footer and its checksum together.
    """
    queue = _Queue(tasks)
    told: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            while (taken := queue.take()) is not None:
                batch, (directory, file) = taken
                if batch.add(file, how.bring(file, cached=bool(directory.rewrite))):
                    if how.is_exact:
                        how.confirm(batch.copies)
                    batch.finished = True
                    told.put(None)
        except BaseException as error:  # noqa: BLE001  raised below
            told.put(error)

    running = [threads.submit(work) for _ in range(max(1, jobs))]
    for future in running:
        future.add_done_callback(lambda _: told.put(None))
    try:
        while queue.begun or not all(future.done() for future in running):
            if (error := told.get()) is not None:
                raise error
            while queue.begun and queue.begun[0].finished:
                batch = queue.begun[0]
                for task in batch.tasks:
                    yield task, batch.copies.pop(task[1])
                queue.yielded()
    finally:
        queue.close()


def _batches(tasks: Iterable[Task]) -> Iterator[_Batch]:
    """Yield batches of a few dozen tasks; a directory that is rewritten does not wait for others."""
    batch = _Batch([])
    for task in tasks:
        if batch.tasks and (
            len(batch.tasks) == _TOGETHER or (task[0] is not batch.tasks[-1][0] and batch.tasks[-1][0].rewrite)
        ):
            yield batch
            batch = _Batch([])
        batch.tasks.append(task)
    if batch.tasks:
        yield batch


@contextmanager
def pool(threads: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool that on an error is told to stop and not waited for: a read may hang."""
    executor = ThreadPoolExecutor(max(1, threads))
    try:
        yield executor
    except BaseException:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()
