"""Minima, maxima and null counts that old writers got wrong are not used; others are, and no rows are lost."""

from __future__ import annotations

import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import UsageError
from pqcache.parquet import thrift as t
from pqcache.parquet.statistics import row_group_columns, type_ordered
from pqcache.parquet.validation import footer_in
from pqcache.torch import ParquetDataset
from tests.pages import chunks_of, edited

NAMES = ["é", "a", "zebra", "m"]
TABLE = pa.table(
    {
        "i": [1, 2, 3, 4],
        "f": [1.5, -2.5, 0.5, 9.0],
        "s": NAMES,
        "d": pa.array([Decimal("-1.00"), Decimal("3.00"), Decimal("5.00"), Decimal("7.00")], pa.decimal128(20, 2)),
        "p": pa.array([Decimal("-1.00"), Decimal("3.00"), Decimal("5.00"), Decimal("7.00")], pa.decimal128(5, 2)),
        "u": pa.array([1, 2, 3_000_000_000, 4_000_000_000], pa.uint32()),
        "h": pa.array([1.0, -2.0, 3.0, 4.0], pa.float16()),
    }
)
DEFAULT = t.STRUCT, {}
"""A ColumnOrder's TypeDefinedOrder."""


def old_file(
    created_by: str | None, orders: list[t.Struct] | None, deprecated: dict[str, tuple[bytes, bytes]]
) -> bytes:
    """Return a file as old writers made it: of ``orders``, and with these deprecated minima and maxima."""

    def change(fields: t.Struct) -> None:
        for name, chunk in zip(TABLE.column_names, chunks_of(fields), strict=True):
            statistics = chunk[3][1][12][1]
            low, high = deprecated.get(name) or (statistics[6][1], statistics[5][1])
            chunk[3][1][12] = (t.STRUCT, {1: (t.BINARY, high), 2: (t.BINARY, low), 3: (t.I64, 0)})
        del fields[6], fields[7]
        if created_by is not None:
            fields[6] = (t.BINARY, created_by.encode())
        if orders is not None:
            fields[7] = (t.LIST, t.Items(t.STRUCT, orders))

    sink = io.BytesIO()
    pq.write_table(TABLE, sink, store_schema=False, store_decimal_as_integer=True)
    return edited(sink.getvalue(), change)


FIVE = (500).to_bytes(9, "big")
WRONG = {
    "s": ("é".encode(), b"zebra"),  # in signed bytes, é is before a
    "d": (FIVE, FIVE),  # PARQUET-251: the last value, whatever the others are
    "u": (b"\1\0\0\0", b"\2\0\0\0"),
}
WRITERS = [
    None,
    "parquet-mr (build 32c46643845ea8a705c35d4ec8fc654cc8ff816d)",
    "parquet-mr version 1.6.0 (build 6aa21f8776625b5fa6b18059cfebe7549f2e00cb)",
    "parquet-mr version 1.8.1 (build 4aba4dae7bb0d4edbcf7923ae1339f28fd3f7fcf)",
    "impala version 2.6.0 (build 0)",
    "somebody",
]


def columns_of(data: bytes) -> dict[str, list[Any]]:
    return row_group_columns(*footer_in(data, "x", size=len(data)))


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_deprecated_ones_are_used_for_signed_numbers_only(writer: str | None) -> None:
    columns = columns_of(old_file(writer, None, WRONG))
    bounds = {name: (columns[f"{name}:min"], columns[f"{name}:max"]) for name in TABLE.column_names}
    signed = {"i": ([1], [4]), "f": ([-2.5], [9.0]), "p": ([Decimal("-1.00")], [Decimal("7.00")])}
    assert bounds == {**dict.fromkeys(("s", "d", "u", "h"), ([None], [None])), **signed}


def test_orders_are_read_leaf_by_leaf() -> None:
    orders: list[t.Struct] = [{1: DEFAULT}] * 7
    assert type_ordered(footer_in(old_file(None, orders, {}), "x", size=None)[0]) == [True] * 7
    orders = [{1: DEFAULT}, {}, {2: DEFAULT}, *[{1: DEFAULT}] * 4]
    assert type_ordered(footer_in(old_file(None, orders, {}), "x", size=None)[0]) == [True, False, False, *[True] * 4]
    assert type_ordered(footer_in(old_file(None, None, {}), "x", size=None)[0]) == [False] * 7


CONDITIONS = {
    "d = 3.00": 1,
    "d > 5.00": 1,
    "d < 5.00": 2,
    "s = 'a'": 1,
    "s < 'n'": 2,
    "u = 3000000000": 1,
    "u > 2": 2,
    "i > 2": 2,
    "i > 3": 1,
}


@pytest.mark.parametrize("writer", WRITERS[:2], ids=str)
def test_no_rows_are_lost(tmp_path: Path, writer: str | None) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.parquet").write_bytes(old_file(writer, None, WRONG))
    pqcache.sync(str(tmp_path / "source"), tmp_path / "cache")
    cache = pqcache.Cache.open(tmp_path / "cache")
    found = {condition: sum(b.num_rows for b in cache.batches(filters=condition)) for condition in CONDITIONS}
    three = pc.field("d") == pa.scalar(Decimal("3.00"), pa.decimal128(20, 2))
    assert sum(batch.num_rows for batch in cache.batches(filters=three)) == 1
    assert found == CONDITIONS
    for condition in ("d = 3.00", "s = 'a'"):
        report = pqcache.sync(str(tmp_path / "source"), tmp_path / condition.replace(" ", "_"), where=condition)
        assert report.rows == 1


# ---- nulls that writers did not count

OLD_ARROW = "parquet-cpp-arrow version 4.0.1"
VALUES = ["a", "b", "a", None, "b", None, "a", "a"]


def write_uncounted(path: Path, created_by: str, **more: pa.Array) -> None:
    """Write VALUES as a dictionary column of two row groups, with footers that count no nulls."""
    table = pa.table({"c": pa.array(VALUES).dictionary_encode(), "n": list(range(8)), **more})
    pq.write_table(table, path, row_group_size=4)

    def change(fields: t.Struct) -> None:
        fields[6] = (t.BINARY, created_by.encode())
        for group in fields[4][1].values:
            group[1][1].values[0][3][1][12][1][3] = (t.I64, 0)

    path.write_bytes(edited(path.read_bytes(), change))


@pytest.mark.parametrize(
    ("created_by", "known"),
    [
        (OLD_ARROW, False),
        ("parquet-cpp version 1.5.1-SNAPSHOT", False),
        ("parquet-cpp-arrow version 5.0.0", True),
        ("parquet-cpp-arrow version 23.0.1", True),
        ("parquet-mr version 1.10.1", True),
    ],
)
def test_nulls_that_no_footer_counts_are_masked(tmp_path: Path, created_by: str, known: bool) -> None:
    """With a writer that is known for it every batch has a mask; else those that hold nulls."""
    write_uncounted(tmp_path / "a.parquet", created_by)
    found = {}
    for batch in ParquetDataset(tmp_path, batch_size=2, nulls="mask"):
        values = batch["c"].to_list()
        mask = batch["c_mask"].tolist() if "c_mask" in batch else [True, True]
        assert "c_mask" in batch or known
        found |= dict(
            zip(batch["n"].tolist(), [v if m else None for v, m in zip(values, mask, strict=True)], strict=True)
        )
    assert [found[n] for n in range(8)] == VALUES


def test_filters_find_nulls_that_no_footer_counts(tmp_path: Path) -> None:
    write_uncounted(tmp_path / "a.parquet", OLD_ARROW)
    for filters, expected in (
        ("c is null", [3, 5]),
        ("c is not null", [0, 1, 2, 4, 6, 7]),
        ("c >= 'a'", [0, 1, 2, 4, 6, 7]),
    ):
        dataset = ParquetDataset(tmp_path, columns=["n"], filters=filters, batch_size=8, shuffle=False)
        assert [n for batch in dataset for n in batch["n"].tolist()] == expected, filters


def test_a_cache_of_such_files_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_uncounted(tmp_path / "source/a.parquet", OLD_ARROW)
    pqcache.sync(str(tmp_path / "source"), tmp_path / "cache")
    assert pqcache.verify(tmp_path / "cache", deep=True).ok


def test_a_mask_replaces_no_column(tmp_path: Path) -> None:
    write_uncounted(tmp_path / "a.parquet", "another writer", c_mask=pa.array([1] * 8))
    with pytest.raises(UsageError, match="it would add 'c_mask', which is a column already"):
        list(ParquetDataset(tmp_path, nulls="mask", batch_size=8))
