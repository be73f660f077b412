"""Tests of training frameworks: marked as such, and kept from asking the network for anything."""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HERE = Path(__file__).parent
_EXTRA = ("accelerate", "lightning", "ray", "transformers")
# with the extra `frameworks` missing; where it is there in part, the modules below say what they cannot import
collect_ignore_glob = [] if any(map(find_spec, _EXTRA)) else ["test_*.py"]
ROWS = 6_300  # not a multiple of ranks x batch size, so that ends are uneven

# also for the processes that frameworks start
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_VERBOSITY="error",
    ACCELERATE_USE_CPU="true",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # nodes are 127.0.0.1, also where Ray's workers look for themselves
    RAY_AUTH_MODE="token",  # Ray reads it when it is imported
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
    GLOO_SOCKET_IFNAME="lo",
    OMP_NUM_THREADS="1",
    CUDA_VISIBLE_DEVICES="",
    WANDB_MODE="disabled",
)


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.frameworks)
            if item.path.stem != "test_pages":
                item.add_marker(pytest.mark.xdist_group(item.path.stem))  # its trainings run once, for all its tests


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
