"""A table that changes every night, what a cache of it is to hold, and which runs its history is to have.

The judge of rows is pyarrow alone, on the files of the source and of the cache.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[tuple[str, Any], ...]
Rows = Mapping[str, list[Row]]  # of each partition, sorted, without what is null

BROKEN = b"PAR1" + bytes(50)
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
    """A table of a few partitions, and what may happen to it in a night."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        self.root, self._dice, self._judge = root, dice, Judge()
        self._next_id = self._next_day = 0
        self._columns: list[str] = []
        self._to_happen: list[int] | None = None  # what has to happen once before the rest is by chance
        for _ in range(4):
            self.new_partition()

    def change(self) -> list[str]:
        """Do up to three of the things that may happen; return their names."""
        happen: list[Callable[[], None]] = [
            self.new_partition, self.add_rows, self.rewrite_file, self.drop_partition, self.break_file,
            self.change_type, self.add_column, self.write_in_the_future, self.touch,
        ]  # fmt: skip
        weights = [4, 4, 4, 3, 1, 1, 1, 2, 2]
        chosen = self._dice.choices(happen, weights, k=self._dice.choice([0, 1, 1, 2, 3]))
        if self._to_happen is None:
            self._to_happen = self._dice.sample(range(len(happen)), len(happen))
        if self._to_happen:
            chosen.append(happen[self._to_happen.pop()])
        for thing in chosen:
            thing()
        for name in self.bad():
            if self._dice.random() < 0.3:
                self._replace(self.root / name, 40)
        while len(list(self.root.iterdir())) > 8:
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
        if len(list(self.root.iterdir())) > 4:
            shutil.rmtree(self._partition())

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
        moment = path.stat().st_mtime + 10 * 86400
        os.utime(path, (moment, moment))

    def touch(self) -> None:
        os.utime(self._file())

    def lose_rows(self) -> str:
        """Leave a partition with a tenth of its rows; return its name."""
        rows = {name: len(found) for name, found in self._judge.rows_below(self.root).items() if found}
        name = max(rows, key=lambda name: rows[name])
        self._replace(self.root / name, max(1, rows[name] // 10))
        return name

    def _replace(self, directory: Path, rows: int) -> None:
        shutil.rmtree(directory)
        self._write(directory, rows)

    def _partition(self) -> Path:
        return self._dice.choice(sorted(self.root.iterdir()))

    def _file(self) -> Path:
        good = [path for path in sorted(self.root.glob("dt=*/*.parquet")) if path.name[0] == "p"]
        return self._dice.choice(good)

    def _write(self, directory: Path, rows: int, name: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        ids = range(self._next_id, self._next_id + rows)
        self._next_id += rows
        columns: dict[str, Any] = {"id": list(ids), "price": [self._dice.random() for _ in ids]}
        columns |= {column: [self._dice.choice([None, f"{column} {n}"]) for n in ids] for column in self._columns[-3:]}
        target = directory / (name or f"p{self._next_id}.parquet")
        pq.write_table(pa.table(columns), target, row_group_size=10)
