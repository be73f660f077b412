"""Fixed-size lists of fixed-size lists, of slices of which pyarrow 26 takes other rows' values or stray memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import Cache
from pqcache.torch import ParquetDataset

ROWS = 4000
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "in order": {"shuffle": False},
    "filter": {"filters": "id >= 500"},
    "filter in order": {"filters": "id >= 500", "shuffle": False},
    "weights": {"weights": {"id": {**dict.fromkeys(range(300, 500), 1.0), ...: 0.0}}},
    "limit": {"limit": 1500},
    "pieces": {"shuffle": False, "memory": 600_000},
}


def matrices(rows: int) -> pa.Table:
    """Return rows of an id and of matrices that have it everywhere, alone and in a struct."""
    flat = pa.array(np.repeat(np.arange(rows), 16).astype(np.float32))
    made = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 4), 4)
    return pa.table({"id": np.arange(rows), "pose": pa.StructArray.from_arrays([made], ["m"]), "top": made})


def check(ids: npt.NDArray[Any], *found: npt.NDArray[Any]) -> None:
    for matrix in found:
        assert (matrix.reshape(len(ids), 16) == ids[:, None]).all()


@pytest.fixture(scope="module", params=[1000, ROWS], ids=["four row groups", "one row group"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrices")
    size = {"row_group_size": request.param, "write_page_index": True, "data_page_size": 4000}
    pq.write_table(matrices(ROWS), root / "a.parquet", **size)
    return root


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_of_matrices(options: dict[str, Any], table: Path) -> None:
    for batch in ParquetDataset(table, batch_size=64, **options):
        check(batch["id"].numpy(), batch["pose"]["m"].numpy(), batch["top"].numpy())


def test_record_batches_of_matrices(table: Path, tmp_path: Path) -> None:
    pqcache.sync(table, tmp_path / "cache")
    for batch in Cache(tmp_path / "cache").batches(filters="id >= 500", batch_size=100):
        pose = batch["pose"].field("m").flatten().flatten().to_numpy()
        check(batch["id"].to_numpy(), pose, batch["top"].flatten().flatten().to_numpy())


def test_matrices_that_are_copied_by_rows(table: Path, tmp_path: Path) -> None:
    pqcache.sync(table, tmp_path / "some", where="id >= 1234")
    pqcache.repartition(table, tmp_path / "shuffled", row_group_size="40kB", shuffle=3)
    for place in (tmp_path / "some" / "current", tmp_path / "shuffled"):
        found = pa.concat_tables([pq.read_table(path) for path in place.rglob("*.parquet")]).combine_chunks()
        pose = found["pose"].combine_chunks().field("m").flatten().flatten().to_numpy()
        check(found["id"].to_numpy(), pose)
