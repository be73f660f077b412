"""A source that moves while it is copied, the guards against a bad night, hostile names and planted links."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Event, Fetched, Listed
from pqcache.store import workdir
from pqcache.store.config import read_config
from pqcache.store.drivers import local
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync import command as sync_module
from pqcache.store.sync import safety_checks
from tests.datasets import shop_table, write_day
from tests.faults.checks import check_clean, check_whole, rows_at
from tests.remote import Remote, make_remote

if TYPE_CHECKING:
    from tests.conftest import Bucket

BIG = "dt=2026-11-02/part-00000.parquet"
STORES = [
    "path",
    pytest.param("hdfs", marks=pytest.mark.hdfs),
    pytest.param("webhdfs", marks=pytest.mark.hdfs),
    pytest.param("s3", marks=pytest.mark.s3),
]


def big(version: int, rows: int = 400_000) -> bytes:
    """Return a Parquet file of 8 bytes a row; equal row counts mean equal sizes."""
    sink = pa.BufferOutputStream()
    table = pa.table({"id": (np.arange(rows) * 7919 + version) << 20})
    pq.write_table(table, sink, compression="none", use_dictionary=False, row_group_size=50_000)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@dataclass
class Watched:
    """A source that counts what is read of each file and calls ``at(path, offset)`` before and after each piece."""

    source: Any
    at: Callable[[str, int], None]
    read_bytes: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.source, name)
        return self._filling if name == "read_into" else found  # only where the source can do that

    def _filling(self, buffer: memoryview, path: str, offset: int, length: int, *more: str) -> Iterator[int]:
        self.at(path, offset)
        for count in self.source.read_into(buffer, path, offset, length, *more):
            self.read_bytes[path] = self.read_bytes.get(path, 0) + count
            offset += count
            yield count
            self.at(path, offset)

    def read(self, path: str, offset: int, length: int, *more: str) -> Iterator[bytes]:
        self.at(path, offset)
        for chunk in self.source.read(path, offset, length, *more):
            self.read_bytes[path] = self.read_bytes.get(path, 0) + len(chunk)
            offset += len(chunk)
            yield chunk
            self.at(path, offset)


class Watch:
    """Puts a Watched in front of every source that a sync opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: Callable[[str, int], None] = lambda path, offset: None
        self.read_bytes: dict[str, int] = {}
        real = sync_module.open_source

        def opened(*arguments: Any) -> Any:
            return Watched(real(*arguments), lambda path, offset: self.at(path, offset), self.read_bytes)

        monkeypatch.setattr(sync_module, "open_source", opened)
        monkeypatch.setattr(local, "_CHUNK", 1 << 18)

    def once(self, action: Callable[[], None], path: str = BIG, after: int = 1 << 18) -> None:
        """Do something when the first so many bytes of a file have come, once."""
        done: list[bool] = []

        def at(name: str, offset: int) -> None:
            if name == path and offset >= after and not done:
                done.append(True)
                action()

        self.at = at


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture(params=STORES)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    yield from make_remote(request.param, request, tmp_path)


def put_all(made: Path, remote: Remote, content: bytes) -> None:
    """Make a dataset of one big file and three small ones, locally and at the store."""
    write_day(made, "2026-11-01", files=2, rows=50)
    write_day(made, "2026-11-03", files=1, rows=50, first=1000)
    (made / BIG).parent.mkdir(parents=True, exist_ok=True)
    (made / BIG).write_bytes(content)
    remote.upload(made)


def test_a_file_overwritten_while_it_is_copied_is_fetched_again(remote: Remote, watch: Watch, tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    for number, other in enumerate((big(2), big(3, 300_000), big(4, 500_000))):  # as large, smaller, larger
        put_all(made, remote, big(1))
        shutil.rmtree(cache, ignore_errors=True)
        watch.read_bytes.clear()
        watch.once(lambda other=other: remote.put(BIG, other))  # type: ignore[misc]
        pqcache.sync(remote.url, cache, retries=2)
        (made / BIG).write_bytes(other)
        assert check_whole(cache, [rows_at(made)]) == 0, f"version {number}"
        check_clean(cache)
        assert watch.read_bytes[BIG] > len(other)
        assert not pqcache.sync(cache).published


def test_a_file_that_vanishes_while_it_is_copied_is_named(remote: Remote, watch: Watch, tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    put_all(made, remote, big(1))
    pqcache.sync(remote.url, cache)
    old = rows_at(made)
    remote.put(BIG, big(2))
    watch.once(lambda: remote.delete(BIG))
    with pytest.raises(pqcache.SourceIncomplete, match=BIG) as error:
        pqcache.sync(cache)
    assert error.value.exit_code == 3
    assert check_whole(cache, [old]) == 0
    watch.at = lambda path, offset: None
    (made / BIG).unlink()
    pqcache.sync(cache)
    assert check_whole(cache, [rows_at(made)]) == 0
    check_clean(cache)


def test_a_file_that_keeps_changing_is_named(remote: Remote, watch: Watch, tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    put_all(made, remote, big(1))
    pqcache.sync(remote.url, cache)
    old = rows_at(made)
    remote.put(BIG, big(2))
    versions = iter(range(3, 100))
    changed = [False]  # in this pass over the file

    def again(path: str, offset: int) -> None:
        if path == BIG and offset == 0:
            changed[0] = False
        elif path == BIG and not changed[0]:
            changed[0] = True
            remote.put(BIG, big(next(versions)))

    watch.at = again
    with pytest.raises(pqcache.SourceIncomplete, match=f"{BIG}.*keeps changing") as error:
        pqcache.sync(cache)
    assert error.value.exit_code == 3
    assert check_whole(cache, [old]) == 0
    watch.at = lambda path, offset: None
    (made / BIG).write_bytes(big(next(versions) - 1))
    remote.put(BIG, (made / BIG).read_bytes())
    pqcache.sync(cache)
    assert check_whole(cache, [rows_at(made)]) == 0


def test_an_interrupted_download_goes_on_where_it_stopped(remote: Remote, watch: Watch, tmp_path: Path) -> None:
    """In another run, as long as the file is the same; from the start when it is not."""
    made, cache = tmp_path / "made", tmp_path / "cache"
    content = big(1)
    put_all(made, remote, content)

    def lost() -> None:
        raise pqcache.SourceDenied("", "the session has expired")

    def interrupt() -> int:
        watch.read_bytes.clear()
        watch.once(lost, after=1_500_000)
        with pytest.raises(pqcache.SourceDenied):
            pqcache.sync(remote.url, cache, jobs=1)
        watch.at = lambda path, offset: None
        watch.read_bytes.clear()
        return max(path.stat().st_size for path in (cache / "tmp").rglob("*.part"))

    held = interrupt()
    assert 1_000_000 <= held < len(content)
    pqcache.sync(cache)
    assert watch.read_bytes.get(BIG, 0) == len(content) - held, "it did not go on where it stopped"
    assert set(watch.read_bytes) <= {BIG, "dt=2026-11-03/part-00000.parquet"}, "whole files were fetched again"
    assert check_whole(cache, [rows_at(made)]) == 0
    check_clean(cache)

    remote.put(BIG, big(2))
    interrupt()
    (made / BIG).write_bytes(big(3))
    remote.put(BIG, big(3))
    pqcache.sync(cache)
    assert watch.read_bytes[BIG] == len(content), "it went on with another version"
    assert check_whole(cache, [rows_at(made)]) == 0
    check_clean(cache)


def test_the_beginning_of_a_download_is_not_trusted_after_a_restart(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had not been fsynced when the machine went down may be zeros."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    (lake / BIG).parent.mkdir(parents=True)
    (lake / BIG).write_bytes(big(1))

    def lost() -> None:
        raise pqcache.SourceDenied("", "no")

    watch.once(lost, after=1_000_000)
    with pytest.raises(pqcache.SourceDenied):
        pqcache.sync(str(lake), cache)
    (part,) = (cache / "tmp").rglob("*.part")
    part.write_bytes(bytes(part.stat().st_size))
    monkeypatch.setattr(workdir, "_boot_id", lambda: "another0")
    watch.read_bytes.clear()
    pqcache.sync(cache)
    assert watch.read_bytes[BIG] == len(big(1))
    assert check_whole(cache, [rows_at(lake)]) == 0


Change = Callable[[Path], None]


def grow(path: Path) -> None:
    path.write_bytes(big(5, 500_000))


def shrink(path: Path) -> None:
    path.write_bytes(big(6, 100))


def replace(path: Path) -> None:
    other = path.with_name(".new")
    other.write_bytes(big(7))
    os.replace(other, path)


def same_time(path: Path) -> None:
    """Overwritten in place with as many bytes; the clock moves on, as it does on any store."""
    before = path.stat().st_mtime_ns
    path.write_bytes(big(8))
    if path.stat().st_mtime_ns == before:
        os.utime(path, ns=(before, before + 1))


@pytest.mark.parametrize("after", [0, 1 << 18, 3_000_000, None])
@pytest.mark.parametrize("change", [grow, shrink, replace, same_time], ids=lambda change: change.__name__)
def test_a_local_file_changes_at_any_moment(change: Change, after: int | None, watch: Watch, tmp_path: Path) -> None:
    """Before its copy begins (0), early, late, or after it arrived (None): never a mixture of two versions."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write_day(lake, "2026-11-01", files=2, rows=50)
    (lake / BIG).parent.mkdir()
    (lake / BIG).write_bytes(big(1))
    first = rows_at(lake)

    def on_event(event: Event) -> None:
        early, late = isinstance(event, Listed), isinstance(event, Fetched) and event.path == BIG
        if (after == 0 and early) or (after is None and late):
            change(lake / BIG)

    if after:
        watch.once(lambda: change(lake / BIG), after=after)
    pqcache.sync(str(lake), cache, on_event=on_event, retries=1)
    versions = [first] if after is None else [rows_at(lake)]
    assert check_whole(cache, versions) == 0
    pqcache.sync(cache)
    assert check_whole(cache, [rows_at(lake)]) == 0
    check_clean(cache)


@pytest.mark.parametrize("row_group_size", [None, 64 << 10])
def test_a_partition_that_vanishes_while_it_is_copied(row_group_size: int | None, watch: Watch, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write_day(lake, "2026-11-01", files=2, rows=50)
    pqcache.sync(str(lake), cache, row_group_size=row_group_size)
    old = rows_at(lake)
    (lake / BIG).parent.mkdir()
    (lake / BIG).write_bytes(big(1))
    watch.once(lambda: shutil.rmtree((lake / BIG).parent))
    with pytest.raises(pqcache.SourceIncomplete, match=BIG):
        pqcache.sync(cache)
    assert check_whole(cache, [old]) == 0
    assert not pqcache.sync(cache).published
    check_clean(cache)


def test_the_checks_see_a_mixture(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the question after the copy, the overwrite in the middle would be published: the checks see it."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    (lake / BIG).parent.mkdir(parents=True)
    (lake / BIG).write_bytes(big(1))
    identity = LocalSource(str(lake), {}).stat(BIG)
    monkeypatch.setattr(LocalSource, "stat", lambda self, path: identity)
    watch.once(lambda: same_time(lake / BIG), after=1_500_000)
    before = rows_at(lake)
    pqcache.sync(str(lake), cache)
    with pytest.raises(AssertionError, match="neither"):
        check_whole(cache, [before, rows_at(lake)])


# Guards


def lake_of(tmp_path: Path, days: int = 4, files: int = 2) -> tuple[Path, Path]:
    lake = tmp_path / "lake"
    for day in range(1, days + 1):
        write_day(lake, f"2026-11-{day:02d}", files=files, rows=20, first=day * 1000)
    return lake, tmp_path / "cache"


def rewrite_day(lake: Path, day: str, *, files: int = 2, seed: int = 9) -> None:
    """Overwrite a partition as Spark does: other file names, the marker last."""
    directory = lake / f"dt={day}"
    shutil.rmtree(directory)
    directory.mkdir()
    for number in range(files):
        pq.write_table(shop_table(number * 100 + 50_000, 20, seed), directory / f"part-{number}-{seed}.snappy.parquet")
    (directory / "_SUCCESS").touch()


def test_marker(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    (lake / "dt=2026-11-04" / "_SUCCESS").unlink()
    without = {name: rows for name, rows in rows_at(lake).items() if name != "dt=2026-11-04"}
    report = pqcache.sync(str(lake), cache, marker="_SUCCESS")
    assert report.added == 6
    assert check_whole(cache, [without]) == 0
    (lake / "dt=2026-11-04" / "_SUCCESS").touch()
    pqcache.sync(cache)
    held = rows_at(lake)
    assert check_whole(cache, [held]) == 0

    # the nightly job writes a partition anew: it is held as it was until the marker is back
    (lake / "dt=2026-11-02" / "_SUCCESS").unlink()
    (lake / "dt=2026-11-02" / "part-00000.parquet").unlink()
    pq.write_table(shop_table(9, 9), lake / "dt=2026-11-02" / "part-00001.parquet")
    assert not pqcache.sync(cache).published
    assert check_whole(cache, [held]) == 0
    (lake / "dt=2026-11-02" / "part-00001.parquet").unlink()
    (lake / "dt=2026-11-02" / "_temporary" / "0").mkdir(parents=True)
    pq.write_table(shop_table(9, 9), lake / "dt=2026-11-02" / "_temporary" / "0" / "part-00000.parquet")
    assert not pqcache.sync(cache).published, "a partition whose writer is at work has gone"
    assert check_whole(cache, [held]) == 0
    rewrite_day(lake, "2026-11-02")
    assert pqcache.sync(cache).published
    assert check_whole(cache, [rows_at(lake)]) == 0

    for marker in lake.rglob("_SUCCESS"):
        marker.unlink()
    with pytest.raises(pqcache.SourceIncomplete, match="has to wait") as error:
        pqcache.sync(str(lake), tmp_path / "other", marker="_SUCCESS")
    assert error.value.exit_code == 3
    assert pqcache.sync(cache, marker="").snapshot
    assert read_config(cache).marker is None


def test_marker_above_the_files(tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for hour in ("00", "01"):
        write_day(lake / "dt=2026-11-01", f"h{hour}", files=1, rows=5)
        (lake / "dt=2026-11-01" / f"dt=h{hour}" / "_SUCCESS").unlink()
    (lake / "_SUCCESS").touch()  # of a job long ago: says nothing about partitions
    with pytest.raises(pqcache.SourceIncomplete):
        pqcache.sync(str(lake), cache, marker="_SUCCESS")
    (lake / "dt=2026-11-01" / "_SUCCESS").touch()
    assert pqcache.sync(str(lake), cache, marker="_SUCCESS").added == 2


@pytest.mark.parametrize("row_group_size", [None, 16 << 10])
def test_settle(row_group_size: int | None, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    old = time.time() - 3600
    for path in lake.rglob("*.parquet"):
        os.utime(path, (old, old))
    young = lake / "dt=2026-11-04" / "part-00001.parquet"
    young.touch()
    settled = {**rows_at(lake), "dt=2026-11-04": shop_table(4000, 20).replace_schema_metadata()}
    report = pqcache.sync(str(lake), cache, settle=600, row_group_size=row_group_size)
    assert report.added == 7
    assert check_whole(cache, [settled]) == 0
    os.utime(young, (old, old))
    assert pqcache.sync(cache).added == 1
    held = rows_at(lake)
    assert check_whole(cache, [held]) == 0

    pq.write_table(shop_table(77, 7), lake / "dt=2026-11-01" / "part-00000.parquet")  # young: as it was before
    assert not pqcache.sync(cache).published
    assert check_whole(cache, [held]) == 0
    rewrite_day(lake, "2026-11-03")  # gone under its old names, too young under its new ones
    pqcache.sync(cache)
    assert check_whole(cache, [held]) == 0, "a partition that is being overwritten has gone"
    assert pqcache.sync(cache, settle=0.0).published
    assert check_whole(cache, [rows_at(lake)]) == 0


def test_settle_takes_nothing_from_a_young_source(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    with pytest.raises(pqcache.SourceIncomplete, match="has to wait"):
        pqcache.sync(str(lake), cache, settle=600)


def test_max_delete(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache)
    everything = rows_at(lake)
    shutil.copytree(lake, tmp_path / "backup")
    shutil.rmtree(lake / "dt=2026-11-01")
    shutil.rmtree(lake / "dt=2026-11-02")
    (lake / "dt=2026-11-03" / "part-00000.parquet").unlink()  # 5 of 8
    for limit, code in ((None, 3), ("62%", 3), ("4", 3), ("0", 3), ("0%", 3)):
        with pytest.raises(pqcache.SourceIncomplete, match=r"5 files of the 8.*--force") as error:
            pqcache.sync(cache, max_delete=limit)
        assert error.value.exit_code == code
        assert check_whole(cache, [everything]) == 0
        assert read_config(cache).max_delete == "50%", "a refused run is remembered"
    for bad in ("-1", "101%", "half", "5 files", ""):
        with pytest.raises(pqcache.UsageError):
            safety_checks.parse_max_delete(bad)
    assert pqcache.sync(cache, force=True).removed == 5
    assert check_whole(cache, [rows_at(lake)]) == 0
    shutil.rmtree(lake)
    shutil.copytree(tmp_path / "backup", lake)
    pqcache.sync(cache)
    shutil.rmtree(lake / "dt=2026-11-01")
    shutil.rmtree(lake / "dt=2026-11-02")  # 4 of 8: not more than half
    assert pqcache.sync(cache).removed == 4
    assert check_whole(cache, [rows_at(lake)]) == 0


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_touched_file_does_not_switch_the_guard_off(tmp_path: Path, partitioned: bool) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    directory = lake / "dt=2026-11-01" if partitioned else lake
    directory.mkdir(parents=True)
    for number in range(10):
        pq.write_table(pa.table({"n": [number]}), directory / f"{number}.parquet")
    pqcache.sync(str(lake), cache)
    for number in range(1, 10):
        (directory / f"{number}.parquet").unlink()
    pq.write_table(pa.table({"n": [100, 101]}), directory / "0.parquet")
    with pytest.raises(pqcache.SourceIncomplete, match="9 files of the 10"):
        pqcache.sync(cache, max_delete="10%")
    pq.write_table(pa.table({"n": [102]}), directory / "new.parquet")
    with pytest.raises(pqcache.SourceIncomplete, match=f"{9 if partitioned else 8} files of the 10"):
        pqcache.sync(cache, max_delete="10%")


def test_a_nightly_overwrite_under_new_names_is_no_loss(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache, max_delete="0")
    for day in range(1, 5):
        rewrite_day(lake, f"2026-11-{day:02d}", files=2)
    report = pqcache.sync(cache)
    assert (report.added, report.removed) == (8, 8)
    assert check_whole(cache, [rows_at(lake)]) == 0
    rewrite_day(lake, "2026-11-04", files=1, seed=10)  # compacted: fewer files, nothing lost
    assert pqcache.sync(cache).removed == 2
    assert check_whole(cache, [rows_at(lake)]) == 0
    for path in (lake / "dt=2026-11-04").glob("*.parquet"):
        path.unlink()
    with pytest.raises(pqcache.SourceIncomplete, match="1 file of the 7"):
        pqcache.sync(cache)


def test_snapshots_are_collected_after_the_clock_stepped_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names sort by time, but the time of one machine is not always the time."""
    lake, cache = lake_of(tmp_path)
    real = pqcache.Cache.new_snapshot_id
    hours = iter(range(100))

    def earlier(self: pqcache.Cache) -> str:
        return real(self, datetime.now(timezone.utc) - timedelta(hours=next(hours)))

    monkeypatch.setattr(pqcache.Cache, "new_snapshot_id", earlier)
    for number in range(5):
        rewrite_day(lake, "2026-11-01", seed=number + 20)
        pqcache.sync(str(lake), cache, keep=2)
    assert len(list((cache / "snapshots").iterdir())) == 2
    assert check_whole(cache, [rows_at(lake)]) == 0


def test_another_source_by_mistake_is_refused_and_forgotten(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache)
    write_day(tmp_path / "wrong", "2031-01-01", files=1, rows=3)
    with pytest.raises(pqcache.SourceIncomplete):
        pqcache.sync(str(tmp_path / "wrong"), cache)
    assert read_config(cache).source == str(lake)
    assert not pqcache.sync(cache).published


def test_a_local_listing_survives_what_it_does_not_need(tmp_path: Path) -> None:
    """Locks that editors leave (dangling links), pipes and sockets beside the data are no reason to stop."""
    lake, cache = lake_of(tmp_path)
    (lake / ".#notes").symlink_to("user@host.1234:1690000000")
    (lake / "dt=2026-11-01" / "_latest").symlink_to("gone")
    os.mkfifo(lake / "dt=2026-11-01" / ".pipe")
    pqcache.sync(str(lake), cache)
    (lake / "dt=2026-11-02" / "part-00009.parquet").symlink_to("gone")
    with pytest.raises(pqcache.PqcacheError, match=r"part-00009\.parquet"):
        pqcache.sync(cache)


def test_a_file_that_vanishes_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing during which something vanished is no listing: it is made again, or the file is named."""
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache)
    real, done = LocalSource._identity, []

    def identity(self: LocalSource, path: str, status: os.stat_result) -> object:
        if not done:
            done.append(True)
            for victim in (lake / "dt=2026-11-01").glob("*.parquet"):
                victim.unlink()
        return real(self, path, status)

    monkeypatch.setattr(LocalSource, "_identity", identity)
    complaint = ".parquet"
    try:
        pqcache.sync(cache)
    except pqcache.PqcacheError as error:
        complaint = str(error)
        pqcache.sync(cache)
    assert ".parquet" in complaint
    assert check_whole(cache, [rows_at(lake)]) == 0


# Hostile names


def state_of(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return all there is to say about a tree, to show that nothing in it was touched."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else os.path.islink(path)
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, content)
    return found


HOSTILE = [
    "../evil.parquet",
    "dt=1/../../evil.parquet",
    "dt=1/./evil.parquet",
    "/evil.parquet",
    "dt=1//evil.parquet",
    "dt=1/ev\nil.parquet",
    "dt=1/ev\ril.parquet",
    "dt=1/ev\til.parquet",
    "dt=1/ev\x01il.parquet",
    "dt=1/ev\x7fil.parquet",
    "dt=1/\x1b[31mevil.parquet",
    "dt=1/ok.parquet/evil.parquet",
    f"dt=1/{'e' * 300}.parquet",
    "_hidden/../../evil.parquet",
]


@pytest.mark.s3
def test_hostile_keys_in_a_real_bucket(s3_bucket: Bucket, tmp_path: Path) -> None:
    """Each is refused by name, on one line, and nothing is written or published."""
    house = tmp_path / "house"
    cache = house / "cache"
    content = big(1, 10)
    prefix = "wh/shop/"
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"{prefix}dt=1/ok.parquet", Body=content)
    pqcache.sync(f"{s3_bucket.url}/wh/shop", cache)
    before = state_of(house / "cache" / "snapshots")
    for number, key in enumerate(HOSTILE):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=prefix + key, Body=content)
        with pytest.raises(pqcache.SourceError) as error:
            pqcache.sync(f"{s3_bucket.url}/wh/shop", house / "new" if number % 2 else cache)
        message = str(error.value)
        assert message.isprintable(), f"{message!r}"
        assert "rename" in message
        assert any(name in message for name in ("il.parquet", "eee", "ok.parquet"))
        s3_bucket.client.delete_object(Bucket=s3_bucket.name, Key=prefix + key)
        assert state_of(house / "cache" / "snapshots") == before
        assert {path.name for path in house.iterdir()} <= {"cache", "new"}
        assert not (house / "new" / "current").exists()
    for key in ("dt=2026%2F11/a b.parquet", "dt=1/ü'\"$(touch x);*?[a].parquet"):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=prefix + key, Body=content)
    report = pqcache.sync(cache)
    assert report.files == 3
    assert (cache / "current" / "dt=2026%2F11" / "a b.parquet").read_bytes() == content
    assert not pqcache.sync(cache).published


@pytest.mark.hdfs
def test_hostile_names_on_hdfs(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for remote in make_remote("webhdfs", request, tmp_path):
        remote.put("dt=1/ok.parquet", big(1, 10))
        cache = tmp_path / "cache"
        pqcache.sync(remote.url, cache)
        for name in ("dt=1/ev\nil.parquet", "dt=1/ev\x1bil.parquet"):
            remote.put(name, big(1, 10))
            with pytest.raises(pqcache.SourceError, match="control character") as error:
                pqcache.sync(cache)
            assert str(error.value).isprintable()
            remote.delete(name)
        remote.put("dt=2026%2F11/a b.parquet", big(2, 10))
        assert pqcache.sync(cache).files == 2
        assert (cache / "current" / "dt=2026%2F11" / "a b.parquet").exists()


def test_a_local_name_that_is_no_text(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache)
    old = rows_at(lake)
    odd = os.fsencode(lake / "dt=2026-11-01") + b"/ev\xffil.parquet"
    with open(odd, "wb") as file:
        file.write(big(1, 10))
    with pytest.raises(pqcache.SourceError, match=r"il\.parquet") as error:
        pqcache.sync(cache)
    assert str(error.value).encode()
    assert check_whole(cache, [old]) == 0


@pytest.mark.parametrize(
    "names",
    [
        ("dt=1/Part.parquet", "dt=1/part.parquet"),
        ("r=US/a.parquet", "r=us/b.parquet"),
        ("R=1/a.parquet", "r=1/b.parquet"),
    ],
    ids=["files", "values", "columns"],
)
def test_names_that_differ_only_in_case(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are taken where the file system tells them apart; refused by name where it does not."""
    lake = tmp_path / "lake"
    for number, name in enumerate(names):
        (lake / name).parent.mkdir(parents=True, exist_ok=True)
        (lake / name).write_bytes(big(number, 10))
    if sorted(os.listdir(lake)) == sorted({name.partition("/")[0] for name in names}):
        pqcache.sync(str(lake), tmp_path / "cache")
        assert check_whole(tmp_path / "cache", [rows_at(lake)]) == 0
    monkeypatch.setattr(safety_checks, "folds_case", lambda directory: True)
    with pytest.raises(pqcache.SourceError, match="case"):
        pqcache.sync(str(lake), tmp_path / "other")
    assert not (tmp_path / "other" / "current").exists()


# Links planted in the cache


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory that no sync may touch; checked at the end."""
    directory = tmp_path / "outside"
    shutil.copytree(lake_of(tmp_path)[0], directory / "lake")
    (directory / "precious").write_bytes(b"precious")
    before = state_of(directory)
    yield directory
    assert state_of(directory) == before, "something outside of the cache was touched"


@pytest.mark.parametrize("name", ["tmp", "snapshots", "lock", "history.jsonl.zst", "pqcache.toml"])
def test_a_part_of_the_cache_that_is_a_link_is_refused(name: str, outside: Path, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
    moved = tmp_path / "moved"
    (cache / name).rename(moved)
    places = {"tmp": outside, "snapshots": outside, "pqcache.toml": moved}
    (cache / name).symlink_to(places.get(name, outside / "precious"))
    for run in (lambda: pqcache.sync(cache), lambda: pqcache.gc(cache, keep=1), lambda: pqcache.repartition(cache)):
        with pytest.raises(pqcache.CacheError, match=f"{name}: is a symbolic link"):
            run()


def test_links_in_tmp_are_removed_and_not_followed(outside: Path, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
    source = LocalSource(str(lake), {})
    keys = [workdir.file_key(str(lake), file) for file in source.list() if "2026-11-01" in file.path]
    boot = f"{workdir._boot_id()}-1-00000000"
    for place in (outside / "run" / "fetch", outside / "fetch"):
        place.mkdir(parents=True)
        for key in keys:
            (place / key).write_bytes(b"not it")
            (place / f"{key}.part").write_bytes(b"")
    state = state_of(outside)
    (cache / "tmp" / boot).symlink_to(outside / "run")
    second = cache / "tmp" / boot.replace("-1-", "-2-")
    second.mkdir()
    (second / "fetch").symlink_to(outside / "fetch")
    third = cache / "tmp" / boot.replace("-1-", "-3-")
    (third / "fetch").mkdir(parents=True)
    for key in keys:
        (third / "fetch" / key).symlink_to(outside / "precious")
        (third / "fetch" / f"{key}.part").symlink_to(outside / "precious")
    (cache / "tmp" / "stray").symlink_to(outside)
    (cache / "tmp" / "file").symlink_to(outside / "precious")
    try:
        pqcache.sync(cache)
        assert check_whole(cache, [rows_at(lake)]) == 0
        check_clean(cache)
        assert state_of(outside) == state, "a link in tmp/ was followed"
    finally:
        shutil.rmtree(outside / "run")
        shutil.rmtree(outside / "fetch")


@pytest.mark.parametrize("what", ["file", "directory", "snapshot", "metadata"])
def test_links_in_the_current_snapshot_are_not_taken_for_data(what: str, outside: Path, tmp_path: Path) -> None:
    """What was replaced by a link is fetched again; what the link points at is neither published nor touched."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache, keep=1)
    snapshot = (cache / "current").resolve()
    victim = {
        "file": snapshot / "dt=2026-11-02" / "part-00000.parquet",
        "directory": snapshot / "dt=2026-11-02",
        "snapshot": snapshot,
        "metadata": snapshot / "_pqcache",
    }[what]
    copy = outside / "copy"
    (shutil.copytree if victim.is_dir() else shutil.copy2)(victim, copy)
    state = state_of(outside)
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    victim.symlink_to(copy)
    try:
        pqcache.sync(cache)
        write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
        pqcache.sync(cache)
        now = (cache / "current").resolve()
        assert cache in now.parents, "the current snapshot is outside of the cache"
        assert check_whole(cache, [rows_at(lake)]) == 0
        inodes = {path.stat().st_ino for path in copy.rglob("*.parquet")} | {copy.stat().st_ino}
        assert not inodes & {path.stat().st_ino for path in now.rglob("*.parquet")}, "a file from outside was published"
        check_clean(cache)
    except pqcache.CacheError:
        if what not in ("snapshot", "metadata"):  # where refusing is as good
            raise
    finally:
        assert state_of(outside) == state
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


ELSEWHERE = ["{outside}/lake", "snapshots/../../outside/lake", "/", "snapshots/", "gone", "current"]


@pytest.mark.parametrize("target", ELSEWHERE)
def test_a_current_that_points_elsewhere_is_not_followed(target: str, outside: Path, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    (cache / "current").unlink()
    (cache / "current").symlink_to(target.format(outside=outside))
    with pytest.raises(pqcache.CacheError, match="current"):
        pqcache.sync(cache)
    (cache / "current").unlink()
    pqcache.sync(cache)
    assert check_whole(cache, [rows_at(lake)]) == 0
