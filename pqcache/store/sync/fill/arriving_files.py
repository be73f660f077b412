"""The files of an arriving snapshot as the run knows them: what is there of each, and which marks of the map follow."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedWriter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqcache.parquet.footer.footer import MAGIC
from pqcache.store.arriving.arrival_map import ArrivalMap, FileState
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot
from pqcache.store.arriving.wanted import Wanted
from pqcache.store.layout import CHANGED, CHECKED, RANGES
from pqcache.store.manifest import FileEntry
from pqcache.store.row_group_index import Index, doubtful_columns
from pqcache.store.sync.fill.chunk_ranges import chunk_ranges
from pqcache.store.sync.fill.intervals import Intervals
from pqcache.store.sync.fill.scheduler import PIECE, FileRanges, Range
from pqcache.system.disk import open_plain, read_regular

Ints = npt.NDArray[np.int64]

_COLUMNS_PAY = 0.5  # of a row group's bytes: columns that are less are fetched before the others
_GAP = 256 << 10  # bytes around a row group that are fetched with it
_FOOTERS = 512  # of which it is remembered where the chunks are


@dataclass(frozen=True, kw_only=True)
class KnownRanges:
    """Where each row group of the index begins and ends, and from where on the end of each file is there.

    ``ends`` has the `end_digest` of these ends, as they were received; 0 where it is not known.
    Where only some columns are fetched, ``sources`` says where the bytes of a file are at the source, see
    `source_ranges`: those of file I from ``first[I]`` to ``first[I + 1]``.
    """

    row_groups: Ints
    tails: Ints
    ends: Ints
    sources: Ints
    first: Ints

    def write(self, snapshot: Path) -> None:
        """Write them beside the map."""
        with open(snapshot / RANGES, "wb") as file:
            for array in (self.row_groups, self.tails, self.ends, self.sources, self.first):
                np.save(file, array)

    @classmethod
    def read(cls, snapshot: Path) -> KnownRanges:
        """Read what ``write`` wrote; raises OSError or ValueError."""
        try:
            with open(open_plain(snapshot / RANGES, os.O_RDONLY), "rb") as file:
                row_groups, tails, ends, sources, first = (np.load(file) for _ in range(5))
        except EOFError as error:
            raise ValueError(f"{snapshot / RANGES} is too short") from error
        return cls(row_groups=row_groups, tails=tails, ends=ends, sources=sources, first=first)


class ArrivingFiles:
    """What is there of the files of a snapshot; not for several threads at once.

    Positions of files are those of ``entries``, which are in path order, as in the index.
    """

    def __init__(self, snapshot: ArrivingSnapshot, entries: Sequence[FileEntry]) -> None:
        """Read what is there from the map; raises CacheError, OSError or ValueError where that cannot be."""
        index = snapshot.index()
        if index.paths != tuple(entry.path for entry in entries):
            raise ValueError("the index is of other files than the manifest")
        self.snapshot, self.entries = snapshot, entries
        self.map: ArrivalMap = snapshot.map(writable=True)
        self.known = KnownRanges.read(snapshot.path)
        self.checksums: dict[int, str] = read_checked(snapshot.path)
        self.doubtful = doubtful_columns(index)
        self._columns = {name: position for position, name in enumerate(index.data_schema.names)}
        self._file = index.numbers("file")
        self._first = np.searchsorted(self._file, np.arange(len(entries) + 1))
        self._bytes = index.numbers("bytes")
        self._column_bytes = lru_cache(None)(lambda name: _integers(index, f"{name}:bytes"))
        self._chunks = lru_cache(_FOOTERS)(lambda file: chunk_ranges(self.path(file)))
        self._by_column: set[int] = set()
        self._log: BufferedWriter | None = None
        if (len(self.known.row_groups), len(self.known.first)) != (len(index), len(entries) + 1):
            raise ValueError("the ranges are of other files than the manifest")
        self.there = [self._read_there(file) for file in range(len(entries))]
        self.map.arrived_bytes = sum(there.total for there in self.there)

    def close(self) -> None:
        """Close what ``finish`` has opened."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def path(self, file: int) -> Path:
        """Return where a file is."""
        return self.snapshot.path / self.entries[file].path

    def sources(self, file: int) -> Ints:
        """Return where the bytes of a file are at the source; `WHOLE` where they are the source's own."""
        return self.known.sources[self.known.first[file] : self.known.first[file + 1]]

    def is_copy(self, file: int) -> bool:
        """Return whether a file has the bytes of its source file."""
        entry = self.entries[file]
        return not (entry.recipe or entry.sources[0].identity.is_shaped)

    def ranges(self) -> FileRanges:
        """Return what the scheduler has to know.

        The few bytes before a row group, and behind the last one of a file, count as a part of it: they would be a
        request of their own else.
        """
        starts, ends = self.known.row_groups[:, 0].copy(), self.known.row_groups[:, 1].copy()
        if len(starts):
            before = np.concatenate([[0], ends[:-1]])
            before[self._first[:-1][self._first[:-1] < len(starts)]] = 0
            starts = np.where((starts > before) & (starts - before <= _GAP), before, starts)
            last = np.flatnonzero(np.diff(self._file, append=-1))
            tails = self.known.tails[self._file[last]]
            ends[last] = np.where((tails > ends[last]) & (tails - ends[last] <= _GAP), tails, ends[last])
        sizes = [entry.size for entry in self.entries]
        return FileRanges(sizes=sizes, file=self._file, starts=starts, ends=ends, columns=self._wanted_ranges)

    def add(self, file: int, start: int, end: int) -> bool:
        """Note that a range of a file is there, and mark its chunks; return whether the file is complete."""
        self.there[file].add(start, end)
        self.map.arrived_bytes += end - start
        self._mark(file, start, end)
        return self.is_complete(file)

    def is_complete(self, file: int) -> bool:
        """Return whether all bytes of a file are there."""
        return self.there[file].has(0, self.entries[file].size)

    def missing_of(self, wanted: Wanted) -> int:
        """Return how many bytes a reader wants that are not there."""
        total = 0
        for row_group in wanted.row_groups.tolist():
            if not 0 <= row_group < len(self._file):
                continue
            found = None if wanted.columns is None else self._wanted_ranges(row_group, wanted.columns)
            there = self.there[self._file[row_group]]
            first, last = map(int, self.known.row_groups[row_group])
            for low, high in found or [(first, last)]:
                total += sum(end - start for start, end in there.missing(low, high))
        return total

    def forget(self, file: int) -> Range:
        """Note that what is there of a file is not as it should be, but for its end; return what is missing now."""
        tail = int(self.known.tails[file])
        self.there[file].remove(0, tail)
        self.map.chunks[self._first[file] : self._first[file + 1]] = 0
        self.map.arrived_bytes -= tail
        self._mark(file, tail, self.entries[file].size)
        return 0, tail

    def finish(self, file: int, checksum: str) -> None:
        """Note that a file is complete, checked and durable."""
        self.checksums[file] = checksum
        if self._log is None:
            descriptor = open_plain(self.snapshot.path / CHECKED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._log = open(descriptor, "ab")  # noqa: SIM115  closed by ``close``
        self._log.write(b"\n" + json.dumps([file, checksum]).encode() + b"\n")  # behind a torn line
        self._log.flush()
        self.map.files[file] = FileState.ARRIVED

    def give_up(self, file: int, error: tuple[str, str, str]) -> None:
        """Note why a file will never be complete."""
        write_changed(self.snapshot.path, self.entries[file].path, error)
        self.map.files[file] = FileState.CHANGED

    def _read_there(self, file: int) -> Intervals:
        """Return what is there of a file by the map, in which bytes are marked when they are written."""
        there, size = Intervals(), self.entries[file].size
        if self.map.files[file] == FileState.ARRIVED and file in self.checksums:
            there.add(0, size)
            return there
        self.map.files[file] = FileState.CHANGED if self.map.files[file] == FileState.CHANGED else FileState.MISSING
        there.add(int(self.known.tails[file]), size)
        if not self.is_copy(file):
            if not self.known.tails[file]:
                raise ValueError("the checksum of a file is lost that an earlier run had fetched")
            there.add(0, len(MAGIC))
        for row_group in range(self._first[file], self._first[file + 1]):
            marks = self.map.chunks[row_group]
            if marks.all():
                there.add(*map(int, self.known.row_groups[row_group]))
            elif marks.any():
                for name, ranges in self._chunks(file).items():
                    for start, end in ranges[row_group - self._first[file]] if marks[self._columns[name]] else ():
                        there.add(int(start), int(end))
        return there

    def mark_all(self) -> None:
        """Mark the chunks that are there, of a new map; columns that a file does not have need not arrive."""
        index = self.snapshot.index()
        for name, position in self._columns.items():
            self.map.chunks[:, position] = index.table[f"{name}:bytes"].is_null().to_numpy()
        self.map.chunks[self.known.row_groups[:, 0] >= self.known.tails[self._file]] = 1

    def _mark(self, file: int, start: int, end: int) -> None:
        first, last, there = int(self._first[file]), int(self._first[file + 1]), self.there[file]
        for row_group in range(first, last):
            low, high = map(int, self.known.row_groups[row_group])
            if low > end or high < start or self.map.chunks[row_group].all():
                continue
            if there.has(low, high):
                self.map.chunks[row_group] = 1
                continue
            if file not in self._by_column and high - low <= PIECE:
                continue  # all of it is on the way
            for name, ranges in self._chunks(file).items():
                position = self._columns[name]
                if not self.map.chunks[row_group, position] and all(
                    there.has(int(low), int(high)) for low, high in ranges[row_group - first]
                ):
                    self.map.chunks[row_group, position] = 1

    def _wanted_ranges(self, row_group: int, columns: tuple[str, ...]) -> list[Range] | None:
        """Return where the wanted chunks of a row group are; None where they are not clearly less than all of it."""
        wanted = sum(int(self._column_bytes(name)[row_group]) for name in columns if name in self._columns)
        if wanted >= _COLUMNS_PAY * int(self._bytes[row_group]):
            return None
        file = int(self._file[row_group])
        chunks = self._chunks(file)
        self._by_column.add(file)
        return [
            (int(start), int(end))
            for name in columns
            if name in chunks
            for start, end in chunks[name][row_group - int(self._first[file])]
        ]


def _integers(index: Index, column: str) -> Ints:
    """Return a column of the index, with 0 where a file does not have it, as if none has."""
    if column not in index.table.column_names:
        return np.zeros(len(index), np.int64)
    return np.asarray(np.nan_to_num(index.table[column].to_numpy()), np.int64)


def read_changed(snapshot: Path) -> dict[str, list[str]]:
    """Return why files, and with an empty path the snapshot, will never be complete: subject, reason, advice."""
    try:
        known: dict[str, list[str]] = json.loads(read_regular(snapshot / CHANGED))
    except FileNotFoundError:
        return {}
    return known


def write_changed(snapshot: Path, path: str, error: tuple[str, str, str]) -> None:
    """Add why a file, or with an empty path the snapshot, will never be complete; not for several threads at once."""
    known = {**read_changed(snapshot), path: list(error)}
    new = snapshot / f"{CHANGED}.new"
    new.write_text(json.dumps(known))
    new.replace(snapshot / CHANGED)


def read_checked(snapshot: Path) -> dict[int, str]:
    """Return the checksums of the files that are complete; the last line may be torn."""
    found: dict[int, str] = {}
    try:
        lines = read_regular(snapshot / CHECKED).splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            file, checksum = json.loads(line)
        except ValueError:
            continue
        found[file] = checksum
    return found
