"""Ranges of rows that are read from the pages that they lie in: the same rows as pyarrow's, and no other pages."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.row_ranges import PagedFile
from pqcache.system.buffer_pool import BufferPool

ROWS = 3000


def table() -> pa.Table:
    rng = np.random.default_rng(0)
    lists = [None if i % 11 == 0 else list(range(i, i + i % 7)) for i in range(ROWS)]
    structs = [None if i % 13 == 0 else {"x": i, "s": "y" * (i % 40)} for i in range(ROWS)]
    return pa.table(
        {
            "id": pa.array(range(ROWS), pa.int64()),
            "narrow": pa.array([i % 3 for i in range(ROWS)], pa.int8()),
            "noise": rng.random(ROWS).astype(np.float32),
            "null": pa.array([None if i % 5 else i for i in range(ROWS)], pa.int32()),
            "flag": pa.array([i % 2 == 0 for i in range(ROWS)]),
            "text": [f"{i} " * (i % 9) for i in range(ROWS)],
            "few": pa.array([f"k{i % 4}" for i in range(ROWS)]).dictionary_encode(),
            "large": pa.array([f"{i}" for i in range(ROWS)], pa.large_string()),
            "day": [dt.date(2026, 1, 1) + dt.timedelta(i % 90) for i in range(ROWS)],
            "ts": pa.array(range(ROWS), pa.timestamp("us", "Europe/Berlin")),
            "money": [decimal.Decimal(i) / 4 for i in range(ROWS)],
            "tokens": pa.array(lists, pa.list_(pa.int32())),
            "words": [[f"w{i % 50}"] * (i % 4) for i in range(ROWS)],
            "dense": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.int32(), 2)),
            "struct": structs,
            "map": pa.array([[(f"k{i % 5}", i)] * (i % 3) for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
            "dotted.name": pa.array(range(ROWS), pa.uint16()),
        }
    )


SMALL: dict[str, Any] = {"data_page_size": 700, "write_batch_size": 32, "dictionary_pagesize_limit": 4000}


def read(
    path: Path, group: int, names: list[str], low: int, high: int, coded: Collection[str] = ()
) -> dict[str, pa.ChunkedArray]:
    file = pq.ParquetFile(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        paged = PagedFile(path, file.metadata, file.schema_arrow)
        return paged.read(descriptor, group, names, low, high, BufferPool(), coded)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"data_page_version": "2.0", "compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"store_schema": False, "compression": "lz4", "max_rows_per_page": 100},
        {"column_encoding": {"id": "DELTA_BINARY_PACKED"}, "use_dictionary": False, "compression": "gzip"},
    ],
)
def test_ranges_are_the_rows_that_pyarrow_reads(tmp_path: Path, how: dict[str, Any]) -> None:
    path, rows = tmp_path / "a.parquet", table()
    pq.write_table(rows, path, row_group_size=1100, write_page_index=True, **{**SMALL, **how})
    rng = random.Random(1)
    for group in range(3):
        expected = pq.ParquetFile(path).read_row_group(group)
        count = expected.num_rows
        ranges = [(0, 1), (0, count), (count - 1, count)] + [sorted(rng.sample(range(count + 1), 2)) for _ in range(12)]
        for low, high in ranges:
            found = read(path, group, rows.column_names, low, high)
            assert sorted(found) == sorted(rows.column_names)
            for name, values in found.items():
                assert values.type == expected[name].type
                assert values.to_pylist() == expected[name].slice(low, high - low).to_pylist(), name


@pytest.mark.parametrize(("version", "read_alone"), [("1.0", False), ("2.0", True)])
def test_without_an_offset_index_headers_and_levels_say_the_rows(
    tmp_path: Path, version: str, read_alone: bool
) -> None:
    path, rows = tmp_path / "a.parquet", table()
    pq.write_table(rows, path, data_page_version=version, **SMALL)
    found = read(path, 0, rows.column_names, 700, 1400)
    assert set(found) == set(rows.column_names) - (set() if read_alone else {"map"})  # of two leaves
    for name, values in found.items():
        assert values.to_pylist() == rows[name].slice(700, 700).to_pylist(), name


def test_texts_come_as_positions_in_their_dictionaries_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.array([None if i % 7 == 0 else f"k{i % 50}" for i in range(ROWS)])
    rows = pa.table({"text": texts, "large": texts.cast(pa.large_string()), "id": range(ROWS)})
    pq.write_table(rows, path, write_page_index=True, **SMALL)
    for low, high in ((0, 10), (0, ROWS), (1234, 2345)):
        found = read(path, 0, rows.column_names, low, high, ["text", "large"])
        assert pa.types.is_dictionary(found["text"].type)
        assert pa.table(found).cast(rows.schema).equals(rows.slice(low, high - low))


def test_only_the_pages_of_a_range_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    numbers = np.random.default_rng(0).integers(0, 1 << 60, 100_000)
    pq.write_table(pa.table({"n": numbers}), path, max_rows_per_page=1000, write_page_index=True, use_dictionary=False)
    lengths: list[int] = []
    read_into = page_format.read_into

    def counted(file: int, place: Any, offset: int) -> None:
        lengths.append(len(place))
        read_into(file, place, offset)

    monkeypatch.setattr(page_format, "read_into", counted)
    assert read(path, 0, ["n"], 50_500, 52_500)["n"].to_pylist() == numbers[50_500:52_500].tolist()
    size = pq.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    assert size * 3 / 100 * 0.98 <= sum(lengths) <= size * 3 / 100 * 1.02  # three of a hundred pages


def index_of(path: Path, column: int) -> tuple[int, int]:
    """Return where the offset index of a column lies, and how long it is."""
    fields = thrift.decode(footer.read_local_tail(path).footer, str(path))
    chunk = footer.row_groups_of(fields, str(path))[0][1][1].values[column]
    return int(chunk[4][1]), int(chunk[5][1])


@pytest.mark.parametrize("name", ["id", "text", "tokens", "struct"])
def test_a_wrong_offset_index_never_gives_wrong_rows(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / "a.parquet", table().select([name])
    pq.write_table(rows, path, write_page_index=True, **SMALL)
    good, (at, length), rng = path.read_bytes(), index_of(path, 0), random.Random(2)
    for _ in range(60):
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[at + rng.randrange(length)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        low, high = sorted(rng.sample(range(ROWS + 1), 2))
        found = read(path, 0, [name], low, high)
        if found:
            assert found[name].to_pylist() == rows[name].slice(low, high - low).to_pylist()
    path.write_bytes(good[:at] + bytes(length) + good[at + length :])
    assert name in read(path, 0, [name], 10, 20)  # by the headers
