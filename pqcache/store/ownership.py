"""Trusted users: commands that write to a cache, or believe its ``pqcache.toml``, refuse it if others can change it.

Otherwise links and URLs planted by others would be followed, removed, published or contacted with the rights of this
user. Reading somebody's cache needs no such trust. This user and root are trusted, and the users or directories named
by two environment variables, as anyone could change a setting inside the cache:

- ``PQCACHE_TRUSTED_GROUPS``: names or numbers of groups, with commas. Their members may own the cache and write to it.
- ``PQCACHE_TRUSTED_CACHES``: directories, with colons. They are not checked.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path

from pqcache.errors import CacheError
from pqcache.store.layout import (
    ARRIVING,
    CHECKSUMS,
    CONFIG,
    FILES,
    HISTORY,
    LOCK,
    MEMO,
    ROW_GROUPS,
    SUMMARY,
)
from pqcache.store.urls import quoted
from pqcache.system.locks import user_name

GROUPS = "PQCACHE_TRUSTED_GROUPS"
CACHES = "PQCACHE_TRUSTED_CACHES"


def check_ownership(cache: Path) -> None:
    """Raise CacheError, with a command to correct it, if others than trusted users can change a cache.

    Checks the directory, its parts, each snapshot, each run's directory in ``tmp/``, and the metadata of the current
    snapshot, as far as they exist, but not the directories above. A sync checks the files of a snapshot when it
    compares them, and keeps none that others could change.
    """
    if is_trusted_cache(cache):
        return
    metadata = [cache / "current" / name for name in ("_pqcache", CHECKSUMS, FILES, ROW_GROUPS, SUMMARY)]
    for path in (cache, cache / CONFIG, cache / "snapshots", cache / "tmp", cache / ARRIVING, *metadata):
        if path.is_symlink():
            _check_owner(path, os.lstat(path), cache)
        if path.exists():
            status = path.stat()
            _check_owner(path, status, cache)
            _check_writers(path, status, cache)
    for name in (LOCK, HISTORY, MEMO, "current"):
        if os.path.lexists(cache / name):
            status = os.lstat(cache / name)
            _check_owner(cache / name, status, cache)
            if stat.S_ISREG(status.st_mode) and name != LOCK:  # which has no content
                _check_writers(cache / name, status, cache)
    for name in ("snapshots", "tmp", ARRIVING):
        if (cache / name).is_dir() and os.access(cache / name, os.R_OK | os.X_OK):  # else nothing of it is read
            for entry in list(os.scandir(cache / name)):
                status = entry.stat(follow_symlinks=False)
                _check_owner(Path(entry.path), status, cache)
                if stat.S_ISDIR(status.st_mode):
                    _check_writers(Path(entry.path), status, cache)


def is_trusted(user: int) -> bool:
    """Whether a user is this one, root, or a member of a trusted group."""
    return user in (0, os.geteuid()) or not _trusted_groups().isdisjoint(_groups_of(user) if _trusted_groups() else ())


def is_trusted_cache(cache: Path) -> bool:
    named = os.environ.get(CACHES, "").split(os.pathsep)
    return any(os.path.realpath(path) == os.path.realpath(cache) for path in named if path)


def is_own(status: os.stat_result) -> bool:
    """Whether a file or directory belongs to a trusted user, and others can't write to it."""
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and status.st_uid == os.geteuid():
        return True  # the fast answer for nearly all of what may be a million files
    return is_trusted(status.st_uid) and not _writers(status)


def directory_mode() -> int:
    """The mode of a new directory in a cache, before the umask."""
    return 0o777 if _is_shared() else 0o755


def file_mode() -> int:
    """The mode of a new file in a cache, before the umask."""
    return 0o666 if _is_shared() else 0o644


def private_mode() -> int:
    """The mode of a new directory that only trusted users can enter."""
    return 0o770 if _is_shared() else 0o700


def make_private(file: Path | int) -> None:
    """Revoke the permissions of others on a file or directory of this user."""
    status = os.stat(file)
    if status.st_uid == os.geteuid() and status.st_mode & 0o777 & ~private_mode():
        os.chmod(file, status.st_mode & private_mode())


def make_directories(path: Path) -> None:
    """Make a directory in a cache, with parents, in ``directory_mode``."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(directory_mode(), exist_ok=True)


def _is_shared() -> bool:
    return bool(os.environ.get(GROUPS) or os.environ.get(CACHES))


def _check_owner(path: Path, status: os.stat_result, cache: Path) -> None:
    if is_trusted(status.st_uid):
        return
    reason = f"belongs to {user_name(status.st_uid)}, so its content is not trusted"
    me = user_name(os.geteuid())
    if path.parent == cache / "tmp":
        advice = f"remove it: rm -r {quoted(path)}"
    else:
        advice = f"run this as {user_name(status.st_uid)}, or if you trust its content: chown -R {me} {quoted(cache)}"
    raise CacheError(path, reason, f"{advice}; for a cache that a group shares, set {GROUPS}")


def _check_writers(path: Path, status: os.stat_result, cache: Path) -> None:
    writers = _writers(status)
    if writers:
        advice = f"chmod -R go-w {quoted(cache)}; for a cache that a group shares, set {GROUPS}"
        raise CacheError(path, f"can be written by {writers}, so its content is not trusted", advice)


def _writers(status: os.stat_result) -> str:
    """Untrusted users, beside the owner, with write permission; empty if there are none."""
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    group = status.st_gid
    if status.st_mode & stat.S_IWGRP and group not in _trusted_groups() and not _is_private(group, status.st_uid):
        return f"group {_group_name(group)}"
    return ""


def _trusted_groups() -> frozenset[int]:
    return _parsed_groups(os.environ.get(GROUPS, ""))


@lru_cache
def _parsed_groups(text: str) -> frozenset[int]:
    import grp

    found = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.add(int(name) if name.isdigit() else grp.getgrnam(name).gr_gid)
        except KeyError:
            raise CacheError(f"{GROUPS}={text}", f"there is no group {name!r}", "correct the variable") from None
    return frozenset(found)


@lru_cache
def _groups_of(user: int) -> frozenset[int]:
    import pwd

    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


@lru_cache
def _is_private(group: int, user: int) -> bool:
    """Whether a group has a single member, as many systems, with umask 002, give each user."""
    import grp
    import pwd

    try:
        owner, entry = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    same = owner.pw_gid == group and entry.gr_name == owner.pw_name
    return same and set(entry.gr_mem) <= {owner.pw_name}


def _group_name(group: int) -> str:
    import grp

    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)
