"""Files on a local disk: operations for atomic publishing and direct I/O, checksums, and what is mounted.

All operations raise OSError. Checksums are XXH3 with 64 bits: they guard against accidents, not attackers, and are much
faster than CRC-32 and cryptographic hashes, so every download can have one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import xxhash

from pqcache.errors import NOT_REGULAR

DIRECT_IO_BLOCK = 4096  # memory, offsets and lengths of direct writes are multiples of it; every disk takes this one

_O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every system
_CANNOT_LINK = {errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}
_PREFIX = "xxh3:"  # of checksums
_BLOCK = 1 << 20

_of_thread = threading.local()

Checksum = xxhash.xxh3_64

_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs"))


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file; anything else raises OSError, as opening a FIFO would block."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)  # regular files ignore O_NONBLOCK
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


@contextmanager
def open_directory(path: str | Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Yield the entries of a directory. Below its open descriptor the system finds files sooner than by their paths."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(descriptor) as found:
            yield found
    finally:
        os.close(descriptor)


def open_plain(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file as ``open_regular`` does; a symbolic link in its place raises OSError."""
    return open_regular(path, flags | os.O_NOFOLLOW, mode)


def read_regular(path: str | Path) -> bytes:
    """Read a regular file; raises as ``open_regular`` does."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def read_ahead(path: str | Path, offset: int, size: int) -> None:
    """Ask the kernel to read a range of a regular file in the background, if the system can be asked."""
    if hasattr(os, "posix_fadvise"):
        descriptor = open_regular(path)
        try:
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def check_regular(path: str | Path) -> None:
    """Raise OSError unless this is a regular file, before a library opens it and blocks."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _not_regular(path)


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))


def real_path(descriptor: int, name: str) -> str:
    """The path, without links, of the file opened as ``name``; ``name`` itself if the system doesn't tell."""
    found = os.path.realpath(f"/dev/fd/{descriptor}")
    return os.path.realpath(name) if found.startswith("/dev/fd/") else found


def limit_modes(root: Path, mode: int) -> None:
    """Keep the files below a directory from readers that ``mode`` excludes, and from writers other than the owner."""
    for directory, _, names in os.walk(root):
        for name in names:
            limit_mode(Path(directory, name), mode)


def limit_mode(path: str | Path, mode: int, status: os.stat_result | None = None) -> None:
    """Keep a file from readers that ``mode`` excludes, and from writers other than the owner."""
    now = stat.S_IMODE((status or os.stat(path)).st_mode)
    limited = now & (mode & 0o444 | 0o300)
    if now != limited:
        os.chmod(path, limited)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its missing parents, and make each entry durable."""
    if path.is_dir():
        return
    make_directory(path.parent, mode)
    path.mkdir(mode, exist_ok=True)
    fsync_path(path.parent)


def fsync_tree(root: Path) -> None:
    """Call fsync on ``root`` and every directory below it, deepest first."""
    with open_directory(root) as found:
        below = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
    for name in below:
        fsync_tree(root / name)
    fsync_path(root)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make ``target`` a hard link to ``source``, or a durable copy if the file system cannot link."""
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


def write_durably(path: Path, data: bytes, scratch: Path, mode: int = 0o666) -> None:
    """Write a small file atomically and durably; a crash may leave a temporary file in ``scratch``."""
    temporary = _temporary(path, scratch)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, mode)) as file:
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
    """Remove a directory, including read-only ones, if it exists. Links are not followed."""
    if root.is_symlink():
        root.unlink()
        return

    def retry_writable(function: object, path: str, _: object) -> None:
        if os.path.lexists(path):  # else it was removed by another process
            _remove_writable(root, Path(path), function is os.rmdir)

    if root.exists():
        shutil.rmtree(root, onerror=retry_writable)


def discard(directory: Path) -> None:
    """Rename, then remove a directory, so that a run still using it fails cleanly."""
    trash = directory.with_name(f"removed-{os.urandom(8).hex()}")
    directory.rename(trash)
    remove_tree(trash)


def _remove_writable(root: Path, path: Path, is_directory: bool) -> None:
    """Remove a file or an empty directory of the tree ``root``, after its directory was made writable.

    Raises OSError if another user, who owns a directory on the way, replaces it by a link meanwhile.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    parts = () if path == root else path.parent.relative_to(root).parts
    directory = os.open(root.parent if path == root else root, flags)
    try:
        for part in parts:
            below = os.open(part, flags, dir_fd=directory)
            os.close(directory)
            directory = below
        os.fchmod(directory, stat.S_IMODE(os.fstat(directory).st_mode) | stat.S_IRWXU)
        (os.rmdir if is_directory else os.unlink)(path.name, dir_fd=directory)
    finally:
        os.close(directory)


def allocated(*roots: Path) -> dict[tuple[int, int], tuple[int, bool]]:
    """Bytes on disk of ``roots`` and everything below them, by device and inode, and whether all links to it are
    inside.
    """
    sizes: dict[tuple[int, int], int] = {}
    links: dict[tuple[int, int], int] = {}  # that are elsewhere
    for root in roots:
        for place, directories, files in os.walk(root):
            for name in (".", *directories, *files):
                with suppress(FileNotFoundError):  # a run is at work
                    status = os.lstat(os.path.join(place, name))
                    key = status.st_dev, status.st_ino
                    sizes[key] = status.st_blocks * 512
                    links[key] = links.get(key, 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink) - 1
    return {key: (size, links[key] <= 0) for key, size in sizes.items()}


def freed_bytes(*roots: Path) -> int:
    """Bytes freed by removing ``roots``: files that are also linked from elsewhere free nothing."""
    return sum(size for size, is_alone in allocated(*roots).values() if is_alone)


def tree_size(root: Path) -> int:
    """Bytes of all files below ``root``; files removed meanwhile do not count."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def enable_direct_io(descriptor: int) -> bool:
    """Make writes to an open file bypass the page cache; False if the file system cannot."""
    return bool(_O_DIRECT) and _set_flags(descriptor, _O_DIRECT)


def write_at(descriptor: int, data: memoryview, offset: int, direct: bool) -> None:
    """Write ``data`` at ``offset``, with ``direct`` past the page cache.

    ``direct`` requires that ``enable_direct_io`` returned True, and that memory and offset are aligned to
    DIRECT_IO_BLOCK. Only the last write to a file may have another length; its remainder goes through the page cache.
    So does a whole write that the file system refuses.
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
    """Set a file's flags to O_DIRECT or nothing; False if the file system cannot."""
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


def has_stable_inodes(path: str) -> bool:
    """Whether unchanged files keep their inode numbers and ctimes on the file system of ``path``.

    They do on local file systems. Network and FUSE file systems may make them up; an unknown one is treated like these.
    """
    return file_system_type(path) in _LOCAL


def file_system_type(path: str) -> str:
    """The type of the file system of ``path``, like ``ext4``; empty if unknown."""
    real, found = os.path.realpath(path), ("", "")
    for _, point, kind in _mounts():
        if len(point) >= len(found[0]) and f"{real}/".startswith(f"{point.rstrip('/')}/"):
            found = point, kind  # the last one of a mount point covers the others
    return found[1]


@lru_cache
def has_lasting_inodes(device: int) -> bool:
    """Whether files of a device keep their inode numbers; FUSE may give them new ones at any time."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return not any(mounted == number and kind.startswith("fuse") for mounted, _, kind in _mounts())


def _mounts() -> list[tuple[str, str, str]]:
    """Device, mount point and type of each mount, in order; none if /proc is unavailable."""
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


def new_checksum() -> Checksum:
    """A checksum of no bytes; ``update`` adds some."""
    return Checksum()


def checksum_text(checksum: Checksum) -> str:
    """The recorded form: ``xxh3:`` and 16 hexadecimal digits."""
    return _PREFIX + checksum.hexdigest()


def is_checksum(text: str) -> bool:
    """Whether a text is a recorded checksum."""
    return text.startswith(_PREFIX)


def add_file(checksum: Checksum, descriptor: int, length: int) -> None:
    """Add the first ``length`` bytes of an open file to ``checksum``, or all bytes of a shorter one."""
    for block in blocks_of(descriptor, length):
        checksum.update(block)


def blocks_of(descriptor: int, length: int = sys.maxsize) -> Iterator[memoryview]:
    """Yield the first ``length`` bytes of an open file in blocks, each valid until the next; raises OSError."""
    if not hasattr(_of_thread, "block"):  # new memory for each block would take longer than to read it
        _of_thread.block = memoryview(bytearray(_BLOCK))
    block: memoryview = _of_thread.block
    position = 0
    while position < length and (count := os.preadv(descriptor, [block[: length - position]], position)):
        yield block[:count]
        position += count


def checksum_of(path: Path | str) -> str:
    """A file's checksum in its recorded form; raises OSError."""
    checksum = new_checksum()
    descriptor = open_regular(path)
    try:
        add_file(checksum, descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    return checksum_text(checksum)


def checksum_matches(recorded: str, path: Path | str) -> bool:
    """Whether a file has the ``recorded`` checksum; raises OSError."""
    return checksum_of(path) == recorded
