"""Long strings and binary that are rewritten without being decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError
from pqcache.parquet.arrow import bytes_in, in_one_piece, length_prefixed_bytes
from pqcache.parquet.rewrite import decode
from pqcache.parquet.rewrite.decode import Decoder, long_columns_of
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.parquet.rewrite.pages import pages_of
from pqcache.parquet.rewrite.sources import read_source_footers
from tests.examples import examples

TYPES = [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()]


def values(rng: np.random.Generator, rows: int, kind: pa.DataType, few: bool) -> list[Any]:
    """Return rows of 0 to 12 KB, 4 KB in the mean; ``few`` different ones."""
    pool = [rng.bytes(int(size)).hex().encode() for size in rng.integers(0, 6000, 7 if few else rows)]
    found = [pool[i] for i in (rng.integers(0, 7, rows) if few else range(rows))]
    for row in range(0, rows, 50):
        found[row] = b"ab" * (row // 50 % 8)  # short ones are in the views themselves
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return [value.decode() for value in found] if text else found


def read(paths: list[Path]) -> pa.Table:
    return pa.concat_tables([pq.ParquetFile(path).read() for path in paths])


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_what_is_in_comes_out(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    here = tmp_path_factory.mktemp("views")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    kind = data.draw(st.sampled_from(TYPES))
    few, nullable = data.draw(st.booleans()), data.draw(st.booleans())
    nulls = data.draw(st.sampled_from([0, 0, 1, 30])) if nullable else 0
    for number in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, 300))
        long = values(rng, rows, kind, few)
        for row in rng.integers(0, rows, nulls):
            long[row] = None
        schema = pa.schema([pa.field("id", pa.int64()), pa.field("long", kind, nullable), pa.field("s", pa.string())])
        columns = [pa.array(range(rows)), pa.array(long, kind), pa.array([str(i) for i in range(rows)])]
        pq.write_table(
            pa.table(columns, schema=schema),
            here / f"{number}.parquet",
            row_group_size=data.draw(st.sampled_from([7, 100, 1000])),
            compression=data.draw(st.sampled_from(["none", "snappy", "lz4", "zstd", "gzip"])),
            use_dictionary=data.draw(st.booleans()),
            dictionary_pagesize_limit=data.draw(st.sampled_from([20_000, 1 << 20])),
            data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
            data_page_size=data.draw(st.sampled_from([1000, 50_000, 1 << 20])),
            write_page_checksum=data.draw(st.booleans()),
        )
    sources = sorted(here.glob("*.parquet"))
    codec = data.draw(st.sampled_from(["lz4", "zstd", "none", "keep"]))
    size = data.draw(st.sampled_from([64 << 10, 256 << 10, 4 << 20]))
    rewrite_directory(sources, here / "out", RewriteOptions(row_group_size=size, compression=codec))
    written = sorted((here / "out").glob("*.parquet"))
    assert read(written).equals(read(sources))
    for path in written:
        with duckdb.connect() as connection:
            found = connection.execute(f"select long from '{path}'").fetchall()
        assert [row for (row,) in found] == read([path])["long"].to_pylist()


def source(path: Path, rows: list[bytes | None], **options: Any) -> Path:
    """Write rows in pages of their own beside a number."""
    table = pa.table({"id": range(len(rows)), "long": pa.array(rows, pa.binary())})
    options = {"use_dictionary": False, "write_statistics": False, **options}
    pq.write_table(table, path, data_page_size=1, write_batch_size=1, **options)
    return path


def batches_of(path: Path, long_columns: bool = True) -> list[decode.RowBatch]:
    opened = read_source_footers([path])
    found = long_columns_of([(s.metadata, s.schema) for s in opened], opened[0].schema) if long_columns else {}
    assert bool(found) == long_columns
    decoder = Decoder(schema=opened[0].schema, batch_bytes=1 << 20, long_columns=found)
    return list(decoder.batches(decode.row_group_ranges(opened, 1 << 20)))


@pytest.mark.parametrize("dictionary", [False, True])
def test_pages_are_not_copied_into_arrays(tmp_path: Path, dictionary: bool) -> None:
    rows: list[bytes | None] = [bytes([i]) * 3000 for i in range(100)]
    path = source(tmp_path / "t.parquet", rows, use_dictionary=dictionary)
    table = pa.concat_tables([batch.table for batch in batches_of(path)])
    assert table.schema.types == [pa.int64(), pa.binary_view()]
    assert in_one_piece(table)["long"].to_pylist() == rows
    assert bytes_in(table["long"]) == 300_000
    assert all(length_prefixed_bytes(chunk) is not None for chunk in table["long"].chunks)
    ours = pages_of(table.schema.field(1), table["long"])
    plain = pa.table({"long": pa.array(rows, pa.binary())})
    theirs = pages_of(plain.schema.field(0), plain["long"])
    assert b"".join(ours.data) == b"".join(theirs.data)
    assert ours.fields == theirs.fields


@pytest.mark.parametrize("row", [0, 1, 50, 99])
def test_from_a_null_on_pyarrow_reads(tmp_path: Path, row: int) -> None:
    rows: list[bytes | None] = [bytes([i]) * 3000 for i in range(100)]
    rows[row] = None
    path = source(tmp_path / "t.parquet", rows)
    table = pa.concat_tables([batch.table for batch in batches_of(path)])
    assert in_one_piece(table)["long"].to_pylist() == rows
    assert table["id"].to_pylist() == list(range(100))


@pytest.mark.parametrize("place", [0.205, 0.505, 0.905])  # in the middle of a page
def test_damage_is_found_by_checksum(tmp_path: Path, place: float) -> None:
    rows: list[bytes | None] = [bytes([i]) * 3000 for i in range(100)]
    path = source(tmp_path / "t.parquet", rows, write_page_checksum=True, compression="none")
    chunk = pq.read_metadata(path).row_group(0).column(1)
    whole = bytearray(path.read_bytes())
    whole[chunk.data_page_offset + int(place * chunk.total_compressed_size)] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ParquetError, match=r"t\.parquet"):
        batches_of(path)


def test_what_pyarrow_decodes_is_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[bytes | None] = [None, *(bytes([i]) * 300_000 for i in range(40))]
    path = source(tmp_path / "t.parquet", rows)
    sizes = [len(batch.table) for batch in batches_of(path)]
    assert max(sizes) < 8
    found = in_one_piece(pa.concat_tables([batch.table for batch in batches_of(path)]))
    assert found["long"].to_pylist() == rows


def test_only_values_behind_their_length_are_copied_as_they_lie() -> None:
    views = pa.array([b"x" * 20, b"y" * 30], pa.binary()).cast(pa.binary_view())
    assert length_prefixed_bytes(views) is None
    assert length_prefixed_bytes(pa.array([b"short"], pa.binary()).cast(pa.binary_view())) is None
