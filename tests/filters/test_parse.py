"""``--where``: what it means, checked against DuckDB, and what it refuses."""

import contextlib

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.filters.parse import condition_on, parse_where, rows_matching, where_columns

TABLE = pa.table(
    {
        "dt": ["2026-11-01", "2026-11-02", "2026-11-03", None, "", "x'y"],
        "hour": pa.array([1, 2, None, -4, 5, 0], pa.int64()),
    }
)
_STRING = st.sampled_from(["'2026-11-01'", "'2026-11-02'", "'x''y'", "''", "'~'"])
_NUMBER = st.sampled_from(["1", "-4", "0", "2.5", "99"])
_OP = st.sampled_from(["=", "!=", "<>", "<", "<=", ">", ">="])


def _leaf() -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(st.just("dt"), _OP, _STRING).map(" ".join),
        st.tuples(st.just("hour"), _OP, _NUMBER).map(" ".join),
        st.tuples(_NUMBER, _OP, st.just("hour")).map(" ".join),
        st.lists(_STRING, min_size=1, max_size=4).map(lambda v: f"dt in ({', '.join(v)})"),
        st.lists(_NUMBER.filter(lambda n: "." not in n), min_size=1, max_size=4).map(
            lambda v: f"hour not in ({', '.join(v)})"
        ),
        st.tuples(_NUMBER, _NUMBER).map(lambda v: f"hour between {v[0]} and {v[1]}"),
        st.sampled_from(["dt is null", "hour is not null", "dt like '2026-11-0_'", "dt like '%''%'"]),
        st.sampled_from(["dt not like '2026%'", "hour not between 0 and 1.5", "hour in (1, 2.5)", "hour = 2.5"]),
    )


_CONDITION = st.recursive(
    _leaf(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda v: f"({v[0]}) {v[1]} ({v[2]})"),
        inner.map(lambda v: f"not ({v})"),
    ),
    max_leaves=6,
)


@given(_CONDITION)
@settings(deadline=None)
def test_means_what_sql_means(condition: str) -> None:
    rows = TABLE.append_column("i", pa.array(range(TABLE.num_rows)))
    connection = duckdb.connect()
    connection.register("t", rows)
    expected = [i for (i,) in connection.execute(f"select i from t where {condition} order by i").fetchall()]
    assert rows_matching(TABLE, condition) == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "not a complete condition"),
        ("dt >", "not a complete condition"),
        ("dt = '1' limit 3", "not a single condition"),
        ("dt = '1'; drop table x", "not a single condition"),
        ("dt = '1' union select 2", "not a single condition"),
        ("region = 'kr'", "no column 'region'; there are: dt, hour"),
        ("hour = 'noon'", "'noon' is not a value of hour"),
        ("hour + 1 = 2", "is not a column"),
        ("dt = hour", "'hour' is a column, not a constant; write text in quotes: 'hour'"),
        ("dt = null", "IS NULL"),
        ("dt", "is not a condition"),
        ("dt = 2026-11-01", "2026-11-01 without quotes is arithmetic; write dates and times in quotes: '2026-11-01'"),
        ("dt IN (2026/11/01)", "2026/11/01 without quotes is arithmetic"),
        ("dt > 2026-11-01 04:00", "not a complete condition; write dates and times in quotes: '2026-11-01 04:00'"),
        ("hour in (select 1)", "list of constants"),
        ("hour like '1%'", "string column"),
        ("hour between symmetric 2 and 1", "SYMMETRIC is not supported"),
        ("hour in unnest(dt)", "list of constants"),
        ("t.hour = 1", "no column 't.hour'"),
        ("hour > 1e999999999", "is not a value of hour"),
        ("hour > 'inf'", "'inf' is not a value of hour"),
        ("hour = 5.7::int", "is not a constant"),
        ("__import__('os').system('true')", "is not supported"),
        ("exists (select 1)", "is not supported"),
    ],
)
def test_refuses_by_name(condition: str, message: str) -> None:
    with pytest.raises(UsageError, match="--where") as caught:
        rows_matching(TABLE, condition)
    assert message in str(caught.value)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_is_a_condition_or_an_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        rows_matching(TABLE, text)


def test_columns_in_a_condition() -> None:
    assert where_columns("dt > '1' and (hour = 1 or dt < '9')") == [("dt",), ("hour",)]
    assert where_columns('s.x = 1 or "a.b".c.d.e.f.g is null or s.x in (2)') == [
        ("s", "x"), ("a.b", "c", "d", "e", "f", "g"),
    ]  # fmt: skip


def test_numbers_between_large_integers() -> None:
    table = pa.table({"n": pa.array([2**53, 2**53 + 1, -(2**63), 2**63 - 1, None], pa.int64())})
    assert rows_matching(table, "n > 9007199254740992.5") == [1, 3]
    assert rows_matching(table, "n < 9007199254740992.5") == [0, 2]
    assert rows_matching(table, "n <> 0.5") == [0, 1, 2, 3]
    assert rows_matching(table, "not n = 0.5") == [0, 1, 2, 3]


def test_floats_compare_as_ieee_754_says() -> None:
    table = pa.table({"x": [0.0, -0.0, float("nan"), 1.0]})
    assert rows_matching(table, "x in ('-0.0', 5, 6)") == [0, 1]
    assert rows_matching(table, "x in ('nan', 1, 2)") == [3]
    assert rows_matching(table, "x <> 1") == [0, 1, 2]


def test_dictionaries_dots_and_times() -> None:
    kinds = pa.table(
        {
            "a.b": pa.array(["x", "y", None]).dictionary_encode(),
            "t": pa.array([0, 1, 2], pa.time64("ns")),
        }
    )
    assert rows_matching(kinds, "a.b = 'x'") == rows_matching(kinds, "\"a.b\" like 'x%'") == [0]
    assert rows_matching(kinds, "a.b in ('y', 'z', 'w')") == [1]
    assert rows_matching(kinds, "t >= '00:00:00.000000001'") == [1, 2]
    assert where_columns("a.b = 'x'") == [("a", "b")]


def test_long_chains_do_not_nest() -> None:
    table = pa.table({"n": range(5)})
    assert rows_matching(table, " or ".join(f"n = {n}" for n in range(3, 3000))) == [3, 4]
    with pytest.raises(UsageError):
        rows_matching(table, "not " * 5000 + "n = 1")


def test_a_time_without_its_zone_is_refused_with_advice() -> None:
    schema = pa.schema([("ts", pa.timestamp("us", "UTC"))])
    with pytest.raises(UsageError, match="say in which zone, like '2026-11-20T04:00:00Z'"):
        parse_where("ts >= '2026-11-20'", schema)
    parse_where("ts >= '2026-11-20T04:00:00Z'", schema)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("dt > '1'", "(dt > '1')"),
        ("dt > '1' and x = 1", "(dt > '1')"),
        ("(dt > '1' or Hour = 2) and x = 1 and \"dt\" < '9'", "(dt > '1' OR Hour = 2) AND (\"dt\" < '9')"),
        ("not (dt = '1' and x = 1)", ""),
        ("dt > '1' or x = 1", ""),
        ("x = 1", ""),
    ],
)
def test_conditions_on_some_columns_alone(where: str, expected: str) -> None:
    assert condition_on(where, ["DT", "hour"]) == expected
