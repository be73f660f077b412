"""Checks of a complete copy against what its store says of the file, and against what was received of its end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pqcache.store.manifest import SourceFile
from pqcache.store.sync.download.download_file import MD5
from pqcache.system.checksum import blocks_of, checksum_text, is_checksum, new_checksum


@dataclass(frozen=True, kw_only=True)
class CopyDigests:
    """What one pass over a copy finds: its ``size``, its ``checksum``, the `end_digest` of its ``end``, its ``md5``."""

    size: int
    checksum: str
    end: int
    md5: str


@contextmanager
def open_copy(path: Path) -> Iterator[int]:
    """Yield a descriptor of a copy, to read it and make it durable; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def digests_of(descriptor: int, tail: int, md5: bool) -> CopyDigests:
    """Read a copy once; its end begins at ``tail``. The MD5 is empty where it is not asked for; raises OSError."""
    checksum, end, position = new_checksum(), new_checksum(), 0
    of_store = hashlib.md5(usedforsecurity=False) if md5 else None
    for block in blocks_of(descriptor):
        checksum.update(block)
        end.update(block[max(0, tail - position) :])
        if of_store is not None:
            of_store.update(block)
        position += len(block)
    return CopyDigests(
        size=position,
        checksum=checksum_text(checksum),
        end=_never_0(end.intdigest()),
        md5="" if of_store is None else of_store.hexdigest(),
    )


def has_md5(file: SourceFile, compare_md5: bool) -> bool:
    """Return whether the copy's MD5 is to be compared with the store's."""
    return compare_md5 and MD5.fullmatch(file.identity.tag) is not None


def is_as_stored(copy: CopyDigests, file: SourceFile) -> bool:
    """Return whether a copy has the store's own checksum of the file, as far as it is known."""
    tag = file.identity.tag
    if is_checksum(tag):
        return copy.checksum == tag
    if copy.md5:
        return copy.md5 == tag
    return copy.size == file.identity.size


def end_digest(data: bytes) -> int:
    """Return a checksum of the end of a file, which is never 0."""
    checksum = new_checksum()
    checksum.update(data)
    return _never_0(checksum.intdigest())


def _never_0(digest: int) -> int:
    return digest >> 1 or 1  # as an int64 has it
