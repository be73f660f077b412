"""A small table that many tests read; and torch is imported once for all processes that tests start by forkserver."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.few_values import few_values_are_many
from tests.torch.ranks import Ranks

__all__ = ["few_values_are_many"]

multiprocessing.set_forkserver_preload(["pqcache.torch", "tests.torch.ranks"])

HERE = Path(__file__).parent
ROWS = 500


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of one file with 500 rows in 10 row groups: ``id`` from 0, and ``tokens``, lists of up to 4."""
    root = tmp_path_factory.mktemp("table")
    ids = np.arange(ROWS)
    columns = {"id": ids, "tokens": pa.array([list(range(i % 5)) for i in ids], pa.list_(pa.int32()))}
    pq.write_table(pa.table(columns), root / "a.parquet", row_group_size=50)
    return root


def ids_of(batches: Any) -> list[int]:
    """Return the ids of all batches."""
    return [i for batch in batches for i in batch["id"].tolist()]


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what uses ranks or the fork server on one worker of xdist, so that each is started once."""
    for item in items:
        is_of_ranks = "ranks" in getattr(item, "fixturenames", ()) or "forkserver" in item.name
        if is_of_ranks and item.path.is_relative_to(HERE) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(6)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _no_iterator_is_left() -> Iterator[None]:
    """End those whose workers are still there: where an error holds them, a garbage collection waits 5 s for each."""
    yield
    if any(not process.name.startswith("rank ") for process in multiprocessing.active_children()):
        for left in gc.get_objects():
            if type(left).__name__.endswith("MultiProcessingDataLoaderIter"):
                left._shutdown_workers()


RunRanks = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run_ranks(ranks: Ranks, tmp_path: Path) -> RunRanks:
    """Return a function that runs one rank for each cache that it is given, all with the same options."""
    stores = (tmp_path / f"store{number}" for number in itertools.count())
    return lambda caches, **options: ranks.run(next(stores), caches, **options)
