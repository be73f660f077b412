"""What a reader takes of memory: bounded by `memory`, and given back after an error."""

from __future__ import annotations

import gc
import subprocess
import sys
import traceback
from collections import deque
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.torch import ParquetDataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
]


_READ_ALL = """
import sys, pqcache
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
batches = pqcache.Cache(sys.argv[1]).batches(memory="200MB", batch_size=256)
before, rows = peak(), 0
for batch in batches:
    rows += batch.num_rows
    del batch
print(peak() - before, rows)
"""


def test_long_rows_behind_short_ones(tmp_path: Path) -> None:
    """As many batches are gathered together as are small, and no more once they are large."""
    short, long = ["a"] * 100_000, [str(number) * 20_000 for number in range(10)] * 100
    for number, texts in enumerate([short] * 10 + [long] * 8):
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{number:02}.parquet", use_dictionary=False)
    command = [sys.executable, "-c", _READ_ALL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    taken, rows = map(int, done.stdout.split())
    assert rows == 10 * len(short) + 8 * len(long)
    assert taken < 330e6


def test_an_error_does_not_keep_decoded_rows(tmp_path: Path) -> None:
    table = pa.table({"text": [str(number) * 1000 for number in range(10)] * 2000})
    for number in range(20):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    del table
    gc.collect()
    before = pa.total_allocated_bytes()
    batches = iter(ParquetDataset(tmp_path, batch_size=100, window=4))
    next(batches)
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    gc.disable()
    try:
        with pytest.raises(ParquetError) as error:
            deque(batches, maxlen=0)
        assert str(tmp_path) in str(error.value)
        assert pa.total_allocated_bytes() - before < 1e6
    finally:
        gc.enable()


def test_an_error_of_a_transform_keeps_its_frames(tmp_path: Path) -> None:
    """Debuggers show them; and an error may be its own cause."""
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "a.parquet")

    def transform(batch: object) -> None:
        row = 7
        try:
            raise ValueError(f"bad row {row}")
        except ValueError as error:
            raise error from error

    def handled() -> None:
        mine = "kept"
        raise KeyError(mine)

    def frames(error: BaseException) -> dict[str, dict[str, object]]:
        return {frame.f_code.co_name: frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)}

    try:
        handled()
    except KeyError as found:
        before = found
        with pytest.raises(ValueError, match="bad row 7") as error:
            list(ParquetDataset(tmp_path, batch_size=5, transform=transform))
    assert frames(error.value)["transform"]["row"] == 7
    assert frames(before)["handled"]["mine"] == "kept"
