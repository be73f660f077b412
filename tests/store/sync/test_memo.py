"""A table whose log is as it was is not listed again, and everything else is."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import pqcache
from pqcache.events import Event, Listed
from pqcache.store.layout import MEMO
from pqcache.store.tables.base import LogTable
from tests.conftest import Bucket
from tests.delta_tables import held, judged
from tests.servers.upload import for_each_file
from tests.store.tables.iceberg.lakes import Lake, place, rows_in, rows_of


def append(table: Path, start: int, stop: int) -> None:
    ids = list(range(start, stop))
    rows = pa.table({"id": ids, "price": [0.5 * i for i in ids], "dt": [f"2026-11-0{i % 3 + 1}" for i in ids]})
    write_deltalake(str(table), rows, mode="append", partition_by=["dt"])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    where = tmp_path / "lake" / "shop"
    append(where, 0, 9)
    append(where, 9, 18)
    return where


@pytest.fixture
def cache(table: Path, tmp_path: Path) -> Path:
    """A cache of the table, which was synced once."""
    pqcache.sync(table, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One item for each time that the log of a table is read."""
    found, read = [], LogTable.read_table

    def noted(self: LogTable) -> Any:
        found.append(self.url)
        return read(self)

    monkeypatch.setattr(LogTable, "read_table", noted)
    return found


def test_the_log_is_read_once(cache: Path, table: Path, readings: list[str]) -> None:
    events: list[Event] = []
    report = pqcache.sync(cache, on_event=events.append)
    assert readings == []
    assert (report.published, report.version, report.unchanged, report.rows) == (False, "1", 6, 18)
    size = sum(file.stat().st_size for file in table.rglob("*.parquet"))
    assert [event for event in events if isinstance(event, Listed)] == [Listed(6, size)]
    assert not pqcache.sync(cache, dry_run=True).published
    assert readings == []
    append(table, 18, 20)
    assert pqcache.sync(cache).version == "2"
    assert len(readings) == 1
    assert held(cache) == judged(table)
    DeltaTable(str(table)).alter.set_table_description("for the shop")
    for _ in range(2):
        report = pqcache.sync(cache)
        assert (report.published, report.version) == (False, "3"), "a commit that changes no file"
    assert len(readings) == 2


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"where": "dt > '2026-11-01'"}, 12),
        ({"columns": ["id"]}, 18),
        ({"newest": 1}, 6),
        ({"newest": "free"}, 18),
        ({"version": 0}, 9),
        ({"as_files": True}, 18),
        ({"shard": "0/2"}, None),
        ({"compare": "content"}, 18),
    ],
    ids=str,
)
def test_an_option_that_changes_what_is_taken_has_it_read_again(
    options: dict[str, Any], rows: int | None, cache: Path, table: Path, readings: list[str]
) -> None:
    report = pqcache.sync(cache, **options, force=True)
    assert readings or "as_files" in options
    assert rows is None or report.rows == rows
    once = len(readings)
    again = pqcache.sync(cache, **options)
    assert (again.published, again.rows, again.newest) == (False, report.rows, report.newest)
    always = {"shard", "compare"} & options.keys() or options.get("newest") == "free"
    assert (len(readings) > once) is bool(always)
    pqcache.sync(cache, where="", columns=[], newest="", version="", as_files=False, shard="")
    assert held(cache) == judged(table)


def lose_a_file(cache: Path, table: Path) -> None:
    next((cache / "current/dt=2026-11-01").glob("*.parquet")).unlink()


def cut_a_file(cache: Path, table: Path) -> None:
    file = next((cache / "current/dt=2026-11-01").glob("*.parquet"))
    file.chmod(0o644)
    os.truncate(file, 10)


def damage_what_is_remembered(cache: Path, table: Path) -> None:
    (cache / MEMO).write_text('{"format": 1, "key"')


def copy_a_commit(cache: Path, table: Path) -> None:
    """Have another file of the same name, bytes and time."""
    file = table / "_delta_log" / f"{1:020}.json"
    shutil.copy2(file, table / "copy")
    (table / "copy").replace(file)


def replace_the_table(cache: Path, table: Path) -> None:
    other = table.with_name("other")
    append(other, 0, 9)
    append(other, 9, 18)
    shutil.rmtree(table)
    other.rename(table)


@pytest.mark.parametrize(
    "change", [lose_a_file, cut_a_file, damage_what_is_remembered, copy_a_commit, replace_the_table]
)
def test_what_proves_nothing_has_it_read_again(
    change: Callable[[Path, Path], None], cache: Path, table: Path, readings: list[str]
) -> None:
    change(cache, table)
    pqcache.sync(cache, force=True)
    assert len(readings) == 1
    assert held(cache) == judged(table)
    assert not pqcache.sync(cache).published
    assert len(readings) == 1


def test_files_that_become_private_at_the_source_do_here(cache: Path, table: Path, readings: list[str]) -> None:
    file = next((table / "dt=2026-11-01").glob("*.parquet"))
    file.chmod(0o600)
    pqcache.sync(cache)
    assert len(readings) == 1
    assert stat.S_IMODE((cache / "current" / file.relative_to(table)).stat().st_mode) == 0o400


@pytest.mark.s3
def test_a_table_on_s3(table: Path, tmp_path: Path, s3_bucket: Bucket, readings: list[str]) -> None:
    def put(file: Path, path: str) -> None:
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"shop/{path}", Body=file.read_bytes())

    for_each_file(table, put)
    pqcache.sync(f"{s3_bucket.url}/shop", tmp_path / "cache")
    assert len(readings) == 1
    assert pqcache.sync(tmp_path / "cache").version == "1"
    assert len(readings) == 1
    append(table, 18, 20)
    for_each_file(table, put)
    assert pqcache.sync(tmp_path / "cache").version == "2"
    assert held(tmp_path / "cache") == judged(table)


@pytest.mark.parametrize("by_catalog", [False, True])
def test_the_pointer_of_an_iceberg_table_decides(
    by_catalog: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pqcache.store.tables.iceberg_open import CatalogTable

    kind = CatalogTable if by_catalog else LogTable
    found, read = [], kind.read_table

    def noted(self: Any) -> Any:
        found.append(self.url)
        return read(self)

    monkeypatch.setattr(kind, "read_table", noted)
    lake, cache = Lake(tmp_path / "lake"), tmp_path / "cache"
    lake.configure(monkeypatch)
    rows = pa.table({"id": pa.array(range(5), pa.int64()), "kind": ["a", "b", "a", "b", "c"]})
    table = lake.create("sold", rows.schema, by=["kind"])
    table.append(rows)
    pqcache.sync("iceberg://lake/shop.sold" if by_catalog else place(table.refresh()), cache)
    assert len(found) == 1
    assert not pqcache.sync(cache).published
    assert len(found) == 1
    table.refresh().append(rows)
    assert pqcache.sync(cache).published
    assert len(found) == 2
    assert rows_of(cache) == rows_in(table)
    table.refresh().delete("id < 2")
    assert pqcache.sync(cache, force=True).published
    assert rows_of(cache) == rows_in(table)
    pqcache.sync(cache, version=str(table.refresh().history()[0].snapshot_id), dry_run=True)
    assert len(found) == 4
