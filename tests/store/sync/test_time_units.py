"""The times of a column keep their unit from night to night, whatever the units of the files that come."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.events import Event, Warned
from pqcache.torch import ParquetDataset
from pqcache.torch.batch import to_rows
from tests.forked_commands import run_pqcache

PER_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9}


def put(root: Path, name: str, unit: str, second: int = 1) -> None:
    """Write a file with a row of one time, in columns of several kinds."""
    count = second * PER_SECOND[unit]
    time = pa.time32(unit) if unit == "ms" else pa.time64(unit)
    stamp = pa.array([count], pa.timestamp(unit))
    table = pa.table(
        {
            "ts": stamp,
            "zoned": stamp.cast(pa.timestamp(unit, "UTC")),
            "time": pa.array([count], time),
            "took": pa.array([count], pa.duration(unit)),
            "struct": pa.StructArray.from_arrays([stamp], ["at"]),
            "list": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), stamp),
        }
    )
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


ALL = ("ts", "zoned", "time", "took", "struct", "list")


def times(path: Path, **options: Any) -> dict[str, list[Any]]:
    """Return the values in each column, in the order of the files."""
    found: dict[str, list[Any]] = {name: [] for name in ALL}
    for batch in ParquetDataset(path, batch_size=1, shuffle=False, **options):
        for name in ALL:
            (value,) = to_rows(batch[name])
            found[name].append(value["at"] if name == "struct" else value[0] if name == "list" else value)
    return found


def expected(unit: str, *seconds: int) -> dict[str, list[int]]:
    return {name: [second * PER_SECOND[unit] for second in seconds] for name in ALL}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Return a source of one partition with times in microseconds."""
    put(tmp_path / "lake", "dt=1/a.parquet", "us", 1)
    return tmp_path / "lake"


@pytest.mark.parametrize("options", [{}, {"row_group_size": "1MB"}])
def test_coarser_files_are_converted_also_once_all_are(lake: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, **options)
    put(lake, "dt=2/a.parquet", "ms", 2)
    assert times(lake) == expected("us", 1, 2), "the finest of a directory"
    pqcache.sync(cache)
    assert times(cache) == expected("us", 1, 2)
    put(lake, "dt=1/a.parquet", "ms", 4)
    pqcache.sync(cache)
    assert times(cache) == expected("us", 4, 2)
    (lake / "dt=1/a.parquet").unlink()
    pqcache.sync(cache, force=True)
    pqcache.repartition(cache, row_group_size="2MB")
    assert times(cache) == expected("us", 2)
    (batch,) = pqcache.Cache(cache).batches(["ts"], batch_size=9)
    assert batch.schema.field("ts").type == pa.timestamp("us")
    later = dt.datetime(1970, 1, 1, 0, 0, 2)
    for filters in ("ts >= '1970-01-01 00:00:02'", [("ts", "==", later)], "struct.at < '1970-01-01 00:00:03'"):
        assert len(ParquetDataset(cache, filters=filters, batch_size=1)) == 1


@pytest.mark.parametrize("options", [{}, {"row_group_size": "1MB"}])
def test_a_finer_file_is_refused_before_it_is_published(lake: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    first = pqcache.sync(lake, cache, **options).snapshot
    put(lake, "dt=2/a.parquet", "ns", 2)
    put(lake, "dt=3/a.parquet", "us", 3)
    choice = ",".join(f"{name}=ns" for name in ALL)
    with pytest.raises(ParquetError) as refused:
        pqcache.sync(cache)
    assert "dt=2/" in refused.value.subject
    assert "column 'ts' is timestamp[ns], and ns is finer than the unit us of its times so far" in str(refused.value)
    advice, same = refused.value.advice, choice.replace("ns", "us")
    assert f"--time-units {same} keeps the unit if the values fit, --time-units {choice} changes" in advice
    assert "--skip-bad publishes the rest" in advice
    assert ParquetDataset(cache).snapshot == first
    report = pqcache.sync(cache, skip_bad=True)
    assert [item.partition for item in report.skipped] == ["dt=2"]
    assert times(cache) == expected("us", 1, 3)
    done = run_pqcache("sync", cache, "--time-units", choice)
    assert done.returncode == 0, done.stderr
    assert "the times of column 'ts' were in us and are in ns from now on" in done.stderr
    assert times(cache) == expected("ns", 1, 2, 3)
    put(lake, "dt=2/a.parquet", "us", 2)
    pqcache.sync(cache)
    assert times(cache) == expected("ns", 1, 2, 3)


@pytest.mark.parametrize("fill", [False, True])
def test_a_unit_may_be_chosen_from_the_first_night_on(lake: Path, tmp_path: Path, fill: bool) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, time_units=dict.fromkeys(ALL, "ns"), fill=fill)
    assert times(cache) == expected("ns", 1)
    put(lake, "dt=2/a.parquet", "ns", 2)
    pqcache.sync(cache)
    assert times(cache) == expected("ns", 1, 2)


def test_a_choice_alone_is_published_and_said(lake: Path, tmp_path: Path) -> None:
    cache, events = tmp_path / "cache", list[Event]()
    first = pqcache.sync(lake, cache)
    assert pqcache.sync(cache, time_units=dict.fromkeys(ALL, "ns"), on_event=events.append).published
    assert sum(isinstance(e, Warned) and "were in us and are in ns from now on" in e.message for e in events) == len(
        ALL
    )
    assert times(cache) == expected("ns", 1)
    assert not pqcache.sync(cache).published
    assert times(cache, snapshot=first.snapshot) == expected("us", 1)
    pqcache.sync(cache, time_units={})
    assert times(cache) == expected("ns", 1)


@pytest.mark.parametrize("options", [{}, {"row_group_size": "1MB"}])
def test_the_unit_stays_if_that_is_chosen_and_the_values_fit(
    lake: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, **options)
    put(lake, "dt=2/a.parquet", "ns", 2)
    pqcache.sync(cache, time_units=dict.fromkeys(ALL, "us"))
    assert times(cache) == expected("us", 1, 2)
    for name in ("ts", "list"):
        put(lake, "dt=3/a.parquet", "ns", 3)
        table = pq.read_table(lake / "dt=3/a.parquet", partitioning=None)
        odd = pa.array([7], pa.timestamp("ns"))
        odd = odd if name == "ts" else pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), odd)
        pq.write_table(table.set_column(ALL.index(name), name, odd), lake / "dt=3/a.parquet")
        with pytest.raises(ParquetError, match=rf"dt=3/.*column '{name}' is .*\[ns\].* which does not fit .*\[us\]"):
            pqcache.sync(cache, skip_bad=False)
        assert [item.partition for item in pqcache.sync(cache, skip_bad=True).skipped] == ["dt=3"]
        assert times(cache) == expected("us", 1, 2)


def test_times_too_far_away_for_the_unit_are_named(lake: Path, tmp_path: Path) -> None:
    put(lake, "dt=1/a.parquet", "ns", 1)
    pqcache.sync(lake, tmp_path / "cache")
    put(lake, "dt=2/a.parquet", "us", 253_370_764_800)  # in the year 9999
    (lake / "dt=1/a.parquet").unlink()
    with pytest.raises(ParquetError, match=r"dt=2/a\.parquet: column .* does not fit .*\[ns"):
        pqcache.sync(tmp_path / "cache", force=True)
    pqcache.sync(tmp_path / "cache", force=True, time_units=dict.fromkeys(ALL, "us"))
    assert times(tmp_path / "cache") == expected("us", 253_370_764_800)


def test_int96_has_no_unit(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    stamps = pa.table({"ts": pa.array([1], pa.timestamp("us"))})
    pq.write_table(stamps, tmp_path / "lake" / "a.parquet")
    pqcache.sync(tmp_path / "lake", tmp_path / "cache")
    pq.write_table(stamps, tmp_path / "lake" / "b.parquet", use_deprecated_int96_timestamps=True)
    pqcache.sync(tmp_path / "cache")
    (batch,) = ParquetDataset(tmp_path / "cache", batch_size=2, shuffle=False)
    assert batch["ts"].tolist() == [1, 1]
    odd = pa.table({"ts": pa.array([1], pa.timestamp("ns"))})
    pq.write_table(odd, tmp_path / "lake" / "b.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(ParquetError, match=r"b\.parquet: column 'ts' is timestamp\[ns\] .* does not fit"):
        pqcache.sync(tmp_path / "cache")


def test_choices_that_make_no_sense(tmp_path: Path) -> None:
    (tmp_path / "lake" / "dt=1").mkdir(parents=True)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "lake" / "dt=1" / "a.parquet")
    for option, message in (
        ("ts=h", "--time-units ts=h: not a unit of time; choose s, ms, us or ns"),
        ("ts", "--time-units ts: not NAME=VALUE,...; write it like"),
        ("nope=us", "--time-units nope=us: no column 'nope'"),
        ("dt=us", "--time-units dt=us: no column 'dt'"),
        ("id=us", "--time-units id=us: column 'id' is int64, not a time"),
    ):
        done = run_pqcache("sync", tmp_path / "lake", tmp_path / "cache", "--time-units", option)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    with pytest.raises(UsageError, match=r"time_units='ts=us': not a table of names and values; give one, like"):
        pqcache.sync(tmp_path / "lake", tmp_path / "cache", time_units="ts=us")  # type: ignore[arg-type]
