"""What must hold of a cache at every instant: ``current`` is one of the complete snapshots it may be."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache import Cache
from pqcache.store.key_lookup import check_key_index, columns_indexed, directory_of
from pqcache.store.manifest import summarize
from pqcache.store.partition_paths import is_hidden, is_hidden_directory, parent
from pqcache.store.row_group_index import build_index
from pqcache.store.snapshot import read_summary
from tests.faults.runner import RunResult

Rows = Mapping[str, pa.Table]  # by partition directory, in path order

_ROOT = {
    "CACHEDIR.TAG",
    "pqcache.toml",
    "lock",
    "history.jsonl.zst",
    "running.json",
    "snapshots.json",
    "memo.json",
    "current",
    "snapshots",
    "candidate",
    "tmp",
}


def rows_at(root: Path) -> Rows:
    """Return the rows of each partition directory of a dataset, files in path order."""
    tables: dict[str, list[pa.Table]] = {}
    for path in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.parquet") if p.is_file()):
        if not is_hidden(path.rpartition("/")[2]) and not is_hidden_directory(parent(path)):
            with pq.ParquetFile(root / path) as file:
                tables.setdefault(parent(path), []).append(file.read().replace_schema_metadata())
    return {directory: pa.concat_tables(found) for directory, found in tables.items()}


def same_rows(one: Rows, other: Rows) -> bool:
    """Return whether two datasets have the same rows in the same order."""
    return set(one) == set(other) and all(one[name].equals(other[name]) for name in one)


def check_snapshot(cache: Path, versions: Sequence[Rows | None]) -> int:
    """Assert that ``current`` is complete and return which of ``versions`` it is; None stands for no snapshot yet."""
    link = cache / "current"
    if not link.is_symlink():
        assert not link.exists()
        assert None in versions, "the snapshot is gone"
        return list(versions).index(None)
    target = os.readlink(link)
    assert re.fullmatch(r"snapshots/\d{8}T\d{6}Z-\d{4,}", target), target
    snapshot = Cache.open(cache).current()
    assert snapshot is not None
    manifest = snapshot.manifest()
    for entry in manifest.files:
        status = os.lstat(snapshot.path / entry.path)
        assert stat.S_ISREG(status.st_mode), f"{entry.path} is no plain file"
        assert status.st_size == entry.size, f"{entry.path}: {status.st_size} bytes, {entry.size} in the manifest"
    there = {p.relative_to(snapshot.path).as_posix() for p in snapshot.path.rglob("*") if not p.is_dir()}
    extra = there - {entry.path for entry in manifest.files}
    for column in columns_indexed(snapshot.path):
        directory = directory_of(snapshot.path, column)
        known = check_key_index(directory, deep=True)
        assert known.rows == manifest.rows
        files = ["index.arrow", "checksums.json", *(run.file for run in known.runs)]
        extra -= {f"_pqcache/keys/{directory.name}/{name}" for name in files}
    known = ("files.arrow", "row_groups.arrow", "summary.json", "checksums.json", "lease")
    assert extra <= {f"_pqcache/{name}" for name in known}, extra
    assert read_summary(snapshot) == summarize(manifest)
    index, built = snapshot.index(), build_index(snapshot.path, [entry.path for entry in manifest.files], 1)
    assert index.paths == built.paths
    assert index.table.num_rows == built.table.num_rows == manifest.row_groups
    for name in ("file", "row_group", "rows", "bytes", "offset"):
        assert index.table[name].equals(built.table[name]), f"the index is wrong in {name}"
    rows = rows_at(snapshot.path)
    assert sum(table.num_rows for table in rows.values()) == manifest.rows
    for number, version in enumerate(versions):
        if version is not None and same_rows(rows, version):
            return number
    raise AssertionError(f"{target} holds neither the old rows nor the new ones")


def check_error(ran: RunResult) -> None:
    """Assert that a run ended well, or with one line that says what is wrong."""
    if ran.code:
        assert ran.code == 1, ran.stderr
        (line,) = ran.stderr.splitlines()
        assert "a bug?" not in line, line
        assert "None" not in line, line


def check_clean(cache: Path) -> None:
    """Assert that a run that ended well left nothing behind."""
    left = sorted(path.relative_to(cache).as_posix() for path in (cache / "tmp").rglob("*"))
    assert not left, f"left in tmp: {left}"
    strange = {path.name for path in cache.iterdir()} - _ROOT
    assert not strange, f"left in the cache: {strange}"
