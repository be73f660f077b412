"""A first copy of a table that is read while it arrives: renamed columns arrive by ranges, deleted rows do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import pqcache
from pqcache.events import Event, Warned
from tests.delta_tables import add, commit, field, metadata, protocol, vector
from tests.store.sync.fill.filling import check_same

ROWS = 60_000
NAMES = {"id": "col-1", "price": "col-2", "gone": "col-3"}
FIELDS = [
    field("id", "long", **{"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}),
    field("price", "double", **{"delta.columnMapping.id": 2, "delta.columnMapping.physicalName": "col-2"}),
]
PLAIN = [field("id", "long"), field("price", "double")]


def rows_of_file(number: int, names: tuple[str, ...]) -> pa.Table:
    values = [np.arange(ROWS) + number * ROWS, np.random.default_rng(number).random(ROWS), np.zeros(ROWS)]
    return pa.table(dict(zip(names, values[: len(names)], strict=True)))


@pytest.mark.parametrize("columns", [None, ["id"]], ids=["all", "some"])
def test_renamed_columns(columns: list[str] | None, tmp_path: Path) -> None:
    table = tmp_path / "table"
    files = [add(table, f"part-{number}.parquet", rows_of_file(number, tuple(NAMES.values()))) for number in range(3)]
    mapping = {"columnMapping__mode": "name", "columnMapping__maxColumnId": "9"}
    commit(table, 0, protocol("columnMapping"), metadata(FIELDS, **mapping), *files)
    events: list[Event] = []
    pqcache.sync(table, tmp_path / "plain", columns=columns)
    pqcache.sync(table, tmp_path / "cache", columns=columns, fill=True, on_event=events.append)
    assert not any(isinstance(event, Warned) for event in events)
    check_same(tmp_path / "plain", tmp_path / "cache")
    index = pqcache.Cache.open(tmp_path / "cache").snapshot().index()
    assert index.data_schema.names == (columns or ["id", "price"])


def test_deleted_rows(tmp_path: Path) -> None:
    table = tmp_path / "table"
    first = add(table, "part-0.parquet", rows_of_file(0, ("id", "price")), deletionVector=vector(table, [3, 5]))
    second = add(table, "part-1.parquet", rows_of_file(1, ("id", "price")))
    commit(table, 0, protocol("deletionVectors"), metadata(PLAIN, enableDeletionVectors="true"), first, second)
    events: list[Event] = []
    pqcache.sync(table, tmp_path / "plain")
    report = pqcache.sync(table, tmp_path / "cache", fill=True, on_event=events.append)
    assert any(isinstance(event, Warned) and "deletes rows" in event.message for event in events)
    assert report.rows == 2 * ROWS - 2
    check_same(tmp_path / "plain", tmp_path / "cache")
