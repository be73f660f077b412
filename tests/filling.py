"""A small run that fills an arriving snapshot from a local directory, for tests of its readers.

It fetches one file after another, those first that readers want, and can stall, die, lose files and publish. As a
process, ``python -m tests.filling``, it reads what ``pqcache.store.background_run`` reads.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pqcache.errors import SourceChanged
from pqcache.parquet.validation import read_footer
from pqcache.store.arriving import ArrivingSnapshot, WantedLists, find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.layout import ARRIVED, ARRIVING, FILES, LEASE, ROW_GROUPS, RUN, SUMMARY, WANTED
from pqcache.store.manifest import FileEntry, Identity, Manifest, SourceFile, write_summary
from pqcache.store.manifest_file import write_manifest
from pqcache.store.publish import new_snapshot_id
from pqcache.store.row_group_index import IndexBuilder, local_files, with_dictionaries, write_index
from pqcache.store.snapshot import write_checksums
from pqcache.system.disk import checksum_of
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
        self.index = self.snapshot.index()
        self.files = self.index.numbers("file")
        self.order: list[int] = []  # the files that were fetched
        self.is_stalled = threading.Event()

    def _prepare(self) -> ArrivingSnapshot:
        built = self.cache.tmp_dir / "built"
        builder, entries = IndexBuilder(), []
        (built / WANTED).mkdir(parents=True)
        for path in self.paths:
            footer = read_footer(self.source / path)
            builder.add(path, *footer)
            (built / path).parent.mkdir(parents=True, exist_ok=True)
            status, rows, groups = (self.source / path).stat(), footer[0].num_rows, footer[0].num_row_groups
            origin = SourceFile(path, Identity(status.st_size, status.st_mtime_ns))
            entries.append(FileEntry(path=path, size=status.st_size, rows=rows, row_groups=groups, sources=(origin,)))
        write_index(with_dictionaries(builder.finish(self.paths), local_files(self.source)), built / ROW_GROUPS)
        self.manifest = Manifest(files=tuple(entries), created="2026-11-24T00:00:00+00:00", source=str(self.source))
        write_manifest(self.manifest, built / FILES)
        for name in (LEASE, RUN, ARRIVED):
            (built / name).touch()
        target = self.cache.path / ARRIVING / new_snapshot_id(self.cache)
        target.parent.mkdir(exist_ok=True)
        built.rename(target)
        return ArrivingSnapshot(target)

    def missing(self) -> list[int]:
        """Return the files that are not there, and may come."""
        lost, there = self.snapshot.errors(), self.snapshot.arrived(self.paths)
        return [file for file, path in enumerate(self.paths) if path not in there and path not in lost]

    def fetch(self, file: int) -> None:
        """Let a file appear."""
        path = self.paths[file]
        shutil.copyfile(self.source / path, self.cache.tmp_dir / "copy")
        os.replace(self.cache.tmp_dir / "copy", self.snapshot.path / path)
        self.order.append(file)

    def next_wanted(self) -> int | None:
        """Return which file to fetch next: of what readers want, in turns, urgent ones first, else in order."""
        left = self.missing()
        lists = sorted(WantedLists(self.snapshot.wanted_directory).read(), key=lambda wanted: not wanted.urgent)
        turn = len(self.order) % len(lists) if lists else 0
        for wanted in [*(w for w in lists if w.urgent), *lists[turn:], *lists[:turn]]:
            for file in wanted.files.tolist():
                if file in left:
                    return int(file)
        return left[0] if left else None

    def fill(self, delay: float = 0.0, most: int | None = None) -> None:
        """Fetch all files, or at most so many, with a pause before each."""
        count = 0
        while (most is None or count < most) and (found := self.next_wanted()) is not None:
            while self.is_stalled.is_set():
                time.sleep(0.01)
            time.sleep(delay)
            if (again := self.next_wanted()) is not None:  # readers may have changed their minds
                found = again
            self.fetch(found)
            count += 1

    def publish(self, between: Callable[[], None] = lambda: None) -> Path:
        """Complete the files and publish them; ``between`` is called between the steps."""
        entries = []
        for number, entry in enumerate(self.snapshot.manifest().files):
            if not (self.snapshot.path / entry.path).exists():
                self.fetch(number)
            checksum = checksum_of(self.snapshot.path / entry.path)
            entries.append(FileEntry(path=entry.path, size=entry.size, rows=entry.rows, row_groups=entry.row_groups,
                                     sources=entry.sources, checksum=checksum))  # fmt: skip
        manifest = Manifest(files=tuple(entries), created="2026-11-24T00:00:00+00:00", source=str(self.source))
        write_manifest(manifest, self.cache.tmp_dir / "manifest")
        os.replace(self.cache.tmp_dir / "manifest", self.snapshot.path / FILES)
        write_summary(manifest, self.snapshot.path / SUMMARY)
        write_checksums(self.snapshot.path)
        between()
        while (wanted := self.snapshot.path / WANTED).exists():
            shutil.rmtree(wanted, ignore_errors=True)  # readers write and remove their lists meanwhile
        for name in (RUN, ARRIVED):
            (self.snapshot.path / name).unlink()
        between()
        target = self.snapshot.published_path
        self.snapshot.path.rename(target)
        between()
        os.symlink(f"snapshots/{target.name}", self.cache.path / "current")
        self.die()
        return target

    def change(self, path: str, reason: str = "changed at the source while it was copied") -> str:
        """Say that a file will never arrive, or with an empty path the snapshot, and why; return the path."""
        self.snapshot.give_up(SourceChanged(path or str(self.cache.path), reason, "sync again"), path)
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
    most = options.get("most")  # files, of each run
    filler.fill(float(options.get("delay", 0)), None if most is None else int(most))
    if filler.missing():  # who has waited for it has to have seen that it was at work
        becomes_true(lambda: bool(WantedLists(filler.snapshot.wanted_directory).read()))
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
