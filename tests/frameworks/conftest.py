"""Tests of training frameworks: marked as such, and kept from asking the network for anything."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HERE = Path(__file__).parent
ROWS = 6_300  # not a multiple of ranks x batch size, so that ends are uneven

# also for the processes that frameworks start
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
    ACCELERATE_USE_CPU="true",
    RAY_USAGE_STATS_ENABLED="0",
    CUDA_VISIBLE_DEVICES="",
    WANDB_MODE="disabled",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.frameworks)


@pytest.fixture(scope="session")
def rows_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 3 files with 6,300 rows in 42 row groups: ``id`` from 0, and ``price``, a float32 of it."""
    root = tmp_path_factory.mktemp("rows")
    for first in range(0, ROWS, 2_100):
        ids = range(first, first + 2_100)
        prices = pa.array([i % 100 / 100 for i in ids], pa.float32())
        pq.write_table(
            pa.table({"id": pa.array(ids, pa.int64()), "price": prices}),
            root / f"part-{first // 2_100}.parquet",
            row_group_size=150,
        )
    return root
