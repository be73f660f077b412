"""Caches that are added to a directory before their first sync, and removed from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pqcache.errors import CacheError, CacheLocked, UsageError, disk_errors
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.layout import CONFIG
from pqcache.store.status import default_root
from pqcache.store.tables_file import is_cache_name, read_tables
from pqcache.store.urls import check_url, is_secret, remembered_url
from pqcache.system.disk import fsync_path, remove_tree


def add(
    source: str | os.PathLike[str],
    name: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Make a cache of ``source`` in ``root``, without a sync, and return its directory.

    Its ``name`` is by default the last part of the source's path. ``options`` are remembered, without secrets. Nothing
    is fetched: the next sync of the cache, or of all in ``root``, does that.

    >>> add("lake/shop", "shop2", root="cache").name
    'shop2'

    Raises UsageError where there is such a directory, or no name follows from the source.
    """
    check_url(os.fspath(source))
    url = remembered_url(os.fspath(source))
    name = name or url.rstrip("/").rpartition("/")[2]
    if not is_cache_name(name):
        raise UsageError(name or url, "is no name of a cache", "name it too: pqcache add SOURCE NAME")
    cache = CacheDirectory((Path(root).expanduser() if root is not None else default_root()).absolute() / name)
    if cache.exists():
        advice = f"'pqcache sync SOURCE {cache.path} --new-source' changes its source"
        raise UsageError(cache.path, "is a cache already", advice)
    config = Config(source=url, options={key: text for key, text in (options or {}).items() if not is_secret(key)})
    with disk_errors(cache.path):
        cache.create()
        write_config(cache.path, config)
    return cache.path


def remove(name: str, *, root: str | os.PathLike[str] | None = None, force: bool = False) -> Path:
    """Remove the cache ``name`` of ``root`` with all its snapshots; return the directory that it was.

    The source is not touched. A cache on which a run is at work raises CacheLocked, and so does one that readers have
    open, unless ``force`` is set.

    >>> remove("shop2", root="cache").name
    'shop2'
    """
    if not name or "/" in name or name in (".", ".."):
        raise UsageError(name, "is no name of a cache", "name a directory of the root, and the root with --root")
    place = (Path(root).expanduser() if root is not None else default_root()).absolute()
    if name in {entry.name for entry in read_tables(place)}:
        advice = "remove its section there first, or the next sync of all makes it again"
        raise UsageError(name, f"is a table of {place / CONFIG}", advice)
    cache = CacheDirectory.open(place / name)
    if cache.path.is_symlink():
        raise CacheError(cache.path, "is a symbolic link", "remove what it leads to")
    with disk_errors(cache.path), cache.lock():
        leased = [snapshot.id for snapshot in cache.snapshots() if snapshot.is_leased()]
        if leased and not force:
            raise CacheLocked(cache.path, f"readers have {', '.join(leased)} open", "end them, or give --force")
        trash = cache.path.with_name(f".removed-{cache.path.name}-{os.urandom(4).hex()}")
        cache.path.rename(trash)
        fsync_path(trash.parent)
        remove_tree(trash)
    return cache.path
