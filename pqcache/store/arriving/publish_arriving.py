"""Publishing of an arriving snapshot: it moves to ``snapshots/`` with its ID, and a killed run's move is finished."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pqcache.errors import CacheLocked
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.layout import ARRIVED, ARRIVING, CHANGED, PUBLISHING, RUN
from pqcache.store.ownership import file_mode
from pqcache.store.pins import read_kept
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import fsync_path, fsync_tree, read_regular, remove_tree, replace_symlink, write_durably


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
