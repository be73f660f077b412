"""Opens a dataset: a cache, a snapshot, a directory of Parquet or one file; reads an index and no data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pqcache.errors import UsageError
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.hive import is_data, is_hidden
from pqcache.store.layout import LEASE, ROW_GROUPS
from pqcache.store.row_group_index import Index, build_index
from pqcache.store.snapshot import Lease, Snapshot


@dataclass(frozen=True)
class Data:
    """An opened dataset; ``snapshot`` is a name for its content, also where it is in no cache (``cache`` is None)."""

    root: Path
    index: Index
    snapshot: str
    cache: Path | None = None


def open_data(path: str | os.PathLike[str], snapshot: str | None = None) -> tuple[Data, Lease | None]:
    """Open a cache (its current snapshot, or the one named), a snapshot, a directory of Parquet, or one file.

    The lease keeps a snapshot from being removed; close it when done. A path where there is nothing, or nothing that is
    Parquet, raises UsageError.
    """
    text = os.fspath(path)
    if not text:  # Path("") would be this directory
        raise UsageError("", "an empty path", "name a cache, a directory of Parquet or a file")
    if "://" in text:
        raise UsageError(text, "not a local path", f"run 'pqcache sync {text} DIRECTORY' and open DIRECTORY")
    root = Path(text).expanduser().absolute()
    cache = CacheDirectory(root)
    if cache.exists():
        if snapshot is not None:
            found = cache.snapshot(snapshot)
            lease = found.lease()
        else:
            found, lease = cache.lease()
        return Data(found.path, found.index(), found.id, root), lease
    if (root / ROW_GROUPS).is_file():  # CACHE/current, or a snapshot by its own path
        found = Snapshot(root.resolve())
        data = _same(Data(found.path, found.index(), found.id), snapshot)
        return data, found.lease() if (found.path / LEASE).is_file() else None
    if root.is_file():
        return _same(_indexed(root.parent, [root.name]), snapshot), None
    if not root.is_dir():
        raise UsageError(text, "no such file or directory", "name a cache, a directory of Parquet or a file")
    paths = sorted(_data_files(root))
    if not paths:
        raise UsageError(text, "no Parquet files in it", f"fill it with 'pqcache sync SOURCE {text}'")
    return _same(_indexed(root, paths), snapshot), None


def _same(data: Data, snapshot: str | None) -> Data:
    if snapshot is not None and data.snapshot != snapshot:
        raise UsageError(data.root, f"its files are not those of {snapshot}", "they have changed since then")
    return data


def _indexed(root: Path, paths: Sequence[str]) -> Data:
    index = build_index(root, paths)
    digest = hashlib.blake2b("\n".join(index.paths).encode(), digest_size=8)
    for column in ("file", "rows", "offset", "bytes"):
        digest.update(index.numbers(column).tobytes())
    return Data(root, index, f"files-{digest.hexdigest()}")


def _data_files(root: Path) -> Iterator[str]:
    """Yield the data files below a directory, links followed; a directory that cannot be listed raises UsageError."""
    for directory, names, files in os.walk(root, onerror=_refuse, followlinks=True):
        names[:] = [name for name in names if not is_hidden(name)]
        below = Path(directory).relative_to(root).as_posix()
        for name in files:
            path = name if below == "." else f"{below}/{name}"
            if is_data(path):
                yield path


def _refuse(error: OSError) -> None:
    advice = "make it readable for this user" if isinstance(error, PermissionError) else "repair it, or name another"
    raise UsageError(error.filename, f"cannot be listed ({error.strerror})", advice) from error
