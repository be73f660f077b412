"""The paths that source files have in a cache: all end in ``.parquet``, so that ``**/*.parquet`` finds every file."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from pqcache.store.hive import parent

SUFFIX = ".parquet"
_MAX_NAME = 255  # bytes of a file's name


def cached_paths(paths: Iterable[str]) -> dict[str, str]:
    """Return the path in a cache of each source path that has another one there.

    A name gets ``.parquet`` where it does not end so. Where that is the name of another file or directory, or of one in
    other case, or too long, a part that is the name's own comes before it. Equal paths give equal results.

    >>> cached_paths(["dt=1/000000_0", "dt=1/part-0.parquet"])
    {'dt=1/000000_0': 'dt=1/000000_0.parquet'}
    >>> cached_paths(["a", "a.parquet"])
    {'a': 'a-5f2ca630d0f6.parquet'}
    """
    paths = list(paths)
    renamed = sorted(path for path in paths if not path.endswith(SUFFIX))
    if not renamed:
        return {}
    taken = {path.casefold() for path in paths if path.endswith(SUFFIX)} | _directories(paths)
    found: dict[str, str] = {}
    for path in renamed:
        new, number = path + SUFFIX, 0
        while new.casefold() in taken or len(new.rpartition("/")[2].encode()) > _MAX_NAME:
            new, number = _distinct(path, number), number + 1
        taken.add(new.casefold())
        found[path] = new
    return found


def _directories(paths: Iterable[str]) -> set[str]:
    """Parents of all ``paths``, without case."""
    found: set[str] = set()
    for directory in {parent(path) for path in paths}:
        while directory and directory.casefold() not in found:
            found.add(directory.casefold())
            directory = parent(directory)
    return found


def _distinct(path: str, number: int) -> str:
    directory, slash, name = path.rpartition("/")
    end = f"-{blake2b(f'{name} {number}'.encode(), digest_size=6).hexdigest()}{SUFFIX}"
    stem = name.encode()[: _MAX_NAME - len(end)].decode(errors="ignore")
    return f"{directory}{slash}{stem}{end}"
