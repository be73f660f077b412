"""rewrite_directory: what is in comes out, in row groups of the right size."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pqcache.parquet import thrift
from pqcache.parquet.rewrite.recipe import RewriteOptions
from tests.examples import examples
from tests.pages import edited
from tests.parquet.rewrite.rewriting import (
    KB,
    by_duckdb,
    check_same,
    check_sizes,
    group_sizes,
    rewrite,
    rewrite_80_mb,
    table_of,
)

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
    "long": lambda rng, n: pa.array(
        [decimal.Decimal(i % 1000 - 500).scaleb(-10) for i in range(n)], pa.decimal128(30, 10)
    ),
    "huge": lambda rng, n: pa.array([decimal.Decimal(i - 9).scaleb(-4) for i in range(n)], pa.decimal256(60, 4)),
    "view": lambda rng, n: pa.array([f"w{i % 9}" for i in range(n)], pa.string_view()),
    "uuid": lambda rng, n: pa.array([i.to_bytes(16, "big") for i in range(n)], pa.binary(16)).cast(pa.uuid()),
    "json": lambda rng, n: pa.array([f'{{"a": {i}}}' for i in range(n)], pa.json_()),
    "duration": lambda rng, n: pa.array(range(n), pa.duration("s")),
    "time": lambda rng, n: pa.array([i % 86_400_000 for i in range(n)], pa.time32("ms")),
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


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 2_000),
    groups_and_files=st.tuples(st.integers(1, 2000), st.integers(1, 4)),
    size=st.sampled_from([16 * KB, 64 * KB]),
    written=st.sampled_from([{}, {"store_decimal_as_integer": True}, {"use_compliant_nested_type": False}]),
    options=st.sampled_from(
        [{}, {"compression": "zstd", "compression_level": 3}, {"compat": True}, {"compression": "keep"}]
    ),
)
@example(
    kinds=["decimal", "long", "list", "deep"],
    seed=1,
    rows=2_000,
    groups_and_files=(99, 2),
    size=16 * KB,
    written={"store_decimal_as_integer": True, "use_compliant_nested_type": False},
    options={},
)
def test_what_is_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[str],
    seed: int,
    rows: int,
    groups_and_files: tuple[int, int],
    size: int,
    written: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Also the types, names and annotations of the schema of the files."""
    here = tmp_path_factory.mktemp("any")
    groups, files = groups_and_files
    rng = np.random.default_rng(seed)
    table = pa.table({f"{kind} {n}": COLUMNS[kind](rng, rows) for n, kind in enumerate(kinds)})
    table = table.replace_schema_metadata({"who": "me"})
    sources = []
    for number in range(files):
        begin, end = rows * number // files, rows * (number + 1) // files
        sources.append(here / f"{number}.parquet")
        pq.write_table(table.slice(begin, end - begin), sources[-1], row_group_size=groups, **written)
    result = rewrite(sources, here / "out", size, **options)
    check_sizes(result, size)
    check_same(sources, result, duck=not {"half", "huge"}.intersection(kinds))  # which DuckDB lacks


# ---- sizes


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
    monkeypatch.setattr("pqcache.parquet.rewrite.directory._MIN_FILE", 0)
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
    result, peak = rewrite_80_mb(tmp_path, RewriteOptions(row_group_size=1 << 20))
    check_sizes(result, 1 << 20)
    assert 0 < peak < 30 << 20


# ---- what must come out as it was


def test_field_ids_and_field_metadata_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    schema = pa.schema(
        [
            pa.field("a", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "7", "unit": "km"}),
            pa.field("s", pa.struct([pa.field("b", pa.string(), metadata={"PARQUET:field_id": "9", "x": "y"})])),
        ],
        metadata={"made": "elsewhere"},
    )
    rows = [{"a": i, "s": {"b": str(i)}} for i in range(9_000)]
    pq.write_table(pa.Table.from_pylist(rows, schema), source, row_group_size=999)
    result = rewrite([source], tmp_path / "out")
    check_same([source], result)
    field = pq.read_schema(result.outputs[0].path).field("a")
    assert field.metadata == {b"PARQUET:field_id": b"7", b"unit": b"km"}
    assert not field.nullable


def test_names_with_dots_and_odd_characters(tmp_path: Path) -> None:
    source = tmp_path / "a b?#%20=ü.parquet"
    table = pa.table({"a.b": range(9_000), "a": [{"b": i} for i in range(9_000)], "": ["x"] * 9_000})
    pq.write_table(table, source, row_group_size=999)
    check_same([source], rewrite([source], tmp_path / "out=1 %2F"))


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


def test_nested_dictionaries(tmp_path: Path) -> None:
    source, n = tmp_path / "a.parquet", 4_000
    words = pa.array([f"w{i % 9}" for i in range(n)]).dictionary_encode()
    lists = pa.array([["a", None], [], None, ["b"]] * (n // 4)).cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    pq.write_table(
        pa.table({"list": lists, "struct": pa.StructArray.from_arrays([words], ["k"])}), source, row_group_size=333
    )
    result = rewrite([source], tmp_path / "out", 4 * KB)
    check_sizes(result, 4 * KB)
    check_same([source], result)


def test_legacy_lists_and_annotations_are_kept(tmp_path: Path) -> None:
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

    source.write_bytes(edited(source.read_bytes(), legacy))
    metadata = pq.read_metadata(source)
    assert metadata.schema.column(0).path == "l.array"
    assert metadata.schema.column(1).converted_type == "ENUM"
    result = rewrite([source], tmp_path / "out", 16 * KB)
    check_same([source], result)
    assert table_of([result.outputs[0].path]).column("l").to_pylist() == table.column("l").to_pylist()
