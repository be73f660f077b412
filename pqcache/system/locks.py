"""File locks, which the kernel releases when their process ends, also for NFS and for systems without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

# EBADF: NFS makes flock a lock of bytes, and an exclusive one needs a descriptor that is open for writing
_NO_LOCKS = {errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}

_LISTINGS = 5  # the median counts
_LOCK = struct.Struct("hhqqi4x")  # struct flock: kind, whence, start, length, process


def try_lock(descriptor: int, exclusive: bool) -> bool | None:
    """Lock an open file without waiting: False while another process holds the lock, None if there are no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        _log("the file system of descriptor %d has no locks: %s", descriptor, error)
        return None
    return True


def unlock(descriptor: int) -> None:
    """Release the lock of `try_lock`, even if a process that was forked meanwhile has the file open."""
    with suppress(OSError):  # there are no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def lock_as_writer(descriptor: int) -> bool | None:
    """Lock a file that is open for writing, until it is closed or unlocked; return as `try_lock` does.

    Users with only read permission cannot take this lock. On systems without such locks it is an exclusive lock of
    `try_lock`, which they can take.
    """
    if sys.platform == "linux":
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return True
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            if error.errno != errno.EINVAL:
                _log("the file system of descriptor %d has no locks: %s", descriptor, error)
                return None
            _log("the system has no locks for writers alone: %s", error)
    return try_lock(descriptor, exclusive=True)


def unlock_as_writer(descriptor: int) -> None:
    """Release the lock of `lock_as_writer`, even if a process that was forked meanwhile has the file open."""
    with suppress(OSError):  # there are none of a kind, and nothing was locked
        if sys.platform == "linux":
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    unlock(descriptor)


def has_writer(descriptor: int) -> bool:
    """Whether somebody holds the lock of `lock_as_writer`; the file may be open for reading only."""
    if sys.platform == "linux":
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
            kind: int = _LOCK.unpack(found)[0]
            return kind == fcntl.F_WRLCK
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log("whether descriptor %d is locked by a writer is unknown: %s", descriptor, error)
            if error.errno != errno.EINVAL:
                return False
    held = try_lock(descriptor, exclusive=False)
    if held:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return held is False


def open_to_lock(path: Path) -> int:
    """Open a file for writing, which an exclusive lock on NFS requires, or for reading without write permission."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | flags)


def lock_holder(descriptor: int) -> str:
    """The holder of an open file's lock, like ``process 12 of alice``; empty if unknown."""
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if place in words and "->" not in words:
                process = int(words[words.index(place) - 1])
                return f"process {process} of {user_name(os.stat(f'/proc/{process}').st_uid)}"
    return ""


def readers_of(path: Path) -> int | None:
    """The number of open files that hold a file's shared lock, as far as known on this machine; None without locks.

    If the system does not list its locks, it is 1 if there is any.
    """
    try:
        descriptor = open_to_lock(path)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        found = sorted(_listed(place) for _ in range(_LISTINGS))[_LISTINGS // 2]
        if found:
            return found
        held = try_lock(descriptor, exclusive=True)  # for a moment; who takes a lease waits for it
        return None if held is None else int(not held)
    finally:
        os.close(descriptor)


def _listed(place: str) -> int:
    """Count the locks of a file in a listing. Lines repeat or are missing if locks are taken or released meanwhile."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    return sum(1 for line in lines if place in line.split() and "->" not in line.split())


def user_name(user: int) -> str:
    """A user's name, or the number if there is none."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _log(message: str, *values: object) -> None:
    import logging  # here, as every command imports this module first

    logging.getLogger("pqcache.system").debug(message, *values)
