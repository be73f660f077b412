"""A ``pqcache.toml`` of several tables: the directory of the caches has it, and each sync of all makes it so.

It has a section ``[tables.NAME]`` for each, with what the ``pqcache.toml`` of a cache has. The cache is ``NAME``, in
the same directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pqcache.errors import MALFORMED, CacheError, PqcacheError, UsageError
from pqcache.store.cache_directory import config_text, has_tables, parsed
from pqcache.store.config import config_of
from pqcache.store.layout import CONFIG
from pqcache.store.ownership import is_own
from pqcache.store.urls import local_path, printable, quoted, url_scheme

_TABLES = "tables"
_NOT_OF_SYNC = frozenset({"compression", "compat", "keep_int96", "dense", "shuffle", "keys"})


@dataclass(frozen=True)
class ListedTable:
    """A table of the file: what a sync of it is given, or the error that is in its section."""

    name: str
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    error: PqcacheError | None = None


def read_tables(root: Path) -> list[ListedTable]:
    """Return the tables that the ``pqcache.toml`` of a directory has; none where there is no such file.

    One that cannot be read, or that others than trusted users can write, raises CacheError. Errors in the section of
    a table are in its entry.
    """
    path = root / CONFIG
    if not path.is_file() or not has_tables(path):
        return []
    if not is_own(path.stat()):
        raise CacheError(
            path, "can be written by others, and what they put there is not trusted", f"chmod go-w {quoted(path)}"
        )
    try:
        document = parsed(config_text(path))
    except (OSError, *MALFORMED) as error:
        raise CacheError(path, f"cannot be read ({error})", "correct it") from error
    strange = [name for name in document if name not in (_TABLES, "format")]
    tables = document[_TABLES]
    if strange or not isinstance(tables, dict):
        what = f"'{strange[0]}'" if strange else f"{_TABLES} = {tables!r}"
        raise CacheError(path, f"{what} is not known beside tables", "write [tables.NAME] above what is of a table")
    return [_entry(path, name, values) for name, values in tables.items()]


def _entry(path: Path, name: str, values: Any) -> ListedTable:
    try:
        if not is_cache_name(name):
            raise UsageError("", "is no name of a cache")
        if not isinstance(values, dict) or "source" not in values:
            raise UsageError("", "has no source")
        wrong = sorted(_NOT_OF_SYNC & values.keys())
        if wrong:
            raise UsageError("", f"'{wrong[0]}' is set by 'pqcache repartition' and 'pqcache index', for each cache")
        config = config_of(values)
        options = {key: getattr(config, key) for key in values if key not in ("source", "format")}
        return ListedTable(name, _absolute(config.source, path.parent), options)
    except MALFORMED as error:
        return ListedTable(name, error=CacheError(path, f"[{_TABLES}.{name}]: {error}", "correct it"))


def is_cache_name(name: str) -> bool:
    """Whether a cache in a directory of caches can have this name, which is in each line of a log."""
    return bool(name) and "/" not in name and not name.startswith(".") and printable(name) == name


def _absolute(source: str, root: Path) -> str:
    """Relative paths count from the directory of the file, wherever the sync runs."""
    if url_scheme(source):
        return source
    return os.path.normpath(root / os.path.expanduser(local_path(source)))
