"""A column that is in the paths of some files and inside others: all of its values are read, whatever rewrote them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.cli import run
from pqcache.errors import ParquetError, UsageError
from pqcache.torch import ParquetDataset

ROWS = [(1, "a", 1), (2, "b", 1), (3, "a", 2), (4, "a", 2), (5, "c", 2), (6, None, 3)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Day 1 has ``kind`` in its file; later days have it in the path, and one of their files holds it as well."""
    root = tmp_path_factory.mktemp("evolved")
    for path, columns in {
        "day=1/a.parquet": {"id": [1, 2], "kind": ["a", "b"]},
        "day=2/kind=a/a.parquet": {"id": [3, 4]},
        "day=2/kind=c/a.parquet": {"id": [5], "kind": ["c"]},
        "day=3/kind=__HIVE_DEFAULT_PARTITION__/a.parquet": {"id": [6]},
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), root / path)
    return root


@pytest.fixture(scope="module", params=[None, "64KB"])
def cache(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> pqcache.Cache:
    """A plain copy, and one that is rewritten, in which every file has the column."""
    path = tmp_path_factory.mktemp("cache")
    pqcache.sync(str(source), path, row_group_size=request.param)
    return pqcache.Cache.open(path)


def rows_of(cache: pqcache.Cache, **how: Any) -> list[tuple[Any, ...]]:
    batches = cache.batches(["id", "kind", "day"], **how)
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


@pytest.mark.filterwarnings("ignore:.*no row is left by filters")
def test_every_value_is_read_and_seen_by_filters(cache: pqcache.Cache) -> None:
    for how in ({"shuffle": False}, {"shuffle": True, "memory": "64KB"}):
        assert rows_of(cache, **how) == ROWS
    for filters, ids in (
        ("kind = 'a'", [1, 3, 4]),
        ("kind IS NULL", [6]),
        ("kind IS NOT NULL AND day = 2", [3, 4, 5]),
        ("kind > 'b'", [5]),
        ("kind = 'z'", []),
        ([("kind", "in", ["a", "c"])], [1, 3, 4, 5]),
        (pc.field("kind") == "a", [1, 3, 4]),
    ):
        assert [row[0] for row in rows_of(cache, filters=filters)] == ids
        assert sorted(i for batch in cache.batches(["id"], filters=filters) for i in batch["id"].to_pylist()) == ids


def test_the_loader_and_inspect_see_every_value(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (batch,) = ParquetDataset(source, batch_size=9, shuffle=False, nulls="mask")
    assert batch["kind"].to_list()[:5] == [row[1] for row in ROWS[:5]]
    assert batch["kind_mask"].tolist() == [True] * 5 + [False]
    assert run(["inspect", str(source), "--sample", "9", "--json"]) == 0
    assert capsys.readouterr().out.count('"kind": "a"') == 3


@pytest.mark.parametrize(
    ("where", "ids"), [("kind = 'a'", [1, 3, 4]), ("kind IS NULL", [6]), ("KIND = 'b' OR day = 3", [2, 6])]
)
def test_where_takes_the_rows_of_all_files(source: Path, tmp_path: Path, where: str, ids: list[int]) -> None:
    pqcache.sync(str(source), tmp_path, where=where)
    found = pqcache.Cache.open(tmp_path).batches(["id"], shuffle=False)
    assert [i for batch in found for i in batch["id"].to_pylist()] == ids


def test_no_key_index_of_such_a_column(cache: pqcache.Cache) -> None:
    with pytest.raises(UsageError, match="kind: is in the paths of some files and inside others"):
        pqcache.index(cache.path, keys=["kind"])
    with pytest.raises(UsageError, match="kind: is in the paths of some files and inside others"):
        cache.lookup("kind", ["a"])


def test_values_of_another_type_are_refused(tmp_path: Path) -> None:
    for path, day in {"a.parquet": datetime.date(2026, 1, 1), "day=monday/b.parquet": None}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [1], **({"day": [day]} if day else {})}), tmp_path / path)
    with pytest.raises(ParquetError, match="column 'day': is date32"):
        list(ParquetDataset(tmp_path, batch_size=1))


def test_a_column_that_no_file_has_is_null_where_the_path_lacks_it(tmp_path: Path) -> None:
    for path in ("a.parquet", "day=2/b.parquet"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [1]}), tmp_path / path)
    (batch,) = ParquetDataset(tmp_path, batch_size=2, shuffle=False, nulls={"day": -1})
    assert batch["day"].tolist() == [-1, 2]


def test_long_values_inside_of_a_file_are_read(tmp_path: Path) -> None:
    """Their pages are read by pqcache itself, and the path of this file says nothing of the column."""
    (tmp_path / "lake/kind=a").mkdir(parents=True)
    pq.write_table(pa.table({"kind": ["x" * 300], "id": [1]}), tmp_path / "lake/a.parquet")
    pq.write_table(pa.table({"kind": ["y" * 300], "id": [2]}), tmp_path / "lake/kind=a/a.parquet")
    pqcache.sync(tmp_path / "lake", tmp_path / "cache")
    found = [
        row for batch in pqcache.Cache.open(tmp_path / "cache").batches(shuffle=False) for row in batch.to_pylist()
    ]
    assert sorted(found, key=lambda row: row["id"]) == [{"kind": "x" * 300, "id": 1}, {"kind": "a", "id": 2}]
