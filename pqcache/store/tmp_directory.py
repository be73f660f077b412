"""The directory of a run in ``tmp/``, and what it takes over from runs that died.

    tmp/<boot>-<pid>-<random>/
      fetch/KEY        a complete, checked and durable download      KEY.part: the beginning of one
      rewrite/KEY/     a directory's rewritten files, durable     KEY.new/: unfinished
      snapshot/        the snapshot being put together

KEY is made from a file's source, path and identity, so a later run can use what an earlier one downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.manifest import SourceFile
from pqcache.store.ownership import is_own, make_directories
from pqcache.system.boot import boot_id
from pqcache.system.disk import remove_tree


def file_key(source: str, file: SourceFile, subset: str = "") -> str:
    """A name for what is taken of one version of one source file."""
    return _digest(source, file.path, file.identity.size, file.identity.mtime_ns, file.identity.tag, subset)


def rewrite_key(source: str, directory: str, files: Sequence[SourceFile], recipe: str) -> str:
    """A name for what ``recipe`` makes of a directory's source files, which are in row order."""
    return _digest(source, directory, recipe, *(file_key(source, file) for file in files))


def make_workdir(cache: CacheDirectory) -> Path:
    """Create this run's directory below ``tmp/``, with ``fetch/`` and ``rewrite/`` in it."""
    run = cache.tmp_dir / f"{_boot_id()}-{os.getpid()}-{os.urandom(4).hex()}"
    for name in ("fetch", "rewrite"):
        make_directories(run / name)
    return run


def take_over_or_remove(
    cache: CacheDirectory, run: Path, downloads: Collection[str], rewrites: Collection[str]
) -> None:
    """Move what dead runs left and this one needs into ``run``, and remove the rest of ``tmp/``.

    What belongs to others, or can be written by them, is not taken over. The beginning of a download is used only if
    the machine has not restarted since: what was not made durable may then be zeros.
    """
    for other in sorted(cache.tmp_dir.iterdir()):
        if other == run:
            continue
        if other.is_symlink() or not other.is_dir():
            other.unlink()
            continue
        same_boot = other.name.startswith(_boot_id() + "-")
        for kind, wanted in (("fetch", downloads), ("rewrite", rewrites)):
            if not _is_own_directory(other / kind):
                continue
            for left in (other / kind).iterdir():
                key, dot, _ = left.name.partition(".")
                if key in wanted and (not dot or (kind == "fetch" and same_boot)):
                    _move(left, run / kind / left.name)
        discard(other)


def discard(directory: Path) -> None:
    """Rename, then remove, so that a run that still uses it fails cleanly."""
    trash = directory.with_name(f"removed-{os.urandom(8).hex()}")
    directory.rename(trash)
    remove_tree(trash)


def _is_own_directory(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_own(status)


def _move(left: Path, target: Path) -> None:
    with suppress(FileNotFoundError):  # a thread of this process, which was stopped and is still at work, removes it
        if not target.exists() and not left.is_symlink() and _is_all_own(left):
            left.rename(target)


def _is_all_own(left: Path) -> bool:
    """Whether a file, or a directory with all files in it, belongs to this user and no other can write to it."""
    entries = list(left.iterdir()) if left.is_dir() else []
    return all(is_own(path.lstat()) for path in (left, *entries))


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _boot_id() -> str:
    return boot_id()[:8] or "unknown"
