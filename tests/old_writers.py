"""Files as writers made them before Parquet had size statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.thrift import SIZES
from tests.pages import chunks_of, edited


def write_without_sizes(table: pa.Table, path: Path, **options: Any) -> Path:
    """Write a table to a file whose footer does not say how long the texts of a column chunk are together."""
    pq.write_table(table, path, **options)
    return without_sizes(path)


def without_sizes(path: Path) -> Path:
    """Take the size statistics out of a file's footer."""

    def change(fields: Any) -> None:
        for chunk in chunks_of(fields):
            chunk[3][1].pop(SIZES, None)

    path.write_bytes(edited(path.read_bytes(), change))
    return path
