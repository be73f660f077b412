"""A cache as the source of another: one snapshot, whatever is published meanwhile."""

from __future__ import annotations

import datetime as dt
import os
import shutil
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

import pqcache
from pqcache.errors import DamagedError, SourceError, SourceNotFound, UsageError
from pqcache.events import Event, Fetched, Listed
from pqcache.store.cache_directory import CacheDirectory, lease_at, snapshot_at
from pqcache.store.drivers.local import SnapshotSource
from pqcache.store.drivers.registry import open_source
from tests.datasets import rows_of, write_day, write_shop
from tests.delta_tables import held, judged


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "lake", files=2, rows=20)


@pytest.fixture
def upstream(lake: Path, tmp_path: Path) -> Path:
    pqcache.sync(lake, tmp_path / "upstream", keep=1)
    return tmp_path / "upstream"


@pytest.mark.parametrize("moment", [Listed, Fetched])
def test_an_upstream_that_publishes_during_the_sync(
    moment: type[Event], lake: Path, upstream: Path, tmp_path: Path
) -> None:
    """Each time other files with the same rows: a listing of two moments has them twice or not at all."""
    for night in range(2):
        before = rows_of(upstream / "current")
        acted: list[Event] = []

        def publish(event: Event, night: int = night, acted: list[Event] = acted) -> None:
            if isinstance(event, moment) and not acted:
                acted.append(event)
                for day in range(3):
                    directory = lake / f"dt=2026-11-{day + 1:02d}"
                    shutil.rmtree(directory)
                    write_day(lake, f"2026-11-{day + 1:02d}", first=day * 100_000, files=2, rows=20, seed=night + 1)
                    for path in directory.glob("*.parquet"):
                        path.rename(path.with_name(f"night-{night}-{path.name}"))
                assert pqcache.sync(upstream).published

        report = pqcache.sync(upstream / "current", tmp_path / "cache", on_event=publish, force=True)
        assert acted
        assert report.published
        assert rows_of(tmp_path / "cache" / "current") == before
        assert len(CacheDirectory(upstream).snapshots()) == 2, "the leased one is kept"
    pqcache.sync(tmp_path / "cache", force=True)
    assert rows_of(tmp_path / "cache" / "current") == rows_of(upstream / "current")
    pqcache.gc(upstream)
    assert len(CacheDirectory(upstream).snapshots()) == 1, "no lease is left"


def test_kept_files_are_not_fetched_again(lake: Path, upstream: Path, tmp_path: Path) -> None:
    """In the new snapshot they are links, whose ctime is another, or copies with another inode."""
    assert pqcache.sync(upstream / "current", tmp_path / "cache").added == 6
    assert not pqcache.sync(tmp_path / "cache").published
    write_day(lake, "2026-11-09", first=900_000, files=1, rows=20)
    pqcache.sync(upstream)
    for path in (upstream / "current" / "dt=2026-11-01").iterdir():  # a copy of a cache has other times
        os.utime(path, ns=(1, 1))
    report = pqcache.sync(tmp_path / "cache")
    assert (report.added, report.changed, report.removed, report.unchanged) == (1, 0, 0, 6)
    assert rows_of(tmp_path / "cache" / "current") == rows_of(upstream / "current")


def test_a_part_of_a_snapshot_is_a_source(lake: Path, upstream: Path, tmp_path: Path) -> None:
    pqcache.repartition(upstream, row_group_size="4KB")
    current = CacheDirectory(upstream).snapshot()
    first = sorted(path.name for path in (current.path / "dt=2026-11-01").glob("*.parquet"))[0]
    (tmp_path / "link").symlink_to(upstream / "current")
    for number, (path, below) in enumerate(
        [
            (upstream / "current", ""),
            (current.path, ""),
            (upstream / "current" / "dt=2026-11-01", "dt=2026-11-01"),
            (tmp_path / "link" / "dt=2026-11-01" / first, f"dt=2026-11-01/{first}"),
        ]
    ):
        with closing(open_source(f"file://{path}")) as source:
            assert isinstance(source, SnapshotSource)
            listed = {file.path: file.identity for file in source.list()}
            assert all(source.stat(name) == identity for name, identity in listed.items())
        pqcache.sync(path, tmp_path / f"cache-{number}")
        expected = current.path / below
        found = tmp_path / f"cache-{number}" / "current"
        held = sorted(entry.path for entry in CacheDirectory(found.parent).snapshot().manifest().files)
        assert held == ([first] if expected.is_file() else sorted(listed))
        if not below:
            assert rows_of(found) == rows_of(lake)


def test_what_is_no_part_of_a_snapshot(upstream: Path, tmp_path: Path) -> None:
    with closing(open_source(str(upstream / "current" / "dt=2020-01-01"))) as source:
        with pytest.raises(SourceNotFound, match="no such file or directory in the snapshot"):
            list(source.list())
        with pytest.raises(SourceNotFound):
            source.stat("x.parquet")
    with pytest.raises(UsageError, match="to read its current snapshot, name"):
        open_source(str(upstream))
    with pytest.raises(UsageError, match="has no such option"):
        open_source(str(upstream / "current"), {"endpoint": "x"})
    for path in (tmp_path, upstream / "snapshots", tmp_path / "nothing"):
        assert snapshot_at(str(path)) is None
        assert lease_at(str(path)) is None
    assert snapshot_at("s3://bucket/cache/snapshots/x") is None


def test_a_damaged_manifest_of_the_upstream_is_named(upstream: Path, tmp_path: Path) -> None:
    manifest = upstream / "current" / "_pqcache" / "files.arrow"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"files\.arrow"):
        pqcache.sync(upstream / "current", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_repartition_reads_one_snapshot(lake: Path, upstream: Path, tmp_path: Path) -> None:
    def publish(event: Event) -> None:
        if isinstance(event, Listed):
            write_day(lake, "2026-11-01", first=5_000_000, files=2, rows=20, seed=5)
            pqcache.sync(upstream)

    for number, source in enumerate((upstream, upstream / "current")):
        before = rows_of(upstream / "current")
        pqcache.repartition(source, tmp_path / f"out-{number}", row_group_size="1MB", on_event=publish)
        assert rows_of(tmp_path / f"out-{number}") == before


def test_what_is_damaged_upstream_is_not_copied(upstream: Path, tmp_path: Path) -> None:
    damaged = next((upstream / "current").rglob("*.parquet"))
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.chmod(0o644)
    damaged.write_bytes(content)
    with pytest.raises(SourceError, match=rf"{damaged.name}: differs from the manifest of its cache.*--repair"):
        pqcache.sync(upstream / "current", tmp_path / "cache")
    assert not (tmp_path / "cache" / "current").exists()
    pqcache.verify(upstream, deep=True, repair=True)
    pqcache.sync(upstream / "current", tmp_path / "cache")
    assert rows_of(tmp_path / "cache" / "current") == rows_of(upstream / "current")


def test_a_chain_of_caches_is_as_private_as_its_source(lake: Path, tmp_path: Path) -> None:
    """Also if the source becomes private later: what is held is not more readable."""
    for later in (False, True):
        first, second = tmp_path / f"first-{later}", tmp_path / f"second-{later}"
        lake.chmod(0o755 if later else 0o700)
        pqcache.sync(lake, first)
        pqcache.sync(first / "current", second)
        files = list((second / "current").rglob("*.parquet"))
        assert ({path.stat().st_mode & 0o077 for path in files} == {0}) is not later
        lake.chmod(0o700)
        pqcache.sync(first)
        pqcache.sync(second)
        assert {path.stat().st_mode & 0o077 for path in files} == {0}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A Delta table with partitions by a date and by text that looks like a number, and a column that no file has."""
    days = [dt.date(2026, 11, 1), dt.date(2026, 11, 2), None]
    rows = pa.table({"id": [1, 2, 3], "day": pa.array(days, pa.date32()), "code": ["7", "8", "9"]})
    write_deltalake(str(tmp_path / "table"), rows, partition_by=["day", "code"])
    DeltaTable(str(tmp_path / "table")).alter.add_columns([Field("added", PrimitiveType("integer"))])
    return tmp_path / "table"


def test_a_cache_of_a_table_keeps_its_types_as_a_source(table: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    pqcache.sync(table, first)
    pqcache.sync(first / "current", second)
    assert held(second) == judged(table)
    assert not pqcache.sync(second).published
    DeltaTable(str(table)).alter.add_columns([Field("later", PrimitiveType("string"))])
    pqcache.sync(first)
    assert pqcache.sync(second).published, "the schema alone has changed"
    assert held(second) == judged(table)
    damaged = next((second / "current").resolve().rglob("*.parquet"))
    damaged.chmod(0o644)
    os.truncate(damaged, 20)
    pqcache.verify(second, repair=True)
    assert held(second) == judged(table)
    pqcache.repartition(f"{first}/current", tmp_path / "target", row_group_size="1MB")
    assert len(held(first)) == sum(1 for _ in (tmp_path / "target").rglob("*.parquet"))


def test_a_cache_of_a_table_as_a_source_has_only_what_it_holds(table: Path, tmp_path: Path) -> None:
    first, second, day = tmp_path / "first", tmp_path / "second", tmp_path / "day"
    pqcache.sync(table, first, columns=["id", "day"])
    pqcache.sync(first / "current", second)
    assert held(second) == [{"code": r["code"], "day": r["day"], "id": r["id"]} for r in judged(table)]
    pqcache.sync(first / "current" / "day=2026-11-01", day)
    assert held(day) == [{"code": "7", "id": 1}]
    with pytest.raises(UsageError, match="no column 'added'"):
        pqcache.sync(first / "current", tmp_path / "third", columns=["id", "added"])
