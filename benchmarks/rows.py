"""What it costs to read only some rows: `ParquetDataset(filters=...)` beside pyarrow.dataset and DuckDB.

    python benchmarks/rows.py --rounds 5 --data /tmp/bench

4 M rows of 12 columns in 100 partitions of 4 row groups each. The conditions leave 1 % of the rows: one partition, a
range of a sorted column, a value of a random column. pqcache reads a shuffled epoch of all columns; the others give
the same rows unshuffled, which is less. "bytes" are those of the row groups that were opened, of all. Rounds are
interleaved; a first round that nothing remembers yet is told apart. Read ratios, not seconds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import pqcache
from pqcache.reader.files import RowGroups
from pqcache.torch import ParquetDataset

PARTITIONS, ROWS, GROUP = 100, 40_000, 10_000
CONDITIONS: dict[str, tuple[str | None, pc.Expression | None]] = {
    "everything": (None, None),
    "one partition": ("day = 37", pc.field("day") == 37),
    "sorted column": ("ts between 1234567 and 1274566", (pc.field("ts") >= 1234567) & (pc.field("ts") <= 1274566)),
    "random column": ("label = 7", pc.field("label") == 7),
}


def write(root: Path) -> Path:
    """Write the data, if it is not there, and make a cache of it."""
    if not (root / "cache" / "current").exists():
        rng = np.random.default_rng(0)
        for day in range(PARTITIONS):
            directory = root / "lake" / f"day={day}"
            directory.mkdir(parents=True, exist_ok=True)
            columns: dict[str, Any] = {f"x{i}": rng.random(ROWS, np.float32) for i in range(9)}
            columns["ts"] = np.arange(day * ROWS, (day + 1) * ROWS)
            columns["label"] = rng.integers(0, 100, ROWS).astype(np.int16)
            columns["id"] = rng.integers(0, 2**62, ROWS)
            pq.write_table(pa.table(columns), directory / "a.parquet", row_group_size=GROUP, use_dictionary=False)
        pqcache.sync(root / "cache", str(root / "lake"))
    return root / "cache"


def epoch(dataset: ParquetDataset) -> int:
    return sum(len(batch["ts"]) for batch in dataset)


def opened_bytes(cache: Path, read: Callable[[], Any]) -> int:
    """Return the bytes of the row groups that are opened while ``read`` runs."""
    index = pqcache.Cache.open(cache).snapshot().index()
    sizes: dict[tuple[str, int], int] = {}
    for line in index.table.select(["file", "row_group", "bytes"]).to_pylist():
        sizes[index.paths[line["file"]], line["row_group"]] = line["bytes"]
    seen = set()
    inner = RowGroups._opened

    def noted(self: RowGroups, group: int) -> Any:
        seen.add((self.paths[int(self.file[group])], int(self.row_group[group])))
        return inner(self, group)

    RowGroups._opened = noted  # type: ignore[method-assign]
    try:
        read()
    finally:
        RowGroups._opened = inner  # type: ignore[method-assign]
    return sum(sizes[place] for place in seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    root = options.data or Path(tempfile.mkdtemp(prefix="pqcache-select-"))
    cache = write(root)
    if options.data is not None and options.rounds == 0:
        return
    snapshot = pqcache.Cache.open(cache).snapshot()
    total = int(snapshot.index().numbers("bytes").sum())
    took: dict[tuple[str, str], list[float]] = {}
    shutil.rmtree(snapshot.path / "_pqcache" / "counts", ignore_errors=True)
    tables = ds.dataset(snapshot.path, format="parquet", partitioning="hive", exclude_invalid_files=False)

    def timed(condition: str, what: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = work()
        took.setdefault((condition, what), []).append(time.perf_counter() - start)
        return found

    rows, share = {}, {}
    for turn in range(options.rounds):
        for name, (where, expression) in CONDITIONS.items():
            made = "made first" if turn == 0 else "made again"
            dataset = timed(name, made, lambda where=where: ParquetDataset(cache, filters=where, batch_size=4096))
            found = {timed(name, "epoch", lambda dataset=dataset: epoch(dataset))}
            if turn == 0:
                share[name] = opened_bytes(cache, lambda dataset=dataset: epoch(dataset)) / total
            found.add(timed(name, "pyarrow", lambda e=expression: tables.to_table(filter=e).num_rows))
            query = f"from read_parquet('{snapshot.path}/**/*.parquet', hive_partitioning=true) where {where or 'true'}"
            found.add(timed(name, "duckdb", lambda query=query: duckdb.sql(query).to_arrow_table().num_rows))
            assert len(found) == 1, (name, found)
            rows[name] = found.pop()
    print(
        "| milliseconds | rows | bytes | made first | made again | epoch | pyarrow.dataset | DuckDB |\n"
        + "|---" * 8
        + "|"
    )
    for name in CONDITIONS:
        kinds = ("made first", "made again", "epoch", "pyarrow", "duckdb")
        cells = [f"{1000 * statistics.median(took.get((name, kind), [float('nan')])):,.0f}" for kind in kinds]
        print(f"| {name} | {rows[name]:,} | {share[name]:.1%} | " + " | ".join(cells) + " |")
    if options.data is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
