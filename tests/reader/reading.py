"""What tests of the reader share: files of small row groups, and the row groups of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.reader.decode import RowGroups
from pqcache.reader.epoch_options import RowOptions
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.read_plan import make_read_plan


def write(root: Path, tables: dict[str, pa.Table], rows: int, **options: Any) -> Path:
    """Write tables by path, in row groups of ``rows`` rows."""
    for path, table in tables.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / path, row_group_size=rows, **options)
    return root


def groups_of(path: Path) -> RowGroups:
    """Open a directory of Parquet."""
    return RowGroups(make_read_plan(open_local_dataset(path)[0], None, RowOptions()))
