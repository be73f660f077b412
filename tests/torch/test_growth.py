"""What an epoch keeps in memory does not grow with the number of row groups, but for arrays of numbers."""

from __future__ import annotations

import gc
import os
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.store.layout import ROW_GROUPS
from pqcache.store.row_group_index import Index, IndexBuilder, build_index
from pqcache.torch import ParquetDataset

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

FILE_ROW_GROUPS = 100


def snapshot_of(root: Path, row_groups: int) -> Path:
    """Return a copy of a snapshot whose index has so many row groups, of files that are links to one."""
    (root / "_pqcache").mkdir(parents=True)
    paths = [f"{number:03}.parquet" for number in range(row_groups // FILE_ROW_GROUPS)]
    ids = np.arange(8 * FILE_ROW_GROUPS)
    table = pa.table({"id": ids, "title": [f"item {i}" for i in ids], "label": pa.array(ids % 3, pa.int32())})
    pq.write_table(table, root / paths[0], row_group_size=8)
    for path in paths[1:]:
        os.link(root / paths[0], root / path)
    once = build_index(root, paths[:1])
    again = once.table.take(pa.array(np.arange(row_groups) % FILE_ROW_GROUPS))
    again = again.set_column(0, "file", pa.array(np.arange(row_groups) // FILE_ROW_GROUPS, pa.int32()))
    index = Index(paths=tuple(paths), table=again, data_schema=once.data_schema)
    IndexBuilder().write(paths, index, root / ROW_GROUPS)
    return root


def blocks_of_epochs(path: Path, **options: object) -> int:
    """Return how many blocks of memory Python objects take while the second epoch is read."""
    dataset = ParquetDataset(path, batch_size=16, memory="20MB", lanes=1, **options)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        batches = iter(dataset)
        assert len(list(islice(batches, 3))) == 3
    gc.collect()
    found = sys.getallocatedblocks()
    assert next(batches) is not None  # all of it is still there
    return found


@pytest.mark.parametrize("options", [{}, {"filters": "id >= 0 and label < 5"}])
def test_no_object_for_each_row_group(tmp_path: Path, options: dict[str, object]) -> None:
    few, many = (snapshot_of(tmp_path / str(number), number) for number in (1_000, 11_000))
    blocks_of_epochs(few, **options)  # what is imported and made once
    before = blocks_of_epochs(few, **options)
    assert blocks_of_epochs(many, **options) - before < 5_000
