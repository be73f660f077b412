"""repartition --shuffle: every row once, in an order that follows from rows and seed alone, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.parquet.rewrite.directory import rewrite_directory, shuffle_rows
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.store.config import read_config
from tests.datasets import files_of, rows_of, write_day, write_shop
from tests.examples import examples
from tests.parquet.rewrite.rewriting import rewrite_80_mb
from tests.parquet.rewrite.test_row_groups import batches_of

KB = 1 << 10
LIMIT = 32 * KB


def ids_of(directory: Path) -> list[int]:
    paths = sorted(directory.rglob("*.parquet"))
    return [number for path in paths for number in pq.ParquetFile(path).read(["id"])["id"].to_pylist()]


def a_table(n: int) -> pa.Table:
    rng = np.random.default_rng(n)
    return pa.table(
        {
            "id": np.arange(n),
            "kind": pa.array([f"k{i % 7}" for i in range(n)])
            .dictionary_encode()
            .cast(pa.dictionary(pa.int32(), "string")),
            "text": pa.array([None if i % 5 == 0 else "é" * (i % 9) for i in range(n)]),
            "list": pa.array([None if i % 7 == 2 else [i, None] * (i % 3) for i in range(n)], pa.list_(pa.int64())),
            "deep": pa.array([{"a": i, "b": [{"c": str(i)}]} if i % 4 else None for i in range(n)]),
            "x": rng.standard_normal(n),
        }
    )


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n=st.integers(0, 500),
    seed=st.integers(0, 2**63 - 1),
    rows=st.lists(st.integers(1, 300), min_size=2, max_size=2),
    limits=st.lists(st.sampled_from([4 * KB, 20 * KB, 100 * KB, 1 << 30]), min_size=2, max_size=2),
)
def test_the_order_follows_from_rows_and_seed_alone(
    tmp_path_factory: pytest.TempPathFactory, n: int, seed: int, rows: list[int], limits: list[int]
) -> None:
    place = tmp_path_factory.mktemp("heaps") / "rows"
    table = a_table(n)
    found = []
    for size, limit in zip(rows, limits, strict=True):
        batches = list(shuffle_rows(batches_of(table, size), seed, limit, 8 * KB, place))
        assert not place.exists()
        found.append(pa.concat_tables([table.slice(0, 0), *(batch.table for batch in batches)]))
        numbers = [int(number) for batch in batches for number in batch.numbers]
        assert numbers == found[-1]["id"].to_pylist()
        assert [batch.done for batch in batches][-1:] == [n][: len(batches)]
    assert found[0].equals(found[1])
    assert found[0].sort_by("id").equals(table)
    assert found[0].schema.equals(table.schema)


def test_rows_are_mixed_as_well_as_by_a_global_shuffle(tmp_path: Path) -> None:
    n = 40_000
    rng = np.random.default_rng(2)
    for number in range(4):
        ids = np.arange(n // 4) + number * n // 4
        pq.write_table(pa.table({"id": ids, "blob": [rng.bytes(32) for _ in ids]}), tmp_path / f"{number}.parquet")
    sources = sorted(tmp_path.glob("*.parquet"))
    options = RewriteOptions(row_group_size=32 * KB, compression="none", shuffle=5)
    result = rewrite_directory(sources, tmp_path / "out", options)
    (output,) = result.outputs
    file = pq.ParquetFile(output.path)
    assert output.row_groups > 40
    groups = [file.read_row_group(group, ["id"])["id"].to_numpy() for group in range(output.row_groups)]
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(n))

    def distance(ids: np.ndarray) -> float:
        """Return the Kolmogorov-Smirnov distance from uniform over all rows, in units of its standard size."""
        places = np.sort(ids) / n
        steps = np.arange(len(ids) + 1) / len(ids)
        return float(max((steps[1:] - places).max(), (places - steps[:-1]).max()) * np.sqrt(len(ids)))

    distances = np.array([distance(ids) for ids in groups])
    assert distances.max() < 2.2  # one uniform draw in 8,000 is farther off
    assert 0.75 < distances.mean() < 0.98  # 0.87 where rows are drawn independently
    before = [pq.ParquetFile(path).read(["id"])["id"].to_numpy() for path in sources]
    assert min(distance(ids) for ids in before) > 45
    neighbours = np.concatenate(groups)
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.02


def test_memory_is_bounded(tmp_path: Path) -> None:
    result, peak = rewrite_80_mb(tmp_path, RewriteOptions(row_group_size=1 << 20, shuffle=1))
    assert 0 < peak < 40 << 20  # of 80 MB
    assert sum(output.rows for output in result.outputs) == 8_000
    assert sorted(ids_of(tmp_path / "out")) == list(range(8_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "out"]


def test_a_disk_that_takes_no_more_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(pqcache.PqcacheError, match=r"file/rows: cannot be written: .*; free space"):
        list(shuffle_rows(batches_of(a_table(900), 100), 1, 4 * KB, 8 * KB, tmp_path / "file" / "rows"))


def test_a_cache_is_shuffled_once_and_syncs_alike(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    pqcache.repartition(cache, row_group_size=LIMIT, shuffle=3)
    assert read_config(cache).shuffle == 3
    assert rows_of(cache / "current") == rows_of(shop)
    day = cache / "current" / "dt=2026-11-01"
    first = ids_of(day)
    assert first != sorted(first)

    assert not pqcache.sync(cache).published
    again = pqcache.repartition(cache, row_group_size=2 * LIMIT)  # the order of the seed is there already
    assert again.rewritten == 3
    assert ids_of(cache / "current" / "dt=2026-11-01") == first

    write_day(shop, "2026-11-01", files=4)
    write_day(shop, "2026-11-09", first=900_000)
    report = pqcache.sync(cache)
    assert (report.published, report.rewritten) == (True, 2)
    assert rows_of(cache / "current") == rows_of(shop)
    pqcache.repartition(shop, tmp_path / "direct", row_group_size=2 * LIMIT, shuffle=3)
    for name in files_of(tmp_path / "direct"):
        assert ids_of((cache / "current" / name).parent) == ids_of((tmp_path / "direct" / name).parent)
    for entry in pqcache.Cache.open(cache).snapshot().manifest().files:
        if entry.path.startswith("dt=2026-11-01"):
            assert len(entry.sources) == 4


@pytest.mark.parametrize("by_sync", [False, True])
def test_another_seed_gives_what_it_would_have_given_at_first(tmp_path: Path, by_sync: bool) -> None:
    """Nothing is fetched: the first order follows from the seed that was used."""
    shop, cache = write_shop(tmp_path / "shop", days=2, files=2, rows=150), tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    pqcache.repartition(cache, row_group_size=LIMIT, shuffle=3)
    if by_sync:
        config = cache / "pqcache.toml"
        config.write_text(config.read_text().replace("shuffle = 3", "shuffle = 4"))
        assert pqcache.sync(cache).fetched_bytes == 0
    else:
        assert pqcache.repartition(cache, shuffle=4).rewritten == 2
    pqcache.repartition(shop, tmp_path / "direct", row_group_size=LIMIT, shuffle=4, jobs=1)
    for name in files_of(tmp_path / "direct"):
        assert ids_of((cache / "current" / name).parent) == ids_of((tmp_path / "direct" / name).parent)
    assert rows_of(cache / "current") == rows_of(shop)
    assert read_config(cache).shuffle == 4
    assert not pqcache.sync(cache).published


def test_jobs_change_nothing(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", files=1)
    for jobs in (1, 2):
        pqcache.repartition(shop, tmp_path / f"out{jobs}", row_group_size=LIMIT, shuffle=8, jobs=jobs)
    assert files_of(tmp_path / "out1") == files_of(tmp_path / "out2")
    for name in files_of(tmp_path / "out1"):
        assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / "out2" / name).read_bytes()
    seen = duckdb.sql(
        f"select count(*), count(distinct id) from read_parquet('{tmp_path}/out1/**/*.parquet')"
    ).fetchall()
    assert seen == [(1200, 1200)]
