"""rewrite_directory: INT96, files without rows, and files whose schemas differ."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.parquet.rewrite.directory import KnownOfSources, rewrite_directory
from pqcache.parquet.rewrite.options import RewriteOptions
from tests.parquet.rewrite.rewriting import (
    KB,
    by_duckdb,
    check_same,
    check_sizes,
    check_spans,
    group_sizes,
    rewrite,
    table_of,
)
from tests.real_files import MADE

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


def test_int96_in_some_files_becomes_int64(tmp_path: Path) -> None:
    for number in range(2):
        table = pa.table({"at": pa.array(range(500), pa.timestamp("us"))})
        pq.write_table(table, tmp_path / f"{number}.parquet", use_deprecated_int96_timestamps=number == 1)
    (output,) = rewrite([tmp_path / "0.parquet", tmp_path / "1.parquet"], tmp_path / "out").outputs
    assert pq.read_metadata(output.path).schema.column(0).physical_type == "INT64"
    assert pq.ParquetFile(output.path).read()["at"].cast(pa.int64()).to_pylist() == [*range(500)] * 2


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
        (pa.array([D("1.5")]), pa.array([1.5])),
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
    types = [array.type.field(0).type if pa.types.is_struct(array.type) else array.type for array in (one, other)]
    assert all(str(kind).replace("item", "element") in text for kind in types)
    assert "column 'v" in text


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


# ---- structs with required fields, in some files only

REQUIRED = pa.field("x", pa.float32(), nullable=False)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.struct([REQUIRED]), {"x": 1.5}),
        (pa.struct([pa.field("in", pa.struct([REQUIRED]), nullable=False)]), {"in": {"x": 1.5}}),
        (pa.struct([pa.field("two", pa.list_(REQUIRED, 2), nullable=False)]), {"two": [1.5, 2.5]}),
        (pa.struct([pa.field("l", pa.list_(REQUIRED), nullable=False)]), {"l": [1.5]}),
        (pa.list_(REQUIRED, 2), [1.5, 2.5]),
        (pa.list_(REQUIRED), [1.5]),
        (pa.list_(pa.struct([REQUIRED]), 2), [{"x": 1.5}, {"x": 2.5}]),
        (pa.map_(pa.string(), REQUIRED), [("k", 1.5)]),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_column_of_required_fields_that_some_files_lack(
    tmp_path: Path, kind: pa.DataType, value: Any, first: bool
) -> None:
    has, lacks = (tmp_path / name for name in (("a", "b") if first else ("b", "a")))
    pq.write_table(pa.table({"i": [1, 2], "box": pa.array([value, value], kind)}), has)
    pq.write_table(pa.table({"i": [3]}), lacks)
    (output,) = rewrite([tmp_path / "a", tmp_path / "b"], tmp_path / "out").outputs
    found = pq.ParquetFile(output.path).read()
    assert sorted(zip(found["i"].to_pylist(), found["box"].to_pylist(), strict=True)) == [
        (1, value),
        (2, value),
        (3, None),
    ]


def test_a_struct_of_required_fields_that_some_structs_lack(tmp_path: Path) -> None:
    inner = pa.struct([pa.field("id", pa.int8()), pa.field("box", pa.struct([REQUIRED]), nullable=False)])
    pq.write_table(pa.table({"v": pa.array([{"id": 1, "box": {"x": 1.5}}, None], inner)}), tmp_path / "a")
    pq.write_table(pa.table({"v": [{"id": 2}]}), tmp_path / "b")
    (output,) = rewrite([tmp_path / "a", tmp_path / "b"], tmp_path / "out").outputs
    found = pq.ParquetFile(output.path).read()["v"].to_pylist()
    assert found == [{"id": 1, "box": {"x": 1.5}}, None, {"id": 2, "box": None}]


def test_an_annotation_is_kept_beside_a_length_that_means_nothing(tmp_path: Path) -> None:
    """Parquet-go writes a type_length for INT64 too."""
    MADE["number_with_length"](tmp_path / "a")
    (output,) = rewrite([tmp_path / "a"], tmp_path / "out", 4 * KB).outputs
    before, after = (pq.read_metadata(path).schema.column(0) for path in (tmp_path / "a", output.path))
    assert not output.linked
    assert str(after.logical_type) == str(before.logical_type) == "Int(bitWidth=64, isSigned=true)"
    assert pq.ParquetFile(output.path).read()["n"].to_pylist() == list(range(2_000))
