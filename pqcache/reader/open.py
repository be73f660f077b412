"""Opens a dataset: a cache, a snapshot, a directory of Parquet or one file; reads an index and no data."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pqcache.errors import UsageError
from pqcache.events import Event, Warned
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.local import LocalSource
from pqcache.store.hive import is_hidden
from pqcache.store.layout import LEASE, ROW_GROUPS
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.row_group_index import Index, build_index
from pqcache.store.snapshot import Lease, Snapshot
from pqcache.store.sync.listing import dataset_files
from pqcache.store.tables.data_files import FileRules
from pqcache.store.tables.table_format import LOGS, check_above


@dataclass(frozen=True)
class Data:
    """An opened dataset; ``snapshot`` is a name for its content, also where it is in no cache (``cache`` is None)."""

    root: Path
    index: Index
    snapshot: str
    cache: Path | None = None


def open_data(
    path: str | os.PathLike[str], snapshot: str | None = None, rules: FileRules | None = None
) -> tuple[Data, Lease | None]:
    """Open a cache (its current snapshot, or the one named), a snapshot, a directory of Parquet, or one file.

    The lease keeps a snapshot from being removed; close it when done. ``rules`` say which files of a directory are
    taken. A path where there is nothing, or nothing that is Parquet, raises UsageError.
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
    rules = rules or FileRules()
    if root.is_file():
        if not rules.as_files:
            check_above(str(root))
        return _same(_indexed(root.parent, [root.name]), snapshot), None
    if not root.is_dir():
        raise UsageError(text, "no such file or directory", "name a cache, a directory of Parquet or a file")
    paths = sorted(file.path for file in dataset_files(LocalSource(str(root), {}), list(_files(root)), rules, _warn))
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


def _files(root: Path) -> Iterator[SourceFile]:
    """Yield the files below a directory, links followed; a directory that cannot be listed raises UsageError.

    Of hidden directories only the logs of tables are listed.
    """
    for directory, names, files in os.walk(root, onerror=_refuse, followlinks=True):
        names[:] = [name for name in names if name in LOGS or not is_hidden(name)]
        below = Path(directory).relative_to(root).as_posix()
        for name in files:
            path = name if below == "." else f"{below}/{name}"
            try:
                status = os.stat(os.path.join(directory, name))
            except OSError:  # a link to nothing, perhaps: whoever opens it says so
                yield SourceFile(path, Identity(0, 0))
            else:
                yield SourceFile(path, Identity(status.st_size, status.st_mtime_ns))


def _warn(event: Event) -> None:
    if isinstance(event, Warned):
        warnings.warn(event.message, stacklevel=2)


def _refuse(error: OSError) -> None:
    advice = "make it readable for this user" if isinstance(error, PermissionError) else "repair it, or name another"
    raise UsageError(error.filename, f"cannot be listed ({error.strerror})", advice) from error
