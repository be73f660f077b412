"""Repartition: of a cache in place, and from any Parquet directory to another."""

from __future__ import annotations

import os
import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.store.config import read_config
from tests.datasets import files_of, rows_of, shop_table, write_day, write_shop
from tests.forked_commands import run_pqcache

LIMIT = 32 << 10


def group_sizes(directory: Path) -> dict[str, list[int]]:
    """Return the compressed bytes of every row group by partition directory, from the footers."""
    sizes: dict[str, list[int]] = {}
    for path in files_of(directory):
        footer = pq.read_metadata(directory / path)
        for g in range(footer.num_row_groups):
            group = footer.row_group(g)
            size = sum(group.column(c).total_compressed_size for c in range(group.num_columns))
            sizes.setdefault(str(Path(path).parent), []).append(size)
    return sizes


def ordered_ids(directory: Path) -> dict[str, list[int]]:
    """Return each partition's ids in row order: files by name, rows as they stand."""
    ids: dict[str, list[int]] = {}
    for path in files_of(directory):
        ids.setdefault(str(Path(path).parent), []).extend(
            pq.ParquetFile(directory / path).read(["id"])["id"].to_pylist()
        )
    return ids


def assert_cut_right(before: Path, after: Path, limit: int) -> None:
    assert rows_of(after) == rows_of(before)
    assert ordered_ids(after) == ordered_ids(before)
    for sizes in group_sizes(after).values():
        assert max(sizes) <= limit
        assert all(size >= 0.95 * limit for size in sizes[:-1])


def test_empty_values_are_the_defaults_again(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=200), tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    pqcache.repartition(cache, row_group_size=LIMIT, compression="zstd", shuffle=3)
    run_pqcache("repartition", cache, "--row-group-size=", "--compression=").check_returncode()
    assert (read_config(cache).row_group_size, read_config(cache).compression) == (128 << 20, None)
    with pytest.raises(
        pqcache.UsageError, match=r"--shuffle '': the cache does not know the order .*; delete shuffle in "
    ):
        pqcache.repartition(cache, shuffle="")
    (cache / "pqcache.toml").write_text((cache / "pqcache.toml").read_text().replace("shuffle = 3", ""))
    pqcache.sync(cache)
    assert ordered_ids(cache / "current") == ordered_ids(shop)


def test_a_cache_gets_a_new_snapshot(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=200), tmp_path / "cache"
    first = pqcache.sync(str(shop), cache)
    report = pqcache.repartition(cache, row_group_size=LIMIT)
    assert report.snapshot != first.snapshot
    assert (report.files_before, report.rewritten, report.rows) == (9, 3, 1800)
    assert_cut_right(shop, cache / "current", LIMIT)
    assert read_config(cache).row_group_size == LIMIT
    index = pqcache.Cache.open(cache).snapshot().index()
    assert index.rows.sum() == 1800
    assert len(index) == report.row_groups_after

    again = pqcache.repartition(cache, row_group_size=LIMIT)
    assert again.rewritten == 0
    assert again.snapshot == report.snapshot
    assert not pqcache.sync(cache).published

    other = pqcache.repartition(cache, row_group_size=2 * LIMIT)
    assert other.rewritten == 3
    assert_cut_right(shop, cache / "current", 2 * LIMIT)


def test_one_huge_row_group_and_many_tiny_files(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    (shop / "dt=1").mkdir(parents=True)
    (shop / "dt=2").mkdir()
    pq.write_table(shop_table(0, 2000), shop / "dt=1" / "all.parquet")
    for number in range(60):
        pq.write_table(shop_table(10_000 + number * 7, 7), shop / "dt=2" / f"{number:03d}.parquet")
    report = pqcache.repartition(shop, tmp_path / "out", row_group_size=LIMIT)
    assert (report.files_before, report.files_after) == (61, 2)
    assert_cut_right(shop, tmp_path / "out", LIMIT)


def test_dry_run_does_nothing(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=200), tmp_path / "cache"
    first = pqcache.sync(str(shop), cache)
    plan = pqcache.repartition(cache, row_group_size=LIMIT, dry_run=True)
    assert (plan.dry_run, plan.rewritten, plan.snapshot) == (True, 3, first.snapshot)
    assert read_config(cache).row_group_size is None
    pqcache.repartition(shop, tmp_path / "out", row_group_size=LIMIT, dry_run=True)
    assert not (tmp_path / "out").exists()


def test_metadata_and_odd_partitions_survive(tmp_path: Path) -> None:
    shop, cache = tmp_path / "shop", tmp_path / "cache"
    for name in ("dt=2026%2F11", "dt=__HIVE_DEFAULT_PARTITION__", "dt=007"):
        (shop / name).mkdir(parents=True)
        field = pa.field("id", pa.int64(), metadata={"unit": "pieces"})
        table = pa.table([pa.array(range(3000))], schema=pa.schema([field], metadata={"owner": "shop team"}))
        pq.write_table(table, shop / name / "x.parquet", row_group_size=100)
    pqcache.sync(str(shop), cache, row_group_size=LIMIT)
    assert sorted({Path(path).parent.name for path in files_of(cache / "current")}) == sorted(
        path.name for path in shop.iterdir()
    )
    for path in files_of(cache / "current"):
        schema = pq.read_schema(cache / "current" / path)
        assert schema.metadata[b"owner"] == b"shop team"
        assert schema.field("id").metadata[b"unit"] == b"pieces"
    values = duckdb.sql(
        f"select distinct dt from read_parquet('{cache}/current/**/*.parquet', hive_partitioning=true, "
        "hive_types_autocast=0) order by dt nulls first"
    ).fetchall()
    assert values == [(None,), ("007",), ("2026/11",)]
    index = pqcache.Cache.open(cache).snapshot().index()
    assert sorted(index.partitions["dt"].to_pylist(), key=str) == ["007", "2026/11", None]


def test_errors_name_the_thing_and_leave_nothing(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", rows=20)
    with pytest.raises(pqcache.UsageError, match="needs a directory to write to"):
        pqcache.repartition(shop)
    with pytest.raises(pqcache.UsageError, match="can be read, not written; write hdfs://"):
        pqcache.repartition(shop, "webhdfs://127.0.0.1:9870/out")
    with pytest.raises(pqcache.SourceNotFound, match="nowhere"):
        pqcache.repartition(tmp_path / "nowhere", tmp_path / "out")
    for day in (1, 2, 3):
        (shop / f"dt=2026-11-0{day}" / "part-00001.parquet").write_bytes(b"not parquet")
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet"):
        pqcache.repartition(shop, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_cache_is_read_once_whatever_its_url(scheme: str, tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=200), tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    write_day(shop, "2026-11-20", rows=200, first=900_000)
    pqcache.sync(cache)  # two snapshots
    report = pqcache.repartition(f"{scheme}{cache}", tmp_path / "out", row_group_size=LIMIT)
    assert_cut_right(shop, tmp_path / "out", LIMIT)
    assert not (tmp_path / "out" / "_pqcache").exists()
    assert report.rows == pqcache.inspect(f"{scheme}{cache}").rows == pqcache.inspect(tmp_path / "out").rows
    with pytest.raises(pqcache.UsageError, match=r"is a cache; to read its current snapshot, name .*/current"):
        pqcache.sync(f"{scheme}{cache}", tmp_path / "copy")


def test_files_that_no_table_can_have_are_named(tmp_path: Path) -> None:
    for name in ("twice", "bytes"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "twice/x.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "bytes/x.parquet")
    os.rename(tmp_path / "bytes/x.parquet", os.fsencode(tmp_path) + b"/bytes/\xff.parquet")
    said = {
        "twice": r"x\.parquet: has two columns named 'a'; rename one",
        "bytes": "has a name that is not UTF-8; rename",
    }
    for name, text in said.items():
        for words in (
            ["repartition", name, "new", "--row-group-size", "1MB"],
            ["bench", name],
            ["sync", name, "cache"],
        ):
            done = run_pqcache(*words, cwd=tmp_path)
            assert done.returncode == 1, words
            assert re.search(text, done.stderr), words
            assert len(done.stderr.splitlines()) == 1
    done = run_pqcache("repartition", "cache", "--row-group-size", "1MB", cwd=tmp_path)
    assert "nothing is published yet; run 'pqcache sync " in done.stderr, "no other run is at work"
