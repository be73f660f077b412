"""Rows are the same ones whether they are taken as slices or one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pqcache.parquet import arrow
from pqcache.parquet.arrow import rows_at

TABLE = pa.table({"id": pa.array(range(40), pa.int32()), "name": [None if i % 7 == 0 else f"n{i}" for i in range(40)]})
ORDERS = [[], [0], [39], list(range(40)), [5, 6, 7, 0, 1, 39, 2], list(range(39, -1, -1)), [3, 3, 4, 4]]


@pytest.mark.parametrize("runs", [0, 4, 512])
def test_rows_are_those_at_the_positions(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_MAX_RUNS", runs)
    for order in ORDERS:
        found = rows_at(TABLE, np.array(order, np.int64))
        assert found.to_pylist() == [TABLE.to_pylist()[position] for position in order]
        assert found.schema == TABLE.schema
