"""Places: what StatefulDataLoader restores, loops that count steps, loaders without order, skipped batches."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import pqcache
from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
from tests.torch.conftest import ROWS, ids_of
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.usefixtures("few_cores_are_fine"),
    pytest.mark.filterwarnings("ignore:this epoch has the same"),
]

BATCHES = 16


def dataset(table: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(table, **{"batch_size": 32, "seed": 3, "lanes": 4, **options})


def stateful(dataset: ParquetDataset, workers: int, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)


EVERY_ROW = list(range(ROWS))


def train(data: ParquetDataset, loader: Any, first: int, steps: int = 10**9) -> Iterator[tuple[int, int]]:
    """Yield (epoch, index) of three epochs' batches, as README's loop reads them."""
    for epoch in range(first, 3):
        data.set_epoch(epoch)
        for batch in loader:
            yield batch.epoch, batch.index
            steps -= 1
            if not steps:
                return


@pytest.mark.parametrize(("steps", "workers"), [(5, 0), (BATCHES, 0), (2 * BATCHES + 1, 0), (BATCHES, 2)])
def test_a_loop_with_stateful_dataloader_repeats_no_epoch(table: Path, workers: int, steps: int) -> None:
    """``dataset.epoch`` does not know of the loader's state before it iterates: other epochs than its are refused."""
    data = dataset(table)
    loader = stateful(data, workers)
    seen = list(train(data, loader, 0, steps))
    state = loader.state_dict()
    last = seen[-1][0]
    for first in (0, last):
        again = dataset(table)
        assert again.epoch == 0
        resumed = stateful(again, workers)
        resumed.load_state_dict(state)
        if first < last:
            with pytest.raises(
                UsageError, match=rf"set_epoch\(0\).*is at epoch {last}.*begin with set_epoch\({last}\)"
            ):
                list(train(again, resumed, first))
        else:
            assert seen + list(train(again, resumed, first)) == [(e, i) for e in range(3) for i in range(BATCHES)]
            assert again.epoch == 2


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_a_state_of_a_finished_epoch_leaves_nothing_of_it(table: Path, workers: int, persistent: bool) -> None:
    """StatefulDataLoader begins anew where its iterator had ended; that must not read the epoch again."""
    data = dataset(table)
    loader = stateful(data, workers, persistent_workers=persistent)
    assert len(ids_of(loader)) == ROWS  # to StopIteration
    state = loader.state_dict()
    for first in (0, 1):
        again = dataset(table)
        resumed = stateful(again, workers, persistent_workers=persistent)
        resumed.load_state_dict(state)
        assert list(train(again, resumed, first)) == [(e, i) for e in (1, 2) for i in range(BATCHES)]


@pytest.mark.parametrize(("kind", "workers"), [("plain", 0), ("stateful", 2), ("Loader", 2)])
def test_the_epoch_after_a_resumed_one_is_whole_for_loops_that_count_steps(
    table: Path, kind: str, workers: int
) -> None:
    """Such a loop never sees StopIteration."""

    def make() -> tuple[ParquetDataset, Any]:
        data = dataset(table)
        if kind == "plain":
            return data, DataLoader(data, batch_size=None, num_workers=workers)
        return data, stateful(data, workers) if kind == "stateful" else Loader(data, num_workers=workers)

    data, loader = make()
    batches = iter(loader)
    for _ in range(10):
        batch = next(batches)
    state = dataset(table).state_dict(after=batch) if kind == "plain" else loader.state_dict()
    data, loader = make()
    (data if kind == "plain" else loader).load_state_dict(state)
    batches = iter(loader)
    for _ in range(BATCHES - 10):
        next(batches)
    assert sorted(ids_of(loader)) == EVERY_ROW


@pytest.mark.parametrize(("context", "wrapped", "in_order"), [("fork", True, False), ("forkserver", False, True)])
def test_what_the_workers_of_a_plain_loader_read_has_no_place(
    table: Path, context: str, wrapped: bool, in_order: bool
) -> None:
    """Neither a batch nor the dataset can tell which of the batches before it were consumed."""
    data = dataset(table)
    read = _Wrapper(data) if wrapped else data
    loader = DataLoader(read, batch_size=None, num_workers=2, in_order=in_order, multiprocessing_context=context)
    batches = list(loader)
    assert sorted(ids_of(batches)) == EVERY_ROW
    for after in (None, batches[3], 3):
        with pytest.raises(UsageError, match="only a loader knows"):
            data.state_dict(after=after)
    data.set_epoch(1)  # which may be in the loop
    with pytest.raises(UsageError, match="only a loader knows"):
        data.state_dict()
    next(iter(data))
    assert data.state_dict()["batch"] == 1, "it is read in the trainer"
    state = dataset(table).state_dict(after=3)
    data.load_state_dict(state)
    assert data.state_dict() == state
    assert sorted(batch.index for batch in loader) == list(range(4, BATCHES))


class _Wrapper(torch.utils.data.IterableDataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


@pytest.mark.parametrize(("kind", "workers"), [("plain", 1), ("stateful", 0)])
def test_a_repeated_order_is_warned_of_once(
    table: Path, workers: int, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where each epoch has new workers, each of which would warn."""

    def warned(read: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: print(message, file=sys.stderr, flush=True)  # workers' too
            read()
        return capfd.readouterr().err.count("has the same order")

    def make(**options: Any) -> tuple[ParquetDataset, Any]:
        data = dataset(table, **options)
        plain = DataLoader(data, batch_size=None, num_workers=workers)
        return data, plain if kind == "plain" else stateful(data, workers)

    _, loader = make()
    assert warned(lambda: [list(loader) for _ in range(3)]) == 1
    _, fixed = make(shuffle=False)
    assert warned(lambda: [list(fixed) for _ in range(2)]) == 0
    _, validation = make()

    def validate() -> None:
        for _ in range(2):
            with torch.no_grad():
                list(validation)

    assert warned(validate) == 0
    data, chosen = make()

    def choose() -> None:
        for _ in range(2):
            data.set_epoch(0)
            list(chosen)

    assert warned(choose) == 0


# ---- an iteration that is going on


def mix(table: Path) -> Mix:
    return Mix({name: ParquetDataset(table, batch_size=64, seed=i) for i, name in enumerate("ab")}, seed=1, lanes=4)


def reading(kind: str, table: Path, workers: int, **options: Any) -> tuple[Any, Any]:
    """Return what is iterated, and what has its state; ``options`` are those of the dataset."""
    data: Any = mix(table) if "mix" in kind else dataset(table, **options)
    if "loader" in kind:
        loader = Loader(data, num_workers=workers)
        return loader, loader
    return (DataLoader(data, batch_size=None, num_workers=workers) if "plain" in kind else data), data


def places_of(batches: Any) -> list[tuple[int, int]]:
    return [(batch.epoch, batch.index) for batch in batches]


@pytest.mark.parametrize(
    ("kind", "workers", "given"),
    [
        ("loader", 2, 5),
        ("loader", 0, BATCHES),
        ("mix of a loader", 0, 5),
        ("dataset", 0, BATCHES),
        ("plain", 0, 5),
    ],
)
def test_a_state_that_is_loaded_in_a_loop_ends_it(table: Path, kind: str, workers: int, given: int) -> None:
    """The iteration would go on where it was, and save the loaded place for good; a new one goes on there."""
    read, place = reading(kind, table, workers)
    batches = iter(read)
    first = [next(batches) for _ in range(2)]
    state = place.state_dict() if workers == 0 or "loader" in kind else place.state_dict(after=first[-1])
    for _ in range(given - 2):
        next(batches)
    place.load_state_dict(state)
    assert place.state_dict() == state
    with pytest.raises(UsageError, match=r"a state was loaded during this iteration.*begin a new one"):
        next(batches)
    assert places_of(read) == [(0, index) for index in range(2, BATCHES)]
    assert places_of(read)[0][0] == ("loader" in kind), "a Loader counts epochs"


def test_workers_of_a_plain_loader_end_when_a_state_is_loaded(table: Path) -> None:
    """What they have sent already comes first."""
    read, data = reading("plain", table, 2)
    batches = iter(read)
    data.load_state_dict(dataset(table).state_dict(after=next(batches)))
    with pytest.raises(UsageError, match="a state was loaded during this iteration"):
        list(batches)
    assert places_of(read) == [(0, index) for index in range(1, BATCHES)]


@pytest.mark.parametrize(
    ("kind", "workers", "held"),
    [("loader", 0, True), ("loader", 2, False), ("plain", 2, True)],
)
def test_a_loop_that_was_left_goes_on_at_a_state(table: Path, kind: str, workers: int, held: bool) -> None:
    """Of other lanes than those that the workers which are running were started with."""
    batches = iter(dataset(table))
    seen = ids_of(next(batches) for _ in range(5))
    _, place = reading("dataset", table, 0)
    state = place.state_dict(after=4)
    rest = ids_of(batches)
    read, place = reading(kind, table, workers, lanes=None)
    left = iter(read)
    next(left)
    if not held:
        del left
    place.load_state_dict(state)
    assert ids_of(read) == rest
    assert sorted(seen + rest) == EVERY_ROW


def test_persistent_workers_refuse_a_state_of_other_lanes(table: Path) -> None:
    """They have been started without it; a Loader starts others."""
    data = dataset(table, lanes=None)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    next(iter(loader))
    data.load_state_dict(dataset(table, lanes=2).state_dict(after=0))
    assert places_of(loader) == [(0, index) for index in range(1, BATCHES)], "of the same lanes"
    data = dataset(table, lanes=None)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    next(iter(loader))
    data.load_state_dict(dataset(table).state_dict(after=4))
    with pytest.raises(UsageError, match=r"was loaded after its workers had started.*new DataLoader"):
        list(loader)


@pytest.mark.parametrize(
    ("on", "at", "workers"),
    [("loader", BATCHES - 1, 0), ("sampler", 3, 0), ("dataset", 3, 2)],
)
def test_an_epoch_that_is_set_in_a_loop_is_the_next_one(table: Path, on: str, at: int, workers: int) -> None:
    loader = Loader(dataset(table), num_workers=workers)
    owner = {"loader": loader, "sampler": loader.sampler, "dataset": loader.dataset}[on]
    places, states = [], []
    for number, batch in enumerate(loader):
        places.append((batch.epoch, batch.index))
        if number == at:
            owner.set_epoch(7)
        states.append(loader.state_dict())
    assert places == [(0, index) for index in range(BATCHES)]
    assert [(state["epoch"], state["batch"]) for state in states] == [
        *((0, index + 1) for index in range(BATCHES - 1)),
        (7, 0),
    ]
    assert places_of(loader) == [(7, index) for index in range(BATCHES)]
    assert loader.epoch == 8


def test_a_new_loader_for_each_epoch_reads_the_next_one(table: Path) -> None:
    data = dataset(table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch, workers in enumerate((0, 2, 0)):
            loader = Loader(data, num_workers=workers)
            assert loader.epoch == epoch
            assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (epoch, 0)
            assert places_of(loader) == [(epoch, index) for index in range(BATCHES)]
        next(iter(Loader(data)))  # a look at a batch is no epoch
        batches = iter(Loader(data))
        assert places_of([next(batches), next(batches)]) == [(3, 0), (3, 1)]
    with pytest.warns(UserWarning, match="one Loader for all epochs, or call loader.set_epoch"):
        assert places_of(Loader(data))[0] == (3, 0)


def test_a_state_does_not_replace_the_snapshot_that_was_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.table({"id": np.arange(64)}), source / "a.parquet")
    pqcache.sync(source, tmp_path / "cache")
    state = ParquetDataset(tmp_path / "cache").state_dict()
    pq.write_table(pa.table({"id": np.arange(64)}), source / "b.parquet")
    pqcache.sync(source, tmp_path / "cache")
    first, second = (snapshot.id for snapshot in pqcache.Cache.open(tmp_path / "cache").snapshots())
    for snapshot in (second, "2"):
        data = ParquetDataset(tmp_path / "cache", snapshot=snapshot)
        for owner in (data, Loader(data)):
            with pytest.raises(UsageError, match=rf"taken with snapshot {first}.*made with '{snapshot}'"):
                owner.load_state_dict(state)
        assert (data.snapshot, sum(len(batch["id"]) for batch in data)) == (second, 128)
    data = ParquetDataset(tmp_path / "cache", filters="id < 32")
    with pytest.raises(UsageError, match="other filters"):
        data.load_state_dict(state)
    assert (data.snapshot, sum(len(batch["id"]) for batch in data)) == (second, 64), "it is as it was"
    for found in (ParquetDataset(tmp_path / "cache"), ParquetDataset(tmp_path / "cache", snapshot=first)):
        found.load_state_dict(state)
        assert found.snapshot == first


def test_a_resumed_epoch_that_was_looked_at_begins_at_its_state_again(table: Path) -> None:
    """Its workers have made all that was left, of which the trainer got one batch."""
    data = dataset(table)
    data.load_state_dict(dataset(table).state_dict(after=BATCHES - 4))
    look = iter(Loader(data, num_workers=2))
    next(look)
    wait_for(lambda: data.stats().epoch.batches >= 3)
    again = Loader(data)
    assert again.state_dict()["batch"] == BATCHES - 3
    assert places_of(again) == [(0, index) for index in range(BATCHES - 3, BATCHES)]
    assert places_of(Loader(data)) == [(1, index) for index in range(BATCHES)]


def test_persistent_workers_are_given_a_state_of_ranks_that_do_not_divide_the_lanes(table: Path) -> None:
    """The rest of that epoch is divided in another way than the next one, which begins anew."""
    seen = []
    for rank in range(5):
        of_rank = Loader(dataset(table, lanes=12, num_replicas=5, rank=rank))
        seen += ids_of(itertools.islice(of_rank, 2))
    state = of_rank.state_dict()
    assert state["divisions"]
    loader = Loader(dataset(table, lanes=12), num_workers=3)
    ids_of(loader)  # the workers live on
    for _ in range(2):
        loader.load_state_dict(state)
        assert sorted(seen + ids_of(loader)) == EVERY_ROW
    following = dataset(table, lanes=12)
    following.set_epoch(1)
    assert ids_of(loader) == ids_of(following)
    assert "divisions" not in loader.state_dict()


def test_what_cannot_be_divided_is_refused(table: Path) -> None:
    rows = dataset(table, batch_size=None)
    with pytest.raises(UsageError, match="lanes=4: cannot be shared by 1 ranks x 3 workers"):
        list(found := iter(DataLoader(rows, batch_size=None, num_workers=3)))
    found._shutdown_workers()  # type: ignore[attr-defined]
    state = dataset(table, batch_size=None).state_dict()
    with pytest.raises(UsageError, match="lanes=4, which 3 ranks cannot share"):
        dataset(table, batch_size=None, lanes=None, num_replicas=3, rank=0).load_state_dict(state)
    state = {**dataset(table).state_dict(), "batch": 3}
    for bad in ([[1, 2]], [[0, 0, 1]], [[-1, 1, 1]], 3, [["x", 1, 1]], [[0, 1, 1]] * 33):
        with pytest.raises(UsageError, match="its divisions are"):
            dataset(table).load_state_dict({**state, "divisions": bad})
