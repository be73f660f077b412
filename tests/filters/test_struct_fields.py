"""Conditions on fields of structs, in --where and filters=, against DuckDB on the same files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import UsageError
from pqcache.filters.parse import parse_condition
from pqcache.filters.pruning import prune_row_groups
from pqcache.store.row_group_index import build_index
from pqcache.torch import ParquetDataset
from tests.examples import examples

INNER = pa.struct([("z", pa.int32()), ("a.b", pa.string())])
NEW = pa.schema([("id", pa.int64()), ("s", pa.struct([("x", pa.int64()), ("y", pa.string()), ("in", INNER)]))])
OLD = pa.schema([("id", pa.int64()), ("s", pa.struct([("y", pa.string())]))])  # from before fields were added
BARE = pa.schema([("id", pa.int64())])


def structs(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    number, text = st.none() | st.integers(-2, 2), st.none() | st.sampled_from(["", "a", "b", "ab"])
    return st.none() | st.fixed_dictionaries({"x": number, "y": text, "in": inner})


ROWS = st.lists(
    structs(
        st.none()
        | st.fixed_dictionaries(
            {"z": st.none() | st.integers(-1, 1), "a.b": st.none() | st.sampled_from(["a", "b", "c"])}
        )
    ),
    max_size=8,
)
LEAF = st.one_of(
    st.builds("s.x {} {}".format, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), st.integers(-3, 3)),
    st.builds("s.\"in\".z {} {}".format, st.sampled_from(["=", "<>", "<", ">="]), st.integers(-2, 2)),
    st.sampled_from(
        ["s.x is null", "s is null", "s.\"in\" is not null", "s.\"in\".\"a.b\" is null", "s.x in (1, 2)",
         "s.\"in\".\"a.b\" = 'a'", "s.\"in\".\"a.b\" not in ('a', 'c')", "s.y like 'a%'", "s.y = 'b'",
         "s.x between -1 and 1", "id < 4"]
    ),
)  # fmt: skip
CONDITION = st.recursive(
    LEAF,
    lambda c: st.builds("({} {} {})".format, c, st.sampled_from(["and", "or"]), c) | st.builds("(not {})".format, c),
)


def write(root: Path, files: Iterable[tuple[pa.Schema, list[Any]]], size: int, by: str) -> Path:
    """Write each list of structs to a file of row groups of ``size`` rows, with ids, by pyarrow or DuckDB."""
    start = 0
    root.mkdir()
    for number, (schema, rows) in enumerate(files):
        data: dict[str, list[Any]] = {"id": list(range(start, start + len(rows)))}
        start += len(rows)
        if "s" in schema.names:
            names = [field.name for field in schema.field("s").type.fields]
            data["s"] = [row and {name: row[name] for name in names} for row in rows]
        table = pa.table(data, schema)
        if by == "duckdb":
            duckdb.from_arrow(table).write_parquet(str(root / f"{number}.parquet"), row_group_size=size)
        else:
            pq.write_table(table, root / f"{number}.parquet", row_group_size=size)
    return root


def ids(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


@given(
    st.lists(st.tuples(st.sampled_from([NEW, OLD, BARE]), ROWS), max_size=2), ROWS, CONDITION, st.integers(1, 4),
    st.sampled_from(["pyarrow", "duckdb"]),
)  # fmt: skip
@settings(max_examples=examples(24), deadline=None)
@pytest.mark.filterwarnings("ignore:.*no row is left")
def test_means_what_it_means_to_duckdb(
    others: list[tuple[pa.Schema, list[Any]]], rows: list[Any], condition: str, size: int, by: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        lake, cache = write(Path(name, "lake"), [(NEW, rows), *others], size, by), Path(name, "cache")
        files = f"read_parquet('{lake}/*.parquet', union_by_name = true)"
        sql = f"WITH t AS MATERIALIZED (FROM {files}) SELECT id FROM t WHERE {condition} ORDER BY id"
        with duckdb.connect() as database:  # pushed down to files without a field, a condition is DuckDB's fatal error
            expected = [row[0] for row in database.sql(sql).fetchall()]
        assert ids(ParquetDataset(lake, columns=["id"], filters=condition, shuffle=False)) == expected
        index = build_index(lake, [f"{number}.parquet" for number in range(len(others) + 1)])
        found = prune_row_groups(parse_condition(condition, index.schema), index.statistics)
        skipped = np.repeat(~found.some, index.rows)
        whole = np.repeat(found.every, index.rows)
        assert not skipped[expected].any()
        assert set(np.flatnonzero(whole)) <= set(expected)
        pqcache.sync(lake, cache, where=condition)
        kept = pa.concat_tables(pq.read_table(path, columns=["id"]) for path in sorted(cache.glob("current/*.parquet")))
        assert sorted(kept["id"].to_pylist()) == expected


def test_row_groups_are_skipped_by_minima_and_maxima_of_fields(tmp_path: Path) -> None:
    rows = [{"x": n, "y": None, "in": {"z": n, "a.b": f"{n:03}"}} for n in range(40)]
    lake = write(tmp_path / "lake", [(NEW, rows)], 10, "pyarrow")
    index = build_index(lake, ["0.parquet"])
    for condition in ("s.x >= 30", 's."in".z > 29', 's."in"."a.b" = \'035\''):
        assert prune_row_groups(parse_condition(condition, index.schema), index.statistics).some.tolist() == [
            False, False, False, True,
        ]  # fmt: skip
    pqcache.sync(lake, tmp_path / "cache", where="s.x >= 30", columns=["id"])
    assert pqcache.Cache.open(tmp_path / "cache").snapshot().index().rows.tolist() == [10]


def test_a_column_and_a_field_of_one_name_keep_their_own_minima(tmp_path: Path) -> None:
    schema = pa.schema([("s.x", pa.int64()), ("s", pa.struct([("x", pa.int64())]))])
    pq.write_table(pa.table({"s.x": [1, 2], "s": [{"x": 7}, {"x": 8}]}, schema), tmp_path / "a.parquet")
    pq.write_table(pa.table({"s": [{"x": 1}]}, pa.schema([schema.field("s")])), tmp_path / "b.parquet")
    index = build_index(tmp_path, ["a.parquet", "b.parquet"])
    assert (index.table["s.x:min"].to_pylist(), index.table["s.x:field_min"].to_pylist()) == ([1, None], [7, 1])
    found = list(ParquetDataset(tmp_path, columns=["s.x"], filters='"s.x" = 1', batch_size=4))
    assert [batch["s.x"].tolist() for batch in found] == [[1]]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("s.q = 1", "no field 's.q'; s has: x, y, in"),
        ('s."in".q = 1', "no field 's.in.q'; s.in has: z, a.b"),
        ("l.x = 1", "l.x is inside of l, which is list"),
        ("l.element.x = 1", "l.element.x is inside of l, which is list"),
        ("m.k = 1", "m.k is inside of m, which is map"),
        ("id.x = 1", "no column 'id.x'; there are: id, s, l, m"),
        ("t.x = 1", "no column 't.x'; there are: id, s, l, m"),
        ("s.* = 1", "is not a column"),
    ],
)
def test_what_has_no_value_in_each_row_is_refused(condition: str, message: str, tmp_path: Path) -> None:
    more = [("l", pa.list_(pa.struct([("x", pa.int64())]))), ("m", pa.map_(pa.string(), pa.int64()))]
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.schema([*NEW, *more]).empty_table(), tmp_path / "lake" / "a.parquet")
    with pytest.raises(UsageError) as of_sync:
        pqcache.sync(tmp_path / "lake", tmp_path / "cache", where=condition)
    with pytest.raises(UsageError) as of_loader:
        ParquetDataset(tmp_path / "lake", filters=condition)
    assert message in str(of_sync.value)
    assert message in str(of_loader.value)
    if "*" not in condition:
        with pytest.raises(UsageError) as of_list:
            ParquetDataset(tmp_path / "lake", filters=[(condition[:-4], "=", 1)])
        assert message in str(of_list.value)


def test_lists_name_fields_as_sql_does(tmp_path: Path) -> None:
    rows = [None, {"x": 1, "y": "a", "in": {"z": 1, "a.b": "q"}}, {"x": None, "y": None, "in": None}]
    lake = write(tmp_path / "lake", [(NEW, rows)], 2, "pyarrow")
    for filters, expected in (
        ([("s.x", "=", 1)], [1]),
        ([("s.in.z", "in", [1, None])], [0, 1, 2]),
        ([('s.in."a.b"', "=", "q")], [1]),
        ([("S.IN.Z", "not in", [2])], [0, 1, 2]),
        ([("s.y", "!=", "b")], [1]),
    ):
        assert ids(ParquetDataset(lake, columns=["id"], filters=filters, shuffle=False)) == expected
