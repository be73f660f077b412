"""rewrite_directory: what is in comes out, in row groups of the right size."""

from __future__ import annotations

import datetime
import decimal
import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import duckdb
import fastparquet
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet import footer, thrift
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.parquet.rewrite.rewrite import KnownOfSources, RewriteResult, rewrite_directory
from pqcache.parquet.rewrite.unchanged_files import fits, row_group_bytes
from tests.pages import index_spans

KB = 1 << 10


def group_sizes(result: RewriteResult) -> list[tuple[int, int]]:
    """Return (bytes, rows) of every row group of the outputs, in order."""
    found = []
    for output in result.outputs:
        metadata = pq.read_metadata(output.path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        assert (output.rows, output.row_groups) == (metadata.num_rows, len(groups))
        found += [(row_group_bytes(group), group.num_rows) for group in groups]
    return found


def check_sizes(result: RewriteResult, limit: int) -> list[float]:
    """Assert that no row group is over and all but the last fill 95 %; return the fills of all but the last."""
    sizes = group_sizes(result)
    assert all(size <= limit for size, _ in sizes)
    fills = [size / limit for size, _ in sizes[:-1]]
    assert all(fill >= 0.95 for fill in fills), fills
    return fills


def check_spans(path: Path) -> None:
    """Assert that row groups, and then page indexes, lie one after the other and span exactly what the footer says."""
    data = path.read_bytes()
    end = 4
    metadata = pq.read_metadata(path)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for position in range(group.num_columns):
            chunk = group.column(position)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            assert start == end
            end += chunk.total_compressed_size
    for at, size in index_spans(path):
        assert at == end
        end += size
    assert end == len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def table_of(paths: list[Path], **options: Any) -> pa.Table:
    files = [pq.ParquetFile(path, **options) for path in paths]
    # By row group: pyarrow cannot read nested dictionaries across them.
    groups = [file.read_row_group(number) for file in files for number in range(file.num_row_groups)]
    return pa.concat_tables(groups or [files[0].read()])


def bits(table: pa.Table) -> list[Any]:
    """Return the rows so that NaN equals NaN and 0.0 differs from -0.0."""
    return [repr(column.to_pylist()) for column in table.columns]


def by_duckdb(paths: list[Path]) -> tuple[list[str], list[str]]:
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        names = [str(path) for path in paths]
        relation = connection.sql(
            "select * from read_parquet($names, hive_partitioning = false)", params={"names": names}
        )
        types = [str(kind) for kind in relation.types]
        return types, bits(relation.to_arrow_table())


def check_same(sources: list[Path], result: RewriteResult, duck: bool = True) -> None:
    """Assert that the outputs read as the sources do, in values, order, schema and metadata."""
    outputs = [output.path for output in result.outputs]
    before, after = table_of(sources), table_of(outputs)
    assert after.schema.equals(before.schema, check_metadata=True)
    assert bits(after) == bits(before)
    first = pq.read_metadata(sources[0])
    for output in result.outputs:
        path = output.path
        metadata = pq.read_metadata(path)
        assert (metadata.metadata or {}) == (first.metadata or {})
        assert str(metadata.schema).split("\n", 1)[1] == str(first.schema).split("\n", 1)[1]
        if not output.linked:
            check_spans(path)
    if duck:
        assert by_duckdb(outputs) == by_duckdb(sources)


def rewrite(sources: list[Path], target: Path, size: int = 64 * KB, **options: Any) -> RewriteResult:
    return rewrite_directory(sources, target, RewriteOptions(row_group_size=size, **options))


# ---- any schema, any size

COLUMNS = {
    "int64": lambda rng, n: pa.array(rng.integers(-(2**40), 2**40, n)),
    "sorted": lambda rng, n: pa.array(np.sort(rng.integers(0, 2**40, n))),
    "constant": lambda rng, n: pa.array(np.zeros(n, np.int32)),
    "uint8": lambda rng, n: pa.array(rng.integers(0, 256, n).astype(np.uint8)),
    "uint32": lambda rng, n: pa.array(rng.integers(0, 2**32, n).astype(np.uint32)),
    "uint64": lambda rng, n: pa.array(rng.integers(0, 2**64, n, dtype=np.uint64)),
    "bool": lambda rng, n: pa.array(rng.random(n) < 0.5),
    "double": lambda rng, n: pa.array(np.where(rng.random(n) < 0.1, np.nan, rng.standard_normal(n))),
    "half": lambda rng, n: pa.array(rng.random(n).astype(np.float16)),
    "string": lambda rng, n: pa.array([None if i % 11 == 3 else "é" * (i % 13) for i in range(n)]),
    "category": lambda rng, n: pa.array([f"kind {i}" for i in rng.integers(0, 40, n)]).dictionary_encode(),
    "large": lambda rng, n: pa.array([f"{i:x}" for i in rng.integers(0, 2**60, n)], pa.large_string()),
    "binary": lambda rng, n: pa.array([rng.bytes(int(k)) for k in rng.integers(0, 200, n)]),
    "fixed": lambda rng, n: pa.array([rng.bytes(7) for _ in range(n)], pa.binary(7)),
    "date": lambda rng, n: pa.array(rng.integers(-1000, 30000, n).astype(np.int32), pa.date32()),
    "stamp": lambda rng, n: pa.array(rng.integers(0, 2**60, n), pa.timestamp("ns", "Asia/Kolkata")),
    "decimal": lambda rng, n: pa.array([decimal.Decimal(int(i)).scaleb(-3) for i in rng.integers(-9999, 9999, n)]),
    "null": lambda rng, n: pa.nulls(n),
    "list": lambda rng, n: pa.array(
        [None if i % 7 == 2 else [1, None] * (i % 5) for i in range(n)], pa.list_(pa.int16())
    ),
    "vector": lambda rng, n: pa.FixedSizeListArray.from_arrays(pa.array(rng.random(4 * n, np.float32)), 4),
    "struct": lambda rng, n: pa.array([None if i % 9 == 1 else {"a": i, "b": ["x"] * (i % 3)} for i in range(n)]),
    "map": lambda rng, n: pa.array(
        [[(f"k{j}", i) for j in range(i % 3)] for i in range(n)], pa.map_(pa.string(), pa.int32())
    ),
    "deep": lambda rng, n: pa.array([[[{"z": i}], None, []] if i % 4 else None for i in range(n)]),
}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 12_000),
    groups=st.integers(1, 5000),
    files=st.integers(1, 4),
    size=st.sampled_from([16 * KB, 64 * KB, 200 * KB]),
    options=st.sampled_from(
        [{}, {"compression": "zstd", "compression_level": 3}, {"compat": True}, {"compression": "keep"}]
    ),
)
def test_what_is_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[str],
    seed: int,
    rows: int,
    groups: int,
    files: int,
    size: int,
    options: dict[str, Any],
) -> None:
    here = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(seed)
    table = pa.table({f"{kind} {n}": COLUMNS[kind](rng, rows) for n, kind in enumerate(kinds)})
    table = table.replace_schema_metadata({"who": "me"})
    sources = []
    for number in range(files):
        begin, end = rows * number // files, rows * (number + 1) // files
        sources.append(here / f"{number}.parquet")
        pq.write_table(table.slice(begin, end - begin), sources[-1], row_group_size=groups)
    result = rewrite(sources, here / "out", size, **options)
    check_sizes(result, size)
    check_same(sources, result, duck="half" not in kinds)


# ---- sizes


def test_rows_that_grow_a_thousandfold(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lengths = np.concatenate([np.full(20_000, 4), np.full(3_000, 400), np.full(300, 6_000)])
    table = pa.table({"id": np.arange(len(lengths)), "blob": [rng.bytes(int(length)) for length in lengths]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10**6)
    result = rewrite([tmp_path / "a.parquet"], tmp_path / "out", 256 * KB)
    check_sizes(result, 256 * KB)
    check_same([tmp_path / "a.parquet"], result)


def test_compressibility_that_collapses(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    easy = [b"a" * 300] * 20_000
    hard = [rng.bytes(300) for _ in range(6_000)]
    for number, blobs in enumerate((easy + hard, hard + easy)):
        source = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"blob": blobs}), source, row_group_size=10**6, use_dictionary=False)
        result = rewrite([source], tmp_path / f"out{number}", 128 * KB)
        check_sizes(result, 128 * KB)
        check_same([source], result)


def test_median_fill_and_little_is_encoded_twice(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    n = 120_000
    table = pa.table(
        {
            "id": np.arange(n),
            "x": rng.standard_normal(n),
            "kind": pa.array([f"k{i}" for i in rng.integers(0, 1000, n)]),
            "tokens": pa.ListArray.from_arrays(np.arange(0, 8 * n + 1, 8, np.int32), rng.integers(0, 30_000, 8 * n)),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7_000)
    result = rewrite([tmp_path / "a.parquet"], tmp_path / "out", 256 * KB)
    fills = check_sizes(result, 256 * KB)
    assert len(fills) >= 8
    assert np.median(fills) >= 0.99
    assert result.encoded_again <= 0.25 * result.encoded
    assert result.encoded == result.encoded_again + sum(size for size, _ in group_sizes(result))


def test_a_row_larger_than_a_row_group_stands_alone_and_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    blobs = [rng.bytes(100) for _ in range(2_000)]
    blobs[1_234] = rng.bytes(100_000)
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"blob": blobs}), source, row_group_size=500)
    result = rewrite([source], tmp_path / "out", 64 * KB)
    check_same([source], result)
    over = [rows for size, rows in group_sizes(result) if size > 64 * KB]
    assert over == [1]
    assert len(result.warnings) == 1
    assert f"{source}: row 1,234 alone takes 97" in result.warnings[0]


def test_files_roll_at_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pqcache.parquet.rewrite.rewrite._MIN_FILE", 0)
    rng = np.random.default_rng(5)
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"blob": [rng.bytes(1000) for _ in range(1_500)]}), source)
    result = rewrite([source], tmp_path / "out", 64 * KB)
    check_sizes(result, 64 * KB)
    check_same([source], result)
    assert [output.path.name for output in result.outputs] == [f"part-{n:05d}.parquet" for n in range(3)]
    assert all(output.path.stat().st_size <= 8.1 * 64 * KB for output in result.outputs)
    assert all(output.row_groups >= 7 for output in result.outputs[:-1])


def test_a_big_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    source = tmp_path / "a.parquet"
    blobs = [rng.bytes(10_000) for _ in range(8_000)]
    pq.write_table(pa.table({"blob": blobs}), source, use_dictionary=False, compression="none")
    del blobs
    before = pa.total_allocated_bytes()
    peak = 0

    def sample(done: int) -> None:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - before)

    result = rewrite_directory([source], tmp_path / "out", RewriteOptions(row_group_size=1 << 20), sample)
    check_sizes(result, 1 << 20)
    assert pq.read_metadata(source).num_row_groups == 1
    assert 0 < peak < 30 << 20


# ---- what must come out as it was


def test_pandas_frames_keep_index_categories_and_types(tmp_path: Path) -> None:
    frames = []
    for number in range(3):
        frame = pd.DataFrame(
            {
                "cat": pd.Categorical([f"c{(i + number) % 5}" for i in range(3_000)]),
                "when": pd.date_range("2024-01-01", periods=3_000, freq="h", tz="Europe/Berlin"),
                "n": pd.array([None if i % 5 == 0 else i for i in range(3_000)], dtype="Int64"),
                "text": [f"row {i}" for i in range(3_000)],
            },
            index=pd.Index([f"{number}-{i}" for i in range(3_000)], name="key"),
        )
        frame.to_parquet(tmp_path / f"{number}.parquet", row_group_size=700)
        frames.append(frame)
    sources = [tmp_path / f"{number}.parquet" for number in range(3)]
    result = rewrite(sources, tmp_path / "out")
    check_same(sources, result)
    outputs = pd.concat([pd.read_parquet(output.path) for output in result.outputs])
    pd.testing.assert_frame_equal(outputs, pd.concat([pd.read_parquet(source) for source in sources]))


def test_spark_files_get_no_arrow_schema_and_keep_their_own(tmp_path: Path) -> None:
    source = tmp_path / "part-00000-c000.snappy.parquet"
    table = pa.table(
        {
            "a": pa.array(range(20_000), pa.int32()),
            "t": pa.array([[i] for i in range(20_000)], pa.list_(pa.int64())),
        }
    )
    keyvalues = {
        "org.apache.spark.version": "3.5.1",
        "org.apache.spark.sql.parquet.row.metadata": '{"type":"struct","fields":[]}',
    }
    with pq.ParquetWriter(source, table.schema, store_schema=False) as writer:
        writer.write_table(table, row_group_size=999)
        writer.add_key_value_metadata(keyvalues)
    result = rewrite([source], tmp_path / "out")
    check_same([source], result)
    metadata = pq.read_metadata(result.outputs[0].path).metadata
    assert metadata == {key.encode(): value.encode() for key, value in keyvalues.items()}


@pytest.mark.parametrize("compliant", [True, False])
def test_list_item_names_stay(tmp_path: Path, compliant: bool) -> None:
    source = tmp_path / "a.parquet"
    table = pa.table({"l": [[i, i + 1] for i in range(5_000)], "m": [{"x": [["a"]]}] * 5_000})
    pq.write_table(table, source, use_compliant_nested_type=compliant, row_group_size=999)
    result = rewrite([source], tmp_path / "out")
    check_same([source], result)
    path = pq.read_metadata(result.outputs[0].path).row_group(0).column(0).path_in_schema
    assert path == ("l.list.element" if compliant else "l.list.item")


@pytest.mark.parametrize("as_integer", [True, False])
def test_decimals_keep_their_storage(tmp_path: Path, as_integer: bool) -> None:
    source = tmp_path / "a.parquet"
    columns = {}
    for precision, scale in ((5, 2), (15, 3), (30, 10), (60, 4)):
        kind = pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)
        values = [None if i % 13 == 0 else decimal.Decimal(i % 1000 - 500).scaleb(-scale) for i in range(4_000)]
        columns[f"d{precision}"] = pa.array(values, kind)
    pq.write_table(pa.table(columns), source, store_decimal_as_integer=as_integer, row_group_size=999)
    result = rewrite([source], tmp_path / "out", 16 * KB)
    check_sizes(result, 16 * KB)
    check_same([source], result, duck=False)  # DuckDB has no decimals of 60 digits
    physical = pq.read_metadata(result.outputs[0].path).schema.column(0).physical_type
    assert physical == ("INT32" if as_integer else "FIXED_LEN_BYTE_ARRAY")


def test_field_ids_and_field_metadata_stay(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    schema = pa.schema(
        [
            pa.field("a", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "7", "unit": "km"}),
            pa.field("s", pa.struct([pa.field("b", pa.string(), metadata={"PARQUET:field_id": "9", "x": "y"})])),
        ],
        metadata={"made": "by hand"},
    )
    rows = [{"a": i, "s": {"b": str(i)}} for i in range(9_000)]
    pq.write_table(pa.Table.from_pylist(rows, schema), source, row_group_size=999)
    result = rewrite([source], tmp_path / "out")
    check_same([source], result)
    field = pq.read_schema(result.outputs[0].path).field("a")
    assert field.metadata == {b"PARQUET:field_id": b"7", b"unit": b"km"}
    assert not field.nullable


def test_columns_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    table = pa.Table.from_arrays([pa.array(range(9_000)), pa.array(["x", "y", None] * 3_000)], names=["c", "c"])
    pq.write_table(table, source, row_group_size=999)
    check_same([source], rewrite([source], tmp_path / "out"), duck=False)


def test_names_with_dots_and_odd_characters(tmp_path: Path) -> None:
    source = tmp_path / "a b?#%20=ü.parquet"
    table = pa.table({"a.b": range(9_000), "a": [{"b": i} for i in range(9_000)], "": ["x"] * 9_000})
    pq.write_table(table, source, row_group_size=999)
    check_same([source], rewrite([source], tmp_path / "out=1 %2F"))


def test_the_path_is_never_read_for_values(tmp_path: Path) -> None:
    here = tmp_path / "dt=2024-01-01" / "country=__HIVE_DEFAULT_PARTITION__"
    here.mkdir(parents=True)
    pq.write_table(pa.table({"a": range(9_000), "country": ["NL"] * 9_000}), here / "x.parquet", row_group_size=99)
    result = rewrite([here / "x.parquet"], tmp_path / "out" / "dt=2024-01-01")
    assert pq.ParquetFile(result.outputs[0].path).schema_arrow.names == ["a", "country"]
    check_same([here / "x.parquet"], result)


def test_merged_dictionaries_that_outgrow_their_index(tmp_path: Path) -> None:
    sources = []
    for number in range(4):
        values = pa.array([f"f{number} v{i}" for i in range(100)])
        codes = pa.array(np.arange(3_000) % 100, pa.int8())
        sources.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.table({"c": pa.DictionaryArray.from_arrays(codes, values)}), sources[-1])
    result = rewrite(sources, tmp_path / "out", 256 * KB)
    (output,) = result.outputs
    found = pq.ParquetFile(output.path).read()
    assert found.column("c").to_pylist() == table_of(sources).column("c").to_pylist()
    assert found.schema.field("c").type.index_type == pa.int32()
    assert by_duckdb([output.path]) == by_duckdb(sources)


def test_nested_dictionaries_views_and_extension_types(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    n = 4_000
    words = pa.array([f"w{i % 9}" for i in range(n)])
    table = pa.table(
        {
            "view": words.cast(pa.string_view()),
            "nested": pa.array([["a", None], [], None, ["b"]] * (n // 4)).cast(
                pa.list_(pa.dictionary(pa.int32(), pa.string()))
            ),
            "in struct": pa.StructArray.from_arrays([words.dictionary_encode()], ["k"]),
            "uuid": pa.array([i.to_bytes(16, "big") for i in range(n)], pa.binary(16)).cast(pa.uuid()),
            "json": pa.array([f'{{"a": {i}}}' for i in range(n)], pa.json_()),
            "took": pa.array(range(n), pa.duration("s")),
            "at": pa.array([i % 86_400 for i in range(n)], pa.time32("s")),
        }
    )
    pq.write_table(table, source, row_group_size=333)
    result = rewrite([source], tmp_path / "out", 32 * KB)
    check_sizes(result, 32 * KB)
    check_same([source], result)


def edited(path: Path, change: Any) -> None:
    """Rewrite the footer of ``path`` by ``change(fields)``."""
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    fields = thrift.decode(data[-8 - length : -8], "test")
    change(fields)
    path.write_bytes(data[: -8 - length] + footer.frame(fields))


def test_legacy_lists_and_annotations_stay(tmp_path: Path) -> None:
    """Two-level lists and ENUM, as parquet-mr and Impala write them; Arrow itself would normalize both."""
    source = tmp_path / "a.parquet"
    item = pa.field("element", pa.int32(), nullable=False)
    table = pa.table(
        {
            "l": pa.array([None if i % 5 == 0 else [i] * (i % 4) for i in range(9_000)], pa.list_(item)),
            "e": pa.array([b"RED", b"GREEN", None] * 3_000),
        }
    )
    pq.write_table(table, source, row_group_size=999, store_schema=False)

    def legacy(fields: thrift.Struct) -> None:
        root, outer, _, leaf, enum = fields[2][1].values
        array = {**leaf, 3: (thrift.I32, 2), 4: (thrift.BINARY, b"array")}
        fields[2] = (
            thrift.LIST,
            thrift.Items(thrift.STRUCT, [root, outer, dict(sorted(array.items())), {**enum, 6: (thrift.I32, 4)}]),
        )
        for group in fields[4][1].values:
            group[1][1].values[0][3][1][3] = (thrift.LIST, thrift.Items(thrift.BINARY, [b"l", b"array"]))

    edited(source, legacy)
    metadata = pq.read_metadata(source)
    assert metadata.schema.column(0).path == "l.array"
    assert metadata.schema.column(1).converted_type == "ENUM"
    result = rewrite([source], tmp_path / "out", 16 * KB)
    check_same([source], result)
    assert table_of([result.outputs[0].path]).column("l").to_pylist() == table.column("l").to_pylist()


# ---- INT96


def int96(path: Path, values: list[int], unit: str = "ns", **options: Any) -> None:
    table = pa.table({"n": range(len(values)), "t": pa.array(values, pa.timestamp(unit))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=999, **options)


@pytest.mark.parametrize("store_schema", [True, False])
def test_int96_becomes_microseconds_for_any_year(tmp_path: Path, store_schema: bool) -> None:
    source = tmp_path / "a.parquet"
    year_one, year_9999 = -62135596800, 253402300799
    seconds = [year_one, year_9999, 0, -1] + [i * 1_000_003 for i in range(4_000)]
    int96(source, [second * 10**6 + 7 for second in seconds], "us", store_schema=store_schema)
    result = rewrite([source], tmp_path / "out", 16 * KB)
    (output,) = result.outputs
    column = pq.read_metadata(output.path).schema.column(1)
    assert (column.physical_type, column.name) == ("INT64", "t")
    stamps = pq.ParquetFile(output.path).read().column("t")
    assert stamps.type == pa.timestamp("us")
    assert stamps.cast(pa.int64()).to_pylist() == [second * 10**6 + 7 for second in seconds]
    assert by_duckdb([output.path]) == by_duckdb([source])


def test_int96_with_nanoseconds_keeps_them(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    values = [i * 1_000_000_007 for i in range(4_000)]
    int96(source, values)
    result = rewrite([source], tmp_path / "out", 16 * KB)
    stamps = pq.ParquetFile(result.outputs[0].path).read().column("t")
    assert stamps.type == pa.timestamp("ns")
    assert stamps.cast(pa.int64()).to_pylist() == values


def test_int96_that_no_unit_holds_is_refused(tmp_path: Path) -> None:
    fine, far = tmp_path / "fine.parquet", tmp_path / "far.parquet"
    int96(fine, [1] * 2_000)
    int96(far, [-62135596800 * 10**6] * 2_000, "us")
    with pytest.raises(ParquetError, match=r"fine\.parquet.*far\.parquet"):
        rewrite([fine, far], tmp_path / "out")


def test_nested_int96(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    values = [None if i % 5 == 0 else [{"at": None}, {"at": i * 10**6}] for i in range(4_000)]
    kind = pa.list_(pa.struct([("at", pa.timestamp("us"))]))
    table = pa.table({"v": pa.array(values, kind)})
    pq.write_table(table, source, use_deprecated_int96_timestamps=True, row_group_size=999)
    result = rewrite([source], tmp_path / "out", 16 * KB)
    found = pq.ParquetFile(result.outputs[0].path).read()
    assert found.column("v").to_pylist() == table.column("v").to_pylist()


# ---- files without rows


def test_a_zero_row_file_alone_is_linked(tmp_path: Path) -> None:
    source = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"a": pa.array([], pa.int32())}), source)
    (output,) = rewrite([source], tmp_path / "out").outputs
    assert output.linked
    assert output.path.name == "empty.parquet"
    assert output.path.samefile(source)


def test_several_zero_row_files_leave_one_with_the_schema(tmp_path: Path) -> None:
    sources = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for source in sources:
        pq.write_table(pa.table({"a": pa.array([], pa.int32()), "l": pa.array([], pa.list_(pa.string()))}), source)
    result = rewrite(sources, tmp_path / "out")
    (output,) = result.outputs
    assert output.rows == 0
    assert pq.read_table(output.path).equals(pq.read_table(sources[0]))
    assert pq.read_schema(output.path).equals(pq.read_schema(sources[0]), check_metadata=True)
    assert by_duckdb([output.path]) == by_duckdb(sources)


def test_zero_row_files_and_groups_between_others_vanish(tmp_path: Path) -> None:
    table = pa.table({"a": range(9_000)})
    sources = [tmp_path / f"{n}.parquet" for n in range(3)]
    pq.write_table(table, sources[0], row_group_size=999)
    pq.write_table(table.slice(0, 0), sources[1])
    with pq.ParquetWriter(sources[2], table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 5), table.slice(0, 0), table.slice(5)):
            writer.write_table(part)
    result = rewrite(sources, tmp_path / "out")
    check_same(sources, result)
    assert all(rows for _, rows in group_sizes(result))


# ---- drift


def drifted(tmp_path: Path, *tables: pa.Table) -> list[Path]:
    paths = [tmp_path / f"{number}.parquet" for number in range(len(tables))]
    for path, table in zip(paths, tables, strict=True):
        pq.write_table(table, path, row_group_size=499)
    return paths


D = decimal.Decimal
WIDENINGS = [
    (pa.int32(), pa.int64(), [1, None], [2**40], pa.int64()),
    (pa.int64(), pa.int8(), [2**40], [1], pa.int64()),
    (pa.uint8(), pa.int16(), [255], [-3], pa.int16()),
    (pa.uint32(), pa.int32(), [2**32 - 1], [-3], pa.int64()),
    (pa.float32(), pa.float64(), [0.5], [0.1], pa.float64()),
    (pa.null(), pa.string(), [None], ["x"], pa.string()),
    (pa.string(), pa.null(), ["x"], [None], pa.string()),
    (pa.null(), pa.list_(pa.int32()), [None], [[1]], pa.list_(pa.field("element", pa.int32()))),
    (pa.decimal128(5, 2), pa.decimal128(9, 4), [D("123.45")], [D("12345.6789")], pa.decimal128(9, 4)),
    (pa.decimal128(9, 0), pa.decimal128(9, 4), [D("123456789")], [D("12345.6789")], pa.decimal128(13, 4)),
    (pa.string(), pa.large_string(), ["x"], ["y"], pa.large_string()),
    (pa.binary(), pa.large_binary(), [b"x"], [b"y"], pa.large_binary()),
    (pa.timestamp("ms"), pa.timestamp("us"), [datetime.datetime(2024, 1, 1)], [None], pa.timestamp("us")),
    (pa.dictionary(pa.int8(), pa.string()), pa.string(), ["x"], ["y"], pa.string()),
    (
        pa.struct([("a", pa.int32())]),
        pa.struct([("b", pa.string()), ("a", pa.int64())]),
        [{"a": 1}, None],
        [{"b": "x", "a": 2**40}],
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
    ),
    (
        pa.list_(pa.struct([("a", pa.int32())])),
        pa.list_(pa.struct([("a", pa.int32()), ("b", pa.string())])),
        [[{"a": 1}], None, []],
        [[{"a": 2, "b": "x"}]],
        pa.list_(pa.field("element", pa.struct([("a", pa.int32()), ("b", pa.string())]))),
    ),
]


@pytest.mark.parametrize(("one", "other", "first", "second", "expected"), WIDENINGS, ids=str)
def test_lossless_drift_is_unified(
    tmp_path: Path, one: Any, other: Any, first: list[Any], second: list[Any], expected: Any
) -> None:
    sources = drifted(
        tmp_path,
        pa.table({"k": range(len(first) * 700), "v": pa.array(first * 700, one)}),
        pa.table({"k": range(len(second) * 700), "v": pa.array(second * 700, other)}),
    )
    result = rewrite(sources, tmp_path / "out", 16 * KB)
    check_sizes(result, 16 * KB)
    found = table_of([output.path for output in result.outputs])
    assert found.schema.field("v").type == expected

    def plain(row: Any) -> Any:
        if isinstance(row, list):
            return [plain(item) for item in row]
        return {name: row.get(name) for name in ("a", "b") if name in names} if isinstance(row, dict) else row

    kind = expected.value_type if pa.types.is_list(expected) else expected
    names = [field.name for field in kind.fields] if pa.types.is_struct(kind) else []
    assert found.column("v").to_pylist() == [plain(row) for row in first * 700 + second * 700]
    for output in result.outputs:
        check_spans(output.path)
    by_duckdb([output.path for output in result.outputs])


def test_columns_added_removed_and_moved(tmp_path: Path) -> None:
    sources = drifted(
        tmp_path,
        pa.table({"a": range(2_000), "b": ["x"] * 2_000}),
        pa.table({"c": pa.array([1.5] * 2_000), "b": ["y"] * 2_000, "a": range(2_000)}),
        pa.table({"b": ["z"] * 10}),
    )
    result = rewrite(sources, tmp_path / "out", 16 * KB)
    found = table_of([output.path for output in result.outputs])
    assert found.column_names == ["a", "b", "c"]
    assert found.column("a").to_pylist() == [*range(2_000), *range(2_000), *[None] * 10]
    assert found.column("b").to_pylist() == ["x"] * 2_000 + ["y"] * 2_000 + ["z"] * 10
    assert found.column("c").to_pylist() == [None] * 2_000 + [1.5] * 2_000 + [None] * 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array(["x"])),
        (pa.array([1], pa.uint64()), pa.array([-1])),
        (pa.array([1.5]), pa.array([1])),
        (pa.array([[1]]), pa.array([1])),
        (pa.array([0], pa.timestamp("us")), pa.array([0], pa.timestamp("us", "UTC"))),
        (pa.array([{"a": 1}]), pa.array([{"a": "x"}])),
        (pa.array([D("1")], pa.decimal128(38, 0)), pa.array([D("0")], pa.decimal256(76, 70))),
    ],
    ids=str,
)
def test_drift_that_loses_something_is_refused_by_name(tmp_path: Path, one: pa.Array, other: pa.Array) -> None:
    sources = drifted(tmp_path, pa.table({"v": one}), pa.table({"w": [1]}), pa.table({"v": other}))
    with pytest.raises(ParquetError) as caught:
        rewrite(sources, tmp_path / "out")
    text = str(caught.value)
    assert str(sources[0]) in text
    assert str(sources[2]) in text
    assert str(one.type).replace("item", "element") in text
    assert str(other.type) in text
    assert "column v" in text


def test_metadata_of_later_files_is_added(tmp_path: Path) -> None:
    sources = drifted(
        tmp_path,
        pa.table({"a": range(2_000)}).replace_schema_metadata({"one": "1", "both": "first"}),
        pa.table({"a": range(2_000)}).replace_schema_metadata({"two": "2", "both": "second"}),
    )
    (output,) = rewrite(sources, tmp_path / "out").outputs
    expected = {b"one": b"1", b"two": b"2", b"both": b"first"}
    assert pq.read_schema(output.path).metadata == expected
    footer_keys = pq.read_metadata(output.path).metadata
    assert {key: footer_keys[key] for key in expected} == expected


def test_a_table_wide_schema(tmp_path: Path) -> None:
    sources = drifted(tmp_path, pa.table({"b": pa.array(range(2_000), pa.int32())}))
    schema = pa.schema([("a", pa.string()), ("b", pa.int64())])
    result = rewrite_directory(
        sources, tmp_path / "out", RewriteOptions(row_group_size=1 << 20), known=KnownOfSources(schema=schema)
    )
    found = table_of([output.path for output in result.outputs])
    assert found.schema.equals(schema)
    assert found.column("b").to_pylist() == list(range(2_000))


# ---- linking


def fitting(path: Path, groups: int, last: int = 0, limit: int = 64 * KB) -> Path:
    """Write a file whose ``groups`` row groups fill 97 % of ``limit``, and one of ``last`` rows after them."""
    rng = np.random.default_rng(groups)
    n = 62
    blobs = pa.table({"b": [rng.bytes(1024) for _ in range(n * groups + last)]})
    pq.write_table(blobs, path, row_group_size=n, use_dictionary=False, compression="none", write_statistics=False)
    return path


def test_all_fit_and_keep_their_names(tmp_path: Path) -> None:
    sources = [fitting(tmp_path / "x.parquet", 3), fitting(tmp_path / "y.parquet", 2, last=5)]
    metadata = [pq.read_metadata(source) for source in sources]
    assert fits(metadata, RewriteOptions(row_group_size=64 * KB)) == 2
    result = rewrite(sources, tmp_path / "out")
    assert [output.path.name for output in result.outputs] == ["x.parquet", "y.parquet"]
    assert all(output.path.samefile(source) for output, source in zip(result.outputs, sources, strict=True))
    assert result.encoded == 0


def test_a_prefix_is_linked_and_the_rest_rewritten(tmp_path: Path) -> None:
    sources = [
        fitting(tmp_path / "x.parquet", 3),
        fitting(tmp_path / "y.parquet", 2, 5),
        fitting(tmp_path / "z.parquet", 1),
    ]
    assert fits([pq.read_metadata(source) for source in sources], RewriteOptions(row_group_size=64 * KB)) == 1
    result = rewrite(sources, tmp_path / "out")
    assert [(output.path.name, output.linked) for output in result.outputs] == [
        ("part-00000.parquet", True),
        ("part-00001.parquet", False),
    ]
    assert result.outputs[0].path.samefile(sources[0])
    check_sizes(result, 64 * KB)
    check_same(sources, result)


@pytest.mark.parametrize(("size", "expected"), [(64 * KB, 2), (62 * KB, 0), (65 * KB, 2), (66 * KB, 0), (200 * KB, 0)])
def test_fits_at_the_edges(tmp_path: Path, size: int, expected: int) -> None:
    sources = [fitting(tmp_path / "x.parquet", 2), fitting(tmp_path / "y.parquet", 2)]
    metadata = [pq.read_metadata(source) for source in sources]
    exact = row_group_bytes(metadata[0].row_group(0))
    assert 0.95 * 65 * KB < exact < 64 * KB
    assert fits(metadata, RewriteOptions(row_group_size=size)) == expected
    assert fits(metadata, RewriteOptions(row_group_size=exact)) == 2
    assert fits(metadata, RewriteOptions(row_group_size=exact - 1)) == 0


def test_fits_and_rows_larger_than_the_limit(tmp_path: Path) -> None:
    source = fitting(tmp_path / "x.parquet", 2)
    with pq.ParquetWriter(tmp_path / "y.parquet", pa.schema([("b", pa.binary())])) as writer:
        writer.write_table(pa.table({"b": [np.random.default_rng(0).bytes(99_000)]}))
    metadata = [pq.read_metadata(path) for path in (tmp_path / "y.parquet", source)]
    assert fits(metadata, RewriteOptions(row_group_size=64 * KB)) == 2


def test_fits_stops_at_another_schema_and_at_no_rows(tmp_path: Path) -> None:
    one = pq.read_metadata(fitting(tmp_path / "x.parquet", 2))
    pq.write_table(pa.table({"c": [1]}), tmp_path / "y.parquet")
    pq.write_table(pa.table({"b": pa.array([], pa.binary())}), tmp_path / "z.parquet")
    other, none = (pq.read_metadata(tmp_path / name) for name in ("y.parquet", "z.parquet"))
    options = RewriteOptions(row_group_size=64 * KB)
    assert fits([one, other], options) == 1
    assert fits([one, none, one], options) == 1
    assert fits([none], options) == 1
    assert fits([none, one], options) == 0
    assert fits([], options) == 0


def test_trailing_empty_files_vanish_beside_a_linked_prefix(tmp_path: Path) -> None:
    source = fitting(tmp_path / "x.parquet", 2, 5)
    pq.write_table(pa.table({"b": pa.array([], pa.binary())}), tmp_path / "z.parquet")
    result = rewrite([source, tmp_path / "z.parquet"], tmp_path / "out")
    assert [(output.path.name, output.linked) for output in result.outputs] == [("part-00000.parquet", True)]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EPERM])
def test_links_fall_back_to_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    source = fitting(tmp_path / "x.parquet", 2)
    (output,) = rewrite([source], tmp_path / "out").outputs
    assert not output.path.samefile(source)
    assert output.path.read_bytes() == source.read_bytes()


# ---- safety


def test_sources_are_untouched_and_outputs_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    fsync = os.fsync

    def record(handle: int) -> None:
        state = os.fstat(handle)
        synced[state.st_ino] = state.st_size
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    sources = [
        fitting(tmp_path / "x.parquet", 3),
        fitting(tmp_path / "y.parquet", 2, 5),
        fitting(tmp_path / "z.parquet", 1),
    ]
    before = [(hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in sources]
    result = rewrite(sources, tmp_path / "out")
    assert before == [(hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in sources]
    for output in result.outputs:
        state = output.path.stat()
        assert synced[state.st_ino] == state.st_size
    assert (tmp_path / "out").stat().st_ino in synced


def test_progress_adds_up_to_the_sources(tmp_path: Path) -> None:
    sources = [
        fitting(tmp_path / "x.parquet", 3),
        fitting(tmp_path / "y.parquet", 2, 5),
        fitting(tmp_path / "z.parquet", 9),
    ]
    pq.write_table(pa.table({"b": pa.array([], pa.binary())}), tmp_path / "zz.parquet")
    sources.append(tmp_path / "zz.parquet")
    seen: list[int] = []
    rewrite_directory(sources, tmp_path / "out", RewriteOptions(row_group_size=64 * KB), seen.append)
    assert sum(seen) == sum(source.stat().st_size for source in sources)
    assert len(seen) > 4
    assert min(seen) >= 0


def test_damaged_sources_are_named_and_nothing_stays(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    table = pa.table({"a": range(9_000), "s": [f"{i * 7919 % 9973}" for i in range(9_000)]})
    pq.write_table(table, good, row_group_size=999)
    data = good.read_bytes()
    bad = tmp_path / "bad.parquet"
    damages = [b"", b"PAR1", data[:100], data[:-1], data[:-9], data[: len(data) // 2] + data[-8:], b"x" * 500]
    damages.append(data[:200] + bytes(5_000) + data[5_200:])
    for number, damage in enumerate(damages):
        bad.write_bytes(damage)
        target = tmp_path / f"out{number}"
        with pytest.raises(ParquetError, match=r"bad\.parquet"):
            rewrite([good, bad], target)
        assert not list(target.iterdir())
    with pytest.raises(ParquetError, match=r"gone\.parquet"):
        rewrite([good, tmp_path / "gone.parquet"], tmp_path / "out")


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    table = pa.table({"a": range(300), "l": [[str(i)] for i in range(300)]})
    pq.write_table(table, source, row_group_size=99, write_page_checksum=True)
    data = source.read_bytes()
    rng = np.random.default_rng(8)
    failed = 0
    for number in range(120):
        broken = bytearray(data)
        broken[rng.integers(4, len(data))] ^= 1 << rng.integers(0, 8)
        source.write_bytes(broken)
        try:
            rewrite([source], tmp_path / f"out{number}", 4 * KB)
        except ParquetError as error:
            failed += "a.parquet" in str(error)
    assert failed > 60


def test_refusals(tmp_path: Path) -> None:
    source = fitting(tmp_path / "x.parquet", 1)
    with pytest.raises(UsageError, match="no files"):
        rewrite([], tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        rewrite([source], tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"row_group_size": 0},
        {"row_group_size": 1 << 20, "compression": "lzo"},
        {"row_group_size": 1 << 20, "compression": "zstd", "compression_level": 99},
        {"row_group_size": 1 << 20, "compression": "snappy", "compression_level": 1},
        {"row_group_size": 1 << 20, "compression": "gzip"},
        {"row_group_size": 1 << 20, "shuffle": -1},
    ],
)
def test_options_check_themselves(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RewriteOptions(**options)


# ---- another reader, and what is written


def test_fastparquet_reads_what_compat_writes(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    frame = pd.DataFrame(
        {"n": range(30_000), "x": np.linspace(0, 1, 30_000), "s": [f"t{i % 50}" for i in range(30_000)]}
    )
    frame.to_parquet(source, row_group_size=999)
    result = rewrite([source], tmp_path / "out", compat=True)
    assert result.outputs[0].row_groups > 1
    found = fastparquet.ParquetFile(str(result.outputs[0].path)).to_pandas()
    assert found["n"].tolist() == frame["n"].tolist()
    assert found["x"].tolist() == frame["x"].tolist()
    assert found["s"].tolist() == frame["s"].tolist()


def test_encodings_serve_the_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    n = 60_000
    table = pa.table(
        {
            "random": rng.standard_normal(n),
            "few": pa.array([f"category number {i}" for i in rng.integers(0, 30, n)]),
            "id": np.arange(n) * 1000,
            "image": [rng.bytes(300) for _ in range(n)],
        }
    )
    source = tmp_path / "a.parquet"
    pq.write_table(table, source)
    result = rewrite([source], tmp_path / "out", 1 << 20)
    check_sizes(result, 1 << 20)
    group = pq.read_metadata(result.outputs[0].path).row_group(0)
    random, few, number, image = (group.column(position) for position in range(4))
    assert not random.has_dictionary_page
    assert few.has_dictionary_page
    assert "DELTA_BINARY_PACKED" in number.encodings
    assert (image.has_dictionary_page, image.compression, image.is_stats_set) == (False, "UNCOMPRESSED", False)
    assert number.statistics.has_min_max
    assert (number.statistics.min, number.statistics.max) == (0, (group.num_rows - 1) * 1000)


def test_keep_takes_the_codecs_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    text = [f"some text that compresses {i}" for i in range(20_000)]
    pq.write_table(pa.table({"a": text, "b": text}), source, compression={"a": "zstd", "b": "gzip"})
    result = rewrite([source], tmp_path / "out", compression="keep")
    group = pq.read_metadata(result.outputs[0].path).row_group(0)
    assert [group.column(n).compression for n in range(2)] == ["ZSTD", "GZIP"]
