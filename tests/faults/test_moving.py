"""A source that moves while it is copied: nothing is published that it never held."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.events import Event, Fetched, Listed
from pqcache.store.drivers import local
from pqcache.store.drivers.base import Source
from pqcache.store.sync import command as sync_module
from pqcache.store.sync import snapshot_job as workdir
from tests.datasets import write_day
from tests.faults.checks import check_clean, check_snapshot, rows_at
from tests.faults.lakes import big
from tests.remote import Remote, make_remote

BIG = "dt=2026-11-02/part-00000.parquet"
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
