"""The log of a cache: the records in its history, and what killed runs, and one at work, have left to be seen."""

from __future__ import annotations

import os
from typing import Any

from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.store.history import in_order, read_history, result_of
from pqcache.store.layout import HISTORY
from pqcache.store.run_record import read_running, unfinished


def log(cache: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return a record of each run on a cache, in the order of their ends; raises CacheError where there is no cache.

    ``result`` is what the run came to: ``done``, ``failed``, ``refused``, ``interrupted`` or, of one that is at work,
    ``running``. A run that was killed has a record made of what it wrote when it began, and of its snapshot if it
    published one.

    >>> [(run["command"], run["result"], run["added"]) for run in log("cache/shop")]
    [('sync', 'done', 6)]
    """
    opened = CacheDirectory(cache_path(cache))
    if read_running(opened.path) is None and not (opened.path / HISTORY).is_file():
        opened = CacheDirectory.open(os.fspath(cache))
    records = read_history(opened.path)
    missed = unfinished(opened, records)
    found = in_order(records, [record for record in missed if record.get("snapshot")])
    found += [record for record in missed if not record.get("snapshot")]
    return [{**record, "result": result_of(record)} for record in found]
