"""Which files of a snapshot a run cannot use: those that are damaged, and those that others can change."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from pqcache.store.hive import parent
from pqcache.store.manifest import FileEntry
from pqcache.store.ownership import is_own, is_trusted_cache
from pqcache.store.snapshot import Snapshot


def find_damaged(snapshot: Snapshot, entries: Sequence[FileEntry]) -> frozenset[str]:
    """Return the paths of entries that are missing, of another size than recorded, or reached by a link."""
    return find_unusable(snapshot, entries)[0]


def find_unusable(snapshot: Snapshot, entries: Sequence[FileEntry]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of damaged entries, as `find_damaged`, and of those that others can change.

    These are the ones that others than trusted users own, can write to, or can replace.
    """
    root, trusted = str(snapshot.path), is_trusted_cache(snapshot.path.parent.parent)
    known: dict[str, tuple[bool, bool]] = {"": (True, True)}  # of directories: whether they are real, and ours
    damaged, foreign = set(), set()

    def look_at(directory: str) -> tuple[bool, bool]:
        if directory not in known:
            real, ours = look_at(parent(directory))
            try:
                status = os.lstat(f"{root}/{directory}")
            except OSError:  # what is missing is nobody's
                known[directory] = real, ours
            else:
                known[directory] = real and not stat.S_ISLNK(status.st_mode), ours and (trusted or is_own(status))
        return known[directory]

    for entry in entries:
        real, ours = look_at(parent(entry.path))
        try:
            status = os.lstat(f"{root}/{entry.path}")
        except OSError:
            damaged.add(entry.path)
        else:
            if not (real and stat.S_ISREG(status.st_mode) and status.st_size == entry.size):
                damaged.add(entry.path)
            if not (ours and (trusted or is_own(status))):
                foreign.add(entry.path)
    return frozenset(damaged), frozenset(foreign)
