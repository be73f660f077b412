"""Several nodes, each with its share of a dataset: as many batches on every rank, and every row."""

from __future__ import annotations

import shutil
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed
from torch.utils.data import DataLoader

import pqcache
import pqcache.store.config
from pqcache.errors import UsageError
from pqcache.store.table_part import Shard
from pqcache.torch import Loader, Mix, ParquetDataset
from pqcache.torch.distributed import NodeShares, RankShare, combine_shares
from tests.torch.conftest import RunRanks

NODES = 3


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three nodes' caches of 11 partitions of very different sizes."""
    root = tmp_path_factory.mktemp("nodes")
    first = 0
    for day in range(11):
        rows = 200 + 150 * (day % 4)
        directory = root / "lake" / f"dt=2026-11-{day + 1:02d}"
        directory.mkdir(parents=True)
        table = pa.table({"id": pa.array(range(first, first + rows), pa.int64())})
        pq.write_table(table, directory / "part-0.parquet", row_group_size=100)
        first += rows
    found = [root / f"node{node}" for node in range(NODES)]
    for node, cache in enumerate(found):
        pqcache.sync(str(root / "lake"), cache, shard=f"{node}/{NODES}")
    return found


def ids_in(cache: Path) -> list[int]:
    return [
        int(i) for path in sorted((cache / "current").rglob("*.parquet")) for i in pq.read_table(path)["id"].to_pylist()
    ]


@pytest.mark.parametrize(("order", "workers"), [((0, 1, 2), 0), ((2, 0, 1, 1, 2, 0), 2)])
def test_every_rank_has_as_many_batches(
    caches: list[Path], run_ranks: RunRanks, order: tuple[int, ...], workers: int
) -> None:
    ranks = run_ranks([caches[node] for node in order], batch_size=32, workers=workers)
    lengths = {(found["length"], len(found["ids"])) for found in ranks}
    assert lengths == {(ranks[0]["length"], ranks[0]["length"])}
    each = len(order) // NODES
    for node in range(NODES):
        mine = [found for place, found in zip(order, ranks, strict=True) if place == node]
        ids_of_share = ids_in(caches[node])
        batches = {index: ids for found in mine for index, ids in zip(found["indices"], found["ids"], strict=True)}
        assert sorted(batches) == list(range(len(ranks[0]["ids"]) * each))  # every batch on one rank
        count = -(-len(ids_of_share) // 32)
        assert Counter(i for index in range(count) for i in batches[index]) == Counter(ids_of_share)  # exactly once
        for index in range(count, len(batches)):  # and then from the start again
            assert batches[index] == batches[index % count]
    seen = {i for found in ranks for ids in found["ids"] for i in ids}
    assert seen == {i for cache in caches for i in ids_in(cache)}


def test_drop_last_ends_where_the_smallest_share_does(caches: list[Path], run_ranks: RunRanks) -> None:
    ranks = run_ranks(caches, batch_size=32, drop_last=True)
    least = min(len(ids_in(cache)) for cache in caches) // 32
    assert [len(found["ids"]) for found in ranks] == [found["length"] for found in ranks] == [least] * NODES
    seen = [i for found in ranks for ids in found["ids"] for i in ids]
    assert len(seen) == len(set(seen)) == NODES * least * 32


def test_a_state_of_any_rank_resumes_all_of_them(caches: list[Path], run_ranks: RunRanks, tmp_path: Path) -> None:
    """Also on twice as many ranks for each node, and where newer snapshots have landed meanwhile."""
    how: dict[str, Any] = {"batch_size": 32, "lanes": 4}
    complete = run_ranks(caches, **how)
    begun = run_ranks(caches, stop=7, **how)
    states = [found["state"] for found in begun]
    assert states[0] == states[1] == states[2]
    assert [found["ids"] for found in begun] == [found["ids"][:7] for found in complete]
    lake = Path(pqcache.store.config.read_config(caches[0]).source)
    copies = [tmp_path / f"copy{node}" for node in range(NODES)]
    for cache, copy in zip(caches, copies, strict=True):
        shutil.copytree(cache, copy, symlinks=True)
    new = lake / "dt=2026-11-20"
    new.mkdir()
    pq.write_table(pa.table({"id": pa.array(range(10**6, 10**6 + 500), pa.int64())}), new / "part-0.parquet")
    for copy in copies:
        assert pqcache.sync(copy).published
    shutil.rmtree(new)
    again = run_ranks(copies, state=states[1], **how)
    assert [found["ids"] for found in again] == [found["ids"][7:] for found in complete]
    more = run_ranks([copy for copy in copies for _ in range(2)], state=states[2], **how)
    for node in range(NODES):
        batches = dict(zip(complete[node]["indices"], complete[node]["ids"], strict=True))
        mine = {
            i: ids
            for found in more[2 * node : 2 * node + 2]
            for i, ids in zip(found["indices"], found["ids"], strict=True)
        }
        assert min(mine) == 7
        assert all(mine[index] == ids for index, ids in batches.items() if index >= 7)


def test_one_process_has_to_say_that_it_reads_a_share_by_itself(caches: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"holds share 1/3 alone.*init_process_group.*num_replicas="):
        ParquetDataset(caches[1])
    ds = ParquetDataset(caches[1], batch_size=32, num_replicas=1, rank=0)
    assert sorted(int(i) for batch in ds for i in batch["id"]) == ids_in(caches[1])


def test_every_rank_reports_why_nodes_do_not_fit(caches: list[Path], run_ranks: RunRanks) -> None:
    first, second, _third = caches
    twice = {found["error"] for found in run_ranks([first, second, second])}
    assert len(twice) == 1
    assert "share 2/3: no rank reads it" in twice.pop()


def share(node: int, nodes: int = 2, rows: int = 100, listing: str = "l", row_groups: str = "") -> RankShare:
    return RankShare(
        shard=Shard(node, nodes),
        listing=listing,
        rows=rows,
        row_groups=row_groups or f"of {node}",
        largest=((1000 + node, 1000 + node, rows),),
    )


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(0), share(1, 3)], "shares of 2 nodes, others of 3"),
        ([share(0), share(1, listing="m")], "different listings .*0/2 of l, 1/2 of m.*on all of them again"),
        ([share(1)], "share 0/2: no rank reads it"),
        ([share(0), share(1), share(1)], "share 1/2: 2 ranks read it, and 1 read share 0/2"),
        (
            [share(0), share(1), share(0, row_groups="x"), share(1)],
            "share 0/2: the ranks that read it see different rows",
        ),
        ([share(0), share(1, rows=0)], "share 1/2: no row of it is selected.*--where"),
    ],
)
def test_what_is_wrong_is_said_on_every_rank(shares: list[RankShare], message: str) -> None:
    for rank in range(len(shares)):
        with pytest.raises(UsageError, match=message):
            combine_shares(shares, rank)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Caches of two nodes that hold the same rows, and one that has been synced again after a night."""
    root = tmp_path_factory.mktemp("whole")
    for day in range(2):
        directory = root / "lake" / f"dt={day}"
        directory.mkdir(parents=True)
        table = pa.table({"id": range(1000 * day, 1000 * day + 1000)})
        pq.write_table(table, directory / "part-0.parquet", row_group_size=100)
    one, two, newer = root / "one", root / "two", root / "newer"
    pqcache.sync(str(root / "lake"), one)
    for cache in (two, newer):
        pqcache.sync(str(root / "lake"), cache, where="dt = 0")
        pqcache.sync(cache, where="")
    pq.write_table(table.slice(0, 500), directory / "part-1.parquet", row_group_size=100)
    pqcache.sync(newer)
    return one, two, newer


@pytest.mark.parametrize("loader", ["Loader", "Mix", "Cache.batches"])
def test_ranks_with_different_snapshots_say_so(
    whole: tuple[Path, Path, Path], run_ranks: RunRanks, loader: str
) -> None:
    one, two, newer = whole  # the first two name equal snapshots differently
    ids = [rank["ids"] for rank in run_ranks([one, two], batch_size=250, loader=loader)]
    assert sorted(i for rank in ids for batch in rank for i in batch) == list(range(2000))
    errors = [rank["error"] for rank in run_ranks([one, newer, two], loader=loader)]
    assert "snapshot=" in errors[0]
    assert "rows would come twice or never" in errors[0]
    assert errors == errors[:1] * 3


@pytest.mark.parametrize(
    "differing",
    [
        {"filters": "id < 700"},
        {"seed": 1},
        {"batch_size": 100},
        {"epoch": 1},
        {"drop_last": True},
        {"lanes": 4},
        {"window": 3},
        {"workers": 1, "loader": "Loader"},
    ],
)
def test_ranks_with_different_options_say_so(
    whole: tuple[Path, Path, Path], run_ranks: RunRanks, differing: dict[str, Any]
) -> None:
    same = {"workers": 2, "loader": "Loader"} if "workers" in differing else {}
    found = run_ranks([whole[0]] * 2, each=[same, differing])
    assert found[0] == found[1]
    assert "rank 1 with" in found[0]["error"] or "rank 0 with" in found[0]["error"]


def test_threads_of_ranks_may_begin_in_any_order(whole: tuple[Path, Path, Path], run_ranks: RunRanks) -> None:
    found = run_ranks([whole[0]] * 2, loader="threads")
    for half, first in enumerate((0, 1000)):
        assert sorted(i for rank in found for i in rank["ids"][half]) == list(range(first, first + 1000))


def test_a_group_without_a_store_reads_all_the_same(whole: tuple[Path, Path, Path]) -> None:
    import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
    torch.distributed.init_process_group("fake", store=torch.distributed.Store(), rank=0, world_size=2)
    try:
        assert sum(len(batch["id"]) for batch in Loader(ParquetDataset(whole[0], pad=False))) in (976, 1024)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("loader", ["DataLoader", "Cache.batches"])
def test_ranks_may_differ_in_columns_and_where_nothing_is_mixed_in_what_mixes_rows(
    whole: tuple[Path, Path, Path], run_ranks: RunRanks, loader: str
) -> None:
    differing = [{"seed": 1, "window": 2}, {"seed": 2, "lanes": 4, "columns": ["dt", "id"]}]
    found = run_ranks([whole[0]] * 2, each=differing, shuffle=False, batch_size=250, loader=loader)
    assert sorted(i for rank in found for batch in rank["ids"] for i in batch) == list(range(2000))


def test_a_rank_that_reads_alone_waits_for_a_while_only(whole: tuple[Path, Path, Path], run_ranks: RunRanks) -> None:
    alone = {"stall_timeout": 0.1}
    elsewhere = {"num_replicas": 1, "rank": 0}
    one, other = run_ranks([whole[0]] * 2, each=[alone, elsewhere])
    assert len(one["ids"]) == 4  # of the 8 batches
    assert sum(map(len, other["ids"])) == 2000


def test_ranks_of_a_launcher_without_a_process_group_do_not_read_everything(
    whole: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = ParquetDataset(whole[0])  # may be made before init_process_group
    mix = Mix({"a": ParquetDataset(whole[0])})
    read_by_workers = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for read in (lambda: list(read_by_workers), lambda: list(Loader(mix)), lambda: len(data)):
        with pytest.raises(UsageError, match=r"WORLD_SIZE=2.*init_process_group\(\).*num_replicas="):
            read()


def test_a_share_is_read_on_the_rank_that_opened_it(whole: tuple[Path, Path, Path]) -> None:
    """Sets what two ranks agree on when they open a share, as the ranks of this process do not change."""
    data = ParquetDataset(whole[0])
    shares = {"node": 0, "rows": (9, 9), "ranks": 1, "rank": 0, "listing": "", "row_groups": "", "largest": ()}
    data._reader.nodes = NodeShares(**shares, of_all=(2, 0))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"share 0/2: it was opened on rank 0 of 2 and is read on rank 0 of 1"):
        list(data)
