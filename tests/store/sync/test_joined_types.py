"""Files of one table whose columns have different types: one join for sync, index, loader, inspect and repartition."""

from __future__ import annotations

from decimal import Decimal as D
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, TypeClash
from pqcache.parquet.schema import joined_type
from pqcache.torch import ParquetDataset

BIG = 2**53 + 1
FAR = 32503680000  # seconds: the year 3000, which nanoseconds do not reach
TEXTS = pa.array(["x", "y", "x"])


def write(root: Path, day: int, values: pa.Array, statistics: bool = True) -> None:
    path = root / f"dt={day}" / "p.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [day] * len(values), "v": values}), path, write_statistics=statistics)


def values_in(cache: Path, **options: Any) -> list[Any]:
    batches = pqcache.Cache.open(cache).batches(["v"], shuffle=False, **options)
    return [value for batch in batches for value in batch["v"].to_pylist()]


def lists(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(list(range(len(values) + 1)), values)


def structs(values: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([values], ["a"])


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (pa.array([5, None, -(2**53)]), pa.array([0.5]), pa.float64()),
        (pa.array([5], pa.uint64()), pa.array([0.5], pa.float32()), pa.float64()),
        (pa.array([2**31 - 1], pa.int32()), pa.array([0.5], pa.float32()), pa.float64()),
        (pa.array([-5], pa.int8()), pa.array([2**32 - 1], pa.uint32()), pa.int64()),
        (pa.array([-5], pa.int8()), pa.array([2**63 - 1], pa.uint64()), pa.int64()),
        (pa.array([D("1.50")], pa.decimal128(7, 2)), pa.array([-(2**63)]), pa.decimal128(22, 2)),
        (pa.array([D("1.50")], pa.decimal128(7, 2)), pa.array([2**64 - 1], pa.uint64()), pa.decimal128(22, 2)),
        (lists(pa.array([5, 6])), lists(pa.array([0.5])), pa.list_(pa.float64())),
        (lists(pa.array([5, 6])), lists(pa.array([7], pa.uint64())), pa.list_(pa.int64())),
        (structs(pa.array([5, 6])), structs(pa.array([0.5])), pa.struct([("a", pa.float64())])),
        (TEXTS.dictionary_encode(), TEXTS, pa.string()),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
@pytest.mark.parametrize("swap", [False, True])
def test_types_that_one_type_holds(
    tmp_path: Path, one: pa.Array, other: pa.Array, kind: pa.DataType, swap: bool
) -> None:
    first, second = (other, one) if swap else (one, other)
    lake, expected = tmp_path / "lake", first.to_pylist() + second.to_pylist()
    write(lake, 1, first)
    pqcache.sync(lake, tmp_path / "cache")
    write(lake, 2, second, statistics=False)
    pqcache.sync(tmp_path / "cache")
    assert values_in(tmp_path / "cache") == expected
    (batch,) = pqcache.Cache.open(tmp_path / "cache").batches(["v"], shuffle=False)
    assert batch.schema.field("v").type == kind or pa.types.is_nested(kind)
    assert pqcache.verify(tmp_path / "cache", deep=True).ok
    pqcache.repartition(lake, tmp_path / "whole", row_group_size="1MB")
    found = [pq.read_table(path)["v"].to_pylist() for path in sorted((tmp_path / "whole").rglob("*.parquet"))]
    assert [value for values in found for value in values] == expected
    column = next(column for column in pqcache.inspect(lake).columns if column.name == "v")
    assert column.type.replace("element", "item") == str(kind).replace("element", "item")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([D("1.50")]), pa.array([1.5])),
        (lists(pa.array([D("7")])), lists(pa.array([7.0]))),
    ],
    ids=lambda array: str(array.type),
)
@pytest.mark.parametrize("statistics", [True, False])
def test_types_that_no_type_holds_clash_whatever_the_values_are(
    tmp_path: Path, one: pa.Array, other: pa.Array, statistics: bool
) -> None:
    for number, (first, second) in enumerate(((one, other), (other, one))):
        lake, cache = tmp_path / f"lake{number}", tmp_path / f"cache{number}"
        write(lake, 1, first, statistics)
        pqcache.sync(lake, cache)
        write(lake, 2, second, statistics)
        leaves = [kind.value_type if pa.types.is_list(kind) else kind for kind in (second.type, first.type)]
        named = rf"dt=2/p\.parquet: column 'v.*' is {leaves[0]}, which does not fit {leaves[1]} in dt=1/p\.parquet"
        with pytest.raises(TypeClash, match=named.replace("(", r"\(").replace(")", r"\)")) as caught:
            pqcache.sync(cache)
        assert caught.value.advice.endswith("or leave the column out with --columns id")
        assert [item.partition for item in pqcache.sync(cache, skip_bad=True).skipped] == ["dt=2"]
        assert values_in(cache) == first.to_pylist()


@pytest.mark.parametrize(
    ("make", "bad", "good", "value"),
    [
        (pa.array, [1, BIG], [0.5], str(BIG)),
        (lambda values: lists(pa.array(values)), [1, BIG], [0.5], str(BIG)),
        (lambda values: structs(pa.array(values)), [1, -BIG], [0.5], str(-BIG)),
        (
            lambda values: pa.array(values, pa.uint64() if isinstance(values[0], int) else None),
            [2**64 - 1],
            [0.5],
            "1844",
        ),
        (lambda values: pa.array(values, pa.uint64() if values[0] > 0 else None), [2**63], [-1], "9223372036854775808"),
        (lambda values: pa.array(values, pa.timestamp("s" if values[0] else "ns")), [FAR], [0], "3000-01-01"),
    ],
    ids=["int64", "list", "struct", "uint64", "uint64 beside int64", "times"],
)
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("row_group_size", [None, "1MB"])
def test_a_value_that_does_not_fit_is_found_by_the_sync(
    tmp_path: Path, make: Any, bad: list[Any], good: list[Any], value: str, statistics: bool, row_group_size: str | None
) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write(lake, 1, make(good), statistics)
    pqcache.sync(lake, cache, row_group_size=row_group_size)
    write(lake, 2, make(bad), statistics)
    with pytest.raises(TypeClash) as caught:
        pqcache.sync(cache)
    text = str(caught.value)
    assert all(part in text for part in ("dt=2/", "'v'", value, "partition dt=2", "--skip-bad", "--columns id"))
    assert row_group_size or "dt=1/" in text
    write(lake, 3, make(good), statistics)
    report = pqcache.sync(cache, skip_bad=True)
    assert [(item.partition, item.kept) for item in report.skipped] == [("dt=2", False)]
    assert values_in(cache) == make(good).to_pylist() * 2

    if pa.types.is_timestamp(make(bad).type):
        return  # a finer unit than that of the times that are kept is refused whatever the values are
    other = tmp_path / "other"  # the file with the value comes first, and is kept
    for day in (1, 3):
        (lake / f"dt={day}" / "p.parquet").unlink()
    pqcache.sync(lake, other, row_group_size=row_group_size)
    write(lake, 4, make(good), statistics)
    with pytest.raises(TypeClash) as caught:
        pqcache.sync(other)
    text = str(caught.value)
    assert all(part in text for part in ("dt=4/", "'v'", value, "dt=2/", "partition dt=4", "--skip-bad"))
    assert [item.partition for item in pqcache.sync(other, skip_bad=True).skipped] == ["dt=4"]
    assert values_in(other) == make(bad).to_pylist()


@pytest.mark.parametrize("statistics", [True, False])
def test_a_value_that_does_not_fit_ends_a_first_copy_that_is_read_meanwhile(tmp_path: Path, statistics: bool) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write(lake, 1, pa.array([0.5]), statistics)
    write(lake, 2, pa.array([BIG]), statistics)
    reason = rf"dt=2/p\.parquet: column 'v' is int64 and holds {BIG}, which does not fit double"
    with pytest.raises(ParquetError, match=reason):
        pqcache.sync(lake, cache, fill=True)
    assert pqcache.Cache.open(cache).current() is None
    with pytest.raises(ParquetError, match=reason):  # as from a directory that no sync has looked at
        list(ParquetDataset(lake, columns=["v"], batch_size=2))
    write(lake, 2, pa.array([2**53]), statistics)
    pqcache.sync(lake, cache, fill=True)
    assert values_in(cache) == [0.5, 2.0**53]


UNITS = ("s", "ms", "us", "ns")
PRIMITIVE = [
    pa.null(), pa.bool_(), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal128(3, 0), pa.decimal128(7, 2), pa.decimal128(38, 37), pa.decimal256(7, 2), pa.decimal256(76, 2)),
    *(kind for unit in UNITS for kind in (pa.timestamp(unit), pa.timestamp(unit, "UTC"), pa.duration(unit))),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.binary(4), pa.binary(8), pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.uint64())),
    pa.dictionary(pa.int8(), pa.string(), True),
]  # fmt: skip


def test_the_order_of_types_does_not_matter() -> None:
    """Nor how they are grouped: a cache knows the type that the files before have together, or that they clash."""

    @cache
    def joined(a: pa.DataType | None, b: pa.DataType | None) -> pa.DataType | None:
        return None if a is None or b is None else joined_type(a, b)

    assert not [(a, b) for a, b in product(PRIMITIVE, repeat=2) if joined(a, b) != joined(b, a)]
    triples = product(PRIMITIVE, repeat=3)
    assert not [(a, b, c) for a, b, c in triples if joined(joined(a, b), c) != joined(a, joined(b, c))]


@pytest.mark.parametrize(
    ("arrays", "kind"),
    [
        ([pa.array([2**64 - 1], pa.uint64()), pa.array([-(2**63)]), pa.array([D("1.50")])], pa.decimal128(22, 2)),
        ([pa.array([2**53], pa.uint64()), pa.array([-(2**53)]), pa.array([0.5], pa.float32())], pa.float64()),
        ([pa.array([255], pa.uint8()), pa.array([-5], pa.int8()), pa.array([0.5], pa.float16())], pa.float32()),
    ],
    ids=["decimal", "double", "float"],
)
def test_the_order_of_files_does_not_matter(tmp_path: Path, arrays: list[pa.Array], kind: pa.DataType) -> None:
    for number, order in enumerate(permutations(arrays)):
        lake = tmp_path / f"lake{number}"
        for day, values in enumerate(order):
            write(lake, day, values)
        pqcache.sync(lake, tmp_path / f"whole{number}")
        (batch,) = pqcache.Cache.open(tmp_path / f"whole{number}").batches(["v"], shuffle=False)
        assert batch.schema.field("v").type == kind
        assert batch["v"].to_pylist() == [value for values in order for value in values.to_pylist()]


CATEGORIES = {
    "text": TEXTS,
    "large text": TEXTS.cast(pa.large_string()),
    "text view": TEXTS.cast(pa.string_view()),
    "null": pa.nulls(3),
    "category": TEXTS.dictionary_encode(),
    "category of int8": TEXTS.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
    "ordered category": TEXTS.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string(), True)),
    "category of large text": TEXTS.cast(pa.large_string()).dictionary_encode(),
    "category of nulls": pa.DictionaryArray.from_arrays(pa.nulls(3, pa.int32()), pa.nulls(0)),
}


@pytest.mark.parametrize(
    ("one", "other"), [pair for pair in permutations(CATEGORIES, 2) if "category" in "".join(pair)]
)
def test_a_category_beside_text_is_text(tmp_path: Path, one: str, other: str) -> None:
    for day, name in ((1, one), (2, other)):
        write(tmp_path / "lake", day, CATEGORIES[name])
    expected = [value or "-" for name in (one, other) for value in CATEGORIES[name].to_pylist()]
    options: dict[str, Any] = {"columns": ["v"], "shuffle": False, "batch_size": 6, "filters": "v = 'x' or v is null"}
    if {one, other} != {"null", "category of nulls"}:
        batches = ParquetDataset(tmp_path / "lake", nulls={"v": "-"}, **options)
        assert [text for batch in batches for text in batch["v"].to_list()] == [t for t in expected if t in ("x", "-")]
    if "null" not in (one, other):
        pqcache.sync(tmp_path / "lake", tmp_path / "cache")
        assert [value or "-" for value in values_in(tmp_path / "cache")] == expected
