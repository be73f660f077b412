"""Small lakes for the fault tests, and all there is to say about a tree of files."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.datasets import shop_table, write_day


def big(version: int, rows: int = 400_000) -> bytes:
    """Return a Parquet file of 8 bytes a row; equal row counts mean equal sizes."""
    sink = pa.BufferOutputStream()
    table = pa.table({"id": (np.arange(rows) * 7919 + version) << 20})
    pq.write_table(table, sink, compression="none", use_dictionary=False, row_group_size=50_000)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def lake_of(tmp_path: Path, days: int = 4, files: int = 2) -> tuple[Path, Path]:
    lake = tmp_path / "lake"
    for day in range(1, days + 1):
        write_day(lake, f"2026-11-{day:02d}", files=files, rows=20, first=day * 1000)
    return lake, tmp_path / "cache"


def rewrite_day(lake: Path, day: str, *, files: int = 2, seed: int = 9) -> None:
    """Overwrite a partition as Spark does: other file names, the marker last."""
    directory = lake / f"dt={day}"
    shutil.rmtree(directory)
    directory.mkdir()
    for number in range(files):
        pq.write_table(shop_table(number * 100 + 50_000, 20, seed), directory / f"part-{number}-{seed}.snappy.parquet")
    (directory / "_SUCCESS").touch()


def state_of(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return all there is to say about a tree, to show that nothing in it was touched."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else os.path.islink(path)
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, content)
    return found
