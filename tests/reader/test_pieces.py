"""Row groups read in pieces: the same rows in the same order, and the bytes of an epoch, whatever their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.reader.order.epoch_order import Order
from pqcache.reader.piece_reader import PieceReader
from pqcache.reader.row_group_loader import RowGroupLoader
from tests.parquet.pages.list_pages import write_lists
from tests.parquet.pages.test_row_ranges import index_of
from tests.reader.reading import everything, loader_of, read

PAGES: dict[str, Any] = {"max_rows_per_page": 50, "write_page_index": True}


def rows_of(loader: RowGroupLoader, window: int = 4) -> list[pa.RecordBatch]:
    order = Order(counts=loader.plan.counts, batch_size=70, lanes=2, window=window, seed=1)
    return [batch for _, batch in read(loader, order)]


def test_a_column_of_every_type_is_the_same_from_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(everything(0, 1_000), tmp_path / "a.parquet", **PAGES)
    from_pages = rows_of(loader_of(tmp_path).split(130))
    monkeypatch.setattr(PieceReader, "_file", lambda *_: None)
    from_beginning = rows_of(loader_of(tmp_path).split(130))
    assert len(from_pages) == 15
    assert all(one.equals(two) for one, two in zip(from_pages, from_beginning, strict=True))


class BytesRead:
    """Counts the bytes that are read by the calls of the package, page headers aside."""

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
    for pieces in (4, 10):
        loader, read_bytes.bytes = loader_of(tmp_path).split(rows // pieces), 0
        order = Order(counts=loader.plan.counts, batch_size=500, window=4)
        ids = [i for _, batch in read(loader, order) for i in batch["id"].to_pylist()]
        assert sorted(ids) == list(range(rows))
        assert stored - dictionaries <= read_bytes.bytes <= 1.02 * (stored + pieces * dictionaries)


@pytest.mark.parametrize("lengths", [[21], [9, 31, 30, 17], [20, None, 0, 25], [1, 0, 2]])
@pytest.mark.parametrize("coded", [0, 4])
def test_lists_whose_pages_begin_within_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int | None], coded: int
) -> None:
    each = [lengths[i % len(lengths)] for i in range(600)]
    lists = [None if length is None else [(i + k) % 90 for k in range(length)] for i, length in enumerate(each)]
    write_lists(tmp_path / "a.parquet", lists, range(0, 20_000, 50 if lengths[0] == 1 else 500), coded, packed=1)
    monkeypatch.setattr(PieceReader, "_from_beginning", None)
    loader = loader_of(tmp_path, dense=lengths == [21])
    rows = [row for batch in rows_of(loader.split(90)) for row in batch.to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(600))
    assert all(row["t"] == lists[row["id"]] for row in rows)


@pytest.mark.parametrize("what", ["beyond its page", "too few"])
def test_damaged_levels_of_lists_are_refused_by_name(tmp_path: Path, what: str) -> None:
    path, lists = tmp_path / "a.parquet", [[i, i + 1, i + 2] for i in range(300)]
    begins = write_lists(path, lists, range(0, 900, 90), codec="UNCOMPRESSED")
    damaged, length = bytearray(path.read_bytes()), 30 * 2 * 2  # of 30 rows, each two runs of two bytes
    at = damaged.index(length.to_bytes(4, "little"), begins[4])
    damaged[at] = 255 if what == "beyond its page" else length - 4
    path.write_bytes(damaged)
    loader = loader_of(tmp_path)
    with pytest.raises(ParquetError, match=r"a\.parquet.*row group 0"):
        rows_of(loader.split(70))


def test_long_lists_with_a_wrong_offset_index_are_the_right_rows(tmp_path: Path) -> None:
    path, lists = tmp_path / "a.parquet", [[i] * (20 + i % 9) for i in range(400)]
    pq.write_table(pa.table({"t": lists}), path, use_dictionary=False, **PAGES)
    good, (at, length), right = path.read_bytes(), index_of(path, 0), 0
    for place in range(at + length - 40, at + length):  # of the last pages
        path.write_bytes(
            good[:place] + bytes([good[place] ^ 2]) + good[place + 1 :]
        )  # the first row of a page, or others
        rows = [row["t"] for batch in rows_of(loader_of(tmp_path).split(90)) for row in batch.to_pylist()]
        right += sorted(rows) == lists
    assert right == 40


def test_a_file_that_was_replaced_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(1_000)}), tmp_path / "a.parquet", **PAGES)
    loader = loader_of(tmp_path).split(300)
    assert loader.load(1, 0, 300)[0].values.tolist() == list(range(300, 600))
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "a.parquet", **PAGES)
    with pytest.raises(ParquetError, match=r"a\.parquet"):
        loader.load(1, 0, 300)


def test_a_column_that_a_file_lacks_is_null_in_pieces(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(400), "x": range(400)}), tmp_path / "a.parquet", **PAGES)
    pq.write_table(pa.table({"id": range(400, 800)}), tmp_path / "b.parquet", **PAGES)
    rows = [row for batch in rows_of(loader_of(tmp_path).split(150)) for row in batch.to_pylist()]
    assert sorted(row["id"] for row in rows) == list(range(800))
    assert all(row["x"] == (row["id"] if row["id"] < 400 else None) for row in rows)


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_piece_does_not_keep_the_other_rows_of_its_pages(tmp_path: Path, dictionary: bool) -> None:
    images = [bytes([i % 251]) * 5_000 for i in range(400)]  # two pages of 200 rows, read by pyarrow if coded
    table = pa.table({"image": images, "tokens": [[i] * 40 for i in range(400)]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=dictionary, write_batch_size=200, data_page_size=1000)
    loader = loader_of(tmp_path).split(100)
    for piece in range(4):
        for column in loader.load(piece, 0, 100):
            assert len(column) == 100
            held = sum(buffer.size for buffer in column.values.buffers() if buffer is not None)
            assert held <= 1.25 * sum(map(len, table[column.form.name].to_pylist()[:100])) * column.form.width + 1_600


@pytest.mark.parametrize("words", [10, 400])
def test_a_piece_does_not_keep_a_dictionary_that_is_larger_than_its_texts(tmp_path: Path, words: int) -> None:
    texts = [f"{i:03d}{'w' * 60}" if 0 < i < words else "" for i in range(10_000)]  # nearly all in the first piece
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", **PAGES)
    loader = loader_of(tmp_path).split(2_000)
    for piece in range(5):
        (column,) = loader.load(piece, 0, 2_000)
        found = column.values.cast(pa.string()).to_pylist()
        assert found == texts[2_000 * piece : 2_000 * (piece + 1)]
        held = sum(buffer.size for buffer in column.values.buffers()[1:])
        assert held <= 1.25 * (16 * 2_000 + sum(map(len, found)))
