"""A table that changes every night, what a cache of it is to hold, and which runs its history is to have.

The judge of rows is pyarrow alone, on the files of the source and of the cache.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[tuple[str, Any], ...]
Rows = Mapping[str, list[Row]]  # of each partition, sorted, without what is null

BROKEN = b"PAR1" + bytes(50)
SETTLE = 600.0
BASE = "dt=0000"  # the partition with most of the rows
_TYPES = {"id": pa.int64(), "price": pa.float64()}


class Judge:
    """Reads rows with pyarrow; a file that has been read, and has not changed since, is not read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], list[Row] | None] = {}

    def rows_below(self, root: Path) -> dict[str, list[Row] | None]:
        """Return the rows of each partition directory below ``root``; None where a file of it cannot be taken."""
        return {path.name: self._partition(path) for path in sorted(root.glob("dt=*")) if any(path.glob("*.parquet"))}

    def held(self, root: Path) -> Rows:
        """Return the rows of each partition of a dataset, all of whose files can be read."""
        rows = self.rows_below(root)
        assert None not in rows.values(), root
        return {name: found for name, found in rows.items() if found is not None}

    def _partition(self, directory: Path) -> list[Row] | None:
        rows: list[Row] = []
        for path in sorted(directory.glob("*.parquet")):
            status = path.stat()
            known = (status.st_ino, status.st_size, status.st_mtime_ns)
            if known not in self._known:
                self._known[known] = _rows_of(path)
            found = self._known[known]
            if found is None:
                return None
            rows += found
        return sorted(rows)


def _rows_of(path: Path) -> list[Row] | None:
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowInvalid, OSError):
        return None
    if any(table.schema.field(name).type != kind for name, kind in _TYPES.items()):
        return None
    return [tuple(sorted((k, v) for k, v in row.items() if v is not None)) for row in table.to_pylist()]


class Lake:
    """A table of a large partition and a few small ones, and what may happen to the small ones in a night."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        self.root, self._dice, self._judge = root, dice, Judge()
        self.clock = 0.0  # seconds that the time of what is written is ahead of the real one
        self.file_of: dict[int, str] = {}  # by the id of a row
        self._next_id = self._next_day = 0
        self._columns: list[str] = []
        self._unfinished: dict[str, int] = {}  # rows of partitions that are being overwritten
        self._to_happen: list[int] | None = None  # what has to happen once before the rest is by chance
        self.write_base()
        for _ in range(4):
            self.new_partition()

    def change(self) -> list[str]:
        """Do up to three of the things that may happen; return their names."""
        happen: list[Callable[[], None]] = [
            self.new_partition, self.add_rows, self.rewrite_file, self.drop_partition, self.break_file,
            self.change_type, self.add_column, self.write_in_the_future, self.touch, self.overwrite,
        ]  # fmt: skip
        weights = [4, 4, 4, 3, 1, 1, 1, 2, 2, 4]
        chosen = self._dice.choices(happen, weights, k=self._dice.choice([0, 1, 1, 2, 3]))
        if self._to_happen is None:
            self._to_happen = self._dice.sample(range(len(happen)), len(happen))
        if self._to_happen:
            chosen.append(happen[self._to_happen.pop()])
        for name in list(self._unfinished):
            if self._dice.random() < 0.4:
                self._finish(name)
        for thing in chosen:
            thing()
        for name in self.bad():
            if self._dice.random() < 0.3:
                self._replace(self.root / name, 40)
        while len(self._partitions()) > 8:
            self.drop_partition()
        return [thing.__name__ for thing in chosen]

    def bad(self) -> list[str]:
        """Return the partitions that cannot be taken."""
        return [name for name, rows in self._judge.rows_below(self.root).items() if rows is None]

    def new_partition(self) -> None:
        self._next_day += 1
        self._write(self.root / f"dt={self._next_day:04d}", self._dice.randrange(5, 30))

    def add_rows(self) -> None:
        self._write(self._partition(), self._dice.randrange(5, 30))

    def rewrite_file(self) -> None:
        path = self._file()
        self._write(path.parent, self._dice.randrange(5, 30), path.name)

    def drop_partition(self) -> None:
        if len(self._partitions()) > 4:
            shutil.rmtree(self._partition())

    def overwrite(self) -> None:
        """Begin to write a partition anew: with none of its rows yet, or with a few."""
        directory = self._partition()
        self._unfinished[directory.name] = len(list(directory.glob("*.parquet"))) * 20 or 20
        rows = self._dice.choice([0, 2, 4])
        self._replace(directory, rows)
        if not rows or self._dice.random() < 0.3:
            (directory / "_temporary").mkdir(parents=True)
            (directory / "_temporary" / "part").write_bytes(b"half")

    def _finish(self, name: str) -> None:
        rows, directory = self._unfinished.pop(name), self.root / name
        if directory.is_dir():
            shutil.rmtree(directory / "_temporary", ignore_errors=True)
            self._write(directory, rows)

    def break_file(self) -> None:
        path = self._partition() / "broken.parquet"
        path.write_bytes(BROKEN)

    def change_type(self) -> None:
        pq.write_table(pa.table({"id": ["x"], "price": [1.5]}), self._partition() / "clash.parquet")

    def add_column(self) -> None:
        self._columns.append(f"c{len(self._columns)}")

    def write_in_the_future(self) -> None:
        path = self._file()
        self.rewrite_file()
        self._set_time(path, 10 * 86400)

    def touch(self) -> None:
        self._set_time(self._file())

    def write_base(self, rows: int = 3000) -> None:
        """Write the large partition anew."""
        self._replace(self.root / BASE, rows)

    def _replace(self, directory: Path, rows: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        if rows:
            self._write(directory, rows)

    def _partitions(self) -> list[Path]:
        return [path for path in sorted(self.root.iterdir()) if path.name != BASE]

    def _partition(self) -> Path:
        return self._dice.choice(self._partitions())

    def _file(self) -> Path:
        found = (path for directory in self._partitions() for path in sorted(directory.glob("p*.parquet")))
        return self._dice.choice(list(found))

    def _write(self, directory: Path, rows: int, name: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        ids = range(self._next_id, self._next_id + rows)
        self._next_id += rows
        columns: dict[str, Any] = {"id": list(ids), "price": [self._dice.random() for _ in ids]}
        columns |= {column: [self._dice.choice([None, f"{column} {n}"]) for n in ids] for column in self._columns[-3:]}
        target = directory / (name or f"p{self._next_id}.parquet")
        pq.write_table(pa.table(columns), target, row_group_size=1000)
        self.file_of |= dict.fromkeys(ids, target.name)
        self._set_time(target)

    def _set_time(self, path: Path, later: float = 0) -> None:
        moment = time.time() + self.clock + later
        os.utime(path, (moment, moment))


@dataclass(frozen=True)
class Verdict:
    """What a sync is to do: refuse, or hold ``rows``, with what is in ``kept`` as it was before, or left out."""

    refused: bool
    rows: Rows
    kept: list[str]
    shrunk: list[str]  # and taken


def verdict(lake: Lake, judge: Judge, held: Rows, force: bool = False) -> Verdict:
    """Return what a sync with the default limits is to make of a lake where ``held`` is in the cache."""
    source = judge.rows_below(lake.root)
    bad = {name for name, rows in source.items() if rows is None}
    new = {name: rows for name, rows in source.items() if rows is not None}
    new |= {name: held[name] for name in bad & held.keys()}
    files = {name: {lake.file_of[dict(row)["id"]] for row in rows} for name, rows in held.items()}
    lost = {name: len(rows) - len(new.get(name, [])) for name, rows in held.items()}
    total = sum(map(len, held.values()))
    dropped = sum(len(some) for name, some in files.items() if name not in source)
    refused = 2 * dropped > sum(map(len, files.values())) or 2 * sum(max(0, n) for n in lost.values()) > total
    if force or refused:
        return Verdict(refused and not force, new, sorted(bad), [])
    waiting, settled = set(), set()
    for name in [name for name, rows in held.items() if 2 * lost[name] > len(rows) and name not in bad]:
        directory = lake.root / name
        there = {path.name: path.stat().st_mtime for path in directory.glob("*.parquet")}
        if (directory / "_temporary").is_dir():
            waiting.add(name)
        elif there and files[name] - there.keys():
            young = max(there.values()) > time.time() + lake.clock - SETTLE
            (waiting if young else settled).add(name)
    gone = 0
    for name in sorted(settled, key=lambda name: (lost[name], name)):
        if 100 * (gone + lost[name]) < total:
            gone += lost[name]
        else:
            waiting.add(name)
    return Verdict(
        False, {**new, **{name: held[name] for name in waiting}}, sorted(bad | waiting), sorted(settled - waiting)
    )
