"""Lists of one length get their levels without being looked at: readers see what another writer would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.parquet.rewrite import encode, encodings
from pqcache.parquet.rewrite import pages as write_pages
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.encodings import Encodings
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.system.memory import BufferPool
from tests.examples import examples
from tests.pages import real_pages
from tests.parquet.pages.test_write_binary import write

PATH = "v.list.item"
PLAIN = Encodings(codecs={PATH: "none"})


def column_of(kind: pa.DataType, rows: int, length: int, seed: int = 1) -> pa.Array:
    """Return lists of ``length``, which begin somewhere in their buffers as what comes from a decoder may."""
    values = np.random.default_rng(seed).integers(0, 100, (rows + 2) * length)
    offsets = np.arange(0, len(values) + 1, length)
    make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    index = np.int64 if pa.types.is_large_list(kind) else np.int32
    array = make.from_arrays(pa.array(offsets.astype(index)), pa.array(values).cast(kind.value_type), kind)
    return array.slice(1, rows)


@pytest.mark.parametrize("special", [None, "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd", "snappy", "gzip", "brotli"])
def test_metadata_are_those_of_pyarrow(codec: str, special: str | None) -> None:
    how = Encodings(codecs={PATH: codec}, special={PATH: special} if special else {})
    column = pa.chunked_array([column_of(pa.list_(pa.int32()), 70, 500), column_of(pa.list_(pa.int32()), 100, 500, 2)])
    table = pa.table({"v": column})
    assert write_pages.length_of(table.schema.field(0), column, how) == 500
    own, its = (
        encode.encode_rows(table, how, "x")[0],
        encode._chunks(table, how, "x", BufferPool())[0],
    )
    mine, theirs = dict(own.fields[3][1]), dict(its.fields[3][1])
    assert sum(map(len, own.data)) == own.size == mine[7][1]
    assert own.size == pytest.approx(its.size, rel=1e-3)  # levels are cut into other runs
    for fields in (mine, theirs):
        fields[7] = None
        fields[2] = set(fields[2][1].values)
    assert mine == theirs
    assert own.offsets is not None
    assert its.offsets is not None
    assert len(own.offsets[1][1].values) == len(its.offsets[1][1].values) == 1


KINDS = [pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()]


@pytest.mark.parametrize("value", KINDS, ids=str)
@pytest.mark.parametrize("large", [True, False])
def test_every_reader_sees_the_values(
    tmp_path: Path, value: pa.DataType, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_pages, "_LIST_PAGE", 400)
    monkeypatch.setattr(write_pages, "_TOGETHER", 3)

    @settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=3),
        st.integers(16, 70),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["none", "lz4", "zstd"]),
    )
    def check(slices: list[list[int]], length: int, nullable: bool, inner: bool, codec: str) -> None:
        path = tmp_path / "lists.parquet"
        path.unlink(missing_ok=True)
        item = pa.field("item", value, nullable=inner)
        kind = pa.large_list(item) if large else pa.list_(item)
        schema = pa.schema([pa.field("n", pa.int32()), pa.field("v", kind, nullable=nullable)])
        how = Encodings(codecs={PATH: codec, "n": "none"})
        tables = []
        for rows in slices:
            column = pa.chunked_array([column_of(kind, count, length) for count in rows])
            tables.append(pa.table([pa.array(range(len(column)), pa.int32()), column], schema=schema))
            assert write_pages.length_of(schema.field(1), column, how) == length
        write(path, tables, how)
        expected = pa.concat_tables(tables)
        with pq.ParquetFile(path) as file:
            assert file.read().to_pydict() == expected.to_pydict()
        found = duckdb.execute(f"select v from read_parquet('{path}')").fetchall()
        assert [row for (row,) in found] == expected["v"].to_pylist()

    check()


LISTS = column_of(pa.list_(pa.int32()), 9, 20)


@pytest.mark.parametrize(
    ("column", "encodings"),
    [
        (pa.array([[1] * 20, None]), PLAIN),
        (pa.array([[1] * 20, [1] * 19 + [None]]), PLAIN),
        (pa.array([[1] * 20, [1] * 19]), PLAIN),
        (pa.array([[1] * 15]), PLAIN),
        (pa.array([[]], pa.list_(pa.int32())), PLAIN),
        (pa.array([], pa.list_(pa.int32())), PLAIN),
        (pa.array([["x"] * 20]), PLAIN),
        (pa.array([[True] * 20]), PLAIN),
        (pa.array([[[1]] * 20]), PLAIN),
        (pa.array(range(20)), PLAIN),
        (LISTS.cast(pa.list_(pa.int32(), 20)), PLAIN),
        (LISTS, Encodings(codecs={PATH: "none"}, dictionary=[PATH])),
        (LISTS, Encodings(codecs={PATH: "none"}, statistics=[PATH])),
        (LISTS, Encodings()),
    ],
)
def test_other_columns_are_left_to_pyarrow(column: pa.Array, encodings: Encodings) -> None:
    assert write_pages.length_of(pa.field("v", column.type), pa.chunked_array([column]), encodings) == 0


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
def test_lists_are_rewritten_beside_others_of_the_column(tmp_path: Path, codec: str) -> None:
    draw = np.random.default_rng(1)
    rows: list[Any] = [draw.integers(0, 50_000, 256).tolist() for _ in range(3000)]
    rows[1500] = rows[1500][:7]
    rows[2900:2905] = [None, [], [None], [3] * 256, [None] * 256]
    table = pa.table({"id": range(3000), "tokens": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    result = rewrite_directory(
        [tmp_path / "in.parquet"], tmp_path / "out", RewriteOptions(row_group_size=256 << 10, compression=codec)
    )
    (output,) = result.outputs
    with pq.ParquetFile(output.path) as file:
        assert file.read().equals(table)
        sizes = [
            sum(file.metadata.row_group(n).column(c).total_compressed_size for c in range(2))
            for n in range(file.num_row_groups)
        ]
    assert max(sizes) <= 256 << 10
    assert min(sizes[:-1]) >= 0.95 * (256 << 10)
    query = f"select id, tokens from read_parquet('{output.path}') order by id"
    assert [row for _, row in duckdb.execute(query).fetchall()] == table["tokens"].to_pylist()


def test_a_pyarrow_that_has_no_limit_of_rows_in_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pq.ParquetWriter

    def older(*args: Any, **options: Any) -> pq.ParquetWriter:
        assert "max_rows_per_page" not in options
        return writer(*args, **options)

    monkeypatch.setattr(encodings, "LIMITED", False)
    monkeypatch.setattr(pq, "ParquetWriter", older)
    monkeypatch.setattr(write_pages, "_LIST_PAGE", 10_000)
    table = pa.table({"v": column_of(pa.list_(pa.int32()), 150, 500)})
    assert write_pages.length_of(table.schema.field(0), table["v"], PLAIN) == 500
    write(tmp_path / "a.parquet", [table], PLAIN)
    assert pq.read_table(tmp_path / "a.parquet").equals(table)
    assert len(real_pages(tmp_path / "a.parquet")[0][0]) == 30
