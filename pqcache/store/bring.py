"""Source files brought to the run's directory, several at once, each asked for again after its copy.

Where a source reads the very version that it is told, as S3 does, it is asked for some dozens of files at once: a
page of a listing instead of a request for each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pqcache.errors import CacheError
from pqcache.events import Advanced, Fetched, OnEvent
from pqcache.store.manifest import SourceFile
from pqcache.store.plan import DirectoryPlan
from pqcache.store.source import ExactSource, Source
from pqcache.store.subset import Subset
from pqcache.store.transfer import MOVED, Copied, Stopwatch, fetch, keeps_changing, vanished, with_retries

T = TypeVar("T")
R = TypeVar("R")
Task = tuple[DirectoryPlan, SourceFile]

_TOGETHER = 64  # files that are asked for at once; the footers of as many wait in memory


@dataclass(frozen=True)
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
        return isinstance(self.source, ExactSource) and self.subset.is_all

    def bring(self, file: SourceFile) -> Copied:
        """Bring one file; where the source is exact, it is still to be confirmed."""
        watch = Stopwatch()
        copied = self._fetch(file)
        self.on_event(Fetched(copied.file.path, copied.file.identity.size, watch.seconds))
        return copied

    def confirm(self, copies: dict[SourceFile, Copied]) -> None:
        """Ask the source for all ``copies`` again; what has changed since is brought again, in their place."""
        source = self.source
        assert isinstance(source, ExactSource)
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
                copies[file] = self._fetch(SourceFile(file.path, now[file.path], file.block_size))
        raise keeps_changing(source, asked[0].path)

    def _fetch(self, file: SourceFile) -> Copied:
        if self.source is None:
            raise CacheError(f"{file.path}: is not in the cache any more; run 'pqcache sync {self.cache}'")
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
        )


@dataclass
class _Batch:
    """Files that are asked for together, by whichever thread brings the last of them."""

    tasks: list[Task]
    copies: dict[SourceFile, Copied] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, file: SourceFile, copied: Copied) -> bool:
        """Add a copy; return whether it was the last."""
        with self.lock:
            self.copies[file] = copied
            return len(self.copies) == len(self.tasks)


def brought(
    threads: ThreadPoolExecutor, how: Bringer, tasks: Iterable[Task], jobs: int
) -> Iterator[tuple[Task, Copied]]:
    """Yield each task with the copy of its file, confirmed, in order."""

    def bring(item: tuple[_Batch, SourceFile]) -> None:
        batch, file = item
        if batch.add(file, how.bring(file)) and how.is_exact:
            how.confirm(batch.copies)

    items = ((batch, task[1]) for batch in _batches(tasks, _TOGETHER if how.is_exact else 1) for task in batch.tasks)
    arrived = 0
    for (batch, _), _ in _pooled(threads, bring, items, jobs):
        arrived += 1
        if arrived == len(batch.tasks):
            arrived = 0
            for task in batch.tasks:
                yield task, batch.copies.pop(task[1])


def _batches(tasks: Iterable[Task], most: int) -> Iterator[_Batch]:
    """Yield batches of at most ``most`` tasks; one that is rewritten does not wait for other directories."""
    batch = _Batch([])
    for task in tasks:
        if batch.tasks and (
            len(batch.tasks) == most or (task[0] is not batch.tasks[-1][0] and batch.tasks[-1][0].rewrite)
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


def _pooled(
    threads: ThreadPoolExecutor, call: Callable[[T], R], tasks: Iterable[T], jobs: int
) -> Iterator[tuple[T, R]]:
    """Yield each task with what ``call`` made of it, in order; only a few wait in the pool."""
    tasks = iter(tasks)
    running: deque[tuple[T, Future[R]]] = deque()
    while True:
        for task in islice(tasks, max(1, 4 * jobs) - len(running)):
            running.append((task, threads.submit(call, task)))
        if not running:
            return
        waiting = {future for _, future in running}
        while not running[0][1].done():  # in order, but an error anywhere is told at once
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        task, future = running.popleft()
        yield task, future.result()
