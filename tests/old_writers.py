"""Files as writers made them before Parquet had size statistics."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet import thrift
from pqcache.parquet.thrift import SIZES


def write_without_sizes(table: pa.Table, path: Path, **options: Any) -> Path:
    """Write a table to a file whose footer does not say how long the texts of a column chunk are together."""
    pq.write_table(table, path, **options)
    return without_sizes(path)


def without_sizes(path: Path) -> Path:
    """Take the size statistics out of a file's footer."""
    data = path.read_bytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    footer = thrift.decode(data[-8 - size : -8], "footer")
    for row_group in footer[4][1].values:
        for chunk in row_group[1][1].values:
            chunk[3][1].pop(SIZES, None)
    encoded = thrift.encode(footer)
    path.write_bytes(data[: -8 - size] + encoded + struct.pack("<I", len(encoded)) + b"PAR1")
    return path
