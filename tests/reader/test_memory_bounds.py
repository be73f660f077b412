"""What a reader takes of memory: bounded by `memory`, also where a footer lies about its pages."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.parquet.footer import thrift

_READ = """
import sys, pqcache
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
batches = pqcache.Cache(sys.argv[1]).batches(memory="64MB", batch_size=256)
before = peak()
try:
    next(batches)
except pqcache.PqcacheError as error:
    print(peak() - before, error)
else:
    print(peak() - before)
"""
_ALLOWED = 250e6  # bytes: `memory`, and what docs/loading.md says is taken beside it

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
]


def _bomb(path: Path) -> None:
    """400 MB of zeros, packed to nothing, and a footer that says that they are 100 KB."""
    table = pa.table({"id": range(2000), "x": pa.array([bytes(200 << 10)] * 2000, pa.binary())})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    data = path.read_bytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = thrift.decode(data[-8 - size : -8], "footer")
    for row_group in footer[4][1].values:
        row_group[2] = (6, 100_000)
        for chunk in row_group[1][1].values:
            metadata = chunk[3][1]
            metadata[6] = (6, min(metadata[6][1], 100_000))
            metadata.pop(16, None)  # size statistics
    encoded = thrift.encode(footer)
    path.write_bytes(data[: -8 - size] + encoded + struct.pack("<I", len(encoded)) + b"PAR1")


def test_a_footer_that_lies_about_its_pages_is_refused(tmp_path: Path) -> None:
    _bomb(tmp_path / "p.parquet")
    command = [sys.executable, "-c", _READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) < _ALLOWED, done.stdout
