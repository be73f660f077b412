"""Locks on NFS, which locks no file exclusively that is open for reading only, and where there are none."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path

import pytest

from pqcache.system import locks

NUMBERS = [errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK]


def test_a_lock_is_held_busy_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    one, other = locks.open_to_lock(path), locks.open_to_lock(path)
    assert locks.try_lock(one, exclusive=False) is True
    assert locks.try_lock(other, exclusive=False) is True
    assert locks.try_lock(other, exclusive=True) is False
    assert locks.lock_holder(one) == f"process {os.getpid()} of {locks.user_name(os.geteuid())}"
    os.close(one)
    assert locks.try_lock(other, exclusive=True) is True
    os.close(other)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        locks.open_to_lock(tmp_path / "link")
    descriptor = os.open(path, os.O_RDONLY)
    assert locks.lock_holder(descriptor) == ""
    for number in NUMBERS:

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        assert locks.try_lock(descriptor, exclusive=True) is None

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output"):
        locks.try_lock(descriptor, exclusive=True)
    os.close(descriptor)


@pytest.mark.parametrize("knows", [True, False], ids=["own locks", "flock alone"])
def test_a_lock_of_those_who_may_write(knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    writer, other, reader = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
    if not knows:
        monkeypatch.setattr(locks.sys, "platform", "another")
    assert not locks.has_writer(reader)
    assert locks.lock_as_writer(writer) is True
    assert locks.has_writer(reader)
    assert locks.lock_as_writer(other) is False
    locks.unlock_as_writer(writer)
    assert not locks.has_writer(reader)
    assert locks.lock_as_writer(other) is True
    os.close(other)
    assert not locks.has_writer(reader)
    os.close(writer)
    os.close(reader)


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks of open files")
def test_who_may_only_read_is_no_writer(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    reader, other = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    assert locks.lock_as_writer(reader) is None
    fcntl.flock(reader, fcntl.LOCK_EX)
    fcntl.lockf(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not locks.has_writer(other)
    os.close(other)
    os.close(reader)
