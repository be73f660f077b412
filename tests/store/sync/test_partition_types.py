"""Types of partition columns: a number is never compared as text, and a type never changes by itself."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import SourceError, UsageError
from pqcache.torch import ParquetDataset
from tests.forked_commands import run_pqcache

HOURS = [f"{hour:02d}" for hour in range(24)]


def add(source: Path, key: str, *values: str) -> Path:
    """Write a partition of one row for each value, which its column ``v`` has too."""
    for value in values:
        directory = source / f"{key}={value}"
        directory.mkdir(parents=True)
        table = pa.table({"v": [value], "n": ["5"], "code": pa.array([b"7"]), "at": [datetime.time(8)], "i": [3]})
        table = table.append_column("tag", pa.array(["5"]).dictionary_encode())
        table = table.append_column("day", pa.array([datetime.date(2026, 11, 1)]))
        pq.write_table(table, directory / "part.parquet")
    return source


def held(cache: Path, **how: Any) -> list[str]:
    batches = pqcache.Cache.open(cache).batches(["v"], shuffle=False, **how)
    return sorted(value for batch in batches for value in batch["v"].to_pylist())


@pytest.fixture(scope="module")
def hours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add(tmp_path_factory.mktemp("hours") / "source", "hour", *HOURS)


@pytest.fixture(scope="module")
def cache(hours: Path) -> Path:
    pqcache.sync(hours, hours.parent / "cache")
    return hours.parent / "cache"


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ("hour < 8", "hour < '08'"),
        ("7 = hour", "hour = '07'"),
        ("hour in ('06', 7)", "hour IN ('07')"),
        ("not hour between 6 and 12", "hour >= '06'"),
        ("hour < cast('8' as int) and i > 1", "hour < '08'"),
        ("i = 5 or hour <> 7.5", "hour <> '7.5'"),
        ([("hour", "<", 8)], '("hour", "<", "08")'),
        ([[("i", "=", 5)], [("hour", "in", ["06", np.int8(7)])]], '("hour", "in", ["07"])'),
        ([("hour", "==", pa.scalar(7))], '("hour", "==", "07")'),
    ],
)
def test_a_number_is_not_compared_with_a_text_partition(cache: Path, filters: Any, text: str) -> None:
    with pytest.raises(UsageError) as found:
        held(cache, filters=filters)
    assert text in str(found.value)
    assert "--partition-types hour=int" in str(found.value)
    assert "partition_types={'hour': 'int'}" in str(found.value)


OTHERS = [
    "n > 9", "tag > 9", "code = 7", "at < 10", "n = true", "i > 0 and n in ('5', 6)", [("n", ">", 9)],
    [("tag", "not in", [9, None])], [("n", "=", True)], [("n", ">", pd.Timestamp("2026-11-01"))],
    [("i", ">", datetime.datetime(2026, 11, 1))],
]  # fmt: skip


@pytest.mark.parametrize("filters", OTHERS)
def test_a_number_is_not_compared_with_other_columns(cache: Path, filters: Any) -> None:
    with pytest.raises(UsageError):
        held(cache, filters=filters)


def test_weights_and_keys_are_not_compared_as_text(cache: Path) -> None:
    with pytest.raises(UsageError, match=r'with \{"hour": \{"07": 2\}\}, or declare --partition-types hour=int'):
        held(cache, weights={"hour": {7: 2, ...: 1}})
    with pytest.raises(UsageError, match="n is text, and 5 is a number"):
        held(cache, weights={"n": {np.int64(5): 2, ...: 1}})
    with pytest.raises(UsageError, match=r"0\.5 is not a value of 'i'"):
        held(cache, weights={"i": {0.5: 2, ...: 1}})
    with pytest.raises(UsageError, match="'day', which is date32"):
        held(cache, weights={"day": {7: 2, ...: 1}})
    with pytest.raises(UsageError, match=r"lookup\('hour', '07'\).*--partition-types hour=int"):
        pqcache.Cache.open(cache).lookup("hour", [7, 8])


def test_quoted_values_are_compared_as_text_and_numbers_as_numbers(cache: Path) -> None:
    assert held(cache, filters="hour < '08'") == HOURS[:8]
    assert held(cache, filters="i = '3' and hour in ('07', '7')") == ["07"]
    assert len(pqcache.Cache.open(cache).lookup("hour", "07")) == 1


def test_advice_for_text_that_is_no_number_has_one_of_its_values(tmp_path: Path) -> None:
    """A date without its dashes would be less than each of them, or greater."""
    days = add(tmp_path / "days", "dt", "2026-11-01")
    for filters in ("dt >= 20261101", [("dt", ">=", 20261101)]):
        with pytest.raises(UsageError, match=r"as its values are written, like .*2026-11-01"):
            ParquetDataset(days, filters=filters)
    add(days, "dt", "true")
    with pytest.raises(UsageError, match="compare it as text with dt = 'true'"):
        ParquetDataset(days, filters="dt = true")


def test_declared_types_are_remembered(tmp_path: Path, hours: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    shutil.copytree(hours, source)
    refused = run_pqcache("sync", source, cache, "--where", "hour < 8")
    assert refused.returncode == 2
    assert "hour < '08'" in refused.stderr
    assert "--partition-types hour=int" in refused.stderr
    taken = run_pqcache("sync", source, cache, "--where", "hour < 8", "--partition-types", "hour=int")
    assert taken.returncode == 0, taken.stderr
    assert held(cache) == HOURS[:8]
    assert (cache / "current" / "hour=07").is_dir()
    add(source, "hour", "7", "100")
    assert run_pqcache("sync", cache).returncode == 0
    assert held(cache, filters="hour = 7") == ["07", "7"]
    assert len(pqcache.Cache.open(cache).lookup("hour", 7)) == 2
    cleared = run_pqcache("sync", cache, "--partition-types", "")
    assert cleared.returncode == 2
    assert "hour < 8" in cleared.stderr


@pytest.mark.parametrize("what", ["directory", "cache", "part of a snapshot"])
def test_types_are_declared_for_reading(hours: Path, cache: Path, what: str) -> None:
    path = {"directory": hours, "cache": cache, "part of a snapshot": cache / "current"}[what]
    dataset = ParquetDataset(
        path, ["v", "hour"], filters=[("hour", "<", 8)], partition_types={"hour": "int"}, batch_size=100
    )
    (batch,) = dataset
    assert sorted(batch["hour"].tolist()) == list(range(8))
    with pytest.raises(UsageError, match="partition hour=00: '00' is not a date"):
        ParquetDataset(path, partition_types={"hour": "date"})


def test_counts_of_one_type_are_not_those_of_another(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(add(tmp_path / "source", "k", "5", "10"), cache)
    for kind, expected in ("int", ["5"]), ("text", ["10", "5"]), ("int", ["5"]):
        filters = "(k < '8' and code = '7') or (k >= '8' and code = 'x')"
        assert held(cache, filters=filters, partition_types={"k": kind}) == expected


@pytest.mark.parametrize(
    ("value", "reason", "types"),
    [
        ("unknown", "'unknown' is not an integer", {"shard": "text"}),
        ("007", "'007' is not written as an integer", {"shard": "int"}),
        ("9223372036854775808", "is not an integer", {"shard": "float"}),
    ],
)
def test_a_value_that_does_not_fit_is_named(tmp_path: Path, value: str, reason: str, types: dict[str, str]) -> None:
    source, cache = add(tmp_path / "source", "shard", "1", "5", "10", "100"), tmp_path / "cache"
    pqcache.sync(source, cache, where="shard >= 10")
    add(source, "shard", value, "20")
    failed = run_pqcache("sync", cache)
    assert failed.returncode == 1
    (kind,) = types.values()
    for part in (f"partition shard={value}: ", reason, f"--partition-types shard={kind}", "--skip-bad"):
        assert part in failed.stderr
    assert held(cache) == ["10", "100"]
    for _ in range(2):  # the second time nothing is new
        skipped = run_pqcache("sync", cache, "--skip-bad")
        assert skipped.returncode == 5
        assert f"shard={value}" in skipped.stderr
        assert held(cache) == ["10", "100", "20"]
    if kind == "text":
        with pytest.raises(UsageError, match="shard is text, and 10 is a number"):
            pqcache.sync(cache, partition_types=types)
        pqcache.sync(cache, partition_types=types, where="shard >= '10'", skip_bad=False)
        assert held(cache) == ["10", "100", "20", "5", "unknown"]
    else:
        pqcache.sync(cache, partition_types=types, skip_bad=False)
        assert held(cache) == sorted(["10", "100", "20", *([value] if len(value) > 3 else [])])


def test_a_partition_that_another_column_excludes_does_not_matter(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    add(source / "region=kr", "shard", "1", "20")
    add(source / "region=us", "shard", "20")
    pqcache.sync(source, cache, where="region = 'kr' and shard >= 10")
    add(source / "region=us", "shard", "unknown")
    assert not pqcache.sync(cache).published
    add(source / "region=kr", "shard", "unknown")
    with pytest.raises(SourceError, match="region=kr/shard=unknown"):
        pqcache.sync(cache)
    with pytest.raises(SourceError, match="region=kr/shard=unknown"):
        pqcache.sync(cache, where="not (region = 'us' or shard is null) and v <> 'x'")


def test_a_partition_that_waits_is_no_error_yet(tmp_path: Path) -> None:
    source, cache = add(tmp_path / "source", "shard", "5"), tmp_path / "cache"
    (source / "shard=5" / "_SUCCESS").touch()
    pqcache.sync(source, cache, marker="_SUCCESS")
    add(source, "shard", "unknown")
    assert not pqcache.sync(cache).published
    (source / "shard=unknown" / "_SUCCESS").touch()
    with pytest.raises(SourceError, match="shard=unknown"):
        pqcache.sync(cache)


@pytest.mark.parametrize("declared", [None, {"hour": "int"}])
def test_only_the_newest_partitions_have_to_fit(tmp_path: Path, declared: dict[str, str] | None) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    for day in (1, 3, 5):
        add(source / f"day={day}", "hour", str(day))
    if declared:
        add(source / "day=0", "hour", "unknown")
    pqcache.sync(source, cache, newest=2, partition_types=declared)
    for day in (1, 2):  # older than all, and just older than those that are held
        add(source / f"day={day}", "hour", "unknown")
    add(source / "day=4", "hour", "4")
    report = pqcache.sync(cache)
    assert (report.published, report.skipped, held(cache)) == (True, (), ["4", "5"])
    assert not pqcache.sync(cache).published
    add(source / "day=4", "hour", "other", "unknown")
    add(source / "day=6", "hour", "unknown")
    with pytest.raises(SourceError, match="day=6/hour=unknown"):
        pqcache.sync(cache, newest=1)
    assert [item.partition for item in pqcache.sync(cache, newest=1, skip_bad=True).skipped] == ["day=6/hour=unknown"]
    assert held(cache) == ["5"]
    report = pqcache.sync(cache, newest=2)
    assert [item.partition.partition("/")[0] for item in report.skipped] == ["day=4", "day=4", "day=6"]
    assert (report.newest, held(cache)) == (2, ["4", "5"])


def test_text_stays_text(tmp_path: Path) -> None:
    source, cache = add(tmp_path / "source", "shard", "5", "10", "unknown"), tmp_path / "cache"
    pqcache.sync(source, cache)
    shutil.rmtree(source / "shard=unknown")
    pqcache.sync(cache, force=True)
    assert held(cache) == ["10", "5"]
    with pytest.raises(UsageError, match="shard is text"):
        held(cache, filters="shard > 7")
    assert held(cache, filters="shard > '10'") == ["5"]
    pqcache.sync(cache, partition_types={"shard": "int"})
    assert held(cache, filters="shard > 7") == ["10"]
    pqcache.sync(cache, partition_types={})
    assert held(cache, filters="shard > 7") == ["10"]


@pytest.mark.parametrize(
    ("kind", "values", "condition", "expected", "wrong"),
    [
        ("float", ["0.5", "1", "9.5", "10", "1e3"], "k > 2", ["10", "1e3", "9.5"], "nan"),
        ("float", ["1", "2"], "k >= 1.5", ["2"], "9007199254740993"),
        ("int", ["-1", "-01", "3"], "k < 0", ["-01", "-1"], "0x10"),
        ("date", ["2026-11-01", "2026-11-30"], "k > '2026-11-02'", ["2026-11-30"], "2026-02-30"),
        ("timestamp", ["2026-11-01", "2026-11-01 08"], "k > '2026-11-01 00:00:00'", ["2026-11-01 08"], "8"),
        ("text", ["5", "10"], "k > '10'", ["5"], None),
    ],
)
def test_declared_types(
    tmp_path: Path, kind: str, values: list[str], condition: str, expected: list[str], wrong: str | None
) -> None:
    source, cache = add(tmp_path / "source", "k", *values, "__HIVE_DEFAULT_PARTITION__"), tmp_path / "cache"
    pqcache.sync(source, cache, where=condition, partition_types={"k": kind})
    assert held(cache) == sorted(expected)
    pqcache.sync(f"{cache}/current", tmp_path / "again")  # which takes the types
    assert held(tmp_path / "again", filters=condition) == sorted(expected)
    if wrong is not None:
        add(source, "k", wrong)
        with pytest.raises(SourceError, match=f"partition k={wrong}: '{wrong}' is not an? {kind}"):
            pqcache.sync(cache)


def test_a_declared_type_is_published_without_a_change_of_files(tmp_path: Path) -> None:
    source, cache = add(tmp_path / "source", "hour", "00", "08", "unknown"), tmp_path / "cache"
    pqcache.sync(source, cache)
    report = pqcache.sync(cache, partition_types={"hour": "int"}, skip_bad=True)
    assert (report.published, report.fetched_bytes, [item.partition for item in report.skipped]) == (
        True, 0, ["hour=unknown"])  # fmt: skip
    assert held(cache, filters="hour < 8") == ["00"]
    pqcache.repartition(cache, row_group_size="1MB")
    assert held(cache, filters="hour >= 8") == ["08"]


def test_rows_are_filtered_again_by_a_type_that_is_declared_later(tmp_path: Path) -> None:
    source, cache = add(tmp_path / "source", "at", "2026-11-01", "2026-11-02"), tmp_path / "cache"
    pqcache.sync(source, cache, where="at = '2026-11-01 00:00:00' or v > '2026-11-01'")
    assert held(cache) == ["2026-11-02"]
    pqcache.sync(cache, partition_types={"at": "timestamp"})
    assert held(cache) == ["2026-11-01", "2026-11-02"]
    assert not pqcache.sync(cache).published


def test_types_that_make_no_sense(tmp_path: Path, hours: Path) -> None:
    for types in ("hour", "=int", "hour=integer", "minute=int"):
        found = run_pqcache("sync", hours, tmp_path / "cache", "--partition-types", types)
        assert (found.returncode, types in found.stderr) == (2, True), found.stderr
        assert "No such option" not in found.stderr
