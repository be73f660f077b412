"""What goes wrong on the way from the source to the disk, and what a run that ends there leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Warned
from pqcache.store.arriving import publish_arriving
from pqcache.store.arriving.arrival_map import ArrivalState, FileState
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync.fill import fetch
from tests.store.sync.fill.filling import Filling, LocalReads, check_same, killed_at_first


def write_columns(path: Path, rows: int = 40_000) -> None:
    """Write a row group of six columns of 320 kB, so that columns that are not wanted are not fetched."""
    rng = np.random.default_rng(0)
    table = pa.table({name: rng.integers(0, 1 << 62, rows) for name in "abcdef"})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, compression="none", use_dictionary=False, data_page_size=1 << 30)


@pytest.mark.parametrize("cut", [{0}, {1}, {2}, {0, 1}, {0, 2, 3}, {0, 1, 2, 3}], ids=str)
def test_a_connection_that_ends_early_in_an_orderly_way(
    cut: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of some columns has several ranges at the source; each is complete before the next one is fetched."""
    write_columns(tmp_path / "made" / "part-0.parquet")
    read, begun = LocalSource.read, list[int]()

    def shortened(source: LocalSource, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        is_end = offset + length == (tmp_path / "made" / path).stat().st_size
        if not is_end:
            begun.append(length)
        short = not is_end and len(begun) - 1 in cut
        yield from read(source, path, offset, length // 2 if short else length, tag)

    monkeypatch.setattr(LocalSource, "read", shortened)
    pqcache.sync(tmp_path / "made", tmp_path / "cache", columns=["a", "c", "e"], fill=True, jobs=1)
    assert len(begun) == 3 + len(cut), "three ranges, and the rest of each that was cut"
    monkeypatch.undo()
    pqcache.sync(tmp_path / "made", tmp_path / "plain", columns=["a", "c", "e"])
    check_same(tmp_path / "plain", tmp_path / "cache")


def write_files(root: Path, rows: int = 40_000, files: int = 3) -> Path:
    """Write files of one column, larger than what is read with a footer unless they have few rows."""
    root.mkdir()
    for number in range(files):
        table = pa.table({"id": np.arange(rows) + number * rows})
        pq.write_table(table, root / f"part-{number}.parquet", compression="none", use_dictionary=False)
    return root


@pytest.mark.parametrize("how", [{}, {"columns": ["id"]}], ids=["all", "columns"])
def test_a_disk_that_takes_only_a_part_of_a_write(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk does that is nearly full; the next write finds space again."""
    made = write_files(tmp_path / "made", rows=9_000)
    pwrite = os.pwrite

    def short(descriptor: int, data: bytes, offset: int) -> int:
        return pwrite(descriptor, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    pqcache.sync(made, tmp_path / "cache", fill=True, **how)
    monkeypatch.undo()
    pqcache.sync(made, tmp_path / "plain", **how)
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_an_end_that_the_disk_has_lost_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The footer is fetched once, and indexed: what is on the disk has to be that one."""
    made = write_files(tmp_path / "made")
    filling = Filling(LocalReads(monkeypatch), made, tmp_path / "cache")
    snapshot = filling.arriving()
    lost = snapshot.path / "part-1.parquet"
    with open(lost, "r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(bytes(100))
    with snapshot.lease(), pytest.raises(pqcache.CacheError, match=r"part-1.parquet: its end is not on the disk as it"):
        filling.end()
    assert snapshot.is_abandoned()
    assert snapshot.why_abandoned() == f"{lost}: its end is not on the disk as it was written"
    assert CacheDirectory(tmp_path / "cache").current() is None
    monkeypatch.undo()
    assert pqcache.sync(tmp_path / "cache").snapshot != snapshot.id, "it cannot be completed, and is given up"
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_a_run_that_ended_when_a_file_was_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may have its mode, by which only root can write it, while bytes outside of its chunks are missing."""
    made = write_files(tmp_path / "made", files=1)
    snapshot = killed_at_first(LocalReads(monkeypatch), made, tmp_path / "cache")
    (snapshot.path / "part-0.parquet").chmod(0o444)
    opened = os.open

    def as_another_than_root(path: Any, flags: int, *more: Any, **how: Any) -> int:
        is_written = flags & os.O_ACCMODE != os.O_RDONLY and os.path.isfile(path)
        if is_written and not os.stat(path, follow_symlinks=False).st_mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return opened(path, flags, *more, **how)

    monkeypatch.setattr(os, "open", as_another_than_root)
    assert pqcache.sync(tmp_path / "cache").snapshot == snapshot.id
    monkeypatch.undo()
    pqcache.sync(made, tmp_path / "plain")
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_a_file_that_is_removed_when_all_of_it_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is known who may read it: the run goes on from a new listing."""
    made = write_files(tmp_path / "made")
    first = Filling(LocalReads(monkeypatch), made, tmp_path / "cache")
    snapshot, arrived = first.arriving(), first.arriving().map()
    opened = fetch.open_copy

    def removed(path: Path) -> AbstractContextManager[int]:
        if path.name == "part-1.parquet":
            (made / path.name).unlink(missing_ok=True)
        return opened(path)

    monkeypatch.setattr(fetch, "open_copy", removed)
    report = first.end()
    assert (report.files, report.snapshot != snapshot.id) == (2, True)
    assert (arrived.state, arrived.files[1]) == (ArrivalState.ABANDONED, FileState.CHANGED)
    assert any(
        isinstance(e, Warned) and "part-1.parquet: vanished while it was copied" in e.message for e in first.events
    )


def test_a_reader_that_writes_while_the_snapshot_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_files(tmp_path / "made")
    removed, late = publish_arriving.remove_tree, list[Path]()

    def remove(directory: Path) -> None:
        """Remove a directory into which a reader that has found it writes at the last moment."""
        (directory / "late.wanted").touch()
        late.append(directory)
        if len(late) == 1:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), "wanted")
        removed(directory)

    monkeypatch.setattr(publish_arriving, "remove_tree", remove)
    report = pqcache.sync(made, tmp_path / "cache", fill=True)
    assert (report.published, len(late)) == (True, 1)
    assert not late[0].exists(), "the end of the run has removed it"
    assert not list((tmp_path / "cache" / "current" / "_pqcache").glob("wanted*"))


def test_a_disk_that_cannot_make_a_file_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_files(tmp_path / "made")
    filling = Filling(LocalReads(monkeypatch), made, tmp_path / "cache")
    snapshot = filling.at_first_range()  # before, it is the directory that would not become durable

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as damaged, snapshot.lease():
        damaged.setattr(os, "fsync", fail)
        with pytest.raises(pqcache.PqcacheError, match="Input/output error"):
            filling.end()
    assert snapshot.is_abandoned()
    assert snapshot.why_abandoned().endswith(".parquet: Input/output error")
    report = pqcache.sync(tmp_path / "cache")
    assert report.published
    assert report.snapshot != snapshot.id
