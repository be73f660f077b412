"""Tiny files that are decoded together: the same rows as from each by itself, and errors name the file they are in."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.parquet.dense_columns import Dense
from pqcache.parquet.footer.source_footer import read_source_footers
from pqcache.parquet.rewrite import source_reader
from pqcache.parquet.rewrite.joined_files import FileJoiner
from tests.parquet.rewrite.rewriting import KB, rewrite
from tests.parquet.rewrite.test_rewrite_directory import COLUMNS

_LOG = "pqcache.parquet"


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


def joined(paths: list[Path]) -> pa.Table | None:
    """Return the rows of all row groups of ``paths``, decoded together."""
    parts = [(source, range(source.metadata.num_row_groups)) for source in read_source_footers(paths)]
    found = FileJoiner().read(parts)
    return None if found is None else found.table


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0", "data_page_size": 64, "write_page_checksum": True},
        {"compression": "gzip", "write_statistics": False, "write_page_index": True},
        {
            "store_schema": False,
            "version": "1.0",
            "compression": "brotli",
            "allow_truncated_timestamps": True,
            "coerce_timestamps": "us",
        },
    ],
)
def test_the_rows_are_those_of_each_file(tmp_path: Path, options: dict[str, Any]) -> None:
    paths = write(tmp_path, tables(12, [name for name in COLUMNS if name != "category"]), **options)
    found = joined(paths)
    assert found is not None
    expected = pa.concat_tables([pq.ParquetFile(path).read() for path in paths])
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert found.drop_columns(["double"]).equals(expected.drop_columns(["double"]))
    np.testing.assert_array_equal(found["double"], expected["double"])  # NaN is equal to NaN here


def test_categories_may_differ_from_file_to_file(tmp_path: Path) -> None:
    some = [
        table.set_column(0, "category", table["category"].cast(pa.string()).dictionary_encode())
        for table in tables(12, ["category", "int64"])
    ]
    found = joined(write(tmp_path, some))
    assert found is not None
    expected = pa.concat_tables(some)
    assert found["category"].cast(pa.string()).equals(expected["category"].cast(pa.string()))


def test_int96_comes_in_the_unit_that_loses_nothing(tmp_path: Path) -> None:
    times = [pa.table({"t": pa.array([number, 2**60 + number], pa.timestamp("ns"))}) for number in range(5)]
    paths = write(tmp_path, times, use_deprecated_int96_timestamps=True)
    found = joined(paths)
    assert found is not None
    assert found.equals(pa.concat_tables([pq.read_table(path) for path in paths]))
    assert str(found.schema.field("t").type) == "timestamp[ns]"


@pytest.mark.parametrize("other", [{"compression": "zstd"}, {"compression": "snappy", "write": "by another"}])
def test_files_written_otherwise_are_read_by_themselves(tmp_path: Path, other: dict[str, Any]) -> None:
    some = tables(9, ["int64", "string"])
    paths = write(tmp_path, some)
    if "write" in other:  # the same bytes, but for the name of the writer
        data = paths[4].read_bytes()
        paths[4].write_bytes(data.replace(b"parquet-cpp-arrow", b"parquet-cpp-Arrow"))
    else:
        pq.write_table(some[4], paths[4], **other)
    assert joined(paths) is None
    result = rewrite(paths, tmp_path / "out", size=64 * KB)
    assert pq.read_table(result.outputs[0].path).equals(pa.concat_tables(some))


def test_tiny_files_are_not_opened_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tables(30, ["int64", "string", "double"])
    paths = write(tmp_path, some)
    monkeypatch.setattr(source_reader, "open_parquet", None)
    opened = read_source_footers(paths)
    spans = list(source_reader.row_group_ranges(opened, 96 * KB))
    batches = list(source_reader.read_batches(spans, opened[0].schema, 96 * KB))
    ends = np.cumsum([len(batch.table) for batch in batches]).tolist()
    assert 1 < len(batches) < 10
    assert [batch.numbers for batch in batches] == [range(*pair) for pair in zip([0, *ends], ends, strict=False)]
    assert batches[-1].done == sum(path.stat().st_size for path in paths)
    found = pa.concat_tables([batch.table for batch in batches])
    assert found.select(["int64", "string"]).equals(pa.concat_tables(some).select(["int64", "string"]))


def damaged(path: Path, chunk: int, place: int, value: bytes) -> None:
    """Overwrite bytes of the file from byte ``place`` of a column chunk of its first row group on."""
    meta = pq.read_metadata(path).row_group(0).column(chunk)
    begin = (meta.dictionary_page_offset or meta.data_page_offset) + place
    data = bytearray(path.read_bytes())
    data[begin : begin + len(value)] = value
    path.write_bytes(data)


def test_damage_names_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write(tmp_path, tables(9, ["int64", "string"]), compression="none", use_dictionary=False)
    damaged(paths[6], 0, 0, b"\xff" * 8)
    with caplog.at_level(logging.DEBUG, _LOG), pytest.raises(ParquetError) as caught:
        rewrite(paths, tmp_path / "out", size=64 * KB)
    assert str(caught.value).startswith(f"{paths[6]}: ")
    assert "decoded one by one" in caplog.text


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
