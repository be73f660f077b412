"""What goes wrong on the way from the source to the disk, and what a run that ends there leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Warned
from pqcache.store import arriving
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync import fill
from tests.store.sync.fill.filling import Filling, LocalReads, check_same

TAIL = 64 << 10  # bytes that are read of a file with its footer


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


@pytest.mark.parametrize("large", [False, True])
def test_a_connection_that_ends_early_in_an_orderly_way(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come is kept, and the rest is asked for: of a file, and of each range of a large one."""
    if large:
        monkeypatch.setattr(fill, "_RANGE", 100_000)
        monkeypatch.setattr(fill, "_LARGE", 200_000)
    made = write_files(tmp_path / "made")
    pqcache.sync(made, tmp_path / "plain")
    read, cut = LocalSource.read, list[int]()

    def shortened(source: LocalSource, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        is_footer = offset + length == (made / path).stat().st_size and length == TAIL
        is_short = not is_footer and len(cut) < 4
        cut.extend([length] * is_short)
        yield from read(source, path, offset, length // 2 if is_short else length, tag)

    monkeypatch.setattr(LocalSource, "read", shortened)
    pqcache.sync(made, tmp_path / "cache", fill=True, jobs=1)
    assert len(cut) == 4
    check_same(tmp_path / "plain", tmp_path / "cache")


def test_a_file_that_is_removed_when_all_of_it_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is known who may read it: the run goes on from a new listing."""
    made = write_files(tmp_path / "made")
    filling = Filling(LocalReads(monkeypatch), made, tmp_path / "cache")
    snapshot, mode = filling.at_first_file(), LocalSource.copy_mode

    def removed(source: LocalSource, path: str, *more: Any) -> int:
        if path == "part-1.parquet":
            (made / path).unlink(missing_ok=True)
        return mode(source, path, *more)

    monkeypatch.setattr(LocalSource, "copy_mode", removed)
    report = filling.end()
    assert (report.files, report.snapshot != snapshot.id) == (2, True)
    assert any(
        isinstance(e, Warned) and "part-1.parquet: vanished while it was copied" in e.message for e in filling.events
    )


def test_a_reader_that_writes_while_the_snapshot_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_files(tmp_path / "made")
    removed, late = arriving.remove_tree, list[Path]()

    def remove(directory: Path) -> None:
        """Remove a directory into which a reader that has found it writes at the last moment."""
        (directory / "late.wanted").touch()
        late.append(directory)
        if len(late) == 1:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), "wanted")
        removed(directory)

    monkeypatch.setattr(arriving, "remove_tree", remove)
    report = pqcache.sync(made, tmp_path / "cache", fill=True)
    assert (report.published, len(late)) == (True, 1)
    assert not late[0].exists(), "the end of the run has removed it"
    assert not list((tmp_path / "cache" / "current" / "_pqcache").glob("wanted*"))
