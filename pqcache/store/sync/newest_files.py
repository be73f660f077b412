"""The files of a source's newest partitions, for ``--newest``: what the cache holds and the disk has decides with it.

With ``--newest free`` the bytes at the source count as if each took as much on the disk. Partitions that the cache
holds need no space. Others are added while a fifth of what is free and held together remains free, of which a sync that
rewrites files uses half, because their input is on the disk too. Held ones are left out when less than a tenth is
free. Between the two, new partitions take the place of old ones: so the free space may vary from run to run, and there
is space for one run's changes beside what older snapshots hold.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config
from pqcache.store.hive import parent
from pqcache.store.newest import FREE, Newest, newest_partitions, parse_newest
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.listing import Listing
from pqcache.store.sync.safety_checks import WaitRules, files_to_take, wait_rules

_ADD, _REMOVE = 5, 10  # partitions are added down to a fifth free, and removed below a tenth


@dataclass(frozen=True, kw_only=True)
class NewestRule:
    """What decides on the newest partitions, the same for all listings of a run.

    ``held`` is the snapshot whose directories are held, None where that must not matter: nodes that share a table have
    to take the same partitions, whatever each of them holds. ``free`` is in bytes, 0 unless it is needed.
    """

    newest: Newest
    waits: WaitRules
    held: Path | None
    free: int
    rewrites: bool

    def holds(self, directory: str) -> bool:
        """Return whether the current snapshot has files of a partition directory."""
        return self.held is not None and directory != "" and os.path.isdir(f"{self.held}/{directory}")


def newest_rule(config: Config, cache: CacheDirectory, current: Snapshot | None) -> NewestRule | None:
    """Return the rule for a run on ``cache``, whose snapshot is ``current``; None where all partitions are taken."""
    if not config.newest:
        return None
    newest = parse_newest(config.newest)
    return NewestRule(
        newest=newest,
        waits=wait_rules(config),
        held=current.path if current is not None and config.shard is None else None,
        free=_free_space(cache) if newest.text == FREE else 0,
        rewrites=config.row_group_size is not None,
    )


def only_newest(listing: Listing, rule: NewestRule | None, source: str) -> Listing:
    """Return a listing of the newest partitions alone; raises as `newest_partitions`.

    A partition that has to wait, and is not held, does not count: it leaves none out before it is taken itself.
    """
    if rule is None:
        return listing
    sizes: Counter[str] = Counter()
    for file in listing.files:
        sizes[parent(file.path)] += file.identity.size
    ready = {parent(file.path) for file in files_to_take(listing.files, listing.paths, (), rule.waits)}
    waiting = {directory for directory in sizes.keys() - ready if not rule.holds(directory)}
    newest = rule.newest
    if newest.text == FREE:
        held = sum(size for directory, size in sizes.items() if rule.holds(directory))
        newest = replace(newest, size=allowance(rule.free, held, rule.rewrites))
    found = newest_partitions(sizes, newest, waiting, source)
    files = [file for file in listing.files if parent(file.path) not in found.outside]
    return replace(listing, files=files, newest=found)


def allowance(free: int, held: int, rewrites: bool) -> int:
    """Return how many bytes ``--newest free`` takes, with so many bytes free and so many of the source's held.

    >>> allowance(1000, 0, False), allowance(1000, 0, True), allowance(150, 850, False), allowance(50, 950, False)
    (800, 400, 850, 900)
    """
    total = free + held
    more, fewer = free - total // _ADD, total // _REMOVE - free
    return held + max(0, more) // (2 if rewrites else 1) - max(0, fewer)


def _free_space(cache: CacheDirectory) -> int:
    """Return the bytes that a run may use: those free, and the downloads of dead runs, which are taken over."""
    place = cache.path
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    for path in cache.tmp_dir.glob("*/fetch/*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # the run that it belongs to is at work, and this one is a dry run
            continue
        free += status.st_blocks * 512 if status.st_nlink == 1 else 0  # others are files of a snapshot
    return free
