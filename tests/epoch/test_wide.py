"""Long rows, whose row groups are read in pieces where memory is small: the same rows, however they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from pqcache import Cache
from pqcache.torch import Loader, ParquetDataset, Ragged
from tests.epoch.tables import Source

OPTIONS: dict[str, dict[str, Any]] = {
    "much memory": {},
    "pieces": {"memory": "30MB"},
    "small pieces": {"memory": "10MB", "lanes": 2},
    "pieces in order": {"memory": "10MB", "shuffle": False},
    "few rows": {"filters": "label = 5", "memory": "400MB"},
    "most rows": {"filters": "label < 58 and text is not null", "memory": "400MB"},
    "some columns": {"columns": ["vector", "id"], "memory": "20MB"},
    "weights": {"weights": {"id": {7: 3.0, 8: 0.0, ...: 1.0}}, "memory": "400MB"},
}


def chosen(rows: pa.Table, name: str) -> Any:
    """Return the ids of an epoch."""
    ids = rows["id"].to_numpy()
    if name == "few rows":
        return ids[ids % 97 == 5]
    if name == "most rows":
        return ids[ids % 97 < 58]
    return np.repeat(ids, np.where(ids == 7, 3, np.where(ids == 8, 0, 1))) if name == "weights" else ids


def check(found: list[np.ndarray[Any, Any]], rows: pa.Table, name: str) -> None:
    """Check that these ids are those of an epoch."""
    ids = np.concatenate(found)
    assert np.array_equal(np.sort(ids), np.sort(chosen(rows, name)))
    assert np.array_equal(ids, np.sort(ids)) == ("in order" in name)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("wide cache", "much memory"),
        ("wide repartitioned", "pieces"),
        ("wide dense", "small pieces"),
        ("wide cache", "small pieces"),
        ("wide repartitioned", "pieces in order"),
        ("wide dense", "few rows"),
        ("wide cache", "most rows"),
        ("wide dense", "some columns"),
        ("wide repartitioned", "weights"),
    ],
)
def test_record_batches_of_long_rows(sources: dict[str, Source], of: str, name: str) -> None:
    rows, found = sources["wide"].rows, []
    for batch in Cache.open(sources[of].path).batches(batch_size=300, **OPTIONS[name]):
        batch.validate(full=True)
        wanted = rows.take(batch["id"]).select(batch.schema.names)
        assert pa.Table.from_batches([batch]).replace_schema_metadata().equals(wanted)
        found.append(batch["id"].to_numpy())
    check(found, rows, name)


@pytest.mark.parametrize(
    ("of", "name", "workers"),
    [
        ("wide", "much memory", 2),
        ("wide cache", "small pieces", 0),
        ("wide repartitioned", "pieces", 2),
        ("wide repartitioned", "few rows", 0),
        ("wide dense", "pieces in order", 0),
        ("wide dense", "weights", 0),
    ],
)
def test_tensors_of_long_rows(sources: dict[str, Source], of: str, name: str, workers: int) -> None:
    rows, found = sources["wide"].rows, []
    dataset = ParquetDataset(sources[of].path, nulls={"x": -1.0}, batch_size=200, **OPTIONS[name])
    for batch in Loader(dataset, num_workers=workers):
        wanted = rows.take(pa.array(batch["id"].numpy())).combine_chunks()
        assert np.array_equal(batch["x"].numpy(), pc.fill_null(wanted["x"], -1.0).to_numpy())
        vector = wanted["vector"].combine_chunks().flatten().to_numpy().reshape(-1, 256)
        assert batch["vector"].dtype == torch.float32
        assert np.array_equal(batch["vector"].numpy(), vector)
        for column in ("tokens", "text", "image"):
            _check_ragged(batch[column], wanted[column].combine_chunks())
        found.append(batch["id"].numpy())
    check(found, rows, name)


def _check_ragged(found: Ragged, wanted: pa.Array) -> None:
    if not pa.types.is_list(wanted.type):
        assert found.to_list() == wanted.to_pylist()
        return
    offsets = np.asarray(wanted.offsets) - wanted.offsets[0].as_py()
    assert np.array_equal(found.offsets.numpy(), offsets)
    assert found.values.dtype == torch.int32
    assert np.array_equal(found.values.numpy(), wanted.flatten().to_numpy())
