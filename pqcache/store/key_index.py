"""Makes, lists and drops the key indexes of a cache, which sync and repartition update from then on.

An index is built by reading its column and sorting it run by run. A new snapshot takes over runs of the previous one
if it still has their rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import DamagedError, ParquetError, UsageError, disk_errors, first_line
from pqcache.events import Advanced, OnEvent, Started, Warned, ignore
from pqcache.options import COMMANDS, IndexArguments, Unpack, all_values, documented
from pqcache.parquet.misread import check_read_right
from pqcache.store.cache_directory import CacheDirectory, advice_for_file
from pqcache.store.config import read_config, write_config
from pqcache.store.history import recorded_run
from pqcache.store.key_lookup import (
    BITS,
    ROWS,
    SPANS,
    Ints,
    KeyIndex,
    KeyRun,
    Keys,
    check_key_index,
    columns_indexed,
    directory_of,
    field_of,
    is_hashed,
    keys_of,
    read_checksums,
    scramble,
    write_key_index,
)
from pqcache.store.layout import ROW_GROUPS
from pqcache.store.manifest import FileEntry
from pqcache.store.ownership import make_directories
from pqcache.store.row_group_index import Index
from pqcache.store.snapshot import Snapshot, check_not_held
from pqcache.system.disk import check_regular, discard, fsync_path, limit_modes, link_or_copy, remove_tree
from pqcache.units import Stopwatch

JOBS = 4  # threads, at most, as each takes up to 150 MB
_BATCH = 1 << 18  # rows decoded at once
_MIN_ROWS = ROWS // 2  # a run of fewer rows is made again with new rows, so that short runs do not add up

log = logging.getLogger("pqcache.keys")


def build_key_index(
    snapshot: Path, index: Index, column: str, directory: Path, on_event: OnEvent, jobs: int | None = None
) -> None:
    """Build the key index of ``column`` into ``directory``, durably; raises UsageError or ParquetError."""
    field, groups = field_of(index, column), np.flatnonzero(index.rows)
    rows = np.stack([groups, np.zeros_like(groups), index.rows[groups]])
    runs, spans = _make_runs(snapshot, index, rows, field, directory, on_event, jobs)
    write_key_index(directory, field, runs, spans, {})


def refresh_key_indexes(
    columns: Sequence[str], previous: Snapshot | None, snapshot: Snapshot, on_event: OnEvent
) -> None:
    """Build the key indexes of an unpublished snapshot, with the valid runs of the previous one.

    An index that can't be built is left out with a warning, and the new data is published without it.
    """
    index, new = snapshot.index(), snapshot.manifest().files
    old: Sequence[FileEntry] = ()
    before = None
    if previous is not None:
        try:
            old, before = previous.checked_manifest().files, previous.checked_index()
        except DamagedError as error:
            log.debug("key indexes are built from all rows: %s", error)
    moved = np.zeros(0, np.int64) if before is None else _moved(before, index, old, new)
    for column in columns:
        try:
            directory = directory_of(snapshot.path, column)
            known = None
            if previous is not None and before is not None:
                try:
                    known = check_key_index(directory_of(previous.path, column))
                except DamagedError as error:
                    log.debug("the key index of %s is built from all rows: %s", column, error)
            make_directories(directory)
            if known is not None and known.field.equals(field_of(index, column)):
                _refresh(known, moved, snapshot.path, index, directory, on_event)
            else:
                build_key_index(snapshot.path, index, column, directory, on_event)
        except (UsageError, ParquetError) as error:
            remove_tree(directory)
            on_event(Warned(f"{error}; the new snapshot has no key index of {column}"))


def _refresh(known: KeyIndex, moved: Ints, root: Path, index: Index, target: Path, on_event: OnEvent) -> None:
    """Build a key index, reusing runs of ``known``; ``moved`` maps its row groups to new ones."""
    groups = np.append(moved, -1)[known.numbers("group")]  # the last one is for row groups that were removed before
    keep = _kept(known, groups)
    here = keep[known.numbers("run")]
    again = ~here & (groups >= 0)
    new = np.setdiff1d(np.flatnonzero(index.rows), groups)
    rows = np.concatenate(
        [
            np.stack([new, np.zeros_like(new), index.rows[new]]),
            np.stack([groups, known.numbers("first"), known.numbers("length")])[:, again],
        ],
        axis=1,
    )
    kept = [run for run, is_kept in zip(known.runs, keep, strict=True) if is_kept]
    for run in kept:
        if run.keys:
            link_or_copy(known.directory / run.file, target / run.file)
    rows = rows[:, np.lexsort((rows[1], rows[0]))]
    runs, spans = _make_runs(root, index, rows, known.field, target, on_event, None, len(kept))
    number = np.cumsum(keep) - 1
    old = known.spans.filter(pa.array(here))
    old = old.set_column(0, SPANS.field("run"), pa.array(number[known.numbers("run")[here]], pa.int32()))
    old = old.set_column(3, SPANS.field("group"), pa.array(groups[here]))
    write_key_index(
        target, known.field, [*kept, *runs], pa.concat_tables([old, spans]), read_checksums(known.directory)
    )


def _kept(known: KeyIndex, groups: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Runs to reuse: large ones with at least half of their rows left."""
    rows = np.array([run.rows for run in known.runs], np.int64)
    live = np.bincount(known.numbers("run"), known.numbers("length") * (groups >= 0), len(rows))
    return np.asarray((rows >= _MIN_ROWS) & (2 * live >= rows))


def _moved(before: Index, after: Index, old: Sequence[FileEntry], new: Sequence[FileEntry]) -> Ints:
    """The new number of each row group; -1 if its file is gone or has changed."""
    same = {entry.path for entry in set(old) & set(new)}
    starts = np.searchsorted(after.numbers("file"), np.arange(len(after.paths)))
    start_of = {path: int(start) for path, start in zip(after.paths, starts, strict=True) if path in same}
    of_file = np.array([start_of.get(path, -1) for path in before.paths], np.int64)[before.numbers("file")]
    return np.where(of_file < 0, -1, of_file + before.numbers("row_group"))


def _make_runs(
    root: Path,
    index: Index,
    rows: Ints,
    field: pa.Field,
    directory: Path,
    on_event: OnEvent,
    jobs: int | None,
    number: int = 0,
) -> tuple[list[KeyRun], pa.Table]:
    """Write runs, durably; return them, numbered from ``number`` on, and their spans.

    ``rows`` has a column for each range of rows: row group, first row in it, and number of rows.
    """
    groups, firsts, lengths = rows
    begins, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    starts = np.union1d(begins, np.arange(0, total, ROWS))  # cut where a run ends
    source = np.searchsorted(begins, starts, "right") - 1
    run_of = starts // ROWS
    spans = pa.table(
        {
            "run": number + run_of,
            "start": starts % ROWS,
            "length": np.diff(starts, append=total),
            "group": groups[source],
            "first": firsts[source] + starts - begins[source],
        }
    ).cast(SPANS)
    borders = np.searchsorted(run_of, np.arange(-(-total // ROWS) + 1))
    parts = [spans.slice(low, high - low) for low, high in pairwise(borders)]
    on_event(Started("index", total, "rows"))
    runs = []
    with ThreadPoolExecutor(jobs or min(JOBS, os.cpu_count() or 1)) as pool:
        for run in pool.map(lambda part: _make_run(root, index, part, field, directory), parts):
            runs.append(run)
            on_event(Advanced("index", run.rows))
    return runs, spans


def _make_run(root: Path, index: Index, spans: pa.Table, field: pa.Field, directory: Path) -> KeyRun:
    """Write a run durably."""
    rows = sum(spans["length"].to_pylist())
    first, valid = np.empty(rows, np.uint64), np.ones(rows, np.bool_)
    second = np.empty(rows, np.uint64) if is_hashed(field.type) else None
    done = 0
    for keys in _read_all(root, index, spans, field):
        part = slice(done, done + len(keys))
        first[part] = keys.first
        if second is not None:
            second[part] = keys.second
        if keys.valid is not None:
            valid[part] = keys.valid
        done += len(keys)
    there = first if valid.all() else first[valid]
    if not len(there):
        return KeyRun(file="", rows=rows, keys=0, wide=False)
    low = high = None
    if second is None:
        low, high = int(there.min()), int(there.max())
        if high - low >= 1 << (64 - BITS):
            first, second = scramble(first), first
    words = first
    if second is None:
        assert low is not None
        words -= np.uint64(low)
        words <<= np.uint64(BITS)
    else:
        words &= ~np.uint64(ROWS - 1)
    words |= np.arange(rows, dtype=np.uint64)
    if len(there) < rows:
        words = words[valid]
    words.sort()
    parts = [words] if second is None else [words, second[(words & np.uint64(ROWS - 1)).view(np.int64)]]
    run = KeyRun(
        file=f"{os.urandom(8).hex()}.npy",
        rows=rows,
        keys=len(words),
        wide=second is not None,
        low=low,
        high=high,
    )
    with (directory / run.file).open("xb") as file:
        about = {"descr": "<u8", "fortran_order": False, "shape": (len(parts), len(words))}
        np.lib.format.write_array_header_1_0(file, about)
        for words in parts:
            file.write(words.data)
        os.fchmod(file.fileno(), 0o444)
    fsync_path(directory / run.file)
    return run


def _read_all(root: Path, index: Index, spans: pa.Table, field: pa.Field) -> Iterator[Keys]:
    """Read consecutive row groups of a file at once."""
    files, numbers = index.numbers("file"), index.numbers("row_group")
    path, groups, skip, rows, is_complete = "", list[int](), 0, 0, False
    for group, first, length in zip(*(spans[name].to_pylist() for name in ("group", "first", "length")), strict=True):
        file = index.paths[files[group]]
        if groups and (file != path or first or not is_complete):
            yield from _read(root / path, groups, skip, rows, field)
            groups = []
        if not groups:
            path, skip, rows = file, first, 0
        groups.append(int(numbers[group]))
        rows, is_complete = rows + length, first + length == index.rows[group]
    yield from _read(root / path, groups, skip, rows, field)


def _read(path: Path, groups: list[int], skip: int, left: int, field: pa.Field) -> Iterator[Keys]:
    """The keys of ``left`` rows from row ``skip`` on; null if the file lacks the column."""
    try:
        check_regular(path)
        with pq.ParquetFile(path, memory_map=True) as file:
            names = _names_in(file.schema_arrow, field.name)
            if names is None:
                codes = np.zeros(left, np.uint64)
                yield Keys(codes, codes, codes.astype(np.bool_))
                return
            check_read_right(path, file.metadata, file.schema_arrow, names[:1], groups)
            for batch in file.iter_batches(_BATCH, groups, [".".join(names)], use_threads=False):
                column = batch.column(0)
                if names[1:]:
                    column = pc.struct_field(column, names[1:])
                column = column.slice(skip, left)
                skip = max(0, skip - batch.num_rows)
                left -= len(column)
                if len(column):
                    yield keys_of(column, field.type)
                if not left:
                    return
    except FileNotFoundError as error:
        raise ParquetError(path, "the file is gone", advice_for_file(path, "sync again", deep=False)) from error
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"column {field.name!r} cannot be indexed ({first_line(error)})") from error
    raise ParquetError(path, f"has {left:,} rows less than the row-group index says", "verify the cache")


def _names_in(schema: pa.Schema, column: str) -> list[str] | None:
    """The path of a column in a file, like ``a.b`` inside a struct; None if the file lacks it."""
    if column in schema.names:
        return [column]
    names = column.split(".")
    kind = schema.field(names[0]).type if names[0] in schema.names else pa.null()
    for name in names[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return names if names[0] in schema.names else None


@dataclass(frozen=True, kw_only=True)
class KeyView:
    """A key index: its column, the type that keys are compared in, rows of the snapshot in it, bytes on disk.

    ``damage`` is None, or says why it can't be used; then the other values are empty.
    """

    column: str
    type: str
    rows: int
    bytes: int
    damage: str | None = None


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """The key indexes that were built and dropped, and all those of the current snapshot."""

    cache: str
    snapshot: str
    built: tuple[str, ...]
    dropped: tuple[str, ...]
    keys: tuple[KeyView, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@documented(IndexArguments, *COMMANDS["index"])
def index(cache: str | os.PathLike[str], *, on_event: OnEvent = ignore, **given: Unpack[IndexArguments]) -> IndexReport:
    """Make key indexes, by which ``Cache.lookup`` finds the rows of a key without scanning.

    The cache remembers them, and every snapshot that sync or repartition publish has them too. Without ``keys`` and
    ``drop``, only lists the key indexes.

    Args:
        cache: the cache's directory.
        on_event: called with what happens.
        given: the options, as the table in pqcache.options has them.

    >>> index("cache/shop").keys
    ()

    Raises UsageError, ParquetError, CacheError or CacheLocked; then the key indexes are unchanged.
    """
    watch, options = Stopwatch(), all_values(given, *COMMANDS["index"])
    target, keys, drop = CacheDirectory.open(cache), options.keys, options.drop
    if not (keys or drop):
        snapshot, lease = target.lease()
        with lease:
            return _report(target, snapshot, watch)
    with disk_errors(target.path), recorded_run(target, "index", options.wait, on_event) as record:
        check_not_held(target.path)  # the candidate would not have them
        _remove_left(target.tmp_dir)
        snapshot, config = target.snapshot(), read_config(target.path)
        row_groups = snapshot.checked_index()
        for column in keys:
            field_of(row_groups, column)
        for column in drop:
            if column not in (*config.keys, *columns_indexed(snapshot.path)) or column in keys:
                raise UsageError(f"--drop {column}", f"{target.path} has no key index of it")
        built = [column for column in dict.fromkeys(keys) if not _is_intact(snapshot, column)]
        for column in built:
            scratch = target.tmp_dir / f"keys-{os.getpid()}-{os.urandom(4).hex()}"
            make_directories(scratch)
            try:
                build_key_index(snapshot.path, row_groups, column, scratch, on_event, options.jobs)
                limit_modes(scratch, (snapshot.path / ROW_GROUPS).stat().st_mode)  # as it has values of the files too
                _replace(directory_of(snapshot.path, column), scratch, target)
            finally:
                remove_tree(scratch)
        for column in drop:
            _replace(directory_of(snapshot.path, column), None, target)
        remembered = [column for column in dict.fromkeys([*config.keys, *keys]) if column not in drop]
        remembers = replace(config, keys=tuple(remembered))
        write_config(target.path, remembers)
        report = _report(target, snapshot, watch, built, drop)
        done = {"built": built, "dropped": list(drop), "seconds": watch.seconds}
        record.end({"snapshot": snapshot.id, "published": False, **done}, remembers)
        return report


def _remove_left(tmp: Path) -> None:
    """Clean up after dead runs, except downloads, which the next sync takes over."""
    for left in tmp.iterdir():
        if not left.is_dir() or left.name.startswith(("keys-", "removed-")):
            discard(left)


def _is_intact(snapshot: Snapshot, column: str) -> bool:
    with suppress(DamagedError):
        check_key_index(directory_of(snapshot.path, column), deep=True)
        return True
    return False


def _replace(place: Path, built: Path | None, cache: CacheDirectory) -> None:
    """Move a complete, durable key index to its place; with None, only remove the old one."""
    make_directories(place.parent)
    if place.exists():
        trash = cache.tmp_dir / f"removed-{os.urandom(8).hex()}"
        place.rename(trash)
        remove_tree(trash)
    if built is not None:
        built.rename(place)
    fsync_path(place.parent)
    fsync_path(place.parent.parent)


def _report(
    cache: CacheDirectory, snapshot: Snapshot, watch: Stopwatch, built: Sequence[str] = (), dropped: Sequence[str] = ()
) -> IndexReport:
    keys = []
    for column in sorted({*columns_indexed(snapshot.path), *read_config(cache.path).keys}):
        try:
            known = check_key_index(directory_of(snapshot.path, column))
            kind = str(known.field.type).removeprefix("large_")
            keys.append(KeyView(column=column, type=kind, rows=known.rows, bytes=known.size))
        except DamagedError as error:
            keys.append(KeyView(column=column, type="", rows=0, bytes=0, damage=str(error)))
    return IndexReport(
        cache=str(cache.path),
        snapshot=snapshot.id,
        built=tuple(built),
        dropped=tuple(dropped),
        keys=tuple(keys),
        seconds=watch.seconds,
    )
