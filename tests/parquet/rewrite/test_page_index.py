"""Page indexes say the truth about pages of row groups that were written apart."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions
from tests.pages import index_spans, indexed_pages, real_pages

MB = 1 << 20


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("pages")
    rng = np.random.default_rng(1)
    n = 50_000
    lengths = rng.integers(0, 3, n)
    table = pa.table(
        {
            "id": np.arange(n) * 3,
            "kind": pa.array([f"k{i}" for i in rng.integers(0, 50, n)]),
            "x": pa.array(np.where(rng.random(n) < 0.1, np.nan, rng.standard_normal(n)), from_pandas=True),
            "list": pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), np.arange(lengths.sum())
            ),
            "image": pa.array([rng.bytes(200) for _ in range(n)]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50_000)
    result = rewrite_directory([tmp_path / "a.parquet"], tmp_path / "out", RewriteOptions(row_group_size=4 * MB))
    (output,) = result.outputs
    assert output.row_groups >= 3
    assert pq.ParquetFile(output.path).read().equals(table)
    return output.path


def test_every_page_lies_where_its_index_says(rewritten: Path) -> None:
    several = 0
    for group, (indexed, real) in enumerate(zip(indexed_pages(rewritten), real_pages(rewritten), strict=True)):
        rows = pq.read_metadata(rewritten).row_group(group).num_rows
        if all(len(found) == 1 for found in real):
            assert indexed == [None] * 5
            continue
        for column, (pages, found) in enumerate(zip(indexed, real, strict=True)):
            assert pages is not None
            assert [(page.offset, page.size) for page in pages] == [(at, size) for at, size, _ in found]
            assert pages[0].first_row == 0
            assert all(a.first_row < b.first_row < rows for a, b in pairwise(pages))
            if column != 3:  # a page of lists has more values than rows
                counts = np.cumsum([0, *(values for *_, values in found)])
                assert [page.first_row for page in pages] == counts[:-1].tolist()
                assert counts[-1] == rows
            several += len(pages) > 1
    assert several >= 6


def test_minimum_and_maximum_are_those_of_the_rows(rewritten: Path) -> None:
    file = pq.ParquetFile(rewritten)
    for group, columns in enumerate(indexed_pages(rewritten)[:-1]):
        ids = file.read_row_group(group, ["id"])["id"].to_numpy()
        pages = columns[0]
        assert pages is not None
        ends = [*(page.first_row for page in pages[1:]), len(ids)]
        for page, end in zip(pages, ends, strict=True):
            assert page.extremes is not None
            low, high = (struct.unpack("<q", value)[0] for value in page.extremes)
            assert (low, high) == (ids[page.first_row], ids[end - 1])


def test_large_binary_and_lists_have_no_minimum_and_maximum(rewritten: Path) -> None:
    for columns in indexed_pages(rewritten)[:-1]:
        for position, expected in enumerate([True, True, True, False, False]):
            pages = columns[position]
            assert pages is not None
            assert all((page.extremes is not None) == expected for page in pages), position


def test_one_page_a_chunk_needs_no_index(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(9_000)}), tmp_path / "a.parquet", row_group_size=100)
    result = rewrite_directory([tmp_path / "a.parquet"], tmp_path / "out", RewriteOptions(row_group_size=MB))
    assert index_spans(result.outputs[0].path) == []
