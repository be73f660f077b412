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


def test_int96_becomes_microseconds_for_any_year(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    year_one, year_9999 = -62135596800, 253402300799
    seconds = [year_one, year_9999, 0, -1] + [i * 1_000_003 for i in range(4_000)]
    int96(source, [second * 10**6 + 7 for second in seconds], "us", store_schema=False)
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
    with pytest.raises(ParquetError, match=r"fine\.parquet.*far\.parquet.*: no 64-bit time holds both"):
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


def test_lossless_drift_is_unified(tmp_path: Path) -> None:
    """Each widening is a column of two files."""
    rows = 1_500

    def column(values: list[Any], kind: Any) -> pa.Array:
        return pa.array((values * rows)[:rows], kind)

    sources = drifted(
        tmp_path,
        pa.table({str(n): column(first, one) for n, (one, _, first, _, _) in enumerate(WIDENINGS)}),
        pa.table({str(n): column(second, other) for n, (_, other, _, second, _) in enumerate(WIDENINGS)}),
    )
    result = rewrite(sources, tmp_path / "out", 64 * KB)
    check_sizes(result, 64 * KB)
    found = table_of([output.path for output in result.outputs])
    for number, (_, _, first, second, expected) in enumerate(WIDENINGS):
        assert found.schema.field(number).type == expected
        wanted = pa.concat_arrays([column(values, expected) for values in (first, second)])
        assert found.column(number).to_pylist() == wanted.to_pylist(), expected
    for output in result.outputs:
        check_spans(output.path)
    by_duckdb([output.path for output in result.outputs])


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
def test_a_column_of_required_fields_that_some_files_lack(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    pq.write_table(pa.table({"i": [1, 2], "box": pa.array([value, value], kind)}), tmp_path / "has")
    pq.write_table(pa.table({"i": [3]}), tmp_path / "lacks")
    for names in (("has", "lacks"), ("lacks", "has")):
        (output,) = rewrite([tmp_path / name for name in names], tmp_path / "-".join(names)).outputs
        found = pq.ParquetFile(output.path).read()
        rows = dict(zip(found["i"].to_pylist(), found["box"].to_pylist(), strict=True))
        assert rows == {1: value, 2: value, 3: None}, names


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
