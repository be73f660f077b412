"""Fetch the files of an arriving snapshot by ranges, those first that readers want; check each when it is complete."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path

from pqcache.errors import (
    CacheError,
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    disk_error,
)
from pqcache.events import Advanced, Awaited, Fetched, Warned
from pqcache.store.arriving.arrival_map import FileState
from pqcache.store.arriving.wanted import WantedLists
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.retries import FEW_TRIES, with_retries
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.row_group_index import unfit_in_file
from pqcache.store.sync.download.download_columns import merged_ranges
from pqcache.store.sync.download.download_file import copy_mode, read_chunks
from pqcache.store.sync.download.download_pool import stoppable_threads
from pqcache.store.sync.fill.arriving_files import ArrivingFiles
from pqcache.store.sync.fill.checks import digests_of, has_md5, is_as_stored, open_copy
from pqcache.store.sync.fill.reuse import abandon
from pqcache.store.sync.fill.scheduler import Piece, Scheduler
from pqcache.store.sync.fill.source_ranges import parts_of, pieces_in
from pqcache.store.sync.snapshot_job import SnapshotJob
from pqcache.system.checksum import is_checksum
from pqcache.system.disk import write_at
from pqcache.units import format_seconds

PAUSE = 1.0  # seconds before a source that does not answer is asked again

_LOOK = 0.02  # seconds between looks at what readers want
_REPORT = 0.5  # seconds between reports of what readers wait for
_WRITE_BACK = 32 << 20  # bytes of a file that wait to be written to the disk
_LAST_WRITE = 10.0  # seconds that the end of a run waits for a write
_OPEN_AGAIN = "open the dataset again when the source was copied anew"


class Fetch:
    """Fetches what is missing of a snapshot.

    Threads take pieces from the scheduler; the one that fetches the last piece of a file checks the file and makes it
    durable. ``_changed`` guards the scheduler, the files, and the count of threads at work; only threads without work
    wait for it, as waking another thread for each piece would take as long as a small file.
    """

    def __init__(self, job: SnapshotJob, source: Source, files: ArrivingFiles) -> None:
        self._job, self._source, self._files = job, source, files
        self._sources = [entry.sources[0] for entry in files.entries]
        self._scheduler = Scheduler(files.ranges(), [there.copy() for there in files.there])
        self._lists = WantedLists(files.snapshot.wanted_directory)
        self._looked = self._reported = 0.0
        self._awaited = Awaited(0, 0)
        self._changed = threading.Condition()
        self._busy = 0
        self._unchecked: deque[int] = deque()
        self._stop = threading.Event()
        self._gates: list[threading.Lock] = []
        self._moved: SourceChanged | None = None
        self._answered = time.monotonic()
        self._is_out = False
        self._unwritten: Counter[int] = Counter()
        self._damaged: Counter[int] = Counter()
        self._began: dict[int, float] = {}

    def run(self) -> None:
        """Fetch, check and make durable all files; raises what keeps that from being done.

        Where a file has changed at the source, the others are fetched while a reader has the snapshot open. Then, and
        at once where nobody has, SourceChanged is raised, and nothing more will come.
        """
        for file, entry in enumerate(self._files.entries):
            if self._files.map.files[file] == FileState.CHANGED:
                self._scheduler.drop(file)
                self._moved = self._files.snapshot.error_of(entry.path)
            elif self._files.map.files[file] == FileState.ARRIVED:  # in an earlier run, perhaps beside other files
                self._check_values(file)
            elif self._files.is_complete(file):
                self._unchecked.append(file)
        jobs = self._job.run.options.jobs
        with stoppable_threads(jobs, self._stop) as workers:
            try:
                self._wait([workers.submit(self._work) for _ in range(jobs)])
            finally:
                self._end()
            if self._moved is not None:
                self._abandon(self._moved)
                raise self._moved

    def _wait(self, working: list[Future[None]]) -> None:
        """Wait until all is fetched, something fails, or nobody waits for the rest of a snapshot that has changed."""
        running: set[Future[None]] = set(working)
        while running:
            done, running = wait(running, timeout=_REPORT, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if self._moved is not None and not self._files.snapshot.is_leased():
                return
            self._report()

    def _end(self) -> None:
        """Let no thread change the snapshot any more, also one that hangs in a read."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        for gate in self._gates:
            if gate.acquire(timeout=_LAST_WRITE):
                gate.release()

    # ---- pieces

    def _work(self) -> None:
        gate = threading.Lock()
        self._gates.append(gate)
        while (task := self._take(gate)) is not None:
            try:
                task()
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _take(self, gate: threading.Lock) -> Callable[[], None] | None:
        """Return what to do next; None when all is there and checked."""
        with self._changed:
            while not self._stop.is_set():
                if (task := self._next_task(gate)) is not None:
                    self._busy += 1
                    return task
                if not self._busy:
                    break
                self._changed.wait()
            self._changed.notify_all()
            return None

    def _next_task(self, gate: threading.Lock) -> Callable[[], None] | None:
        if self._unchecked:
            return partial(self._check_file, self._unchecked.popleft())
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._scheduler.want(self._lists.read())
        piece = self._scheduler.take()
        if piece is None:
            return None
        self._began.setdefault(piece.file, now)
        return partial(self._fetch, piece, gate)

    def _fetch(self, piece: Piece, gate: threading.Lock) -> None:
        """Fetch a piece and mark it, or say why it cannot be fetched."""
        file, options, position = self._sources[piece.file], self._job.run.options, piece.start

        def receive() -> None:
            nonlocal position
            for count in self._received(piece, position, gate):
                position += count
            if position < piece.end:
                url, length = self._source.url_of(file.path), piece.end - piece.start
                reason = f"the connection ended after {position - piece.start:,} of {length:,} bytes"
                raise SourceUnavailable(url, f"{reason} from {piece.start:,}")
            if not (self._source.capabilities.reads_versions and file.identity.tag):
                self._check_identity(file, self._source.stat(file.path))

        few = options.patience._replace(retries=min(options.patience.retries, FEW_TRIES.retries))
        try:
            with_retries(receive, file.path, few, options.on_event, lambda: position)
        except SourceError as error:
            self._job.on_event(Advanced("fetch", piece.start - position))
            self._failed(piece, error)
            return
        self._arrived(piece)

    def _received(self, piece: Piece, position: int, gate: threading.Lock) -> Iterator[int]:
        """Write what the source sends of a piece from ``position`` on; yield how many bytes, each time."""
        path = self._files.path(piece.file)
        descriptor = _open_to_write(path)
        try:
            for chunk in self._chunks(piece, position):
                with gate:
                    if self._stop.is_set():
                        raise KeyboardInterrupt
                    write_at(descriptor, chunk, position, direct=False)
                position += len(chunk)
                self._job.on_event(Advanced("fetch", len(chunk)))
                yield len(chunk)
        except OSError as error:
            raise disk_error(path, error) from error
        finally:
            os.close(descriptor)

    def _chunks(self, piece: Piece, position: int) -> Iterator[memoryview]:
        """Yield the bytes of a piece from ``position`` on, which need not be side by side at the source.

        Where the source ends early, nothing behind that is yielded.
        """
        parts = parts_of(self._files.sources(piece.file), position, piece.end)
        for offset, length, ranges in merged_ranges(parts):
            end = offset + length
            for received in read_chunks(self._source, self._sources[piece.file], offset, length):
                yield from pieces_in(received, offset, ranges)
                offset += len(received)
            if offset < end:  # or the next range would be written where the end of this one belongs
                return

    def _arrived(self, piece: Piece) -> None:
        """Mark a piece; check its file where that is complete, or else see that not too much of it is unwritten."""
        with self._changed:
            if self._stop.is_set():
                return
            self._answered, was_out, self._is_out = time.monotonic(), self._is_out, False
            complete = self._files.add(piece.file, piece.start, piece.end)
            self._unwritten[piece.file] += piece.end - piece.start
            write_back = self._unwritten[piece.file] >= _WRITE_BACK
            if complete or write_back:
                self._unwritten[piece.file] = 0
        if was_out:
            self._job.on_event(Warned(f"{self._source.url} answers again"))
        if complete:
            self._check_file(piece.file)
        elif write_back:
            with open_copy(self._files.path(piece.file)) as descriptor:
                self._write_back(piece.file, descriptor)

    # ---- what goes wrong at the source

    def _failed(self, piece: Piece, error: SourceError) -> None:
        """Put a piece back that the source does not give now, or give up its file where it has changed."""
        file = self._sources[piece.file]
        try:
            self._check_identity(file, self._source.stat(file.path))
        except SourceNotFound:
            self._give_up(piece.file, self._vanished(file))
            return
        except SourceChanged as changed:
            self._give_up(piece.file, changed)
            return
        except SourceUnavailable as unavailable:
            error = unavailable
        patience = self._job.run.options.patience.seconds
        if not isinstance(error, SourceUnavailable) or time.monotonic() - self._answered > patience:
            raise error
        with self._changed:
            self._scheduler.put_back(piece.file, piece.start, piece.end)
            was_out, self._is_out = self._is_out, True
        if not was_out:
            trying = f"what is there is kept, and it is tried again for {format_seconds(patience)}"
            self._job.on_event(Warned(f"{error}; {trying}"))
        self._stop.wait(PAUSE)

    def _check_identity(self, file: SourceFile, now: Identity) -> None:
        """Raise SourceChanged where a file is another one ``now``."""
        if not file.identity.is_still(now):
            raise SourceChanged(self._source.url_of(file.path), "changed while it was copied", _OPEN_AGAIN)

    def _vanished(self, file: SourceFile) -> SourceChanged:
        return SourceChanged(self._source.url_of(file.path), "vanished while it was copied", _OPEN_AGAIN)

    def _give_up(self, file: int, error: SourceChanged) -> None:
        with self._changed:
            if self._stop.is_set() or self._files.map.files[file] == FileState.CHANGED:
                return
            self._scheduler.drop(file)
            self._files.give_up(file, (error.subject, error.reason, error.advice))
            self._moved = error
        self._job.on_event(Warned(f"{error.subject}: {error.reason}"))

    def _abandon(self, error: PqcacheError) -> PqcacheError:
        """Let nothing more come of the snapshot because of an error, and return that."""
        with self._changed:
            abandon(self._files.snapshot, error)
        return error

    # ---- complete files

    def _check_file(self, file: int) -> None:
        """Compare a complete file with what the store says of it, and make it durable."""
        source_file, path = self._sources[file], self._files.path(file)
        tail, end = int(self._files.known.tails[file]), int(self._files.known.ends[file])
        with open_copy(path) as descriptor:
            digests = digests_of(descriptor, tail, self._md5_of(file))
            if end and digests.end != end:
                reason = "its end is not on the disk as it was written"
                raise self._abandon(CacheError(path, reason, "check the disk of the cache, and sync again"))
            if not self._files.is_copy(file) or is_as_stored(digests, source_file):
                self._check_values(file)
                self._finish(file, descriptor, digests.checksum)
            else:
                self._fetch_again(file)

    def _md5_of(self, file: int) -> bool:
        return self._files.is_copy(file) and has_md5(self._sources[file], self._job.run.config.checksum)

    def _check_values(self, file: int) -> None:
        """Raise ParquetError where a complete file has a value that does not fit the types of the other files."""
        fields = self._files.doubtful.get(file, [])
        if fields and (reason := unfit_in_file(self._files.path(file), fields)) is not None:
            advice = "write it again with the other type, or publish the rest with --skip-bad and without --fill"
            raise self._abandon(ParquetError(self._files.entries[file].path, reason, advice))

    def _finish(self, file: int, descriptor: int, checksum: str) -> None:
        """Give a file its mode and make it durable; it is given up where the source does not have it any more."""
        source_file = self._sources[file]
        try:
            os.fchmod(descriptor, copy_mode(self._source, source_file, os.fstat(descriptor)))
        except SourceNotFound:
            self._give_up(file, self._vanished(source_file))
            return
        self._write_back(file, descriptor)
        with self._changed:
            if self._stop.is_set():
                return
            self._files.finish(file, checksum)
        seconds = time.monotonic() - self._began.get(file, time.monotonic())
        self._job.on_event(Fetched(source_file.path, source_file.identity.size, seconds))

    def _fetch_again(self, file: int) -> None:
        source_file = self._sources[file]
        url = self._source.url_of(source_file.path)
        if is_checksum(source_file.identity.tag):
            reason = "is not what the manifest of its cache says: it is damaged there"
            advice = "nothing was published, run 'pqcache verify --repair' on the cache that it comes from"
            raise self._abandon(SourceError(url, reason, advice))
        self._damaged[file] += 1
        if self._damaged[file] > min(self._job.run.options.patience.retries, FEW_TRIES.retries):
            error = SourceUnavailable(url, "was damaged on its way: its MD5 is not the store's")
            raise self._abandon(error)  # its end may be what is damaged, which is fetched once
        with self._changed:
            start, end = self._files.forget(file)
            self._scheduler.put_back(file, start, end)
        self._job.on_event(Advanced("fetch", start - end))

    def _write_back(self, file: int, descriptor: int) -> None:
        """Make durable what is written of a file; where that fails, its bytes are not to be relied upon."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise self._abandon(disk_error(self._files.path(file), error)) from error

    # ---- what is reported

    def _report(self) -> None:
        """Report what readers wait for, where that has changed."""
        now = time.monotonic()
        if now - self._reported < _REPORT:
            return
        self._reported = now
        with self._changed:
            self._scheduler.want(self._lists.read())  # all threads may be waiting for the source
            waiting = [self._files.missing_of(wanted) for wanted in self._lists.known if wanted.urgent]
        awaited = Awaited(sum(count > 0 for count in waiting), sum(waiting))
        if awaited != self._awaited:
            self._awaited = awaited
            self._job.on_event(awaited)


def _open_to_write(path: Path) -> int:
    """Open a file that is not complete; one that a run has left without the right to write, as it ended just then."""
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except PermissionError:
        path.chmod(path.stat().st_mode | 0o200)
        return os.open(path, flags)
