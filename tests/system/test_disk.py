"""Direct I/O falls back to the page cache where a file system refuses it, and the log says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pqcache.system import disk
from pqcache.system.disk import DIRECT_IO_BLOCK, write_at


def refuse(*_: Any) -> Any:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_refused_write_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, real, calls = os.urandom(2 * DIRECT_IO_BLOCK + 5), os.pwrite, [refuse]
    monkeypatch.setattr(disk.os, "pwrite", lambda *values: (calls.pop() if calls else real)(*values))
    with (tmp_path / "x").open("wb") as file, caplog.at_level("DEBUG", "pqcache"):
        write_at(file.fileno(), memoryview(data), 0, direct=True)
    assert (tmp_path / "x").read_bytes() == data
    assert "direct I/O is refused" in caplog.text


def test_what_was_replaced_by_a_link_meanwhile_is_not_followed(tmp_path: Path) -> None:
    """A directory in a tree that is removed may belong to another user, who replaces it between two steps."""
    outside = tmp_path / "outside"
    (outside / "below").mkdir(parents=True)
    (outside / "below" / "file").touch()
    outside.chmod(0o555)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").symlink_to(outside)
    for path in (tree / "a" / "below" / "file", tree / "a" / "below"):
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            disk._remove_writable(tree, path, path.name == "below")
    assert (outside / "below" / "file").exists()
    assert outside.stat().st_mode & 0o777 == 0o555


def test_a_directory_that_is_not_writable_is_made_so_to_be_emptied(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").touch()
    (tree / "a" / "b").chmod(0o555)
    disk._remove_writable(tree, tree / "a" / "b" / "file", False)
    assert (tree / "a" / "b").stat().st_mode & 0o700 == 0o700
    disk._remove_writable(tree, tree / "a" / "b", True)
    disk._remove_writable(tree, tree / "a", True)
    disk._remove_writable(tree, tree, True)
    assert not tree.exists()
