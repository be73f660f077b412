"""A cache directory: its layout, the current snapshot, the lock, leases, publishing and cleaning.

    CACHE/
      CACHEDIR.TAG  pqcache.toml  lock  history.jsonl.zst
      current -> snapshots/20261120T040003Z-0007
      snapshots/20261120T040003Z-0007/
        dt=2026-11-19/part-00000.parquet
        _pqcache/files.arrow  row_groups.arrow  summary.json  checksums.json  lease
      tmp/

A snapshot is built in ``tmp/``, renamed into ``snapshots/`` and then ``current`` is swapped, so that every
instant shows one whole snapshot or another. Nothing in a published snapshot is ever edited.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqcache.errors import CacheError, CacheLocked, DamagedError, UsageError
from pqcache.store.drivers.base import local_path, url_scheme
from pqcache.system.checksum import checksum_of, is_true
from pqcache.system.disk import fsync_path, fsync_tree, make_directory, remove_tree, replace_symlink, write_durably

if TYPE_CHECKING:
    import pyarrow as pa

    from pqcache.reader.selection.selection import SelectedRows
    from pqcache.reader.selection.sequences import Sequence as SequenceOf
    from pqcache.store.manifest import Manifest
    from pqcache.store.row_group_index import Index

_PUBLISHING = 60.0  # seconds that a run may take between a snapshot's rename and the swap of current, generously
FILES = "_pqcache/files.arrow"
ROW_GROUPS = "_pqcache/row_groups.arrow"
LEASE = "_pqcache/lease"
SUMMARY = "_pqcache/summary.json"
CHECKSUMS = "_pqcache/checksums.json"
CONFIG = "pqcache.toml"
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A pqcache: a copy of a source.\n"


@dataclass(frozen=True)
class Snapshot:
    """One immutable, published version of a dataset."""

    path: Path

    @property
    def id(self) -> str:
        """The snapshot's name: when it was published and its number, ``20261120T040003Z-0007``."""
        return self.path.name

    @property
    def number(self) -> int:
        """The snapshot's number, which grows even where the clock steps back."""
        number = self.id.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    def manifest(self) -> Manifest:
        """Return the list of files and where each came from."""
        from pqcache.store.manifest_file import read_manifest  # and pyarrow, which much can be done without

        return read_manifest(self.path / FILES)

    def index(self) -> Index:
        """Return the row-group index, memory-mapped."""
        from pqcache.store.row_group_index import read_index  # as above

        return read_index(self.path / ROW_GROUPS)

    def whole_manifest(self) -> Manifest:
        """Return the manifest after comparing it with its checksum; damage raises DamagedError."""
        self.check(FILES)
        return self.manifest()

    def whole_index(self) -> Index:
        """Return the index after comparing it with its checksum; damage raises DamagedError."""
        self.check(ROW_GROUPS)
        return self.index()

    def check(self, name: str) -> bool:
        """Compare the manifest, the index or the summary with its checksum; damage raises DamagedError.

        Return whether a checksum is recorded: snapshots from before there were any have none.
        """
        checksums, path = self.path / CHECKSUMS, self.path / name
        try:
            recorded = json.loads(checksums.read_bytes())[name]
            if is_true(recorded, path):
                return True
        except FileNotFoundError as error:
            if error.filename == str(checksums):
                return False
            raise DamagedError(f"{path}: is missing; the next sync makes it anew") from error
        except PermissionError as error:
            raise CacheError(f"{error.filename or path}: permission denied; make it readable for this user") from error
        except KeyError as error:
            raise DamagedError(f"{checksums}: says nothing of {name}; the next sync makes it anew") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DamagedError(f"{checksums}: cannot be read ({error}); the next sync makes it anew") from error
        raise DamagedError(f"{path}: is not as it was written; the next sync makes it anew")

    def lease(self) -> Lease:
        """Keep this snapshot from being cleaned away until the lease is closed or the process ends."""
        return Lease(self)


class Lease:
    """A shared lock on a snapshot; the kernel drops it when the process ends, however it ends."""

    def __init__(self, snapshot: Snapshot) -> None:
        try:
            self._file = (snapshot.path / LEASE).open("rb")
        except OSError as error:
            raise CacheError(
                f"{snapshot.path}: the snapshot is gone ({error.strerror}); open the cache again"
            ) from error
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:  # gc may have moved it away between open and flock
            current = os.stat(snapshot.path / LEASE)
        except OSError:
            current = None
        if current is None or current.st_ino != os.fstat(self._file.fileno()).st_ino:
            self._file.close()
            raise CacheError(f"{snapshot.path}: the snapshot was just cleaned away; open the cache again")

    def close(self) -> None:
        """Give the lease back."""
        self._file.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_checksums(snapshot: Path) -> None:
    """Record the checksums of a new snapshot's manifest, index and summary; the caller makes them durable."""
    found = {name: checksum_of(snapshot / name) for name in (FILES, ROW_GROUPS, SUMMARY)}
    (snapshot / CHECKSUMS).write_text(json.dumps(found) + "\n")


@dataclass(frozen=True)
class Cache:
    """One local directory that holds one dataset."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Cache:
        """Open an existing cache; a directory that is none raises CacheError.

        >>> cache = Cache.open("cache/shop")
        >>> len(cache.snapshots()), cache.current() == cache.snapshot()
        (1, True)
        """
        cache = Cache(cache_path(path))
        if not cache.exists():
            raise CacheError(f"{path}: not a pqcache; make one with 'pqcache sync SOURCE {path}'")
        return cache

    def exists(self) -> bool:
        """Return whether this directory is a cache, published or not."""
        return (self.path / CONFIG).is_file()

    @property
    def snapshots_dir(self) -> Path:
        return self.path / "snapshots"

    @property
    def tmp_dir(self) -> Path:
        return self.path / "tmp"

    def current(self) -> Snapshot | None:
        """Return the published snapshot, or None while there is none."""
        try:
            target = os.readlink(self.path / "current")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(
                f"{self.path}/current: not a link to a snapshot ({error.strerror}); "
                "restore it or sync into a new directory"
            ) from error
        snapshot = Snapshot(self.snapshots_dir / Path(target).name)
        if snapshot.path.is_symlink():
            raise CacheError(f"{snapshot.path}: is a symbolic link; a cache lives in one directory")
        if not (snapshot.path / FILES).is_file():
            raise DamagedError(
                f"{self.path}/current points at {target}, which is not a snapshot; remove the link and sync again"
            )
        return snapshot

    def snapshots(self) -> list[Snapshot]:
        """Return all published snapshots, oldest first."""
        if not self.snapshots_dir.is_dir():
            return []
        names = (p for p in self.snapshots_dir.iterdir() if not p.is_symlink())
        found = (Snapshot(p) for p in names if (p / FILES).is_file())
        return sorted(found, key=lambda snapshot: (snapshot.number, snapshot.id))

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Return the named snapshot, or the current one; a missing one raises CacheError."""
        if name is None:
            current = self.current()
            if current is None:
                raise CacheError(f"{self.path}: nothing is published yet; run 'pqcache sync {self.path}'")
            return current
        for snapshot in self.snapshots():
            if snapshot.id == name:
                return snapshot
        kept = ", ".join(snapshot.id for snapshot in self.snapshots()) or "none"
        raise CacheError(f"{self.path}: snapshot {name} is not kept any more (kept: {kept})")

    def lease(self) -> tuple[Snapshot, Lease]:
        """Return the current snapshot, leased; one that is replaced meanwhile is tried again."""
        while True:
            snapshot = self.snapshot()
            try:
                return snapshot, snapshot.lease()
            except CacheError:
                if snapshot == self.current():
                    raise

    def batches(
        self,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        memory: str | int = "2GB",
        window: int | None = None,
        lanes: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        start: int = 0,
        snapshot: str | None = None,
        rows: SelectedRows | None = None,
        sequence: SequenceOf | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield an epoch as Arrow record batches, in the order in which ParquetDataset yields its batches.

        For numpy, JAX, TensorFlow or plain Arrow: torch is not imported. Every row comes exactly once per epoch;
        nulls stay nulls, dictionaries are decoded. Batches are made ahead on threads of this process.

        ``columns``       names; None for all. Partition columns are columns.
        ``filters``       a condition on any columns: SQL text, a list as pandas takes it, like
                          ``[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])]``, or a pyarrow expression. What the
                          index does not decide is counted at once, by reading the condition's columns, and
                          remembered with the snapshot. On nulls see docs/loading.md.
        ``batch_size``    rows of a batch; the epoch's last one may be shorter
        ``shuffle``       False gives the rows in the order of the files
        ``seed``, ``epoch``   choose the order; the same two give the same order again
        ``drop_last``     False: ranks are made equal by repeating the epoch's first batches. True: what is left
                          over is dropped.
        ``memory``        bytes that decoded row groups of this rank may take
        ``window``        row groups mixed at a time by each lane; None: what ``memory`` allows, at most 16
        ``lanes``         independent streams of batches; None: one for each rank
        ``num_replicas``, ``rank``   into how many equal parts the epoch is shared, and which one this is: batches
                          number ``rank``, ``rank + num_replicas`` and so on of the whole epoch
        ``start``         the number of the epoch's first batch that is wanted, counted over all ranks: to go on
                          where a run stopped, also with another ``num_replicas`` that divides ``lanes``
        ``snapshot``      the snapshot to read, which stays leased until the epoch ends; None: the current one
        ``rows``          only these rows, of the snapshot that they were looked up in (None: all); with ``filters``,
                          those of them that satisfy it
        ``sequence``      a ``Sequence``: samples of several consecutive rows in place of single rows.
                          ``batch_size`` then counts sequences, and columns are lists of fixed size

        >>> batches = Cache.open("cache/shop").batches(["id", "price"], batch_size=128, seed=7)
        >>> [batch.num_rows for batch in batches]
        [128, 128, 128, 128, 88]

        Options that make no sense raise UsageError at once, a cache without that snapshot raises CacheError;
        files that are gone or damaged raise ParquetError by name while iterating.
        """
        from pqcache.reader.epoch import read_batches  # reads caches, so it cannot be imported from here at first

        return read_batches(
            self.path,
            columns=columns,
            filters=filters,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            memory=memory,
            window=window,
            lanes=lanes,
            num_replicas=num_replicas,
            rank=rank,
            start=start,
            snapshot=snapshot,
            rows=rows,
            sequence=sequence,
        )

    def lookup(self, column: str, values: Any) -> SelectedRows:
        """Return the rows of the current snapshot whose ``column`` has one of ``values``, without scanning.

        ``column`` is one that 'pqcache index' has made a key index of (``a.b`` inside of a struct), or a partition
        column. ``values`` is a value, or a list, numpy or Arrow array of values. The rows can be read with ``read``
        and trained on with ``ParquetDataset(path, rows=...)``.

        Without a key index CacheError names the command that makes one. Values of another type, and None, raise
        UsageError; a damaged key index raises DamagedError.
        """
        from pqcache.store.keys.lookup import lookup  # needs snapshots

        snapshot, lease = self.lease()
        with lease:
            return lookup(snapshot, column, values)

    def read(self, rows: SelectedRows, columns: Sequence[str] | None = None) -> pa.Table:
        """Return ``rows`` as an Arrow table, in the order of the files; only their row groups are decoded.

        ``columns`` are names, None for all. The rows' snapshot is read, also when it is not the current one any more;
        one that is not kept raises CacheError.
        """
        from pqcache.reader.epoch import read_rows  # as above

        return read_rows(self.path, rows, columns)

    def create(self) -> None:
        """Make the directory a cache; a directory with other things in it raises UsageError."""
        if self.exists():
            self.check_layout()
            return
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path}: exists and is not a directory")
        self._check_links()
        ours = {"CACHEDIR.TAG", "lock", "tmp", "snapshots"}
        if self.path.is_dir() and any(entry.name not in ours for entry in self.path.iterdir()):
            raise UsageError(f"{self.path}: not empty and not a pqcache; name a new directory")
        make_directory(self.snapshots_dir)
        make_directory(self.tmp_dir)
        write_durably(self.path / "CACHEDIR.TAG", _TAG, self.tmp_dir)

    def check_layout(self) -> None:
        """Raise CacheError when a part of the cache is a link: nothing is ever written outside of it."""
        self._check_links()
        self.snapshots_dir.mkdir(exist_ok=True)
        self.tmp_dir.mkdir(exist_ok=True)

    def _check_links(self) -> None:
        for name in ("snapshots", "tmp", "lock", CONFIG, "history.jsonl.zst"):
            if (self.path / name).is_symlink():
                raise CacheError(f"{self.path / name}: is a symbolic link; a cache lives in one directory")

    @contextmanager
    def lock(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the cache's lock; raises CacheLocked when another run holds it for ``wait`` seconds."""
        deadline = time.monotonic() + wait
        self.check_layout()
        with (self.path / "lock").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise CacheLocked(
                            f"{self.path}: another run is at work here; wait for it with --wait SECONDS"
                        ) from None
                    time.sleep(min(0.2, max(0.01, wait)))
            yield

    def new_snapshot_id(self, now: datetime | None = None) -> str:
        """Return a name for the next snapshot: the time, and a number that never goes back."""
        moment = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
        return f"{moment}-{max((s.number for s in self.snapshots()), default=0) + 1:04d}"

    def publish(self, built: Path, previous: Snapshot | None) -> Snapshot:
        """Make the snapshot built in ``tmp/`` the current one, in place of ``previous``.

        Every file in it must be durable already; directories are made so here, before the rename that
        makes them visible. Where locks lie, another run may have published meanwhile: that raises CacheLocked.
        """
        (built / LEASE).touch()
        fsync_tree(built)
        if self.current() != previous:
            raise CacheLocked(f"{self.path}: another run has published meanwhile; sync again")
        if previous is not None:
            self._remove_orphans(previous)
        final = self.snapshots_dir / self.new_snapshot_id()
        built.rename(final)
        fsync_path(self.snapshots_dir)
        replace_symlink(self.path / "current", f"snapshots/{final.name}", self.tmp_dir)
        return Snapshot(final)

    def _remove_orphans(self, previous: Snapshot) -> None:
        """Remove what a run left that died before its snapshot became current: it would pass for an old one."""
        for snapshot in self.snapshots():
            if snapshot.number > previous.number and time.time() - snapshot.path.stat().st_mtime > _PUBLISHING:
                self._remove(snapshot)

    def collect(self, keep: int, older_than: float = 0.0) -> list[Snapshot]:
        """Remove all but the newest ``keep`` snapshots, the current one among them; return those removed.

        Leased snapshots stay, and so do those published less than ``older_than`` seconds ago.
        """
        return [snapshot for snapshot in self.collectable(keep, older_than) if self._remove(snapshot)]

    def collectable(self, keep: int, older_than: float = 0.0) -> list[Snapshot]:
        """Return the snapshots that ``collect`` would remove if nobody reads them."""
        current = self.current()
        if current is None:
            return []
        others = [snapshot for snapshot in self.snapshots() if snapshot.number < current.number]
        surplus = others[: max(0, len(others) + 1 - max(1, keep))]
        return [s for s in surplus if time.time() - s.path.stat().st_mtime >= older_than]

    def _remove(self, snapshot: Snapshot) -> bool:
        """Remove a snapshot that nobody reads; the exclusive lock is held until it is out of sight."""
        try:
            file = (snapshot.path / LEASE).open("rb")
        except FileNotFoundError:
            file = None
        try:
            if file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            self.tmp_dir.mkdir(exist_ok=True)
            grave = self.tmp_dir / f"removed-{snapshot.id}-{os.urandom(4).hex()}"
            snapshot.path.rename(grave)
        finally:
            if file is not None:
                file.close()
        remove_tree(grave)
        return True


def cache_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a cache; UsageError of an empty one, or of a URL, which may hold a password."""
    if not os.fspath(path):
        raise UsageError("an empty path; name the directory of a cache")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.]+):/", os.fspath(path))  # Path makes one slash of two
    if scheme:
        raise UsageError(
            f"{scheme[1]}://...: a cache is a local directory; for a first sync name both, URL and directory"
        )
    return Path(path).absolute()


def cache_at(text: str) -> Cache | None:
    """Return the cache at a path or ``file://`` URL, or None where there is none."""
    if url_scheme(text) not in ("", "file"):
        return None
    cache = Cache(Path(local_path(text)).expanduser().absolute())
    return cache if cache.exists() else None
