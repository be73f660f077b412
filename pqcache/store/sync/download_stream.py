"""How a file's bytes arrive: in pieces of one buffer that is used again and again, written past the page cache.

What a copy brings is not read next. Written as usual it takes as many fresh pages of the page cache, which on the
machines measured costs three times the CPU of everything else together, and it pushes out what training reads there.
So whole blocks go from the buffer to the disk, where the file system can do that, and the rest as usual.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import cast

from pqcache.errors import SourceError
from pqcache.store.drivers.base import ReadIntoSource, Source

PIECE = 1 << 20
WORTH_DIRECT = 64 << 10  # bytes of a file; for less it is one more thing to do

_mine = threading.local()


def arriving(source: Source, path: str, offset: int, length: int, tag: str) -> Iterator[memoryview]:
    """Yield ``length`` bytes of a source's file from ``offset`` as ``pieces`` does."""
    if length <= 0:
        return
    if hasattr(source, "read_into"):  # isinstance takes 12 µs for each file
        buffer = _buffer()
        for count in cast(ReadIntoSource, source).read_into(buffer, path, offset, length, tag):
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


def _buffer() -> memoryview:
    """Return this thread's buffer, which begins at a page."""
    if not hasattr(_mine, "buffer"):
        _mine.buffer = memoryview(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    buffer: memoryview = _mine.buffer
    return buffer
