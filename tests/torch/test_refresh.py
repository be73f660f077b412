"""Loader(refresh="epoch") and load_state_dict(snapshot="current"): each epoch has exactly the rows of its night."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import pqcache
from pqcache.errors import CacheError, UsageError
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.manifest import content_digest
from pqcache.torch import Loader, Mix, ParquetDataset, Prefetch
from tests.torch.conftest import RunRanks, ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")
ROWS = 200  # of a night


class Lake:
    """A source with one more partition each night, and a cache of it."""

    def __init__(self, root: Path) -> None:
        self.source, self.cache, self.nights = root / "lake", root / "cache", 0

    def night(self, **options: Any) -> str:
        write_night(self.source / f"dt={self.nights}" / "part-0.parquet", self.nights)
        self.nights += 1
        return pqcache.sync(self.source, self.cache, **options).snapshot

    def dataset(self, **options: Any) -> ParquetDataset:
        return ParquetDataset(self.cache, **{"columns": ["id"], "batch_size": 32, "seed": 3, **options})

    @property
    def rows(self) -> list[int]:
        return list(range(self.nights * ROWS))


def write_night(path: Path, night: int) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    ids = pa.array(range(night * ROWS, (night + 1) * ROWS), pa.int64())
    pq.write_table(pa.table({"id": ids}), path, row_group_size=50)
    return path


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found = Lake(tmp_path)
    found.night()
    return found


def as_if_new(lake: Lake, epoch: int) -> list[int]:
    """The oracle: the epoch of a dataset that is opened now."""
    loader = Loader(lake.dataset())
    loader.set_epoch(epoch)
    return ids_of(loader)


def test_nights(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lake.cache.parent)
    loader = Loader(ParquetDataset("cache", ["id"], batch_size=32, seed=3, lanes=2), num_workers=2, refresh="epoch")
    monkeypatch.chdir("/")  # the cache remains the one that the path led to
    for epoch in range(5):
        if epoch == 1:
            lake.night(row_group_size="4KB")  # rewritten: other row groups of the same rows
        elif epoch == 3:
            pqcache.rollback(lake.cache, "2")
            lake.nights -= 1
        elif epoch != 2:  # a night without a sync
            lake.night()
        ids = ids_of(loader)
        assert sorted(ids) == lake.rows
        oracle = Loader(lake.dataset(lanes=2))
        oracle.set_epoch(epoch)
        assert ids == ids_of(oracle)
        assert len(loader) == len(oracle) == -(-len(ids) // 32)
        state = loader.state_dict()
        assert (state["epoch"], state["snapshot"]) == (epoch, (lake.cache / "current").resolve().name)


def test_the_default_reads_one_snapshot(lake: Lake) -> None:
    loader, first = Loader(lake.dataset()), lake.rows
    lake.night()
    assert [sorted(ids_of(loader)) for _ in range(2)] == [first, first]


def test_a_state_finishes_its_epoch_first(lake: Lake) -> None:
    loader, first = Loader(lake.dataset(), num_workers=2, refresh="epoch"), lake.rows
    batches = iter(loader)
    read = [i for _ in range(3) for i in next(batches)["id"].tolist()]
    state = loader.state_dict()
    lake.night()
    resumed = Loader(lake.dataset(), refresh="epoch")
    resumed.load_state_dict(state)
    assert sorted(read + ids_of(resumed)) == first
    assert sorted(ids_of(resumed)) == lake.rows
    assert resumed.epoch == 2
    del batches
    assert sorted(ids_of(loader)) == lake.rows, "an epoch that was left begins anew, on the current snapshot"


def test_a_state_goes_on_with_the_next_epoch_on_the_current_snapshot(lake: Lake) -> None:
    loader = Loader(lake.dataset())
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    within = loader.state_dict()
    rest = list(batches)
    ended = loader.state_dict()
    assert len(rest) == 4
    lake.night()
    for state, left in ((within, "4 of 7 batches of epoch 0"), (ended, "")):
        for resumed in (Loader(lake.dataset()), lake.dataset()):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                resumed.load_state_dict(state, snapshot="current")
            assert [left in str(warning.message) for warning in caught] == [True] * bool(left)
            assert resumed.epoch == 1
            assert ids_of(resumed) == as_if_new(lake, 1)
    begun = Loader(lake.dataset())
    begun.load_state_dict(Loader(lake.dataset()).state_dict(), snapshot="current")
    assert begun.epoch == 0, "nothing was read of epoch 0"


def test_a_snapshot_that_is_gone(lake: Lake) -> None:
    state = lake.dataset().state_dict(after=0)
    lake.night(keep=1)
    kept = lake.night(keep=1)
    pqcache.gc(lake.cache)
    resumed = Loader(lake.dataset())
    with pytest.raises(
        CacheError, match=r"was removed \(kept: .*load_state_dict\(state, snapshot=.current.\).*pin"
    ) as info:
        resumed.load_state_dict(state)
    assert kept in str(info.value)
    with pytest.warns(UserWarning, match="6 of 7 batches of epoch 0, on all ranks, are never read: epoch 1 begins"):
        resumed.load_state_dict(state, snapshot="current")
    assert ids_of(resumed) == as_if_new(lake, 1)


def test_new_columns_come_and_lost_ones_are_a_warning(lake: Lake) -> None:
    loader = Loader(lake.dataset(columns=None), refresh="epoch")
    few = Loader(lake.dataset(columns=["id", "dt"]), refresh="epoch")
    next(iter(few))
    (path,) = lake.source.rglob("*.parquet")
    pq.write_table(pq.read_table(path, partitioning=None).append_column("new", pa.array(range(ROWS))), path)
    pqcache.sync(lake.cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = next(iter(loader))
    assert set(first) == {"id", "new", "dt"}
    shutil.rmtree(lake.source)
    lake.source.mkdir()
    pq.write_table(pa.table({"other": range(5)}), lake.source / "part-0.parquet")
    pqcache.sync(lake.cache, force=True)
    held = few.dataset.snapshot
    with pytest.warns(UserWarning, match=f"epoch 1 is read from snapshot {held} again: .*'?id'?"):
        assert len(ids_of(few)) == ROWS
    assert few.dataset.snapshot == held
    assert few.state_dict()["snapshot"] == held


def test_a_batch_of_an_earlier_snapshot_is_no_place_in_this_one(lake: Lake) -> None:
    loader = Loader(lake.dataset(), refresh="epoch")
    *_, last = loader
    assert loader.dataset.state_dict(after=last)["batch"] == 7
    lake.night()
    next(iter(loader))
    with pytest.raises(UsageError, match="the batch is from another snapshot than the dataset reads now"):
        loader.dataset.state_dict(after=last)
    with pytest.raises(UsageError, match="has loaded another snapshot since"):
        last.rows()


def test_gc_removes_a_snapshot_once_the_next_one_is_read(lake: Lake) -> None:
    """Workers that another Loader has forked meanwhile have the lease of the training's snapshot too."""
    loader = Loader(lake.dataset(lanes=2), num_workers=2, multiprocessing_context="fork", refresh="epoch")
    others = Loader(lake.dataset(lanes=2), num_workers=2, multiprocessing_context="fork", refresh="epoch")
    for _ in range(2):
        assert sorted(ids_of(loader)) == sorted(ids_of(others)) == lake.rows
        lake.night(keep=1)
        assert len(ids_of(others)) == len(lake.rows)
        assert len(os.listdir(lake.cache / "snapshots")) == 2, "the training has read it and may read it again"
        next(iter(loader))
        pqcache.gc(lake.cache)
        assert len(os.listdir(lake.cache / "snapshots")) == 1


def test_with_a_profiler_nothing_warns_of_longer_epochs(lake: Lake) -> None:
    loader = Loader(lake.dataset(), refresh="epoch")
    assert len(loader) == 7
    lake.night()
    with warnings.catch_warnings(), torch.autograd.profiler.profile(use_kineto=False):
        warnings.simplefilter("error")
        assert len(ids_of(loader)) == len(lake.rows)


def test_through_prefetch(lake: Lake) -> None:
    loader = Prefetch(Loader(lake.dataset(), refresh="epoch"), "cpu")
    ids_of(loader)
    state = loader.state_dict()
    lake.night()
    loader.load_state_dict(state, snapshot="current")
    assert ids_of(loader) == as_if_new(lake, 1)


def test_the_content_by_which_nodes_compare_snapshots(lake: Lake) -> None:
    """Neither IDs nor inodes count, which each node has of its own; times do where no checksum is recorded."""

    def contents_of(node: str, **options: Any) -> tuple[str, str]:
        cache = lake.cache.parent / node
        pqcache.sync(lake.source, cache, **options)
        manifest = CacheDirectory(cache).snapshot().manifest()
        unchecked = tuple(replace(file, checksum="") for file in manifest.files)
        return content_digest(manifest), content_digest(replace(manifest, files=unchecked))

    first = contents_of("node0")
    assert first[0] != contents_of("node1", partition_types={"dt": "text"})[0]
    (path,) = lake.source.rglob("*.parquet")
    content, times = path.read_bytes(), path.stat()
    path.rename(lake.cache.parent / "old")
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert first == contents_of("node2")
    os.utime(path, (1, 1))
    third = contents_of("node3")
    assert (first[0] == third[0], first[1] == third[1]) == (True, False)


def test_refused(lake: Lake, table: Path) -> None:
    for dataset, reason in (
        (ParquetDataset(table), "only a cache has a current snapshot"),
        (ParquetDataset(lake.cache / "current"), "only a cache has a current snapshot"),
        (lake.dataset(snapshot="1"), "made for '1'"),
        (lake.dataset(num_replicas=2, rank=1), "num_replicas and rank bypass"),
        (Mix({"a": lake.dataset()}), "a mix goes on within its datasets"),
    ):
        with pytest.raises(UsageError, match=reason):
            Loader(dataset, refresh="epoch")
        with pytest.raises(UsageError, match=reason):
            Loader(dataset).load_state_dict(dataset.state_dict(), snapshot="current")
    with pytest.raises(UsageError, match="refresh='batch'"):
        Loader(lake.dataset(), refresh="batch")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="snapshot='newest'"):
        Loader(lake.dataset()).load_state_dict({}, snapshot="newest")


@pytest.fixture
def read_nights(run_ranks: RunRanks) -> RunRanks:
    """Return a function that reads an epoch a night on one rank for each cache that it is given."""
    return partial(run_ranks, loader="nights", batch_size=32)


def two_nodes(root: Path) -> tuple[Path, list[Path]]:
    """A source, and the caches of two nodes."""
    lake, caches = root / "lake", [root / "node0", root / "node1"]
    write_night(lake / "dt=0" / "part-0.parquet", 0)
    for cache in caches:
        pqcache.sync(lake, cache)
    return lake, caches


def nights_of(lake: Path, root: Path, syncing: list[set[int]], first: int = 1) -> list[tuple[Path, Path, set[int]]]:
    """For each night its new file, the file's place at the source, and the ranks that sync."""
    return [
        (write_night(root / f"new{night}", night), lake / f"dt={night}" / "part-0.parquet", ranks)
        for night, ranks in enumerate(syncing, first)
    ]


def read_by_all(found: list[dict[str, Any]], night: int) -> list[int]:
    return sorted({i for one in found for batch in one["ids"][night] for i in batch})


def test_ranks_move_together(read_nights: RunRanks, tmp_path: Path) -> None:
    """Two nodes with a cache each; the second one misses a sync, and then has other IDs."""
    lake, caches = two_nodes(tmp_path)
    nights = nights_of(lake, tmp_path, [{0, 1}, {0}, {0, 1}, {1}])
    found = read_nights(caches, nights=nights, workers=2)
    rows = [2, 2, 4, 4]  # nights that are read: the second is not at node 1, the fourth not at node 0
    for epoch, count in enumerate(rows):
        assert read_by_all(found, epoch) == list(range(count * ROWS))
        each = Counter(i for one in found for batch in one["ids"][epoch] for i in batch)
        assert sum(each.values()) - len(each) < 32 * len(found), "repeated rows are padding"
    assert [[len(texts) for texts in one["warnings"]] for one in found] == [[0, 1, 0, 0]] * 2
    assert f"rank 1: {caches[1]}: has no snapshot with the files" in found[0]["warnings"][1][0]


def test_ranks_that_opened_other_snapshots(read_nights: RunRanks, lake: Lake, tmp_path: Path) -> None:
    nights = nights_of(lake.source, tmp_path, [{0}])
    found = read_nights([lake.cache] * 2, nights=nights, each=[{}, {"opened_before": True}])
    assert read_by_all(found, 0) == list(range(2 * ROWS))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_read_its_manifest(read_nights: RunRanks, tmp_path: Path, rank: int) -> None:
    lake, caches = two_nodes(tmp_path)
    nights = nights_of(lake, tmp_path, [{0, 1}] * 3)
    each: list[dict[str, Any]] = [{}, {}]
    each[rank]["damaged"] = 1
    found = read_nights(caches, nights=nights, each=each)
    assert [read_by_all(found, epoch)[-1] + 1 for epoch in range(3)] == [2 * ROWS, 2 * ROWS, 4 * ROWS]
    assert [[len(texts) for texts in one["warnings"]] for one in found] == [[0, 1, 0]] * 2
    assert f"rank {rank}: {caches[rank]}" in found[0]["warnings"][1][0]


def test_shares_move_together(read_nights: RunRanks, tmp_path: Path) -> None:
    lake, caches = tmp_path / "lake", [tmp_path / "node0", tmp_path / "node1"]
    write_night(lake / "dt=0" / "part-0.parquet", 0)
    write_night(lake / "dt=1" / "part-0.parquet", 1)
    for node, cache in enumerate(caches):
        pqcache.sync(lake, cache, shard=f"{node}/2")
    nights = nights_of(lake, tmp_path, [{0, 1}, {0}, {0, 1}], first=2)
    found = read_nights([*caches, *caches], nights=nights)
    for epoch, count in enumerate([3, 3, 5]):
        assert read_by_all(found, epoch) == list(range(count * ROWS))
    assert [[len(texts) for texts in one["warnings"]] for one in found] == [[0, 1, 0]] * 4


def test_a_node_that_rewrites_its_share(read_nights: RunRanks, tmp_path: Path) -> None:
    """Its new snapshot is of the same listing as the one that the other node goes on with."""
    lake, caches = tmp_path / "lake", [tmp_path / "node0", tmp_path / "node1"]
    for night in range(2):
        write_night(lake / f"dt={night}" / "part-0.parquet", night)
    for node, cache in enumerate(caches):
        pqcache.sync(lake, cache, shard=f"{node}/2")
    (night,) = nights_of(lake, tmp_path, [{0, 1}], first=2)
    nights = [night, (night[0], tmp_path / "not in the lake.parquet", set())]
    found = read_nights(caches, nights=nights, each=[{"rewritten": 1}, {}])
    assert [read_by_all(found, epoch) for epoch in range(2)] == [list(range(3 * ROWS))] * 2
    assert [one["warnings"] for one in found] == [[[], []]] * 2
