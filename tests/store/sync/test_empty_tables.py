"""Tables without rows, row groups or columns: each command does what there is to do, or says why not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.parquet import footer
from pqcache.parquet import thrift as t
from pqcache.torch import ParquetDataset


@pytest.mark.parametrize("case", ["no row groups", "no row matches"])
def test_a_snapshot_without_row_groups_is_a_snapshot(tmp_path: Path, case: str) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    (source / "dt=1").mkdir(parents=True)
    where = None
    if case == "no row groups":
        pq.ParquetWriter(source / "dt=1/a.parquet", pa.schema([("a", pa.int64())])).close()
    else:
        pq.write_table(pa.table({"a": [1, 3]}), source / "dt=1/a.parquet")
        where = "a = 2"
    assert pqcache.sync(source, cache, where=where).published
    found = pqcache.inspect(cache)
    assert (found.files, found.rows, found.row_groups) == (1, 0, 0)
    assert [column.name for column in found.columns] == ["a", "dt"]
    assert pqcache.verify(cache, deep=True).ok
    assert not pqcache.sync(cache).published
    assert list(pqcache.Cache.open(cache).batches()) == []
    assert list(ParquetDataset(cache)) == []
    assert pqcache.repartition(cache, row_group_size="64KB").snapshot is not None
    assert pqcache.verify(cache).ok
    pq.write_table(pa.table({"a": [2, 4]}), source / "dt=1/b.parquet")
    pqcache.sync(cache)
    rows = [row for batch in pqcache.Cache.open(cache).batches(shuffle=False) for row in batch["a"].to_pylist()]
    assert rows == ([2, 4] if where is None else [2])


def write_without_columns(path: Path, rows: int) -> None:
    """Write a file with a row group of rows, and no columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({}), path)
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    fields = t.decode(data[-8 - length : -8], "x")
    group: t.Struct = {1: (t.LIST, t.Items(t.STRUCT, [])), 2: (t.I64, 0), 3: (t.I64, rows)}
    fields = footer.make_footer(fields, footer.schema_of(fields, "x"), [group], rows, {})
    path.write_bytes(b"PAR1" + footer.footer_and_magic(fields))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_without_columns_are_linked(tmp_path: Path, compression: str | None) -> None:
    for name in ("a", "b"):
        write_without_columns(tmp_path / f"source/dt=1/{name}.parquet", 2)
    pqcache.sync(tmp_path / "source", tmp_path / "cache")
    pqcache.repartition(tmp_path / "cache", row_group_size="64KB", compression=compression)
    pqcache.repartition(tmp_path / "source", tmp_path / "target", row_group_size="64KB", compression=compression)
    for place in ("cache", "target"):
        assert pqcache.inspect(tmp_path / place).rows == 4
    assert sum(len(batch["dt"]) for batch in ParquetDataset(tmp_path / "cache")) == 4


@pytest.mark.parametrize("name", ["a", "z"])
def test_rows_without_columns_beside_others_are_nulls(tmp_path: Path, name: str) -> None:
    write_without_columns(tmp_path / f"source/dt=1/{name}.parquet", 2)
    pq.write_table(pa.table({"i": [1, 3]}), tmp_path / "source/dt=1/m.parquet")
    pqcache.sync(tmp_path / "source", tmp_path / "cache", row_group_size="64KB")
    pqcache.repartition(tmp_path / "source", tmp_path / "target", row_group_size="64KB")
    expected = [None, None, 1, 3] if name == "a" else [1, 3, None, None]
    assert pq.read_table(tmp_path / "cache/current/dt=1")["i"].to_pylist() == expected
    assert pq.read_table(tmp_path / "target/dt=1")["i"].to_pylist() == expected


def test_a_dataset_without_columns_is_refused(tmp_path: Path) -> None:
    write_without_columns(tmp_path / "source/a.parquet", 2)
    with pytest.raises(UsageError, match=r"source: its files have no columns; there is nothing to read"):
        ParquetDataset(tmp_path / "source")


def test_damaged_int96_pages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "source/dt=1/a.parquet"
    path.parent.mkdir(parents=True)
    times = pa.array([1, 2], pa.timestamp("us"))
    pq.write_table(pa.table({"t": times}), path, use_deprecated_int96_timestamps=True, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:8] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(ParquetError, match=r"source/dt=1/a\.parquet: cannot be decoded \("):
        pqcache.repartition(tmp_path / "source", tmp_path / "target", row_group_size="64KB")
