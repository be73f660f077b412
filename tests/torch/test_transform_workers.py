"""A transform on threads: the same order, seeds and errors as without, and resumed at any batch."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pqcache.errors import UsageError
from pqcache.torch import Batch, Loader, Mix, ParquetDataset
from tests.torch.conftest import ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")


def noisy(batch: Batch, generator: np.random.Generator) -> Batch:
    batch["noise"] = torch.from_numpy(generator.random(3))
    return batch


def threaded(table: Path, transform: Any = noisy, **options: Any) -> ParquetDataset:
    how = {"columns": ["id"], "batch_size": 16, "lanes": 2, "transform_workers": 3, **options}
    return ParquetDataset(table, transform=transform, **how)


def noise_of(batches: Any) -> dict[int, list[float]]:
    return {batch.index: batch["noise"].tolist() for batch in batches}


def test_the_order_and_the_seeds(table: Path) -> None:
    dataset = threaded(table, seed=5)
    dataset.set_epoch(2)
    batches = list(dataset)
    plain = ParquetDataset(table, columns=["id"], batch_size=16, lanes=2, seed=5)
    plain.set_epoch(2)
    assert ids_of(batches) == ids_of(plain)
    assert noise_of(batches) == {
        index: np.random.default_rng((5, 2, index)).random(3).tolist() for index in range(len(dataset))
    }


def test_any_topology_workers_and_resuming(table: Path) -> None:
    one = noise_of(threaded(table, lanes=4))
    ranks = [threaded(table, lanes=4, num_replicas=2, rank=rank) for rank in range(2)]
    assert {**noise_of(ranks[0]), **noise_of(ranks[1])} == one
    assert noise_of(Loader(threaded(table, lanes=4), num_workers=1)) == one
    dataset = threaded(table, lanes=4)
    for batch in dataset:
        if batch.index % 7:
            continue
        state = json.loads(json.dumps(dataset.state_dict()))  # though later ones are read already
        resumed = threaded(table, lanes=4)
        resumed.load_state_dict(state)
        following = next(iter(resumed))
        assert (following.index, following["noise"].tolist()) == (batch.index + 1, one[batch.index + 1])


def test_several_are_at_work_at_once(table: Path) -> None:
    barrier = threading.Barrier(3)

    def wait(batch: Batch, generator: np.random.Generator) -> Batch:
        if batch.index < 3:
            barrier.wait(30)  # raises BrokenBarrierError where the others do not come
        return batch

    assert [batch.index for batch in threaded(table, wait)] == list(range(32))


@pytest.mark.parametrize("within_batch", [False, True])
def test_a_transform_on_threads_changes_no_batch_of_a_mix(table: Path, within_batch: bool) -> None:
    def parts(**options: Any) -> dict[str, ParquetDataset]:
        how = {"lanes": None, **options}
        return {"a": threaded(table, noisy_row, **how), "b": threaded(table, noisy_row, seed=4, **how)}

    def noisy_row(batch: Batch, generator: np.random.Generator) -> Batch:
        batch["noise"] = torch.from_numpy(generator.random(len(batch["id"])))
        return batch

    expected = noise_of(Mix(parts(transform_workers=1), within_batch=within_batch, lanes=2))
    loader = Loader(Mix(parts(), within_batch=within_batch, lanes=2), num_workers=1)
    for batch in loader:
        assert batch["noise"].tolist() == expected[batch.index]
        state = loader.state_dict()
        if batch.index == 4:
            break
    again = Mix(parts(), within_batch=within_batch, lanes=2)
    again.load_state_dict(state)
    assert noise_of(again) == {index: noise for index, noise in expected.items() if index > 4}


def test_one_that_stops_half_way_leaves_no_thread(table: Path) -> None:
    before = set(threading.enumerate())
    batches = iter(threaded(table))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_errors_name_the_batch(table: Path) -> None:
    def fail(batch: Batch, generator: np.random.Generator) -> Batch:
        if 137 in batch["id"].tolist():
            raise KeyError("137")
        return batch

    with pytest.raises(KeyError) as caught:
        list(threaded(table, fail, shuffle=False))
    text = "\n".join(getattr(caught.value, "__notes__", [])) or str(caught.value.__cause__)
    assert "in the transform of batch 8 of epoch 0" in text
    skipped = threaded(table, fail, shuffle=False, on_error="skip")
    assert ids_of(skipped) == [138 if i == 137 else i for i in range(500)]
    assert [row.row for row in skipped.errors()] == [37]


def test_rows_one_by_one(table: Path) -> None:
    def double(row: dict[str, Any], generator: np.random.Generator) -> int:
        return int(row["id"]) * 2

    assert list(threaded(table, double, batch_size=None, shuffle=False)) == [2 * i for i in range(500)]


def test_what_does_not_fit(table: Path) -> None:
    with pytest.raises(UsageError, match="the transform takes no generator"):
        threaded(table, lambda batch: batch)
