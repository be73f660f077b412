"""Row groups read in pieces: the same rows in the same order, and the bytes of an epoch, whatever their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.reader.columns import Column, join, to_arrow
from pqcache.reader.decode import Held, RowGroups
from pqcache.reader.memory_budget import Budget
from pqcache.reader.order import Order
from pqcache.reader.window import Group, read_groups
from tests.reader.reading import groups_of

PAGES: dict[str, Any] = {"max_rows_per_page": 50, "write_page_index": True}


def in_pieces(path: Path, rows: int) -> RowGroups:
    groups = groups_of(path)
    return groups.with_plan(groups.plan.split(rows))


def batches_of(groups: RowGroups, batch_size: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an epoch that mixes four pieces."""
    order = Order(counts=groups.plan.counts, batch_size=batch_size, lanes=2, window=4)
    groups = groups.with_budget(Budget(threads=2, decoding=2))
    for _, found, number in read_groups(groups, order, range(order.batches()), order.batches(), Group.batches):
        yield found[number]


def columns_of(groups: RowGroups, number: int, high: int, shuffle: bool = False) -> dict[str, Column]:
    """Return the first rows of a piece: as in the file, or backwards and in two parts, as where memory is small."""
    how = (np.arange(high)[::-1], 0, [high // 2]) if shuffle else ()
    held = groups.load(number, 0, high, *how)
    assert isinstance(held, Held)
    parts = zip(*held.slices(0, high), strict=True)
    return {name: join(columns) for name, columns in zip(groups.columns, parts, strict=True)}


class BytesRead:
    """Counts the bytes of pages, by the call that reads them: the system counts headers and footers too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        preadv: Callable[[int, Sequence[Any], int], int] = os.preadv

        def counted(file: int, buffers: Sequence[Any], offset: int) -> int:
            found = preadv(file, buffers, offset)
            self.bytes += found
            return found

        monkeypatch.setattr(os, "preadv", counted)


def test_an_epoch_in_pieces_reads_each_page_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, rows = np.random.default_rng(0), 20_000
    tokens = pa.array(rng.integers(0, 50_000, rows * 32).astype(np.int32))
    table = pa.table(
        {
            "id": range(rows),
            "noise": rng.random(rows),
            "label": pa.array([f"label {i % 10}" for i in range(rows)]),
            "tokens": pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * 32), tokens),
            "image": [rng.bytes(600) for _ in range(rows)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", max_rows_per_page=100, write_page_index=True, write_batch_size=50)
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    stored = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
    dictionaries = sum(
        group.column(i).data_page_offset - group.column(i).dictionary_page_offset for i in range(group.num_columns)
    )
    read_bytes = BytesRead(monkeypatch)
    pieces = 10
    groups, read_bytes.bytes = in_pieces(tmp_path, rows // pieces), 0
    ids = [i for batch in batches_of(groups, 500) for i in batch["id"].to_pylist()]
    assert sorted(ids) == list(range(rows))
    assert stored - dictionaries <= read_bytes.bytes <= 1.02 * (stored + pieces * dictionaries)


def test_a_column_that_a_file_lacks_is_null_in_pieces(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(400), "x": range(400)}), tmp_path / "a.parquet", **PAGES)
    pq.write_table(pa.table({"id": range(400, 800)}), tmp_path / "b.parquet", **PAGES)
    rows = [row for batch in batches_of(in_pieces(tmp_path, 150), 70) for row in batch.to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(800))
    assert all(row["x"] == (row["id"] if row["id"] < 400 else None) for row in rows)


@pytest.mark.parametrize(("dictionary", "shuffle"), [(False, False), (False, True), (True, True)])
def test_a_piece_does_not_keep_the_other_rows_of_its_pages(tmp_path: Path, dictionary: bool, shuffle: bool) -> None:
    images = [bytes([i % 251]) * 5_000 for i in range(400)]  # two pages of 200 rows, read by pyarrow if coded
    table = pa.table({"image": images, "tokens": [[i] * (40 + i % 2) for i in range(400)]})
    pq.write_table(
        table, tmp_path / "a.parquet", use_dictionary=dictionary, max_rows_per_page=200, write_page_index=True
    )
    groups = in_pieces(tmp_path, 100)
    for piece in range(4):
        found = columns_of(groups, piece, 100, shuffle)
        for name, width in (("image", 1), ("tokens", 8)):
            wanted = table[name].to_pylist()[100 * piece : 100 * (piece + 1)]
            assert to_arrow(found[name]).to_pylist() == (wanted[::-1] if shuffle else wanted)
            assert found[name].values.get_total_buffer_size() <= 1.25 * sum(map(len, wanted)) * width + 1_600


@pytest.mark.parametrize(("words", "shuffle"), [(10, False), (400, True)])
def test_a_piece_does_not_keep_a_dictionary_that_is_larger_than_its_texts(
    tmp_path: Path, words: int, shuffle: bool
) -> None:
    texts = [f"{i:03d}{'w' * 60}" if 0 < i < words else "" for i in range(10_000)]  # nearly all in the first piece
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", **PAGES)
    groups = in_pieces(tmp_path, 2_000)
    for piece in range(5):
        column = columns_of(groups, piece, 2_000, shuffle)["text"]
        found = to_arrow(column).to_pylist()[:: -1 if shuffle else 1]
        assert found == texts[2_000 * piece : 2_000 * (piece + 1)]
        assert column.values.get_total_buffer_size() <= 1.25 * (16 * 2_000 + sum(map(len, found)))
