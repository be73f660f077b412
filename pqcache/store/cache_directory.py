"""A cache directory: its layout, current snapshot, lock and leases; publishing and removing snapshots.

    CACHE/
      CACHEDIR.TAG  pqcache.toml  lock  history.jsonl.zst
      current -> snapshots/20261120T040003Z-0007
      snapshots/20261120T040003Z-0007/
        dt=2026-11-19/part-00000.parquet
        _pqcache/files.arrow  row_groups.arrow  summary.json  checksums.json  lease
      arriving/     a snapshot that is read while its files are fetched, see pqcache.store.arriving
      candidate/    a complete snapshot waiting to be published, see pqcache.store.publish
      tmp/

A snapshot is built in ``tmp/`` and renamed into ``snapshots/``, and then ``current`` is swapped, so that readers always
see one complete snapshot. A published snapshot never changes.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.errors import CacheError, CacheLocked, DamagedError, UsageError
from pqcache.events import OnEvent, Warned, ignore
from pqcache.store.layout import (
    ARRIVED,
    ARRIVING,
    CANDIDATE,
    CONFIG,
    FILES,
    HISTORY,
    LOCK,
    MEMO,
    ROW_GROUPS,
    RUNNING,
    SNAPSHOTS,
    UNMET,
)
from pqcache.store.ownership import GROUPS, check_ownership, directory_mode, file_mode, make_private, private_mode
from pqcache.store.snapshot import Lease, Snapshot, read_kept
from pqcache.store.urls import is_local, local_path, quoted
from pqcache.system.disk import fsync_path, make_directory, open_plain, read_regular, replace_symlink, write_durably
from pqcache.system.locks import lock_holder, open_to_lock, try_lock
from pqcache.units import format_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

_WITHOUT_LOCKS = (
    "its file system has no locks: a second run is not noticed until it publishes, and old snapshots are kept, as "
    "their readers are not known; remove those of last week with 'pqcache gc {cache} --older-than 7d'"
)
_OF_CACHES = "not a pqcache but a directory of caches"
_NAMED = 5  # of the caches in a directory
_LOOK = 0.1  # seconds: more than a reader holds the lock to see whether a run is at work
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A pqcache: a copy of a source.\n"
_MADE_FIRST = frozenset(("CACHEDIR.TAG", LOCK, "tmp", "snapshots", ARRIVING, HISTORY, RUNNING))
_ENTRIES = _MADE_FIRST | {CANDIDATE, CONFIG, MEMO, SNAPSHOTS, "current"}
_SNAPSHOT_ID = re.compile(r"\d{8}T\d{6}Z-\d+")


@dataclass(frozen=True)
class CacheDirectory:
    """The directory of a cache: its snapshots, and ways to change them."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open an existing cache; raises CacheError for any other directory.

        >>> cache = CacheDirectory.open("cache/shop")
        >>> len(cache.snapshots()), cache.current() == cache.snapshot()
        (1, True)
        """
        cache = cls(cache_path(path))
        if not cache.exists():
            advice = f"make one with 'pqcache sync SOURCE {quoted(path)}'"
            raise CacheError(path, *(cache.caches_inside() or ("not a pqcache", advice)))
        return cache

    def exists(self) -> bool:
        """Whether this directory is a cache, with a snapshot or without: it was made by ``create`` and has a config.

        A ``pqcache.toml`` of several tables makes it a directory of caches, whatever else it contains.
        """
        config = self.path / CONFIG
        return config.is_file() and self._is_ours() and not has_tables(config)

    def _is_ours(self) -> bool:
        """Whether pqcache made this directory; users may have removed the tag to have it backed up."""
        try:
            if _TAG in read_regular(self.path / "CACHEDIR.TAG"):
                return True
        except OSError:
            pass
        current = self.path / "current"
        return (current.is_symlink() and os.readlink(current).startswith("snapshots/")) or bool(self.snapshots())

    def caches_inside(self) -> tuple[str, str] | None:
        """The reason and advice if a directory of caches was named instead of a cache."""
        try:
            names = sorted(p.name for p in self.path.iterdir() if CacheDirectory(p).exists())
        except OSError:
            return None
        if names:
            return named_caches(names, str(self.path))
        if has_tables(self.path / CONFIG):
            return f"{_OF_CACHES}; none of them is made yet", f"run 'pqcache sync --all {quoted(self.path)}'"
        return None

    def foreign_entries(self) -> list[Path]:
        """Files that don't belong to pqcache, except those in ``tmp``, which each sync empties."""
        found = [path for path in self.path.iterdir() if path.name not in _ENTRIES]
        found += [p for p in self.snapshots_dir.iterdir() if p.is_symlink() or not _SNAPSHOT_ID.fullmatch(p.name)]
        for snapshot in (*self.snapshots(), *self.candidates()):
            try:
                ours = {entry.path for entry in snapshot.manifest().files}
            except DamagedError:  # nobody knows
                continue
            for directory, _, names in os.walk(snapshot.path):
                below = os.path.relpath(directory, snapshot.path)
                if below.partition("/")[0] != "_pqcache":
                    prefix = "" if below == "." else f"{below}/"
                    found += [snapshot.path / f"{prefix}{name}" for name in names if f"{prefix}{name}" not in ours]
        return sorted(found)

    @property
    def snapshots_dir(self) -> Path:
        return self.path / "snapshots"

    @property
    def tmp_dir(self) -> Path:
        return self.path / "tmp"

    def current(self) -> Snapshot | None:
        try:
            target = os.readlink(self.path / "current")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(
                f"{self.path}/current",
                f"not a link to a snapshot ({error.strerror})",
                "restore it or sync into a new directory",
            ) from error
        snapshot = Snapshot(self.snapshots_dir / Path(target).name)
        if snapshot.path.is_symlink():
            raise CacheError(snapshot.path, "is a symbolic link", "a cache lives in one directory")
        if not (snapshot.path / FILES).is_file():
            raise DamagedError(
                f"{self.path}/current", f"points at {target}, which is not a snapshot", "remove the link and sync again"
            )
        return snapshot

    def _run_at_work(self) -> str:
        """The other process that holds the lock; empty if there is none or this user can't see it."""
        try:
            descriptor = open_to_lock(self.path / LOCK)
        except OSError as error:
            import logging  # a sync with nothing to do does not need it

            logging.getLogger("pqcache.store").debug("%s: whether a run is at work is not known: %s", self.path, error)
            return ""
        try:
            is_held = try_lock(descriptor, exclusive=False) is False
            holder = lock_holder(descriptor) or "a process"
            return holder if is_held and not holder.startswith(f"process {os.getpid()} ") else ""
        finally:
            os.close(descriptor)

    def snapshots(self) -> list[Snapshot]:
        return _snapshots_in(self.snapshots_dir)

    def candidates(self) -> list[Snapshot]:
        """The candidate, and candidates replaced by it or by a published snapshot; oldest first."""
        return _snapshots_in(self.path / CANDIDATE)

    def candidate(self) -> Snapshot | None:
        """The snapshot waiting to be published, newer than all published ones."""
        if not (found := self.candidates()):
            return None
        newest = max([read_kept(self.path).last_number, *(snapshot.number for snapshot in self.snapshots())])
        return found[-1] if found[-1].number > newest else None

    def publish_candidate(self, name: str) -> None:
        """Make the candidate of this ID the current snapshot, or complete what a killed run began."""
        waiting, final = self.path / CANDIDATE / name, self.snapshots_dir / name
        if waiting.is_dir():
            (waiting / UNMET).unlink(missing_ok=True)
            waiting.rename(final)
            fsync_path(self.snapshots_dir)
            fsync_path(waiting.parent)
        if final.is_dir():
            replace_symlink(self.path / "current", f"snapshots/{name}", self.tmp_dir)

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Find a snapshot by ID, number, name of a pin or as ``candidate``; by default the current one.

        Raises CacheError if it is missing.
        """
        if name is None:
            current = self.current()
            if current is None:
                holder = self._run_at_work()
                reason = f"nothing is published yet{f', and {holder} is at work here' if holder else ''}"
                advice = "wait for its end" if holder else f"run 'pqcache sync {quoted(self.path)}'"
                if not holder and self.candidate() is not None:
                    advice = f"look at what waits with 'pqcache inspect {quoted(self.path)} --candidate'"
                raise CacheError(self.path, reason, advice)
            return current
        kept, candidate = self.snapshots(), self.candidate()
        if candidate is not None:
            kept.append(candidate)
        for snapshot in kept:
            if snapshot.id == name or (name.isdigit() and snapshot.number == int(name)):
                return snapshot
        if name == CANDIDATE:
            if candidate is None:
                raise CacheError(self.path, "no snapshot waits to be published")
            return candidate
        pins = read_kept(self.path).pins
        for snapshot in kept:
            if name and pins.get(snapshot.id) == name:
                return snapshot
        ids = [f"{s.id} ({pins[s.id]})" if pins.get(s.id) else s.id for s in kept]
        number = Snapshot(Path(name)).number if name[:1].isdigit() else 0  # of an ID or a number, not of a pin
        was_there = 0 < number <= max([read_kept(self.path).last_number, *(s.number for s in kept)])
        reason = f"snapshot {name} was removed" if was_there else f"there is no snapshot {name}"
        raise CacheError(self.path, f"{reason} (kept: {', '.join(ids) or 'none'})")

    def lease(self) -> tuple[Snapshot, Lease]:
        """Lease the current snapshot; tries again if it is replaced meanwhile."""
        while True:
            snapshot = self.snapshot()
            try:
                return snapshot, snapshot.lease()
            except CacheError:
                if snapshot == self.current():
                    raise

    def create(self) -> None:
        """Make the directory a cache; raises like ``check_usable``."""
        self.check_usable()
        if self.exists():
            self.check_layout()
            return
        make_directory(self.path.parent)
        make_directory(self.path, directory_mode())
        make_directory(self.snapshots_dir, directory_mode())
        make_directory(self.tmp_dir, private_mode())
        write_durably(self.path / "CACHEDIR.TAG", _TAG, self.tmp_dir, file_mode())

    def check_usable(self) -> None:
        """Raise UsageError or CacheError unless a run may write here: to a cache, or a directory that can become one.

        The latter are new or empty, or left by a first run that was killed. Nothing else is ever changed.
        """
        if self.exists():
            check_ownership(self.path)
            return
        check_outside_caches(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(self.path, "exists and is not a directory")
        if self.path.is_dir() and not self._can_become_cache():
            reason, _ = self.caches_inside() or ("not empty and not a pqcache", "")
            raise UsageError(self.path, reason, "name a new directory")
        self._check_links()
        try:
            check_ownership(self.path)
        except CacheError as error:  # its advice is for a cache: to change all that is below it
            advice = f"name a new directory; for a cache that a group shares, set {GROUPS}"
            raise CacheError(error.subject, error.reason, advice) from None

    def _can_become_cache(self) -> bool:
        names = {path.name for path in self.path.iterdir()}
        if self._is_ours():
            return names <= _MADE_FIRST
        begun = [path.name for name in names & {"snapshots", "tmp"} for path in (self.path / name).iterdir()]
        return names <= {"snapshots", "tmp"} and all(name.startswith("CACHEDIR.TAG.") for name in begun)

    def check_layout(self) -> None:
        """Raise CacheError if a part of the cache is a link, or if others can change it.

        Nothing is ever written outside a cache. See ``pqcache.store.ownership`` for trusted users.
        """
        self._check_links()
        check_ownership(self.path)
        self.snapshots_dir.mkdir(directory_mode(), exist_ok=True)
        self.tmp_dir.mkdir(private_mode(), exist_ok=True)
        make_private(self.tmp_dir)

    def _check_links(self) -> None:
        for name in ("snapshots", "tmp", ARRIVING, CANDIDATE, LOCK, CONFIG, MEMO, HISTORY, RUNNING, SNAPSHOTS):
            if (self.path / name).is_symlink():
                raise CacheError(f"{self.path / name}", "is a symbolic link", "a cache lives in one directory")

    @contextmanager
    def lock(self, wait: float = 0.0, on_event: OnEvent = ignore) -> Iterator[None]:
        """Hold the cache's lock; raises CacheLocked if another run holds it for ``wait`` seconds.

        Raises CacheError if others can change the cache. A file system without locks is reported as an event.
        """
        deadline = time.monotonic() + max(wait, _LOOK)
        self.check_layout()
        descriptor = self._open_lock()
        try:
            while (held := try_lock(descriptor, exclusive=True)) is False:
                if time.monotonic() >= deadline:
                    holder = lock_holder(descriptor)
                    reason = f"another run is at work here{f' ({holder})' if holder else ''}"
                    if wait:
                        reason = f"{reason}, and has not ended in {format_seconds(wait)}"
                    raise CacheLocked(self.path, reason, "try again later" if wait else "wait for it with --wait 10m")
                time.sleep(min(0.2, max(0.01, wait)))
            if held is None:
                on_event(Warned(f"{self.path}: {_WITHOUT_LOCKS.format(cache=quoted(self.path))}"))
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        """Open the lock; others must not be able to, as they could hold it forever."""
        descriptor = open_plain(self.path / LOCK, os.O_RDWR | os.O_CREAT, private_mode() & 0o666)
        make_private(descriptor)
        return descriptor


def _snapshots_in(directory: Path) -> list[Snapshot]:
    if not directory.is_dir():
        return []
    names = (p for p in directory.iterdir() if not p.is_symlink())
    found = (Snapshot(p) for p in names if _SNAPSHOT_ID.fullmatch(p.name) and (p / FILES).is_file())
    return sorted(found, key=lambda snapshot: (snapshot.number, snapshot.id))


def named_caches(names: list[str], place: str) -> tuple[str, str]:
    """The reason and advice of an error about ``place``, which contains these caches."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{_OF_CACHES}: {', '.join(names[:_NAMED])}{more}", f"name one of them, like {place.rstrip('/')}/{names[0]}"


def advice_for_file(path: Path, elsewhere: str, deep: bool = True) -> str:
    """Advice for a missing file, or with ``deep`` a damaged one; ``elsewhere`` if it isn't in a cache."""
    for above in path.parents:
        cache = above.parent.parent
        if above.parent.name == "snapshots" and CacheDirectory(cache).exists():
            how = "--deep --repair" if deep else "--repair"
            return f"'pqcache verify {quoted(cache)} {how}' fetches it again; then open the dataset again"
    return elsewhere


def check_outside_caches(path: Path) -> None:
    """Raise UsageError for a path in a cache: only pqcache writes there, and a sync may remove it."""
    for above in Path(os.path.realpath(path)).parents:
        if CacheDirectory(above).exists():
            raise UsageError(path, f"lies in the cache {above}", "name a directory outside of it")


def has_tables(config: Path) -> bool:
    """Whether a ``pqcache.toml`` belongs to a directory of caches, in any spelling of ``tables``."""
    try:
        text = config_text(config)
    except (OSError, ValueError):
        return False
    if "tables" not in text and "\\" not in text:  # nearly always: TOML need not be parsed twice
        return False
    try:
        return "tables" in parsed(text)
    except ValueError:  # reading the tables says what is wrong
        return re.search(r"""^\s*\[?\s*["']?tables["']?\s*[.=\]]""", text, re.MULTILINE) is not None


def config_text(path: Path) -> str:
    """Read a config; raises OSError if ``path`` is a link or not a regular file."""
    with open(open_plain(path, os.O_RDONLY), encoding="utf-8") as file:
        return file.read()


def parsed(text: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError if it is malformed."""
    try:
        if sys.version_info >= (3, 11):
            import tomllib

            return tomllib.loads(text)
        import tomlkit

        return tomlkit.parse(text).unwrap()
    except RecursionError:
        raise ValueError("nested too deeply") from None


def cache_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path; raises UsageError if it is empty or a URL, which may hold a password."""
    if not os.fspath(path):
        raise UsageError("", "an empty path", "name the directory of a cache")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.]+):/", os.fspath(path))  # Path makes one slash of two
    if scheme:
        raise UsageError(
            f"{scheme[1]}://...", "a cache is a local directory", "for a first sync name both, URL and directory"
        )
    return Path(path).absolute()


def cache_at(text: str) -> CacheDirectory | None:
    """The cache at a path or ``file://`` URL, or None."""
    if not is_local(text):
        return None
    cache = CacheDirectory(Path(local_path(text)).expanduser().absolute())
    return cache if cache.exists() else None


def is_arriving(directory: Path) -> bool:
    """Whether a snapshot, or a copy of one, is still arriving."""
    return directory.parent.name != "snapshots" and os.path.isfile(directory / ARRIVED)


def snapshot_at(text: str, copies: bool = False) -> tuple[Snapshot, str] | None:
    """The snapshot that contains a path or ``file://`` URL, with links resolved, and the path below it.

    ``CACHE/current`` is the current snapshot. Returns None if the path isn't in a snapshot of a cache, nor, with
    ``copies``, in a copy of one elsewhere. Raises CacheError for a snapshot that is still arriving, or a copy of one,
    as files are missing.
    """
    if not is_local(text):
        return None
    real = Path(os.path.realpath(os.path.expanduser(local_path(text))))
    for path in (real, *real.parents):
        if is_arriving(path):
            raise CacheError(path, "its files are still arriving", "name the cache that it is in, or wait for the run")
        is_in_cache = path.parent.name == "snapshots" and CacheDirectory(path.parent.parent).exists()
        if (copies or is_in_cache) and any((path / name).is_file() for name in (FILES, ROW_GROUPS)):
            below = real.relative_to(path).as_posix()
            return Snapshot(path), "" if below == "." else below
    return None


def lease_at(text: str, copies: bool = False) -> tuple[Snapshot, str, Lease] | None:
    """Like ``snapshot_at``, with a lease; tries again if ``CACHE/current`` is replaced meanwhile."""
    while (found := snapshot_at(text, copies)) is not None:
        try:
            return *found, found[0].lease()
        except CacheError:
            if found == snapshot_at(text, copies):
                raise
    return None
