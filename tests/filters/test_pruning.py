"""Pruning: no row group that holds a matching row is passed over, none that holds another is taken whole."""

from __future__ import annotations

import datetime as dt
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.filters.parse import parse_condition, rows_matching
from pqcache.filters.pruning import TruthValues, prune_by_expression, prune_row_groups
from pqcache.parquet.statistics import columns_table, row_group_columns
from pqcache.store.row_group_index import Index, build_index

NAN = float("nan")
DAY = dt.date(2026, 10, 25)  # clocks go back in Berlin
TIMES = [dt.datetime(2026, 10, 25, hour, 30, 0, 1, dt.timezone.utc) for hour in range(4)]
NS = 1_793_000_000_000_000_000

# Of each kind of column: its type, values, and literals of which some are values and some lie between.
KINDS: dict[str, tuple[pa.DataType, list[Any], list[str]]] = {
    "i8": (pa.int8(), [-128, -1, 0, 1, 127], ["-128", "0", "0.5", "127", "1e1"]),
    "i64": (pa.int64(), [-(2**63), 2**53, 2**53 + 1, 2**63 - 1], ["9007199254740993", "9007199254740992.5", "-1"]),
    "u64": (pa.uint64(), [0, 1, 2**64 - 1, 2**63], ["18446744073709551615", "1", "9223372036854775808"]),
    "f32": (pa.float32(), [-1.5, 0.0, 0.25, NAN, float("inf")], ["0.25", "-1.5", "0.1", "'nan'", "'-inf'"]),
    "f64": (pa.float64(), [-0.0, 0.0, 1.0, NAN], ["0", "'-0.0'", "1", "'nan'", "0.5"]),
    "s": (pa.string(), ["", "a", "aé", "b", "ab%c", "\U0001f600", "a\\"], ["''", "'a'", "'aé'", "'b'", "'~'"]),
    "d": (pa.dictionary(pa.int8(), pa.string()), ["", "a", "ab", "b"], ["''", "'a'", "'aa'", "'b'"]),
    "ok": (pa.bool_(), [True, False], ["true", "false"]),
    "day": (pa.date32(), [DAY, dt.date(1, 1, 1), dt.date(9999, 12, 31)], ["'2026-10-25'", "DATE '1970-01-01'"]),
    "us": (pa.timestamp("us", "Europe/Berlin"), TIMES, ["'2026-10-25 01:30:00.000001Z'", "'2026-10-25 00:00:00Z'"]),
    "ns": (pa.timestamp("ns"), [NS, NS + 1, NS + 999], ["'2026-10-26 06:13:20.000000001'", "'2026-10-26 06:13:20'"]),
    "t": (pa.time64("ns"), [0, 1, 999, 1001], ["'00:00:00'", "'00:00:00.000000999'", "'00:00:00.000001'"]),
    "n": (pa.decimal128(9, 2), [Decimal("-1.25"), Decimal("0.00"), Decimal("3.50")], ["-1.25", "0", "3.5"]),
}
_PATTERNS = ["'a%'", "'%'", "'a'", "'a_'", "'ab\\%%'", "''", "'_'", "'a%b'", "'aé%'"]
_OPS = st.sampled_from(["=", "!=", "<", "<=", ">", ">="])


def leaf(name: str) -> st.SearchStrategy[str]:
    literal = st.sampled_from(KINDS[name][2])
    several = st.lists(literal, min_size=1, max_size=4).map(", ".join)
    choices = [
        st.tuples(st.just(name), _OPS, literal).map(" ".join),
        st.tuples(literal, literal).map(lambda ends: f"{name} between {ends[0]} and {ends[1]}"),
        several.map(lambda inside: f"{name} in ({inside})"),
        several.map(lambda inside: f"{name} not in ({inside})"),
        st.sampled_from([f"{name} is null", f"{name} is not null"]),
    ]
    if name in ("s", "d"):
        choices.append(st.sampled_from(_PATTERNS).map(lambda pattern: f"{name} like {pattern}"))
        choices.append(st.sampled_from(_PATTERNS).map(lambda pattern: f"{name} not like {pattern}"))
    if name == "ok":
        choices.append(st.just("ok"))
    return st.one_of(choices)


def conditions(names: list[str]) -> st.SearchStrategy[str]:
    return st.recursive(
        st.sampled_from(names).flatmap(leaf),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda v: f"({v[0]}) {v[1]} ({v[2]})"),
            inner.map(lambda v: f"not ({v})"),
        ),
        max_leaves=5,
    )


def tables(names: list[str], max_rows: int = 8) -> st.SearchStrategy[pa.Table]:
    def table(rows: list[list[Any]]) -> pa.Table:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
        arrays = [
            pa.array(list(column), KINDS[name][0])
            if not pa.types.is_dictionary(KINDS[name][0])
            else pa.array(list(column), pa.string()).dictionary_encode().cast(KINDS[name][0])
            for name, column in zip(names, columns, strict=True)
        ]
        return pa.table(arrays, names=names)

    row = st.tuples(*(st.one_of(st.none(), st.sampled_from(KINDS[name][1])) for name in names))
    return st.lists(row.map(list), max_size=max_rows).map(table)


def statistics(data: bytes) -> pa.Table:
    with pq.ParquetFile(io.BytesIO(data)) as file:
        columns = row_group_columns(file.metadata, file.schema_arrow)
        columns["file"] = [0] * file.metadata.num_row_groups
        return columns_table(columns, file.schema_arrow)


def check(table: pa.Table, condition: str, known: pa.Table, sizes: list[int], **constants: Any) -> None:
    truth = prune_row_groups(parse_condition(condition, table.schema), known, constants)
    first = 0
    for group, size in enumerate(sizes):
        hits = len(rows_matching(table.slice(first, size), condition))
        first += size
        assert truth.some[group] or hits == 0, (condition, group)
        assert not truth.every[group] or hits == size, (condition, group)


@given(st.data())
@settings(deadline=None)
def test_never_loses_or_adds_a_row(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3, unique=True))
    groups = data.draw(st.lists(tables(names), min_size=1, max_size=3))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, groups[0].schema, use_dictionary=data.draw(st.booleans())) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=100)
    known = statistics(sink.getvalue())
    sizes = [group.num_rows for group in groups]
    with pq.ParquetFile(io.BytesIO(sink.getvalue())) as file:
        table = file.read()
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    check(table, data.draw(conditions(names)), known, sizes)


@given(tables(["i8", "s"]), conditions(["i8", "s"]), st.data())
@settings(deadline=None)
def test_holds_for_any_bounds_that_are_true(table: pa.Table, condition: str, data: st.DataObject) -> None:
    """Missing, truncated and inexact statistics, and those of a writer that has its own idea of order."""
    columns: dict[str, pa.Array] = {"rows": pa.array([table.num_rows])}
    for name, floor, ceiling in (("i8", -128, 127), ("s", "", "\U0010ffff" * 4)):
        values = table[name].drop_null().to_pylist()
        low = data.draw(st.sampled_from([min(values, default=None), floor, None]))
        high = data.draw(st.sampled_from([max(values, default=None), ceiling, None]))
        if low is not None and high is not None and data.draw(st.booleans()) and low != high:
            low, high = high, low
        columns[f"{name}:min"] = pa.array([low], KINDS[name][0])
        columns[f"{name}:max"] = pa.array([high], KINDS[name][0])
        columns[f"{name}:nulls"] = pa.array([data.draw(st.sampled_from([table[name].null_count, None]))], pa.int64())
    kept = [name for name in columns if name == "rows" or data.draw(st.integers(0, 4))]
    check(table, condition, pa.table(columns).select(kept), [table.num_rows])


@given(conditions(["i64", "s"]), st.sampled_from([*KINDS["s"][1], None]), st.sampled_from([*KINDS["i64"][1], None]))
@settings(deadline=None)
def test_constants_are_decided_exactly(condition: str, text: str | None, number: int | None) -> None:
    table = pa.table({"s": pa.array([text], pa.string()), "i64": pa.array([number], pa.int64())})
    constants = {name: table[name] for name in table.column_names}
    truth = prune_row_groups(parse_condition(condition, table.schema), pa.table({"rows": pa.array([3])}), constants)
    expected = rows_matching(table, condition) == [0]
    assert bool(truth.some[0]) == bool(truth.every[0]) == expected


@pytest.mark.parametrize(
    ("condition", "some", "every"),
    [
        ("i = 15", [0, 1, 0], [0, 0, 0]),
        ("i >= 10", [0, 1, 1], [0, 1, 1]),
        ("not i < 10", [0, 1, 1], [0, 1, 1]),
        ("i between 5 and 12", [1, 1, 0], [0, 0, 0]),
        ("i in (3, 25)", [1, 0, 1], [0, 0, 0]),
        ("i in (1.5)", [0, 0, 0], [0, 0, 0]),
        ("i not in (3, 25)", [1, 1, 1], [0, 1, 0]),
        ("s like 'b%'", [0, 1, 0], [0, 1, 0]),
        ("s like 'b%5'", [0, 1, 0], [0, 0, 0]),
        ("s not like 'b%'", [1, 0, 1], [1, 0, 1]),
        ("half is null", [1, 0, 1], [0, 0, 1]),
        ("half is not null", [1, 1, 0], [0, 1, 0]),
        ("half > 0 or i < 100", [1, 1, 1], [1, 1, 1]),
        ("half >= 0", [1, 1, 0], [0, 1, 0]),
        ("half > 0 and i >= 0", [1, 1, 0], [0, 1, 0]),
        ("true", [1, 1, 1], [1, 1, 1]),
        ("i = 15 and i = 3", [0, 0, 0], [0, 0, 0]),
    ],
)
def test_prunes_what_it_can(condition: str, some: list[int], every: list[int]) -> None:
    table = pa.table(
        {
            "i": pa.array(range(30)),
            "s": [f"{'abc'[n // 10]}{n % 10}" for n in range(30)],
            "half": pa.array([n if 5 <= n < 20 else None for n in range(30)]),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=10)
    truth = prune_row_groups(parse_condition(condition, table.schema), statistics(sink.getvalue()))
    assert truth.some.tolist() == [bool(flag) for flag in some]
    assert truth.every.tolist() == [bool(flag) for flag in every]


@pytest.mark.parametrize(
    ("values", "condition"),
    [
        (pa.array([1.0, NAN]), "x <> 1"),
        (pa.array([1.0, NAN]), "not x < 5"),
        (pa.array([1.0, NAN]), "not x = 1"),
        (pa.array([NAN, NAN]), "not x in (1, 2, 3)"),
        (pa.array([-0.0, 0.0]), "x >= 0"),
        (pa.array([0, 1001], pa.time64("ns")), "x > '00:00:00.000001'"),
        (pa.array([NS, NS + 1], pa.timestamp("ns")), "x > '2026-10-26 06:13:20'"),
        (pa.array(["a" * 300, "b" * 300]), f"x = '{'b' * 300}'"),
        (pa.array([None, "a"]), "x is null or x = 'b'"),
        (pa.array([None, None], pa.int64()), "not (x = 1 and x = 2) or x is null"),
    ],
    ids=str,
)
def test_what_min_and_max_do_not_tell(values: pa.Array, condition: str) -> None:
    table = pa.table({"x": values})
    assert rows_matching(table, condition)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    check(table, condition, statistics(sink.getvalue()), [2])


def prune_index(index: Index, where: str) -> TruthValues:
    files = pa.array(index.numbers("file"))
    constants = {name: index.partitions[name].take(files) for name in index.partitions.column_names}
    return prune_row_groups(parse_condition(where, index.schema), index.table, constants)


def test_an_index_knows_its_partitions_and_columns_that_some_files_lack(tmp_path: Path) -> None:
    for number, table in enumerate([pa.table({"i": [1, 2]}), pa.table({"i": [3, 4], "late": ["x", None]})]):
        (tmp_path / f"dt={number}").mkdir()
        pq.write_table(table, tmp_path / f"dt={number}" / "a.parquet", row_group_size=1)
    index = build_index(tmp_path, ["dt=0/a.parquet", "dt=1/a.parquet"])
    assert prune_index(index, "dt = 1").every.tolist() == [False, False, True, True]
    assert prune_index(index, "dt = 1 and i > 3").some.tolist() == [False, False, False, True]
    assert prune_index(index, "late is null").some.tolist() == [True, True, False, True]
    assert prune_index(index, "late = 'x'").some.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("expression", "some"),
    [
        (pc.field("i") <= 10, [1, 1, 0]),
        (pc.field("i") < 10, [1, 0, 0]),
        (pc.field("i") >= 19, [0, 1, 1]),
        (pc.field("i") > 19, [0, 0, 1]),
        (pc.field("i") == 10, [0, 1, 0]),
        (pc.field("i") == 29, [0, 0, 1]),
        (pc.field("n").is_null(), [1, 1, 0]),
        (pc.field("n").is_valid(), [0, 1, 1]),
        (pc.field("n") == 5, [0, 1, 0]),
    ],
    ids=str,
)
def test_an_expression_meets_minima_and_maxima_themselves(
    expression: pc.Expression, some: list[int], tmp_path: Path
) -> None:
    numbers = pa.array([None] * 14 + [5] * 6 + [6] * 10, pa.int64())
    pq.write_table(pa.table({"i": range(30), "n": numbers}), tmp_path / "a.parquet", row_group_size=10)
    index = build_index(tmp_path, ["a.parquet"])
    assert prune_by_expression(index, expression, ["i", "n"]).tolist() == [bool(flag) for flag in some]


@pytest.mark.parametrize(
    "condition", ["i = 1", "i is null", "not i = 1", "true", "p = 'a'", "p is null", "s.x = 1", "s.x is null"]
)
def test_a_row_group_without_rows_has_none_that_match(condition: str) -> None:
    schema = pa.schema([("i", pa.int64()), ("p", pa.string()), ("s", pa.struct([("x", pa.int64())]))])
    table = pa.table({"rows": [0, 0], "i:nulls": [0, None], "i:min": [1, None], "i:max": [1, None]})
    constants = {"p": pa.array(["a", None])}
    found = prune_row_groups(parse_condition(condition, schema), table, constants)
    assert not found.some.any()
    assert not found.null.any()
