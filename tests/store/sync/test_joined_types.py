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


HELD = [  # two arrays, and the type that holds both
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
]


@pytest.mark.parametrize("swap", [False, True])
def test_types_that_one_type_holds(tmp_path: Path, swap: bool) -> None:
    """Each pair is a column; both files have three rows."""
    lake, cache, kinds = tmp_path / "lake", tmp_path / "cache", [kind for _, _, kind in HELD]
    pairs = [((other, one) if swap else (one, other)) for one, other, _ in HELD]
    columns = [[pa.concat_arrays([values] * 3)[:3] for values in pair] for pair in pairs]
    for day in (1, 2):
        table = pa.table({f"v{number}": column[day - 1] for number, column in enumerate(columns)})
        (lake / f"dt={day}").mkdir(parents=True)
        pq.write_table(table, lake / f"dt={day}" / "p.parquet", write_statistics=day == 1)
        pqcache.sync(lake, cache)
    pqcache.repartition(lake, tmp_path / "whole", row_group_size="1MB")
    assert pqcache.verify(cache, deep=True).ok
    batches = list(pqcache.Cache.open(cache).batches(shuffle=False))
    rewritten = [pq.read_table(path, partitioning=None) for path in sorted((tmp_path / "whole").rglob("*.parquet"))]
    shown = {column.name: column.type.replace("element", "item") for column in pqcache.inspect(lake).columns}
    for number, ((first, second), kind) in enumerate(zip(columns, kinds, strict=True)):
        name, expected = f"v{number}", first.to_pylist() + second.to_pylist()
        assert [value for batch in batches for value in batch[name].to_pylist()] == expected, kind
        assert [value for table in rewritten for value in table[name].to_pylist()] == expected, kind
        assert batches[0].schema.field(name).type == kind or pa.types.is_nested(kind)
        assert shown[name] == str(kind).replace("element", "item")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([D("1.50")]), pa.array([1.5])),
        (lists(pa.array([D("7")])), lists(pa.array([7.0]))),
    ],
    ids=lambda array: str(array.type),
)
def test_types_that_no_type_holds_clash_whatever_the_values_are(tmp_path: Path, one: pa.Array, other: pa.Array) -> None:
    for number, (first, second) in enumerate(((one, other), (other, one))):
        lake, cache = tmp_path / f"lake{number}", tmp_path / f"cache{number}"
        write(lake, 1, first)
        pqcache.sync(lake, cache)
        write(lake, 2, second)
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
        (
            lambda values: pa.array(values, pa.uint64() if isinstance(values[0], int) else None),
            [2**64 - 1],
            [0.5],
            "1844",
        ),
        (lambda values: pa.array(values, pa.uint64() if values[0] > 0 else None), [2**63], [-1], "9223372036854775808"),
        (lambda values: pa.array(values, pa.timestamp("s" if values[0] else "ns")), [FAR], [0], "3000-01-01"),
    ],
    ids=["int64", "list", "uint64", "uint64 beside int64", "times"],
)
@pytest.mark.parametrize(("statistics", "row_group_size"), [(True, None), (False, None), (False, "1MB")])
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


THREE = [  # the type that holds three
    ([pa.array([2**64 - 1], pa.uint64()), pa.array([-(2**63)]), pa.array([D("1.50")])], pa.decimal128(22, 2)),
    ([pa.array([2**53], pa.uint64()), pa.array([-(2**53)]), pa.array([0.5], pa.float32())], pa.float64()),
    ([pa.array([255], pa.uint8()), pa.array([-5], pa.int8()), pa.array([0.5], pa.float16())], pa.float32()),
]


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    for number, order in enumerate(permutations(range(3))):
        lake, cache = tmp_path / f"lake{number}", tmp_path / f"whole{number}"
        lake.mkdir()
        for day, which in enumerate(order):
            columns = {f"v{column}": arrays[which] for column, (arrays, _) in enumerate(THREE)}
            pq.write_table(pa.table(columns), lake / f"{day}.parquet")
        pqcache.sync(lake, cache)
        (batch,) = pqcache.Cache.open(cache).batches(shuffle=False)
        for column, (arrays, kind) in enumerate(THREE):
            assert batch.schema.field(f"v{column}").type == kind
            assert batch[f"v{column}"].to_pylist() == [arrays[which][0].as_py() for which in order]


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


def test_a_category_beside_text_is_text(tmp_path: Path) -> None:
    """Each pair of which one is a category is a column."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pairs = {
        f"v{number}": pair
        for number, pair in enumerate(pair for pair in permutations(CATEGORIES, 2) if "category" in "".join(pair))
    }
    lake.mkdir()
    for day in (0, 1):
        table = pa.table({name: CATEGORIES[pair[day]] for name, pair in pairs.items()})
        pq.write_table(table, lake / f"{day}.parquet")
    expected = {
        name: [value or "-" for kind in pair for value in CATEGORIES[kind].to_pylist()] for name, pair in pairs.items()
    }
    texts = [name for name, pair in pairs.items() if set(pair) != {"null", "category of nulls"}]
    nulls = dict.fromkeys(texts, "-")
    (batch,) = ParquetDataset(lake, columns=texts, nulls=nulls, shuffle=False, batch_size=6)
    assert {name: batch[name].to_list() for name in texts} == {name: expected[name] for name in texts}
    for name in texts:
        if pairs[name][0] == "category":
            options: dict[str, Any] = {"filters": f"{name} = 'x' or {name} is null", "shuffle": False, "batch_size": 6}
            (batch,) = ParquetDataset(lake, columns=[name], nulls={name: "-"}, **options)
            assert batch[name].to_list() == [text for text in expected[name] if text in ("x", "-")], pairs[name]
    held = [name for name, pair in pairs.items() if "null" not in pair]
    pqcache.sync(lake, cache, columns=held)
    (rows,) = pqcache.Cache.open(cache).batches(held, shuffle=False)
    for name in held:
        assert [value or "-" for value in rows[name].to_pylist()] == expected[name], pairs[name]
