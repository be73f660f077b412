"""Makes kept files at most as readable as their local source is now.

A new copy gets its mode when it is downloaded. The mode of the source, or of a directory above it, may change later
while the file is kept: each sync makes copies private that have become so at the source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path

from pqcache.store.cached_paths import cached_paths
from pqcache.store.drivers.base import Source
from pqcache.store.hive import parent
from pqcache.store.layout import LEASE
from pqcache.store.manifest import SourceFile
from pqcache.system.disk import limit_mode


@dataclass(frozen=True)
class _Allowed:
    """The bits for reading that files of one group may have: by path, by directory, and those of metadata."""

    of_file: Mapping[str, int]
    of_directory: Mapping[str, int]
    of_metadata: int

    def mode(self, path: str, directory: str) -> int:
        if directory.split("/")[0] == parent(LEASE):
            return self.of_metadata
        return self.of_file.get(path, self.of_directory.get(directory, 0o444))


def limit_to_source(snapshot: Path, source: Source, files: Sequence[SourceFile]) -> str:
    """Restrict ``snapshot`` to those who may read ``files`` at a local source; return a warning.

    Older snapshots share the files by hard links, so they change too. The metadata has minima and maxima of all files,
    and a rewritten file has rows of all files of its directory: they are readable by those who can read all these.
    Nothing is done if everyone can read the source.
    """
    if (local := source.local_modes) is None:
        return ""
    paths, by_group = [file.path for file in files], dict[int, _Allowed]()
    if not local.private_modes(paths, os.stat(snapshot).st_gid):
        return ""
    refused: list[str] = []
    for directory, item in _files(snapshot, refused):
        try:
            status = item.stat(follow_symlinks=False)
            if status.st_gid not in by_group:
                by_group[status.st_gid] = _allowed(local.private_modes(paths, status.st_gid))
            path = f"{directory}/{item.name}" if directory else item.name
            limit_mode(item.path, by_group[status.st_gid].mode(path, directory), status)
        except OSError:
            refused.append(item.path)
    reason = "is more readable than its source, and belongs to another user"
    return f"{refused[0]} {reason}; run this as that user, or remove the cache" if refused else ""


def _files(snapshot: Path, refused: list[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the snapshot's files except the lease, each after its directory; ``refused`` gets unlistable ones."""
    pending = [""]
    while pending:
        directory = pending.pop()
        try:
            found = list(os.scandir(f"{snapshot}/{directory}"))
        except OSError:
            refused.append(f"{snapshot}/{directory}")
            continue
        for item in found:
            path = f"{directory}/{item.name}" if directory else item.name
            if item.is_dir(follow_symlinks=False):
                pending.append(path)
            elif path != LEASE:
                yield directory, item


def _allowed(modes: Mapping[str, int]) -> _Allowed:
    of_directory: dict[str, int] = {}
    for path, mode in modes.items():
        of_directory[parent(path)] = of_directory.get(parent(path), 0o444) & mode
    of_file = {**modes, **{new: modes[path] for path, new in cached_paths(modes).items()}}
    return _Allowed(of_file, of_directory, reduce(and_, of_directory.values(), 0o444))
