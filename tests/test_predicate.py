"""``--where``: what it means, checked against DuckDB, and what it refuses."""

import contextlib

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.store.predicate import matching, where_columns

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
    assert matching(TABLE, condition) == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "not a complete condition"),
        ("dt >", "not a complete condition"),
        ("dt = '1' limit 3", "not a single condition"),
        ("dt = '1'; drop table x", "not a single condition"),
        ("dt = '1' union select 2", "not a single condition"),
        ("region = 'kr'", "there is no column region; there are: dt, hour"),
        ("hour = 'noon'", "'noon' is not a value of hour"),
        ("hour + 1 = 2", "is not a column"),
        ("dt = hour", "is not a constant"),
        ("dt = null", "IS NULL"),
        ("dt", "is not a condition"),
        ("hour in (select 1)", "list of constants"),
        ("hour like '1%'", "string column"),
        ("__import__('os').system('true')", "is not supported"),
        ("exists (select 1)", "is not supported"),
    ],
)
def test_refuses_by_name(condition: str, message: str) -> None:
    with pytest.raises(UsageError, match="--where") as caught:
        matching(TABLE, condition)
    assert message in str(caught.value)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_is_a_condition_or_an_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        matching(TABLE, text)


def test_columns_in_a_condition() -> None:
    assert where_columns("dt > '1' and (hour = 1 or dt < '9')") == ["dt", "hour"]
