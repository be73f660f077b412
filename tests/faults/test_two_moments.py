"""A snapshot is its source at one moment: what changes between the listing and the last download is seen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import cli
from pqcache.events import Event, Fetched, Warned
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync import incremental
from tests.datasets import shop_table, write_day
from tests.faults.checks import check_clean, check_snapshot, rows_at
from tests.remote import Remote, make_remote

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

STORES = ["path", pytest.param("hdfs", marks=pytest.mark.hdfs), pytest.param("webhdfs", marks=pytest.mark.hdfs)]
S3 = pytest.param("s3", marks=pytest.mark.s3)
DAY = "dt=2026-11-02"


@pytest.fixture
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    yield from make_remote(request.param, request, tmp_path)


class Once:
    """An ``on_event`` that acts when the first file whose path begins with ``path`` was downloaded."""

    def __init__(self, action: Callable[[], object], path: str = DAY) -> None:
        self.action = action
        self.path = path
        self.warnings: list[str] = []
        self.acted = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.warnings.append(event.message)
        if isinstance(event, Fetched) and event.path.startswith(self.path) and not self.acted:
            self.acted = True
            self.action()


def made_lake(root: Path, days: int = 3) -> Path:
    for day in range(1, days + 1):
        write_day(root, f"2026-11-{day:02d}", files=4, rows=5, first=day * 1000)
    return root


def put_file(made: Path, remote: Remote, path: str, first: int) -> None:
    (made / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(shop_table(first, 5), made / path)
    remote.put(path, (made / path).read_bytes())


HOW: dict[str, dict[str, Any]] = {"plain": {}, "rewritten": {"row_group_size": 8 << 10}, "where": {"where": "id >= 0"}}


@pytest.mark.parametrize(
    ("remote", "how", "names"),
    [
        pytest.param("path", "rewritten", "same", id="path"),  # what is rewritten is downloaded as what is copied
        pytest.param("hdfs", "where", "other", id="hdfs", marks=pytest.mark.hdfs),
        pytest.param("webhdfs", "plain", "same", id="webhdfs", marks=pytest.mark.hdfs),
    ],
    indirect=["remote"],
)
def test_a_partition_swapped_by_rename(remote: Remote, how: str, names: str, tmp_path: Path) -> None:
    """The rows of either partition and never of both; the new one, as the run goes on."""
    made, cache = made_lake(tmp_path / "made"), tmp_path / "cache"
    remote.upload(made)
    for number in range(4):
        name = f"part-{number:05d}" if names == "same" else f"new-{number}"
        put_file(made, remote, f".swap/{name}.parquet", 7000 + number * 5)

    def swap() -> None:
        remote.rename(DAY, ".old")
        remote.rename(".swap", DAY)

    once = Once(swap)
    pqcache.sync(remote.url, cache, jobs=1, on_event=once, **HOW[how])
    assert once.acted
    (made / DAY).rename(made / ".old")
    (made / ".swap").rename(made / DAY)
    assert check_snapshot(cache, [rows_at(made)]) == 0
    assert once.warnings == [
        f"{remote.url.removeprefix('file://')} changed while it was copied; going on from a new listing"
    ]
    check_clean(cache)
    assert not pqcache.sync(cache).published


@pytest.mark.parametrize("remote", [*STORES[:2], S3], indirect=True)
def test_a_kept_file_that_changes_beside_a_new_one(remote: Remote, tmp_path: Path) -> None:
    made, cache = made_lake(tmp_path / "made"), tmp_path / "cache"
    remote.upload(made)
    pqcache.sync(remote.url, cache)
    put_file(made, remote, f"{DAY}/new.parquet", 8000)
    once = Once(lambda: put_file(made, remote, "dt=2026-11-01/part-00000.parquet", 9000))
    report = pqcache.sync(cache, on_event=once)
    assert once.acted
    assert (report.added, report.changed) == (1, 1)
    assert check_snapshot(cache, [rows_at(made)]) == 0
    assert not pqcache.sync(cache).published


def test_a_file_moved_from_an_unlisted_directory_to_a_listed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing has passed the first day and not the second, from which the file comes."""
    lake, cache = made_lake(tmp_path / "lake"), tmp_path / "cache"
    pqcache.sync(lake, cache)
    real, moved = LocalSource.list, []

    def torn(self: LocalSource) -> Iterator[Any]:
        before = list(real(self))
        if not moved:
            moved.append(True)
            (lake / DAY / "part-00003.parquet").rename(lake / "dt=2026-11-01" / "moved.parquet")
        yield from (file for file in before if file.path.startswith("dt=2026-11-01/"))
        yield from (file for file in real(self) if not file.path.startswith("dt=2026-11-01/"))

    monkeypatch.setattr(LocalSource, "list", torn)
    pqcache.sync(cache)
    assert moved
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    assert not pqcache.sync(cache).published


def test_a_source_that_never_holds_still(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files that are added all the time: refused with the reason, and with --settle they wait."""
    lake, cache = made_lake(tmp_path / "lake"), tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    old = rows_at(lake)
    count = iter(range(100))

    def add() -> None:
        number = next(count)
        pq.write_table(shop_table(20_000 + 5 * number, 5), lake / DAY / f"added-{number}.parquet")

    add()
    old_and_first = rows_at(lake)
    with pytest.MonkeyPatch.context() as patch:
        real = LocalSource.list

        def listed(self: LocalSource) -> Iterator[Any]:
            yield from real(self)
            add()

        patch.setattr(LocalSource, "list", listed)
        assert cli.run(["sync", str(cache)]) == 3
        shown = capfd.readouterr().err
        assert shown.count("changed while it was copied; going on from a new listing") == 1
        assert f"{lake}: keeps changing while it is copied, last {DAY}/added-" in shown
        assert "--settle" in shown
        assert next(count) == 2 + incremental.NEW_LISTINGS + 1
        assert check_snapshot(cache, [old]) == 0
        os.utime(lake / DAY / "added-0.parquet", (time.time() - 3600,) * 2)
        assert pqcache.sync(cache, settle="10m").added == 1
        assert check_snapshot(cache, [old_and_first]) == 0


def test_a_share_of_a_source_that_changes(tmp_path: Path) -> None:
    """Nodes that share a source agree on one listing of it, also where only another node's files change."""
    lake = made_lake(tmp_path / "lake", days=6)
    write = lambda: write_day(lake, "2026-11-09", files=4, rows=5, first=90_000)  # noqa: E731
    pqcache.sync(str(lake), tmp_path / "0", shard="0/2", on_event=Once(write, ""))
    pqcache.sync(str(lake), tmp_path / "1", shard="1/2")
    manifests = [pqcache.Cache(tmp_path / node).snapshot().manifest() for node in "01"]
    assert manifests[0].listing == manifests[1].listing
    held = [file.path for manifest in manifests for entry in manifest.files for file in entry.sources]
    assert sorted(held) == sorted(path.relative_to(lake).as_posix() for path in lake.rglob("*.parquet"))


def test_a_marker_that_goes_while_its_partition_is_copied(tmp_path: Path) -> None:
    """The overwrite that begins then is left for the next run, as one that began before the listing is."""
    lake, cache = made_lake(tmp_path / "lake"), tmp_path / "cache"
    pqcache.sync(str(lake), cache, marker="_SUCCESS")
    write_day(lake, "2026-11-01", files=4, rows=5, first=60_000)
    kept = rows_at(lake)[DAY]
    write_day(lake, "2026-11-02", files=4, rows=5, first=50_000)
    report = pqcache.sync(cache, on_event=Once((lake / DAY / "_SUCCESS").unlink))
    assert report.changed == 4
    assert check_snapshot(cache, [{**rows_at(lake), DAY: kept}]) == 0


def test_a_file_damaged_by_its_change_is_no_error(tmp_path: Path) -> None:
    """A file that does not decode is no error of the source if the source has another one by then."""
    lake, cache = made_lake(tmp_path / "lake"), tmp_path / "cache"
    broken = lake / DAY / "part-00003.parquet"
    content = broken.read_bytes()
    broken.write_bytes(content[:4] + bytes(len(content) - 200) + content[-196:])
    once = Once(lambda: broken.write_bytes(content))
    pqcache.sync(str(lake), cache, jobs=1, row_group_size=8 << 10, on_event=once)
    assert check_snapshot(cache, [rows_at(lake)]) == 0


@pytest.mark.parametrize("remote", [STORES[1]], indirect=True)
def test_a_snapshot_of_hdfs_is_one_moment(remote: Remote, hdfs: Hdfs, tmp_path: Path) -> None:
    made, cache = made_lake(tmp_path / "made"), tmp_path / "cache"
    remote.upload(made)
    hdfs.snapshot(remote.url, "night")
    old = rows_at(made)
    once = Once(lambda: put_file(made, remote, f"{DAY}/part-00003.parquet", 9000))
    try:
        pqcache.sync(f"{remote.url}/.snapshot/night", cache, jobs=1, on_event=once)
    finally:
        hdfs.drop_snapshot(remote.url, "night")
    assert (once.acted, once.warnings) == (True, [])
    assert check_snapshot(cache, [old]) == 0
