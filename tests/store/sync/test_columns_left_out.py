"""Columns that not all files have, or have with other types or spellings, beside those that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, TypeClash
from pqcache.torch import ParquetDataset
from tests.forked_commands import run_pqcache


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def rows_in(cache: Path) -> list[dict[str, Any]]:
    return [row for batch in pqcache.Cache.open(cache).batches(shuffle=False) for row in batch.to_pylist()]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"junk": [5]}, {"junk": ["x"]}, "column 'junk' is string, which does not fit int64"),
        ({"junk": [{"a": 5}]}, {"junk": [{"a": "x"}]}, "column 'junk.a' is string, which does not fit int64"),
        ({"junk": [5]}, {"Junk": [5]}, "column 'Junk' differs only in case from 'junk'"),
        ({"junk": [{"a": 5}]}, {"junk": [{"A": 5}]}, "field 'junk.A' differs only in case from 'a'"),
        ({}, {"DT": [5]}, "column 'DT' differs only in case from the partition column 'dt'"),
    ],
    ids=["type", "field", "case", "case of a field", "case of a key"],
)
def test_a_clash_stops_only_what_reads_the_column(
    lake: Path, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], reason: str
) -> None:
    write(lake / "dt=1" / "p.parquet", id=[1], **one)
    write(lake / "dt=2" / "p.parquet", id=[2], **other)
    column = [*one, *other][0]
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False}
    assert [batch["id"].tolist() for batch in ParquetDataset(lake, columns=["id"], **options)] == [[1, 2]]
    by_filter = [{"columns": ["id"], "filters": f"{column} is not null"}] if one else []  # DT is dt in a condition
    for more in ({}, {"columns": [column]}, *by_filter):
        with pytest.raises(ParquetError) as caught:
            ParquetDataset(lake, **options, **more)
        text = str(caught.value)
        assert all(part in text for part in (reason, "dt=1/p.parquet", "dt=2/p.parquet", "columns=['id'"))
    assert {"id", "dt", *one, *other} == {column.name for column in pqcache.inspect(lake).columns}
    done = run_pqcache("sync", lake, tmp_path / "all")
    assert done.returncode == 1
    assert all(
        part in done.stderr for part in (reason, "dt=1/p.parquet", "dt=2/p.parquet", "--skip-bad", "--columns id")
    )
    run_pqcache("sync", lake, tmp_path / "some", "--columns", "id")
    assert rows_in(tmp_path / "some") == [{"id": 1, "dt": 1}, {"id": 2, "dt": 2}]
    assert [item.partition for item in pqcache.sync(lake, tmp_path / "good", skip_bad=True).skipped] == ["dt=2"]


@pytest.mark.parametrize("where", [None, "dt >= 1", "DT = 1"])
def test_partition_keys_that_differ_in_case_are_refused(lake: Path, tmp_path: Path, where: str | None) -> None:
    for directory in ("DT=1", "dt=2"):
        write(lake / directory / "p.parquet", id=[1])
    reason = r"dt=2/p\.parquet: partition column 'dt' differs only in case from 'DT' in DT=1/p\.parquet"
    with pytest.raises(TypeClash, match=reason):
        pqcache.sync(lake, tmp_path / "cache", where=where)
    with pytest.raises(TypeClash, match=reason):
        ParquetDataset(lake, columns=["id"], batch_size=1)


def test_names_that_differ_in_case_within_one_file_stay(lake: Path, tmp_path: Path) -> None:
    write(lake / "dt=1" / "p.parquet", id=[1], ID=[2])
    write(lake / "dt=2" / "p.parquet", ID=[3], id=[4])
    pqcache.sync(lake, tmp_path / "cache")
    assert rows_in(tmp_path / "cache") == [{"id": 1, "ID": 2, "dt": 1}, {"id": 4, "ID": 3, "dt": 2}]


@pytest.mark.parametrize(
    "options", [{}, {"fill": True}, {"row_group_size": "1MB"}, {"where": "id >= 2"}], ids=lambda options: str(options)
)
def test_a_column_that_older_files_lack(lake: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    write(lake / "dt=1" / "p.parquet", other=[0.5, 1.5, 2.5], id=[1, 2, 3])
    write(lake / "dt=2" / "p.parquet", id=[2], vector=[[1.0, 2.0]])
    pqcache.sync(lake, tmp_path / "cache", columns=["vector"], **options)
    kept = 2 if "where" in options else 3
    expected = [{"vector": None, "dt": 1}] * kept + [{"vector": [1.0, 2.0], "dt": 2}]
    assert rows_in(tmp_path / "cache") == expected
    assert pqcache.verify(tmp_path / "cache", deep=True, source=True).ok
    assert not pqcache.sync(tmp_path / "cache").published


@pytest.mark.parametrize("row_group_size", [None, "1MB"])
def test_names_that_differ_in_case_are_merged_if_that_is_wanted(
    lake: Path, tmp_path: Path, row_group_size: str | None
) -> None:
    cache, texts = tmp_path / "cache", pa.array(["x"]).dictionary_encode()
    write(lake / "dt=1" / "p.parquet", id=[1], userId=texts, place=[{"City": "a"}])
    write(lake / "DT=2" / "p.parquet", ID=[2], userid=texts, Place=[{"city": "b"}])
    words = [] if row_group_size is None else ["--row-group-size", row_group_size]
    assert run_pqcache("sync", lake, cache, "--ignore-case", *words).returncode == 0
    rows = [
        {"id": 1, "userId": "x", "place": {"City": "a"}, "DT": 1},
        {"id": 2, "userId": "x", "place": {"City": "b"}, "DT": 2},
    ]
    assert sorted(rows_in(cache), key=str) == sorted(rows, key=str)
    found = pqcache.Cache.open(cache).batches(["id"], filters="userId = 'x' and dt >= 1", shuffle=False)
    assert sorted(value for batch in found for value in batch["id"].to_pylist()) == [1, 2]
    assert not pqcache.sync(cache).published  # it is remembered
    write(lake / "Dt=3" / "p.parquet", iD=[3], USERID=texts, PLACE=[{"CITY": "c"}])
    pqcache.sync(cache)
    assert {"id": 3, "userId": "x", "place": {"City": "c"}, "DT": 3} in rows_in(cache)
    assert pqcache.verify(cache, deep=True, source=True).ok
    (damaged,) = (cache / "current").resolve().glob("DT=1/*.parquet")
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert pqcache.verify(cache, deep=True, repair=True).repaired
    assert rows[0] in rows_in(cache)
    with pytest.raises(ParquetError, match="differs only in case"):
        pqcache.sync(cache, ignore_case=False)


def test_conditions_and_columns_of_names_that_are_merged(lake: Path, tmp_path: Path) -> None:
    write(lake / "dt=1" / "p.parquet", id=[1], userId=[5])
    write(lake / "dt=2" / "p.parquet", id=[2], userid=[6])
    for column in ("userId", "userid"):
        cache = tmp_path / column
        pqcache.sync(lake, cache, columns=[column], where=f"{column} > 1", ignore_case=True)
        assert rows_in(cache) == [{column: 5, "dt": 1}, {column: 6, "dt": 2}]
