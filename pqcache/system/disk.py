"""The few file-system operations that atomic publishing rests on."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

DIRECT_IO_BLOCK = 4096  # memory, offsets and lengths of direct writes are multiples of it; every disk takes this one

_DIRECT = getattr(os, "O_DIRECT", 0)  # not everywhere
_CANNOT_LINK = {errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}


def fsync_path(path: Path) -> None:
    """Make a file's contents, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each durable in the one that holds it."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def fsync_tree(root: Path) -> None:
    """Make the names in every directory below ``root`` durable, deepest first."""
    for directory, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(directory))


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give ``source`` a second name, or copy it durably where the file system cannot."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copy2(source, target)
        fsync_path(Path(target))


def replace_symlink(link: Path, target: str, scratch: Path) -> None:
    """Point ``link`` at ``target`` in one step and make that durable; ``scratch`` is on the same file system."""
    temporary = _temporary(link, scratch)
    temporary.symlink_to(target)
    try:
        temporary.replace(link)
    except OSError:
        temporary.unlink()
        raise
    fsync_path(link.parent)


def write_durably(path: Path, data: bytes, scratch: Path) -> None:
    """Write a small file so that a crash leaves the old contents or the new, and litter only in ``scratch``."""
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
    """Remove a directory of ours, read-only files included; a missing one is fine."""
    if root.is_symlink():
        root.unlink()
        return

    def retry_writable(function: object, path: str, _: object) -> None:
        parent = Path(path).parent
        if not os.path.lexists(path):
            return  # somebody else was faster
        parent.chmod(parent.stat().st_mode | stat.S_IRWXU)
        if function is os.rmdir:
            os.rmdir(path)
        else:
            os.unlink(path)

    if root.exists():
        shutil.rmtree(root, onerror=retry_writable)


def tree_size(root: Path) -> int:
    """Return the bytes of all files below ``root``; they may go meanwhile, and so may ``root``."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def enable_direct_io(descriptor: int) -> bool:
    """Let writes to an open file go past the page cache; return whether the file system can do that."""
    return bool(_DIRECT) and _set_flags(descriptor, _DIRECT)


def write_at(descriptor: int, piece: memoryview, offset: int, direct: bool) -> None:
    """Write ``piece`` at ``offset``; if ``direct``, both begin at whole blocks, and only a last piece has no whole end.

    A file system may refuse: then this piece is written as usual.
    """
    whole = len(piece) // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK if direct else 0
    try:
        _write(descriptor, piece[:whole], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that this file system wants to have it some other way
            raise
        whole = 0
    if whole < len(piece):
        if direct:
            _set_flags(descriptor, 0)
        _write(descriptor, piece[whole:], offset + whole)


def _set_flags(descriptor: int, flags: int) -> bool:
    """Set the flags that can be changed, among them only O_DIRECT is of use here."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return True


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
