"""An arriving snapshot: its metadata is complete, and so is every file that exists.

arriving/ID/                    ID is the one of the snapshot that it becomes
  dt=2026-11-19/part-00000.parquet    exists once it is complete, checked and durable
  _pqcache/files.arrow, row_groups.arrow, lease    as in a snapshot, but without checksums of files
  _pqcache/wanted/              two files for each reader: NAME.reader, which it keeps locked while it lives, and
                                NAME.wanted, its next files: a line of JSON, and their numbers in the index as int32
  _pqcache/run                  the process of the run that fetches it, which holds the lock of `lock_as_writer`
  _pqcache/arrived.jsonl        a line for each file that is there: its path, its checksum, the boot of the machine
  _pqcache/changed.json         why files will never arrive: path to subject, reason and advice of the error; with an
                                empty path, why the run has given up the snapshot
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.errors import MALFORMED, CacheLocked, PqcacheError, SourceChanged
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.layout import ARRIVED, ARRIVING, CHANGED, FILES, PUBLISHING, ROW_GROUPS, RUN, WANTED
from pqcache.store.ownership import file_mode
from pqcache.store.partition_paths import parent
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import (
    fsync_path,
    fsync_tree,
    open_plain,
    read_regular,
    remove_tree,
    replace_symlink,
    write_durably,
)
from pqcache.system.locks import has_writer, open_to_lock, try_lock, user_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_FEW = 8  # files of a directory that are looked for one by one


@dataclass(frozen=True)
class ArrivingSnapshot(Snapshot):
    """A snapshot that isn't published yet, below ``arriving/``."""

    @property
    def published_path(self) -> Path:
        return self.path.parent.parent / "snapshots" / self.id

    @property
    def wanted_directory(self) -> Path:
        return self.path / WANTED

    def arrived(self, paths: Iterable[str]) -> set[str]:
        by_directory: dict[str, list[str]] = {}
        for path in paths:
            by_directory.setdefault(parent(path), []).append(path)
        found: set[str] = set()
        for directory, wanted in by_directory.items():
            if len(wanted) <= _FEW:
                found.update(path for path in wanted if os.path.exists(f"{self.path}/{path}"))
            elif os.path.isdir(self.path / directory):
                names = set(os.listdir(self.path / directory))
                found.update(path for path in wanted if path.rpartition("/")[2] in names)
        return found

    def errors(self) -> dict[str, SourceChanged]:
        """Why files will never arrive, by path; under an empty path, why the run gave up."""
        try:
            return self.read_errors()
        except (OSError, *MALFORMED):
            return {"": SourceChanged("", "", "")}

    def read_errors(self) -> dict[str, SourceChanged]:
        """Like `errors`, but raises OSError or `MALFORMED` if they can't be read."""
        try:
            known = json.loads(read_regular(self.path / CHANGED))
        except FileNotFoundError:
            return {}
        return {path: SourceChanged(*about) for path, about in known.items()}

    def give_up(self, error: PqcacheError | None = None, path: str = "") -> None:
        """Record why a file, or with an empty path the snapshot, will never be complete; raises OSError.

        Not thread-safe.
        """
        about = ("", "", "") if error is None else (error.subject, error.reason, error.advice)
        known = {name: [e.subject, e.reason, e.advice] for name, e in self.errors().items()}
        new = self.path / f"{CHANGED}.new"
        new.write_text(json.dumps({**known, path: list(about)}))
        new.replace(self.path / CHANGED)

    def is_abandoned(self) -> bool:
        """Whether nothing more will arrive."""
        return "" in self.errors()

    def is_being_filled(self) -> bool:
        """Whether a run is fetching it; also False once it is published or removed."""
        return self._run()[0]

    def filled_by(self) -> str:
        """The process that fetches it, like ``process 12 of alice``; empty if unknown."""
        return self._run()[1]

    def _run(self) -> tuple[bool, str]:
        """Whether a run is at work, and which one; visible to all users who may read the cache."""
        try:
            descriptor = os.open(self.path / RUN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _debug("%s: whether a run is at work is not known: %s", self.path, error)
            return False, ""
        try:
            if not has_writer(descriptor):
                return False, ""
            process = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            return True, f"process {process} of {user_name(os.fstat(descriptor).st_uid)}" if process.isdigit() else ""
        finally:
            os.close(descriptor)


def find_arriving(cache: CacheDirectory) -> ArrivingSnapshot | None:
    """The arriving snapshot, or the newest of several left by killed runs."""
    return next(reversed(arriving_snapshots(cache)), None)


def arriving_snapshots(cache: CacheDirectory) -> list[ArrivingSnapshot]:
    """All arriving snapshots, including leftovers of ended runs; oldest first."""
    try:
        found = [ArrivingSnapshot(path) for path in (cache.path / ARRIVING).iterdir() if not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    complete = [s for s in found if all((s.path / name).is_file() for name in (FILES, ROW_GROUPS, ARRIVED))]
    return sorted(complete, key=lambda snapshot: (snapshot.number, snapshot.id))


def publish_arriving(cache: CacheDirectory, arriving: ArrivingSnapshot) -> Snapshot:
    """Make a complete snapshot the current one of a cache without one, under its own ID.

    All its files and metadata are durable already. Once ``arriving/publishing`` names it, it will be published: a run
    that finds the name completes what a killed run began.
    """
    fsync_tree(arriving.path)
    if cache.current() is not None:
        raise CacheLocked(cache.path, "another run has published meanwhile", "sync again")
    write_durably(cache.path / PUBLISHING, arriving.id.encode(), cache.tmp_dir, file_mode())
    published = finish_publishing(cache)
    assert published is not None
    return published


def finish_publishing(cache: CacheDirectory) -> Snapshot | None:
    """Publish the snapshot named in ``arriving/publishing``; None without one.

    The file also tells readers that find neither ``current`` nor an arriving snapshot to wait a moment.
    """
    try:
        name = Path(read_regular(cache.path / PUBLISHING).decode()).name
    except FileNotFoundError:
        return None
    arriving, final = ArrivingSnapshot(cache.path / ARRIVING / name), cache.snapshots_dir / name
    if not final.exists() and arriving.path.is_dir():
        _remove_wanted(cache, arriving)
        for left in (CHANGED, RUN, ARRIVED):
            (arriving.path / left).unlink(missing_ok=True)
        fsync_path((arriving.path / ARRIVED).parent)
        arriving.path.rename(final)
        fsync_path(cache.snapshots_dir)
    if final.is_dir() and cache.current() is None:
        replace_symlink(cache.path / "current", f"snapshots/{name}", cache.tmp_dir)
    (cache.path / PUBLISHING).unlink()
    remove_empty(cache)
    return Snapshot(final) if final.is_dir() else None


def _remove_wanted(cache: CacheDirectory, arriving: ArrivingSnapshot) -> None:
    """Remove wishes, while readers may still write some."""
    trash = cache.tmp_dir / f"removed-wanted-{arriving.id}-{os.urandom(4).hex()}"
    try:
        arriving.wanted_directory.rename(trash)
    except FileNotFoundError:
        return
    try:
        remove_tree(trash)
    except OSError as error:  # a reader that had begun has made a file in it: the end of a run removes the rest
        _debug("%s is left for later: %s", trash, error)


def remove_empty(cache: CacheDirectory) -> None:
    """Remove ``arriving/`` unless readers have abandoned snapshots open there."""
    with suppress(OSError):
        (cache.path / ARRIVING).rmdir()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Files that a reader wants, in order, by their positions in the index; ``urgent`` if it is waiting."""

    files: npt.NDArray[np.int64]
    urgent: bool = False


class WantedList:
    """A reader's wishes, in a file that the run ignores once the reader's process has ended.

    A reader without write permission has no wishes, and gets files in the order of the others.
    """

    def __init__(self, directory: Path) -> None:
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._wanted, self._reader = directory / f"{name}.wanted", directory / f"{name}.reader"
        self._descriptor = -1
        try:
            self._descriptor = open_plain(self._reader, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode())
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:  # published meanwhile, or another user's cache
            _debug("%s: what this process reads is not fetched first: %s", directory, error)

    def replace(self, wanted: Wanted) -> None:
        if self._descriptor < 0:
            return
        import numpy as np

        data = json.dumps({"urgent": wanted.urgent}).encode() + b"\n" + np.asarray(wanted.files, "<i4").tobytes()
        new = self._wanted.with_suffix(".new")
        try:
            new.write_bytes(data)
            os.replace(new, self._wanted)
        except OSError as error:
            _debug("%s: what this process reads is not fetched first: %s", self._wanted.parent, error)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        for path in (self._wanted, self._reader):
            with suppress(OSError):
                path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


class WantedLists:
    """The wishes of all living readers; unchanged lists aren't read again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, tuple[tuple[int, int], Wanted]] = {}

    def read(self) -> list[Wanted]:
        """One item per reader, the same object if unchanged; removes the files of dead readers."""
        found: dict[Path, tuple[tuple[int, int], Wanted]] = {}
        for path in sorted(self._directory.glob("*.wanted")):
            if not _is_alive(path.with_suffix(".reader")):
                for left in (path, path.with_suffix(".reader"), path.with_suffix(".new")):
                    with suppress(OSError):
                        left.unlink()
                continue
            try:
                status = os.stat(path, follow_symlinks=False)
                version = status.st_ino, status.st_mtime_ns
                known = self._known.get(path)
                found[path] = known if known is not None and known[0] == version else (version, _read(path))
            except (OSError, ValueError, KeyError, TypeError) as error:  # replaced or removed meanwhile
                _debug("%s is passed over: %s", path, error)
        self._known = found
        return self.known

    @property
    def known(self) -> list[Wanted]:
        return [wanted for _, wanted in self._known.values()]


def _read(path: Path) -> Wanted:
    import numpy as np

    line, _, numbers = read_regular(path).partition(b"\n")
    about = json.loads(line)
    return Wanted(files=np.frombuffer(numbers, "<i4").astype(np.int64), urgent=about["urgent"] is True)


def _is_alive(reader: Path) -> bool:
    """Whether a process is alive; those of other users that can't be examined count as alive."""
    try:
        descriptor = open_to_lock(reader)
    except PermissionError as error:
        _debug("%s is taken for alive: %s", reader, error)
        return True
    except OSError:
        return False
    try:
        return try_lock(descriptor, exclusive=True) is not True
    finally:
        os.close(descriptor)


def _debug(message: str, *values: object) -> None:
    import logging  # a sync with nothing to do does not need it

    logging.getLogger("pqcache.arriving").debug(message, *values)
