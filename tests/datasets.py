"""Small Hive datasets for tests: made locally, put on any store, and compared by value."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def shop_table(first: int, rows: int, seed: int = 0) -> pa.Table:
    """Return ``rows`` rows with ids from ``first``; ``note`` has a null now and then."""
    rng = np.random.default_rng([seed, first])
    lengths = rng.integers(0, 9, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(rng.integers(0, 50_000, int(lengths.sum())), pa.int32())
    )
    return pa.table(
        {
            "id": pa.array(np.arange(first, first + rows), pa.int64()),
            "title": pa.array([f"item {i} of {seed}" for i in range(first, first + rows)]),
            "tokens": tokens,
            "price": pa.array(rng.random(rows)),
            "note": pa.array([None if i % 7 == 0 else i for i in range(rows)], pa.int32()),
            "image": pa.array([rng.bytes(int(n)) for n in rng.integers(50, 200, rows)], pa.binary()),
        }
    )


def write_day(root: Path, day: str, *, files: int = 3, rows: int = 400, first: int = 0, seed: int = 0) -> None:
    """Write one ``dt=`` partition of ``files`` files with ``rows`` rows each, and its ``_SUCCESS``."""
    directory = root / f"dt={day}"
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        table = shop_table(first + number * rows, rows, seed)
        pq.write_table(table, directory / f"part-{number:05d}.parquet", row_group_size=max(1, rows // 2))
    (directory / "_SUCCESS").touch()


def write_shop(root: Path, days: int = 3, **how: int) -> Path:
    """Write ``days`` partitions with unique ids, and files that every reader skips."""
    for day in range(days):
        write_day(root, f"2026-11-{day + 1:02d}", first=day * 100_000, **how)
    (root / "_metadata_of_someone").write_text("not data")
    (root / "dt=2026-11-01" / ".part-00000.parquet.crc").write_bytes(b"crc")
    return root


def rows_of(directory: Path) -> list[tuple[object, ...]]:
    """Return every row below ``directory`` as DuckDB reads it, sorted, without row order."""
    return duckdb.sql(
        f"select * from read_parquet('{directory}/**/*.parquet', hive_partitioning = true) order by all"
    ).fetchall()


def files_of(directory: Path) -> list[str]:
    """Return the relative paths of all files below ``directory`` that readers do not skip."""
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*.parquet")
        if path.is_file() and not path.name.startswith(".")
    )
