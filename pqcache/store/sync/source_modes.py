"""Makes kept files at most as readable as their local source is now.

A new copy gets its mode when it is downloaded. The mode of the source, or of a directory above it, may change later
while the file is kept: each sync makes copies private that have become so at the source.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from pqcache.errors import PqcacheError
from pqcache.store.drivers.base import LocalFiles, Source
from pqcache.store.hive import parent
from pqcache.store.layout import LEASE
from pqcache.store.manifest import SourceFile
from pqcache.system.disk import limit_mode


def limit_to_source(snapshot: Path, source: Source, files: Sequence[SourceFile]) -> str:
    """Take from the files of ``snapshot`` what others may not read of ``files`` at a local source; return a warning.

    Older snapshots share the files by hard links, so they change too. The metadata has minima and maxima of all files,
    and a rewritten file has rows of all files of its directory: they are readable by those who can read all these.
    """
    if not hasattr(source, "copy_mode"):
        return ""
    local, refused = cast(LocalFiles, source), ""
    of_file: dict[str, int] = {}
    of_directory: dict[str, int] = {}
    everything, group = 0o444, os.stat(snapshot).st_gid
    directories: dict[str, os.stat_result] = {}
    for file in files:
        with suppress(PqcacheError):  # it is gone, which the next sync notices
            mode = local.copy_mode(file.path, group, directories)
            of_file[file.path] = mode
            of_directory[parent(file.path)] = of_directory.get(parent(file.path), 0o444) & mode
            everything &= mode
    for directory, _, names in os.walk(snapshot):
        below = Path(directory).relative_to(snapshot).as_posix()
        own = below.split("/")[0] == "_pqcache"
        for name in names:
            path = name if below == "." else f"{below}/{name}"
            allowed = everything if own else of_file.get(path, of_directory.get(below.removeprefix("."), 0o444))
            try:
                if not (own and path == LEASE):
                    limit_mode(Path(directory, name), allowed)
            except OSError:
                refused = refused or f"{directory}/{name}"
    reason = "is more readable than its source, and belongs to another user"
    return f"{refused} {reason}; run this as that user, or remove the cache" if refused else ""
