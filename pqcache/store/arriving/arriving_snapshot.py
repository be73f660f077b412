"""An arriving snapshot: its metadata is complete, and so is each of its files that has appeared.

arriving/ID/                    ID is the one of the snapshot that it becomes
  dt=2026-11-19/part-00000.parquet    there when all of it is there, checked and durable
  _pqcache/files.arrow, row_groups.arrow, lease    as in a snapshot, but for the checksums of files
  _pqcache/wanted/              what readers want next (see `WantedList`)
  _pqcache/run                  the process of the run that fetches it, which holds the lock of `lock_as_writer`
  _pqcache/arrived.jsonl        a line for each file that is there: its path, its checksum, the boot of the machine
  _pqcache/changed.json         why files will never arrive: path to subject, reason and advice of the error; with an
                                empty path, why the run has given up the snapshot
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pqcache.errors import MALFORMED, CacheLocked, PqcacheError, SourceChanged
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.hive import parent
from pqcache.store.layout import ARRIVED, ARRIVING, CHANGED, FILES, PUBLISHING, ROW_GROUPS, RUN, WANTED
from pqcache.store.ownership import file_mode
from pqcache.store.pins import read_kept
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import fsync_path, fsync_tree, read_regular, remove_tree, replace_symlink, write_durably
from pqcache.system.locks import has_writer, user_name

_FEW = 8  # files of a directory that are looked for one by one


@dataclass(frozen=True)
class ArrivingSnapshot(Snapshot):
    """A snapshot that is not published yet; its path is below ``arriving/`` until then."""

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
        """As `errors`, but raises OSError or `MALFORMED` if they cannot be read."""
        try:
            known = json.loads(read_regular(self.path / CHANGED))
        except FileNotFoundError:
            return {}
        return {path: SourceChanged(*about) for path, about in known.items()}

    def give_up(self, error: PqcacheError | None = None, path: str = "") -> None:
        """Say why a file, or with an empty path the snapshot, will never be complete; raises OSError.

        Not for several threads at once.
        """
        about = ("", "", "") if error is None else (error.subject, error.reason, error.advice)
        known = {name: [e.subject, e.reason, e.advice] for name, e in self.errors().items()}
        new = self.path / f"{CHANGED}.new"
        new.write_text(json.dumps({**known, path: list(about)}))
        new.replace(self.path / CHANGED)

    def is_abandoned(self) -> bool:
        """Whether nothing more will arrive."""
        return "" in self.errors()

    def why_abandoned(self) -> str:
        """Subject and reason; empty if the run has not said why."""
        error = self.errors().get("")
        return f"{error.subject}: {error.reason}" if error is not None and error.subject else ""

    def is_being_filled(self) -> bool:
        """Whether a run is fetching it; also False once it is published or removed."""
        return self._run()[0]

    def filled_by(self) -> str:
        """The process that fetches it, like ``process 12 of alice``; empty if unknown."""
        return self._run()[1]

    def _run(self) -> tuple[bool, str]:
        """Whether a run is at work, and which; visible to all who may read the cache."""
        try:
            descriptor = os.open(self.path / RUN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                import logging  # a sync with nothing to do does not need it

                log = logging.getLogger("pqcache.arriving")
                log.debug("%s: whether a run is at work is not known: %s", self.path, error)
            return False, ""
        try:
            if not has_writer(descriptor):
                return False, ""
            process = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            return True, f"process {process} of {user_name(os.fstat(descriptor).st_uid)}" if process.isdigit() else ""
        finally:
            os.close(descriptor)


def find_arriving(cache: CacheDirectory) -> ArrivingSnapshot | None:
    """The newest if killed runs have left others."""
    return next(reversed(arriving_snapshots(cache)), None)


def arriving_snapshots(cache: CacheDirectory) -> list[ArrivingSnapshot]:
    """All, including leftovers of ended runs; oldest first."""
    try:
        found = [ArrivingSnapshot(path) for path in (cache.path / ARRIVING).iterdir() if not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    complete = [s for s in found if all((s.path / name).is_file() for name in (FILES, ROW_GROUPS, ARRIVED))]
    return sorted(complete, key=lambda snapshot: (snapshot.number, snapshot.id))


def publish_arriving(cache: CacheDirectory, arriving: ArrivingSnapshot) -> Snapshot:
    """Make a snapshot that has arrived the current one of a cache that has none, under its own ID.

    All its files and metadata are durable already. From the moment that ``arriving/publishing`` names it, it will be
    published: a run that finds that name goes on where another one was killed.
    """
    fsync_tree(arriving.path)
    if cache.current() is not None:
        raise CacheLocked(cache.path, "another run has published meanwhile", "sync again")
    write_durably(cache.path / PUBLISHING, arriving.id.encode(), cache.tmp_dir, file_mode())
    published = finish_publishing(cache)
    assert published is not None
    return published


def finish_publishing(cache: CacheDirectory) -> Snapshot | None:
    """Publish the snapshot that ``arriving/publishing`` names; None if there is none.

    A rollback of a run that was killed before it wrote its record is recorded too. Readers that find neither
    ``current`` nor an arriving snapshot see by that file that one will be there in a moment.
    """
    if read_kept(cache.path).rollback is not None:
        from pqcache.store.history import finish_rollback  # few runs need it

        finish_rollback(cache)
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
    """Readers may still be writing."""
    trash = cache.tmp_dir / f"removed-wanted-{arriving.id}-{os.urandom(4).hex()}"
    try:
        arriving.wanted_directory.rename(trash)
    except FileNotFoundError:
        return
    try:
        remove_tree(trash)
    except OSError as error:  # a reader that had begun has made a file in it: the end of a run removes the rest
        import logging  # a sync with nothing to do does not need it

        logging.getLogger("pqcache.sync").debug("%s is left for later: %s", trash, error)


def remove_empty(cache: CacheDirectory) -> None:
    """Remove ``arriving/`` unless readers still have abandoned snapshots open there."""
    with suppress(OSError):
        (cache.path / ARRIVING).rmdir()
