"""Locks of files, which the kernel releases when their process ends; on NFS, and where there are none."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

# EBADF: NFS makes flock a lock of bytes, and an exclusive one needs a descriptor that is open for writing
_NO_LOCKS = {errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


def try_lock(descriptor: int, exclusive: bool) -> bool | None:
    """Lock an open file without waiting; return False while another process holds it, None where there are no locks."""
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


def open_to_lock(path: Path) -> int:
    """Open a file for writing, as NFS locks no other exclusively, or for reading where this user may not write it."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | flags)


def lock_holder(descriptor: int) -> str:
    """Return who holds the lock of an open file, like ``process 12 of alice``; empty where the system does not say."""
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if place in words and "->" not in words:
                process = int(words[words.index(place) - 1])
                return f"process {process} of {user_name(os.stat(f'/proc/{process}').st_uid)}"
    return ""


def user_name(user: int) -> str:
    """Return the name of a user, or the number where there is none."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _log(message: str, *values: object) -> None:
    import logging  # here, as every command imports this module first

    logging.getLogger("pqcache.system").debug(message, *values)
