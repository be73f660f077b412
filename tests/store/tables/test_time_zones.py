"""Times of a table's files that have no zone, as Spark's INT96 has none: in a column of instants they are in UTC."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError
from pqcache.parquet.schema import with_time_zones
from tests import delta_tables
from tests.delta_tables import add, commit, field, in_order, metadata, protocol

UTC = pa.timestamp("us", "UTC")
STRUCT = {"type": "struct", "fields": [field("at", "timestamp"), field("n", "long")]}
LIST = {"type": "array", "elementType": "timestamp", "containsNull": True}


def times(start: int, kind: pa.DataType) -> pa.Table:
    """Four rows of the hours from ``start``, one of which is null."""
    zoned = isinstance(kind, pa.TimestampType) and kind.tz is not None
    first = dt.datetime(2026, 11, 1, tzinfo=dt.timezone.utc if zoned else None)
    found = pa.array([*(first + dt.timedelta(hours=start + hour) for hour in range(3)), None], kind)
    inside = pa.StructArray.from_arrays([found, pa.array(range(4), pa.int64())], ["at", "n"])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3, 3, 4], pa.int32()), found)
    return pa.table({"id": range(start, start + 4), "at": found, "s": inside, "all": lists})


def write(table: Path, version: int, kind: pa.DataType, int96: bool = False) -> None:
    """Commit a file whose times are of a type, or INT96."""
    table.mkdir(exist_ok=True)
    columns = [field("id", "long"), field("at", "timestamp"), field("s", STRUCT), field("all", LIST)]
    name = f"{version}.parquet"
    pq.write_table(times(4 * version, kind), table / name, use_deprecated_int96_timestamps=int96)
    first = [] if version else [protocol(reader=1), metadata(columns)]
    commit(table, version, *first, add(table, name))


def plain(value: Any) -> Any:
    """Return a value with the times of Python in it, whatever unit they are in."""
    if isinstance(value, dict):
        return {key: plain(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return list(map(plain, value))
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime()
    return value.astimezone(dt.timezone.utc) if isinstance(value, dt.datetime) and value.tzinfo else value


def held(cache: Path, **options: Any) -> list[dict[str, Any]]:
    return in_order(map(plain, delta_tables.held(cache, **options)))


def judged(table: Path) -> list[dict[str, Any]]:
    return in_order(map(plain, delta_tables.judged(table)))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "t"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("options", [{}, {"row_group_size": "1MB"}], ids=str)
def test_int96_beside_instants(table: Path, cache: Path, options: dict[str, Any]) -> None:
    write(table, 0, pa.timestamp("us"), int96=True)
    pqcache.sync(table, cache, **options)
    assert held(cache) == judged(table)
    write(table, 1, UTC)
    pqcache.sync(cache)
    write(table, 2, pa.timestamp("us"))
    write(table, 3, pa.timestamp("ms", "UTC"))
    pqcache.sync(cache)
    assert held(cache) == judged(table)
    found = pqcache.Cache.open(cache)
    (kind,) = {batch.schema.field("at").type.tz for batch in found.batches(shuffle=False)}
    assert kind == "UTC"
    assert pqcache.verify(cache, deep=True, source=True).ok
    for condition in ("at >= '2026-11-01T05:00:00Z'", "at >= '2026-11-01 06:00:00+01:00'"):
        late = [row for row in judged(table) if row["at"] is not None and row["at"].hour >= 5]
        assert held(cache, filters=condition) == late


def test_conditions_columns_and_a_rewritten_table(table: Path, cache: Path, tmp_path: Path) -> None:
    write(table, 0, pa.timestamp("us"), int96=True)
    pqcache.sync(table, cache, as_files=True)
    write(table, 1, UTC)
    pqcache.sync(cache, as_files=False, where="at >= '2026-11-01T03:00:00Z'")
    late = [row for row in judged(table) if row["at"] is not None and row["at"].hour >= 3]
    assert held(cache) == late
    pqcache.sync(cache, where="", columns=["at"], force=True)
    assert held(cache) == in_order({"at": row["at"]} for row in judged(table))
    pqcache.index(cache, keys=["at"])
    keys = [dt.datetime(2026, 11, 1, hour, tzinfo=dt.timezone.utc) for hour in (1, 5)]
    assert len(pqcache.Cache.open(cache).lookup("at", keys)) == 2
    pqcache.repartition(table, tmp_path / "out", row_group_size="1MB")
    rows = pa.concat_tables([pq.read_table(file) for file in (tmp_path / "out").rglob("*.parquet")])
    assert rows.schema.field("at").type.tz == "UTC"
    assert in_order(rows.to_pylist()) == judged(table)


def test_a_directory_of_files_has_no_instants(tmp_path: Path, cache: Path) -> None:
    """What the times of files without a zone mean there, nobody says."""
    write(tmp_path / "t", 0, UTC)
    write(tmp_path / "t", 1, pa.timestamp("us"), int96=True)
    with pytest.raises(ParquetError, match="does not fit"):
        pqcache.sync(tmp_path / "t", cache, as_files=True)


def test_zones_are_those_of_the_table() -> None:
    naive, zoned = pa.timestamp("ns"), pa.timestamp("us", "UTC")
    seoul = pa.timestamp("s", "Asia/Seoul")
    files = pa.schema([("a", naive), ("b", pa.map_(naive, naive)), ("c", seoul), ("d", naive)])
    table = pa.schema([("a", zoned), ("b", pa.map_(pa.timestamp("us"), zoned)), ("c", zoned), ("x", zoned)])
    utc = pa.timestamp("ns", "UTC")
    expected = pa.schema([("a", utc), ("b", pa.map_(naive, utc)), ("c", seoul), ("d", naive)])
    assert with_time_zones(files, table) == expected
    assert with_time_zones(files, pa.schema([])) == files
