"""Cache.batches: Arrow record batches in the loader's order, without torch."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pqcache
from pqcache.errors import CacheError, UsageError
from pqcache.store.gc import remove_old_snapshots
from tests.datasets import write_day, write_shop


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pqcache.Cache:
    """A cache of 1,600 rows in 16 row groups, some of whose lists are all of one length."""
    root = tmp_path_factory.mktemp("batches")
    source = write_shop(root / "source", days=2, files=4, rows=200)
    for path in source.glob("dt=*/*.parquet"):
        table = pq.read_table(path, partitioning=None)
        pair = pa.array([[i, i + 1] for i in table["id"].to_pylist()], pa.list_(pa.int64()))
        pq.write_table(table.append_column("pair", pair), path, row_group_size=100)
    pqcache.sync(str(source), root / "cache")
    return pqcache.Cache.open(root / "cache")


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].to_pylist() if isinstance(batch, pa.RecordBatch) else batch["id"].tolist() for batch in batches]


@pytest.mark.parametrize(
    "how",
    [
        {"memory": "1MB"},
        {"shuffle": False},
        {"lanes": 6, "window": 3, "seed": 4, "num_replicas": 3, "rank": 2},
        {"filters": "dt > '2026-11-01'", "columns": ["id", "dt", "pair"]},
    ],
)
def test_the_order_is_the_datasets(cache: pqcache.Cache, how: dict[str, Any]) -> None:
    from pqcache.torch import ParquetDataset

    if "columns" not in how:
        how = {**how, "columns": ["id", "pair", "title"]}
    dataset = ParquetDataset(cache.path, batch_size=90, **how)
    for epoch in (0, 3):
        dataset.set_epoch(epoch)
        found = list(cache.batches(batch_size=90, epoch=epoch, **how))
        assert ids(found) == ids(dataset)
        for batch in found:
            batch.validate(full=True)
            assert batch.schema.names == how["columns"]
            assert batch["pair"].to_pylist() == [[i, i + 1] for i in batch["id"].to_pylist()]


def test_it_keeps_its_snapshot(tmp_path: Path) -> None:
    source = write_shop(tmp_path / "source", days=1, files=2, rows=200)
    pqcache.sync(str(source), tmp_path / "cache", keep=1)
    cache = pqcache.Cache.open(tmp_path / "cache")
    first = cache.snapshot().id
    expected = ids(cache.batches(["id"], batch_size=30))
    batches, unused = cache.batches(["id"], batch_size=30), cache.batches()
    write_day(tmp_path / "source", "2026-11-02", first=100_000)
    pqcache.sync(cache.path, keep=1)
    assert cache.snapshot().id != first
    assert ids(batches) == expected
    assert ids(cache.batches(["id"], batch_size=30, snapshot=first, start=3)) == expected[3:]
    assert len(ids(cache.batches(["id"], batch_size=30))) > len(expected)
    del unused
    gc.collect()
    assert [snapshot.id for snapshot in remove_old_snapshots(cache, keep=1)] == [first], "nobody holds it any more"
    with pytest.raises(CacheError, match="was removed"):
        cache.batches(snapshot=first)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"lanes": 3, "num_replicas": 2}, "lanes=3"),
        ({"epoch": -1}, "epoch=-1"),
        ({"start": -1}, "start=-1"),
        ({"columns": ["nope"]}, "no column 'nope'"),
        ({"filters": "nope = 3"}, "filters 'nope = 3'"),
    ],
)
def test_wrong_options_are_named_at_once(cache: pqcache.Cache, how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cache.batches(**how)


def test_torch_is_not_imported(cache: pqcache.Cache) -> None:
    code = (
        "import sys, json, pqcache;"
        f"batch = next(pqcache.Cache.open({str(cache.path)!r}).batches(batch_size=10));"
        "print(json.dumps([len(batch), [m for m in sys.modules if m.split('.')[0] == 'torch']]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [10, []]


class OfWorkers(IterableDataset[Any]):
    """A dataset of one's own over Cache.batches, which a DataLoader reads."""

    def __init__(self, cache: pqcache.Cache, **options: Any) -> None:
        self.cache, self.options = cache, options

    def __iter__(self) -> Any:
        for batch in self.cache.batches(["id"], **{"batch_size": 90, **self.options}):
            yield batch["id"].to_numpy()


@pytest.mark.usefixtures("few_cores_are_fine")
@pytest.mark.parametrize(
    ("workers", "how"),
    [
        (2, {"shuffle": False}),
        (3, {"lanes": 6, "start": 4}),
    ],
)
def test_workers_divide_the_batches(cache: pqcache.Cache, workers: int, how: dict[str, Any]) -> None:
    from pqcache.torch import ParquetDataset

    cache = pickle.loads(pickle.dumps(cache))  # as workers that are not forked get it
    loader = DataLoader(OfWorkers(cache, **how), batch_size=None, num_workers=workers)
    found = [batch.tolist() for batch in loader]
    lanes = how.get("lanes", workers)
    dataset = ParquetDataset(cache.path, ["id"], batch_size=90, lanes=lanes, shuffle=how.get("shuffle", True))
    assert found == ids(dataset)[how.get("start", 0) :]


class Items(Dataset[int]):
    """A dataset with items by number, each of which reads from a cache."""

    def __init__(self, cache: pqcache.Cache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return sum(batch.num_rows for batch in self.cache.batches(["id"], batch_size=90, limit=10 + index))


def test_a_worker_reads_all_rows_of_an_item(cache: pqcache.Cache) -> None:
    assert list(DataLoader(Items(cache), batch_size=None, num_workers=2)) == [10, 11, 12, 13]


def test_what_workers_cannot_divide_is_refused(cache: pqcache.Cache) -> None:
    """Whether ``num_replicas`` counts the workers nobody knows; a number of them that does not divide the lanes."""
    for how, message in (
        ({"num_replicas": 2, "rank": 1}, "num_replicas=2"),
        ({"lanes": 3}, "lanes=3: cannot be shared"),
    ):
        batches = iter(DataLoader(OfWorkers(cache, **how), batch_size=None, num_workers=2))
        with pytest.raises(UsageError, match=message):
            list(batches)
        batches._shutdown_workers()  # type: ignore[attr-defined]  # a garbage collection would wait 5 s for each
    alone = DataLoader(OfWorkers(cache, num_replicas=2, rank=1), batch_size=None, num_workers=1)
    assert [batch.tolist() for batch in alone] == ids(cache.batches(["id"], batch_size=90, num_replicas=2, rank=1))
