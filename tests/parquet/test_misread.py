"""Columns of which pyarrow returns other values than the file holds are refused by name, wherever they are read."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.cli import run
from pqcache.errors import ParquetError, PqcacheError, UsageError
from pqcache.parquet.misread import check_read_right
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.torch import ParquetDataset
from tests.real_files import JULIAN_DAY_0, UNKNOWN, annotated, write_int96, write_interval

SPAN = bytes(range(12))
FAR = [datetime.datetime(2026, 1, 1), datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1)]


def check(path: Path, **what: Any) -> None:
    with pq.ParquetFile(path) as file:
        check_read_right(path, file.metadata, file.schema_arrow, **what)


def rewrite(source: Path, target: Path, **options: Any) -> Path:
    size = options.pop("row_group_size", 64 << 10)
    return rewrite_directory([source], target, RewriteOptions(row_group_size=size, **options)).outputs[0].path


def read_in_all_ways(path: Path, columns: list[str]) -> list[Any]:
    """Return what each way of reading a directory gives, or the error that it raises."""
    cache = path.parent.parent / "cache"
    pqcache.sync(str(path.parent), cache)

    def read(call: Any) -> Any:
        try:
            return call()
        except PqcacheError as error:
            return error

    return [
        read(lambda: list(pqcache.Cache.open(cache).batches(columns, shuffle=False))),
        read(lambda: list(pqcache.Cache.open(cache).batches(columns, shuffle=True, memory="1MB"))),
        read(lambda: list(pqcache.Cache.open(cache).batches(["id"], filters=f"{columns[-1]} IS NOT NULL"))),
        read(lambda: list(ParquetDataset(path.parent, columns, batch_size=9, nulls="mask"))),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source" / "a.parquet"


@pytest.mark.parametrize("statistics", [True, False])
def test_values_that_would_be_null_are_refused(path: Path, tmp_path: Path, statistics: bool) -> None:
    write_interval(path, [SPAN, None, SPAN], statistics)
    assert pq.read_table(path)["span"].null_count == 3
    with pytest.raises(ParquetError, match=r"a\.parquet: column 'span' holds values of an unsupported type"):
        rewrite(path, tmp_path / "out", compression="zstd")
    for found in read_in_all_ways(path, ["span"]):
        assert isinstance(found, PqcacheError)
        assert "column 'span'" in str(found)
        assert "like INTERVAL" in str(found)
    assert [batch.num_rows for batch in pqcache.Cache.open(tmp_path / "cache").batches(["id"])] == [3]


@pytest.mark.filterwarnings("ignore:.*no row is left by filters")
@pytest.mark.parametrize("statistics", [True, False])
def test_a_column_that_is_really_empty_is_read(path: Path, tmp_path: Path, statistics: bool) -> None:
    write_interval(path, [None, None], statistics)
    assert pq.read_table(rewrite(path, tmp_path / "out", compression="zstd"))["span"].null_count == 2
    for found in read_in_all_ways(path, ["id", "span"])[:2]:
        assert found[0]["span"].null_count == 2


def test_a_required_column_of_unknown_type(path: Path, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("span", pa.binary(12), nullable=False)])
    pq.write_table(pa.table([[SPAN]], schema=schema), path, store_schema=False)
    annotated(path, "span", UNKNOWN)
    with pytest.raises(ParquetError, match="column 'span' holds values"):
        rewrite(path, tmp_path / "out", compression="zstd")


def test_inside_lists_structs_and_maps(path: Path) -> None:
    columns = {
        "l": pa.array(
            [[{"span": SPAN, "n": 1}], None], pa.list_(pa.struct([("span", pa.binary(12)), ("n", pa.int8())]))
        ),
        "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
    }
    pq.write_table(pa.table(columns), path, store_schema=False)
    annotated(annotated(path, "span", UNKNOWN), "value", UNKNOWN)
    with pytest.raises(ParquetError, match=r"column 'l\.list\.element\.span'"):
        check(path, columns=["l"])
    with pytest.raises(ParquetError, match=r"column 'm\.key_value\.value'"):
        check(path, columns=["m"])
    columns["l"], columns["m"] = (pa.array([[], None], column.type) for column in columns.values())
    pq.write_table(pa.table(columns), path, store_schema=False)
    annotated(annotated(path, "span", UNKNOWN), "value", UNKNOWN)
    check(path)


def test_int96_that_nanoseconds_cannot_hold_is_refused(path: Path, tmp_path: Path) -> None:
    write_int96(path, FAR)
    for found in read_in_all_ways(path, ["t"]):
        assert isinstance(found, ParquetError)
        assert "column 't' holds INT96 times outside the years 1677 to 2262" in str(found)
    pqcache.repartition(tmp_path / "cache", row_group_size="64KB")
    (batch,) = pqcache.Cache.open(tmp_path / "cache").batches(["t"], shuffle=False)
    assert batch["t"].to_pylist() == FAR


def test_int96_within_nanoseconds_is_read(path: Path) -> None:
    near = [datetime.datetime(1677, 9, 22), None, datetime.datetime(2262, 4, 11)]
    write_int96(path, near)
    (batch,) = read_in_all_ways(path, ["t"])[0]
    assert [None if t is None else t.replace(tzinfo=None) for t in batch["t"].to_pylist()] == near


def test_only_the_row_groups_that_are_read_count(path: Path) -> None:
    table = pa.table({"id": range(3), "t": pa.array(FAR, pa.timestamp("us"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=1)
    check(path, row_groups=[0])
    with pytest.raises(ParquetError, match="INT96"):
        check(path, row_groups=[1])


def test_julian_day_0_is_refused(path: Path, tmp_path: Path) -> None:
    """Pyarrow reads it as 1970-01-01, in any unit."""
    write_int96(path, [JULIAN_DAY_0 + 17, 0])
    with pytest.raises(ParquetError, match=r"a\.parquet: holds INT96 times of Julian day 0"):
        rewrite(path, tmp_path / "out", compression="zstd")
    with pytest.raises(ParquetError, match="Julian day 0"):
        pqcache.repartition(path.parent, tmp_path / "target", row_group_size="64KB")
    for found in read_in_all_ways(path, ["t"]):
        assert isinstance(found, ParquetError)
        assert "column 't' holds INT96 times of Julian day 0" in str(found)


def test_inspect_and_key_indexes_refuse_them_too(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_int96(path, FAR)
    assert run(["inspect", str(path.parent), "--sample", "3"]) == 1
    assert "column 't' holds INT96 times" in capsys.readouterr().err
    pqcache.sync(str(path.parent), tmp_path / "cache")
    with pytest.raises(ParquetError, match="column 't' holds INT96 times"):
        pqcache.index(tmp_path / "cache", keys=["t"])


def test_every_command_refuses_intervals_by_name_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    lake.mkdir()
    write_interval(lake / "a.parquet", [SPAN, None, SPAN])
    write_interval(lake / "b.parquet", [SPAN])
    commands = [
        ["sync", lake, tmp_path / "rows", "--where", "id > 0"],
        ["sync", lake, tmp_path / "rows", "--columns", "span", "--where", "span IS NULL"],
        ["repartition", lake, tmp_path / "out"],
        ["sync", lake, tmp_path / "rewritten", "--row-group-size", "4KB"],
        ["inspect", lake, "--sample", "1"],
    ]
    for words in commands:
        assert run([str(word) for word in words]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if "error" in line]) == 1
        assert re.search(rf"{lake}/[ab]\.parquet: column 'span' holds values .* like INTERVAL; leave it out", lines[-1])
    assert run(["sync", str(lake), str(cache), "--columns", "span"]) == 0, "copied as bytes"
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match=r"column 'span': .* like INTERVAL"):
        list(ParquetDataset(cache))
    assert run(["sync", str(lake), str(tmp_path / "without"), "--columns", "id"]) == 0
    assert len(ParquetDataset(tmp_path / "without", batch_size=None)) == 4
