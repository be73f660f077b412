"""Damaged column chunks: what is read from their pages is what pyarrow reads, or nothing."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.parquet.footer import thrift
from pqcache.parquet.pages import page_format, page_reader
from pqcache.parquet.pages.byte_arrays import views_of
from pqcache.parquet.pages.leaf_column import leaf_of
from pqcache.parquet.pages.page_reader import Reader
from pqcache.system.buffer_pool import BufferPool

ROWS, LENGTH = 60, 4
RNG = np.random.default_rng(1)


def lists(values: Any) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1, dtype=np.int32) * LENGTH), pa.array(values))


COLUMNS = {
    "integers": lists(RNG.integers(0, 50, ROWS * LENGTH)),
    "floats": lists(RNG.random(ROWS * LENGTH).astype(np.float32)),
    "given up": lists(np.arange(ROWS * LENGTH)),
    "ragged": pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(1 + np.arange(ROWS) % 7)]).astype(np.int32),
        RNG.integers(0, 50, int((1 + np.arange(ROWS) % 7).sum())),
    ),
    "few strings": pa.array([f"{'k' * 90}{row % 5}" for row in range(ROWS)]),
    "strings": pa.array([f"{row}" * (20 + row % 9) for row in range(ROWS)]),
}


def written(name: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"t": COLUMNS[name]}), sink, write_batch_size=16, **options)
    return sink.getvalue()


def read_pages(path: Path, ragged: bool = False) -> pa.Array | None:
    """Return the column as it is read from its pages, lists of one length without it; None where it is not."""
    file = pq.ParquetFile(path)
    leaf = leaf_of(file.metadata, "t", file.schema_arrow.field(0).type)
    assert leaf is not None
    chunk = file.metadata.row_group(0).column(0)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ragged:
            lists_of = Reader(BufferPool()).lists(descriptor, chunk, leaf)
            found = (
                None if lists_of is None else pa.ListArray.from_arrays(lists_of.ends.astype(np.int32), lists_of.values)
            )
            return found if found is not None and len(found) == ROWS else None  # the loader compares it
        if leaf.repetition:
            values = Reader(BufferPool()).values(descriptor, chunk, leaf, LENGTH)
            return None if values is None else pa.array(np.array(values)).view(pa.binary(values.itemsize))
        arrays = Reader(BufferPool()).byte_arrays(descriptor, chunk, leaf)
        return None if arrays is None else views_of(arrays).cast(pa.binary())
    except page_format.MoreValues:
        return None  # the loader refuses it
    finally:
        os.close(descriptor)


def read_by_arrow(path: Path, ragged: bool = False) -> pa.Array | None:
    """Return the same as pyarrow reads it; None where it refuses the file, or reads nulls or other lists."""
    try:
        column = pq.ParquetFile(path).read_row_group(0, use_threads=False).column(0).combine_chunks()
    except (pa.ArrowException, OSError):
        return None
    if column.null_count or len(column) != ROWS:
        return None
    if not pa.types.is_list(column.type):
        return column.cast(pa.binary())
    if ragged:
        return None if column.flatten().null_count or 0 in column.value_lengths().to_pylist() else column
    if set(column.value_lengths().to_pylist()) != {LENGTH} or column.flatten().null_count:
        return None
    values = column.flatten()
    return values.view(pa.binary(values.type.bit_width // 8))


def check_damage(path: Path, name: str, times: int, **options: Any) -> int:
    """Change some bytes so many times, and return how often the column is still read from its pages."""
    good, found = written(name, **options), 0
    end = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for _ in range(times):
        bad = bytearray(good)
        for at in random.sample(range(4, end), random.choice((1, 1, 1, 2, 3))):
            bad[at] = random.choice((bad[at] ^ 1 << random.randrange(8), random.randrange(256), 0, 255))
        path.write_bytes(bad)
        pages = read_pages(path, name == "ragged")
        if pages is not None:
            found += 1
            assert pages.equals(read_by_arrow(path, name == "ragged")), bytes(bad)
    return found


@pytest.mark.deep
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "lz4", "gzip"])
def test_no_damaged_byte_gives_other_values(tmp_path: Path, name: str, codec: str) -> None:
    random.seed(f"{name} {codec}")
    found = 0
    for version in ("1.0", "2.0"):
        for dictionary in (False, True):
            how = {"data_page_version": version, "use_dictionary": dictionary}
            found += check_damage(tmp_path / "t.parquet", name, 250, compression=codec, **how)
    assert found > 20


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("integers", 60),
        ("ragged", 60),
        *(pytest.param(name, 2000, marks=pytest.mark.deep) for name in ("integers", "floats", "given up", "ragged")),
    ],
)
@pytest.mark.parametrize("codec", ["none", "snappy"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_no_damaged_byte_of_several_pages_gives_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, times: int, codec: str, version: str
) -> None:
    """Pages of a dictionary, which are decoded one or two at a time."""
    random.seed(f"{name} {codec} {version}")
    monkeypatch.setattr(page_reader, "_TOGETHER", 500)
    how = {"data_page_version": version, "data_page_size": 100, "dictionary_pagesize_limit": 600}
    assert check_damage(tmp_path / "t.parquet", name, times, compression=codec, **how) > times // 40


@pytest.mark.parametrize("number", [page_format.NULLS, page_format.ROWS])
@pytest.mark.parametrize("name", ["floats", "strings"])
def test_the_counts_of_a_page_are_compared(tmp_path: Path, name: str, number: int) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(written(name, compression="none", data_page_version="2.0", use_dictionary=False))
    assert read_pages(path) is not None
    begin = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    good = path.read_bytes()
    header, size = thrift.decode_first(good[begin:], "x")
    about = header[page_format.DATA_V2][1]
    about[number] = (thrift.I32, about[number][1] + 1)
    changed = thrift.encode(header)
    assert len(changed) == size
    path.write_bytes(good[:begin] + changed + good[begin + size :])
    assert read_pages(path) is None


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("name", ["integers", "strings"])
def test_values_fill_their_page(tmp_path: Path, name: str, version: str) -> None:
    """A byte more than the values take is damage of a length or a count, and pyarrow decides on it."""
    path = tmp_path / "t.parquet"
    path.write_bytes(written(name, compression="snappy", data_page_version=version, use_dictionary=False))
    assert read_pages(path) is not None
    original = page_format.decompress_page

    def longer(*arguments: Any) -> Any:
        return np.append(original(*arguments), np.uint8(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_format, "decompress_page", longer)
        assert read_pages(path) is None
