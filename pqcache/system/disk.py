"""File-system operations for atomic publishing and direct I/O; all raise OSError."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

DIRECT_IO_BLOCK = 4096  # memory, offsets and lengths of direct writes are multiples of it; every disk takes this one

_O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every system
_CANNOT_LINK = {errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and make each entry durable."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def fsync_tree(root: Path) -> None:
    """Call fsync on ``root`` and every directory below it, deepest first."""
    for directory, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(directory))


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make ``target`` a hard link to ``source``, or a durable copy where the file system cannot link."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        _log("%s is copied, as it cannot be linked: %s", source, error)
        shutil.copy2(source, target)
        fsync_path(Path(target))


def replace_symlink(link: Path, target: str, scratch: Path) -> None:
    """Point ``link`` at ``target`` atomically and durably; ``scratch`` is a directory on the same file system."""
    temporary = _temporary(link, scratch)
    temporary.symlink_to(target)
    try:
        temporary.replace(link)
    except OSError:
        temporary.unlink()
        raise
    fsync_path(link.parent)


def write_durably(path: Path, data: bytes, scratch: Path) -> None:
    """Write a small file atomically and durably; a crash may leave a temporary file in ``scratch``."""
    temporary = _temporary(path, scratch)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def _temporary(path: Path, scratch: Path) -> Path:
    return scratch / f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}"


def remove_tree(root: Path) -> None:
    """Remove a directory, read-only files included; one that is not there is skipped."""
    if root.is_symlink():
        root.unlink()
        return

    def retry_writable(function: object, path: str, _: object) -> None:
        parent = Path(path).parent
        if not os.path.lexists(path):
            return  # removed by another process
        parent.chmod(parent.stat().st_mode | stat.S_IRWXU)
        if function is os.rmdir:
            os.rmdir(path)
        else:
            os.unlink(path)

    if root.exists():
        shutil.rmtree(root, onerror=retry_writable)


def tree_size(root: Path) -> int:
    """Return the bytes of all files below ``root``; files that are removed meanwhile do not count."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def enable_direct_io(descriptor: int) -> bool:
    """Make writes to an open file bypass the page cache; return whether the file system can do that."""
    return bool(_O_DIRECT) and _set_flags(descriptor, _O_DIRECT)


def write_at(descriptor: int, data: memoryview, offset: int, direct: bool) -> None:
    """Write ``data`` at ``offset``, with ``direct`` past the page cache.

    For that ``enable_direct_io`` has returned True, and memory and offset are aligned to DIRECT_IO_BLOCK. Only the last
    write to a file may have another length; its remainder goes through the page cache. So does all of a write that the
    file system refuses.
    """
    aligned = len(data) // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK if direct else 0
    try:
        _write(descriptor, data[:aligned], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system asks for another alignment
            raise
        _log("a write of %d bytes goes through the page cache: direct I/O is refused: %s", len(data), error)
        aligned = 0
    if aligned < len(data):
        if direct:
            _set_flags(descriptor, 0)
        _write(descriptor, data[aligned:], offset + aligned)


def _set_flags(descriptor: int, flags: int) -> bool:
    """Set a file's flags to O_DIRECT or nothing; return whether the file system can."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError as error:
        _log("a file is written through the page cache: it cannot be opened for direct I/O: %s", error)
        return False
    return True


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _log(message: str, *values: object) -> None:
    """Log why a fast path was not taken."""
    import logging  # here, as every command imports this module first

    logging.getLogger("pqcache.system").debug(message, *values)
