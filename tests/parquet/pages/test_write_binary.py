"""Large binary values go from the decoder's buffers to the file: readers see what another writer would write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import fastparquet
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.parquet.rewrite import pages as write_pages
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.encode import concatenate_chunks, encode_rows
from pqcache.parquet.rewrite.encodings import Encodings
from pqcache.parquet.rewrite.files import OutputSchema, RowGroupFile, footer_schema_of
from pqcache.parquet.rewrite.options import RewriteOptions
from tests.examples import examples

ENCODINGS = Encodings(codecs={"v": "none", "n": "none"})


def write(path: Path, tables: list[pa.Table], how: Encodings = ENCODINGS) -> None:
    """Write slices of a row group as `RowGroupFile` has them from the writer."""
    schema = tables[0].schema
    parts = [encode_rows(table, how, "x") for table in tables]
    footer_schema = footer_schema_of(OutputSchema(working=schema, declared=schema, elements=None, keyvalues={}), how)
    chunks = [[part[leaf] for part in parts] for leaf in range(len(footer_schema.paths))]
    with ThreadPoolExecutor(2) as disk:
        file = RowGroupFile(path=path, footer_schema=footer_schema, disk=disk)
        file.append(concatenate_chunks(chunks, footer_schema.orders))
        file.finish({})


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("nullable", [True, False])
def test_every_reader_sees_the_values(
    tmp_path: Path, kind: pa.DataType, nullable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_pages, "LONG", 0)
    monkeypatch.setattr(write_pages, "_TEXT_PAGE", 40)
    values = st.text(max_size=30) if "string" in str(kind) else st.binary(max_size=30)
    schema = pa.schema([pa.field("n", pa.int32()), pa.field("v", kind, nullable=nullable)])

    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(st.lists(values, min_size=1, max_size=9), min_size=1, max_size=3), min_size=1, max_size=3))
    def check(slices: list[list[list[bytes]]]) -> None:
        path = tmp_path / "direct.parquet"
        path.unlink(missing_ok=True)
        tables = []
        for chunks in slices:
            # What comes from a decoder may begin and end anywhere in its buffers.
            arrays = [pa.array([*chunk[:1], *chunk, *chunk[:1]], kind).slice(1, len(chunk)) for chunk in chunks]
            column = pa.chunked_array(arrays, kind)
            tables.append(pa.table([pa.array(range(len(column)), pa.int32()), column], schema=schema))
            assert write_pages.is_direct("v", column, ENCODINGS)
        write(path, tables)
        expected = pa.concat_tables(tables)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            assert file.read().to_pydict() == expected.to_pydict()
            assert not file.metadata.row_group(0).column(1).is_stats_set
        found = duckdb.execute(f"select v from read_parquet('{path}')").fetchall()
        assert [value for (value,) in found] == expected["v"].to_pylist()
        assert list(fastparquet.ParquetFile(str(path)).to_pandas()["v"]) == expected["v"].to_pylist()

    check()


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=40))
def test_metadata_are_those_of_pyarrow(values: list[bytes]) -> None:
    table = pa.table({"v": values})
    own, its = (
        write_pages.pages_of(table.schema.field("v"), table.column("v")),
        encode_rows(table, ENCODINGS, "x")[0],
    )
    mine, theirs = own.fields[3][1], its.fields[3][1]
    assert b"".join(own.data) == bytes(its.data[0])
    # pyarrow names the encodings in another order.
    assert set(mine[2][1].values) == set(theirs[2][1].values)
    assert {**mine, 2: None} == {**theirs, 2: None}
    assert own.offsets == its.offsets


@pytest.mark.parametrize(
    ("column", "encodings"),
    [
        (pa.array([b"x" * 5000, None]), ENCODINGS),
        (pa.array([b"x"]), ENCODINGS),
        (pa.array([b"x" * 5000]), Encodings(codecs={"v": "lz4"})),
        (pa.array([b"x" * 5000]), Encodings(codecs={"v": "none"}, dictionary=["v"])),
        (pa.array([b"x" * 5000]), Encodings(codecs={"v": "none"}, statistics=["v"])),
        (pa.array([b"x" * 5000]).dictionary_encode(), ENCODINGS),
        (pa.array([b"x" * 5000], pa.binary(5000)), ENCODINGS),
        (pa.array([[b"x" * 5000]]), ENCODINGS),
        (pa.array([], pa.binary()), ENCODINGS),
    ],
)
def test_other_columns_are_not_direct(column: pa.Array, encodings: Encodings) -> None:
    assert not write_pages.is_direct("v", pa.chunked_array([column]), encodings)


def test_images_are_rewritten_beside_nulls_and_other_columns(tmp_path: Path) -> None:
    noise = np.random.default_rng(1)
    images = [noise.bytes(2500 + 7 * n) for n in range(600)]
    maybe = [None if n > 550 else image[::-1] for n, image in enumerate(images)]
    table = pa.table({"id": range(600), "image": images, "maybe": maybe})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=97)
    result = rewrite_directory([tmp_path / "in.parquet"], tmp_path / "out", RewriteOptions(row_group_size=256 << 10))
    assert pa.concat_tables(pq.read_table(output.path) for output in result.outputs).equals(table)
    rows = "select * from read_parquet('{}/{}.parquet')"
    here, there = rows.format(tmp_path, "in"), rows.format(tmp_path / "out", "*")
    assert duckdb.execute(f"{here} except all {there}").fetchall() == []
