"""ParquetDataset in a DataLoader: exactly once, in any topology, resumable anywhere."""

from __future__ import annotations

import multiprocessing
import random
import shlex
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import pqcache
from pqcache.errors import CacheError, PqcacheError, UsageError
from pqcache.system.processes import is_running
from pqcache.torch import Batch, Loader, ParquetDataset
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache
from tests.waiting import becomes_true

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = 2000


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 rows in 25 row groups of five partitions; ids are in path order."""
    root = tmp_path_factory.mktemp("shop")
    for day in range(5):
        ids = np.arange(day * 400, (day + 1) * 400)
        table = pa.table(
            {
                "id": ids,
                "title": [f"item {i}" for i in ids],
                "tokens": pa.array([list(range(i % 11)) for i in ids], pa.list_(pa.int32())),
                "vector": pa.array([[i, i + 0.5] for i in ids], pa.list_(pa.float32())),
                "image": [bytes([i % 256]) * (i % 300) for i in ids],
            }
        )
        (root / f"dt=2026-11-0{day + 1}").mkdir()
        pq.write_table(table, root / f"dt=2026-11-0{day + 1}" / "a.parquet", row_group_size=90)
    return root


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return [i for part in lists for i in part]


def loader(ds: ParquetDataset, workers: int, **how: Any) -> DataLoader[Any]:
    return DataLoader(ds, batch_size=None, num_workers=workers, **how)


@pytest.mark.filterwarnings("ignore:this epoch has the same order as the one before")
@pytest.mark.xdist_group("ranks")  # whose worker has a fork server
def test_persistent_workers_resume_and_see_the_epoch(shop: Path) -> None:
    """They are not forked: the dataset is pickled."""
    ds = ParquetDataset(shop, batch_size=100, columns=["id"], lanes=2)
    batches = {}
    for epoch in (0, 1, 2):
        ds.set_epoch(epoch)
        batches[epoch] = list(ds)
    ds.load_state_dict(ds.state_dict(after=batches[1][6]))
    persistent = loader(ds, 2, persistent_workers=True, multiprocessing_context="forkserver")
    assert ds.epoch == 1
    ds.set_epoch(1)  # as `for epoch in range(ds.epoch, epochs)` does
    assert ids_of(persistent) == ids_of(batches[1][7:])
    assert ids_of(persistent) == ids_of(batches[1]), "the same epoch once more is complete"
    for epoch in (0, 2):
        ds.set_epoch(epoch)
        assert ids_of(persistent) == ids_of(batches[epoch])


def test_a_state_from_an_epochs_end_is_the_next_ones_start(shop: Path) -> None:
    how: dict[str, Any] = {"columns": ["id"], "batch_size": 90}
    ds = ParquetDataset(shop, **how)
    ds.set_epoch(4)
    done = ds.state_dict(after=list(ds)[-1])
    assert ds.state_dict() == done, "without workers it needs no argument"
    ds.set_epoch(5)
    expected = ids_of(ds)
    again = ParquetDataset(shop, **how)
    again.load_state_dict(done)
    assert again.epoch == 5
    assert again.state_dict()["batch"] == 0
    assert ids_of(again) == expected
    counting = ParquetDataset(shop, **how)
    counting.load_state_dict(done)
    lengths = []
    for epoch in (4, 5, 4):  # a training that keeps its own count begins with the epoch it was in
        counting.set_epoch(epoch)
        lengths.append(len(list(counting)))
    assert lengths == [0, 23, 23]
    halves = []
    for rank in range(2):
        part = ParquetDataset(shop, num_replicas=2, rank=rank, drop_last=True, lanes=2, **how)
        state = part.state_dict(after=list(part)[-1])
        part.load_state_dict(state)
        assert part.epoch == 1
        halves.append(state)
    assert halves[0] == halves[1]


def test_states_that_do_not_fit_say_why(shop: Path, tmp_path: Path) -> None:
    state = ParquetDataset(shop, batch_size=90, lanes=4).state_dict()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("seed", {"seed": 1}),
        ("batch_size", {"batch_size": 64}),
        ("shuffle", {"shuffle": False}),
        ("columns", {"columns": ["id"]}),
        ("lanes", {"lanes": 2}),
        ("window", {"window": 3}),
        ("filters", {"filters": "dt > '2026-11-02'"}),
    ]
    for message, how in cases:
        ds = ParquetDataset(shop, **{"batch_size": 90, **how})
        with pytest.raises(UsageError, match=message):
            ds.load_state_dict(state)
    ds = ParquetDataset(shop, batch_size=90)
    numbers = [{**state, name: wrong} for name in ("lanes", "window", "piece", "epoch", "batch") for wrong in (-1, "1")]
    for wrong in ({}, {"format": 99}, {"format": 2, "x": 2}, *numbers, {**state, "lanes": 0}):
        with pytest.raises(UsageError, match="state"):
            ds.load_state_dict(wrong)
    with pytest.raises(UsageError, match="format 1, whose order puts other rows into a batch"):
        ds.load_state_dict({**state, "format": 1})
    with pytest.raises(UsageError, match=r"it belongs to worker 0 of 2; StatefulDataLoader must have the same num_w"):
        ds.load_state_dict({**state, "worker": [0, 2, 0]})
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="its files have changed"):
        ParquetDataset(tmp_path, batch_size=90).load_state_dict(state)


def test_rows_one_by_one(shop: Path) -> None:
    how: dict[str, Any] = {"columns": ["id"], "batch_size": None}
    rows = DataLoader(ParquetDataset(shop, **how), batch_size=64, num_workers=2)
    assert sorted(flat(ids_of(rows))) == list(range(ROWS))
    seen = []
    for rank in range(3):
        part = ParquetDataset(shop, num_replicas=3, rank=rank, **how)
        found = [int(row["id"]) for row in part]
        assert len(found) == len(part)
        seen += found
    assert set(seen) == set(range(ROWS))
    ds = ParquetDataset(shop, lanes=6, **how)
    found = [int(row["id"]) for row in islice(ds, 777)]
    again = ParquetDataset(shop, **how)
    again.load_state_dict(ds.state_dict())
    found += [int(row["id"]) for row in again]
    assert found == [int(row["id"]) for row in ParquetDataset(shop, lanes=6, **how)]
    unshuffled = ParquetDataset(shop, shuffle=False, **how)
    assert [int(row["id"]) for row in unshuffled] == list(range(ROWS))


def noise(batch: Batch) -> dict[str, Any]:
    return {"id": batch["id"], "noise": torch.rand(2), "np": np.random.rand(), "py": random.random()}


def test_transform_is_seeded_by_the_batch(shop: Path) -> None:
    def read(workers: int, epoch: int = 0, **how: Any) -> dict[int, tuple[Any, ...]]:
        ds = ParquetDataset(shop, batch_size=90, lanes=4, transform=noise, **how)
        ds.set_epoch(epoch)
        found = list(loader(ds, workers))
        assert all(isinstance(batch, Batch) for batch in found)
        return {b.index: (tuple(b["noise"].tolist()), b["np"], b["py"]) for b in found}

    expected = read(0)
    assert all(len({of_batch[kind] for of_batch in expected.values()}) == len(expected) for kind in range(3))
    state = torch.get_rng_state()
    assert len(list(ParquetDataset(shop, batch_size=90, transform=noise))) == 23
    assert torch.equal(torch.get_rng_state(), state), "the trainer's own generators are left alone"
    assert len(set(expected.values())) == len(expected)
    assert read(2) == expected
    odd = read(0, num_replicas=2, rank=1)
    assert {i: n for i, n in odd.items() if i < 23} == {i: n for i, n in expected.items() if i % 2}
    assert not set(read(0, epoch=1).values()) & set(expected.values())


def test_a_cache_is_leased_while_newer_snapshots_land(tmp_path: Path) -> None:
    source = write_shop(tmp_path / "source", days=2, files=2, rows=200)
    cache = tmp_path / "cache"
    pqcache.sync(str(source), cache, keep=1)
    ds = ParquetDataset(cache, columns=["id"], batch_size=50, lanes=2)
    old = ds.snapshot
    expected = ids_of(ds)
    state = ds.state_dict(after=0)
    batches = iter(loader(ds, 2, multiprocessing_context="fork"))
    first = next(batches)
    write_shop(tmp_path / "source", days=3, files=2, rows=200)
    pqcache.sync(cache, keep=1)
    assert [first["id"].tolist(), *ids_of(batches)] == expected
    assert old in [snapshot.id for snapshot in pqcache.Cache.open(cache).snapshots()]

    newer = ParquetDataset(cache, columns=["id"], batch_size=50)
    assert newer.snapshot != old
    newer.load_state_dict(state)
    assert newer.snapshot == old, "the state's snapshot is still kept, because it is leased"
    assert ids_of(newer) == expected[1:]

    del ds, newer, batches
    pqcache.gc(cache, keep=1)
    with pytest.raises(CacheError, match="was removed"):
        ParquetDataset(cache, columns=["id"], batch_size=50).load_state_dict(state)


def test_small_and_empty(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [7]}), tmp_path / "a.parquet")
    assert ids_of(loader(ParquetDataset(tmp_path, batch_size=100), 2)) == [[7]]
    assert ids_of(ParquetDataset(tmp_path, batch_size=100, drop_last=True)) == []
    for rank in range(3):
        assert ids_of(ParquetDataset(tmp_path, num_replicas=3, rank=rank)) == [[7]]
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert list(ParquetDataset(tmp_path)) == []


def test_a_plain_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    for n in range(3):
        pq.write_table(pa.table({"id": list(range(100))}), tmp_path / f"{n}.parquet")
    changed = tmp_path / "1.parquet"
    ds = ParquetDataset(tmp_path, batch_size=10)
    state = ds.state_dict()
    pq.write_table(pa.table({"id": list(range(100, 200))}), changed)
    with pytest.raises(PqcacheError, match=r"1\.parquet: was replaced or written to since the dataset was opened"):
        list(Loader(ds, num_workers=1))
    with pytest.raises(UsageError, match="its files have changed since the state was taken"):
        ParquetDataset(tmp_path, batch_size=10).load_state_dict(state)
    changed.unlink()
    ds.set_epoch(1)
    with pytest.raises(PqcacheError, match=r"1\.parquet: the file is gone"):
        list(Loader(ds, num_workers=1))


def test_a_directory_of_caches_is_named(tmp_path: Path) -> None:
    write_shop(tmp_path / "lake", days=1, files=1, rows=10)
    for name in ("a", "b"):
        pqcache.sync(tmp_path / "lake", tmp_path / "caches" / name)
    opens: list[Callable[[Path], object]] = [ParquetDataset, pqcache.inspect, pqcache.Cache.open, pqcache.snapshots]
    for _ in range(2):
        for open_it in opens:
            with pytest.raises(PqcacheError, match=r"a directory of caches: a, b; name one of them, like .*/caches/a$"):
                open_it(tmp_path / "caches")
        (tmp_path / "caches" / "pqcache.toml").write_text("tables.a.source = '../lake'")


@pytest.mark.parametrize(
    ("place", "damage"), [("", "gone"), ("", "damaged"), ("current", "damaged"), ("current/dt=2026-11-01", "gone")]
)
def test_a_file_of_a_cache_that_is_lost_comes_back(place: str, damage: str, tmp_path: Path) -> None:
    cache = tmp_path / "my cache"
    pqcache.sync(write_shop(tmp_path / "lake", days=1, files=1, rows=100), cache)
    ds = ParquetDataset(cache / place, columns=["id"], batch_size=10)
    path = next((cache / "current" / "dt=2026-11-01").iterdir())
    if damage == "gone":
        path.unlink()
    else:
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(bytes(1000))
    with pytest.raises(pqcache.ParquetError) as caught:
        list(ds)
    command = caught.value.advice.split("'pqcache ", 1)[1].rpartition("'")[0]
    assert run_pqcache(*shlex.split(command)).returncode == 0, command
    assert len(list(ParquetDataset(cache / place, columns=["id"], batch_size=10))) == 10


@pytest.mark.parametrize(("part", "start"), [("current", "forkserver"), ("current/dt=2026-11-01", "fork")])
def test_a_path_into_a_snapshot_is_read_from_one_snapshot(part: str, start: str, tmp_path: Path) -> None:
    """Workers that start after another snapshot was published read the one that the dataset was opened with."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write_shop(lake, days=2, files=2, rows=40)
    pqcache.sync(str(lake), cache, keep=1)
    ds = ParquetDataset(cache / part, columns=["id", "title"], batch_size=20)
    expected = sorted(title for batch in ds for title in batch["title"])
    for version in (1, 2):
        write_shop(lake, days=2, files=2, rows=40, seed=version)
        assert pqcache.sync(cache).published
    found = loader(ds, 1, multiprocessing_context=start)
    assert sorted(title for batch in found for title in batch["title"]) == expected
    assert len(list((cache / "snapshots").iterdir())) == 2
    del ds, found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 1}, "num_replicas and rank: give both"),
        ({"rank": 2, "num_replicas": 2}, "rank=2"),
        ({"lanes": 3, "rank": 0, "num_replicas": 2, "batch_size": None}, "lanes=3"),
        ({"memory": "much"}, "not a size"),
        ({"batch_size": "many"}, "'many'.*not a whole number"),
        ({"columns": ["nope"]}, "no column 'nope'"),
        ({"ragged": ["nope"]}, "ragged: 'nope' is not among the columns"),
    ],
)
def test_wrong_options_are_named(shop: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParquetDataset(shop, **how)


def test_numbers_may_be_text(shop: Path) -> None:
    as_text = {"batch_size": "90", "window": "3", "lanes": "4", "num_replicas": "2", "rank": "1", "memory": "1g"}
    as_number = {"batch_size": 90, "window": 3, "lanes": 4, "num_replicas": 2, "rank": 1, "memory": 1 << 30}
    expected = ParquetDataset(shop, ["id"], **as_number)
    found = ParquetDataset(shop, ["id"], **as_text)
    assert ids_of(found) == ids_of(expected)
    assert found.state_dict() == expected.state_dict()


def test_pieces_resume_too(tmp_path: Path) -> None:
    table = pa.table({"id": range(50_000), "x": np.random.rand(50_000)})
    pq.write_table(table, tmp_path / "a.parquet", max_rows_per_page=1000, write_page_index=True)
    how: dict[str, Any] = {"batch_size": 1000, "memory": 2_500_000}
    ds = ParquetDataset(tmp_path, **how)
    batches = list(ds)
    assert sorted(flat(ids_of(batches))) == list(range(50_000))
    state = ds.state_dict(after=batches[20])
    assert state["piece"] > 0
    again = ParquetDataset(tmp_path, batch_size=1000)  # with memory enough: the state's order holds
    again.load_state_dict(state)
    assert ids_of(again) == ids_of(batches[21:])


def _train(root: Path, workers: Connection) -> None:
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # seconds between looks for the trainer, else 5
    dataset = ParquetDataset(root, batch_size=64)
    batches = iter(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    next(batches)
    workers.send([child.pid for child in multiprocessing.active_children()])
    workers.recv()  # waits to be killed


@pytest.mark.xdist_group("ranks")  # whose worker has a fork server
def test_workers_end_when_their_trainer_is_killed(tmp_path: Path) -> None:
    """Their last batches, of 50 KB each, are more than a pipe holds."""
    rows = [bytes(800)] * 4000
    pq.write_table(pa.table({"image": rows}), tmp_path / "a.parquet", row_group_size=500, use_dictionary=False)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=_train, args=(tmp_path, theirs))
    trainer.start()
    assert ours.poll(60)
    workers = [psutil.Process(pid) for pid in ours.recv()]
    assert len(workers) == 2
    trainer.kill()
    have_ended = becomes_true(lambda: not any(is_running(worker.pid) for worker in workers))
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    assert have_ended
