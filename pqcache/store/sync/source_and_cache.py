"""Checks the order of source and cache in a sync, and that neither lies in the other."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pqcache.errors import UsageError
from pqcache.store.cache_directory import cache_at
from pqcache.store.urls import local_path, url_scheme


def check_order(source: str, cache: str) -> None:
    """Raise UsageError where the source was named as the cache, and the cache as the source."""
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", cache)  # Path makes one slash of two
    if scheme is not None and url_scheme(source) in ("", "file"):
        subject, reason = f"{scheme[1]}://...", "a cache is a local directory"
    elif cache_at(source) is not None and os.path.isdir(cache) and cache_at(cache) is None:
        subject, reason = source, f"is a pqcache, and {cache} is none"
    else:
        return
    raise UsageError(subject, reason, "are the two the wrong way round? It is 'pqcache sync SOURCE CACHE'")


def check_apart(source: str, cache: Path) -> None:
    """Raise UsageError where a cache lies in its local source, or holds it."""
    if url_scheme(source) in ("", "file"):
        path = Path(local_path(source)).resolve()
        ours = cache.resolve()
        if path == ours or ours in path.parents or path in ours.parents:
            raise UsageError(cache, f"lies in its source {path}, or holds it", "name another directory")
