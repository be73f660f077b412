"""Make, list and drop the key indexes of a cache; sync and repartition update them from then on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pqcache.errors import DamagedError, UsageError, disk_errors
from pqcache.events import OnEvent, ignore
from pqcache.options import COMMANDS, IndexArguments, Unpack, all_values, documented
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config, write_config
from pqcache.store.history import recorded_run
from pqcache.store.keys.build import build_key_index
from pqcache.store.keys.lookup import check_key_index, columns_indexed, directory_of, field_of
from pqcache.store.layout import ROW_GROUPS
from pqcache.store.ownership import make_directories
from pqcache.store.snapshot import Snapshot, check_not_held
from pqcache.system.disk import discard, fsync_path, limit_modes, remove_tree
from pqcache.system.stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class KeyView:
    """A key index: its column, the type that keys are compared in, rows of the snapshot in it, bytes on disk.

    ``damage`` says why it cannot be used, and is None if it can; then the others are empty.
    """

    column: str
    type: str
    rows: int
    bytes: int
    damage: str | None = None


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """What was built and dropped, and all key indexes that the current snapshot has now."""

    cache: str
    snapshot: str
    built: tuple[str, ...]
    dropped: tuple[str, ...]
    keys: tuple[KeyView, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@documented(IndexArguments, *COMMANDS["index"])
def index(cache: str | os.PathLike[str], *, on_event: OnEvent = ignore, **given: Unpack[IndexArguments]) -> IndexReport:
    """Make key indexes, with which ``Cache.lookup`` finds the rows of a key without scanning.

    The cache remembers them: each snapshot that sync or repartition publish has them too, made from the previous
    one's and from new rows. Without ``keys`` and ``drop`` nothing is done, and the report lists the key indexes.

    Args:
        cache: the cache's directory.
        on_event: called with what happens.
        given: the options, as the table in pqcache.options has them.

    >>> index("cache/shop").keys
    ()

    Raises UsageError, ParquetError, CacheError or CacheLocked; then the key indexes are unchanged.
    """
    watch, options = Stopwatch(), all_values(given, *COMMANDS["index"])
    target, keys, drop = CacheDirectory.open(cache), options.keys, options.drop
    if not (keys or drop):
        snapshot, lease = target.lease()
        with lease:
            return _report(target, snapshot, watch)
    with disk_errors(target.path), recorded_run(target, "index", options.wait, on_event) as record:
        check_not_held(target.path)  # the candidate would not have them
        _remove_left(target.tmp_dir)
        snapshot, config = target.snapshot(), read_config(target.path)
        row_groups = snapshot.checked_index()
        for column in keys:
            field_of(row_groups, column)
        for column in drop:
            if column not in (*config.keys, *columns_indexed(snapshot.path)) or column in keys:
                raise UsageError(f"--drop {column}", f"{target.path} has no key index of it")
        built = [column for column in dict.fromkeys(keys) if not _is_intact(snapshot, column)]
        for column in built:
            scratch = target.tmp_dir / f"keys-{os.getpid()}-{os.urandom(4).hex()}"
            make_directories(scratch)
            try:
                build_key_index(snapshot.path, row_groups, column, scratch, on_event, options.jobs)
                limit_modes(scratch, (snapshot.path / ROW_GROUPS).stat().st_mode)  # as it has values of the files too
                _replace(directory_of(snapshot.path, column), scratch, target)
            finally:
                remove_tree(scratch)
        for column in drop:
            _replace(directory_of(snapshot.path, column), None, target)
        remembered = [column for column in dict.fromkeys([*config.keys, *keys]) if column not in drop]
        remembers = replace(config, keys=tuple(remembered))
        write_config(target.path, remembers)
        report = _report(target, snapshot, watch, built, drop)
        done = {"built": built, "dropped": list(drop), "seconds": watch.seconds}
        record.end({"snapshot": snapshot.id, "published": False, **done}, remembers)
        return report


def _remove_left(tmp: Path) -> None:
    """Remove what dead runs left, but for downloads: the next sync takes those over."""
    for left in tmp.iterdir():
        if not left.is_dir() or left.name.startswith(("keys-", "removed-")):
            discard(left)


def _is_intact(snapshot: Snapshot, column: str) -> bool:
    with suppress(DamagedError):
        check_key_index(directory_of(snapshot.path, column), deep=True)
        return True
    return False


def _replace(place: Path, built: Path | None, cache: CacheDirectory) -> None:
    """Move a complete, durable key index to its place; None only removes the old one."""
    make_directories(place.parent)
    if place.exists():
        trash = cache.tmp_dir / f"removed-{os.urandom(8).hex()}"
        place.rename(trash)
        remove_tree(trash)
    if built is not None:
        built.rename(place)
    fsync_path(place.parent)
    fsync_path(place.parent.parent)


def _report(
    cache: CacheDirectory, snapshot: Snapshot, watch: Stopwatch, built: Sequence[str] = (), dropped: Sequence[str] = ()
) -> IndexReport:
    keys = []
    for column in sorted({*columns_indexed(snapshot.path), *read_config(cache.path).keys}):
        try:
            known = check_key_index(directory_of(snapshot.path, column))
            kind = str(known.field.type).removeprefix("large_")
            keys.append(KeyView(column=column, type=kind, rows=known.rows, bytes=known.size))
        except DamagedError as error:
            keys.append(KeyView(column=column, type="", rows=0, bytes=0, damage=str(error)))
    return IndexReport(
        cache=str(cache.path),
        snapshot=snapshot.id,
        built=tuple(built),
        dropped=tuple(dropped),
        keys=tuple(keys),
        seconds=watch.seconds,
    )
