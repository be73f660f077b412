"""Build key indexes: read a column, sort it run by run, and take over runs of the previous snapshot."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import DamagedError, ParquetError, UsageError, first_line
from pqcache.events import Advanced, OnEvent, Started, Warned
from pqcache.parquet.footer.doubtful import check_read_right
from pqcache.store.cache_directory import advice_for_file
from pqcache.store.keys.codes import Keys, is_hashed, keys_of, scramble
from pqcache.store.keys.lookup import (
    BITS,
    ROWS,
    SPANS,
    KeyIndex,
    KeyRun,
    check_key_index,
    directory_of,
    field_of,
    read_checksums,
    write_key_index,
)
from pqcache.store.manifest import FileEntry
from pqcache.store.ownership import make_directories
from pqcache.store.row_group_index import Index
from pqcache.store.selected_rows import Ints
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import check_regular, fsync_path, link_or_copy, remove_tree

JOBS = 4  # threads, at most, as each takes up to 150 MB
_BATCH = 1 << 18  # rows decoded at once
_TASK = 1 << 20  # rows decoded ahead by a thread; row groups of more are decoded while they are sorted
_BLOCK = 1 << 15  # words handled at once, so that they are still in the processor's cache
_FOOTERS = 64  # kept for the next row groups of the same file
_MIN_ROWS = ROWS // 2  # a run of fewer rows is made again with new rows, so that short runs do not add up

log = logging.getLogger("pqcache.keys")


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Rows to be indexed: ``rows`` of a row group from ``first`` on."""

    path: str
    row_group: int
    group: int
    first: int
    rows: int
    complete: bool


def build_key_index(
    snapshot: Path, index: Index, column: str, directory: Path, on_event: OnEvent, jobs: int | None = None
) -> None:
    """Build the key index of ``column`` into ``directory``, durably; raises UsageError or ParquetError."""
    field = field_of(index, column)
    ranges = _ranges(index, np.zeros(len(index), np.bool_))
    runs, spans = _make_runs(snapshot, ranges, field, directory, on_event, jobs)
    write_key_index(directory, field, runs, pa.table(spans, SPANS), {})


def refresh_key_indexes(
    columns: Sequence[str], previous: Snapshot | None, snapshot: Snapshot, on_event: OnEvent
) -> None:
    """Build the key indexes of a snapshot that is not published yet, with the runs of the previous one that are valid.

    One that cannot be built is left out with a warning, so that new data is published without it.
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
    """Build a key index with the runs of ``known`` whose rows still exist; ``moved`` has their new row groups."""
    source = known.directory
    groups = np.append(moved, -1)[known.numbers("group")]  # the last one is for row groups that were removed before
    keep = _kept(known, groups)
    here = keep[known.numbers("run")]
    indexed = np.zeros(len(index), np.bool_)
    indexed[groups[groups >= 0]] = True
    ranges = _ranges(index, indexed)
    again = ~here & (groups >= 0)
    ranges += [
        _range(index, int(group), int(first), int(rows))
        for group, first, rows in zip(
            groups[again], known.numbers("first")[again], known.numbers("length")[again], strict=True
        )
    ]
    ranges.sort(key=lambda part: (part.group, part.first))
    kept = [run for run, is_kept in zip(known.runs, keep, strict=True) if is_kept]
    for run in kept:
        if run.keys:
            link_or_copy(source / run.file, target / run.file)
    runs, spans = _make_runs(root, ranges, known.field, target, on_event, None, len(kept))
    number = np.cumsum(keep) - 1
    old = known.spans.filter(pa.array(here))
    old = old.set_column(0, SPANS.field("run"), pa.array(number[known.numbers("run")[here]], pa.int32()))
    old = old.set_column(3, SPANS.field("group"), pa.array(groups[here]))
    both = pa.concat_tables([old, pa.table(spans, SPANS)])
    write_key_index(target, known.field, [*kept, *runs], both, read_checksums(source))


def _kept(known: KeyIndex, groups: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which runs are taken over: those with enough rows of which at least half still exist."""
    count = len(known.runs)
    rows = np.array([run.rows for run in known.runs], np.int64)
    live = np.bincount(known.numbers("run"), known.numbers("length") * (groups >= 0), count)
    return np.asarray((rows >= _MIN_ROWS) & (2 * live >= rows))


def _moved(before: Index, after: Index, old: Sequence[FileEntry], new: Sequence[FileEntry]) -> Ints:
    """Return for each row group of a snapshot its number in the next, -1 where its file is gone or another one."""
    same = {entry.path for entry in set(old) & set(new)}
    starts = np.searchsorted(after.numbers("file"), np.arange(len(after.paths)))
    start_of = {path: int(start) for path, start in zip(after.paths, starts, strict=True) if path in same}
    of_file = np.array([start_of.get(path, -1) for path in before.paths], np.int64)[before.numbers("file")]
    return np.where(of_file < 0, -1, of_file + before.numbers("row_group"))


def _range(index: Index, group: int, first: int, rows: int) -> RowRange:
    path = index.paths[index.table["file"][group].as_py()]
    return RowRange(
        path=path,
        row_group=index.table["row_group"][group].as_py(),
        group=group,
        first=first,
        rows=rows,
        complete=rows == index.rows[group],
    )


def _ranges(index: Index, indexed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[RowRange]:
    """Return the row groups that are not indexed yet."""
    files, numbers, rows = index.numbers("file"), index.numbers("row_group"), index.rows
    wanted = np.flatnonzero(~indexed & (rows > 0)).tolist()
    return [
        RowRange(
            path=index.paths[files[i]], row_group=int(numbers[i]), group=i, first=0, rows=int(rows[i]), complete=True
        )
        for i in wanted
    ]


def _make_runs(
    root: Path,
    ranges: Sequence[RowRange],
    field: pa.Field,
    directory: Path,
    on_event: OnEvent,
    jobs: int | None,
    number: int = 0,
) -> tuple[list[KeyRun], dict[str, list[int]]]:
    """Write the runs of some rows into ``directory``, durably; return them, from ``number`` on, and their spans."""
    spans: dict[str, list[int]] = {name: [] for name in SPANS.names}
    writing: deque[Future[KeyRun]] = deque()
    durable: list[Future[None]] = []
    runs: list[KeyRun] = []
    jobs = jobs or min(JOBS, os.cpu_count() or 1)
    on_event(Started("index", sum(part.rows for part in ranges), "rows"))
    with ThreadPoolExecutor(jobs) as pool, ThreadPoolExecutor(1) as disk:

        def write() -> None:
            writing.append(pool.submit(_write_run, directory, buffer))
            while len(writing) > jobs:
                wrote(writing.popleft().result())

        def wrote(run: KeyRun) -> None:
            runs.append(run)
            if run.keys:
                durable.append(disk.submit(fsync_path, directory / run.file))

        buffer = _Buffer(is_hashed(field.type))
        for task, found in _read_all(pool, root, ranges, field, jobs):
            waiting = iter(task)
            part, done = next(waiting), 0
            for keys in found:
                at = 0
                while at < len(keys):
                    if done == part.rows:
                        part, done = next(waiting), 0
                    count = min(len(keys) - at, part.rows - done, ROWS - buffer.rows)
                    values = (number + len(runs) + len(writing), buffer.rows, count, part.group, part.first + done)
                    for name, value in zip(SPANS.names, values, strict=True):
                        spans[name].append(value)
                    buffer.take(keys, at, count)
                    at, done = at + count, done + count
                    if buffer.rows == ROWS:
                        write()
                        buffer = _Buffer(is_hashed(field.type))
            on_event(Advanced("index", sum(part.rows for part in task)))
        if buffer.rows:
            write()
        for future in writing:
            wrote(future.result())
        for synced in durable:
            synced.result()
    return runs, spans


class _Buffer:
    """The keys of up to ``ROWS`` rows that follow each other."""

    def __init__(self, hashed: bool) -> None:
        self.rows = 0
        self.first = np.empty(ROWS, np.uint64)
        self.second = np.empty(ROWS, np.uint64) if hashed else None
        self.valid: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None

    def take(self, keys: Keys, at: int, count: int) -> None:
        """Append some of ``keys``."""
        here, there = slice(self.rows, self.rows + count), slice(at, at + count)
        self.first[here] = keys.first[there]
        if self.second is not None and keys.second is not None:
            self.second[here] = keys.second[there]
        if keys.valid is not None and self.valid is None:
            self.valid = np.ones(ROWS, np.bool_)
        if self.valid is not None:
            self.valid[here] = True if keys.valid is None else keys.valid[there]
        self.rows += count


def _write_run(directory: Path, buffer: _Buffer) -> KeyRun:
    """Sort a buffer's keys and write them; the buffer is used up."""
    first, second = buffer.first[: buffer.rows], buffer.second
    valid = None if buffer.valid is None else buffer.valid[: buffer.rows]
    there = first if valid is None else first[valid]
    if not len(there):
        return KeyRun(file="", rows=buffer.rows, keys=0, wide=False)
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
    for start in range(0, buffer.rows, _BLOCK):
        stop = min(start + _BLOCK, buffer.rows)
        words[start:stop] |= np.arange(start, stop, dtype=np.uint64)
    if valid is not None:
        words = words[valid]
    words.sort()
    parts = [words] if second is None else [words, second[(words & np.uint64(ROWS - 1)).view(np.int64)]]
    run = KeyRun(
        file=f"{os.urandom(8).hex()}.npy",
        rows=buffer.rows,
        keys=len(words),
        wide=second is not None,
        low=low,
        high=high,
    )
    with (directory / run.file).open("xb") as file:
        about = {"descr": "<u8", "fortran_order": False, "shape": (len(parts), len(words))}
        np.lib.format.write_array_header_1_0(file, about)
        for part in parts:
            file.write(part.data)
        os.fchmod(file.fileno(), 0o444)
    return run


def _read_all(
    pool: ThreadPoolExecutor, root: Path, ranges: Sequence[RowRange], field: pa.Field, jobs: int
) -> Iterator[tuple[list[RowRange], Iterable[Keys]]]:
    """Yield all ranges in order with their rows' keys, decoded ahead on threads unless they are very large."""
    footers: dict[Path, pq.FileMetaData] = {}
    ahead: deque[tuple[list[RowRange], Future[list[Keys]] | None]] = deque()
    tasks = _tasks(ranges)
    while True:
        for task in islice(tasks, jobs + 1 - len(ahead)):
            large = sum(part.rows for part in task) > ROWS
            ahead.append((task, None if large else pool.submit(_read_all_rows, root, task, field, footers)))
        if not ahead:
            return
        task, future = ahead.popleft()
        yield task, _read(root, task, field, footers) if future is None else future.result()


def _read_all_rows(
    root: Path, task: Sequence[RowRange], field: pa.Field, footers: dict[Path, pq.FileMetaData]
) -> list[Keys]:
    return list(_read(root, task, field, footers))


def _tasks(ranges: Sequence[RowRange]) -> Iterator[list[RowRange]]:
    """Yield what is read at once: row groups of one file that follow each other, or a part of one."""
    task: list[RowRange] = []
    rows = 0
    for part in ranges:
        if task and (part.path != task[0].path or not (part.complete and task[0].complete) or rows + part.rows > _TASK):
            yield task
            task, rows = [], 0
        task.append(part)
        rows += part.rows
    if task:
        yield task


def _read(
    root: Path, task: Sequence[RowRange], field: pa.Field, footers: dict[Path, pq.FileMetaData]
) -> Iterator[Keys]:
    """Yield the keys of some row groups of a file, or of a part of one; what it lacks are nulls."""
    path, skip, left = root / task[0].path, task[0].first, sum(part.rows for part in task)
    try:
        check_regular(path)
        with pq.ParquetFile(path, metadata=footers.get(path), memory_map=True) as file:
            if len(footers) > _FOOTERS:
                footers.clear()
            footers[path] = file.metadata
            names = _names_in(file.schema_arrow, field.name)
            if names is None:
                yield from _nulls(left, is_hashed(field.type))
                return
            groups = [part.row_group for part in task]
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
    """Return where a file has a column, ``a.b`` inside of structs too, as a list of names; None where it lacks it."""
    if column in schema.names:
        return [column]
    names = column.split(".")
    kind = schema.field(names[0]).type if names[0] in schema.names else pa.null()
    for name in names[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return names if names[0] in schema.names else None


def _nulls(rows: int, hashed: bool) -> Iterator[Keys]:
    for low in range(0, rows, _BATCH):
        codes = np.zeros(min(_BATCH, rows - low), np.uint64)
        yield Keys(codes, codes if hashed else None, codes.astype(np.bool_))
