"""Fetch the files of an arriving snapshot, those first that readers want; each appears when it is complete."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pqcache.errors import (
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    disk_error,
)
from pqcache.events import Advanced, Awaited, Warned
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot
from pqcache.store.arriving.wanted import Wanted, WantedLists
from pqcache.store.drivers.retries import with_retries
from pqcache.store.layout import ARRIVED
from pqcache.store.manifest import FileEntry, SourceFile
from pqcache.store.row_group_index import doubtful_columns, unfit_in_file
from pqcache.store.sync.bad_partitions import blame_nobody
from pqcache.store.sync.build_snapshot import downloader_of
from pqcache.store.sync.download.download_file import Downloaded, Vanished, read_chunks
from pqcache.store.sync.download.download_pool import stoppable_threads
from pqcache.store.sync.snapshot_job import SnapshotJob
from pqcache.system.boot import boot_id
from pqcache.system.checksum import checksum_of
from pqcache.system.disk import fsync_path, open_plain, read_regular, write_at

RANGES = ".ranges"  # ends the name of a large file of which some ranges are there
_LOOK = 0.02  # seconds between looks at what readers want
_REPORT = 0.5  # seconds between reports of what readers wait for
_RANGE = 8 << 20  # bytes of a large file that a thread fetches at once, beside others that fetch other ranges of it
_LARGE = 2 * _RANGE
_OPEN_AGAIN = "open the dataset again when the source was copied anew"

log = logging.getLogger("pqcache.sync")


class _Queue:
    """Gives out files: those that readers wait for, then what readers want in turns, then the rest in order."""

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
    """Fetches the files of ``entries`` that are not there, with ``checksums`` of those that are, by position.

    Threads take files from a queue that follows what readers want. A file is downloaded in the run's directory as any
    other, checked and made durable there, and renamed into the snapshot. Several threads fetch a large one.
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
        """Fetch all files; raises what keeps that from being done.

        If a file has changed at the source, the others are fetched while a reader has the snapshot open. Then, and at
        once if nobody has, SourceChanged is raised, and nothing more will come.
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
        """Fetch a range of a large file; the last one has the file checked like any other."""
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
        """Note that a file has changed at the source since it was listed."""
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
        """Look at readers' wishes, unless that was done recently."""
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
    """Checksums, by position, of the files that are there; one that isn't as recorded is removed.

    Files are read again if the machine was restarted since.
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
