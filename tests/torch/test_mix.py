"""Mix: exact proportions, every pass of every dataset exactly once, in any topology, resumable anywhere."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import pqcache
from pqcache.errors import UsageError
from pqcache.reader.mixture import MixSchedule, batches_per_epoch
from pqcache.reader.order import interleave
from pqcache.torch import Batch, Mix, ParquetDataset
from tests.datasets import write_shop

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = {"web": 2000, "books": 700, "code": 150}
BATCH = {"web": 32, "books": 20, "code": 16}
BASE = {"web": 0, "books": 10_000, "code": 20_000}
WEIGHTS = {"web": 3, "books": 2, "code": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three datasets of unlike schemas; an id tells which dataset it is of."""
    root = tmp_path_factory.mktemp("mix")
    for name, rows in ROWS.items():
        ids = np.arange(BASE[name], BASE[name] + rows)
        (root / name).mkdir()
        table = pa.table({"id": ids, f"{name}_text": [f"{name} {i}" for i in ids]})
        pq.write_table(table, root / name / "a.parquet", row_group_size=50)
    return root


def make(root: Path, how: dict[str, Any] | None = None, **options: Any) -> Mix:
    return Mix({name: ParquetDataset(root / name, batch_size=BATCH[name], **(how or {})) for name in ROWS}, **options)


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_every_beginning_is_in_proportion(counts: list[int]) -> None:
    found = interleave(counts)
    assert np.bincount(found, minlength=len(counts)).tolist() == counts
    after = np.arange(1, len(found) + 1)
    for number, count in enumerate(counts):
        given_less_share = np.cumsum(found == number) - after * count / len(found)
        assert np.abs(given_less_share).max() <= {1: 0.5, 2: 0.5, 3: 1.0}.get(len(counts), 1.5)


def test_no_lane_gets_one_dataset_only() -> None:
    for lanes in (2, 3, 4, 8):
        made = MixSchedule((600, 600), lanes)
        for lane in range(lanes):
            of_lane = np.concatenate([made.datasets(epoch)[lane::lanes] for epoch in range(3)])
            assert 0.4 < np.mean(of_lane) < 0.6


def test_how_long_an_epoch_is() -> None:
    sizes = {"a": 100, "b": 30}
    assert batches_per_epoch(sizes, None) == (100, 30)
    assert batches_per_epoch(sizes, None, "all_exhausted") == (100, 30)
    assert batches_per_epoch(sizes, {"a": 1, "b": 1}) == (30, 30)
    assert batches_per_epoch(sizes, {"a": 1, "b": 1}, "all_exhausted") == (100, 100)
    assert batches_per_epoch(sizes, {"b": 0.3, "a": 0.7}) == (70, 30)
    assert batches_per_epoch(sizes, {"a": 2, "b": 1}, 100) == (67, 33)
    assert batches_per_epoch(sizes, {"a": 0.1, "b": 0.2}, 3) == (1, 2)
    for wrong, weights, length in (
        (r"weights=\{'a': 1\}: give a number for each of 'a', 'b'", {"a": 1}, 10),
        (r"weights\['b'\]=0", {"a": 1, "b": 0}, 10),
        (r"weights\['b'\]=nan", {"a": 1, "b": float("nan")}, 10),
        (r"weights\['b'\]='1'", {"a": 1, "b": "1"}, 10),
        ("an epoch would have more than", {"a": 1e300, "b": 1}, "all_exhausted"),
        ("'b' has none of the epoch's 10 batches", {"a": 100, "b": 1}, 10),
        ("epoch_length=0", None, 0),
        ("epoch_length='shortest'", None, "shortest"),
        ("epoch_length=True", None, True),
    ):
        with pytest.raises(UsageError, match=wrong):
            batches_per_epoch(sizes, weights, length)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'b': has no batches"):
        batches_per_epoch({"a": 1, "b": 0}, None)


def state_of(mix: Mix, after: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(mix.state_dict(after)))
    return found


def test_stateful_dataloader(root: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader(workers: int) -> Any:
        return stateful(make(root, epoch_length=30, lanes=4), batch_size=None, num_workers=workers)

    complete = [batch["id"].tolist() for batch in loader(0)]
    for workers, stop in ((0, 1), (2, 26)):
        first = loader(workers)
        for _ in zip(range(stop), first, strict=False):
            pass
        second = loader(workers)
        second.load_state_dict(first.state_dict())
        assert [batch["id"].tolist() for batch in second] == complete[stop:]


def test_a_state_of_something_else_is_refused(root: Path) -> None:
    state = state_of(make(root, lanes=4))
    for message, how, options in (
        ("seed", {}, {"seed": 1}),
        ("counts", {}, {"epoch_length": 20}),
        ("lanes=4, this mix has lanes=2|lanes=2", {}, {"lanes": 2}),
        ("dataset 'web': state: it was taken with seed=0", {"seed": 1}, {}),
        ("dataset 'web': state: it was taken with shuffle=True", {"shuffle": False}, {}),
        ("dataset 'web': state: it was taken with columns", {"columns": ["id"]}, {}),
    ):
        with pytest.raises(UsageError, match=message):
            make(root, how, **options).load_state_dict(state)
    some = Mix({"web": ParquetDataset(root / "web", batch_size=32)})
    with pytest.raises(UsageError, match="state: it belongs to a mix of web, books, code, and this one mixes web"):
        some.load_state_dict(state)
    for wrong in ({}, {"format": 9}, {"format": 1}, {**state, "datasets": [1]}, {**state, "datasets": {"web": 1}}):
        with pytest.raises(UsageError, match="state"):
            make(root).load_state_dict(wrong)
    with pytest.raises(UsageError, match="state: it is not a state of Mix"):
        some.load_state_dict(some.datasets["web"].state_dict())
    with pytest.raises(UsageError, match="state: it is not a state of ParquetDataset"):
        some.datasets["web"].load_state_dict(state)


def test_options_that_make_no_sense(root: Path) -> None:
    web = ParquetDataset(root / "web")
    for message, datasets in (
        ("at least one by name", {}),
        ("at least one by name", [web]),
        ("'w' is not a ParquetDataset", {"w": root}),
        ("two names", {"a": web, "b": web}),
        ("'w': batch_size=None: a mix draws complete batches", {"w": ParquetDataset(root / "web", batch_size=None)}),
        ("'w': lanes, num_replicas and rank: give them to the mix", {"w": ParquetDataset(root / "web", lanes=4)}),
        ("'w': lanes, num_replicas", {"w": ParquetDataset(root / "web", num_replicas=2, rank=0)}),
    ):
        with pytest.raises(UsageError, match=message):
            Mix(datasets)  # type: ignore[arg-type]
    for message, options in (
        ("lanes=0", {"lanes": 0}),
        ("seed='a': not a whole number", {"seed": "a"}),
        ("num_replicas and rank: give both", {"rank": 1}),
        ("epoch_length='x'", {"epoch_length": "x"}),
    ):
        with pytest.raises(UsageError, match=message):
            Mix({"w": web}, **options)


def noise(batch: Batch) -> dict[str, Any]:
    return {"id": batch["id"], "noise": torch.rand(2), "py": random.random(), "np": np.random.rand()}


def test_transforms_are_the_datasets_and_seeded(root: Path) -> None:
    def run(workers: int) -> dict[int, Any]:
        mix = make(root, {"transform": noise}, lanes=4, weights=WEIGHTS, epoch_length="all_exhausted")
        batches = list(DataLoader(mix, batch_size=None, num_workers=workers))
        assert {batch.source for batch in batches} == set(ROWS)
        return {b.index: (b.source, b["noise"].tolist(), b["py"], b["np"]) for b in batches}

    expected = run(0)
    assert run(2) == expected
    kinds = [(source, str(values)) for source, *values in expected.values()]
    assert len(set(kinds)) == len(kinds), "passes of a dataset have other seeds"


def test_a_pickled_mix_reads_the_same(root: Path, tmp_path: Path) -> None:
    pqcache.sync(str(write_shop(tmp_path / "source", days=1, files=2, rows=100)), tmp_path / "cache")

    def mix() -> Mix:
        shop = ParquetDataset(tmp_path / "cache", columns=["id"], batch_size=30)
        return Mix({"shop": shop, "web": ParquetDataset(root / "web", columns=["id"], batch_size=90)}, lanes=2)

    again = pickle.loads(pickle.dumps(mix()))
    assert [batch["id"].tolist() for batch in again] == [batch["id"].tolist() for batch in mix()]
