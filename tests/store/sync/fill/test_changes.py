"""A source that changes while a first copy arrives, and what runs that have ended leave for the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import pqcache
from pqcache.errors import SourceChanged
from pqcache.store.arriving import ArrivingSnapshot
from pqcache.store.layout import ARRIVED, RUN
from pqcache.store.sync import fill
from pqcache.system.locks import user_name
from tests.datasets import files_of
from tests.store.sync.fill.filling import Filling, LocalReads, check_same, wait_for
from tests.store.sync.fill.test_snapshot import write_wide

KILLED = KeyboardInterrupt()
TAIL = 64 << 10  # bytes that are read of a file's end with its footer


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> LocalReads:
    monkeypatch.setattr(fill, "_LOOK", 0.0)
    return LocalReads(monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_wide(tmp_path / "made")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Other files of the same names and sizes."""
    copy = shutil.copytree(tmp_path / "made", tmp_path / "other")
    for path in copy.rglob("*.parquet"):
        data = bytearray(path.read_bytes())
        data[1000:-TAIL:500] = bytes(byte ^ 0xFF for byte in data[1000:-TAIL:500])
        path.write_bytes(data)
    return copy


def replace_file(made: Path, other: Path, path: str) -> None:
    (made / path).unlink()
    shutil.copy(other / path, made / path)


def published_files(cache: Path) -> dict[str, bytes]:
    return {path: (cache / "current" / path).read_bytes() for path in files_of(cache / "current")}


def whole(made: Path, path: str, listings: int = 1) -> int:
    """Return the bytes that are read of a file which is fetched once, and of its end for each listing."""
    return (made / path).stat().st_size + listings * TAIL


def fetched(reads: LocalReads, path: str) -> int:
    return sum(length for name, _, length in reads.done if name == path)


@pytest.mark.parametrize("vanishes", [False, True], ids=["changes", "vanishes"])
def test_a_file_of_a_snapshot_that_nobody_reads(
    vanishes: bool, reads: LocalReads, made: Path, other: Path, tmp_path: Path
) -> None:
    """The run goes on from a new listing, with the files that are complete."""
    first, second, _ = files_of(made)
    filling = Filling(reads, made, tmp_path / "cache", jobs=1)
    snapshot = filling.arriving()

    def change(name: str, offset: int, length: int) -> None:
        if name == second:
            wait_for(lambda: snapshot.arrived([first]))
            reads.before = lambda *_: None
            (made / second).unlink() if vanishes else replace_file(made, other, second)

    reads.before = change
    report = filling.end()
    assert report.snapshot != snapshot.id
    assert published_files(tmp_path / "cache") == {name: (made / name).read_bytes() for name in files_of(made)}
    assert fetched(reads, first) == whole(made, first, listings=2)
    assert not snapshot.path.exists()
    assert {path.name for path in (tmp_path / "cache").iterdir()}.isdisjoint({"arriving"})


def test_a_file_of_a_snapshot_that_is_read(reads: LocalReads, made: Path, other: Path, tmp_path: Path) -> None:
    """What has not changed arrives; the changed file never does, and its readers see why."""
    first, second, third = files_of(made)
    filling = Filling(reads, made, tmp_path / "cache")
    snapshot = filling.arriving()
    lease = snapshot.lease()
    replace_file(made, other, second)
    report = filling.end()
    assert snapshot.is_abandoned()
    assert snapshot.arrived(files_of(made)) == {first, third}
    error = snapshot.errors()[second]
    assert isinstance(error, SourceChanged)
    assert "changed while it was copied" in error.reason
    assert str(made / second) in error.subject
    assert report.snapshot != snapshot.id
    assert published_files(tmp_path / "cache") == {name: (made / name).read_bytes() for name in files_of(made)}
    assert fetched(reads, first) == whole(made, first, listings=2), "the complete files are taken over"
    assert snapshot.path.exists()
    assert pqcache.gc(tmp_path / "cache").removed == ()
    lease.close()
    assert pqcache.gc(tmp_path / "cache").removed == (snapshot.id,)
    assert not (tmp_path / "cache" / "arriving").exists()


def test_a_file_that_comes_later_is_left_to_the_next_run(reads: LocalReads, made: Path, tmp_path: Path) -> None:
    filling = Filling(reads, made, tmp_path / "cache")
    snapshot = filling.arriving()
    shutil.copy(made / files_of(made)[0], made / "dt=2026-11-03" / "part-00001.parquet")
    assert filling.end().snapshot == snapshot.id
    assert len(files_of(tmp_path / "cache" / "current")) == 3
    assert pqcache.sync(tmp_path / "cache").added == 1


def leave_one_file(reads: LocalReads, made: Path, cache: Path, error: BaseException = KILLED) -> ArrivingSnapshot:
    """Run until the first file is complete, and end by an error."""
    filling = Filling(reads, made, cache, jobs=1, retries=0)
    snapshot = filling.arriving()

    def before(name: str, *_: object) -> None:
        if name != files_of(made)[0]:
            wait_for(lambda: snapshot.arrived(files_of(made)))
            raise error

    reads.before = before
    with pytest.raises(type(error)):
        filling.end()
    reads.before = lambda *_: None
    reads.done.clear()
    assert not snapshot.is_abandoned()
    assert not snapshot.is_being_filled()
    return snapshot


@pytest.mark.parametrize("fill", [True, False], ids=["fill", "plain"])
def test_the_next_run_goes_on(fill: bool, reads: LocalReads, made: Path, tmp_path: Path) -> None:
    error = KeyboardInterrupt() if fill else pqcache.SourceUnavailable(str(made), "connection refused")
    snapshot = leave_one_file(reads, made, tmp_path / "cache", error)
    held = (snapshot.path / files_of(made)[0]).stat().st_size
    assert pqcache.gc(tmp_path / "cache").removed == ()
    report = pqcache.sync(made, tmp_path / "cache", fill=fill)
    assert report.snapshot == snapshot.id
    assert report.fetched_bytes == snapshot_bytes(made) - held
    assert fetched(reads, files_of(made)[0]) == 0
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_the_next_run_is_that_of_another_user(
    reads: LocalReads, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who shares a cache cannot write the other's files: complete ones are taken over."""
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    before = snapshot.path.stat().st_ino
    monkeypatch.setenv("PQCACHE_TRUSTED_CACHES", str(tmp_path / "cache"))
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: 4_000_000)
        report = pqcache.sync(tmp_path / "cache")
    assert report.snapshot == snapshot.id, "states that were saved name it"
    assert snapshot.published_path.stat().st_ino != before
    assert fetched(reads, files_of(made)[0]) == TAIL
    monkeypatch.undo()
    assert published_files(tmp_path / "cache") == {name: (made / name).read_bytes() for name in files_of(made)}


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks of those who may write")
def test_others_who_lock_the_file_of_a_run(reads: LocalReads, made: Path, tmp_path: Path) -> None:
    """Whoever can read a cache can lock that file: that neither looks like a run, nor keeps one away."""
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    with open(snapshot.path / RUN, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not snapshot.is_being_filled()
        filling = Filling(reads, made, tmp_path / "cache")
        wait_for(snapshot.is_being_filled)
        assert snapshot.filled_by() == f"process {os.getpid()} of {user_name(os.geteuid())}"
        assert filling.end().snapshot == snapshot.id
    assert not snapshot.is_being_filled()
    assert snapshot.filled_by() == ""


def snapshot_bytes(made: Path) -> int:
    return sum((made / path).stat().st_size for path in files_of(made))


def test_a_snapshot_that_is_read_is_continued_though_there_is_more(
    reads: LocalReads, made: Path, tmp_path: Path
) -> None:
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    shutil.copy(made / files_of(made)[0], made / "dt=2026-11-03" / "part-00001.parquet")
    with snapshot.lease():
        report = pqcache.sync(made, tmp_path / "cache")
    assert (report.snapshot, report.files, report.added) == (snapshot.id, 3, 3)
    assert pqcache.sync(tmp_path / "cache").added == 1


def test_complete_files_of_a_snapshot_that_nobody_reads_are_taken_over_if_there_is_more(
    reads: LocalReads, made: Path, tmp_path: Path
) -> None:
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    shutil.copy(made / files_of(made)[0], made / "dt=2026-11-03" / "part-00001.parquet")
    report = pqcache.sync(made, tmp_path / "cache")
    assert report.snapshot != snapshot.id
    assert report.files == 4
    assert fetched(reads, files_of(made)[0]) == TAIL


def test_a_snapshot_that_is_read_and_cannot_be_completed(
    reads: LocalReads, made: Path, other: Path, tmp_path: Path
) -> None:
    """Its readers get what is still at the source, and the same run begins anew."""
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    replace_file(made, other, files_of(made)[1])
    with snapshot.lease():
        report = pqcache.sync(made, tmp_path / "cache")
        assert snapshot.is_abandoned()
        assert snapshot.arrived(files_of(made)) == set(files_of(made)) - {files_of(made)[1]}
    assert report.published
    assert report.snapshot != snapshot.id
    pqcache.sync(made, tmp_path / "plain")
    assert published_files(tmp_path / "cache") == published_files(tmp_path / "plain")


@pytest.mark.parametrize("is_read", [False, True])
def test_another_request_begins_anew(is_read: bool, reads: LocalReads, made: Path, tmp_path: Path) -> None:
    """Also while a reader holds the snapshot of the request before: it has rows that are not wanted now."""
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    with snapshot.lease() if is_read else nullcontext():
        report = pqcache.sync(made, tmp_path / "cache", where="dt < '2026-11-02'")
        assert snapshot.is_abandoned() or not is_read
    assert (report.snapshot != snapshot.id, report.files) == (True, 1)
    assert fetched(reads, files_of(made)[0]) == TAIL


@pytest.mark.parametrize("damaged", [False, True], ids=["intact", "damaged"])
def test_after_a_restart_of_the_machine_files_are_read_again(
    damaged: bool, reads: LocalReads, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = files_of(made)[0]
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    monkeypatch.setattr(fill, "boot_id", lambda: "another")
    if damaged:
        copy = snapshot.path / first
        data = bytearray(copy.read_bytes())
        data[2000] ^= 1
        copy.chmod(0o600)
        copy.write_bytes(data)
        copy.chmod(0o400)
    report = pqcache.sync(made, tmp_path / "cache")
    assert report.snapshot == snapshot.id, "states that were saved name it"
    assert fetched(reads, first) == (made / first).stat().st_size * damaged
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", tmp_path / "cache")


@pytest.mark.parametrize("name", ["changed.json", "row_groups.arrow", "files.arrow", "a torn record"])
def test_a_damaged_file_of_the_run(name: str, reads: LocalReads, made: Path, tmp_path: Path) -> None:
    snapshot = leave_one_file(reads, made, tmp_path / "cache")
    if name == "a torn record":  # of the files that were checked
        record = snapshot.path / ARRIVED
        record.write_bytes(record.read_bytes()[:-5])
    else:
        (snapshot.path / "_pqcache" / name).unlink(missing_ok=True)
        (snapshot.path / "_pqcache" / name).write_bytes(b"damaged" * 100)
    report = pqcache.sync(made, tmp_path / "cache")
    assert report.published
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_complete_downloads_of_a_plain_run_are_taken_over(reads: LocalReads, made: Path, tmp_path: Path) -> None:
    third = files_of(made)[2]

    def before(name: str, *_: object) -> None:
        if name == third:
            raise KeyboardInterrupt

    reads.before = before
    with pytest.raises(KeyboardInterrupt):
        pqcache.sync(made, tmp_path / "cache", jobs=1)
    reads.before = lambda *_: None
    reads.done.clear()
    pqcache.sync(made, tmp_path / "cache", fill=True)
    assert [fetched(reads, path) for path in files_of(made)] == [TAIL, TAIL, whole(made, third)]
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", tmp_path / "cache")
