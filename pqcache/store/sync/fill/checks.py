"""Checks of a complete copy against what its store says of the file."""

from __future__ import annotations

from pathlib import Path

from pqcache.store.manifest import SourceFile
from pqcache.store.sync.download.download_file import MD5, md5_of
from pqcache.system.checksum import is_checksum


def is_as_stored(path: Path, file: SourceFile, checksum: str, compare_md5: bool) -> bool:
    """Return whether a copy with ``checksum`` has the store's own checksum of the file, as far as it is known."""
    tag = file.identity.tag
    if is_checksum(tag):
        return checksum == tag
    if compare_md5 and MD5.fullmatch(tag):
        return md5_of(path) == tag
    return path.stat().st_size == file.identity.size
