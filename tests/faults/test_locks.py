"""A cache on NFS, and on a file system without locks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import pqcache
from pqcache.events import Event, Fetched, Warned
from tests.datasets import write_day
from tests.faults.lakes import lake_of

WITHOUT = [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF]


def as_nfs(real: Callable[[int, int], None]) -> Callable[[object, int], None]:
    """Return a flock as NFS has it: a lock of bytes, for which a file has to be open for that."""

    def flock(file: object, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()  # type: ignore[attr-defined]
        opened = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if opened == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    return flock


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", as_nfs(fcntl.flock))


@pytest.fixture(params=WITHOUT, ids=[errno.errorcode[number] for number in WITHOUT])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def nights(lake: Path, cache: Path, count: int, on_event: Callable[[Event], None]) -> None:
    """Sync a source that changes each night."""
    for night in range(count):
        write_day(lake, "2026-11-01", files=1, rows=20, first=1000, seed=night)
        assert pqcache.sync(str(lake), cache, on_event=on_event).published


def snapshots(cache: Path) -> list[str]:
    return sorted(os.listdir(cache / "snapshots"))


def test_old_snapshots_are_removed_on_nfs(nfs: None, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=1, files=1)
    events: list[Event] = []
    nights(lake, cache, 4, events.append)
    assert len(snapshots(cache)) == 2
    assert not [event for event in events if isinstance(event, Warned)]
    held, lease = pqcache.Cache.open(cache).lease()
    with lease:
        nights(lake, cache, 3, events.append)
        assert held.path.exists()
    nights(lake, cache, 1, events.append)
    assert not held.path.exists()
    assert pqcache.repartition(lake, tmp_path / "target", row_group_size=4096).rows == 20


def test_without_locks_each_run_says_so_once_and_keeps_old_snapshots(no_locks: None, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=1, files=1)
    for night in range(4):
        events: list[Event] = []
        nights(lake, cache, 1, events.append) if not night else None
        write_day(lake, "2026-11-01", files=1, rows=20, first=1000, seed=100 + night)
        assert pqcache.sync(cache, on_event=events.append).published
        (warned,) = [event.message for event in events[-100:] if isinstance(event, Warned)][-1:]
        assert warned.startswith(f"{cache}: its file system has no locks")
        assert f"'pqcache gc {cache} --older-than 7d'" in warned
    assert len(snapshots(cache)) == 5  # their readers are not known
    with pqcache.Cache.open(cache).lease()[1]:
        assert sum(batch.num_rows for batch in pqcache.Cache.open(cache).batches(["id"])) == 20
    assert pqcache.gc(cache, keep=1).removed == ()
    assert len(pqcache.gc(cache, keep=1, older_than=0.001).removed) == 4
    assert len(snapshots(cache)) == 1
    assert pqcache.repartition(lake, tmp_path / "target", row_group_size=4096).rows == 20


@pytest.mark.parametrize("no_locks", WITHOUT[:1], indirect=True)
def test_without_locks_a_run_does_not_publish_over_another(no_locks: None, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=1, files=1)
    nights(lake, cache, 2, lambda _: None)
    first, second = snapshots(cache)

    def roll_back(event: Event) -> None:
        if isinstance(event, Fetched):
            pqcache.rollback(cache, "1")

    write_day(lake, "2026-11-01", files=1, rows=20, first=1000, seed=9)
    with pytest.raises(pqcache.CacheLocked, match="another run has published meanwhile"):
        pqcache.sync(cache, on_event=roll_back)
    assert os.readlink(cache / "current") == f"snapshots/{first}"
    assert snapshots(cache) == [first, second]
