"""Batches that workers send together: the order, the place, errors and memory are as if each came alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from pqcache.torch import Batch, Loader, ParquetDataset, Ragged, batch_groups
from pqcache.torch.batch_groups import BatchGroup, ungrouped
from tests.torch.conftest import ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = 2_400


@pytest.fixture(autouse=True)
def _batches_are_made_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups become large also where this machine is busy."""
    monkeypatch.setattr(batch_groups, "MOST_SECONDS", 60.0)


@pytest.fixture(scope="module")
def small_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    ids = np.arange(ROWS)
    columns = {"id": ids, "price": ids / 7, "flag": ids % 2 == 0, "name": [f"n{i}" for i in ids]}
    pq.write_table(pa.table(columns), directory / "t.parquet", row_group_size=500)
    return directory


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The worker and the number of batches of each message that this process receives."""
    found: list[tuple[int, int]] = []

    def noted(groups: Iterator[BatchGroup], *arguments: Any) -> Iterator[Any]:
        def each() -> Iterator[BatchGroup]:
            for group in groups:
                found.append((group.worker, len(group)))
                yield group

        return ungrouped(each(), *arguments)

    monkeypatch.setattr("pqcache.torch.loader.ungrouped", noted)
    return found


def dataset(path: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(path, **{"batch_size": 8, "seed": 3, "lanes": 6, **options})


def in_plain(values: Any) -> Any:
    """Return values of a batch as plain Python."""
    return values.to_list() if isinstance(values, Ragged) else values.tolist()


def test_batches_are_those_of_one_process_in_its_order(small_rows: Path, sent: list[tuple[int, int]]) -> None:
    alone, loader = Loader(dataset(small_rows)), Loader(dataset(small_rows), num_workers=2)
    for expected, batch in zip(alone, loader, strict=True):
        assert (batch.index, batch.epoch, list(batch)) == (expected.index, 0, list(expected))
        assert all(in_plain(batch[name]) == in_plain(expected[name]) for name in expected)
    sizes = [size for worker, size in sent if worker == 0]
    assert sizes[:3] == [1, 1, 16], "the first batch comes alone"
    assert len(sizes) < 30, "of 150 batches"


def test_a_place_within_a_group_is_exact(small_rows: Path) -> None:
    loader, whole = Loader(dataset(small_rows), num_workers=2), list(dataset(small_rows))
    batches = iter(loader)
    for count, batch in enumerate(batches, 1):
        assert batch["id"].tolist() == whole[count - 1]["id"].tolist()
        assert batch.rows().rows.tolist() == (batch["id"] % 500).tolist()
        if count == 101:
            break
    other = Loader(dataset(small_rows), num_workers=1)
    other.load_state_dict(loader.state_dict())
    assert ids_of(other) == ids_of(whole[count:])
    batches.close()  # type: ignore[attr-defined]


BAD = 2321


class _Fails:
    """A transform that fails for the batch of the row ``BAD``, and returns what is no tensor."""

    def __call__(self, batch: Batch) -> Any:
        if BAD in batch["id"]:
            raise ValueError("bad row")
        return {"id": batch["id"], "text": ["a"] * len(batch["id"]), "array": batch["price"].numpy()}


def test_an_error_comes_behind_the_batches_before_it(small_rows: Path, sent: list[tuple[int, int]]) -> None:
    order = [batch["id"].tolist() for batch in dataset(small_rows)]
    bad = next(index for index, ids in enumerate(order) if BAD in ids)
    assert bad > 100
    loader, found = Loader(dataset(small_rows, transform=_Fails()), num_workers=2), []
    with pytest.raises(ValueError, match="bad row") as caught:
        found.extend(batch["id"].tolist() for batch in loader)
    assert found == order[:bad]
    assert f"in DataLoader worker process {bad % 2}" in str(caught.value)
    assert re.search(rf"in the transform of batch {bad} of epoch 0", str(caught.value))
    assert max(size for _, size in sent) > 1


def _unknown(batch: Batch) -> Any:
    return {"id": batch["id"], "object": range(3)}


def test_batches_of_unknown_size_come_alone(small_rows: Path, sent: list[tuple[int, int]]) -> None:
    read = dataset(small_rows, transform=_unknown, batch_size=100)
    assert len(ids_of(Loader(read, num_workers=2))) == ROWS
    assert {size for _, size in sent} == {1}


def test_large_batches_come_alone(tmp_path: Path, sent: list[tuple[int, int]]) -> None:
    images = pa.array([bytes(60_000)] * 600, pa.binary(60_000))
    pq.write_table(pa.table({"id": range(600), "image": images}), tmp_path / "t.parquet", row_group_size=50)
    assert len(ids_of(Loader(dataset(tmp_path, batch_size=100, lanes=1), num_workers=1))) == 600
    assert {size for _, size in sent} == {1}


def test_no_more_is_prepared_than_is_asked_for(small_rows: Path) -> None:
    loader = Loader(dataset(small_rows), num_workers=1, prefetch_factor=16)
    for given, _ in enumerate(loader, 1):
        if given == 200:
            time.sleep(0.3)  # the worker makes all that it may
            assert loader.dataset.stats().epoch.batches <= given + 16 + 8  # and the group that is being given
    assert given == ROWS // 8


def test_a_plain_loader_beside_one_of_ours_gets_batches(small_rows: Path) -> None:
    read = dataset(small_rows)
    ids_of(Loader(read, num_workers=2))
    read.set_epoch(0)
    assert all(type(batch) is Batch for batch in DataLoader(read, batch_size=None, num_workers=2))
