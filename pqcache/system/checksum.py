"""Checksums of a snapshot's files: XXH3 with 64 bits, against accidents, not against attackers.

It is much faster than CRC-32 and cryptographic hashes, so that every download can afford it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from pqcache.system.disk import open_regular

_PREFIX = "xxh3:"
_BLOCK = 1 << 20

_of_thread = threading.local()

Checksum = xxhash.xxh3_64


def new_checksum() -> Checksum:
    """A checksum of no bytes yet; ``update`` adds some."""
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
