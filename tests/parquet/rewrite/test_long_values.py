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
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions
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


@settings(deadline=None, max_examples=examples(30))
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


@pytest.mark.parametrize("place", [0.205, 0.905])  # in the middle of a page
def test_damage_is_found_by_checksum(tmp_path: Path, place: float) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"id": range(100), "long": [bytes([i]) * 3000 for i in range(100)]})
    pages = {"data_page_size": 1, "write_batch_size": 1, "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, write_page_checksum=True, compression="none", **pages)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    damaged = bytearray(path.read_bytes())
    damaged[chunk.data_page_offset + int(place * chunk.total_compressed_size)] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ParquetError, match=r"t\.parquet"):
        rewrite_directory([path], tmp_path / "out", RewriteOptions(row_group_size=64 << 10))
