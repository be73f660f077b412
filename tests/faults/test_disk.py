"""A bad disk: full, failing, read-only, not ours, without hard links, without a lock that works."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pqcache
from pqcache.events import Event, Fetched, Listed, Published
from pqcache.store.drivers.registry import open_source
from pqcache.store.sync import safety_checks
from pqcache.store.sync.snapshot_job import file_key
from tests.datasets import write_day
from tests.faults.checks import check_clean, check_error, check_snapshot, rows_at
from tests.faults.runner import Runner, RunResult
from tests.faults.sweep import CHANGES, DEPTHS, READS, points_to_try
from tests.faults.test_kill import Scenario, make_scenario, today, yesterday
from tests.forked_commands import run_pqcache

DISK_SIZE = 96 << 20  # the guard wants 64 MiB to spare


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little space; skipped, loudly, where this user cannot mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "none", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"NO SMALL DISK: only root can mount a tmpfs here ({mounted.stderr.strip()})")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def check_failed(ran: RunResult, scenario: Scenario) -> None:
    """Assert that a run failed in one clean line, with the old snapshot or the new one in place."""
    check_snapshot(scenario.cache, [scenario.old, scenario.new])
    check_error(ran)


def check_next_run(runner: Runner, scenario: Scenario) -> RunResult:
    again = runner.run(scenario.cache, *scenario.command)
    assert again.code == 0, again.stderr
    assert check_snapshot(scenario.cache, [scenario.new]) == 0
    check_clean(scenario.cache)
    return again


TAKES_SPACE = {"create", "write", "osfile", "os.mkdir", "os.link", "os.symlink", "fsync"}


@pytest.mark.parametrize("deep", DEPTHS)
@pytest.mark.parametrize(
    ("number", "on", "kind"),
    [(errno.ENOSPC, True, "first"), (errno.ENOSPC, True, "rewritten"), (errno.EIO, False, "columns")],
    ids=["ENOSPC-first", "ENOSPC-rewritten", "EIO-columns"],
)
def test_every_operation_may_fail(number: int, on: bool, kind: str, deep: bool, runner: Runner, tmp_path: Path) -> None:
    """Whichever operation on the cache fails, once or from then on, what is published is complete."""
    scenario = make_scenario(runner, tmp_path, kind)
    scenario.restart()
    points = runner.run(scenario.cache, *scenario.command, instrument={"kind": "count"}).points
    reads = READS if deep else {"open"}
    tried = points_to_try(points, deep, {*CHANGES, *reads, "fsync"} if number == errno.EIO else TAKES_SPACE)
    failed = 0
    for at in tried:
        scenario.restart()
        try:
            instrument = {"kind": "fail", "at": at, "errno": number, "on": on}
            ran = runner.run(scenario.cache, *scenario.command, instrument=instrument)
            failed += ran.code != 0
            check_failed(ran, scenario)
            check_next_run(runner, scenario)
        except AssertionError as error:
            raise AssertionError(f"failed at {at} ({points[at]}): {error}") from error
    assert failed >= len(tried) // 4, "hardly anything failed: the sweep does not reach the cache"


def test_what_failed_to_become_durable_is_not_trusted(runner: Runner, tmp_path: Path) -> None:
    """After a failed fsync the kernel forgets what it could not write: the same fsync succeeds the next time."""
    scenario = make_scenario(runner, tmp_path, "plain")
    scenario.restart()
    # by name: files are downloaded side by side, and the points of two runs have not the same numbers
    instrument = {"kind": "fail", "first": r"fsync .*/fetch/", "errno": errno.EIO}
    ran = runner.run(scenario.cache, *scenario.command, instrument=instrument)
    check_failed(ran, scenario)
    assert ran.code == 1
    named = re.search(r"fetch/([0-9a-f]{32})", ran.stderr)
    assert named is not None, ran.stderr
    listed = {file_key(str(scenario.lake), file): file.path for file in open_source(str(scenario.lake)).list()}
    again = check_next_run(runner, scenario)
    assert listed[named[1]] in again.read, "it was taken for durable"


@pytest.mark.parametrize("deep", DEPTHS)
@pytest.mark.parametrize("row_group_size", [None, 64 << 10])
def test_a_disk_that_fills_up(row_group_size: int | None, deep: bool, small_disk: Path, tmp_path: Path) -> None:
    """A real file system runs full while the cache is written, at many points of the run."""
    lake, cache = tmp_path / "lake", small_disk / "cache"
    yesterday(lake)
    pqcache.sync(str(lake), cache, row_group_size=row_group_size, keep=1)
    old = rows_at(lake)
    today(lake)
    write_day(lake, "2026-11-05", files=2, rows=3000, first=400_000)
    new = rows_at(lake)
    filler = small_disk / "filler"
    rng = random.Random(5)
    refused = 0
    for _ in range(15 if deep else 3):
        space = rng.randrange(0, 2 << 20)

        def fill(event: Event, space: int = space) -> None:
            if isinstance(event, Listed):  # after the guard's view of the disk would be too late to be noticed
                free = shutil.disk_usage(small_disk).free
                with filler.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, free - space))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(safety_checks, "_SPARE", -(1 << 40))  # the guard would stop it before the first byte
            complaint = ""
            try:
                pqcache.sync(cache, on_event=fill)
            except pqcache.PqcacheError as error:
                complaint = str(error)
                refused += 1
            assert not complaint or "no space left" in complaint.lower()
        if check_snapshot(cache, [old, new]) == 1:
            assert space > 200_000
            shutil.rmtree(cache)
            filler.unlink()
            pqcache.sync(str(lake), cache, row_group_size=row_group_size, keep=1)
            break
        filler.unlink()
    assert refused
    pqcache.sync(cache)
    assert check_snapshot(cache, [new]) == 0
    check_clean(cache)


def test_the_guard_says_both_numbers(small_disk: Path, tmp_path: Path) -> None:
    """What does not fit is refused before the first byte, and what is needed and what is there are both named."""
    lake, cache = tmp_path / "lake", small_disk / "cache"
    yesterday(lake)
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - (1 << 20)))
    events: list[Event] = []
    with pytest.raises(pqcache.PqcacheError, match=r"needs \d.* MB of free space, has \d.* [KM]B"):
        pqcache.sync(str(lake), cache, on_event=events.append)
    for words in ((), ("--row-group-size", "1MB"), ("--fill",), ("--newest", "1"), ("--where", "id >= 0")):
        done = run_pqcache("sync", lake, cache, "--dry-run", *words)
        assert (done.returncode, " of free space, has " in done.stderr) == (1, True), done
        assert ("with --newest or" in done.stderr) == ("--newest" not in words), done
        assert ("with a smaller --newest" in done.stderr) == ("--newest" in words), done
    assert not [event for event in events if isinstance(event, Fetched)]
    assert not (cache / "current").exists()
    assert not any(path.is_file() for path in (cache / "tmp").rglob("*"))
    (small_disk / "filler").unlink()
    pqcache.sync(str(lake), cache)
    check_clean(cache)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 20)))
    assert run_pqcache("sync", cache, "--dry-run").returncode == 0, "nothing to do needs no space"
    for words in (("--dry-run",), ()):
        done = run_pqcache("repartition", cache, *words)
        assert (done.returncode, done.stderr.endswith("free some, or put the cache on a larger disk\n")) == (1, True), (
            done
        )


def test_a_read_only_disk(small_disk: Path, runner: Runner, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", small_disk / "cache"
    yesterday(lake)
    pqcache.sync(str(lake), cache)
    old = rows_at(lake)
    today(lake)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for arguments in (["sync", cache], ["sync", lake, small_disk / "new"], ["gc", cache], ["repartition", cache]):
        ran = runner.run(cache, *arguments)
        assert ran.code == 1
        (line,) = ran.stderr.splitlines()
        assert "a bug?" not in line, line
        assert "ead-only file system" in line
        assert str(small_disk) in line
    assert check_snapshot(cache, [old]) == 0
    assert runner.run(cache, "sync", cache, "--dry-run").code == 0, "looking needs no writing"


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can become a user without permission")
@pytest.mark.parametrize("what", ["cache", "parent", "snapshots", "tmp", "config"])
def test_a_target_of_somebody_else(what: str, runner: Runner, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    yesterday(lake)
    pqcache.sync(str(lake), cache)
    old = rows_at(lake)
    today(lake)
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    others = {"cache": [cache], "snapshots": [cache / "snapshots"], "tmp": [cache / "tmp"], "config": []}
    if what != "parent":
        for path in (cache, *cache.rglob("*")):
            if path not in others[what] and not path.is_symlink():
                os.chown(path, 65534, 65534)
    if what == "config":
        os.chown(cache / "pqcache.toml", 0, 0)
        (cache / "pqcache.toml").chmod(0o600)
    target = [lake, tmp_path / "new"] if what == "parent" else [cache]
    ran = runner.run(cache, "sync", *target, uid=65534)
    (line,) = ran.stderr.splitlines()
    assert ran.code == 1, line
    assert "a bug?" not in line, line
    assert "ermission denied" in line
    assert str(tmp_path) in line
    assert check_snapshot(cache, [old]) == 0


@pytest.mark.parametrize(
    ("number", "row_group_size"),
    [(errno.EPERM, None), (errno.EMLINK, 16 << 10)],
)
def test_without_hard_links(
    number: int, row_group_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file cannot have two names it is copied, as durable and as read-only as the first."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    yesterday(lake)
    pqcache.sync(str(lake), cache, row_group_size=row_group_size, keep=1)
    today(lake)
    kept = next(p.name for p in sorted((cache / "current" / "dt=2026-11-02").iterdir()))
    before = (cache / "current" / "dt=2026-11-02" / kept).stat().st_ino
    synced: set[int] = set()
    real = os.fsync

    def cannot(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "link", cannot)
    monkeypatch.setattr(os, "fsync", fsync)
    pqcache.sync(cache)
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    check_clean(cache)
    for path in (cache / "current").rglob("*.parquet"):
        assert path.stat().st_mode & 0o777 == 0o444
        assert path.stat().st_ino in synced, f"{path.name} was copied and not made durable"
    assert (cache / "current" / "dt=2026-11-02" / kept).stat().st_ino != before


# Two runs at once where flock says yes to both, as on some network file systems: the lock saves work, and
# nothing may depend on it.


class Second:
    """A second run that happens, from start to end, inside the first one's callback at one of its events."""

    def __init__(self, cache: Path, at: int, prepare: object = None) -> None:
        self._cache, self._at, self._prepare = cache, at, prepare
        self._seen = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.outcome: object = None

    def wait(self) -> None:
        """Wait for its end: the first run may fail, and leave the thread of its callback behind."""
        assert self._ended.wait(60)

    def __call__(self, event: Event) -> None:
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
        if number != self._at:
            return
        if callable(self._prepare):
            self._prepare()
        try:
            self.outcome = pqcache.sync(self._cache, retries=1)
        except pqcache.PqcacheError as error:
            self.outcome = error
        finally:
            self._ended.set()


@pytest.mark.parametrize("deep", DEPTHS)
@pytest.mark.parametrize(
    ("moves", "row_group_size"), [(False, 64 << 10), (True, None)], ids=["same source", "source moves on"]
)
def test_two_runs_without_a_lock(
    moves: bool, row_group_size: int | None, deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    lake, start, cache = tmp_path / "lake", tmp_path / "start", tmp_path / "cache"
    yesterday(lake)
    pqcache.sync(str(lake), cache, row_group_size=row_group_size, keep=1, jobs=2)
    shutil.copytree(cache, start, symlinks=True)
    old = rows_at(lake)
    today(lake)
    middle = rows_at(lake)
    shutil.copytree(lake, tmp_path / "lake of today")
    events: list[Event] = []
    pqcache.sync(cache, on_event=events.append)
    problems = []
    kinds = [type(event) for event in events]
    for at in range(len(events)) if deep else sorted({kinds.index(kind) for kind in kinds}):
        shutil.rmtree(lake)
        shutil.copytree(tmp_path / "lake of today", lake)  # copy2 keeps the times, and so the identities
        shutil.rmtree(cache)
        shutil.copytree(start, cache, symlinks=True)

        def more() -> None:
            write_day(lake, "2026-11-02", files=2, rows=180, first=100_000, seed=5)
            write_day(lake, "2026-11-06", files=1, rows=90, first=600_000)

        second = Second(cache, at, more if moves else None)
        with contextlib.suppress(pqcache.PqcacheError):
            pqcache.sync(cache, on_event=second, jobs=2, retries=1)
        second.wait()
        new = rows_at(lake)
        try:
            check_snapshot(cache, [old, middle, new])
            pqcache.sync(cache)
            assert check_snapshot(cache, [new]) == 0
            check_clean(cache)
        except (AssertionError, pqcache.PqcacheError, OSError) as error:
            problems.append(f"second run at event {at} ({type(events[at]).__name__}): {error}")
    assert not problems, "\n".join(problems)


def test_a_writer_left_behind_by_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a run that failed wakes up while the next run goes on with its download."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pqcache.store.drivers.local import LocalSource

    lake, cache = tmp_path / "lake", tmp_path / "cache"
    (lake / "dt=1").mkdir(parents=True)
    table = pa.table({"id": np.random.default_rng(0).integers(0, 1 << 60, 400_000)})
    pq.write_table(table, lake / "dt=1" / "second.parquet", compression="none", use_dictionary=False)
    pq.write_table(table.slice(0, 10), lake / "dt=1" / "first.parquet")
    stalled, go_on = threading.Event(), threading.Event()
    real = LocalSource.read
    calls = {"big": 0, "small": 0}

    def read(self: LocalSource, path: str, offset: int, length: int, *rest: str) -> Iterator[bytes]:
        name = "big" if "second" in path else "small"
        calls[name] += 1
        if name == "small" and calls[name] == 1:
            stalled.wait(20)
            raise pqcache.SourceDenied("", "not today")
        for number, chunk in enumerate(real(self, path, offset, length, *rest)):
            for start in range(0, len(chunk), 1 << 19):
                if name == "big" and calls[name] == 1 and number == 0 and start == 1 << 20:
                    stalled.set()
                    go_on.wait(20)
                if name == "big" and calls[name] == 2 and start == 1 << 19:
                    go_on.set()
                    threading.Event().wait(0.3)
                yield chunk[start : start + (1 << 19)]

    monkeypatch.setattr(LocalSource, "read", read)
    with pytest.raises(pqcache.SourceDenied):
        pqcache.sync(str(lake), cache)
    seen: list[Event] = []
    pqcache.sync(cache, on_event=seen.append)
    assert calls["big"] == 2
    assert [event for event in seen if isinstance(event, Published)]
    assert check_snapshot(cache, [rows_at(lake)]) == 0
