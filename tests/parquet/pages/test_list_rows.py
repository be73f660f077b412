"""Lists without an offset index, whose pages may begin within a row: ranges of rows are those that pyarrow reads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.parquet.pages import list_rows, page_format
from pqcache.parquet.pages.list_rows import RememberedRows
from pqcache.parquet.pages.row_ranges import PagedFile
from pqcache.system.buffer_pool import BufferPool
from tests.examples import examples
from tests.parquet.pages.list_pages import Row, write_lists

ROWS = st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=7), min_size=1, max_size=40)


def read(path: Path, names: list[str], low: int, high: int, **options: Any) -> dict[str, pa.ChunkedArray]:
    file = pq.ParquetFile(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        paged = PagedFile(path, file.metadata, file.schema_arrow, **options)
        return paged.read(descriptor, 0, names, low, high, BufferPool())
    finally:
        os.close(descriptor)


@settings(deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    cuts=st.lists(st.integers(1, 200), max_size=12),
    coded=st.integers(0, 12),
    packed=st.integers(0, 3),
    codec=st.sampled_from(["SNAPPY", "UNCOMPRESSED", "ZSTD"]),
    data=st.data(),
)
def test_pages_that_begin_anywhere(
    tmp_path: Path, rows: list[Row], cuts: list[int], coded: int, packed: int, codec: str, data: st.DataObject
) -> None:
    path = tmp_path / "a.parquet"
    write_lists(path, rows, cuts, coded, packed, codec)
    assert pq.read_table(path).to_pydict() == {"id": list(range(len(rows))), "t": rows}  # the file is right
    low = data.draw(st.integers(0, len(rows) - 1))
    high = data.draw(st.integers(low + 1, len(rows)))
    found = read(path, ["id", "t"], low, high)
    assert found["id"].to_pylist() == list(range(low, high))
    assert found["t"].to_pylist() == rows[low:high]


def test_a_range_reads_its_own_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "a.parquet", [[i, i, i] for i in range(1000)]
    begins = write_lists(path, rows, range(0, 3000, 100))
    read_from: set[int] = set()
    read_into: Callable[..., None] = page_format.read_into

    def counted(file: int, place: Any, offset: int) -> None:
        read_from.update(page for page, begin in enumerate(begins) if offset <= begin < offset + len(place))
        read_into(file, place, offset)

    remembered = RememberedRows(["t"], 1)
    assert read(path, ["t"], 0, 1, remembered=remembered.of)
    monkeypatch.setattr(page_format, "read_into", counted)
    for low, high, pages in ((500, 530, {15}), (501, 533, {15}), (501, 534, {15, 16}), (534, 560, {16})):
        read_from.clear()
        found = read(path, ["t"], low, high, remembered=remembered.of)
        assert found["t"].to_pylist() == rows[low:high]
        assert read_from == pages


def test_levels_are_decoded_once_for_all_that_share_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = tmp_path / "a.parquet", [[i] * (1 + i % 5) for i in range(200)]
    write_lists(path, rows, range(0, 500, 7))
    remembered = RememberedRows(["t", "u"], 3)
    assert remembered.of("v", 0) is None
    assert read(path, ["t"], 10, 20, remembered=lambda name, group: remembered.of(name, group + 1))
    monkeypatch.setattr(list_rows, "begins_of_lists", None)
    for low in range(0, 200, 9):
        found = read(path, ["t"], low, 200, remembered=lambda name, group: remembered.of(name, group + 1))
        assert found["t"].to_pylist() == rows[low:]
    assert not read(path, ["t"], 10, 20, remembered=remembered.of)  # of another row group


@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_what_pyarrow_writes_by_default(tmp_path: Path, length: int, version: str) -> None:
    rng, path = np.random.default_rng(length), tmp_path / "a.parquet"
    lengths = rng.integers(0, length + 1, 900)
    ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
    values = pa.array(
        np.where(rng.random(ends[-1]) < 0.5, rng.integers(0, 5, ends[-1]), rng.integers(0, 9999, ends[-1]))
    )
    nested = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 901, 3, dtype=np.int32)), pa.ListArray.from_arrays(ends, values)
    )
    masked = pa.ListArray.from_arrays(ends[:301], values, mask=pa.array(rng.random(300) < 0.1))
    table = pa.table({"masked": masked, "lists": pa.ListArray.from_arrays(ends[:301], values), "nested": nested})
    pq.write_table(
        table,
        path,
        data_page_size=500,
        write_batch_size=10,
        dictionary_pagesize_limit=2000,
        data_page_version=version,
    )
    for low, high in [(0, 300), (0, 1), (299, 300), (17, 140), (150, 151)]:
        found = read(path, table.column_names, low, high)
        assert sorted(found) == sorted(table.column_names)
        for name, column in found.items():
            assert column.to_pylist() == table[name].slice(low, high - low).to_pylist(), name


@pytest.mark.parametrize("codec", ["UNCOMPRESSED", "SNAPPY"])
def test_damaged_levels_are_no_other_rows(tmp_path: Path, codec: str) -> None:
    path, rows, rng = tmp_path / "a.parquet", [[i % 7] * (1 + i % 6) for i in range(120)], random.Random(3)
    begins = write_lists(path, rows, range(0, 400, 23), codec=codec)
    good = path.read_bytes()
    refused = 0
    for _ in range(80):
        damaged = bytearray(good)
        damaged[rng.choice(begins) + rng.randrange(40)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            expected = pq.read_table(path, columns=["t"])["t"].to_pylist()
        except (pa.ArrowException, OSError):
            expected = None
        low, high = sorted(rng.sample(range(121), 2))
        found = read(path, ["t"], low, high)
        refused += not found
        if found and expected is not None and len(expected) == len(rows):
            assert found["t"].to_pylist() == expected[low:high]
    assert refused
