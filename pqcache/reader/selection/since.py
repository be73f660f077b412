"""since=: the files of a snapshot whose sources an older snapshot lacks, whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.errors import CacheError, UsageError
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.selection import Bools, Counts, Selection, found_once
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.history import ROLLBACK, read_history
from pqcache.store.layout import FILES
from pqcache.store.manifest import FileEntry, Identity, SourceFile
from pqcache.store.manifest_file import read_manifest
from pqcache.store.snapshot import Snapshot
from pqcache.units import format_count

_ID = re.compile(r"\d{8}T\d{6}Z-\d+")
log = logging.getLogger("pqcache.reader")


def base_of(data: LocalDataset, since: Any) -> str:
    """The ID of the snapshot that ``since`` names by ID, number, pin or state; UsageError if none was here."""
    if data.cache is None:
        reason = "only a cache knows what was there before, and this is a directory, a file or one snapshot"
        raise UsageError("since", f"{data.root}: {reason}", "open the cache that 'pqcache sync' made")
    name = str(since.get("snapshot") if isinstance(since, Mapping) else since)
    published = sorted({str(r["snapshot"]) for r in read_history(data.cache) if r.get("snapshot")}, key=_number)
    if name.isdigit():
        name = next((found for found in published if _number(found) == int(name)), name)
    try:
        base = CacheDirectory(data.cache).snapshot(name).id
    except CacheError:
        base = name
    if base not in published:
        last = ", ".join(published[-5:])
        raise UsageError(f"since={name!r}", f"{data.cache} never had this snapshot", f"its last ones are {last}")
    if _number(base) > _number(data.snapshot):
        raise UsageError(f"since={base!r}", f"it is newer than {data.snapshot}, which is read", "name an older one")
    return base


def rows_since(found: Selection, base: str, known: Counts | None) -> Selection:
    """The row groups of files that are made from a source file which the snapshot ``base`` lacks.

    Logs how many rows these are when a dataset is opened, not in each of its workers, which know it.
    """
    data, name = found.data, f"since-{base}"
    is_opened = not any(key.startswith(name) for key in known or ())

    def find() -> pa.Table:
        new, again = data.while_moving(lambda: _new_files(data, base))
        files = data.index.numbers("file")[found.row_groups]
        again = pa.nulls(len(files), pa.bool_()) if again is None else again[files]
        return pa.table({"group": found.row_groups, "new": new[files], "again": again})

    table = found_once(data, name, found.row_groups, known, find)
    counts = np.where(np.asarray(table["new"]), found.counts, 0)
    if is_opened:
        files = format_count(len(np.unique(data.index.numbers("file")[found.row_groups[counts > 0]])), "file")
        again = table["again"]
        most = "some" if again.null_count else f"up to {int(counts[np.asarray(again)].sum()):,}"
        log.info("since %s: %s rows in %s, of which %s were in it", base, f"{counts.sum():,}", files, most)
    return found.with_counts(counts, name)


def _new_files(data: LocalDataset, base: str) -> tuple[Bools, Bools | None]:
    """Which files of the index are new, and which have a source whose path the base has too; None: not known."""
    assert data.cache is not None
    entries = {entry.path: entry for entry in read_manifest(data.root / FILES).files}
    is_left, number = _is_left(data.cache, base), _number(base)
    held: dict[str, list[Identity]] = {}  # the source files of the base
    try:
        for entry in CacheDirectory(data.cache).snapshot(base).manifest().files:
            for file in entry.sources:
                held.setdefault(file.path, []).append(file.identity)
    except CacheError as error:  # it is not kept any more
        if is_left:
            reason = "a rollback has left it and it is not kept any more, so its files are not known"
            raise UsageError(f"since={base!r}", reason, "name the snapshot that was rolled back to") from error
        return _of_each(data, entries, lambda entry: entry.since > number), None

    def is_held(file: SourceFile) -> bool:
        return any(identity.is_still(file.identity) for identity in held.get(file.path, ()))

    def is_new(entry: FileEntry) -> bool:  # not if a table's own compaction has written it
        return (entry.since > number or is_left) and not all(map(is_held, entry.sources))

    new = _of_each(data, entries, is_new)
    return new, _of_each(data, entries, lambda entry: any(file.path in held for file in entry.sources))


def _is_left(cache: Path, base: str) -> bool:
    """Whether a rollback has left it for an older snapshot: later ones are not made from it."""
    is_left = False
    for record in read_history(cache):
        if record.get("command") == ROLLBACK:
            to, of = _number(str(record.get("snapshot"))), _number(str(record.get("previous")))
            is_left = to < _number(base) <= of or (is_left and to != _number(base))
    return is_left


def _of_each(data: LocalDataset, entries: Mapping[str, FileEntry], test: Callable[[FileEntry], bool]) -> Bools:
    return np.array([test(entries[path]) for path in data.index.paths], np.bool_)


def _number(snapshot: str) -> int:
    return Snapshot(Path(snapshot)).number if _ID.fullmatch(snapshot) else 0
