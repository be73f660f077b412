"""Numbers that go to disk as they lie in memory: every byte is that of pyarrow's writer, but for levels of nulls."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import fastparquet
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.parquet import thrift
from pqcache.parquet.pages import Chunk, decode_hybrid, encode_flags
from pqcache.parquet.rewrite import encode
from pqcache.parquet.rewrite import pages as write_pages
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.encodings import LIMITED, Encodings
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.system.memory import BufferPool
from tests.examples import examples

HOW = Encodings(codecs={"x": "none"}, statistics=["x"])
KINDS = [
    *(pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.date32(), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("ns")),
]
OTHERS = [
    *(pa.array([True]), pa.array([np.float16(1)]), pa.array([b"x"], pa.binary(1)), pa.array(["x"]), pa.array([[1]])),
    *(pa.array([0], pa.date64()), pa.array([0], pa.time32("s")), pa.array([0], pa.timestamp("s"))),
    *(pa.array([Decimal(1)]), pa.array([1]).dictionary_encode(), pa.array([{"x": 1}])),
]


def array_of(kind: pa.DataType, rows: int, seed: int) -> pa.Array:
    """Return values of ``kind`` that begin somewhere in their buffer, now and then its extremes and both zeros."""
    rng = np.random.default_rng(seed)
    if pa.types.is_floating(kind):
        values = rng.standard_normal(rows + 3).astype(kind.to_pandas_dtype())
        values[rng.random(rows + 3) < 0.2] = rng.choice([0.0, -0.0, np.inf, -np.inf])
        return pa.array(values)[3:]
    signed = not pa.types.is_unsigned_integer(kind)
    own = np.iinfo(f"{'i' if signed else 'u'}{kind.bit_width // 8}")
    low = (own.min, -5 if signed else 0, 3)[rng.integers(3)]
    high = (own.max, 7)[rng.integers(2)]
    values = rng.integers(low, high, rows + 3, own.dtype, endpoint=True)
    if rng.random() < 0.3:
        values.sort()
    if rng.random() < 0.2:
        values = values[::-1].copy()
    return pa.array(values).view(kind)[3:]


def both(table: pa.Table) -> tuple[Chunk, Chunk]:
    """Return the chunk that is made here, and pyarrow's."""
    assert write_pages.is_plain("x", table["x"], HOW)
    return encode.encode_rows(table, HOW, "a")[0], encode._chunks(table, HOW, "a", BufferPool())[0]


@pytest.mark.skipif(not LIMITED, reason="this pyarrow cuts pages elsewhere")
@settings(max_examples=examples(80), deadline=None)
@given(
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(st.integers(0, 45_000), min_size=1, max_size=3).filter(sum),
    st.integers(0, 1 << 32),
)
def test_every_byte_is_as_pyarrow_writes_it(kind: pa.DataType, nullable: bool, parts: list[int], seed: int) -> None:
    column = pa.chunked_array([array_of(kind, rows, seed + n) for n, rows in enumerate(parts)])
    table = pa.table([column], schema=pa.schema([pa.field("x", kind, nullable)]))
    own, its = both(table)
    places = {field: value for field, value in its.fields.items() if field not in (4, 5, 6, 7)}  # of the page index
    assert own.fields == places
    assert own.offsets == its.offsets
    assert isinstance(own.columns, dict)
    assert thrift.encode(own.columns) == its.columns
    assert b"".join(own.data) == b"".join(its.data)
    assert own.size == sum(map(len, own.data))


@pytest.mark.parametrize("array", OTHERS, ids=lambda array: str(array.type))
def test_what_is_stored_otherwise_is_left_to_pyarrow(array: pa.Array) -> None:
    assert not write_pages.is_plain("x", pa.chunked_array([array]), HOW)


@pytest.mark.parametrize(
    "how",
    [
        Encodings(codecs={"x": "lz4"}, statistics=["x"]),
        Encodings(codecs={"x": "none"}, statistics=["x"], dictionary=["x"]),
        Encodings(codecs={"x": "none"}, statistics=["x"], special={"x": "DELTA_BINARY_PACKED"}),
        Encodings(codecs={"x": "none"}),
    ],
)
def test_what_is_to_be_encoded_is_left_to_pyarrow(how: Encodings) -> None:
    assert not write_pages.is_plain("x", pa.chunked_array([[1]]), how)


def with_nulls(array: pa.Array, rng: np.random.Generator) -> pa.Array:
    """Return ``array`` with nulls: some, single ones, in long runs, or nearly all; one value at least is none."""
    rows = len(array)
    nulls = rng.random(rows) < rng.choice([0.0005, 0.02, 0.3, 0.97])
    for _ in range(rng.integers(4)):
        begin = int(rng.integers(rows))
        nulls[begin : begin + int(rng.integers(1, 50_000))] = rng.random() < 0.7
    nulls[rng.integers(rows)] = True
    nulls[rng.integers(rows)] = False
    return pc.if_else(pa.array(nulls), pa.scalar(None, array.type), array)


@pytest.mark.skipif(not LIMITED, reason="this pyarrow cuts pages elsewhere")
@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 45_000), min_size=1, max_size=3).filter(sum),
    st.integers(0, 1 << 32),
)
def test_nulls_are_as_pyarrow_reads_and_describes_them(kind: pa.DataType, parts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    column = pa.chunked_array([with_nulls(array_of(kind, rows + 1, seed + n), rng) for n, rows in enumerate(parts)])
    table = pa.table({"x": column})
    own, its = both(table)
    same = {field: value for field, value in its.fields[3][1].items() if field not in (6, 7)}  # sizes
    assert {field: value for field, value in own.fields[3][1].items() if field not in (6, 7)} == same
    assert isinstance(own.columns, dict)
    assert thrift.encode(own.columns) == its.columns
    own_pages, its_pages = (chunk.offsets[1][1].values for chunk in (own, its) if chunk.offsets is not None)
    assert [page[3] for page in own_pages] == [page[3] for page in its_pages]
    assert sum(page[2][1] for page in own_pages) == own.size == own.fields[3][1][7][1] == sum(map(len, own.data))
    assert own.size <= its.size + 0.01 * its.size + 0.13 * len(column) / 8 + 64


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 30_000), st.lists(st.integers(1, 4_000), min_size=1, max_size=40), st.integers(0, 1 << 32))
def test_levels_are_read_as_they_were(count: int, runs: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    flags = np.resize(np.repeat(np.arange(len(runs)) % 2, runs), count).astype(np.uint8)
    noise = rng.random(count) < rng.choice([0, 0.001, 0.3])
    flags[noise] = rng.integers(0, 2, int(noise.sum()))
    levels = encode_flags(flags)
    assert int.from_bytes(levels[:4], "little") == len(levels) - 4
    assert np.array_equal(decode_hybrid(levels[4:], 1, count), flags)
    assert len(levels) <= -(-count // 8) + 8


def test_a_page_of_nulls_has_no_bounds_and_one_without_has_no_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(100_000)
    missing = np.zeros(100_000, bool)
    missing[20_000:40_000] = missing[50_000] = True
    table = pa.table({"x": pa.array(values, mask=missing)})
    own, its = both(table)
    assert isinstance(own.columns, dict)
    assert thrift.encode(own.columns) == its.columns
    assert own.columns[1][1].values == [2, 1, 2, 2, 2]
    assert own.size < its.size + 2_500
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30_000)
    rewrite_directory([tmp_path / "a.parquet"], tmp_path / "out", RewriteOptions(row_group_size=1 << 20))
    made = tmp_path / "out" / "part-00000.parquet"
    assert pq.read_table(made).equals(table)
    assert duckdb.sql(f"select x from '{made}'").to_arrow_table()["x"].to_pylist() == table["x"].to_pylist()
    with made.open("rb") as file:
        found = fastparquet.ParquetFile(file).to_pandas()["x"]
    assert np.array_equal(found.isna(), missing)
    assert np.array_equal(found[~missing], values[~missing])


def test_nulls_where_none_may_be_are_left_to_pyarrow() -> None:
    column = pa.chunked_array([[1, None]])
    assert write_pages.pages_of_numbers(pa.field("x", pa.int64(), nullable=False), column) is None
    assert not write_pages.is_plain("x", pa.chunked_array([pa.nulls(3, pa.int64())]), HOW)


def test_int96_is_left_to_pyarrow() -> None:
    times = pa.chunked_array([pa.array([1], pa.timestamp("us"))])
    assert write_pages.is_plain("x", times, HOW)
    assert not write_pages.is_plain("x", times, Encodings(codecs={"x": "none"}, statistics=["x"], int96=True))


def test_values_that_are_not_numbers_are_left_to_pyarrow() -> None:
    values = np.arange(50_000, dtype=np.float32)
    values[30_000] = np.nan
    for table in (pa.table({"x": values}), pa.table({"x": pa.array(values, mask=values > 2)})):
        assert write_pages.pages_of_numbers(table.schema.field(0), table["x"]) is None
        own, its = both(table)
        assert own.fields == its.fields
        assert own.columns == its.columns


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_readers_see_what_was_stored(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    here = tmp_path_factory.mktemp("numbers")
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    rows, seed = data.draw(st.integers(1, 60_000)), data.draw(st.integers(0, 1 << 32))
    columns = {f"c{n}": array_of(kind, rows, seed + n) for n, kind in enumerate(kinds)}
    columns |= {"noise": array_of(pa.float64(), rows, seed), "words": pa.array([f"w{n % 7}" for n in range(rows)])}
    if data.draw(st.booleans()):
        columns["c0"] = with_nulls(columns["c0"], np.random.default_rng(seed))
        columns["noise"] = with_nulls(columns["noise"], np.random.default_rng(seed))
    table = pa.table(columns)
    pq.write_table(table, here / "a.parquet", row_group_size=data.draw(st.integers(5_000, 60_000)))
    rewrite_directory(
        [here / "a.parquet"], here / "out", RewriteOptions(row_group_size=data.draw(st.integers(64 << 10, 1 << 20)))
    )
    (made,) = (here / "out").iterdir()
    assert pq.read_table(made).equals(table)
    above = pc.sum(pc.greater(columns["noise"], 0.5)).as_py() or 0
    assert pq.read_table(made, filters=[("noise", ">", 0.5)]).num_rows == above
    assert duckdb.sql(f"select count(*) from '{made}' where noise > 0.5").fetchall() == [(above,)]
    for name in table.schema.names:
        if pa.types.is_integer(table.schema.field(name).type) or pa.types.is_floating(table.schema.field(name).type):
            assert duckdb.sql(f"select {name} from '{made}'").to_arrow_table()[name].equals(table[name])


def test_the_pages_of_a_repartitioned_file_have_an_index(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(200_000)
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    rewrite_directory([tmp_path / "a.parquet"], tmp_path / "out", RewriteOptions(row_group_size=1 << 20))
    metadata = pq.read_metadata(tmp_path / "out" / "part-00000.parquet")
    chunk = metadata.row_group(0).column(0)
    assert (chunk.compression, set(chunk.encodings)) == ("UNCOMPRESSED", {"PLAIN", "RLE"})
    assert chunk.has_column_index
    assert chunk.has_offset_index
    assert chunk.statistics.max == values[: chunk.num_values].max()
