"""Mix: exact proportions, every pass of every dataset exactly once, in any topology, resumable anywhere."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
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
from pqcache.torch import Batch, Loader, Mix, ParquetDataset
from tests.datasets import write_shop

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = {"web": 500, "books": 210, "code": 90}
BATCH = {"web": 12, "books": 8, "code": 4}
BASE = {"web": 0, "books": 10_000, "code": 20_000}
WEIGHTS = {"web": 3, "books": 2, "code": 1}
BEFORE, AFTER = {"web": 3, "books": 1}, {"web": 1, "books": 2, "code": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mix")
    for name, rows in ROWS.items():
        ids = np.arange(BASE[name], BASE[name] + rows)
        (root / name).mkdir()
        columns = {
            "id": ids,
            "text": [f"{name} {i}" for i in ids],
            "tags": [[f"{i}"] * (i % 3) for i in ids],
            "one": [{"a": i} for i in ids],
        }
        pq.write_table(pa.table(columns), root / name / "a.parquet", row_group_size=30)
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


# ---- mixes that change between epochs, and batches with rows of every dataset


def mix_of(root: Path, weights: dict[str, int] | None, **options: Any) -> Mix:
    datasets = {name: ParquetDataset(root / name, batch_size=BATCH[name]) for name in weights or ROWS}
    return Mix(datasets, weights, **{"epoch_length": 20, "seed": 4, **options})


def train(root: Path, changes: list[tuple[dict[str, int], int]]) -> list[Batch]:
    """Return the batches of so many epochs of each of several mixes, of which each goes on where the last stopped."""
    found: list[Batch] = []
    state: dict[str, Any] | None = None
    for weights, epochs in changes:
        loader = Loader(mix_of(root, weights, lanes=4))
        if state is not None:
            loader.dataset.load_state_dict(state, changed=True)
        for _ in range(epochs):
            found += loader
        state = json.loads(json.dumps(loader.state_dict()))
    return found


def test_passes_go_on_across_changes(root: Path) -> None:
    changes = [(BEFORE, 2), (AFTER, 1), ({"web": 1, "code": 3}, 2), (AFTER, 3)]
    batches = train(root, changes)
    assert [batch.epoch for batch in batches[::20]] == list(range(8))
    for epoch, weights in ((0, BEFORE), (2, AFTER), (3, changes[2][0]), (7, AFTER)):
        counts = Counter(batch.source for batch in batches[20 * epoch : 20 * epoch + 20])
        assert counts == {name: 20 * weight // sum(weights.values()) for name, weight in weights.items()}
    for name, rows in ROWS.items():
        ids = [i for batch in batches if batch.source == name for i in batch["id"].tolist()]
        passes, times = len(ids) // rows, Counter(ids)
        assert set(times.values()) <= {passes, passes + 1}, "each row once in each pass"
        assert len(times) == rows or passes == 0
        assert name == "web" or len(ids) > 1.2 * rows


def test_resumed_at_every_batch_after_a_change(root: Path) -> None:
    first = mix_of(root, BEFORE, lanes=2)
    list(first)
    changed = mix_of(root, AFTER)
    changed.load_state_dict(first.state_dict(), changed=True)
    assert changed.epoch == 1
    batches = list(changed)
    changed.set_epoch(2)
    batches += list(changed)
    for place in range(0, len(batches) - 1, 7):
        state = json.loads(json.dumps(changed.state_dict(after=batches[place])))
        resumed = mix_of(root, AFTER)
        resumed.load_state_dict(state)
        following = next(iter(resumed))
        expected = batches[place + 1]
        assert (following.epoch, following.index, following["id"].tolist()) == (
            expected.epoch,
            expected.index,
            expected["id"].tolist(),
        )
    again = mix_of(root, BEFORE)
    again.load_state_dict(changed.state_dict(after=batches[-1]), changed=True)
    assert again.epoch == 3


def test_a_change_has_to_be_declared_and_begins_with_an_epoch(root: Path) -> None:
    mix = mix_of(root, BEFORE)
    batches = list(mix)
    within = mix.state_dict(after=batches[7])
    with pytest.raises(UsageError, match=r"within epoch 0, before batch 8 of 20"):
        mix_of(root, AFTER).load_state_dict(within, changed=True)
    with pytest.raises(UsageError, match="give changed=True"):
        mix_of(root, AFTER).load_state_dict(mix.state_dict(after=batches[-1]))
    with pytest.raises(UsageError, match="it was taken with counts="):
        mix_of(root, {"web": 1, "books": 1}).load_state_dict(mix.state_dict(after=batches[-1]))
    same = mix_of(root, BEFORE)
    same.load_state_dict(within, changed=True)  # nothing is changed
    assert next(iter(same)).index == 8
    changed = mix_of(root, AFTER)
    changed.load_state_dict(mix.state_dict(after=batches[-1]), changed=True)
    changed.set_epoch(0)
    with pytest.raises(UsageError, match="the mix was changed from epoch 1 on"):
        list(changed)


def test_how_often_datasets_were_read(root: Path) -> None:
    mix = mix_of(root, BEFORE)
    batches = list(mix)
    sizes = {name: -(-ROWS[name] // BATCH[name]) for name in ROWS}
    for place in (0, 7, 19):
        drawn = Counter(batch.source for batch in batches[: place + 1])
        assert mix.drawn(after=batches[place]) == {name: drawn[name] / sizes[name] for name in BEFORE}
    changed = mix_of(root, AFTER)
    changed.load_state_dict(mix.state_dict(after=batches[-1]), changed=True)
    assert changed.drawn(after=-1) == {"web": 15 / sizes["web"], "books": 5 / sizes["books"], "code": 0}


def test_batches_of_all_datasets_resumed_on_other_ranks(root: Path) -> None:
    def make(**options: Any) -> Mix:
        datasets = {n: ParquetDataset(root / n, columns=["id"], batch_size=BATCH[n], drop_last=True) for n in ROWS}
        return Mix(datasets, within_batch=True, epoch_length=50, **options)

    mix = make(lanes=2)
    batches = list(mix)
    state = json.loads(json.dumps(mix.state_dict(after=batches[19])))
    rest: list[Batch] = []
    for rank in range(2):
        resumed = make(num_replicas=2, rank=rank)
        resumed.load_state_dict(state)
        rest += DataLoader(resumed, batch_size=None, num_workers=1)
    assert all(batch.parts == BATCH for batch in rest)
    expected = {batch.index: batch["id"].tolist() for batch in batches[20:]}
    assert {batch.index: batch["id"].tolist() for batch in rest} == expected
    together = mix_of(root, None, within_batch=True)
    with pytest.raises(UsageError, match="it was taken with within_batch=True"):
        mix_of(root, None).load_state_dict(together.state_dict())


def test_columns_that_differ_cannot_be_joined(root: Path) -> None:
    def to_float(batch: Any) -> Any:
        batch["id"] = batch["id"].float()
        return batch

    def failing(**options: Any) -> str:
        web = ParquetDataset(root / "web", columns=["id", "text"], batch_size=4)
        books = ParquetDataset(root / "books", **{"columns": ["id", "text"], "batch_size": 4, **options})
        with pytest.raises(UsageError) as caught:
            list(Mix({"web": web, "books": books}, within_batch=True))
        return str(caught.value)

    assert "'web' and 'books' have columns id, text and id" in failing(columns=["id"])
    assert "'web' and 'books' have 'id' as int64 () and as float32 ()" in failing(transform=to_float)
    assert "the transform of 'books' returns Tensor" in failing(transform=lambda batch: torch.zeros(2))
    with pytest.raises(UsageError, match="the batch sizes of the datasets are their shares"):
        mix_of(root, AFTER, within_batch=True)
