"""Several nodes, each with its share of a dataset: as many batches on every rank, and every row."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pqcache
import pqcache.store.config
from pqcache.errors import UsageError
from pqcache.store.shard import Shard
from pqcache.torch import ParquetDataset
from pqcache.torch.distributed import Held, Nodes, combine
from tests import ROOT

NODES = 3

RANK = """
import json, sys, warnings
import torch.distributed as dist
from torch.utils.data import DataLoader
from pqcache.torch import ParquetDataset

def main():
    rank, world, store, caches, out, options = json.loads(sys.argv[1])
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
    workers, state, stop = options.pop("workers", 0), options.pop("state", None), options.pop("stop", None)
    try:
        ds = ParquetDataset(caches[rank], columns=["id"], **options)
        if state is not None:
            ds.load_state_dict(state)
        said = {"length": len(ds), "ids": [], "indices": []}
        for batch in DataLoader(ds, batch_size=None, num_workers=workers):
            said["ids"].append(batch["id"].tolist())
            said["indices"].append(batch.index)
            if len(said["ids"]) == stop:
                said["state"] = ds.state_dict(after=batch)
                break
    except Exception as error:
        said = {"error": str(error)}
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(said, file)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


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


def run_ranks(tmp_path: Path, caches: list[Path], **options: Any) -> list[dict[str, Any]]:
    """Run one process for each of ``caches``; return what each said."""
    out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    out.mkdir()
    script = out / "rank.py"
    script.write_text(RANK)
    world = len(caches)
    started = []
    for rank in range(world):
        words = json.dumps([rank, world, f"{out}/store", [str(c) for c in caches], str(out), options])
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([sys.executable, str(script), words], env=env, stderr=subprocess.PIPE))
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("order", "workers"), [((0, 1, 2), 0), ((2, 0, 1, 1, 2, 0), 2)])
def test_every_rank_has_as_many_batches(
    caches: list[Path], tmp_path: Path, order: tuple[int, ...], workers: int
) -> None:
    ranks = run_ranks(tmp_path, [caches[node] for node in order], batch_size=32, workers=workers)
    lengths = {(said["length"], len(said["ids"])) for said in ranks}
    assert lengths == {(ranks[0]["length"], ranks[0]["length"])}
    each = len(order) // NODES
    for node in range(NODES):
        mine = [said for place, said in zip(order, ranks, strict=True) if place == node]
        held = ids_in(caches[node])
        batches = {index: ids for said in mine for index, ids in zip(said["indices"], said["ids"], strict=True)}
        assert sorted(batches) == list(range(len(ranks[0]["ids"]) * each))  # every batch on one rank
        whole = -(-len(held) // 32)
        assert Counter(i for index in range(whole) for i in batches[index]) == Counter(held)  # exactly once
        for index in range(whole, len(batches)):  # and then from the start again
            assert batches[index] == batches[index % whole]
    seen = {i for said in ranks for ids in said["ids"] for i in ids}
    assert seen == {i for cache in caches for i in ids_in(cache)}


def test_drop_last_ends_where_the_smallest_share_does(caches: list[Path], tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, caches, batch_size=32, drop_last=True)
    least = min(len(ids_in(cache)) for cache in caches) // 32
    assert [len(said["ids"]) for said in ranks] == [said["length"] for said in ranks] == [least] * NODES
    seen = [i for said in ranks for ids in said["ids"] for i in ids]
    assert len(seen) == len(set(seen)) == NODES * least * 32


def test_a_state_of_any_rank_resumes_all_of_them(caches: list[Path], tmp_path: Path) -> None:
    """Also on twice as many ranks for each node, and where newer snapshots have landed meanwhile."""
    how: dict[str, Any] = {"batch_size": 32, "lanes": 4}
    whole = run_ranks(tmp_path, caches, **how)
    begun = run_ranks(tmp_path, caches, stop=7, **how)
    states = [said["state"] for said in begun]
    assert states[0] == states[1] == states[2]
    assert [said["ids"] for said in begun] == [said["ids"][:7] for said in whole]
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
    again = run_ranks(tmp_path, copies, state=states[1], **how)
    assert [said["ids"] for said in again] == [said["ids"][7:] for said in whole]
    more = run_ranks(tmp_path, [copy for copy in copies for _ in range(2)], state=states[2], **how)
    for node in range(NODES):
        batches = dict(zip(whole[node]["indices"], whole[node]["ids"], strict=True))
        mine = {
            i: ids
            for said in more[2 * node : 2 * node + 2]
            for i, ids in zip(said["indices"], said["ids"], strict=True)
        }
        assert min(mine) == 7
        assert all(mine[index] == ids for index, ids in batches.items() if index >= 7)


def test_one_process_has_to_say_that_it_reads_a_share_by_itself(caches: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"holds share 1/3 alone.*init_process_group.*num_replicas="):
        ParquetDataset(caches[1])
    ds = ParquetDataset(caches[1], batch_size=32, num_replicas=1, rank=0)
    assert sorted(int(i) for batch in ds for i in batch["id"]) == ids_in(caches[1])


def test_nodes_that_do_not_fit_are_told_what_to_do(caches: list[Path], tmp_path: Path) -> None:
    (first, second, _third), lake = caches, pqcache.store.config.read_config(caches[0]).source
    twice = {said["error"] for said in run_ranks(tmp_path, [first, second, second])}
    assert len(twice) == 1
    assert "no rank reads share 2/3" in twice.pop()
    other = tmp_path / "other"
    pqcache.sync(lake, other, shard="2/3", columns=["id"])
    differ = {said["error"] for said in run_ranks(tmp_path, [first, second, other])}
    assert len(differ) == 1
    assert "different listings of their source" in differ.pop()


def held(node: int, nodes: int = 2, rows: int = 100, listing: str = "l", row_groups: str = "") -> Held:
    return Held(
        shard=Shard(node, nodes),
        listing=listing,
        rows=rows,
        row_groups=row_groups or f"of {node}",
        largest=((1000 + node, 1000 + node, rows),),
    )


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        ([held(0), held(1, 3)], "shares of 2 nodes, others of 3"),
        ([held(0), held(1, listing="m")], "different listings .*0/2 of l, 1/2 of m.*on all of them again"),
        ([held(1)], "no rank reads share 0/2"),
        ([held(0), held(1), held(1)], "share 0/2 is read by 1 ranks and 1/2 by 2"),
        ([held(0), held(1), held(0, row_groups="x"), held(1)], "share 0/2 see different rows"),
        ([held(0), held(1, rows=0)], "share 1/2 has no row that is wanted.*--where"),
    ],
)
def test_what_is_wrong_is_said_on_every_rank(everyone: list[Held], message: str) -> None:
    for rank in range(len(everyone)):
        with pytest.raises(UsageError, match=message):
            combine(everyone, rank)


def test_ranks_need_not_come_node_by_node() -> None:
    everyone = [held(1), held(0), held(0), held(1)]
    places = [combine(everyone, rank) for rank in range(4)]
    assert [(place.node, place.rank, place.replicas) for place in places] == [
        (1, 0, 2),
        (0, 0, 2),
        (0, 1, 2),
        (1, 1, 2),
    ]
    assert {(place.row_groups, place.largest) for place in places} == {
        (places[0].row_groups, ((1001, 1001, 100), (1000, 1000, 100)))
    }


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(0, 30),
    st.booleans(),
)
def test_an_epoch_ends_for_all_nodes_at_once(
    rows: list[int], size: int, ranks: int, done: int, drop_last: bool
) -> None:
    nodes = Nodes(node=0, rows=tuple(rows), replicas=ranks, rank=0, listing="", row_groups="", largest=())
    total = nodes.total(size, 0, ranks, drop_last)
    assert total % ranks == 0
    of_each = [count // size // ranks if drop_last else -(-count // size) / ranks for count in rows]
    assert total // ranks == math.ceil(min(of_each) if drop_last else max(of_each))
    rest = nodes.total(size, done * ranks, ranks, drop_last) - done * ranks
    assert rest == max(0, total - done * ranks)  # going on makes no difference
