"""Delta's own golden tables, written by Spark: deletion vectors, column mapping, all kinds of checkpoints and types.

They are the archives in kernel/tests/golden_data of delta-kernel-rs, and are read where PQCACHE_GOLDEN_TABLES names a
directory with them, at any depth. Spark's rows, which most of them have, are the judge.
"""

from __future__ import annotations

import datetime as dt
import io
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import pqcache
from pqcache.errors import PqcacheError, SourceError, SourceIncomplete, UsageError
from tests.real_files import golden_tables

_REFUSED: dict[str, tuple[type[PqcacheError], str]] = {
    "unshredded-variant": (UsageError, "variantType"),
    "deltalog-invalid-protocol-version": (SourceError, "cannot read its log"),
    "deltalog-state-reconstruction-without-protocol": (SourceError, "cannot read its log"),
    "versions-not-contiguous": (SourceError, "lacks commits before version 2"),
    "log-replay-special-characters-b": (SourceIncomplete, "vanished"),  # it has a log alone
}
_ROWS = {"v2-checkpoints-parquet-with-sidecars": 1_233}  # without expected rows
_LOCAL_TIMES = {"data-reader-partition-values"}  # times in paths, which Spark read in the zone of its session
_EMPTY = {"log-replay-special-characters", "log-replay-special-characters-a", "deltalog-getChanges"}
_ARCHIVES = {
    path.name.removesuffix(".tar.zst"): path
    for path in sorted(golden_tables().rglob("*.tar.zst"))
    if path.stat().st_size < 60_000
}

pytestmark = pytest.mark.skipif(not _ARCHIVES, reason="PQCACHE_GOLDEN_TABLES names no directory with Delta's archives")


def _unpacked(name: str, target: Path) -> Path | None:
    """Unpack an archive; return the table's directory, None where there is no log."""
    data = zstandard.ZstdDecompressor().stream_reader(_ARCHIVES[name].read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="data")
    return next((path.parent for path in target.rglob("_delta_log")), None)


def _expected(table: Path) -> pa.Table:
    files = [path for path in (table.parent / "expected").rglob("*.parquet") if not path.name.startswith(".")]
    return pa.concat_tables([pq.ParquetFile(path).read() for path in files], promote_options="permissive")


def _value(value: Any) -> Any:
    """Return a value that is equal for equal ones, also of times with another unit or without a zone, which is UTC."""
    if isinstance(value, dt.datetime):
        return (
            value.replace(tzinfo=None)
            if value.tzinfo is None
            else value.astimezone(dt.timezone.utc).replace(tzinfo=None)
        )
    if isinstance(value, dict):
        return tuple(sorted((name, _value(item)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_value, value))
    return str(value) if isinstance(value, float) else value  # nan is itself


def _rows(table: pa.Table) -> Counter[Any]:
    return Counter(map(_value, table.to_pylist()))


@pytest.mark.parametrize(
    "name", [name for name in _ARCHIVES if name not in {*_REFUSED, *_ROWS, *_LOCAL_TIMES, *_EMPTY}]
)
def test_the_rows_are_sparks(name: str, tmp_path: Path) -> None:
    table = _unpacked(name, tmp_path / "golden")
    if table is None or not (table.parent / "expected").is_dir():
        pytest.skip("has no rows of Spark's, or no log")
    report = pqcache.sync(table, tmp_path / "cache")
    batches = pqcache.Cache(tmp_path / "cache").batches(shuffle=False)
    found, expected = pa.Table.from_batches(list(batches)), _expected(table)
    assert set(found.column_names) == set(expected.column_names)
    assert _rows(found) == _rows(expected)
    assert report.rows == expected.num_rows


@pytest.mark.parametrize("name", sorted(_ROWS.keys() & _ARCHIVES.keys()))
def test_a_table_has_all_its_rows(name: str, tmp_path: Path) -> None:
    assert pqcache.sync(str(_unpacked(name, tmp_path / "golden")), tmp_path / "cache").rows == _ROWS[name]


@pytest.mark.parametrize("name", sorted(_REFUSED.keys() & _ARCHIVES.keys()))
def test_what_would_not_come_out_right_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, reason = _REFUSED[name]
    table = _unpacked(name, tmp_path / "golden")
    with pytest.raises(kind, match=reason):
        pqcache.sync(str(table), tmp_path / "cache")
    assert not (tmp_path / "cache" / "current").exists()
