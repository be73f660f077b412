"""rewrite_directory: files that fit are linked, sources are untouched, damage is named."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.rewrite.directory import count_unchanged_files, row_group_bytes
from pqcache.parquet.rewrite.recipe import RewriteOptions
from tests.parquet.rewrite.rewriting import (
    KB,
    check_same,
    check_sizes,
    rewrite,
)

# ---- linking


def fitting(path: Path, groups: int, last: int = 0, limit: int = 64 * KB) -> Path:
    """Write a file whose ``groups`` row groups fill 97 % of ``limit``, and one of ``last`` rows after them."""
    rng = np.random.default_rng(groups)
    n = 62
    blobs = pa.table({"b": [rng.bytes(1024) for _ in range(n * groups + last)]})
    pq.write_table(blobs, path, row_group_size=n, use_dictionary=False, compression="none", write_statistics=False)
    return path


def test_all_fit_and_keep_their_names(tmp_path: Path) -> None:
    sources = [fitting(tmp_path / "x.parquet", 3), fitting(tmp_path / "y.parquet", 2, last=5)]
    metadata = [pq.read_metadata(source) for source in sources]
    assert count_unchanged_files(metadata, RewriteOptions(row_group_size=64 * KB)) == 2
    result = rewrite(sources, tmp_path / "out")
    assert [output.path.name for output in result.outputs] == ["x.parquet", "y.parquet"]
    assert all(output.path.samefile(source) for output, source in zip(result.outputs, sources, strict=True))
    assert result.encoded == 0


def test_a_prefix_is_linked_and_the_rest_rewritten(tmp_path: Path) -> None:
    sources = [
        fitting(tmp_path / "x.parquet", 3),
        fitting(tmp_path / "y.parquet", 2, 5),
        fitting(tmp_path / "z.parquet", 1),
    ]
    assert (
        count_unchanged_files([pq.read_metadata(source) for source in sources], RewriteOptions(row_group_size=64 * KB))
        == 1
    )
    result = rewrite(sources, tmp_path / "out")
    assert [(output.path.name, output.linked) for output in result.outputs] == [
        ("part-00000.parquet", True),
        ("part-00001.parquet", False),
    ]
    assert result.outputs[0].path.samefile(sources[0])
    check_sizes(result, 64 * KB)
    check_same(sources, result)


def test_fits_at_the_edges(tmp_path: Path) -> None:
    sources = [fitting(tmp_path / "x.parquet", 2), fitting(tmp_path / "y.parquet", 2)]
    metadata = [pq.read_metadata(source) for source in sources]
    exact = row_group_bytes(metadata[0].row_group(0))
    assert 0.95 * 65 * KB < exact < 64 * KB
    for size, expected in ((exact, 2), (exact - 1, 0), (65 * KB, 2), (66 * KB, 0), (200 * KB, 0)):
        assert count_unchanged_files(metadata, RewriteOptions(row_group_size=size)) == expected


def test_fits_and_rows_larger_than_the_limit(tmp_path: Path) -> None:
    source = fitting(tmp_path / "x.parquet", 2)
    with pq.ParquetWriter(tmp_path / "y.parquet", pa.schema([("b", pa.binary())])) as writer:
        writer.write_table(pa.table({"b": [np.random.default_rng(0).bytes(99_000)]}))
    metadata = [pq.read_metadata(path) for path in (tmp_path / "y.parquet", source)]
    assert count_unchanged_files(metadata, RewriteOptions(row_group_size=64 * KB)) == 2


def test_fits_stops_at_another_schema_and_at_no_rows(tmp_path: Path) -> None:
    one = pq.read_metadata(fitting(tmp_path / "x.parquet", 2))
    pq.write_table(pa.table({"c": [1]}), tmp_path / "y.parquet")
    pq.write_table(pa.table({"b": pa.array([], pa.binary())}), tmp_path / "z.parquet")
    other, none = (pq.read_metadata(tmp_path / name) for name in ("y.parquet", "z.parquet"))
    options = RewriteOptions(row_group_size=64 * KB)
    assert count_unchanged_files([one, other], options) == 1
    assert count_unchanged_files([one, none, one], options) == 1
    assert count_unchanged_files([none], options) == 1
    assert count_unchanged_files([none, one], options) == 0
    assert count_unchanged_files([], options) == 0


def test_trailing_empty_files_vanish_beside_a_linked_prefix(tmp_path: Path) -> None:
    source = fitting(tmp_path / "x.parquet", 2, 5)
    pq.write_table(pa.table({"b": pa.array([], pa.binary())}), tmp_path / "z.parquet")
    result = rewrite([source, tmp_path / "z.parquet"], tmp_path / "out")
    assert [(output.path.name, output.linked) for output in result.outputs] == [("part-00000.parquet", True)]


def test_links_fall_back_to_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    source = fitting(tmp_path / "x.parquet", 2)
    (output,) = rewrite([source], tmp_path / "out").outputs
    assert not output.path.samefile(source)
    assert output.path.read_bytes() == source.read_bytes()


# ---- safety


def test_sources_are_untouched_and_outputs_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    fsync = os.fsync

    def record(handle: int) -> None:
        state = os.fstat(handle)
        synced[state.st_ino] = state.st_size
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    sources = [
        fitting(tmp_path / "x.parquet", 3),
        fitting(tmp_path / "y.parquet", 2, 5),
        fitting(tmp_path / "z.parquet", 1),
    ]
    before = [(hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in sources]
    result = rewrite(sources, tmp_path / "out")
    assert before == [(hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in sources]
    for output in result.outputs:
        state = output.path.stat()
        assert synced[state.st_ino] == state.st_size
    assert (tmp_path / "out").stat().st_ino in synced


def test_damaged_sources_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    table = pa.table({"a": range(9_000), "s": [f"{i * 7919 % 9973}" for i in range(9_000)]})
    pq.write_table(table, good, row_group_size=999)
    data = good.read_bytes()
    bad = tmp_path / "bad.parquet"
    damages = [b"", b"PAR1", data[:100], data[:-1], data[:-9], data[: len(data) // 2] + data[-8:], b"x" * 500]
    damages.append(data[:200] + bytes(5_000) + data[5_200:])
    for number, damage in enumerate(damages):
        bad.write_bytes(damage)
        target = tmp_path / f"out{number}"
        with pytest.raises(ParquetError, match=r"bad\.parquet"):
            rewrite([good, bad], target)
        assert not list(target.iterdir())
    with pytest.raises(ParquetError, match=r"gone\.parquet"):
        rewrite([good, tmp_path / "gone.parquet"], tmp_path / "out")


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    table = pa.table({"a": range(300), "l": [[str(i)] for i in range(300)]})
    pq.write_table(table, source, row_group_size=99, write_page_checksum=True)
    data = source.read_bytes()
    rng = np.random.default_rng(8)
    failed = 0
    for number in range(60):
        broken = bytearray(data)
        broken[rng.integers(4, len(data))] ^= 1 << rng.integers(0, 8)
        source.write_bytes(broken)
        try:
            rewrite([source], tmp_path / f"out{number}", 4 * KB)
        except ParquetError as error:
            failed += "a.parquet" in str(error)
    assert failed > 30


def test_refusals(tmp_path: Path) -> None:
    source = fitting(tmp_path / "x.parquet", 1)
    with pytest.raises(UsageError, match="no files"):
        rewrite([], tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        rewrite([source], tmp_path)


# ---- another reader, and what is written
