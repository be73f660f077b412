"""A footer that fits together, but says fewer or more rows than its pages hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.parquet import footer
from pqcache.parquet import thrift as t
from pqcache.torch import ParquetDataset

COLUMNS = {
    "vector": pa.array([[float(n), 1.0, 2.0] for n in range(100)], pa.list_(pa.float32())),
    "tokens": pa.array([[n] * (16 + n % 9) for n in range(100)], pa.list_(pa.int64())),
    "text": pa.array([f"{n:04}" * 500 for n in range(100)]),
}


def says(rows: int, table: pa.Table, path: Path, **options: Any) -> Path:
    """Write a file of 100 rows whose footer says ``rows`` rows, everywhere."""
    sink = io.BytesIO()
    pq.write_table(table, sink, write_statistics=False, **options)
    data = sink.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    fields = t.decode(data[-8 - size : -8], "x")
    group = fields[4][1].values[0]
    for chunk in group[1][1].values:
        kind, count = chunk[3][1][5]
        chunk[3][1][5] = kind, count * rows // 100
    group[3], fields[3] = (group[3][0], rows), (fields[3][0], rows)
    path.write_bytes(data[: -8 - size] + footer.footer_and_magic(fields))
    return path


@pytest.mark.parametrize("column", sorted(COLUMNS))
@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": False, "compression": "none"},
        {"use_dictionary": False, "data_page_size": 300},
        {"use_dictionary": False, "data_page_version": "2.0"},
        {},
    ],
    ids=str,
)
def test_pages_with_other_counts_are_refused_by_name(column: str, options: dict[str, Any], tmp_path: Path) -> None:
    for rows in (50, 99, 101):
        says(rows, pa.table({column: COLUMNS[column]}), tmp_path / "a.parquet", **options)
        with pytest.raises(ParquetError, match=r"a\.parquet: "):
            list(ParquetDataset(tmp_path, batch_size=10, shuffle=False))
