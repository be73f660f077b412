"""Files without a suffix are looked into, once; what is passed over is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.errors import ParquetError, SourceError, UsageError
from pqcache.events import Event, Warned
from pqcache.store.drivers.local import LocalSource
from pqcache.store.layout import MEMO
from pqcache.torch import ParquetDataset
from tests.datasets import write_day
from tests.remote import make_remote

NAMES = ("000000_0", "20261101_063012_00012_abcde_5f1e0b3a", "bucket_00000", "part-00003-5f1e.c000")


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A table as Trino and Hive write it: no name has a suffix, and one partition has an empty file."""
    root = tmp_path / "lake"
    for day in (1, 2):
        write_day(root, f"2026-11-0{day}", first=day * 1000, files=4, rows=10)
        directory = root / f"dt=2026-11-0{day}"
        for path, name in zip(sorted(directory.glob("*.parquet")), NAMES, strict=True):
            path.rename(directory / name)
        (directory / "000001_0").touch()
    return root


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of which a local source has read a few bytes."""
    found: list[str] = []
    real = LocalSource.read

    def read(self: LocalSource, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        if length < 10:
            found.append(path)
        return real(self, path, offset, length, tag)

    monkeypatch.setattr(LocalSource, "read", read)
    return found


def sync(source: Path, cache: Path, **options: Any) -> tuple[pqcache.SyncReport, list[str]]:
    events: list[Event] = []
    report = pqcache.sync(source, cache, on_event=events.append, **options)
    return report, [event.message for event in events if isinstance(event, Warned)]


def test_names_without_a_suffix_are_taken_by_content(lake: Path, tmp_path: Path) -> None:
    report, warnings = sync(lake, tmp_path / "cache")
    assert (report.rows, report.files, warnings) == (80, 8, [])
    assert pqcache.inspect(lake).rows == 80
    assert len(ParquetDataset(lake, columns=["id"], batch_size=None)) == 80
    assert pqcache.repartition(lake, tmp_path / "out").rows == 80


def test_each_file_is_looked_into_once(lake: Path, tmp_path: Path, reads: list[str]) -> None:
    (lake / "dt=2026-11-01" / "table-of-contents").write_text("neither Parquet nor empty")
    cache = tmp_path / "cache"
    sync(lake, cache)
    assert len(reads) == 10, "a second read only where the first bytes are not Parquet's"
    reads.clear()
    for _ in range(2):
        report, warnings = sync(lake, cache)
        assert (report.published, reads, len(warnings)) == (False, [], 1)
    write_day(lake, "2026-11-03", files=1, rows=10)
    shutil.copy(lake / "dt=2026-11-03" / "part-00000.parquet", lake / "dt=2026-11-03" / "000000_0")
    assert sync(lake, cache)[0].rows == 100
    assert reads == ["dt=2026-11-03/000000_0"]
    remembered = json.loads((cache / MEMO).read_text())
    assert (len(remembered["parquet"]), len(remembered["other"])) == (9, 1)
    for path in lake.rglob("000000_0"):
        path.unlink()
    sync(lake, cache)
    assert len(json.loads((cache / MEMO).read_text())["parquet"]) == 6, "what is gone is forgotten"


def test_a_damaged_memory_is_read_again(lake: Path, tmp_path: Path, reads: list[str]) -> None:
    cache = tmp_path / "cache"
    sync(lake, cache)
    for text in ("", "[]", "{", '{"format": 2}', '{"format": 1, "parquet": 3, "other": []}'):
        (cache / MEMO).write_text(text)
        reads.clear()
        assert not sync(lake, cache)[0].published
        assert len(reads) == 8


def test_what_is_passed_over_is_counted(lake: Path, tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", lake / "dt=2026-11-01" / "000009_0"
    other.write_bytes(b"ORC" + bytes(50))
    report, warnings = sync(lake, cache)
    assert report.files == 8
    assert warnings == [
        f"{lake}: 1 file without a Parquet suffix was not taken (dt=2026-11-01/000009_0); --all-files takes them"
    ]
    with pytest.warns(UserWarning, match="1 file without a Parquet suffix was not taken"):
        assert len(ParquetDataset(lake, columns=["id"], batch_size=None)) == 80
    for path in lake.rglob("000001_0"):
        path.unlink()
    with pytest.raises(ParquetError, match="000009_0"):
        sync(lake, cache, all_files=True)
    other.unlink()
    assert sync(lake, cache, all_files=True)[0].files == 8
    assert (lake / "dt=2026-11-01" / "bucket_00000").rename(lake / "dt=2026-11-01" / "bucket.csv")
    assert sync(lake, cache)[0].files == 8, "it is remembered"
    assert sync(lake, cache, all_files=False)[0].files == 7


def test_a_table_of_which_half_would_be_passed_over_is_refused(lake: Path, tmp_path: Path) -> None:
    for path in (lake / "dt=2026-11-02").iterdir():
        path.write_bytes(b"ORC" + bytes(50))
    for call in (
        lambda: pqcache.sync(lake, tmp_path / "cache"),
        lambda: pqcache.inspect(lake),
        lambda: pqcache.repartition(lake, tmp_path / "out"),
        lambda: ParquetDataset(lake),
    ):
        with pytest.raises(UsageError, match=r"5 files without a Parquet suffix .* would not be taken, beside 4 "):
            call()
    assert not (tmp_path / "cache").exists()
    report, warnings = sync(lake, tmp_path / "cache", as_files=True)
    assert (report.files, len(warnings)) == (4, 1)
    with pytest.warns(UserWarning, match="5 files without"):
        assert len(ParquetDataset(lake, columns=["id"], batch_size=None, as_files=True)) == 40


def test_the_first_or_the_last_bytes_make_a_parquet_file(lake: Path, tmp_path: Path) -> None:
    """Readers look at the footer alone; a file that is truncated is an error."""
    path = lake / "dt=2026-11-01" / "000000_0"
    path.write_bytes(bytes(4) + path.read_bytes()[4:])
    assert sync(lake, tmp_path / "cache")[0].rows == 80
    path.write_bytes(b"PAR1" + path.read_bytes()[4:-8])
    with pytest.raises(ParquetError, match="000000_0"):
        sync(lake, tmp_path / "cache")


def test_documents_and_markers_are_not_counted(lake: Path, tmp_path: Path) -> None:
    for name in ("README", "LICENSE", "notes.txt", "schema.json", "_SUCCESS", "dt=2026-11-01_$folder$"):
        (lake / name).write_text("x" * 100_000)
    for day in lake.glob("dt=*-0?"):
        (day / "READY").write_bytes(b"ready since 04:00")
    report, warnings = sync(lake, tmp_path / "cache", marker="READY")
    assert (report.rows, warnings) == (80, [])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("hdfs", marks=pytest.mark.hdfs),
        pytest.param("webhdfs", marks=pytest.mark.hdfs),
        pytest.param("s3", marks=pytest.mark.s3),
    ],
)
def test_other_stores_are_looked_into_too(
    kind: str, lake: Path, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    (lake / "dt=2026-11-01" / "000009_0").write_bytes(b"ORC" + bytes(50))
    cache = tmp_path / "cache"
    for remote in make_remote(kind, request, tmp_path):
        remote.upload(lake)
        with caplog.at_level("DEBUG", "pqcache.sync"):
            events: list[Event] = []
            assert pqcache.sync(remote.url, cache, on_event=events.append).rows == 80
            assert sum(isinstance(event, Warned) for event in events) == 1
            assert "9 files are looked into" in caplog.text
            caplog.clear()
            assert not pqcache.sync(cache).published
            assert "are looked into" not in caplog.text
        assert all(
            (cache / "current" / f"{path}.parquet").read_bytes() == (lake / path).read_bytes()
            for path in (f"dt=2026-11-0{day}/{name}" for day in (1, 2) for name in NAMES)
        )
        remote.put("_delta_log/00000000000000000000.json", b"{}")
        with pytest.raises(SourceError, match="deltalake cannot read its log"):
            pqcache.sync(cache)


def test_a_file_that_vanishes_before_it_is_looked_into_is_listed_again(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = lake / "dt=1" / "gone"
    gone.parent.mkdir(exist_ok=True)
    gone.write_bytes(b"PAR1" + bytes(100))
    real = LocalSource.read

    def read(self: LocalSource, path: str, *rest: Any) -> Iterator[bytes]:
        gone.unlink(missing_ok=True)
        return real(self, path, *rest)

    monkeypatch.setattr(LocalSource, "read", read)
    assert pqcache.sync(lake, tmp_path / "cache").published
