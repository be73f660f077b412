"""Constants of ``filters=[...]`` keep what they say, to the nanosecond."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import UsageError
from pqcache.filters.expression import Compare, In
from pqcache.filters.parse import condition_from
from pqcache.torch import ParquetDataset

STAMP = pd.Timestamp("2022-11-15 18:32:09.000000002")
SCHEMA = pa.schema(
    {
        "ns": pa.timestamp("ns"),
        "us": pa.timestamp("us"),
        "zoned": pa.timestamp("ns", "Asia/Seoul"),
        "took": pa.duration("ns"),
        "day": pa.date32(),
    }
)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("ns", STAMP, STAMP.value),
        ("zoned", STAMP.tz_localize("Asia/Seoul"), STAMP.value - 9 * 3600 * 10**9),
        ("zoned", STAMP.tz_localize("UTC"), STAMP.value),
        ("took", pd.Timedelta(5, "ns"), 5),
        ("took", np.timedelta64(7, "ns"), 7),
        ("took", datetime.timedelta(microseconds=1), 1_000),
        ("us", STAMP.floor("us"), STAMP.value // 1_000),
        ("us", pd.Timestamp(np.datetime64("9999-12-31", "s")), 253_402_214_400_000_000),
        ("day", pd.Timestamp("2022-11-15"), 19_311),
        ("ns", datetime.datetime(2022, 11, 15, 18, 32, 9), STAMP.value - 2),
    ],
)
def test_a_constant_is_exact(column: str, value: Any, expected: int) -> None:
    condition = condition_from([(column, "==", value)], SCHEMA)
    assert isinstance(condition, Compare)
    assert condition.value.type == SCHEMA.field(column).type
    assert condition.value.value == expected


def test_timestamps_in_a_list_are_exact() -> None:
    condition = condition_from([("ns", "in", pd.DatetimeIndex([STAMP]))], SCHEMA)
    assert isinstance(condition, In)
    assert [value.value for value in condition.values] == [STAMP.value]


@pytest.mark.parametrize(
    ("column", "value"), [("us", STAMP), ("day", STAMP), ("zoned", STAMP), ("ns", pd.NaT), ("took", STAMP)]
)
def test_a_constant_that_does_not_fit_is_refused(column: str, value: Any) -> None:
    with pytest.raises(UsageError, match="filters"):
        condition_from([(column, "==", value)], SCHEMA)


def test_a_filter_finds_the_nanosecond(tmp_path: Path) -> None:
    values = pa.array([STAMP.value, STAMP.value + 1], pa.timestamp("ns"))
    pq.write_table(pa.table({"t": values}), tmp_path / "a.parquet")
    for value in (STAMP, str(STAMP)):
        (batch,) = ParquetDataset(tmp_path, filters=[("t", "==", value)], batch_size=9)
        assert batch["t"].tolist() == [STAMP.value]


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("h > 1", [1]),
        ("h = 1.5", [1]),
        ("h <> 1.5", [3, 4, 5]),
        ("h in (1.5, -2)", [1, 3]),
        ("h between -3 and 1", [3, 5]),
        ("h is null", [2]),
        ("s.x >= 1.5", [1]),
        ([("h", ">", 1)], [1]),
        ([("h", "in", [1.5, -2])], [1, 3]),
        ([("h", "not in", [1.5])], [2, 3, 4, 5]),
    ],
    ids=str,
)
def test_half_floats_are_compared(tmp_path: Path, condition: Any, rows: list[int]) -> None:
    values = pa.array(np.array([1.5, 0, -2, np.nan, 0.1], np.float16), mask=np.arange(5) == 1)
    table = pa.table({"id": range(1, 6), "h": values, "s": pa.StructArray.from_arrays([values], ["x"])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    batches = ParquetDataset(tmp_path, ["id"], filters=condition, batch_size=9, shuffle=False)
    assert [batch["id"].tolist() for batch in batches] == [rows]
