"""The files of a source's newest partitions, by what the cache holds and its disk has; see `pqcache.store.newest`."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config
from pqcache.store.gc import old_snapshots
from pqcache.store.hive import parent
from pqcache.store.layout import LEASE
from pqcache.store.newest import FREE, FreeSpace, Newest, newest_partitions, parse_newest
from pqcache.store.pins import read_kept
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.listing import Listing
from pqcache.store.sync.safety_checks import WaitRules, files_to_take, wait_rules


@dataclass(frozen=True, kw_only=True)
class NewestRule:
    """What decides on the newest partitions, the same for all listings of a run.

    ``snapshot`` is the one whose directories are held, None where that must not matter: nodes that share a table have
    to take the same partitions, whatever each of them holds. ``free`` is what the disk has, in bytes, and None where
    that does not matter. ``keep`` and ``rewrites`` are as in `FreeSpace`.
    """

    newest: Newest
    waits: WaitRules
    snapshot: Path | None
    free: int | None
    keep: int
    rewrites: bool

    def holds(self, directory: str) -> bool:
        return self.snapshot is not None and directory != "" and os.path.isdir(f"{self.snapshot}/{directory}")


def newest_rule(config: Config, cache: CacheDirectory, current: Snapshot | None) -> NewestRule | None:
    """None if all partitions are taken."""
    if not config.newest:
        return None
    newest = parse_newest(config.newest)
    return NewestRule(
        newest=newest,
        waits=wait_rules(config),
        snapshot=current.path if current is not None and config.shard is None else None,
        free=_free_space(cache, current, config.keep) if newest.text == FREE else None,
        keep=config.keep,
        rewrites=config.row_group_size is not None,
    )


def only_newest(listing: Listing, rule: NewestRule | None, unfit: Collection[str] = ()) -> Listing:
    """Return a listing of the newest partitions alone; raises as `newest_partitions`.

    A partition that has to wait, and is not held, leaves none out before it is taken itself, nor does one of ``unfit``.
    """
    if rule is None:
        return listing
    sizes: Counter[str] = Counter()
    for file in listing.files:
        sizes[parent(file.path)] += file.identity.size
    ready = {parent(file.path) for file in files_to_take(listing.files, listing.paths, (), rule.waits)}
    waiting = {directory for directory in sizes.keys() - ready if not rule.holds(directory)}
    limit: Newest | FreeSpace = rule.newest
    held: set[str] = set()
    if rule.free is not None:
        held = {directory for directory in sizes if rule.holds(directory)}
        size = sum(sizes[directory] for directory in held)
        limit = FreeSpace(free=rule.free, held=size, keep=rule.keep, rewrites=rule.rewrites)
    found = newest_partitions(sizes, limit, waiting.union(unfit), held)
    files = [file for file in listing.files if parent(file.path) not in found.outside]
    return replace(listing, files=files, newest=found)


def _free_space(cache: CacheDirectory, current: Snapshot | None, keep: int) -> int:
    """Bytes that a run may use, and those that the next runs will free.

    They are those that are free, the downloads of dead runs, which are taken over, and the files that only the older of
    the ``keep`` newest snapshots have. What readers keep beyond these is not free.
    """
    place = cache.path
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    left = _files(cache.tmp_dir.glob("*/fetch"))
    free += sum(_bytes(status) for status in left if status.st_nlink == 1)
    if current is None or keep == 1:
        return free
    older = [snapshot.path for snapshot in old_snapshots(cache, current)][1 - keep :]
    pinned = [cache.snapshots_dir / snapshot for snapshot in read_kept(cache.path).pins]
    if (served := cache.current()) is not None and served != current:  # of a run that starts from a candidate
        pinned.append(served.path)
    kept = {status.st_ino: _bytes(status) for status in _files(older)}
    shared = {status.st_ino for status in _files([current.path, *pinned])}
    return free + sum(size for inode, size in kept.items() if inode not in shared)


def _files(directories: Iterable[Path]) -> Iterator[os.stat_result]:
    """Status of each file below ``directories``, except for metadata, which each snapshot needs anew."""
    for top in directories:
        for directory, below, names in os.walk(top):
            below[:] = [name for name in below if name != parent(LEASE)]
            for name in names:
                with suppress(FileNotFoundError):  # a dry run, while another run is at work
                    yield os.lstat(os.path.join(directory, name))


def _bytes(status: os.stat_result) -> int:
    """Bytes that removing a file frees at least; an incomplete download may have gaps."""
    return min(status.st_size, status.st_blocks * 512)
