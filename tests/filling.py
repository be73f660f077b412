"""A small run that fills an arriving snapshot from a local directory, for tests of its readers.

It fetches one row group after another, those first that readers want, and can stall, die, lose files and publish. As a
process, ``python -m tests.filling``, it reads what ``pqcache.store.sync.background_run`` reads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pqcache.parquet.row_group_stats import read_footer
from pqcache.store.arriving.arrival_map import ArrivalMap, ArrivalState, FileState
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot, find_arriving
from pqcache.store.arriving.wanted import read_wanted
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.layout import ARRIVED, ARRIVING, CHANGED, FILES, LEASE, ROW_GROUPS, RUN, SUMMARY, WANTED
from pqcache.store.manifest import FileEntry, Identity, Manifest, SourceFile
from pqcache.store.manifest_digest import write_summary
from pqcache.store.manifest_file import write_manifest
from pqcache.store.publish import new_snapshot_id
from pqcache.store.row_group_index import IndexBuilder, with_dictionaries, write_index
from pqcache.store.snapshot import write_checksums
from pqcache.system.boot import boot_id
from pqcache.system.checksum import checksum_of
from pqcache.system.locks import lock_as_writer
from tests.waiting import becomes_true


class Filler:
    """One run; what an earlier one has left in the cache is continued."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache = source, CacheDirectory(cache)
        self.paths = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.parquet"))
        if not self.cache.exists():
            self.cache.create()
            write_config(cache, Config(source=str(source)))
        self.snapshot = find_arriving(self.cache) or self._prepare()
        self.run = os.open(self.snapshot.path / RUN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        assert lock_as_writer(self.run)
        os.pwrite(self.run, str(os.getpid()).encode(), 0)
        self.map = self.snapshot.map(writable=True)
        self.index = self.snapshot.index()
        self.columns = self.index.data_schema.names
        self.files, self.numbers = self.index.numbers("file"), self.index.numbers("row_group")
        self.order: list[int] = []  # the row groups that were fetched
        self.is_stalled = threading.Event()

    def _prepare(self) -> ArrivingSnapshot:
        built = self.cache.tmp_dir / "built"
        builder, missing, entries = IndexBuilder(), [], []
        (built / WANTED).mkdir(parents=True)
        for path in self.paths:
            footer = read_footer(self.source / path)
            builder.add(path, *footer)
            data = (self.source / path).read_bytes()
            end = 8 + int.from_bytes(data[-8:-4], "little")
            (built / path).parent.mkdir(parents=True, exist_ok=True)
            with open(built / path, "wb") as file:
                file.seek(len(data) - end)
                file.write(data[-end:])
            size, rows, groups = len(data), footer[0].num_rows, footer[0].num_row_groups
            origin = SourceFile(path, Identity(size, (self.source / path).stat().st_mtime_ns))
            entries.append(FileEntry(path=path, size=size, rows=rows, row_groups=groups, sources=(origin,)))
            missing.append(footer[1].names)
        write_index(with_dictionaries(builder.finish(self.paths), self.source), built / ROW_GROUPS)
        self.manifest = Manifest(files=tuple(entries), created="2026-11-24T00:00:00+00:00", source=str(self.source))
        write_manifest(self.manifest, built / FILES)
        index = ArrivingSnapshot(built).index()
        total = sum(entry.size for entry in entries)
        columns = index.data_schema.names
        chunks = ArrivalMap.create(
            built / ARRIVED,
            files=len(self.paths),
            row_groups=len(index),
            columns=len(columns),
            total_bytes=total,
            boot=boot_id(),
        ).chunks
        for row, file in enumerate(index.numbers("file")):
            chunks[row] = [name not in missing[file] for name in columns]
        for name in (LEASE, RUN):
            (built / name).touch()
        target = self.cache.path / ARRIVING / new_snapshot_id(self.cache)
        target.parent.mkdir(exist_ok=True)
        built.rename(target)
        return ArrivingSnapshot(target)

    def missing(self) -> list[int]:
        """Return the row groups that are not all there, and may come."""
        there = self.map.chunks.all(axis=1) | (self.map.files[self.files] == FileState.CHANGED)
        return [int(row) for row in np.flatnonzero(~there)]

    def fetch(self, row_group: int, columns: tuple[str, ...] | None = None) -> None:
        """Fetch a row group, or some columns of it."""
        path = self.paths[int(self.files[row_group])]
        group = pq.read_metadata(self.source / path).row_group(int(self.numbers[row_group]))
        with open(self.source / path, "rb") as source, open(self.snapshot.path / path, "r+b") as target:
            for number in range(group.num_columns):
                chunk = group.column(number)
                if columns is not None and chunk.path_in_schema.split(".")[0] not in columns:
                    continue
                start = chunk.data_page_offset
                if chunk.has_dictionary_page:
                    start = min(start, chunk.dictionary_page_offset or start)
                data = os.pread(source.fileno(), chunk.total_compressed_size, start)
                os.pwrite(target.fileno(), data, start)
                self.map.arrived_bytes += len(data)
        for position, name in enumerate(self.columns):
            if columns is None or name in columns:
                self.map.chunks[row_group, position] = 1
        self.order.append(row_group)

    def next_wanted(self) -> tuple[int, tuple[str, ...] | None] | None:
        """Return what to fetch next: of what readers want, in turns, urgent things first, else in file order."""
        left = self.missing()
        lists = sorted(read_wanted(self.snapshot.wanted_directory), key=lambda wanted: not wanted.urgent)
        turn = len(self.order) % len(lists) if lists else 0
        for wanted in [*(w for w in lists if w.urgent), *lists[turn:], *lists[:turn]]:
            places = range(len(self.columns)) if wanted.columns is None else map(self.columns.index, wanted.columns)
            positions = list(places)
            for row in wanted.row_groups:
                if int(row) in left and not self.map.has(int(row), positions):
                    return int(row), wanted.columns
        return (left[0], None) if left else None

    def fill(self, delay: float = 0.0, most: int | None = None) -> None:
        """Fetch all row groups, or at most so many, with a pause before each."""
        count = 0
        while (most is None or count < most) and (found := self.next_wanted()) is not None:
            while self.is_stalled.is_set():
                time.sleep(0.01)
            time.sleep(delay)
            if (again := self.next_wanted()) is not None:  # readers may have changed their minds
                found = again
            self.fetch(*found)
            count += 1

    def publish(self, between: Callable[[], None] = lambda: None) -> Path:
        """Complete the files and publish them; ``between`` is called between the steps."""
        entries = []
        for number, entry in enumerate(self.snapshot.manifest().files):
            data = (self.source / entry.path).read_bytes()
            with open(self.snapshot.path / entry.path, "r+b") as file:
                file.write(data)
            self.map.files[number] = FileState.ARRIVED
            checksum = checksum_of(self.snapshot.path / entry.path)
            entries.append(FileEntry(path=entry.path, size=entry.size, rows=entry.rows, row_groups=entry.row_groups,
                                     sources=entry.sources, checksum=checksum))  # fmt: skip
        manifest = Manifest(files=tuple(entries), created="2026-11-24T00:00:00+00:00", source=str(self.source))
        write_manifest(manifest, self.cache.tmp_dir / "manifest")
        os.replace(self.cache.tmp_dir / "manifest", self.snapshot.path / FILES)
        write_summary(manifest, self.snapshot.path / SUMMARY)
        write_checksums(self.snapshot.path)
        self.map.state = ArrivalState.COMPLETE
        between()
        for path in (self.snapshot.path / WANTED).iterdir():
            path.unlink(missing_ok=True)  # a reader that ends removes its own
        (self.snapshot.path / WANTED).rmdir()
        (self.snapshot.path / ARRIVED).unlink()
        between()
        target = self.snapshot.published_path
        self.snapshot.path.rename(target)
        self.map.state = ArrivalState.PUBLISHED
        between()
        (target / RUN).unlink()
        os.symlink(f"snapshots/{target.name}", self.cache.path / "current")
        self.die()
        return target

    def change(self, path: str, reason: str = "changed at the source while it was copied") -> str:
        """Say that a file will never arrive, or with an empty path the snapshot, and why; return the path."""
        if path:
            self.map.files[self.paths.index(path)] = FileState.CHANGED
        (self.snapshot.path / CHANGED).write_text(
            json.dumps({path: [path or str(self.cache.path), reason, "sync again"]})
        )
        return path

    def die(self) -> None:
        """End as a run that is killed."""
        if self.run >= 0:
            os.close(self.run)
        self.run = -1


def publish_copy(source: Path, cache: Path) -> Path:
    """Make ``cache`` a published copy of a local dataset; return it."""
    filler = Filler(source, cache)
    filler.fill()
    filler.publish()
    return cache


class FillingThread(threading.Thread):
    """A thread that fills and publishes, for tests that read meanwhile."""

    def __init__(self, filler: Filler, delay: float, publish: bool = True) -> None:
        super().__init__(daemon=True)
        self.filler, self.delay, self.publish = filler, delay, publish

    def run(self) -> None:
        self.filler.fill(self.delay)
        if self.publish:
            self.filler.publish(lambda: time.sleep(self.delay))


def main() -> None:
    """Fill a cache as standard input says; its options say what goes wrong."""
    job = json.load(sys.stdin)
    options = job["options"]
    if "fail" in options:
        print(json.dumps({"error": [options["fail"], job["source"], "failed as it was asked to", "ask otherwise"]}))
        sys.exit(1)
    if "warn" in options:
        print(json.dumps({"event": "Warned", "message": options["warn"]}), flush=True)
    lock = os.open(Path(job["cache"]).parent / "runs", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(lock, b"x")  # one for each run
    filler = Filler(Path(job["source"]), Path(job["cache"]))
    most = options.get("most")  # row groups, of each run
    filler.fill(float(options.get("delay", 0)), None if most is None else int(most))
    if filler.missing():  # who has waited for it has to have seen that it was at work
        becomes_true(lambda: bool(read_wanted(filler.snapshot.wanted_directory)))
    if "fail_late" in options:
        print(json.dumps({"error": [options["fail_late"], job["source"], "failed late", "free some"]}), flush=True)
        os._exit(1)
    if filler.missing():
        os._exit(9)  # as one that is killed
    filler.publish(lambda: time.sleep(0.01))
    if "warn" in options:
        print(json.dumps({"event": "Warned", "message": "and it has ended"}), flush=True)
    for path in job["files"]:
        os.unlink(path)


if __name__ == "__main__":
    main()
