"""Checks of a complete copy against what its store says of the file, and against what was received of its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import RawIOBase
from pathlib import Path

from pqcache.store.manifest import SourceFile
from pqcache.store.sync.download.download_file import MD5, md5_of
from pqcache.system.checksum import is_checksum, new_checksum


def is_as_stored(path: Path, file: SourceFile, checksum: str, compare_md5: bool) -> bool:
    """Return whether a copy with ``checksum`` has the store's own checksum of the file, as far as it is known."""
    tag = file.identity.tag
    if is_checksum(tag):
        return checksum == tag
    if compare_md5 and MD5.fullmatch(tag):
        return md5_of(path) == tag
    return path.stat().st_size == file.identity.size


def end_digest(parts: Iterable[bytes]) -> int:
    """Return a checksum of the end of a file, which is never 0."""
    checksum = new_checksum()
    for part in parts:
        checksum.update(part)
    return checksum.intdigest() >> 1 or 1  # as an int64 has it


def end_digest_of(path: Path, start: int) -> int:
    """Return the `end_digest` of a file's bytes from ``start`` on."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        return end_digest(_blocks(file))


def _blocks(file: RawIOBase) -> Iterator[bytes]:
    while block := file.read(1 << 20):
        yield block
