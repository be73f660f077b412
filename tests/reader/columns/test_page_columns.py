"""Columns that the loader reads from their pages: the rows are those that pyarrow reads, and the share is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache import Pack
from pqcache.reader import row_group_reader
from pqcache.reader.columns import page_columns
from pqcache.torch import ParquetDataset

ROWS = 600


def tokens(lengths: Any, kind: pa.DataType) -> pa.Array:
    """Return lists of skewed numbers."""
    values = np.random.default_rng(0).zipf(1.3, int(np.sum(lengths))) % 120
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return pa.LargeListArray.from_arrays(ends, pa.array(values, kind.value_type)).cast(kind)


def read(path: Path, shuffle: bool) -> tuple[dict[int, list[int]], float | None]:
    """Return the tokens of all rows by id, and the share of columns that were read from their pages."""
    dataset = ParquetDataset(path, batch_size=64, shuffle=shuffle, seed=1)
    found: dict[int, list[int]] = {}
    for batch in dataset:
        found.update(zip(batch["id"].tolist(), batch["tokens"].to_list(), strict=True))
    return found, dataset.stats().epoch.fast_columns


@pytest.mark.parametrize(
    ("kind", "version", "shuffle"),
    [
        (pa.list_(pa.int32()), "1.0", True),
        (pa.list_(pa.int32()), "2.0", False),
        (pa.large_list(pa.int64()), "2.0", True),
        (pa.list_(pa.uint16()), "1.0", True),
        (pa.list_(pa.float32()), "2.0", True),
    ],
    ids=str,
)
def test_lists_of_any_length_are_read_from_their_pages(
    tmp_path: Path, kind: pa.DataType, version: str, shuffle: bool
) -> None:
    lengths = 16 + np.arange(ROWS) * 7 % 50
    table = pa.table({"id": np.arange(ROWS), "tokens": tokens(lengths, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=150, data_page_version=version, data_page_size=3000)
    found, fast = read(tmp_path, shuffle)
    assert fast == 1.0
    assert found == dict(enumerate(table["tokens"].to_pylist()))


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
def test_documents_that_are_packed_are_read_from_their_pages(tmp_path: Path, strategy: Any) -> None:
    documents = tokens(16 + np.arange(ROWS) * 7 % 50, pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": documents}), tmp_path / "a.parquet", row_group_size=150)
    dataset = ParquetDataset(tmp_path, batch_size=4, pack=Pack("tokens", length=128, strategy=strategy, padding=-1))
    found = np.concatenate([batch["tokens"].numpy().ravel() for batch in dataset])
    assert dataset.stats().epoch.fast_columns == 1.0
    assert np.array_equal(np.sort(found[found >= 0]), np.sort(documents.flatten().to_numpy()))


@pytest.mark.parametrize("row", [[], [1]])
def test_short_or_empty_lists_are_decoded_by_pyarrow(
    tmp_path: Path, row: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[number % 90] * (16 + number % 9) for number in range(ROWS)] if not row else [row, [1, 2]] * (ROWS // 2)
    rows[ROWS // 2] = row
    table = pa.table({"id": np.arange(ROWS), "tokens": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=ROWS)
    with caplog.at_level("DEBUG", "pqcache"):
        found, fast = read(tmp_path, shuffle=True)
    assert found == dict(enumerate(rows))
    assert fast == (None if row else 0.0)  # of short lists nobody says that they could be read so
    assert ("nulls, or empty lists" in caplog.text) == (not row)


def test_lists_of_few_values_are_decoded_by_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once for each column chunk would take longer than to decode them."""
    monkeypatch.setattr(page_columns, "MANY_VALUES", 3_300)
    table = pa.table({"id": np.arange(ROWS), "tokens": tokens(16 + np.arange(ROWS) % 2, pa.list_(pa.int32()))})
    for row_group_size, share in ((200, 1.0), (199, None)):
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=row_group_size)
        found, fast = read(tmp_path, shuffle=True)
        assert (found, fast) == (dict(enumerate(table["tokens"].to_pylist())), share)


TEXTS: dict[str, list[str | None]] = {
    "category": [f"category {i % 7}" for i in range(ROWS)],
    "nulls": [None if i % 3 else f"c{i % 5}" for i in range(ROWS)],
    "unique": [f"text number {i}" for i in range(ROWS)],
    "null": [None] * ROWS,
}


@pytest.fixture
def read_as_codes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The columns that were decoded as positions in their dictionaries."""
    found: set[str] = set()
    decoded = row_group_reader.decoded

    def noted(*args: Any) -> pa.Table:
        table = decoded(*args)
        found.update(field.name for field in table.schema if pa.types.is_dictionary(field.type))
        return table

    monkeypatch.setattr(row_group_reader, "decoded", noted)
    return found


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"filters": "category <> 'category 1'"}], ids=str)
@pytest.mark.parametrize("writer", [{}, {"use_dictionary": ["nulls"]}, {"data_page_version": "2.0"}], ids=str)
def test_texts_are_decoded_as_positions_in_their_dictionary(
    tmp_path: Path, options: dict[str, Any], writer: dict[str, Any], read_as_codes: set[str]
) -> None:
    """The rows are those of the table, with values in place of nulls, also where several row groups are mixed."""
    table = pa.table({"id": np.arange(ROWS), **{name: pa.array(rows, pa.string()) for name, rows in TEXTS.items()}})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250, **writer)
    fill = {"nulls": "none at all, and longer", "null": ""}
    dataset = ParquetDataset(tmp_path, batch_size=50, nulls=fill, seed=3, window=2, **options)
    found = {}
    for batch in dataset:
        rows = zip(*(batch[name].to_list() for name in TEXTS), strict=True)
        found.update(zip(batch["id"].tolist(), rows, strict=True))
    expected = {i: tuple(TEXTS[n][i] or fill[n] for n in TEXTS) for i in range(ROWS)}
    if "filters" in options:
        expected = {i: rows for i, rows in expected.items() if i % 7 != 1}
    assert found == expected
    coded = {"nulls"} if "use_dictionary" in writer or "filters" in options else {"nulls", "category"}
    assert read_as_codes - {"null"} == coded, "a condition looks at texts, and not at positions"


def test_a_dictionary_that_is_given_up_half_way_is_read(tmp_path: Path, read_as_codes: set[str]) -> None:
    """Though hardly any value is there, so that the column looks as if all of them were in the dictionary."""
    words = [None if i % 40 else f"word {i} of a dictionary" for i in range(8000)]
    pq.write_table(
        pa.table({"id": np.arange(8000), "text": words}),
        tmp_path / "a.parquet",
        dictionary_pagesize_limit=600,
        write_statistics=False,
        write_batch_size=100,
    )
    found = {}
    for batch in ParquetDataset(tmp_path, batch_size=100, nulls={"text": ""}):
        found.update(zip(batch["id"].tolist(), batch["text"].to_list(), strict=True))
    assert found == {i: word or "" for i, word in enumerate(words)}
    assert read_as_codes == {"text"}
