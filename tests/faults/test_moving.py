"""A source that moves while it is copied: nothing is published that it never held.

A snapshot is its source at one moment: what changes between the listing and the last download is seen.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import cli
from pqcache.events import Event, Fetched, Listed, Warned
from pqcache.store.drivers import local
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync import command as sync_module
from pqcache.store.sync import incremental
from pqcache.store.sync import snapshot_job as workdir
from tests.datasets import shop_table, write_day
from tests.faults.checks import check_clean, check_snapshot, rows_at
from tests.faults.lakes import big
from tests.remote import Remote, make_remote

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

DAY = "dt=2026-11-02"
BIG = f"{DAY}/part-00000.parquet"
HDFS, S3 = pytest.param("hdfs", marks=pytest.mark.hdfs), pytest.param("s3", marks=pytest.mark.s3)
WEBHDFS = pytest.param("webhdfs", marks=[pytest.mark.hdfs, pytest.mark.deep])


@dataclass
class Watched:
    """A source that counts what is read of each file and calls ``at(path, offset)`` before and after each piece."""

    source: Any
    at: Callable[[str, int], None]
    read_bytes: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.source, name)
        if name != "read_into":
            return found
        by_read = type(self.source).read_into is Source.read_into
        return partial(Source.read_into, self) if by_read else self._filling

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
        real = sync_module.open_table

        def opened(*arguments: Any) -> Any:
            return Watched(real(*arguments), lambda path, offset: self.at(path, offset), self.read_bytes)

        monkeypatch.setattr(sync_module, "open_table", opened)
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


@pytest.fixture(params=["path", HDFS, WEBHDFS, S3])
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
    put_all(made, remote, big(1))
    for version, rows in ((2, 400_000), (3, 300_000), (4, 500_000)):  # as large as before, smaller, larger
        watch.read_bytes.clear()
        remote.put(BIG, big(10 + version))
        watch.once(lambda: remote.put(BIG, (made / BIG).read_bytes()))
        (made / BIG).write_bytes(big(version, rows))
        pqcache.sync(remote.url, cache, retries=2)
        assert check_snapshot(cache, [rows_at(made)]) == 0, f"version {version}"
        check_clean(cache)
        assert watch.read_bytes[BIG] > 8 * rows
    assert not pqcache.sync(cache).published


@pytest.mark.parametrize("remote", ["path", HDFS], indirect=True)
def test_a_file_that_vanishes_while_it_is_copied_is_left_out(remote: Remote, watch: Watch, tmp_path: Path) -> None:
    made, cache = tmp_path / "made", tmp_path / "cache"
    put_all(made, remote, big(1))
    pqcache.sync(remote.url, cache)
    old = rows_at(made)
    remote.put(BIG, big(2))
    watch.once(lambda: remote.delete(BIG))
    with pytest.raises(pqcache.SourceIncomplete, match=r"400,000 rows of .* would be dropped.*dt=2026-11-02") as error:
        pqcache.sync(cache)
    assert error.value.exit_code == 3
    assert check_snapshot(cache, [old]) == 0
    remote.put(BIG, big(3))
    watch.once(lambda: remote.delete(BIG))
    pqcache.sync(cache, max_delete="100%")
    (made / BIG).unlink()
    assert check_snapshot(cache, [rows_at(made)]) == 0
    check_clean(cache)


@pytest.mark.parametrize("remote", ["path"], indirect=True)
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
    with pytest.raises(pqcache.SourceIncomplete, match=f"{BIG}.*keeps changing|keeps changing.*{BIG}") as error:
        pqcache.sync(cache)
    assert error.value.exit_code == 3
    assert check_snapshot(cache, [old]) == 0
    watch.at = lambda path, offset: None
    (made / BIG).write_bytes(big(next(versions) - 1))
    remote.put(BIG, (made / BIG).read_bytes())
    pqcache.sync(cache)
    assert check_snapshot(cache, [rows_at(made)]) == 0


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
    assert check_snapshot(cache, [rows_at(made)]) == 0
    check_clean(cache)

    remote.put(BIG, big(2))
    interrupt()
    (made / BIG).write_bytes(big(3))
    remote.put(BIG, big(3))
    pqcache.sync(cache)
    assert watch.read_bytes[BIG] == len(content), "it went on with another version"
    assert check_snapshot(cache, [rows_at(made)]) == 0
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
    assert check_snapshot(cache, [rows_at(lake)]) == 0


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


MOMENTS = [(grow, 0), (grow, 1 << 18), (shrink, 3_000_000), (shrink, None), (replace, 1 << 18), (replace, None)]


@pytest.mark.parametrize(
    ("change", "after"), [*MOMENTS, (same_time, 0), (same_time, 3_000_000), (same_time, None)],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_a_local_file_changes_at_any_moment(change: Change, after: int | None, watch: Watch, tmp_path: Path) -> None:
    """Before its copy begins (0), early, late, or after its download (None): never a mixture of two versions."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write_day(lake, "2026-11-01", files=2, rows=50)
    (lake / BIG).parent.mkdir()
    (lake / BIG).write_bytes(big(1))
    done: list[Event] = []

    def on_event(event: Event) -> None:
        early, late = isinstance(event, Listed), isinstance(event, Fetched) and event.path == BIG
        if not done and ((after == 0 and early) or (after is None and late)):
            done.append(event)
            change(lake / BIG)

    if after:
        watch.once(lambda: change(lake / BIG), after=after)
    pqcache.sync(str(lake), cache, on_event=on_event, retries=1)
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    assert not pqcache.sync(cache).published
    check_clean(cache)


def test_a_partition_that_vanishes_while_it_is_copied(watch: Watch, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write_day(lake, "2026-11-01", files=2, rows=50)
    pqcache.sync(str(lake), cache, row_group_size=64 << 10)
    old = rows_at(lake)
    (lake / BIG).parent.mkdir()
    (lake / BIG).write_bytes(big(1))
    watch.once(lambda: shutil.rmtree((lake / BIG).parent))
    assert not pqcache.sync(cache).published
    assert check_snapshot(cache, [old]) == 0
    check_clean(cache)


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
        f"{remote.url.removeprefix('file://')} changed while it was copied; continuing with a new listing"
    ]
    check_clean(cache)
    assert not pqcache.sync(cache).published


@pytest.mark.parametrize("remote", ["path", HDFS, S3], indirect=True)
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
        assert shown.count("changed while it was copied; continuing with a new listing") == 1
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


@pytest.mark.parametrize("remote", [HDFS], indirect=True)
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
