"""A file written at its end, in complete blocks, with direct I/O.

Writing through the page cache takes fresh pages for every byte, and the disk has to be waited for at the end. So bytes
are gathered in one buffer while others are being written.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from pqcache.system.checksum import Checksum, checksum_text
from pqcache.system.disk import DIRECT_IO_BLOCK, enable_direct_io, write_at

WRITERS = 3  # threads: one that fills a buffer, and one for each buffer on its way
_BUFFER = 2 << 20  # bytes
_LARGE, _TOGETHER = 64 << 10, 1 << 20


class DirectIoFile:
    """A file at ``path``, new if ``fresh`` and else one that was closed, whose bytes threads of ``disk`` write.

    ``use_page_cache`` says that the file is read next: then it is written as usual, as where the file system has no
    other way. ``checksum`` is that of the complete blocks so far. One thread at a time may use it; every method may
    raise OSError.
    """

    def __init__(self, path: Path, disk: Executor, checksum: Checksum, use_page_cache: bool, fresh: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if fresh else 0)
        self._file = os.open(path, flags, 0o666)
        try:
            self._buffers = deque(mmap.mmap(-1, _BUFFER) for _ in range(WRITERS))  # which begin at a page
            size = os.fstat(self._file).st_size
            self._at = size // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK  # where the first buffer goes
            self._have = size - self._at
            self._buffers[0][: self._have] = os.pread(self._file, self._have, self._at)
            self._direct = not use_page_cache and enable_direct_io(self._file)
        except BaseException:
            os.close(self._file)
            raise
        self._disk, self._checksum = disk, checksum
        self._writing: deque[Future[None]] = deque()

    def write_all(self, parts: Iterable[Any]) -> None:
        """Add the bytes of all ``parts``, small ones joined: a call for each would take longer than copying it."""
        waiting: list[Any] = []
        size = 0
        for part in parts:
            if len(part) >= _LARGE or size >= _TOGETHER:
                self.write(b"".join(waiting))
                waiting, size = [], 0
            if len(part) >= _LARGE:
                self.write(part)
            else:
                waiting.append(part)
                size += len(part)
        self.write(b"".join(waiting))

    def write(self, data: Any) -> None:
        """Add the bytes of ``data``, which are copied."""
        rest = np.frombuffer(data, np.uint8)  # copied as arrays, as other threads run meanwhile
        while len(rest):
            count = min(_BUFFER - self._have, len(rest))
            np.frombuffer(self._buffers[0], np.uint8, count, self._have)[:] = rest[:count]
            self._have, rest = self._have + count, rest[count:]
            if self._have == _BUFFER:
                self._send()

    def skip(self, count: int) -> None:
        """Leave ``count`` bytes out, which read as zeros; complete blocks of them take no place on the disk."""
        first = min(count, -self._have % DIRECT_IO_BLOCK)
        self.write(bytes(first))
        if blocks := (count - first) // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK:
            self._send()
            self._checksum.update(bytes(blocks))
            self._at += blocks
        self.write(bytes(count - first - blocks))

    def close(self) -> str:
        """Write and fsync everything; return the checksum of the file."""
        try:
            self._wait(0)
            rest = memoryview(self._buffers[0])[: self._have]
            write_at(self._file, rest, self._at, self._direct)
            os.fsync(self._file)
            final = self._checksum.copy()
            self._checksum.update(rest[: self._have // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK])
            final.update(rest)
            return checksum_text(final)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        while self._writing:
            self._writing.popleft().exception()  # waits
        os.close(self._file)

    def _send(self) -> None:
        """Have the first buffer written, which holds complete blocks, and go on with another."""
        data = memoryview(self._buffers[0])[: self._have]
        self._writing.append(self._disk.submit(self._put, data, self._at))
        self._checksum.update(data)  # while it is in the processor's cache
        self._wait(WRITERS - 1)
        self._buffers.rotate(-1)
        self._at, self._have = self._at + self._have, 0

    def _put(self, data: memoryview, at: int) -> None:
        write_at(self._file, data, at, self._direct)
        if not self._direct:
            os.fdatasync(self._file)  # the disk has work while others encode, and little at the end

    def _wait(self, left: int) -> None:
        while len(self._writing) > left:
            self._writing.popleft().result()
