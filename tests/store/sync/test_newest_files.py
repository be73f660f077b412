"""A cache of the newest partitions: nights on which they change, sources that lose them, shares, and free space."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import PqcacheError, SourceIncomplete, UsageError
from pqcache.store.config import read_config
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync import safety_checks
from tests.datasets import files_of, rows_of
from tests.faults.checks import check_snapshot
from tests.forked_commands import run_pqcache

KB = 1 << 10


def write_day(lake: Path, day: int, *, name: str = "part-0", rows: int = 20) -> Path:
    """Write one file of a partition ``dt=``; its rows are of that day alone. Return its path."""
    path = lake / f"dt={day}" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [day * 1000 + i for i in range(rows)]}), path)
    return path


def lake_of(tmp_path: Path, days: range) -> Path:
    for day in days:
        write_day(tmp_path / "lake", day)
    return tmp_path / "lake"


def days_of(directory: Path) -> list[int]:
    return sorted({int(path.split("/")[0].removeprefix("dt=")) for path in files_of(directory)})


def test_nights(tmp_path: Path) -> None:
    """A partition comes each night, and the oldest goes, which is no deletion; only the new one is fetched."""
    lake, cache = lake_of(tmp_path, range(8, 18)), tmp_path / "cache"
    pqcache.sync(lake, cache, newest=5, max_delete="0")
    for night in range(18, 24):
        new = write_day(lake, night)
        if night % 5 == 0:
            shutil.rmtree(lake / f"dt={night - 9}")  # the source removes old ones, too
        report = pqcache.sync(cache)
        assert (report.added, report.removed, report.newest) == (1, 1, 5)
        assert report.fetched_bytes == new.stat().st_size
        assert days_of(cache / "current") == list(range(night - 4, night + 1))
        assert report.rows == 100
    assert {row[0] // 1000 for row in rows_of(cache / "current")} == set(range(19, 24))
    assert not pqcache.sync(cache).published


def test_a_change_of_the_option_is_no_deletion(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, range(20)), tmp_path / "cache"
    pqcache.sync(lake, cache, max_delete="0")
    report = pqcache.sync(cache, newest=2)
    assert (report.removed, report.newest, report.newest_of) == (18, 2, 20)
    size = sum((lake / f"dt={day}/part-0.parquet").stat().st_size for day in range(16, 20))
    assert pqcache.sync(cache, newest=f"{size}B").added == 2
    assert days_of(cache / "current") == [16, 17, 18, 19]
    report = pqcache.sync(cache, newest="")
    assert (report.added, report.newest, report.newest_of) == (16, None, None)
    assert read_config(cache).newest is None
    with pytest.raises(SourceIncomplete, match="17 files of the 20"):
        pqcache.sync(cache, where="dt >= 17", newest=2)  # a new condition is, as before


def test_what_vanishes_is_a_deletion(tmp_path: Path) -> None:
    """Although older partitions take the place of those that are lost."""
    lake, cache = lake_of(tmp_path, range(20)), tmp_path / "cache"
    pqcache.sync(lake, cache, newest=6)
    held = {f"dt={day}": pq.read_table(lake / f"dt={day}/part-0.parquet", partitioning=None) for day in range(14, 20)}
    for day in range(16, 20):
        shutil.rmtree(lake / f"dt={day}")
    with pytest.raises(SourceIncomplete, match="4 files of the 6 in the snapshot would be dropped"):
        pqcache.sync(cache)
    assert check_snapshot(cache, [held]) == 0
    write_day(lake, 100)
    write_day(lake, 101)  # as many as are left out then do not make up for it
    with pytest.raises(SourceIncomplete, match="4 files of the 6"):
        pqcache.sync(cache)
    assert pqcache.sync(cache, force=True).published
    assert days_of(cache / "current") == [12, 13, 14, 15, 100, 101]


def test_rows_that_vanish_are_a_deletion_beside_those_left_out(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, range(6)), tmp_path / "cache"
    pqcache.sync(lake, cache, newest=4, max_delete="40%")
    for day in range(6, 8):
        write_day(lake, day)
    for day in (4, 5):
        write_day(lake, day, rows=1)  # 38 of 80 rows, while 40 are left out
    with pytest.raises(SourceIncomplete, match="38 rows of the 80"):
        pqcache.sync(cache)
    for day in (4, 5):
        write_day(lake, day, rows=10)
    assert pqcache.sync(cache).rows == 60


def test_a_partition_that_is_rewritten_as_it_is_left_out_is_no_deletion(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, range(3)), tmp_path / "cache"
    pqcache.sync(lake, cache, newest=2, max_delete="0")
    (lake / "dt=1/part-0.parquet").unlink()
    write_day(lake, 1, name="compacted")
    write_day(lake, 3)
    assert pqcache.sync(cache).removed == 1
    assert days_of(cache / "current") == [2, 3]


@pytest.mark.parametrize("how", ["marker", "settle"])
def test_what_waits_leaves_nothing_out_before_it_is_taken(how: str, tmp_path: Path) -> None:
    lake, cache, old = lake_of(tmp_path, range(6)), tmp_path / "cache", time.time() - 3600

    def finish(day: int) -> None:
        if how == "marker":
            (lake / f"dt={day}/_SUCCESS").touch()
        for path in (lake / f"dt={day}").glob("*.parquet"):
            os.utime(path, (old, old) if how == "settle" else None)

    for day in range(6):
        finish(day)
    pqcache.sync(lake, cache, newest=3, **({"marker": "_SUCCESS"} if how == "marker" else {"settle": "10m"}))
    write_day(lake, 6)
    assert not pqcache.sync(cache).published
    assert days_of(cache / "current") == [3, 4, 5]
    finish(6)
    assert pqcache.sync(cache).published
    assert days_of(cache / "current") == [4, 5, 6]
    write_day(lake, 5, rows=30)  # written again: it is kept as it was, counts, and nothing older comes
    (lake / "dt=5/_SUCCESS").unlink(missing_ok=True)
    assert not pqcache.sync(cache).published
    (lake / "dt=4/_SUCCESS").unlink(missing_ok=True)
    write_day(lake, 7)
    finish(7)
    assert pqcache.sync(cache).published
    assert days_of(cache / "current") == [5, 6, 7]  # also one whose marker is missing is left out


def test_the_listing_before_publishing_is_of_the_same_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes beyond the newest does not matter; a partition that comes meanwhile is taken."""
    lake, cache, listings = lake_of(tmp_path, range(6)), tmp_path / "cache", 0
    listed = LocalSource.list

    def changing(source: LocalSource) -> object:
        nonlocal listings
        if source.url != str(lake):  # the directory of a table's log, which is looked for
            return listed(source)
        listings += 1
        if listings == 2:
            shutil.rmtree(lake / "dt=0")
        if listings == 4:
            write_day(lake, 6)
        return listed(source)

    monkeypatch.setattr(LocalSource, "list", changing)
    assert pqcache.sync(lake, cache, newest=3).newest_of == 6
    assert listings == 2
    report = pqcache.sync(cache, newest=4)
    assert (listings, report.newest_of, days_of(cache / "current")) == (5, 6, [3, 4, 5, 6])


def test_shares_are_of_the_newest_of_all(tmp_path: Path) -> None:
    lake, caches = lake_of(tmp_path, range(20)), [tmp_path / "node0", tmp_path / "node1"]
    for node, cache in enumerate(caches):
        report = pqcache.sync(lake, cache, shard=f"{node}/2", newest=10, max_delete="0")
        assert (report.newest, report.newest_of) == (10, 20)
    for new in range(20, 22):
        write_day(lake, new)
        for cache in caches:
            pqcache.sync(cache)
        held = [days_of(cache / "current") for cache in caches]
        assert sorted(held[0] + held[1]) == list(range(new - 9, new + 1))
        assert all(len(days) > 3 for days in held)
    listings = {cache_listing(cache) for cache in caches}
    assert len(listings) == 1
    with pytest.raises(UsageError, match="--newest free: excludes --shard 0/2"):
        pqcache.sync(caches[0], newest="free")
    gone = [day for day in days_of(caches[0] / "current") if day > 14][:3]
    for day in gone:
        shutil.rmtree(lake / f"dt={day}")
    with pytest.raises(SourceIncomplete, match="gone at the source"):
        pqcache.sync(caches[0])


def cache_listing(cache: Path) -> str | None:
    return pqcache.Cache.open(cache).snapshot().manifest().listing


class Disk:
    """A disk on which there are this cache and ``others`` bytes."""

    def __init__(self, cache: Path, size: int) -> None:
        self.cache, self.size, self.others = cache, size, 0

    def usage(self, _: object) -> object:
        found = {}
        for path in self.cache.rglob("*"):
            if path.is_file() and "_pqcache" not in path.parts and path.suffix == ".parquet":
                found[path.stat().st_ino] = path.stat().st_size
        used = sum(found.values()) + self.others
        return SimpleNamespace(free=self.size - used)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk of 200 KB, which is as much as 20 files of `write_large`."""
    disk = Disk(tmp_path / "cache", 200 * KB)
    monkeypatch.setattr("shutil.disk_usage", disk.usage)
    monkeypatch.setattr(safety_checks, "_MIN_SPARE", 0)
    return disk


def write_large(lake: Path, day: int) -> None:
    path = lake / f"dt={day}" / "part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"x": [os.urandom(9 * KB)]}), path, use_dictionary=False, write_statistics=False)


def test_free_space_from_night_to_night(disk: Disk, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for day in range(30):
        write_large(lake, day)
    assert pqcache.sync(lake, cache, newest="free", max_delete="0").newest in range(12, 17)
    assert not pqcache.sync(cache).published
    oldest = days_of(cache / "current")[0]
    for night in range(30, 36):
        write_large(lake, night)
        report = pqcache.sync(cache)
        days = days_of(cache / "current")
        assert days == list(range(days[0], night + 1))
        assert days[0] >= oldest, "a partition that was left out was fetched again"
        assert report.added == 1
        oldest = days[0]
    before = len(days)
    disk.others = 10 * KB
    write_large(lake, 36)
    assert pqcache.sync(cache).newest in range(before - 5, before)  # less is free: more is left out
    disk.others = 10 * disk.size
    write_large(lake, 37)
    with pytest.raises(PqcacheError, match=r"of free space, has .*take less with --where, or"):
        pqcache.sync(cache)
    assert days_of(cache / "current")[-1] == 36


def test_the_command_line_says_what_is_left_out(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, range(12)), tmp_path / "cache"
    assert ", newest 4 of 12 partitions (" in run_pqcache("sync", lake, cache, "--newest", 4, "--dry-run").stdout
    assert run_pqcache("sync", lake, cache, "--newest", 4).stdout.endswith(", newest 4 of 12 partitions\n")
    assert run_pqcache("sync", cache).stdout.endswith(", newest 4 of 12 partitions\n")
    assert run_pqcache("verify", cache, "--source").returncode == 0
    for text, message in (
        ("0", "takes nothing"),
        ("10B", "the newest partition, dt=11, alone has"),
    ):
        result = run_pqcache("sync", cache, "--newest", text)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    (tmp_path / "flat").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "flat" / "one.parquet")
    result = run_pqcache("sync", tmp_path / "flat", tmp_path / "other", "--newest", 3)
    assert (result.returncode, "needs partitions" in result.stderr) == (2, True)
    assert not (tmp_path / "other").exists()
