"""Pages written without pyarrow, and row groups put together from slices: as another writer would write them."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise
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
from pqcache.parquet.pages import Chunk
from pqcache.parquet.rewrite import encode, encodings, fast_encode
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.encode import concatenate_chunks, encode_rows
from pqcache.parquet.rewrite.encodings import LIMITED, Encodings
from pqcache.parquet.rewrite.files import OutputSchema, RowGroupFile, footer_schema_of
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.system.buffers import BufferPool
from tests.examples import examples
from tests.pages import real_pages
from tests.parquet.rewrite.rewriting import check_same, rewrite

ENCODINGS = Encodings(codecs={"v": "none", "n": "none"})


def write(path: Path, tables: list[pa.Table], how: Encodings = ENCODINGS) -> None:
    """Write slices of a row group as `RowGroupFile` has them from the writer."""
    schema = tables[0].schema
    parts = [encode_rows(table, how, "x") for table in tables]
    footer_schema = footer_schema_of(OutputSchema(working=schema, declared=schema, elements=None, keyvalues={}), how)
    chunks = [[part[leaf] for part in parts] for leaf in range(len(footer_schema.paths))]
    with ThreadPoolExecutor(2) as disk:
        file = RowGroupFile(path=path, footer_schema=footer_schema, disk=disk)
        file.skip(100)
        file.append(concatenate_chunks(chunks, footer_schema.orders))
        file.finish({})


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()], ids=str)
def test_every_reader_sees_texts(tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_encode, "LONG", 0)
    monkeypatch.setattr(fast_encode, "_TEXT_PAGE", 40)
    values = st.text(max_size=30) if "string" in str(kind) else st.binary(max_size=30)
    chunk = st.lists(values, min_size=1, max_size=9)

    @settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(chunk, min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
    def check(slices: list[list[list[bytes]]], nullable: bool) -> None:
        schema = pa.schema([pa.field("n", pa.int32()), pa.field("v", kind, nullable=nullable)])
        path = tmp_path / "direct.parquet"
        path.unlink(missing_ok=True)
        tables = []
        for chunks in slices:
            # What comes from a decoder may begin and end anywhere in its buffers.
            arrays = [pa.array([*chunk[:1], *chunk, *chunk[:1]], kind).slice(1, len(chunk)) for chunk in chunks]
            column = pa.chunked_array(arrays, kind)
            tables.append(pa.table([pa.array(range(len(column)), pa.int32()), column], schema=schema))
            assert fast_encode.is_direct("v", column, ENCODINGS)
        write(path, tables)
        expected = pa.concat_tables(tables)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            assert file.read().to_pydict() == expected.to_pydict()
            assert not file.metadata.row_group(0).column(1).is_stats_set
        found = duckdb.execute(f"select v from read_parquet('{path}')").fetchall()
        assert [value for (value,) in found] == expected["v"].to_pylist()
        assert list(fastparquet.ParquetFile(str(path)).to_pandas()["v"]) == expected["v"].to_pylist()

    check()


PATH = "v.list.item"
PLAIN_LISTS = Encodings(codecs={PATH: "none"})


def column_of(kind: pa.DataType, rows: int, length: int, seed: int = 1) -> pa.Array:
    """Return lists of ``length``, which begin somewhere in their buffers as what comes from a decoder may."""
    values = np.random.default_rng(seed).integers(0, 100, (rows + 2) * length)
    offsets = np.arange(0, len(values) + 1, length)
    make = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    index = np.int64 if pa.types.is_large_list(kind) else np.int32
    array = make.from_arrays(pa.array(offsets.astype(index)), pa.array(values).cast(kind.value_type), kind)
    return array.slice(1, rows)


ITEMS = [pa.int8(), pa.int64(), pa.float32()]


@pytest.mark.parametrize("value", ITEMS, ids=str)
@pytest.mark.parametrize("large", [True, False])
def test_every_reader_sees_lists(
    tmp_path: Path, value: pa.DataType, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_encode, "_LIST_PAGE", 400)
    monkeypatch.setattr(fast_encode, "_TOGETHER", 3)

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
            assert fast_encode.length_of(schema.field(1), column, how) == length
        write(path, tables, how)
        expected = pa.concat_tables(tables)
        with pq.ParquetFile(path) as file:
            assert file.read().to_pydict() == expected.to_pydict()
        found = duckdb.execute(f"select v from read_parquet('{path}')").fetchall()
        assert [row for (row,) in found] == expected["v"].to_pylist()

    check()


def test_lists_are_rewritten_beside_others_of_the_column(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows: list[Any] = [draw.integers(0, 50_000, 256).tolist() for _ in range(3000)]
    rows[1500] = rows[1500][:7]
    rows[2900:2905] = [None, [], [None], [3] * 256, [None] * 256]
    table = pa.table({"id": range(3000), "tokens": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    result = rewrite_directory([tmp_path / "in.parquet"], tmp_path / "out", RewriteOptions(row_group_size=256 << 10))
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
    monkeypatch.setattr(fast_encode, "_LIST_PAGE", 10_000)
    table = pa.table({"v": column_of(pa.list_(pa.int32()), 150, 500)})
    assert fast_encode.length_of(table.schema.field(0), table["v"], PLAIN_LISTS) == 500
    write(tmp_path / "a.parquet", [table], PLAIN_LISTS)
    assert pq.read_table(tmp_path / "a.parquet").equals(table)
    assert len(real_pages(tmp_path / "a.parquet")[0][0]) == 30


HOW = Encodings(codecs={"x": "none"}, statistics=["x"])
KINDS = [
    *(pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.date32(), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("ns")),
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
    assert fast_encode.is_plain("x", table["x"], HOW)
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


FLOATS = st.floats(width=32)
TYPES: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), FLOATS),
    (pa.float64(), st.floats()),
    (pa.float16(), st.floats(width=16).map(np.float16)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(9, 2), st.integers(-(10**8), 10**8).map(lambda n: Decimal(n) / 100)),
    (pa.decimal128(30, 2), st.integers(-(10**20), 10**20).map(lambda n: Decimal(n) / 100)),
    (pa.date32(), st.dates(datetime.date(1900, 1, 1))),
    (pa.list_(pa.int32()), st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=3)),
]


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=str)
def test_statistics_are_those_of_one_go(tmp_path: Path, kind: pa.DataType, values: Any) -> None:
    nullable, how = st.one_of(st.none(), values), Encodings(statistics=["v", "v.list.item"])

    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(nullable, min_size=2, max_size=12), st.lists(st.integers(1, 11), max_size=3))
    def check(items: list[Any], ends: list[int]) -> None:
        table = pa.table({"v": pa.array(items, kind)})
        path = tmp_path / "concatenated.parquet"
        path.unlink(missing_ok=True)
        cuts = sorted({0, len(items), *(end for end in ends if end < len(items))})
        write(path, [table.slice(low, high - low) for low, high in pairwise(cuts)], how)
        pq.write_table(table, tmp_path / "one.parquet", use_dictionary=False, version="2.6")
        found, one = (pq.read_metadata(p).row_group(0).column(0) for p in (path, tmp_path / "one.parquet"))
        assert (found.num_values, found.statistics is None) == (one.num_values, one.statistics is None)
        if one.statistics is not None:
            assert found.statistics.null_count == one.statistics.null_count
            if found.statistics.has_min_max:  # a slice of NaN alone leaves them unknown
                assert (found.statistics.min, found.statistics.max) == (one.statistics.min, one.statistics.max)
            else:
                assert not one.statistics.has_min_max or pa.types.is_floating(kind)
        read = pq.read_table(path)["v"].to_pylist()
        assert all(a == b or a != a for a, b in zip(read, table["v"].to_pylist(), strict=True))

    check()


def test_columns_that_need_more_than_a_copy_are_left_to_pyarrow(tmp_path: Path) -> None:
    """Nulls among large values and in lists, and a NaN among numbers, which is no minimum or maximum."""
    rng = np.random.default_rng(3)
    rows = 1200
    numbers = rng.standard_normal(rows)
    numbers[rows // 2] = np.nan
    tokens: list[list[int | None]] = rng.integers(0, 1 << 30, (rows, 64)).tolist()
    tokens[777][3] = None
    large = [None if row % 40 == 7 else rng.bytes(2500) for row in range(rows)]
    columns = {"x": numbers, "tokens": pa.array(tokens, pa.list_(pa.int32())), "large": large}
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table(columns), source)
    result = rewrite([source], tmp_path / "out", size=256 << 10, compression="none")
    check_same([source], result)
    first = 0
    for output in result.outputs:
        metadata = pq.read_metadata(output.path)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            values, known = numbers[first : first + group.num_rows], group.column(0).statistics
            assert (known.min, known.max) == (np.nanmin(values), np.nanmax(values))
            first += group.num_rows
    assert first == rows
