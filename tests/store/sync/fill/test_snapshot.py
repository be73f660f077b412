"""A first copy that is read while it arrives: in the order that readers want, and published as by any sync."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Awaited, Event, Fetched, Reused, Warned
from pqcache.store.arriving import Wanted, WantedList, WantedLists, find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.sync import fill, safety_checks
from tests.datasets import files_of, rows_of, write_shop
from tests.remote import STORES, Remote, make_remote
from tests.store.sync.fill.filling import Filling, LocalReads, check_same, wait_for


@pytest.fixture(params=STORES)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    yield from make_remote(request.param, request, tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> LocalReads:
    monkeypatch.setattr(fill, "_LOOK", 0.0)  # what readers want counts at once
    return LocalReads(monkeypatch)


def write_wide(root: Path, files: int = 3, row_groups: int = 4, rows: int = 6000) -> Path:
    """Write files that are larger than what is read for a footer: row groups of about 400 kB, in four columns."""
    rng = np.random.default_rng(0)
    for number in range(files):
        directory = root / f"dt=2026-11-0{number + 1}"
        directory.mkdir(parents=True)
        count = rows * row_groups
        columns = {name: rng.random(count) for name in ("a", "b", "c", "d", "e")}
        columns["id"] = np.arange(count) + number * count
        path = directory / "part-00000.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=rows, compression="none", use_dictionary=False)
    return root


def test_what_is_wanted_comes_first_and_each_file_is_complete(reads: LocalReads, tmp_path: Path) -> None:
    made = write_wide(tmp_path / "made", files=6)
    filling = Filling(reads, made, tmp_path / "cache", jobs=1)
    snapshot = filling.at_first_file()
    wanted, urgent = WantedList(snapshot.wanted_directory), WantedList(snapshot.wanted_directory)
    wanted.replace(Wanted(files=np.array([4, 2, 3])))
    urgent.replace(Wanted(files=np.array([5]), urgent=True))  # a reader waits for it
    seen: list[str] = []

    def look(*_: object) -> None:
        for path in snapshot.arrived(files_of(made)) - set(seen):
            seen.append(path)
            assert filecmp.cmp(snapshot.path / path, made / path, shallow=False)

    reads.before = look
    filling.end()
    wanted.close()
    urgent.close()
    assert seen == [files_of(made)[file] for file in (0, 5, 4, 2, 3)]  # the first was begun before, the last came last


def test_several_threads_fetch_a_large_file(reads: LocalReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "_RANGE", 500_000)
    monkeypatch.setattr(fill, "_LARGE", 1_000_000)
    made = write_wide(tmp_path / "made")
    pqcache.sync(made, tmp_path / "plain")
    reads.done.clear()
    report = pqcache.sync(made, tmp_path / "cache", fill=True, jobs=3)
    for path in files_of(made):
        size = (made / path).stat().st_size
        ranges = sorted((offset, length) for name, offset, length in reads.done if name == path and length == 500_000)
        assert [offset for offset, _ in ranges] == list(range(0, size - 500_000, 500_000))
    assert report.fetched_bytes == sum((made / path).stat().st_size for path in files_of(made))
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_ranges_that_a_killed_run_has_left_do_not_count(
    reads: LocalReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_RANGE", 500_000)
    monkeypatch.setattr(fill, "_LARGE", 1_000_000)
    made, cache = write_wide(tmp_path / "made", files=1), tmp_path / "cache"

    def kill(path: str, offset: int, length: int) -> None:
        if find_arriving(CacheDirectory(cache)) is not None and offset:
            raise KeyboardInterrupt

    reads.before = kill
    with pytest.raises(KeyboardInterrupt):
        pqcache.sync(made, cache, fill=True, jobs=1)
    assert [path.suffix for path in (cache / "tmp").glob("*/fetch/*")] == [fill.RANGES]
    reads.before = lambda *_: None
    events: list[Event] = []
    report = pqcache.sync(made, cache, on_event=events.append)
    assert not any(isinstance(event, Reused) for event in events)
    assert report.fetched_bytes == (made / files_of(made)[0]).stat().st_size
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", cache)


def test_published_as_by_a_plain_sync(remote: Remote, tmp_path: Path) -> None:
    made = write_wide(tmp_path / "made")
    remote.upload(made)
    plain = pqcache.sync(remote.url, tmp_path / "plain")
    events: list[Event] = []
    report = pqcache.sync(remote.url, tmp_path / "cache", fill=True, on_event=events.append)
    assert (report.added, report.files, report.rows) == (plain.added, plain.files, plain.rows)
    assert report.fetched_bytes == plain.fetched_bytes  # no byte twice
    assert {event.path for event in events if isinstance(event, Fetched)} == set(files_of(made))
    check_same(tmp_path / "plain", tmp_path / "cache")
    assert rows_of(tmp_path / "cache" / "current") == rows_of(made)
    again = pqcache.sync(tmp_path / "cache")
    assert (again.published, again.fetched_bytes) == (False, 0)


def test_all_is_known_before_anything_is_there(reads: LocalReads, tmp_path: Path) -> None:
    made = write_wide(tmp_path / "made")
    filling = Filling(reads, made, tmp_path / "cache")
    snapshot = filling.arriving()
    assert not snapshot.is_abandoned()
    assert snapshot.is_being_filled()
    assert len(snapshot.index()) == 12
    files = {entry.path: (entry.size, entry.rows) for entry in snapshot.manifest().files}
    assert files == {path: ((made / path).stat().st_size, 24_000) for path in files_of(made)}
    assert snapshot.arrived(files) == set()
    lease = snapshot.lease()
    report = filling.end()
    assert report.snapshot == snapshot.id
    assert not snapshot.path.exists()
    assert snapshot.published_path == (tmp_path / "cache" / "current").resolve()
    assert not snapshot.is_being_filled()
    lease.close()


def test_what_readers_wait_for_is_reported(reads: LocalReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "_REPORT", 0.01)
    made = write_wide(tmp_path / "made")
    filling = Filling(reads, made, tmp_path / "cache", jobs=1)
    snapshot = filling.arriving()
    wanted = WantedList(snapshot.wanted_directory)
    wanted.replace(Wanted(files=np.array([1, 2]), urgent=True))

    def reported(*_: object) -> None:
        wait_for(lambda: any(isinstance(event, Awaited) for event in filling.events))

    reads.before = reported
    filling.end()
    wanted.close()
    size = sum((made / path).stat().st_size for path in files_of(made)[1:])
    assert next(event for event in filling.events if isinstance(event, Awaited)) == Awaited(1, size)


def test_a_reader_that_dies_wants_nothing(reads: LocalReads, tmp_path: Path) -> None:
    made = write_wide(tmp_path / "made")
    filling = Filling(reads, made, tmp_path / "cache", jobs=1)
    snapshot = filling.arriving()
    wanted = WantedList(snapshot.wanted_directory)
    wanted.replace(Wanted(files=np.array([2, 1])))
    left = sorted(path.name for path in snapshot.wanted_directory.iterdir())
    assert len(left) == 2
    os.close(wanted._descriptor)  # as at the end of its process
    looks: list[list[Path]] = []
    reads.before = lambda *_: looks.append(list(snapshot.wanted_directory.iterdir()))
    filling.end()
    assert looks[-1] == []


def test_a_run_is_seen_where_nothing_can_be_written(
    reads: LocalReads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filling = Filling(reads, write_wide(tmp_path / "made"), tmp_path / "cache")
    snapshot, opened = filling.arriving(), os.open

    here = threading.get_ident()  # the run may write

    def read_only(path: Any, flags: int, *more: Any, **how: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY and threading.get_ident() == here:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more, **how)

    with monkeypatch.context() as mounted:
        mounted.setattr(os, "open", read_only)
        assert snapshot.is_being_filled()
        assert snapshot.filled_by().startswith(f"process {os.getpid()} of ")
    filling.end()


def test_lists_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a group that shares a cache are looked at by the run of any member; who cannot be seen may be alive."""
    monkeypatch.setenv("PQCACHE_TRUSTED_GROUPS", "0")
    umask = os.umask(0o002)
    try:
        wanted = WantedList(tmp_path)
    finally:
        os.umask(umask)
    wanted.replace(Wanted(files=np.arange(3)))
    assert stat.S_IMODE(next(tmp_path.glob("*.reader")).stat().st_mode) == 0o664
    opened = os.open

    def denied(path: Any, *more: Any, **how: Any) -> int:
        if str(path).endswith(".reader"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *more, **how)

    with monkeypatch.context() as another_user:
        another_user.setattr(os, "open", denied)
        assert len(WantedLists(tmp_path).read()) == 1
    assert len(WantedLists(tmp_path).read()) == 1
    wanted.close()
    assert WantedLists(tmp_path).read() == []


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "try_lock", lambda *_, **__: None)
    made = write_shop(tmp_path / "made")
    with pytest.raises(pqcache.UsageError, match=r"--fill: .* has no locks"):
        pqcache.sync(made, tmp_path / "cache", fill=True)
    assert pqcache.sync(made, tmp_path / "cache").published


def test_what_cannot_be_read_early_is_copied_as_always(tmp_path: Path) -> None:
    made = write_shop(tmp_path / "made")
    events: list[Event] = []
    pqcache.sync(made, tmp_path / "plain", where="id < 100")
    pqcache.sync(made, tmp_path / "cache", fill=True, on_event=events.append, where="id < 100")
    assert any(
        isinstance(event, Warned) and "nothing can be read before all of it is published" in event.message
        for event in events
    )
    check_same(tmp_path / "plain", tmp_path / "cache")


SELECTIONS: list[dict[str, Any]] = [
    {"columns": ["id", "tokens", "note"]},
    {"columns": ["image", "dt"], "where": "dt >= '2026-11-02'"},
    {"shard": "1/2"},
    {"newest": "2"},
    {"checksum": True},
]


@pytest.mark.parametrize("how", SELECTIONS, ids=lambda how: next(iter(how)))
@pytest.mark.parametrize("rows", [100, 800], ids=["small", "large"])
def test_a_part_of_the_source(how: dict[str, Any], rows: int, tmp_path: Path) -> None:
    made = write_shop(tmp_path / "made", files=2, rows=rows)
    pqcache.sync(made, tmp_path / "plain", **how)
    pqcache.sync(made, tmp_path / "cache", fill=True, **how)
    check_same(tmp_path / "plain", tmp_path / "cache")
    assert not pqcache.sync(tmp_path / "cache").published


@pytest.mark.parametrize("rows", [0, 20_000])
def test_a_column_that_only_files_without_rows_have(rows: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    schema = pa.schema([("id", pa.int64()), ("new", pa.float64())])
    pq.ParquetWriter(made / "b.parquet", schema).close()
    if rows:
        pq.write_table(pa.table({"id": np.arange(rows)}), made / "a.parquet")
    pqcache.sync(made, tmp_path / "plain")
    pqcache.sync(made, tmp_path / "cache", fill=True)
    check_same(tmp_path / "plain", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["snapshot", "one file"])
def test_other_sources(kind: str, tmp_path: Path) -> None:
    made = write_shop(tmp_path / "made")
    pqcache.sync(made, tmp_path / "first")
    source = tmp_path / "first" / "current" if kind == "snapshot" else made / "dt=2026-11-01" / "part-00000.parquet"
    pqcache.sync(source, tmp_path / "plain")
    pqcache.sync(source, tmp_path / "cache", fill=True)
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_rewritten_after_it_was_published_as_it_is(reads: LocalReads, tmp_path: Path) -> None:
    made = write_shop(tmp_path / "made")
    filling = Filling(reads, made, tmp_path / "cache", row_group_size="32k")
    snapshot = filling.arriving()
    report = filling.end()
    pqcache.sync(made, tmp_path / "plain", row_group_size="32k")
    assert (report.added, report.unchanged, report.rewritten) == (9, 0, 3)
    assert [(item.added, item.rewritten) for item in report.touched] == [(3, True)] * 3
    assert report.snapshot != snapshot.id
    assert {one.id for one in CacheDirectory(tmp_path / "cache").snapshots()} == {snapshot.id, report.snapshot}
    assert rows_of(snapshot.published_path) == rows_of(made)
    for name in files_of(tmp_path / "plain" / "current"):
        one, other = tmp_path / "plain" / "current" / name, tmp_path / "cache" / "current" / name
        assert one.read_bytes() == other.read_bytes()
    assert [record["published"] for record in pqcache.log(tmp_path / "cache")] == [True, True]
    assert not pqcache.sync(tmp_path / "cache").published


def write_apart(made: Path) -> Path:
    """Write two files whose types fit together only when they are rewritten."""
    made.mkdir()
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(range(100_000), pa.int32()), 2).cast(pa.list_(pa.int32()))
    pq.write_table(pa.table({"s": tokens}), made / "a.parquet")
    (made / "b").mkdir()
    pq.write_table(pa.table({"s": tokens}), made / "b" / "b.parquet")
    pqcache.repartition(made / "b", made / "dense", row_group_size="1MB", dense=["s"])
    shutil.rmtree(made / "b")
    (made / "dense").rename(made / "b")
    return made


def test_files_that_are_one_table_only_when_they_are_rewritten(tmp_path: Path) -> None:
    made, events = write_apart(tmp_path / "made"), list[Event]()
    pqcache.sync(made, tmp_path / "plain", row_group_size="1MB")
    report = pqcache.sync(made, tmp_path / "cache", row_group_size="1MB", fill=True, on_event=events.append)
    assert (report.published, report.rewritten, report.rows) == (True, 2, 100_000)
    messages = [event.message for event in events if isinstance(event, Warned)]
    assert "column 's' is stored as int32[2], and as list<element: int32> in a.parquet" in messages[0]
    assert "nothing can be read before all" in messages[0]
    check_same(tmp_path / "plain", tmp_path / "cache")
    assert [record["published"] for record in pqcache.log(tmp_path / "cache")] == [True]


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(pqcache.ParquetError, match="make them alike"):
        pqcache.sync(write_apart(tmp_path / "made"), tmp_path / "cache", fill=True)


def test_what_is_private_at_the_source_is_private_from_the_beginning(reads: LocalReads, tmp_path: Path) -> None:
    made = write_wide(tmp_path / "made")
    private, *_ = files_of(made)
    (made / private).chmod(0o600)
    filling = Filling(reads, made, tmp_path / "cache", jobs=1)
    snapshot, modes = filling.at_first_file(), set[int]()
    metadata = snapshot.path / "_pqcache"
    assert {(metadata / name).stat().st_mode & 0o777 for name in ("files.arrow", "row_groups.arrow")} == {0o600}

    def look(*_: object) -> None:
        modes.update((snapshot.path / path).stat().st_mode & 0o777 for path in snapshot.arrived([private]))

    reads.before = look
    assert filling.end().published
    assert modes == {0o400}


def test_space_for_rewritten_files_is_asked_for_before_they_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, used = write_wide(tmp_path / "made"), shutil.disk_usage
    free = sum((made / path).stat().st_size for path in files_of(made)) * 3 // 2
    monkeypatch.setattr(safety_checks, "_SPARE", 0)
    monkeypatch.setattr(safety_checks.shutil, "disk_usage", lambda path: used(path)._replace(free=free))
    with pytest.raises(pqcache.PqcacheError, match=r"needs .* of free space"):
        pqcache.sync(made, tmp_path / "cache", fill=True, row_group_size="256k")
    assert pqcache.sync(made, tmp_path / "plain", fill=True).published
