"""Loader, and what a plain DataLoader and other wrappers may do with a dataset: exact, or refused."""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from pqcache.errors import UsageError
from pqcache.torch import Batch, Loader, ParquetDataset, foreign_loaders, resumable
from tests.torch.conftest import ROWS, ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")


def dataset(table: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(table, **{"batch_size": 32, "seed": 3, "lanes": 4, **options})


def plain_dict(batch: Batch) -> dict[str, Any]:
    return {**batch}


EVERY_ROW = list(range(ROWS))


def test_each_iteration_is_another_epoch(table: Path) -> None:
    loader = Loader(dataset(table), num_workers=2)
    assert len(loader) == 16
    orders = [ids_of(loader) for _ in range(3)]
    assert all(sorted(order) == EVERY_ROW for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    plain = dataset(table)
    plain.set_epoch(1)
    assert ids_of(plain) == orders[1]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert ids_of(loader) == orders[1]
    loader.sampler.set_epoch(1)  # by a framework that counts from 0 again
    assert loader.epoch == 2
    loader.sampler.set_epoch(3)
    assert loader.epoch == 3
    batches = iter(loader)
    next(batches)  # left early: the next iteration begins a new epoch all the same
    assert sorted(ids_of(loader)) == EVERY_ROW
    assert loader.epoch == 5


def test_the_epoch_may_be_set_after_iter(table: Path) -> None:
    loader = Loader(dataset(table), num_workers=2)
    batches = iter(loader)
    time.sleep(0.2)
    loader.set_epoch(7)
    plain = dataset(table)
    plain.set_epoch(7)
    assert ids_of(batches) == ids_of(plain)


def test_workers_with_the_seed_of_others_read_the_epoch_that_is_set(table: Path) -> None:
    """As where a training seeds torch before each epoch."""
    read, orders = dataset(table), []
    for epoch in range(2):
        torch.manual_seed(0)
        loader = DataLoader(read, batch_size=None, num_workers=2)
        for more in range(2):
            read.set_epoch(2 * epoch + more)
            orders.append(ids_of(loader))
            assert read.stats().epoch.rows == ROWS
    assert orders == [ids_of(at_epoch(table, epoch)) for epoch in range(4)]


def test_the_place_is_kept_without_help(table: Path) -> None:
    loader = Loader(dataset(table, transform=plain_dict), num_workers=2)
    loader.set_epoch(2)
    whole = ids_of(at_epoch(table, 2))
    batches, seen = iter(loader), []
    assert loader.state_dict()["batch"] == 0
    for number in range(1, 6):
        seen += ids_of([next(batches)])
        assert loader.state_dict()["batch"] == number
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = Loader(dataset(table))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(2)  # as frameworks do after loading
    assert seen + ids_of(resumed) == whole
    assert sorted(ids_of(resumed)) == EVERY_ROW, "the epoch after it is complete"
    assert resumed.state_dict()["epoch"] == 3


def test_an_epoch_that_was_resumed_can_be_set_again(table: Path) -> None:
    loader = Loader(dataset(table))
    batches = iter(loader)
    next(batches), next(batches)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(0)
    assert len(ids_of(loader)) == ROWS - 64
    batches = iter(loader)
    loader.set_epoch(0)
    assert ids_of(loader) == ids_of(at_epoch(table, 0))


def at_epoch(table: Path, epoch: int) -> ParquetDataset:
    plain = dataset(table)
    plain.set_epoch(epoch)
    return plain


def test_the_end_of_an_epoch_is_marked_with_its_last_batch(table: Path) -> None:
    """A trainer that counts steps never sees StopIteration."""
    loader = Loader(dataset(table), num_workers=2)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    resumed = Loader(dataset(table))
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert ids_of(resumed) == ids_of(at_epoch(table, 1))
    assert ids_of(loader) == ids_of(at_epoch(table, 1))


def test_a_device_takes_all_tensors(table: Path) -> None:
    batch = next(iter(Loader(dataset(table), device="meta")))
    assert isinstance(batch, Batch)
    assert batch.index == 0
    assert (batch["id"].device.type, batch["tokens"].values.device.type) == ("meta", "meta")
    tuples = dataset(table, transform=lambda batch: (batch["id"], [batch["id"]]))
    ids, (same,) = next(iter(Loader(tuples, device="meta")))
    assert (ids.device.type, same.device.type, len(ids)) == ("meta", "meta", 32)
    with pytest.raises(UsageError, match="no to"):
        next(iter(Loader(dataset(table, transform=lambda batch: object()), device="meta")))


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 8},
        {"shuffle": False},
        {"shuffle": True},
        {"sampler": [1]},
        {"drop_last": True},
        {"in_order": False},
        {"batch_sampler": [[1]]},
        {"generator": torch.Generator()},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_the_dataset_decides_is_refused(table: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(option))}.*dataset|order"):
        Loader(dataset(table), **option)


def test_what_is_no_dataset_is_refused(table: Path) -> None:
    Loader(dataset(table), batch_size=None, shuffle=None, in_order=True)
    with pytest.raises(TypeError, match="colour"):
        Loader(dataset(table), colour=1)
    with pytest.raises(UsageError, match="ParquetDataset or a Mix"):
        Loader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="batch_size=None"):
        Loader(dataset(table, batch_size=None))


# ---- a plain DataLoader


def test_batches_of_batches_are_refused(table: Path) -> None:
    """Frameworks ask for the length first; Lightning hides an error of ``iter`` behind one of its own."""
    read = dataset(table, batch_size=8)
    for loader in (DataLoader(read), DataLoader(read, batch_size=8)):
        for use in (len, lambda loader: next(iter(loader))):
            with pytest.raises(UsageError, match="batches of batches"):
                use(loader)
    with pytest.raises(Exception, match="batches of batches"):
        next(iter(DataLoader(read, batch_size=8, num_workers=2)))
    assert len(DataLoader(read, batch_size=None)) == len(Loader(read)) == len(read)
    rows = DataLoader(dataset(table, batch_size=None, columns=["id"]), batch_size=8)
    assert len(rows) == len(read)
    assert next(iter(rows))["id"].shape == (8,)


@pytest.mark.xdist_group("ranks")  # whose worker has a fork server
def test_a_dataset_made_before_the_ranks_is_divided_among_them(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks pickle a dataset to the ranks that they spawn; what it knew of ranks is not true there."""
    pickled = pickle.dumps(dataset(table))
    monkeypatch.setattr(resumable, "check_alike", lambda *_: None)  # one process is one rank after another
    rows = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        rows += ids_of(Loader(pickle.loads(pickled), num_workers=1, multiprocessing_context="forkserver"))
    assert set(rows) == set(EVERY_ROW)
    assert len(rows) < ROWS + 64


def test_a_batch_that_was_made_anew_has_no_place(table: Path) -> None:
    ds = dataset(table)
    batch = next(iter(ds))
    with pytest.raises(UsageError, match="does not know its index"):
        ds.state_dict(after=type(batch)(dict(batch)))


class IterableDatasetShard(IterableDataset[Any]):
    """As Accelerate's and transformers': every process reads all and yields its part."""

    def __init__(self, inner: Any) -> None:
        self.dataset = inner

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        yield from self.dataset


def test_what_divides_again_is_refused(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_loaders, "_DIVIDES", {(__name__, "IterableDatasetShard")})
    monkeypatch.setattr(foreign_loaders, "_MODULES", {__name__})
    wrapped = IterableDatasetShard(dataset(table, num_replicas=2, rank=0))
    for read in (lambda: next(iter(wrapped)), lambda: wrapped.set_epoch(1)):
        with pytest.raises(UsageError, match=r"rows would be left out.*Loader"):
            read()
    assert sorted(ids_of(IterableDatasetShard(dataset(table)))) == EVERY_ROW, "one reader may be divided"


def test_one_iteration_at_a_time(table: Path) -> None:
    loader = Loader(dataset(table), num_workers=2)
    first = iter(loader)
    next(first)
    assert sorted(ids_of(loader)) == EVERY_ROW
    with pytest.raises(UsageError, match="another iteration of it has begun"):
        next(first)


def test_a_loader_may_be_copied_and_pickled(table: Path) -> None:
    loader = Loader(dataset(table), num_workers=2)
    for copied in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        copied.sampler.set_epoch(2)
        assert (copied.epoch, loader.epoch) == (2, 0)
        assert ids_of(copied) == ids_of(at_epoch(table, 2))


def test_batches_are_skipped(table: Path) -> None:
    every = [list(ids_of([batch])) for batch in Loader(dataset(table), num_workers=2)]
    loader = Loader(dataset(table), num_workers=2)
    loader.skip(2)
    batches = iter(loader)
    assert [ids_of([next(batches)]) for _ in range(3)] == every[2:5]
    loader.skip(4)
    with pytest.raises(UsageError, match="a state was loaded"):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 9)
    assert [ids_of([batch]) for batch in loader] == every[9:]
    loader.skip(16)  # all of epoch 1
    assert loader.epoch == 2
    again = Loader(dataset(table, num_replicas=1, rank=0), num_workers=0)
    again.load_state_dict(state)
    again.skip(0)
    assert [ids_of([batch]) for batch in again] == every[9:]
    for wrong in (17, -1, 1.5, True):
        with pytest.raises(UsageError, match=r"skip\(.*: each rank has 16 batches left in epoch 2"):
            loader.skip(wrong)  # type: ignore[arg-type]
    assert sorted(ids_of(loader)) == EVERY_ROW


@pytest.mark.parametrize("lanes", [4, None])
def test_ranks_skip_together(table: Path, lanes: int | None) -> None:
    """Also after a state of other ranks, whose lanes they do not divide."""
    alone = Loader(dataset(table, lanes=4))
    batches = iter(alone)
    read = [i for _ in range(3) for i in next(batches)["id"].tolist()]
    state, left = alone.state_dict(), []
    for rank in range(3):
        loader = Loader(dataset(table, lanes=lanes, num_replicas=3, rank=rank, pad=False))
        loader.load_state_dict(state)
        with torch.no_grad():  # as pad=False asks for
            full = [ids_of([batch]) for batch in loader]
            loader.load_state_dict(state)
            loader.skip(2)
            assert [ids_of([batch]) for batch in loader] == full[2:]
        left += [i for ids in full for i in ids]
    assert sorted(read + left) == EVERY_ROW
