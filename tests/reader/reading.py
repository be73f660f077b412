"""What tests of the reader share: tables of every type, and epochs read as Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.reader.load import RowGroups
from pqcache.reader.memory import Budget
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.options import RowOptions
from pqcache.reader.order import EpochShare, Order
from pqcache.reader.read_plan import make_read_plan
from pqcache.reader.window import Group, read_groups

TWO_THREADS = Budget(threads=2, decoding=2)


def write(root: Path, tables: dict[str, pa.Table], rows: int, **options: Any) -> Path:
    """Write tables by path, in row groups of ``rows`` rows."""
    for path, table in tables.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / path, row_group_size=rows, **options)
    return root


def groups_of(path: Path, columns: list[str] | None = None, filters: Any = None, dense: bool = False) -> RowGroups:
    """Open a directory of Parquet."""
    plan = make_read_plan(open_local_dataset(path)[0], columns, RowOptions(filters=filters))
    return RowGroups(plan.with_dense_lists() if dense else plan)


def read(
    groups: RowGroups, order: Order, share: EpochShare | None = None, budget: Budget = TWO_THREADS
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (global index, record batch) of an epoch, each batch validated."""
    if share is None:
        share = EpochShare(total=order.batches(), lanes=order.lanes)
    for index, found, number in read_groups(
        groups.with_budget(budget), order, share.indices(), share.total, Group.batches
    ):
        batch = found[number]
        batch.validate(full=True)
        yield index, batch


def read_table(groups: RowGroups, order: Order, budget: Budget = TWO_THREADS) -> pa.Table:
    """Return an epoch."""
    return pa.Table.from_batches([batch for _, batch in read(groups, order, budget=budget)])
