"""What a sync does not take of its source is counted, and of a cache below it one snapshot is taken."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import pqcache
from pqcache.events import Event, Warned
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.tables.data_files import PassedOver, without_other_snapshots
from tests.datasets import write_day, write_shop
from tests.forked_commands import run_pqcache


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", rows=20)


def files_at(*paths: str) -> list[SourceFile]:
    return [SourceFile(path, Identity(100, 1)) for path in paths]


def test_what_is_not_taken_is_counted_by_its_reason(shop: Path, tmp_path: Path) -> None:
    (shop / "notes.txt").write_text("about")
    first = pqcache.sync(shop, tmp_path / "cache", where="dt > '2026-11-01'")
    assert first.passed_over == PassedOver(hidden=5, other=1, where=3)
    assert pqcache.sync(tmp_path / "cache").passed_over == first.passed_over, "with nothing to do"
    assert pqcache.sync(tmp_path / "cache", dry_run=True).passed_over == first.passed_over
    assert json.loads(json.dumps(first.to_dict()))["passed_over"] == {
        "hidden": 5, "other": 1, "where": 3, "waiting": 0, "links": 0,
    }  # fmt: skip
    write_day(shop, "2026-11-09", files=1, rows=10)
    said = run_pqcache("sync", tmp_path / "cache").stdout
    assert said.endswith("; not taken: 6 hidden, 1 not Parquet, 3 outside of --where\n")
    for path in [*shop.rglob("_*"), *shop.rglob("*.crc"), shop / "notes.txt"]:
        path.unlink()
    assert "not taken" not in run_pqcache("sync", shop, tmp_path / "all").stdout


def test_what_waits_is_counted_and_wrong_clocks_are_named(shop: Path, tmp_path: Path) -> None:
    cache, old = tmp_path / "cache", time.time() - 3600
    for path in shop.rglob("*.parquet"):
        os.utime(path, (old, old))
    assert pqcache.sync(shop, cache, settle="10m", marker="_SUCCESS").passed_over == PassedOver(hidden=5)
    (shop / "dt=2026-11-02" / "_SUCCESS").unlink()
    write_day(shop, "2026-11-02", files=1, rows=15)
    (shop / "dt=2026-11-02" / "_SUCCESS").unlink()
    ahead = shop / "dt=2026-11-01" / "part-00001.parquet"
    os.utime(ahead, (time.time() + 10**8,) * 2)
    events: list[Event] = []
    passed = pqcache.sync(cache, on_event=events.append).passed_over
    assert passed == PassedOver(hidden=4, waiting=2)
    (warning,) = [event.message for event in events if isinstance(event, Warned)]
    assert "1 file with times in the future, like dt=2026-11-01/part-00001.parquet: waiting for --settle" in warning
    assert "4 hidden, 2 waiting for --marker or --settle" in run_pqcache("sync", cache).stdout
    assert pqcache.sync(cache, settle=0, marker="").passed_over == PassedOver(hidden=4)


def test_a_cache_below_a_directory_counts_once(shop: Path, tmp_path: Path) -> None:
    above = tmp_path / "above"
    pqcache.sync(shop, above / "shop")
    write_day(shop, "2026-11-09", files=1, rows=10)
    pqcache.sync(above / "shop")
    assert pqcache.inspect(above, as_files=True).rows == 190
    assert pqcache.sync(above, tmp_path / "copy", as_files=True).rows == 190


def test_one_snapshot_of_each_cache_is_taken() -> None:
    other = files_at("a.parquet", "current/b.parquet", "x/snapshots/c.parquet")
    assert without_other_snapshots(other) == other, "no cache"
    assert without_other_snapshots([*other, *files_at("pqcache.toml")])[0].path == "a.parquet"
    paths = ["pqcache.toml", "snapshots/1/a.parquet", "snapshots/2/a.parquet", "arriving/3/a.parquet", "lock"]
    of_cache = files_at(*(f"x/{path}" for path in paths))
    assert [file.path for file in without_other_snapshots(of_cache)] == ["x/snapshots/2/a.parquet"]
    linked = [*of_cache, *files_at("x/current/a.parquet", "y/a.parquet")]
    assert [file.path for file in without_other_snapshots(linked)] == ["x/current/a.parquet", "y/a.parquet"]
