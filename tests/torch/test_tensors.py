"""Arrow columns as tensors and Ragged, and batches on their way from a worker to the trainer."""

from __future__ import annotations

import copy
import decimal
import errno
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_convert

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet import footer, thrift
from pqcache.torch import Batch, Loader, ParquetDataset, Ragged
from pqcache.torch.batch import Position, to_rows


def batch_of(tmp_path: Path, how: dict[str, Any] | None = None, /, **columns: pa.Array) -> Batch:
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "t.parquet")
    ds = ParquetDataset(tmp_path, batch_size=len(table), shuffle=False, **(how or {}))
    (batch,) = DataLoader(ds, batch_size=None)
    assert isinstance(batch, Batch)
    return batch


def decimal_table(kind: pa.DataType, *values: str) -> pa.Table:
    """Return a column of decimals, and their lists, structs and dense lists, in rows of one value."""
    array = pa.array([decimal.Decimal(value) for value in values], kind)
    ends = pa.array(range(len(array) + 1), pa.int32())
    return pa.table(
        {
            "plain": array,
            "list": pa.ListArray.from_arrays(ends, array),
            "fixed": pa.FixedSizeListArray.from_arrays(array, 1),
            "struct": pa.StructArray.from_arrays([array], ["x"]),
            "map": pa.MapArray.from_arrays(ends, array.cast(pa.string()), array),
        }
    )


def decimals_of(batch: Batch) -> dict[str, list[Any]]:
    """Return the values in each column of a `decimal_table`."""
    return {
        "plain": list(to_rows(batch["plain"])),
        "list": [row[0] for row in to_rows(batch["list"])],
        "fixed": [row[0] for row in to_rows(batch["fixed"])],
        "struct": [row["x"] for row in to_rows(batch["struct"])],
        "map": [row[0]["value"] for row in to_rows(batch["map"])],
    }


EXACT = ["0.1", "-12.34", "99999999999.9999", "-0.0001"]
WIDE = ["1234567890123456789.0123", "-0.1", "0.3", "2.675"]


@pytest.mark.parametrize(
    ("kind", "texts", "decimals", "expected"),
    [
        (pa.decimal128(15, 4), EXACT, None, [float(text) for text in EXACT]),
        (pa.decimal32(4, 2), ["12.34", "-0.01"], None, [12.34, -0.01]),
        (pa.decimal128(15, 4), EXACT, "unscaled", [1000, -123400, 999999999999999, -1]),
        (pa.decimal128(18, 0), ["999999999999999999", "-7"], None, [10**18 - 1, -7]),
        (pa.decimal256(76, 30), WIDE, "float64", [float(text) for text in WIDE]),
        (pa.decimal128(38, 4), ["1.5", "-2"], "text", ["1.5000", "-2.0000"]),
    ],
)
def test_decimals(
    tmp_path: Path, kind: pa.DataType, texts: list[str], decimals: str | None, expected: list[Any]
) -> None:
    pq.write_table(decimal_table(kind, *texts), tmp_path / "t.parquet")
    ds = ParquetDataset(tmp_path, batch_size=len(texts), shuffle=False, decimals=decimals)
    found = decimals_of(next(iter(ds)))
    assert found == dict.fromkeys(found, expected)
    assert {type(value) for value in found["plain"]} == {type(expected[0])}


@pytest.mark.parametrize(
    ("kind", "text", "decimals", "reason"),
    [
        (pa.decimal128(16, 2), "1.50", None, r"float64 holds 15 digits exactly.*'float64' \(rounded\), 'unscaled'"),
        (pa.decimal128(38, 2), "1.50", None, r"float64 holds 15 digits exactly.*'float64' \(rounded\) or 'text'"),
        (pa.decimal128(38, 2), "1e30", "unscaled", r"with 1\d*\.00, not all its values fit into an int64.*'float64'"),
        (pa.decimal128(38, 0), "1e30", None, r"with 1\d*, not all its values fit into an int64.*'text'"),
        (pa.decimal128(38, 0), "9223372036854775808", None, "with 9223372036854775808, not all its values fit"),
    ],
)
def test_decimals_without_an_exact_tensor_are_refused_at_opening(
    tmp_path: Path, kind: pa.DataType, text: str, decimals: str | None, reason: str
) -> None:
    array = pa.array([decimal.Decimal(text)], kind)
    for name, column in (("c", array), ("s.x", pa.StructArray.from_arrays([array], ["x"]))):
        pq.write_table(pa.table({name[0]: column, "id": [1]}), tmp_path / "t.parquet")
        with pytest.raises(UsageError, match=f"column '{re.escape(name)}': it is decimal128.*{reason}"):
            ParquetDataset(tmp_path, decimals=decimals)
        assert len(ParquetDataset(tmp_path, columns=["id"], decimals=decimals)) == 1
    with pytest.raises(UsageError, match="decimals='int64': choose 'float64', 'unscaled', 'text' or None"):
        ParquetDataset(tmp_path, decimals="int64")


def test_wide_whole_numbers_are_int64_if_the_statistics_show_that_they_fit(tmp_path: Path) -> None:
    numbers = [2**63 - 1, -(2**63), None, 0]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"n": pa.array(numbers, pa.decimal128(38, 0))}), path, row_group_size=1)
    ds = ParquetDataset(tmp_path, batch_size=4, shuffle=False, nulls={"n": 5})
    (batch,) = ds
    assert (batch["n"].dtype, batch["n"].tolist()) == (torch.int64, [2**63 - 1, -(2**63), 5, 0])
    pq.write_table(pa.table({"n": pa.array([1], pa.decimal128(38, 0))}), path, write_statistics=False)
    with pytest.raises(UsageError, match=r"column 'n': it is decimal128.* no statistics show that all its values fit"):
        ParquetDataset(tmp_path)


def test_a_decimal_means_the_same_whatever_the_other_files(tmp_path: Path) -> None:
    def prices(*files: tuple[str, pa.DataType]) -> Any:
        for number, (text, kind) in enumerate(files):
            table = pa.table({"price": pa.array([decimal.Decimal(text)], kind)})
            pq.write_table(table, tmp_path / f"{number}.parquet")
        return [batch["price"].tolist() for batch in ParquetDataset(tmp_path, batch_size=9, shuffle=False)]

    first, second = ("12.34", pa.decimal128(10, 2)), ("7.0001", pa.decimal128(10, 4))
    assert prices(first) == [[12.34]]
    assert prices(first, second) == [[12.34, 7.0001]]
    with pytest.raises(UsageError, match=r"'price': it is decimal128\(24, 4\), and a float64 holds 15 digits"):
        prices(first, second, ("1", pa.decimal128(20, 0)))


@pytest.mark.parametrize("decimals", [None, "unscaled", "text"])
def test_nulls_of_decimals(tmp_path: Path, decimals: str | None) -> None:
    values = pa.array([decimal.Decimal("1.5"), None], pa.decimal128(4, 1))
    masked = batch_of(tmp_path, {"nulls": "mask", "decimals": decimals}, c=values)
    assert masked["c_mask"].tolist() == [True, False]
    fill = "-" if decimals == "text" else -3
    filled = batch_of(tmp_path, {"nulls": {"c": fill}, "decimals": decimals}, c=values)
    one = {"unscaled": 15, "text": "1.5", None: 1.5}[decimals]
    assert to_rows(filled["c"]) == [one, fill]


BIG = [decimal.Decimal("123456789012.5"), decimal.Decimal("-1.2"), decimal.Decimal(3)]
ITEMS: dict[str, tuple[pa.Array, list[Any]]] = {
    "decimal(38, 18)": (
        pa.array(BIG, pa.decimal128(38, 18)),
        [f"{value:.18f}" for value in BIG],
    ),
    "decimal256": (pa.array([int("1" * 60), -1, 3], pa.decimal256(76, 0)), ["1" * 60, "-1", "3"]),
    "decimal256 of few digits": (pa.array(BIG[1:] + BIG[1:2], pa.decimal256(18, 2)), [-120, 300, -120]),
    "decimal32": (pa.array(BIG[1:] + BIG[1:2], pa.decimal32(9, 2)), [-120, 300, -120]),
    "float16": (pa.array(np.array([1.5, -2, 0], np.float16)), [1.5, -2, 0]),
    "bool": (pa.array([True, False, True]), [True, False, True]),
    "time32": (pa.array([1, 2, 3], pa.time32("ms")), [1, 2, 3]),
    "time64": (pa.array([1, 2, 3], pa.time64("ns")), [1, 2, 3]),
    "duration": (pa.array([1, 2, 3], pa.duration("us")), [1, 2, 3]),
    "timestamp": (pa.array([1, 2, 3], pa.timestamp("ns", "UTC")), [1, 2, 3]),
    "date": (pa.array([1, 2, 3], pa.date32()), [1, 2, 3]),
    "fixed_size_binary": (pa.array([b"ab", b"cd", b"ef"], pa.binary(2)), [[97, 98], [99, 100], [101, 102]]),
    "large_string": (pa.array(["a", "", "c" * 40], pa.large_string()), ["a", "", "c" * 40]),
    "string_view": (pa.array(["a", "", "c" * 40], pa.string_view()), ["a", "", "c" * 40]),
    "binary_view": (pa.array([b"a", b"", b"c" * 40], pa.binary_view()), [b"a", b"", b"c" * 40]),
    "dictionary": (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16), b"\1" * 16, b"\2" * 16], pa.binary(16))),
        [[n] * 16 for n in range(3)],
    ),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1], pa.int8())), [1, 0, 1]),
    "tensor": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
        ),
        [[1, 2], [3, 4], [5, 6]],
    ),
    "tensor of bool": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.bool_(), [2]),
            pa.array([[True, False], [False] * 2, [True] * 2], pa.list_(pa.bool_(), 2)),
        ),
        [[True, False], [False] * 2, [True] * 2],
    ),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_of_lists_structs_and_maps_are_those_of_plain_columns(tmp_path: Path, kind: str) -> None:
    array, values = ITEMS[kind]
    twice, ends = pa.concat_arrays([array, array]), pa.array([0, 2, 2, 3], pa.int32())
    lists, pairs = pa.ListArray.from_arrays(ends, array), pa.FixedSizeListArray.from_arrays(twice, 2)
    a, b, c = values
    columns = {
        "plain": (array, values),
        "list": (lists, [[a, b], [], [c]]),
        "large": (pa.LargeListArray.from_arrays(ends.cast(pa.int64()), array), [[a, b], [], [c]]),
        "constant": (pa.ListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int32()), twice), [[a, b], [c, a], [b, c]]),
        "fixed": (pairs, [[a, b], [c, a], [b, c]]),
        "lists": (pa.ListArray.from_arrays(ends, lists), [[[a, b], []], [], [[c]]]),
        "map": (
            pa.MapArray.from_arrays(ends, pa.array(["k", "l", "m"]), array),
            [[{"key": "k", "value": a}, {"key": "l", "value": b}], [], [{"key": "m", "value": c}]],
        ),
    }
    if not kind.endswith("view"):  # which Arrow cannot write inside a struct
        columns["struct"] = pa.StructArray.from_arrays([array], ["x"]), [{"x": value} for value in values]
        columns["pairs"] = pa.StructArray.from_arrays([pairs], ["x"]), [{"x": x} for x in ([a, b], [c, a], [b, c])]
    options = {"decimals": "text" if kind in ("decimal(38, 18)", "decimal256") else "unscaled"}
    batch = batch_of(tmp_path, options, **{name: column for name, (column, _) in columns.items()})
    assert {name: to_rows(batch[name]) for name in columns} == {
        name: expected for name, (_, expected) in columns.items()
    }


def test_decimals_of_more_digits_than_their_type_are_refused(tmp_path: Path) -> None:
    """A file whose schema says 10 digits may hold 16 bytes of each value."""
    column = pa.array([[decimal.Decimal(5)], [decimal.Decimal(10**25)], []], pa.list_(pa.decimal128(38, 0)))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"c": column}), path, store_schema=False, write_statistics=False)
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    fields = thrift.decode(data[-8 - length : -8], "x")
    leaf = fields[2][1].values[-1]
    leaf[8] = (thrift.I32, 10)
    leaf.pop(10)
    path.write_bytes(data[: -8 - length] + footer.footer_and_magic(fields))
    with pytest.raises(ParquetError, match=r"column 'c.*': it is decimal128\(10, 0\) and holds values that no int64"):
        list(ParquetDataset(tmp_path, batch_size=3, decimals="unscaled"))


def test_text_and_binary_are_sequences(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, s=pa.array(["a", "", "größe"]), b=pa.array([b"\0\1", b"", b"abc"]))
    s = batch["s"]
    assert isinstance(s, Ragged)
    assert (len(s), s[0], s[2], s[-1], list(s)) == (3, "a", "größe", "größe", ["a", "", "größe"])
    assert s[1:].to_list() == ["", "größe"]
    assert batch["b"].view(2).data_ptr() == batch["b"].values.data_ptr() + 2, "an item shares memory"
    with pytest.raises(IndexError):
        s[3]


@pytest.mark.parametrize("kind", [pa.binary(3), pa.uuid(), pa.decimal128(18, 1), pa.list_(pa.int16(), 2), pa.bool_()])
def test_a_batch_of_empty_lists_only(tmp_path: Path, kind: pa.DataType) -> None:
    lists = pa.ListArray.from_arrays([0, 0, 0, 0], pa.schema([("x", kind)]).empty_table()["x"].combine_chunks())
    batch = batch_of(tmp_path, {"decimals": "unscaled"}, x=lists)
    assert batch["x"].to_list() == [[], [], []]
    assert len(batch["x"].values) == 0


def test_lists(tmp_path: Path) -> None:
    batch = batch_of(
        tmp_path,
        ragged=pa.array([[1, 2, 3], []], pa.list_(pa.int32())),
        constant=pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int16())),
        one=pa.array([[1], [2]]),
        matrix=pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.int8(), 2), 2)),
        words=pa.array([["a", "bc"], []]),
        nested=pa.array([[[1], [2, 3]], [[]]]),
    )
    ragged = batch["ragged"]
    assert ragged[0].tolist() == [1, 2, 3]
    assert ragged.lengths().tolist() == [3, 0]
    assert [t.tolist() for t in ragged.to_nested().unbind()] == [[1, 2, 3], []]
    assert batch["constant"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["one"].to_list() == [[1], [2]]
    assert batch["matrix"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert batch["words"][0][1] == "bc"
    assert batch["nested"][0][1].tolist() == [2, 3]


def test_permuted_tensors(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    storage = pa.array([list(range(6)), list(range(6, 12))], kind.storage_type)
    array = pa.ExtensionArray.from_storage(kind, storage)
    batch = batch_of(tmp_path, None, t=array)
    assert batch["t"].tolist() == [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]]


INSIDE: dict[str, tuple[pa.Array, dict[str, Any], Any]] = {
    "a null struct": (
        pa.array([{"x": 1, "y": "a"}, None]),
        {"c.x": 5, "c.y": ""},
        [{"x": 1, "y": "a"}, {"x": 5, "y": ""}],
    ),
    "map": (
        pa.array([[("k", 1), ("l", None)], []], pa.map_(pa.string(), pa.int64())),
        {"c.value": 0},
        [[{"key": "k", "value": 1}, {"key": "l", "value": 0}], []],
    ),
    "lists of lists": (pa.array([[[1], [None]], []]), {"c.element.element": 7}, [[[1], [7]], []]),
}


@pytest.mark.parametrize("case", INSIDE)
def test_nulls_inside_are_filled_by_path(tmp_path: Path, case: str) -> None:
    """What the message recommends for nulls inside a column is what fills them."""
    array, fills, expected = INSIDE[case]
    filled = batch_of(tmp_path, {"nulls": fills}, c=array)
    assert to_rows(filled["c"]) == expected
    known: dict[str, Any] = {}
    while known != fills:
        with pytest.raises(ParquetError) as found:
            batch_of(tmp_path, {"nulls": known or "error"}, c=array)
        advised = re.findall(r"'(c[^']*)': VALUE", found.value.advice)
        assert advised
        known |= {path: fills[path] for path in advised}


def test_a_fill_is_for_all_that_is_inside(tmp_path: Path) -> None:
    for array, expected in (
        (pa.array([{"x": 1}, {"x": None}, None]), [{"x": 1}, {"x": 3}, {"x": 3}]),
        (pa.array([[[1], [None]], [], None]), [[[1], [3]], [], []]),
    ):
        assert to_rows(batch_of(tmp_path, {"nulls": {"c": 3}}, c=array)["c"]) == expected
    pairs = pa.array([[1, None], None], pa.list_(pa.int32(), 2))
    for array, expected in ((pa.array([[1, None], None]), [[1, 9], []]), (pairs, [[1, 9], [8, 8]])):
        batch = batch_of(tmp_path, {"nulls": {"c": 8, "c.element": 9}}, c=array)
        assert to_rows(batch["c"]) == expected, "one for a part wins"


def test_lists_with_nulls_in_them_are_not_dense(tmp_path: Path) -> None:
    """Whatever their lengths: what fills the nulls needs no ``ragged``."""
    lists = [[1, 2]] * 3000 + [[None, 2]]
    for order, nulls in ((1, {"c.element": 0}), (-1, {"c": 0})):
        pq.write_table(pa.table({"c": pa.array(lists[::order])}), tmp_path / "t.parquet", row_group_size=1000)
        batches = list(ParquetDataset(tmp_path, batch_size=1000, shuffle=False, nulls=nulls))
        assert all(isinstance(batch["c"], Ragged) for batch in batches)
        found = [row for batch in batches for row in batch["c"].to_list()]
        assert found == [[0 if item is None else item for item in row] for row in lists[::order]]


def test_masks_and_paths_of_nulls_inside(tmp_path: Path) -> None:
    with pytest.raises(ParquetError, match=r"column 'c\.element': it holds nulls .*pass nulls=\{'c\.element': VALUE\}"):
        batch_of(tmp_path, {"nulls": "mask"}, c=pa.array([[1, None]]))
    with pytest.raises(UsageError, match=r"'c\.z' is not among the columns; there are: c\.x, c\.y"):
        batch_of(tmp_path, {"nulls": {"c.z": 1}}, c=pa.array([{"x": 1, "y": 2}]))
    with pytest.raises(UsageError, match=r"'c\.x' is not among the columns"):
        batch_of(tmp_path, {"ragged": ["c.x"]}, c=pa.array([{"x": 1, "y": 2}]))


@pytest.mark.parametrize(
    ("array", "fill"),
    [
        (pa.array([1, None]), 0.5),
        (pa.array([1, None]), "x"),
        (pa.array([1, None], pa.uint8()), -1),
        (pa.array([1, None], pa.int8()), 200),
        (pa.array(["a", None]), 0),
        (pa.array([b"a", None]), "a"),
    ],
)
def test_a_fill_of_another_type_is_refused(tmp_path: Path, array: pa.Array, fill: Any) -> None:
    with pytest.raises(UsageError, match=r"nulls: .* is not a valid value for 'c', which is"):
        batch_of(tmp_path, {"nulls": {"c": fill}}, c=array)


def test_each_nullable_column_has_a_mask(tmp_path: Path) -> None:
    """Also where statistics say that there are no nulls: tonight's files do not decide which columns a batch has."""
    kinds = {"x": True, "full": True, "required": False}
    schema = pa.schema([pa.field(name, pa.int64(), nullable) for name, nullable in kinds.items()])
    table = pa.table([[1, 2, None, 4], [1] * 4, [1] * 4], schema=schema)
    for statistics in (True, False):
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=2, write_statistics=statistics)
        ds = ParquetDataset(tmp_path, batch_size=1, nulls="mask")
        assert all(list(batch) == ["x", "x_mask", "full", "full_mask", "required"] for batch in ds)


def test_nulls_that_files_count_are_refused_at_opening(tmp_path: Path) -> None:
    table = pa.table({"x": [1, None], "y": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ParquetError, match=r"column 'x': it holds nulls \(1 in the dataset\)"):
        ParquetDataset(tmp_path)
    assert len(list(ParquetDataset(tmp_path, filters="x = 1"))) == 1, "of other rows nothing is known"
    pq.write_table(table, tmp_path / "t.parquet", write_statistics=False)
    with pytest.raises(ParquetError, match=r"column 'x': it holds nulls \(1 in one batch\)"):
        list(ParquetDataset(tmp_path))


def test_nulls_in_dense_lists_are_filled_or_masked(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    batch = batch_of(tmp_path, {"nulls": "mask"}, f=fixed)
    assert (batch["f"].tolist(), batch["f_mask"].tolist()) == ([[1, 2], [0, 0], [3, 4]], [True, False, True])
    assert batch_of(tmp_path, {"nulls": {"f": 7}}, f=fixed)["f"].tolist() == [[1, 2], [7, 7], [3, 4]]


@pytest.mark.parametrize(
    ("nulls", "message"),
    [
        ({"y": 1}, "nulls: 'y' is not among"),
        (None, "nulls=None: choose 'error', 'mask'"),
        ("drop", "choose 'error', 'mask'"),
        ("mask", "would add 'x_mask'"),
    ],
)
def test_wrong_nulls_are_named(tmp_path: Path, nulls: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batch_of(tmp_path, {"nulls": nulls}, x=pa.array([1, None]), x_mask=pa.array([1, 2]))


def test_what_has_no_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="column 'nothing': it has no type"):
        batch_of(tmp_path, None, x=pa.array([1]), nothing=pa.nulls(1))
    with pytest.raises(UsageError, match=r"column 'nothing\.inner': it has no type"):
        batch_of(tmp_path, None, nothing=pa.array([{"inner": None, "x": 1}]))


def make_batch() -> Batch:
    columns = {
        "x": torch.arange(10_000),
        "half": torch.ones(3, 4, dtype=torch.float16),
        "none": torch.empty(0, 5),
        "scalar": torch.tensor(3.0),
        "strided": torch.arange(12).reshape(3, 4).t(),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "s": Ragged(torch.tensor(list(b"abc"), dtype=torch.uint8), torch.tensor([0, 1, 3]), "str"),
        "st": {"a": torch.tensor([1, 2]), "b": Ragged(torch.arange(3), torch.tensor([0, 3]))},
        "other": ["anything", {"at": "all"}],
        "grad": torch.ones(2, requires_grad=True),
    }
    together = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
    columns |= {f"run{i}": row for i, row in enumerate(together.unbind())}
    columns |= {f"apart{i}": row for i, row in enumerate(torch.arange(30)[:20].reshape(5, 4)[[0, 2, 3]])}
    columns |= {f"back{i}": row for i, row in reversed(list(enumerate(torch.arange(6.0).reshape(3, 2))))}
    columns |= {"twice": columns["x"], "again": columns["x"]}
    return Batch(columns, Position(epoch=3, index=17, lanes=4, window=16))


Places = list[tuple[int, int, int]]


def views_of(memory: torch.Tensor, places: Places) -> Batch:
    """Return a batch of tensors that begin, with so many rows of a dtype, at some items of the same memory."""
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return Batch(
        {str(i): memory[at * width :][: rows * width].view(dtypes[width]) for i, (at, width, rows) in enumerate(places)}
    )


def _send_views(asked: Any, sent: Any) -> None:
    """Answer each (places, shared) with a batch of such views, sent through shared memory or with the message."""
    torch.set_num_threads(1)
    for places, shared in iter(asked.get, None):
        memory, batch = torch.arange(256).to(torch.uint8), Batch({})
        if shared:
            batch["large"] = torch.zeros(100_000)
        batch.update(views_of(memory, places))
        sent.put(batch)


@pytest.fixture(scope="module")
def sender() -> Iterator[tuple[Any, Any]]:
    """The two queues of a process that sends batches as a worker does."""
    context = torch.multiprocessing.get_context("fork")
    asked, sent = context.Queue(), context.Queue()
    process = context.Process(target=_send_views, args=(asked, sent))
    process.start()
    yield asked, sent
    asked.put(None)
    process.join(60)
    assert process.exitcode == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4]), st.integers(0, 3)), max_size=8),
    shared=st.booleans(),
)
def test_tensors_anywhere_in_one_memory_arrive(sender: tuple[Any, Any], places: Places, shared: bool) -> None:
    asked, sent = sender
    asked.put((places, shared))
    batch = sent.get(timeout=60)
    batch.pop("large", None)
    expected = dict(views_of(torch.arange(256).to(torch.uint8), places))
    assert list(batch) == list(expected)
    assert same(dict(batch), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_of_one_dtype_are_tensors_of_their_own(tmp_path: Path, workers: int) -> None:
    pq.write_table(pa.table({f"c{i}": np.arange(100.0) for i in range(8)}), tmp_path / "t.parquet")
    for batch in DataLoader(ParquetDataset(tmp_path, batch_size=50), batch_size=None, num_workers=workers):
        assert batch["c3"].untyped_storage().nbytes() == 400
        kept = batch["c1"].clone()
        product = (torch.ones(50, requires_grad=True, dtype=torch.float64) * batch["c1"]).sum()
        batch["c0"].mul_(torch.ones(50, requires_grad=True, dtype=torch.float64))
        batch["c2"].add_(1)
        product.backward()
        assert torch.equal(batch["c1"], kept)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Ragged):
        return left.kind == right.kind and same(left.values, right.values) and same(left.offsets, right.offsets)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return bool(left == right)


def test_a_batch_is_received_as_it_was_sent() -> None:
    """Through shared memory, and a small one with its message."""
    context = torch.multiprocessing.get_context("fork")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_send, args=(there, back))
    process.start()
    for length in (10_000, 5):
        batch, expected = there.get(timeout=60), make_batch()
        expected["x"] = expected["x"][:length]
        assert isinstance(batch, Batch)
        assert (batch.index, batch.epoch) == (17, 3)
        assert same(dict(batch), dict(expected))
        batch["x"] += 1  # the sender's is another
        assert batch["x"][0] == 1
    back.put("done")
    process.join(60)
    assert process.exitcode == 0


def _send(there: Any, back: Any) -> None:
    torch.set_num_threads(1)  # as DataLoader's workers do: OpenMP does not survive a fork
    for length in (10_000, 5):
        batch = make_batch()
        batch["x"] = batch["x"][:length]
        batch["grad"] = batch["grad"].detach().requires_grad_()
        there.put(batch)
    back.get()


@pytest.mark.parametrize("available", [2, 0, None])
def test_without_shared_memory_batches_are_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int | None
) -> None:
    """The system has no more of it after a few files, or none at all (None: it does not know such files)."""
    if available is None:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    else:
        files = iter([os.memfd_create] * available)

        def create(*args: Any) -> int:
            if (memfd_create := next(files, None)) is None:
                raise OSError(errno.EMFILE, "too many open files")
            return memfd_create(*args)

        monkeypatch.setattr(os, "memfd_create", create)
    table = pa.table({"id": range(20_000), "s": [f"{i}" for i in range(20_000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2_000)
    found = list(Loader(ParquetDataset(tmp_path, batch_size=2000), num_workers=1))
    rows = [(i, s) for batch in found for i, s in zip(batch["id"].tolist(), batch["s"], strict=True)]
    assert sorted(rows) == [(i, f"{i}") for i in range(20_000)]


def test_batches_copy_pickle_and_convert() -> None:
    batch = make_batch()
    del batch["grad"]
    for other in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert isinstance(other, Batch)
        assert other.index == 17
        assert same(dict(other), dict(batch))
    converted = default_convert(batch)
    assert isinstance(converted, Batch)
    assert converted.index == 17
    assert converted["s"] is batch["s"], "DataLoader does not walk strings"
    assert repr(batch["s"]) == "Ragged(2 strings, 3 values)"
