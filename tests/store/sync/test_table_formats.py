"""Tables whose rows are not those of all their files are refused by everything that lists a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import PqcacheError, SourceError, UsageError
from pqcache.store.config import read_config
from pqcache.torch import ParquetDataset
from tests.datasets import rows_of, shop_table


def write(root: Path, *paths: str) -> Path:
    """Write 10 rows to each path, or an empty file where the name is none of Parquet's."""
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith((".parquet", "_0")):
            pq.write_table(shop_table(10 * number, 10), root / path)
        else:
            (root / path).write_text("{}")
    return root


LAYOUTS = {
    "Delta": ("part-0.parquet", "part-1.parquet", "_delta_log/00000000000000000000.json"),
    "Iceberg": ("data/00000-0-a.parquet", "data/00000-0-a-deletes.parquet", "metadata/v1.metadata.json"),
    "Hudi": ("2026/a_0-1-0_1.parquet", "2026/a_0-2-0_2.parquet", ".hoodie/hoodie.properties"),
    "Hive": ("dt=1/base_0000002/000000_0", "dt=1/delta_0000003_0000003_0000/000000_0"),
    "Spark": ("part-0.parquet", "part-1.parquet", "_spark_metadata/0"),
}


@pytest.fixture(params=sorted(LAYOUTS))
def table(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    return str(request.param), write(tmp_path / "lake" / "db" / "table", *LAYOUTS[request.param])


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "sync": lambda table, out: pqcache.sync(table, out),
    "dry run": lambda table, out: pqcache.sync(table, out, dry_run=True),
    "repartition": lambda table, out: pqcache.repartition(table, out),
    "inspect": lambda table, out: pqcache.inspect(table),
    "ParquetDataset": lambda table, out: ParquetDataset(table),
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_table_is_refused_by_name(call: str, table: tuple[str, Path], tmp_path: Path) -> None:
    name, root = table
    above = call == "sync" or (name in ("Delta", "Iceberg") and call != "ParquetDataset")  # are sources
    with pytest.raises(UsageError, match=rf"{name}.*take its files as they are with --as-files") as error:
        CALLS[call](root.parent.parent if above else root, tmp_path / "out")
    assert error.value.subject == str(root)
    assert not (tmp_path / "out").exists()


def test_those_who_know_better_take_the_files(table: tuple[str, Path], tmp_path: Path) -> None:
    _, root = table
    cache, files = tmp_path / "cache", sum(path.endswith((".parquet", "_0")) for path in LAYOUTS[table[0]])
    assert pqcache.sync(root, cache, as_files=True).files == files
    assert read_config(cache).as_files
    assert not pqcache.sync(cache).published, "it is remembered"
    assert pqcache.inspect(root, as_files=True).files == files
    assert len(ParquetDataset(root, columns=["id"], as_files=True, batch_size=None)) == 10 * files
    assert pqcache.repartition(root, tmp_path / "out", as_files=True).rows == 10 * files
    assert pqcache.repartition(cache, tmp_path / "again").rows == 10 * files
    assert len(ParquetDataset(cache, columns=["id"], batch_size=None)) == 10 * files
    with pytest.raises(PqcacheError, match=r"with --as-files|cannot read its log"):
        pqcache.sync(cache, as_files=False)


@pytest.mark.parametrize("part", ["dt=1", "dt=1/part-0.parquet"])
def test_a_part_of_a_table_is_refused_too(part: str, tmp_path: Path) -> None:
    root = write(tmp_path / "lake", "dt=1/part-0.parquet", "dt=2/part-0.parquet", LAYOUTS["Delta"][-1])
    for call in CALLS.values():
        with pytest.raises(UsageError, match="is a part of a Delta table"):
            call(root / part, tmp_path / "out")
    assert pqcache.sync(root / part, tmp_path / "cache", as_files=True).rows == 10
    assert len(ParquetDataset(root / part, columns=["id"], batch_size=None, as_files=True)) == 10


def test_a_table_that_appears_later_publishes_nothing(tmp_path: Path) -> None:
    root = write(tmp_path / "lake", "dt=1/part-0.parquet", "dt=2/part-0.parquet")
    cache = tmp_path / "cache"
    pqcache.sync(root, cache)
    before = rows_of(cache / "current")
    write(root, "_delta_log/00000000000000000000.json")
    for _ in range(2):
        with pytest.raises(SourceError, match="deltalake cannot read its log"):
            pqcache.sync(cache)
    assert rows_of(cache / "current") == before


def test_names_like_those_of_tables_are_no_tables(tmp_path: Path) -> None:
    root = write(tmp_path / "lake", "metadata/delta_col=1/part-0.parquet", "base_1/delta_col=1/part-0.parquet")
    assert pqcache.sync(root, tmp_path / "cache").rows == 20
    assert len(ParquetDataset(root, columns=["id"], batch_size=None)) == 20


def test_a_directory_of_caches_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "caches" / "shop"
    pqcache.sync(write(tmp_path / "lake", "part-0.parquet"), cache)
    for place in (cache.parent, cache / "snapshots"):
        for call in CALLS.values():
            with pytest.raises(UsageError, match=r"a pqcache.*name (the cache's directory 'current'|one of them)"):
                call(place, tmp_path / "out")


def write_tables(root: Path, files: dict[str, str]) -> Path:
    """Write a row to each path, with the columns whose names are the letters of a text."""
    for path, columns in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({name: [1] for name in columns}), root / path)
    return root


SEVERAL = {  # with the two that are named
    "partitioned": ({"orders/dt=1/p.parquet": "ab", "users/dt=1/p.parquet": "ac"}, "orders and users"),
    "by other columns": ({"orders/dt=1/p.parquet": "a", "users/region=kr/p.parquet": "a"}, "orders and users"),
    "plain": ({"orders/p.parquet": "ab", "users/p.parquet": "cd"}, "orders and users"),
    "one with more columns": ({"t1/dt=1/p.parquet": "a", "t2/dt=1/p.parquet": "ab"}, "t1 and t2"),
    "one partitioned": ({"orders/p.parquet": "ab", "users/dt=1/p.parquet": "ab"}, "orders and users"),
    "of databases": ({"x.db/t/dt=1/p.parquet": "ab", "y.db/t/dt=1/p.parquet": "ac"}, "x.db/t and y.db/t"),
    "by dates": ({"orders/2026/11/p.parquet": "ab", "users/2026/11/p.parquet": "ac"}, "orders and users"),
    "nested": ({"dt=1/p.parquet": "ab", "old/dt=1/p.parquet": "ac"}, "old and the files beside"),
    "names with dates": ({"x_20261101/p.parquet": "ab", "y_20261101/p.parquet": "ac"}, r"x_\* and y_\*"),
    "nested deeper": ({"a/p.parquet": "ab", "a/b/p.parquet": "ac"}, "a and a/b"),
    "among many": ({f"{name}/p.parquet": "ab" if name != "h" else "ac" for name in "abcdefghij"}, "a and h"),
}
ONE = {
    "dates": {"2026/11/01/p.parquet": "ab", "2026/11/02/p.parquet": "abc", "2026-11-03T00/p.parquet": "ad"},
    "names with dates": {"x_20261101/p.parquet": "ab", "x_2026-11-02/p.parquet": "abc", "x_2026-W45/p.parquet": "ad"},
    "weeks": {"2026-W45/p.parquet": "ab", "2026-W46/p.parquet": "ac"},
    "parts": {"part1/p.parquet": "ab", "part2/p.parquet": "ba"},
    "years": {"2025/dt=1/p.parquet": "ab", "2026/dt=1/p.parquet": "abc"},
    "below partitions": {"dt=1/p.parquet": "ab", "dt=2/HIVE_UNION_SUBDIR_1/000000_0": "ab"},
    "columns in paths": {"a/dt=1/p.parquet": "x", "b/dt=2/p.parquet": "x"},
    "without a partition": {"dt=1/p.parquet": "ab", "plain/p.parquet": "ab"},
    "partitioned later": {"t/p.parquet": "abd", "t/new/d=1/p.parquet": "ab"},
    "deep": {"lake/table/dt=1/p.parquet": "ab", "lake/table/dt=2/p.parquet": "abc"},
}


@pytest.mark.parametrize("layout", SEVERAL)
def test_several_tables_are_not_one(layout: str, tmp_path: Path) -> None:
    files, names = SEVERAL[layout]
    root = write_tables(tmp_path / "lake", files)
    for call in CALLS.values():
        with pytest.raises(
            UsageError, match=f"holds several tables: {names} have different columns .*--as-files"
        ) as error:
            call(root, tmp_path / "out")
        assert error.value.subject == str(root)
    assert not (tmp_path / "out" / "current").exists()
    assert pqcache.sync(root, tmp_path / "cache", as_files=True).rows == len(files)
    assert not pqcache.sync(tmp_path / "cache").published
    assert len(ParquetDataset(root, columns=["a"], batch_size=None, as_files=True)) == len(files)


@pytest.mark.parametrize("layout", ONE)
def test_directories_of_one_table(layout: str, tmp_path: Path) -> None:
    root = write_tables(tmp_path / "lake", ONE[layout])
    assert pqcache.sync(root, tmp_path / "cache").files == len(ONE[layout])
    assert pqcache.inspect(root).rows == len(ONE[layout])


def test_a_table_that_appears_beside_one(tmp_path: Path) -> None:
    root, cache = write_tables(tmp_path / "lake", {"orders/dt=1/p.parquet": "ab"}), tmp_path / "cache"
    pqcache.sync(root, cache)
    write_tables(root, {"orders/dt=2/p.parquet": "abc"})
    assert pqcache.sync(cache).rows == 2, "a column that is new"
    write_tables(root, {"users/dt=2/p.parquet": "xyz"})
    with pytest.raises(UsageError, match="orders and users have different columns"):
        pqcache.sync(cache)
    parts, cache = write_tables(tmp_path / "parts", {f"part{n}/p.parquet": "ab" for n in (1, 2)}), tmp_path / "second"
    pqcache.sync(parts, cache)
    write_tables(parts, {"part3/p.parquet": "abc"})
    assert pqcache.sync(cache).rows == 3
