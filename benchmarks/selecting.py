"""What choosing rows costs: filters, keys and sequences, beside DuckDB and pyarrow.dataset on the same files.

    python benchmarks/selecting.py                          # everything: 20 million rows in 10,000 row groups
    python benchmarks/selecting.py --small --only lookup    # 2 million rows; filter, sorted, lookup, build, sequence

What takes turns in a round sees the same noise; figures are medians over rounds. Bytes are those that the process asked
the system for (rchar in /proc/self/io), with files read rather than mapped, so they are what a cold disk would have to
give. Files are in the page cache, so seconds are those of processors. Read ratios.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

import pqcache

PARTITIONS, GROUPS = 100, 100  # row groups of each partition
COLUMNS = ["ts", "user_id", "a", "b", "c", "d"]


def make(root: Path, rows: int) -> tuple[Path, Path]:
    """Write the rows once, sorted by ``ts``; return a cache of 10,000 row groups of them, and one of large ones."""
    small, large = root / "small", root / "large"
    if (large / "current").exists():
        return small, large
    rng = np.random.default_rng(0)
    group = rows // (PARTITIONS * GROUPS)
    for day in range(PARTITIONS):
        path = root / "lake" / f"dt={day:03d}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        count = group * GROUPS
        users = rng.integers(0, rows // 10, count)
        table = pa.table(
            {
                "ts": np.arange(day * count, (day + 1) * count),
                "user_id": users,
                "user": np.char.add("user-", users.astype(str)),
                **{name: rng.standard_normal(count).astype(np.float32) for name in "abcd"},
            }
        )
        pq.write_table(table, path, row_group_size=group)
    for cache in (small, large):
        pqcache.sync(str(root / "lake"), cache)
    pqcache.repartition(large, row_group_size=8 << 20)
    return small, large


def read_bytes() -> int:
    """Return how many bytes this process has read so far, from the page cache or the disk."""
    return int(Path("/proc/self/io").read_text().split()[1])


def unmap() -> None:
    """Let pyarrow read files where it would map them into memory: what is mapped is not counted."""
    real = pq.ParquetFile.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **{**named, "memory_map": False})

    pq.ParquetFile.__init__ = init


Contest = dict[str, Callable[[], Any]]


def run(title: str, contest: Contest, rounds: int, unit: float = 1e3, bytes_too: bool = False) -> dict[str, float]:
    """Let the contestants take turns; print and return the medians of what each took, the first turn left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    amounts: dict[str, list[int]] = {name: [] for name in contest}
    said: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, call in contest.items():
            before, began = read_bytes(), time.perf_counter()
            said[name] = call()
            if number:
                seconds[name].append(time.perf_counter() - began)
                amounts[name].append(read_bytes() - before)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    first = next(iter(medians.values()))
    print(f"\n{title}")
    for name, median in medians.items():
        volume = f"{statistics.median(amounts[name]) / 1e6:>11.2f} MB" if bytes_too else ""
        time_ = f"{median * unit:>11.2f} {'ms' if unit == 1e3 else 's'}"
        print(f"  {name:<34}{time_}{volume}   x {median / first:<8.2f}{said[name]}", flush=True)
    return medians


def epoch(path: Path, filters: Any = None, columns: list[str] | None = None) -> int:
    """Read an epoch in shuffled batches; return its rows."""
    batches = pqcache.Cache.open(path).batches(columns or COLUMNS, filters=filters, window=4)
    return sum(batch.num_rows for batch in batches)


def files(path: Path) -> str:
    """Return what DuckDB reads."""
    return f"read_parquet('{path}/current/**/*.parquet', hive_partitioning = true, filename = true)"


def by_partition(path: Path, rounds: int) -> None:
    """One of 100 partitions."""
    contest: Contest = {
        "pqcache, 1 % of the partitions": lambda: epoch(path, [("dt", "=", "042")]),
        "pqcache, all": lambda: epoch(path),
    }
    run("An epoch under a filter on partitions", contest, rounds, bytes_too=True)


def by_range(path: Path, rows: int, rounds: int) -> None:
    """One percent of the rows by the column that they are sorted by, which is no partition column."""
    low, high = rows // 2 + 7, rows // 2 + 7 + rows // 100
    field = pads.field("ts")
    names = ", ".join(COLUMNS)

    def arrow() -> int:
        data = pads.dataset(path / "current", partitioning="hive", exclude_invalid_files=False)
        return int(data.to_table(columns=COLUMNS, filter=(field >= low) & (field < high)).num_rows)

    def duck() -> int:
        with duckdb.connect() as connection:
            query = f"select {names} from {files(path)} where ts >= {low} and ts < {high}"
            return int(connection.sql(query).to_arrow_table().num_rows)

    def ours() -> int:
        for counts in (path / "current" / "_pqcache").glob("counts*"):  # so that rows are counted each time
            shutil.rmtree(counts)
        return remembered()

    def remembered() -> int:
        return epoch(path, [("ts", ">=", low), ("ts", "<", high)])

    contest: Contest = {
        "pqcache, counted before": remembered,
        "pqcache, first time": ours,
        "pyarrow.dataset": arrow,
        "DuckDB": duck,
        "pqcache, all rows": lambda: epoch(path),
    }
    run("An epoch under a filter on a sorted column that keeps 1 % of the rows", contest, rounds, bytes_too=True)


def by_key(path: Path, rows: int, rounds: int) -> None:
    """The rows of a key, which lie anywhere."""
    pqcache.index(path, keys=["user_id", "user"])
    cache = pqcache.Cache.open(path)
    data = pads.dataset(path / "current", partitioning="hive")
    connection = duckdb.connect()
    keys = iter(np.random.default_rng(1).integers(0, rows // 10, 100_000).tolist())
    many = np.random.default_rng(2).integers(0, rows // 10, 1000)

    def arrow(column: str, key: Any) -> int:
        return int(data.to_table(columns=["ts"], filter=pads.field(column) == key).num_rows)

    def duck(column: str, key: Any) -> int:
        query = f"select filename, file_row_number from {files(path)[:-1]}, file_row_number = true) where {column} = ?"
        return len(connection.execute(query, [key]).fetchall())

    run(
        f"The rows of a key, {len(cache.snapshot().index()):,} row groups of {rows:,} rows",
        {
            "pqcache, integer": lambda: len(cache.lookup("user_id", next(keys))),
            "pqcache, string": lambda: len(cache.lookup("user", f"user-{next(keys)}")),
            "pqcache, 1,000 integers": lambda: len(cache.lookup("user_id", many)),
            "pqcache, and their rows are read": lambda: (
                cache.read(cache.lookup("user_id", next(keys)), ["ts"]).num_rows
            ),
            "pyarrow.dataset, integer": lambda: arrow("user_id", next(keys)),
            "pyarrow.dataset, string": lambda: arrow("user", f"user-{next(keys)}"),
            "DuckDB, integer": lambda: duck("user_id", next(keys)),
            "DuckDB, string": lambda: duck("user", f"user-{next(keys)}"),
        },
        rounds,
    )


def building(paths: tuple[Path, Path], rounds: int) -> None:
    """Building a key index beside reading its column, each on all cores."""
    for path in paths:
        groups = len(pqcache.Cache.open(path).snapshot().index())
        data = pads.dataset(path / "current", partitioning="hive")
        for column in ("user_id", "user", "ts"):

            def build(path: Path = path, column: str = column) -> str:
                if column in [key.column for key in pqcache.index(path).keys]:
                    pqcache.index(path, drop=[column])
                (key,) = [key for key in pqcache.index(path, keys=[column]).keys if key.column == column]
                return f"{key.bytes / key.rows:.0f} bytes a row"

            contest: Contest = {
                f"read {column} with pyarrow": lambda d=data, c=column: d.to_table(columns=[c]).num_rows,
                f"build the key index of {column}": build,
            }
            run(f"Building a key index, {groups:,} row groups", contest, rounds, 1.0)


def sequences(path: Path, rounds: int) -> None:
    """Samples of three consecutive rows, beside as many rows alone."""
    from pqcache import Sequence
    from pqcache.torch import ParquetDataset

    def read(batch_size: int, sequence: Any = None) -> int:
        dataset = ParquetDataset(path, columns=COLUMNS, batch_size=batch_size, window=4, sequence=sequence)
        return sum(batch["a"].numel() for batch in dataset)

    rows = read(3072)
    times: dict[str, list[float]] = {"plain": [], "apart": [], "overlapping": []}
    for number in range(rounds + 1):
        for name in times:
            began = time.perf_counter()
            if name == "plain":
                got = read(3072)
            else:
                got = read(1024, Sequence(length=3, order_by="ts", stride=3 if name == "apart" else 1))
            if number:
                times[name].append((time.perf_counter() - began) / got * rows)
    plain = statistics.median(times["plain"])
    print(f"\nSequences of length 3: seconds for {rows:,} rows in batches of 3,072 rows")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"  {name:<34}{median:>11.2f} s   x {median / plain:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench-selecting"))
    parser.add_argument("--only", default="filter,sorted,lookup,build,sequence")
    parser.add_argument("--small", action="store_true", help="a tenth of the rows, fewer rounds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make", action="store_true", help="only write the data")
    options = parser.parse_args()
    rows = (2_000_000 if options.small else 20_000_000) // (PARTITIONS * GROUPS) * PARTITIONS * GROUPS
    rounds = min(options.rounds, 2) if options.small else options.rounds
    small, large = make(options.data / f"{rows}", rows)
    if options.make:
        return
    unmap()
    steps: dict[str, Callable[[], None]] = {
        "filter": lambda: by_partition(large, rounds),
        "sorted": lambda: by_range(small, rows, rounds),
        "lookup": lambda: by_key(small, rows, 2 * rounds),
        "build": lambda: building((small, large), rounds),
        "sequence": lambda: sequences(large, rounds),
    }
    for name in options.only.split(","):
        steps[name]()


if __name__ == "__main__":
    main()
