"""Trainers that are forked or spawned with a dataset, as ranks are, each have an epoch and counts of their own."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import pqcache
from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
from tests.torch.conftest import ROWS, ids_of

EPOCHS = 2
Found = tuple[list[list[int]], int]  # the ids of each epoch, and the rows that stats() counts


def dataset(table: Path) -> ParquetDataset:
    return ParquetDataset(table, ["id"], batch_size=60, lanes=2, seed=1)


def epochs_of(loader: DataLoader[Any], named: bool) -> Found:
    """Read epochs; with set_epoch where they are ``named``."""
    found = []
    for epoch in range(EPOCHS):
        if named:
            loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        found.append(ids_of(loader))
    return found, loader.dataset.stats().total.rows  # type: ignore[attr-defined]


def train(pipe: Connection, loader: DataLoader[Any], named: bool) -> None:
    assert pipe.poll(60)
    pipe.recv()
    pipe.send(epochs_of(loader, named))


def of_loader(table: Path, workers: int) -> DataLoader[Any]:
    return Loader(dataset(table), num_workers=workers, multiprocessing_context="fork" if workers else None)


def of_plain(table: Path, workers: int) -> DataLoader[Any]:
    context = "fork" if workers else None
    return DataLoader(dataset(table), batch_size=None, num_workers=workers, multiprocessing_context=context)


def of_mix(table: Path, workers: int) -> DataLoader[Any]:
    parts = {"a": ParquetDataset(table, ["id"], batch_size=60)}
    mix = Mix(parts, weights={"a": 1}, seed=1, lanes=2)
    return Loader(mix, num_workers=workers, multiprocessing_context="fork" if workers else None)


@contextmanager
def child(start: Any, target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Start a process; yield the pipe whose other end is its first argument."""
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join(20)
        process.kill()


@pytest.mark.parametrize(
    ("make", "start", "workers"),
    [(of_loader, "fork", 2), (of_plain, "forkserver", 2), (of_mix, "fork", 0)],
)
def test_each_begins_where_its_parent_was(
    table: Path, make: Callable[[Path, int], DataLoader[Any]], start: str, workers: int
) -> None:
    """One after the other, while the parent goes on."""
    named = make is of_plain
    alone, rows = epochs_of(make(table, workers), named)
    assert [sorted(ids) for ids in alone] == [list(range(ROWS))] * EPOCHS
    assert alone[0] != alone[1]
    assert rows == EPOCHS * ROWS
    loader = make(table, workers)
    with ExitStack() as started:
        pipes = [started.enter_context(child(start, train, loader, named)) for _ in range(2)]
        loader.set_epoch(1) if isinstance(loader, Loader) else loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
        for pipe in pipes:
            pipe.send(None)
            assert pipe.poll(60)
            assert pipe.recv() == (alone, rows)
    assert ids_of(loader) == alone[1]
    assert loader.dataset.stats().total.rows == ROWS  # type: ignore[attr-defined]


def validate_and_train(pipe: Connection, read: ParquetDataset) -> None:
    torch.set_default_device("meta")  # a GPU's in real ranks
    with torch.inference_mode():
        validated = ids_of(read)
    read.set_epoch(1)
    pipe.send([validated, ids_of(read)])


def test_a_rank_that_begins_in_inference_mode_on_another_device(table: Path) -> None:
    read = dataset(table)
    with child("fork", validate_and_train, read) as pipe:
        assert pipe.poll(60)
        found = pipe.recv()
    expected = [ids_of(read)]
    read.set_epoch(1)
    assert found == [*expected, ids_of(read)]


class AsksEarly(IterableDataset[Any]):
    """A wrapper that asks the dataset for its length before torch says that its process is a worker."""

    def __init__(self, wrapped: ParquetDataset) -> None:
        self.wrapped = wrapped

    def __iter__(self) -> Any:
        return iter(self.wrapped)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.length = len(self.wrapped), self.wrapped.epoch


@pytest.mark.xdist_group("ranks")  # as others that need the fork server
def test_a_spawned_worker_that_is_asked_early_shares_the_epoch(table: Path) -> None:
    read = dataset(table)
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
    loader = DataLoader(AsksEarly(read), batch_size=None, **options)
    found = []
    for epoch in range(EPOCHS):
        read.set_epoch(epoch)
        found.append(ids_of(loader))
    assert [sorted(ids) for ids in found] == [list(range(ROWS))] * EPOCHS
    assert found[0] != found[1]
    assert read.stats().total.rows == EPOCHS * ROWS


class Begun(IterableDataset[Any]):
    """A dataset of one's own that holds an iterator of the trainer."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for batch in self.batches:
            yield list(map(int, batch["id"]))


@pytest.mark.parametrize(
    ("kind", "begun"),
    [("batches", True), ("dataset", False), ("mix", True), ("loader", False), ("loader with workers", True)],
)
def test_an_iterator_is_of_one_process(table: Path, tmp_path: Path, kind: str, begun: bool) -> None:
    """In a fork its threads are missing: it would wait for ever, or take what workers send to its trainer."""
    if kind == "batches":
        pqcache.sync(table, tmp_path / "cache")
        batches: Any = pqcache.Cache.open(tmp_path / "cache").batches(["id"], batch_size=60)
    elif kind == "dataset":
        batches = iter(dataset(table))
    else:
        batches = iter((of_mix if kind == "mix" else of_loader)(table, 2 if "workers" in kind else 0))
    seen = list(map(int, next(batches)["id"])) if begun else []
    reader = DataLoader(Begun(batches), batch_size=None, num_workers=1, timeout=10, multiprocessing_context="fork")
    forked: Any = iter(reader)
    with pytest.raises(UsageError, match=r"made in process \d+.*make the iterator in the process.*forkserver"):
        next(forked)
    forked._shutdown_workers()  # which takes torch five seconds if it is left to the garbage collector
    assert sorted(seen + [i for batch in batches for i in map(int, batch["id"])]) == list(range(ROWS)), (
        "it goes on here"
    )


def test_a_loader_with_running_workers_has_others_in_a_fork(table: Path) -> None:
    loader = of_loader(table, 2)
    batches = iter(loader)
    seen = ids_of([next(batches)])
    with child("fork", train_on, loader) as pipe:
        assert pipe.poll(20)
        assert pipe.recv() == list(range(ROWS))
    assert sorted(seen + ids_of(batches)) == list(range(ROWS))


def train_on(pipe: Connection, loader: DataLoader[Any]) -> None:
    pipe.send(sorted(ids_of(loader)))


class MadeInWorkers(IterableDataset[Any]):
    """Reads epochs of a dataset that each worker makes, or copies, by itself."""

    def __init__(self, table: Path, kind: str) -> None:
        self.table, self.kind, self.read = table, kind, dataset(table)

    def __iter__(self) -> Any:
        read = copy.deepcopy(self.read) if self.kind == "copy" else dataset(self.table)
        loader = Loader(read) if self.kind == "loader" else None
        for epoch in range(3):
            read.set_epoch(epoch)
            yield epoch, [i for batch in loader or read for i in batch["id"].tolist()]
            if loader is not None:
                assert loader.state_dict()["epoch"] == epoch


@pytest.mark.parametrize(("kind", "persistent"), [("copy", False), ("loader", True)])
def test_a_dataset_made_in_a_worker_has_many_epochs(table: Path, kind: str, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "timeout": 5}
    loader = DataLoader(MadeInWorkers(table, kind), batch_size=None, **options)
    for _ in range(2):
        found = list(loader)
        for epoch in range(3):
            ids = [i for number, part in found for i in part if number == epoch]
            read = dataset(table)
            read.set_epoch(epoch)
            assert sorted(ids) == list(range(ROWS))
            assert found[2 * epoch][1][:60] == next(iter(read))["id"].tolist()
