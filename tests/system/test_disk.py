"""Direct I/O falls back to the page cache where a file system refuses it, and the log says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pqcache.system import disk
from pqcache.system.disk import DIRECT_IO_BLOCK, enable_direct_io, write_at


def refuse(*_: Any) -> Any:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_without_direct_io_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    monkeypatch.setattr(disk, "_O_DIRECT", 0o40000)
    with (tmp_path / "x").open("wb") as file, caplog.at_level("DEBUG", "pqcache"):
        assert not enable_direct_io(file.fileno())
    assert "through the page cache" in caplog.text


def test_a_refused_write_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, real, calls = os.urandom(2 * DIRECT_IO_BLOCK + 5), os.pwrite, [refuse]
    monkeypatch.setattr(disk.os, "pwrite", lambda *values: (calls.pop() if calls else real)(*values))
    with (tmp_path / "x").open("wb") as file, caplog.at_level("DEBUG", "pqcache"):
        write_at(file.fileno(), memoryview(data), 0, direct=True)
    assert (tmp_path / "x").read_bytes() == data
    assert "direct I/O is refused" in caplog.text
