"""The file systems that are mounted, from /proc."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs"))


def has_stable_inodes(path: str) -> bool:
    """Return whether inode numbers and ctimes are constant on the file system of ``path`` while its files are.

    They do on local file systems. Network and FUSE file systems may make them up; an unknown one counts as such.
    """
    return file_system_type(path) in _LOCAL


def file_system_type(path: str) -> str:
    """Return the type of the file system of ``path``, like ``ext4``; empty where it is not known."""
    real, found = os.path.realpath(path), ("", "")
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split(" ")[4])
                if len(point) >= len(found[0]) and f"{real}/".startswith(f"{point.rstrip('/')}/"):
                    found = point, right.split(" ")[0]  # the last one of a mount point covers the others
    except (OSError, IndexError):
        return ""
    return found[1]


@lru_cache
def has_lasting_inodes(device: int) -> bool:
    """Return whether files of a device keep their inode numbers; FUSE may give them new ones at any time."""
    place = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return True
    kinds = [line.partition(" - ")[2].split(" ")[0] for line in mounts if place in line.split(" ", 4)[2:3]]
    return not any(kind.startswith("fuse") for kind in kinds)
