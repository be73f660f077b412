"""A state of any number of lanes goes on with any number of ranks and workers: every batch once, ranks equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pqcache.errors import UsageError
from pqcache.torch import Loader, ParquetDataset

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS, LANES = 700, 12


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shop")
    pq.write_table(pa.table({"id": np.arange(ROWS)}), root / "a.parquet", row_group_size=25)
    return root


def dataset(shop: Path, ranks: int = 1, rank: int = 0, **more: Any) -> ParquetDataset:
    options = {"batch_size": 8, "lanes": LANES, "window": 3, "seed": 5, **more}
    return ParquetDataset(shop, ["id"], num_replicas=ranks, rank=rank, **options)


def run(shop: Path, state: Any, ranks: int, workers: int, steps: int | None, **more: Any) -> tuple[list[Any], Any]:
    """Go on from a state for some steps on all ranks; return their batches by rank, and the state of rank 0."""
    found, states = [], []
    for rank in range(ranks):
        loader = Loader(dataset(shop, ranks, rank, **more), num_workers=workers)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches = []
        if steps != 0:
            for batch in loader:
                batches.append((batch.index, batch["id"].tolist()))
                if len(batches) == steps:
                    break
        found.append(batches)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    return found, states[0]


def check(whole: dict[int, list[int]], runs: list[list[list[tuple[int, list[int]]]]]) -> None:
    """Check that all batches came once, as they are in one run of an epoch, and ranks had the same number."""
    seen: dict[int, int] = {}
    for of_ranks in runs:
        assert len({len(batches) for batches in of_ranks}) == 1
        for index, ids in (pair for batches in of_ranks for pair in batches):
            assert whole[index % len(whole)] == ids
            seen[index] = seen.get(index, 0) + 1
    assert {index for index in seen if index < len(whole)} == set(whole)
    assert set(seen.values()) == {1}
    assert sum(index >= len(whole) for index in seen) < len(runs[-1])


@pytest.fixture(scope="module")
def whole(shop: Path) -> dict[int, list[int]]:
    return {batch.index: batch["id"].tolist() for batch in dataset(shop)}


def test_the_next_epoch_begins_anew(shop: Path) -> None:
    _, state = run(shop, None, 5, 0, 6)
    loader = Loader(dataset(shop, 2, 1))
    loader.load_state_dict(state)
    assert state["divisions"]
    list(loader)
    after = [(batch.index, batch["id"].tolist()) for batch in loader]
    ds = dataset(shop, 2, 1)
    ds.set_epoch(1)
    assert after == [(batch.index, batch["id"].tolist()) for batch in ds]
    assert "divisions" not in loader.state_dict()
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_knows_its_place(shop: Path, whole: dict[int, list[int]], workers: int) -> None:
    runs: list[Any] = [[], []]
    for rank in range(5):
        ds = dataset(shop, 5, rank)
        batches = []
        for batch in DataLoader(ds, batch_size=None):
            batches.append((batch.index, batch["id"].tolist()))
            if len(batches) == 7:
                state = ds.state_dict(after=batch)
                assert state == ds.state_dict(after=batch.index) == ds.state_dict()
                break
        runs[0].append(batches)
    assert state["batch"] == 35
    for rank in range(3):
        ds = dataset(shop, 3, rank)
        ds.load_state_dict(state)
        if not workers:
            assert ds.state_dict() == state
        found = list(DataLoader(ds, batch_size=None, num_workers=workers))
        runs[1].append([(batch.index, batch["id"].tolist()) for batch in found])
    check(whole, runs)


def test_persistent_workers_are_given_a_state_later(shop: Path, whole: dict[int, list[int]]) -> None:
    first, state = run(shop, None, 5, 0, 4)
    loader = Loader(dataset(shop), num_workers=5)
    list(loader)  # the workers live on
    loader.load_state_dict(state)
    check(whole, [first, [[(batch.index, batch["id"].tolist()) for batch in loader]]])
    list(loader)
    loader.load_state_dict(state)
    check(whole, [first, [[(batch.index, batch["id"].tolist()) for batch in loader]]])


def test_states_of_workers(shop: Path, whole: dict[int, list[int]]) -> None:
    loader = StatefulDataLoader(dataset(shop), batch_size=None, num_workers=5)
    batches = []
    for batch in loader:
        batches.append((batch.index, batch["id"].tolist()))
        if len(batches) == 13:
            state = loader.state_dict()
            break
    again = StatefulDataLoader(dataset(shop), batch_size=None, num_workers=5)
    again.load_state_dict(state)
    check(whole, [[batches], [[(batch.index, batch["id"].tolist()) for batch in again]]])


def test_what_cannot_be_divided_is_refused(shop: Path) -> None:
    rows = ParquetDataset(shop, ["id"], batch_size=None, lanes=4)
    with pytest.raises(UsageError, match="lanes=4: cannot be shared by 1 ranks x 3 workers"):
        list(found := iter(DataLoader(rows, batch_size=None, num_workers=3)))
    found._shutdown_workers()  # type: ignore[attr-defined]
    state = ParquetDataset(shop, ["id"], batch_size=None, lanes=4).state_dict()
    with pytest.raises(UsageError, match="lanes=4, which 3 ranks cannot share"):
        ParquetDataset(shop, ["id"], batch_size=None, num_replicas=3, rank=0).load_state_dict(state)
    state = dataset(shop).state_dict()
    for bad in ([[1, 2]], [[0, 0, 1]], [[-1, 1, 1]], 3, [["x", 1, 1]], [[0, 1, 1]] * 33):
        with pytest.raises(UsageError, match="its divisions are"):
            dataset(shop).load_state_dict({**state, "batch": 3, "divisions": bad})
