"""The log of a cache: the records in its history, and what killed runs, and one at work, have left to be seen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.store.history import read_history, result_of
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
    for record in unfinished(opened, records):
        records.insert(_place(record, records), record)
    return [{**record, "result": result_of(record)} for record in records]


def _place(record: Mapping[str, Any], records: list[dict[str, Any]]) -> int:
    """Return where a record belongs: before the first run of a later snapshot, whatever the clock was, else last."""
    number = _number(record)
    later = (at for at, other in enumerate(records) if number and _number(other) > number)
    return next(later, len(records))


def _number(record: Mapping[str, Any]) -> int:
    number = str(record.get("snapshot") or "").rpartition("-")[2]
    return int(number) if number.isdigit() else 0
