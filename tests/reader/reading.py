"""What tests of the reader share: tables of every type, and epochs read as Arrow record batches."""

from __future__ import annotations

import decimal
import os
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.reader.load import RowGroups
from pqcache.reader.memory import Budget
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.options import RowOptions
from pqcache.reader.order import EpochShare, Order
from pqcache.reader.read_plan import make_read_plan
from pqcache.reader.window import Group, read_groups

TWO_THREADS = Budget(threads=2, decoding=2)


def everything(first: int, rows: int) -> pa.Table:
    """Return a column of every type that Parquet has, with nulls, empties and nesting."""
    ids = range(first, first + rows)
    some = [None if i % 5 == 0 else i for i in ids]
    moment = datetime(2026, 11, 1, tzinfo=timezone.utc)
    columns: dict[str, Any] = {"id": pa.array(ids, pa.int64())}
    for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.uint64()):
        columns[str(kind)] = pa.array([i % 100 for i in ids], kind)
        columns[f"{kind} nulls"] = pa.array([None if i is None else i % 100 for i in some], kind)
    columns["half"] = pa.array([np.float16(i % 100) for i in ids], pa.float16())
    columns["float"] = pa.array([i / 3 for i in ids], pa.float32())
    columns["double nulls"] = pa.array([None if i is None else i / 3 for i in some])
    columns["bool"] = pa.array([i % 3 == 0 for i in ids])
    columns["bool nulls"] = pa.array([None if i is None else i % 3 == 0 for i in some])
    columns["decimal"] = pa.array([decimal.Decimal(i) / 100 for i in ids], pa.decimal128(12, 2))
    columns["big decimal"] = pa.array([decimal.Decimal(i * 10**20) for i in ids], pa.decimal128(38, 0))
    columns["huge decimal"] = pa.array([decimal.Decimal(i) for i in ids], pa.decimal256(60, 5))
    columns["date"] = pa.array([date(2026, 1, 1 + i % 28) for i in ids])
    columns["timestamp"] = pa.array([moment.replace(tzinfo=None) for i in ids], pa.timestamp("us"))
    columns["zoned"] = pa.array([None if i is None else moment for i in some], pa.timestamp("ms", "Asia/Seoul"))
    columns["time"] = pa.array([i * 1000 for i in ids], pa.time32("ms"))
    columns["duration"] = pa.array(list(ids), pa.duration("us"))
    columns["string"] = pa.array(["ü" * (i % 30) for i in ids])
    columns["string nulls"] = pa.array([None if i is None else f"row {i}" for i in some])
    columns["large string"] = pa.array([f"{i}" * (i % 7) for i in ids], pa.large_string())
    columns["binary"] = pa.array([bytes([i % 256]) * (i % 40) for i in ids])
    columns["fixed binary"] = pa.array([i.to_bytes(5, "big") for i in ids], pa.binary(5))
    columns["fixed nulls"] = pa.array([None if i is None else i.to_bytes(16, "big") for i in some], pa.binary(16))
    columns["dictionary"] = pa.array([f"c{i % 4}" for i in ids]).dictionary_encode()
    columns["dictionary nulls"] = pa.array([None if i is None else f"c{i % 4}" for i in some]).dictionary_encode()
    columns["list"] = pa.array([list(range(i % 9)) for i in ids], pa.list_(pa.int32()))
    columns["list nulls"] = pa.array([None if i is None else [float(i)] * (i % 4) for i in some])
    columns["items null"] = pa.array([[None, 1] if i % 50 == 7 else [2] * (i % 3) for i in ids], pa.list_(pa.int8()))
    columns["large list"] = pa.array([[i] * (i % 3) for i in ids], pa.large_list(pa.uint16()))
    columns["list of bool"] = pa.array([[True, False][: i % 3] for i in ids])
    columns["list of string"] = pa.array([[f"{i}", "x"][: i % 3] for i in ids])
    columns["list of list"] = pa.array([[[i], [], [1, 2]][: i % 4] for i in ids])
    columns["fixed list"] = pa.array([[i, i + 1, i + 2] for i in ids], pa.list_(pa.float32(), 3))
    columns["fixed list nulls"] = pa.array([None if i is None else [i, i] for i in some], pa.list_(pa.int16(), 2))
    columns["fixed items null"] = pa.array([[i, None] for i in ids], pa.list_(pa.int16(), 2))
    columns["struct"] = pa.array([{"a": i, "b": {"c": f"{i}"}} for i in ids])
    columns["struct nulls"] = pa.array([None if i is None else {"a": i} for i in some])
    columns["map"] = pa.array([[(f"k{i}", i)] * (i % 3) for i in ids], pa.map_(pa.string(), pa.int64()))
    columns["all null"] = pa.nulls(rows)
    tensors = np.arange(first * 6, (first + rows) * 6, dtype=np.float32).reshape(rows, 2, 3)
    columns["tensor"] = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)
    return pa.table(columns)


def plain(table: pa.Table) -> pa.Table:
    """Return a table as readers give it: dictionaries decoded, one chunk."""
    decoded = [pc.cast(c, c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return pa.table(decoded, names=table.column_names).combine_chunks()


def write(root: Path, tables: dict[str, pa.Table], rows: int, **options: Any) -> Path:
    """Write tables by path, in row groups of ``rows`` rows."""
    for path, table in tables.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / path, row_group_size=rows, **options)
    return root


def long_rows(first: int, rows: int) -> pa.Table:
    """Return rows of up to 3 KB, some null or empty, beside short ones."""
    images = [None if i % 7 == 0 else os.urandom(i % 3000) for i in range(first, first + rows)]
    return pa.table(
        {"id": range(first, first + rows), "title": [f"the title of row {i}" for i in range(rows)], "image": images}
    )


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
