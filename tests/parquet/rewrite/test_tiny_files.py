"""Many tiny files: the same rows as from each by itself, and errors name the file they are in."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.parquet.dense import Dense
from tests.parquet.rewrite.rewriting import KB, rewrite
from tests.parquet.rewrite.test_directory import COLUMNS


def tables(count: int, kinds: list[str] | None = None) -> list[pa.Table]:
    """Return tables of 1 row and more, with the columns of all kinds."""
    names, rng = kinds or sorted(COLUMNS), np.random.default_rng(count)
    ends = np.cumsum([0, *(1 + 7 * number for number in range(count))]).tolist()
    table = pa.table({name: COLUMNS[name](rng, ends[-1]) for name in names}, metadata={"of": "shop"})
    return [table.slice(begin, end - begin) for begin, end in pairwise(ends)]


def write(here: Path, some: list[pa.Table], **options: Any) -> list[Path]:
    paths = [here / f"{number:03}.parquet" for number in range(len(some))]
    for path, table in zip(paths, some, strict=True):
        pq.write_table(table, path, row_group_size=20, **options)
    return paths


@pytest.mark.parametrize("other", [{"compression": "zstd"}, {"use_dictionary": False}])
def test_tiny_files_of_several_writers_keep_rows_and_order(tmp_path: Path, other: dict[str, Any]) -> None:
    some = tables(12, [name for name in COLUMNS if name not in ("category", "double")])
    paths = write(tmp_path, some)
    pq.write_table(some[4], paths[4], **other)
    result = rewrite(paths, tmp_path / "out", size=64 * KB)
    found = pa.concat_tables([pq.read_table(output.path) for output in result.outputs])
    assert found.equals(pa.concat_tables(some))


def test_categories_may_differ_from_file_to_file(tmp_path: Path) -> None:
    some = [
        table.set_column(0, "category", table["category"].cast(pa.string()).dictionary_encode())
        for table in tables(12, ["category", "int64"])
    ]
    result = rewrite(write(tmp_path, some), tmp_path / "out", size=64 * KB)
    found = pa.concat_tables([pq.read_table(output.path) for output in result.outputs])
    assert found["category"].cast(pa.string()).equals(pa.concat_tables(some)["category"].cast(pa.string()))


def damaged(path: Path, chunk: int, place: int, value: bytes) -> None:
    """Overwrite bytes of the file from byte ``place`` of a column chunk of its first row group on."""
    meta = pq.read_metadata(path).row_group(0).column(chunk)
    begin = (meta.dictionary_page_offset or meta.data_page_offset) + place
    data = bytearray(path.read_bytes())
    data[begin : begin + len(value)] = value
    path.write_bytes(data)


def test_damage_names_its_file(tmp_path: Path) -> None:
    paths = write(tmp_path, tables(9, ["int64", "string"]), compression="none", use_dictionary=False)
    damaged(paths[6], 0, 0, b"\xff" * 8)
    with pytest.raises(ParquetError) as caught:
        rewrite(paths, tmp_path / "out", size=64 * KB)
    assert str(caught.value).startswith(f"{paths[6]}: ")


def test_a_page_with_fewer_rows_than_the_footer_says_names_its_file(tmp_path: Path) -> None:
    paths = write(tmp_path, tables(9, ["int64", "constant"]), compression="none", use_dictionary=False)
    meta = pq.read_metadata(paths[2]).row_group(0).column(0)
    head = paths[2].read_bytes()[meta.data_page_offset :][:32]
    place = head.index(b"\x2c\x15") + 2  # DataPageHeader, and its number of values
    assert head[place] == 2 * meta.num_values
    damaged(paths[2], 0, place, bytes([2 * meta.num_values - 2]))
    with pytest.raises(ParquetError) as caught:
        rewrite(paths, tmp_path / "out", size=64 * KB)
    assert str(caught.value).startswith(f"{paths[2]}: ")


def test_a_row_that_does_not_fit_names_its_file(tmp_path: Path) -> None:
    lists = [pa.table({"x": pa.array([[1, 2]] * 5, pa.list_(pa.int32()))}) for _ in range(6)]
    lists[4] = pa.table({"x": pa.array([[1, 2], [1, 2], [3]], pa.list_(pa.int32()))})
    paths = write(tmp_path, lists)
    with pytest.raises(ParquetError) as caught:
        rewrite(paths, tmp_path / "out", dense=(("x", Dense(length=2, dtype="int32")),))
    assert str(caught.value).startswith(f"{paths[4]}: ")
    assert "row 2" in str(caught.value)
