"""The file systems that are mounted, from /proc."""

from __future__ import annotations

import os
import re
from functools import lru_cache

_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs"))


def has_stable_inodes(path: str) -> bool:
    """Return whether inode numbers and ctimes are constant on the file system of ``path`` while its files are.

    They do on local file systems. Network and FUSE file systems may make them up; an unknown one counts as such.
    """
    return file_system_type(path) in _LOCAL


def file_system_type(path: str) -> str:
    """Return the type of the file system of ``path``, like ``ext4``; empty where it is not known."""
    real, found = os.path.realpath(path), ("", "")
    for _, point, kind in _mounts():
        if len(point) >= len(found[0]) and f"{real}/".startswith(f"{point.rstrip('/')}/"):
            found = point, kind  # the last one of a mount point covers the others
    return found[1]


@lru_cache
def has_lasting_inodes(device: int) -> bool:
    """Return whether files of a device keep their inode numbers; FUSE may give them new ones at any time."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return not any(mounted == number and kind.startswith("fuse") for mounted, _, kind in _mounts())


def _mounts() -> list[tuple[str, str, str]]:
    """Return the device, the mount point and the type of each mount, in order; none where /proc does not say."""
    found = []
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                device, _, point = left.split(" ")[2:5]
                point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)
                found.append((device, point, right.split(" ")[0]))
    except (OSError, ValueError):
        return []
    return found
