"""What is kept of the rows that are chosen does not grow with their number."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, FILES = 1 << 20, 128
OPEN = """
import resource, sys
from pqcache.torch import ParquetDataset, Split

def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()
how = {"filters": "x > 2", "split": Split("key", 0.0, 0.5), "weights": "w"}
print(len(ParquetDataset(sys.argv[1], ["x"], batch_size=1024, **how)), peak() - before)
"""


@pytest.mark.deep
def test_many_rows_open_in_little_memory(tmp_path: Path) -> None:
    number = np.arange(ROWS)
    columns = {"x": number * 10 // ROWS, "key": number * 5000 // ROWS, "w": np.array([0.5, 1, 2.5])[number * 3 // ROWS]}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet", row_group_size=ROWS)
    for file in range(1, FILES):
        shutil.copy(tmp_path / "0.parquet", tmp_path / f"{file}.parquet")
    done = subprocess.run([sys.executable, "-c", OPEN, tmp_path], capture_output=True, text=True, check=True)
    batches, grown = map(int, done.stdout.split())
    assert batches > 0.3 * ROWS * FILES / 1024
    assert grown < 300 << 20
