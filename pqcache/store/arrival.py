"""How a file's bytes arrive: in pieces of one buffer that is used again and again, written past the page cache.

What a copy brings is not read next. Written as usual it takes as many fresh pages of the page cache, which on the
machines measured costs three times the CPU of everything else together, and it pushes out what training reads there.
So whole blocks go from the buffer to the disk, where the file system can do that, and the rest as usual.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import cast

from pqcache.errors import SourceError
from pqcache.store.source import FillingSource, Source

PIECE = 1 << 20
BLOCK = 4096  # what memory, places and lengths have to be whole multiples of: all disks take that
WORTH_DIRECT = 64 << 10  # bytes of a file; for less it is one more thing to do
_DIRECT = getattr(os, "O_DIRECT", 0)  # not everywhere

_mine = threading.local()


def arriving(source: Source, path: str, offset: int, length: int, tag: str) -> Iterator[memoryview]:
    """Yield ``length`` bytes of a source's file from ``offset`` as ``pieces`` does."""
    if length <= 0:
        return
    if hasattr(source, "read_into"):  # isinstance takes 12 µs for each file
        buffer = _buffer()
        for count in cast(FillingSource, source).read_into(buffer, path, offset, length, tag):
            yield buffer[:count]
    else:
        yield from pieces(source.read(path, offset, length, tag))


def pieces(chunks: Iterator[bytes]) -> Iterator[memoryview]:
    """Yield the bytes of ``chunks`` in pieces of 1 MiB, each valid until the next is asked for.

    What has come before an error is yielded before the error is raised, so that every try gets further.
    """
    buffer, have = _buffer(), 0
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                count = min(PIECE - have, len(rest))
                buffer[have : have + count] = rest[:count]
                have, rest = have + count, rest[count:]
                if have == PIECE:
                    yield buffer
                    have = 0
    except SourceError:
        if have:
            yield buffer[:have]
        raise
    if have:
        yield buffer[:have]


def past_cache(descriptor: int) -> bool:
    """Let writes to an open file go past the page cache; return whether the file system can do that."""
    return bool(_DIRECT) and _set_flags(descriptor, _DIRECT)


def write_at(descriptor: int, piece: memoryview, offset: int, direct: bool) -> None:
    """Write ``piece`` at ``offset``; if ``direct``, both begin at whole blocks, and only a last piece has no whole end.

    A file system may refuse: then this piece is written as usual.
    """
    whole = len(piece) // BLOCK * BLOCK if direct else 0
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


def _buffer() -> memoryview:
    """Return this thread's buffer, which begins at a page."""
    if not hasattr(_mine, "buffer"):
        _mine.buffer = memoryview(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    buffer: memoryview = _mine.buffer
    return buffer


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
