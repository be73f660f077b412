"""Mixes that change between epochs, and batches with rows of every dataset."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from pqcache.errors import UsageError
from pqcache.torch import Batch, Loader, Mix, ParquetDataset

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = {"web": 500, "books": 210, "code": 90}
BATCH = {"web": 12, "books": 8, "code": 4}
BASE = {"web": 0, "books": 10_000, "code": 20_000}
BEFORE, AFTER = {"web": 3, "books": 1}, {"web": 1, "books": 2, "code": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("changes")
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


def mix_of(root: Path, weights: dict[str, int] | None, names: Any = None, **options: Any) -> Mix:
    datasets = {name: ParquetDataset(root / name, batch_size=BATCH[name]) for name in names or weights or ROWS}
    return Mix(datasets, weights, **{"epoch_length": 20, "seed": 4, **options})


def ids_by_dataset(batches: list[Batch]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for batch in batches:
        found.setdefault(batch.source or "", []).extend(batch["id"].tolist())
    return found


def check_passes(batches: list[Batch]) -> None:
    """Check that complete passes of every dataset have each of its rows once, and the last one some of them once."""
    for name, ids in ids_by_dataset(batches).items():
        check_rows(name, ids)


def check_rows(name: str, ids: list[int]) -> None:
    complete, times = len(ids) // ROWS[name], Counter(ids)
    assert set(times.values()) <= {complete, complete + 1}
    assert complete == 0 or len(times) == ROWS[name]


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
    check_passes(batches)
    everything = ids_by_dataset(batches)
    assert all(len(ids) > 1.2 * ROWS[name] for name, ids in everything.items() if name != "web")


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
