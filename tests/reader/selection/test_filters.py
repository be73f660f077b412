"""filters= and rows=: exactly the rows that DuckDB gives, each once, in any topology, and no more read than needed."""

from __future__ import annotations

import datetime as dt
import functools
import os
import pickle
import warnings
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.filters.parse import parse_where
from pqcache.reader.decode import Held, RowGroups
from pqcache.reader.epoch_options import RowOptions
from pqcache.reader.open_dataset import Files, RowGroup, open_local_dataset
from pqcache.reader.read_plan import make_read_plan
from pqcache.reader.selection.selection import COUNTS
from pqcache.store.key_lookup import SelectedRows
from pqcache.torch import ParquetDataset
from tests.examples import examples
from tests.waiting import becomes_true

NAN = float("nan")
TIMES = [dt.datetime(2026, 10, 25, hour, 30, 0, 1) for hour in range(4)]
STRUCTS = [None, {"a": None, "b": None}, {"a": 1, "b": {"c": "x"}}, {"a": 5, "b": {"c": None}}, {"a": -2, "b": None}]
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "n": (pa.int32(), [None, -7, 0, 1, 2, 3, 2**31 - 1]),
    "x": (pa.float64(), [None, NAN, -0.0, 0.0, 0.5, 1.5, float("inf")]),
    "s": (pa.string(), [None, "", "a", "ab", "b", "ü%"]),
    "d": (pa.dictionary(pa.int32(), pa.string()), [None, "kr", "jp", "us"]),
    "m": (pa.decimal128(9, 2), [None, Decimal("-1.25"), Decimal("0.00"), Decimal("3.50")]),
    "day": (pa.date32(), [None, dt.date(1970, 1, 1), dt.date(2026, 10, 25), dt.date(9999, 12, 31)]),
    "ts": (pa.timestamp("us"), [None, *TIMES]),
    "zoned": (pa.timestamp("ms", "Europe/Berlin"), [None, *(t.replace(microsecond=0) for t in TIMES)]),
    "st": (pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.string())]))]), STRUCTS),
    "ok": (pa.bool_(), [None, True, False]),
}
LITERALS = {
    "n": ["-7", "0", "1.5", "2", "3", "2147483647"],
    "x": ["0", "0.5", "1", "'inf'", "-1.5"],
    "s": ["''", "'a'", "'ab'", "'b'", "'~'"],
    "d": ["'kr'", "'jp'", "'zz'"],
    "m": ["-1.25", "0", "3.5", "7"],
    "day": ["'1970-01-01'", "DATE '2026-10-25'", "'2026-10-26'"],
    "ts": ["'2026-10-25 01:30:00.000001'", "'2026-10-25 02:00:00'"],
    "zoned": ["'2026-10-25 01:30:00+00:00'", "'2026-10-25 03:00:00+01:00'"],
    "st.a": ["1", "5", "0.5"],
    "st.b.c": ["'x'", "'y'"],
    "ok": ["true", "false"],
    "dt": ["'2026-11-01'", "'2026-11-02'", "'2027'"],
    "hour": ["1", "2", "-1"],
}
_OPS = st.sampled_from(["=", "!=", "<", "<=", ">", ">="])
Texts = tuple[str, str]  # for pqcache, for DuckDB


def _alike(text: str) -> Texts:
    return text, text


def _no_nan(texts: Texts) -> Texts:
    """To DuckDB NaN is the greatest number and equal to itself; here it is as IEEE 754 has it."""
    return texts[0], f"({texts[1]} and not isnan(x))"


def _leaf(name: str) -> st.SearchStrategy[Texts]:
    literal = st.sampled_from(LITERALS[name])
    several = st.lists(literal, min_size=1, max_size=4).map(", ".join)
    compare = st.tuples(st.just(name), _OPS, literal).map(" ".join).map(_alike)
    between = st.tuples(literal, literal).map(lambda ends: _alike(f"{name} between {ends[0]} and {ends[1]}"))
    if name == "x":
        compare = compare.map(lambda texts: texts if "!=" in texts[0] else _no_nan(texts))
        between = between.map(_no_nan)
    choices = [
        compare,
        between,
        several.map(lambda inside: _alike(f"{name} in ({inside})")),
        several.map(lambda inside: _alike(f"{name} not in ({inside})")),
        st.sampled_from([f"{name} is null", f"{name} is not null"]).map(_alike),
    ]
    if name in ("s", "d", "dt", "st.b.c"):
        choices.append(st.sampled_from([f"{name} like '%a%'", f"{name} not like 'a%'"]).map(_alike))
    return st.one_of(choices)


CONDITIONS: st.SearchStrategy[Texts] = st.recursive(
    st.sampled_from(sorted(LITERALS)).flatmap(_leaf) | st.sampled_from(["st is null", "true", "id < 40"]).map(_alike),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda v: (f"({v[0][0]}) {v[1]} ({v[2][0]})", f"({v[0][1]}) {v[1]} ({v[2][1]})")
        ),
        inner.map(lambda texts: (f"not ({texts[0]})", f"not ({texts[1]})")),
    ),
    max_leaves=5,
)


def random_table(rng: np.random.Generator, first: int, rows: int) -> pa.Table:
    """Return rows with some of the values of each column, so that minima and maxima differ between row groups."""
    columns: dict[str, pa.Array] = {"id": pa.array(range(first, first + rows), pa.int64())}
    for name, (kind, values) in VALUES.items():
        some = rng.choice(len(values), rng.integers(1, len(values) + 1), replace=False)
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        array = pa.array([values[some[i]] for i in rng.integers(0, len(some), rows)], plain)
        columns[name] = array.dictionary_encode() if pa.types.is_dictionary(kind) else array
    return pa.table(columns)


def write_random(root: Path, seed: int) -> Path:
    """Write some files in partitions, in row groups of very different sizes."""
    rng = np.random.default_rng(seed)
    directories = ["dt=2026-11-01/hour=1", "dt=2026-11-02/hour=2", "dt=__HIVE_DEFAULT_PARTITION__/hour=3"]
    first = 0
    for number, directory in enumerate(directories):
        (root / directory).mkdir(parents=True)
        tables = [random_table(rng, first + 100 * part, int(rng.integers(0, 40))) for part in range(3)]
        first += 300
        path = root / directory / f"{number}.parquet"
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=max(1, table.num_rows))
    return root


def duck_ids(root: Path, where: str) -> list[int]:
    """Return the ids of the rows that DuckDB finds, in memory: in files its statistics lose NaN under NOT."""
    return [i for (i,) in duck_rows(root).execute(f"select id from rows where {where} order by id").fetchall()]


@functools.cache
def duck_rows(root: Path) -> duckdb.DuckDBPyConnection:
    files = f"read_parquet('{root}/**/*.parquet', hive_partitioning=true, hive_types={{'dt': VARCHAR}})"
    connection = duckdb.connect()
    connection.execute("set timezone='UTC'")
    connection.execute(f"create table rows as from {files}")
    return connection


@pytest.fixture(autouse=True)
def _what_may_be_warned_of() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no row is left by")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@settings(max_examples=examples(75), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 5),
    texts=CONDITIONS,
    batch_size=st.sampled_from([1, 7, 64, 1000]),
    lanes=st.sampled_from([1, 2, 6]),
    window=st.integers(1, 5),
    shuffle=st.booleans(),
    as_expression=st.booleans(),
)
def test_exactly_the_rows_of_duckdb_each_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, texts: Texts, as_expression: bool, **how: Any
) -> None:
    root = tmp_path_factory.getbasetemp() / f"random-{seed}"
    if not root.exists():
        write_random(root, seed)
    expected = duck_ids(root, texts[1])
    filters: Any = parse_where(texts[0], open_local_dataset(root)[0].index.schema) if as_expression else texts[0]
    ranks = {1: 1, 2: 2, 6: 3}[how["lanes"]]
    how |= {"filters": filters, "seed": seed, "num_replicas": ranks, "pad": False}
    found = [i for rank in range(ranks) for i in ids(ParquetDataset(root, ["id"], rank=rank, **how))]
    assert sorted(found) == expected
    if not how["shuffle"] and ranks == 1:
        assert found == expected


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 rows in 30 row groups of three partitions: ``id`` is sorted, ``label`` random, ``note`` null at times."""
    root = tmp_path_factory.mktemp("filters") / "lake"
    rng = np.random.default_rng(0)
    for day in range(3):
        ids = np.arange(day * 1000, (day + 1) * 1000)
        table = pa.table(
            {
                "id": ids,
                "label": pa.array(rng.integers(0, 10, 1000), pa.int8()),
                "note": pa.array([None if i % 7 == 0 else i for i in ids.tolist()], pa.int32()),
                "text": [f"text {i}" * (i % 5) for i in ids.tolist()],
                "tokens": pa.array([[i, i + 1, 7] for i in ids.tolist()], pa.list_(pa.int32())),
            }
        )
        (root / f"dt=2026-11-0{day + 1}").mkdir(parents=True)
        pq.write_table(table, root / f"dt=2026-11-0{day + 1}" / "a.parquet", row_group_size=100)
    return root


@pytest.fixture(scope="module")
def cache(lake: Path) -> Path:
    path = lake.parent / "cache"
    pqcache.sync(str(lake), path)
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every row group that is opened from here on: its file and its number there.

    It patches the reader, as nothing public says which row groups are looked at when rows are counted.
    """
    found: list[tuple[str, int]] = []
    inner = Files.reading

    def noted(self: Files, group: RowGroup) -> Any:
        found.append((str(group.path.relative_to(self.data.root)), group.row_group))
        return inner(self, group)

    monkeypatch.setattr(Files, "reading", noted)
    return found


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["id"].tolist()]


def test_lists_and_expressions_are_as_pyarrow_takes_them(tmp_path: Path) -> None:
    data = open_local_dataset(write_random(tmp_path, 3))[0]
    tables = []
    for number, path in enumerate(data.index.paths):
        table = pq.read_table(tmp_path / path, partitioning=None)
        tables.append(table.append_column("dt", pa.repeat(data.index.partitions["dt"][number], table.num_rows)))
    everything: list[Any] = [
        [("n", "!=", 2), ("n", "<=", 3)],
        [("x", "=", 0)],
        [("x", "!=", NAN)],
        [[("x", ">=", 0.5), ("ok", "==", True)], [("s", "in", ["a", "b"])]],
        [("s", "not in", ["", None])],
        [[("n", "in", {0, 2})], [("n", "not in", [None])]],
        [("day", ">=", dt.date(2026, 10, 25))],
        [("ts", "<=", TIMES[1]), ("ts", "==", np.datetime64(TIMES[1]))],
        [[("m", "<", Decimal("3.50"))], [("m", "==", Decimal("3.50"))]],
        (pc.field("dt") == "2026-11-01") | (pc.field("id") > 2500),
        pc.field("dt").is_null() | (pc.field("n") > 0),
        pc.field("st", "a") > 0,
        ~(pc.field("x") < 1),
        pc.field("n") - 1 == 1,
        pc.field("n").isin(range(1000)),
        pc.scalar(True),
    ]
    for filters in everything:
        expression = pq.filters_to_expression(filters) if isinstance(filters, list) else filters
        expected = pa.concat_tables(tables).filter(expression)["id"].to_pylist()
        batches = pqcache.Cache(tmp_path).batches(["id"], filters=filters, shuffle=False)
        assert [i for batch in batches for i in batch["id"].to_pylist()] == expected, filters


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ("nope = 1", r"^filters 'nope = 1': no column 'nope'; there are: id, label"),
        ("label = 'noon'", "'noon' is not a value of label"),
        ("label >", "not a complete condition"),
        ([], "give SQL text, a list like"),
        ([("label", "~", 3)], "'~' is not one of =, =="),
        ([("label", "in", 3)], "label in needs a list of values"),
        ([("label", "=", None)], "write filters='label IS NULL'"),
        ([("label", "=")], "not a comparison"),
        ([(3, "=", 1)], "3 is not the name of a column"),
        (pc.field("nope") > 3, "the columns are: id, label"),
        (pc.field("label") + 1, "not a condition"),
        (pc.field(1) > 3, "by name, not by number"),
    ],
)
def test_filters_that_make_no_sense_are_named(cache: Path, filters: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParquetDataset(cache, filters=filters)


def test_counts_are_remembered_beside_the_snapshot(
    lake: Path, tmp_path: Path, opened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pqcache.sync(str(lake), tmp_path / "c")
    where = "label = 3 and dt > '2026-11-01'"
    first = ParquetDataset(tmp_path / "c", columns=["id"], filters=where, batch_size=8)
    assert len(opened) == 20
    assert len({path for path, _ in opened}) == 2
    expected = duck_ids(lake, where)
    assert len(first) == -(-len(expected) // 8)
    opened.clear()
    again = ParquetDataset(tmp_path / "c", columns=["id"], filters=where, batch_size=8)
    unpickled = pickle.loads(pickle.dumps(again))
    assert not opened
    assert sorted(ids(again)) == sorted(ids(unpickled)) == expected
    directory = tmp_path / "c/current" / COUNTS
    (file,) = directory.iterdir()
    for damage in (b"", b"ARROW1", file.read_bytes()[:-100], bytes(reversed(file.read_bytes()))):
        file.write_bytes(damage)
        assert len(ParquetDataset(tmp_path / "c", filters=where, batch_size=8)) == len(first)
        assert pa.ipc.open_file(file).read_all()["selected"].to_pylist()
    table = pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all()
    wrong = table.set_column(1, "selected", pc.add(table["selected"], 1))
    with pa.ipc.new_file(file, wrong.schema) as writer:
        writer.write_table(wrong)
    assert len(ParquetDataset(tmp_path / "c", filters=where, batch_size=8)) == len(first)

    assert pqcache.verify(tmp_path / "c").ok
    opened.clear()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", fail)
        read_only = ParquetDataset(tmp_path / "c", columns=["id"], filters="label = 4", batch_size=8)
    assert len(opened) == 30
    opened.clear()
    with_workers = pickle.loads(pickle.dumps(read_only))
    assert not opened
    assert sorted(ids(with_workers)) == duck_ids(lake, "label = 4")


def test_counts_do_not_disturb_what_a_cache_does(lake: Path, tmp_path: Path) -> None:
    source = tmp_path / "lake"
    for path in lake.rglob("*.parquet"):
        (source / path.parent.name).mkdir(parents=True)
        (source / path.parent.name / path.name).write_bytes(path.read_bytes())
    old = str(pqcache.sync(str(source), tmp_path / "c", keep=1).snapshot)
    ds = ParquetDataset(tmp_path / "c", columns=["id"], filters="label = 1")
    (source / "dt=2026-11-03/a.parquet").unlink()
    (source / "dt=2026-11-04").mkdir()
    pq.write_table(
        pq.read_table(lake / "dt=2026-11-03/a.parquet", partitioning=None), source / "dt=2026-11-04/a.parquet"
    )
    new = pqcache.sync(str(source), tmp_path / "c", keep=1, force=True).snapshot
    assert new != old
    assert not (tmp_path / "c/current" / COUNTS).exists()
    assert (tmp_path / "c/snapshots" / old / COUNTS).exists()  # it is leased
    assert sorted(ids(ds)) == duck_ids(lake, "label = 1")
    del ds

    def only_new() -> bool:
        pqcache.gc(tmp_path / "c", keep=1)
        return os.listdir(tmp_path / "c/snapshots") == [new]

    assert becomes_true(only_new)  # threads that decoded let go of the lease a moment after the last batch
    fresh = ParquetDataset(tmp_path / "c", columns=["id"], filters="label = 1")
    assert sorted(ids(fresh)) == duck_ids(source, "label = 1")
    assert pqcache.verify(tmp_path / "c").ok


def test_a_filter_reads_what_statistics_leave(cache: Path, opened: list[tuple[str, int]]) -> None:
    by_partition = ParquetDataset(cache, columns=["id", "text"], filters="dt = '2026-11-02'", batch_size=64)
    assert not opened
    assert sorted(ids(by_partition)) == list(range(1000, 2000))
    index = pqcache.Cache.open(cache).snapshot().index()
    lines = index.table.select(["file", "row_group", "bytes"]).to_pylist()
    sizes = {(index.paths[line["file"]], line["row_group"]): line["bytes"] for line in lines}
    assert len(opened) == len(set(opened)) == 10
    assert sum(sizes[place] for place in opened) == pytest.approx(sum(sizes.values()) / 3, rel=0.05)
    opened.clear()
    by_range = ParquetDataset(cache, columns=["id", "text"], filters="id >= 1050 and id < 1650", batch_size=64)
    assert sorted(opened) == [("dt=2026-11-02/a.parquet", 0), ("dt=2026-11-02/a.parquet", 6)]
    opened.clear()
    assert sorted(ids(by_range)) == list(range(1050, 1650))
    assert len(set(opened)) == 7
    opened.clear()
    for filters in ([("id", ">=", 1050), ("id", "<", 1650)], (pc.field("id") >= 1050) & (pc.field("id") < 1650)):
        assert len(ParquetDataset(cache, filters=filters)) == 3
        assert {path for path, _ in opened} <= {"dt=2026-11-02/a.parquet"}


def test_nulls_that_a_filter_leaves_out_are_no_error(cache: Path) -> None:
    ds = ParquetDataset(cache, columns=["id", "note"], filters="note is not null")
    for batch in ds:
        assert batch["note"].tolist() == batch["id"].tolist()
    masked = next(iter(ParquetDataset(cache, columns=["id", "note"], filters="note is null", nulls="mask")))
    assert not masked["note_mask"].any()
    with pytest.raises(ParquetError, match="note"):
        list(ParquetDataset(cache, columns=["note"], filters="label = 3"))


def test_rows_belong_to_their_snapshot(lake: Path, tmp_path: Path) -> None:
    (tmp_path / "lake/dt=1").mkdir(parents=True)
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "lake/dt=1/a.parquet")
    old = str(pqcache.sync(str(tmp_path / "lake"), tmp_path / "c").snapshot)
    chosen = SelectedRows.of([0, 0], [3, 4], old)
    (tmp_path / "lake/dt=0").mkdir()
    pq.write_table(pa.table({"id": range(50, 60)}), tmp_path / "lake/dt=0/a.parquet")
    pqcache.sync(str(tmp_path / "lake"), tmp_path / "c")
    ds = ParquetDataset(tmp_path / "c", columns=["id"], rows=chosen)
    assert ds.snapshot == old
    assert sorted(ids(ds)) == [3, 4]


@pytest.mark.parametrize(
    ("groups", "offsets", "rows", "message"),
    [
        ([1, 0], [0, 1, 2], [3, 4], "groups must be ascending"),
        ([0, 1], [0, 1], [3, 4], "one item more"),
        ([0], [0, 2], [3, 3], "must be ascending"),
        ([0], [0, 1], [-1], "must be ascending"),
        ([0.5], [0, 1], [1], "integers"),
        ([0], [0, 1], [100], "row group 0 has 100 rows, and no row 100"),
        ([30], [0, 1], [1], "no row group 30"),
    ],
)
def test_rows_that_make_no_sense(cache: Path, groups: Any, offsets: Any, rows: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParquetDataset(cache, rows=SelectedRows(np.array(groups), np.array(offsets), np.array(rows)))
    with pytest.raises(UsageError, match="give SelectedRows, as returned by Cache"):
        ParquetDataset(cache, rows=[1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "rows", "message"),
    [
        ([0], [0, 1], "1 groups and 2 rows make no pairs"),
        ([0.5], [1], "of integers"),
        (0, 1, "one-dimensional"),
        ([2**63], [1], "below"),
    ],
)
def test_pairs_that_make_no_sense(groups: Any, rows: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SelectedRows.of(groups, rows)


def test_few_rows_do_not_keep_their_row_group_in_memory(tmp_path: Path) -> None:
    image = [bytes([i % 256]) * 10_000 for i in range(1000)]
    pq.write_table(pa.table({"id": range(1000), "image": image}), tmp_path / "a.parquet")
    plan = make_read_plan(open_local_dataset(tmp_path)[0], ["image"], RowOptions(filters="id in (3, 700)"))
    held = RowGroups(plan).load(0, 0, 2, np.array([1, 0]))
    assert isinstance(held, Held)
    ((column,),) = held.slices(0, 2)
    assert 20_000 <= column.values.get_total_buffer_size() < 30_000
    assert column.values.to_pylist() == [image[700], image[3]]


def test_dense_columns_and_drifting_files(lake: Path, tmp_path: Path) -> None:
    pqcache.sync(str(lake), tmp_path / "c")
    pqcache.repartition(tmp_path / "c", row_group_size=200_000, dense=["tokens"])
    stored = pqcache.Cache.open(tmp_path / "c").snapshot().index().schema.field("tokens")
    assert pa.types.is_fixed_size_binary(stored.type)
    ds = ParquetDataset(tmp_path / "c", columns=["id", "tokens"], filters="label = 2 and tokens is not null")
    seen: dict[int, list[int]] = {}
    for batch in ds:
        seen.update(zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True))
    assert sorted(seen) == duck_ids(lake, "label = 2")
    assert all(tokens == [i, i + 1, 7] for i, tokens in seen.items())
    first = ParquetDataset(tmp_path / "c", columns=["id"], filters=pc.list_element(pc.field("tokens"), 0) < 42)
    assert sorted(ids(first)) == list(range(42))

    drifted = tmp_path / "drifted"
    drifted.mkdir()
    pq.write_table(pa.table({"id": [0, 1], "n": pa.array([1, 2], pa.int32())}), drifted / "a.parquet")
    pq.write_table(pa.table({"n": pa.array([1, 2**40], pa.int64()), "id": [2, 3]}), drifted / "b.parquet")
    pq.write_table(pa.table({"id": [4, 5], "s": ["x", "y"]}), drifted / "c.parquet")
    for where, expected in {
        "n > 1": [1, 3],
        "n is null": [4, 5],
        "not (n = 1)": [1, 3],
        "s = 'x' or n = 1": [0, 2, 4],
        f"n = {2**40}": [3],
    }.items():
        assert sorted(ids(ParquetDataset(drifted, columns=["id"], filters=where))) == expected


def test_int96_and_the_paths_value(tmp_path: Path) -> None:
    (tmp_path / "dt=2").mkdir()
    table = pa.table({"id": range(4), "ts": pa.array(TIMES, pa.timestamp("ns")), "dt": [1, 1, 1, 1]})
    pq.write_table(table, tmp_path / "dt=2/a.parquet", use_deprecated_int96_timestamps=True)
    for where in ("ts > '2026-10-25 01:30:00.000001'", "ts <= '2026-10-25 02:00:00' and dt = 2", "dt = 1"):
        expected = duck_ids(tmp_path, where.replace("dt = 2", "true").replace("dt = 1", "false"))
        assert sorted(ids(ParquetDataset(tmp_path, columns=["id"], filters=where))) == expected
    assert not (tmp_path / "_pqcache").exists(), "counts are not stored in a directory of somebody else's"


def write_extensions(path: Path) -> None:
    """Write six rows with JSON and UUIDs, also inside structs and lists as a VARIANT has them."""
    texts = pa.array([f'{{"a": {i}}}' for i in range(6)])
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes([i]) * 16 for i in range(6)], pa.binary(16)))
    table = pa.table(
        {
            "id": list(range(6)),
            "json": pa.ExtensionArray.from_storage(pa.json_(), texts),
            "uuid": uuids,
            "variant": pa.StructArray.from_arrays([texts.cast(pa.binary()), uuids], ["metadata", "typed_value"]),
            "uuids": pa.ListArray.from_arrays(pa.array(range(7), pa.int32()), uuids),
        }
    )
    path.parent.mkdir(parents=True)
    pq.write_table(table, path, row_group_size=4)


def test_filters_of_and_beside_extension_types(tmp_path: Path) -> None:
    write_extensions(tmp_path / "source/dt=1/a.parquet")
    for filters, expected in (
        ("id >= 3", [3, 4, 5]),
        (pc.field("id") >= 3, [3, 4, 5]),
        ([("json", "==", '{"a": 4}')], [4]),
        (pc.field("json") == '{"a": 4}', [4]),
        ("variant.typed_value is not null and dt = 1 and id < 2", [0, 1]),
        ("json like '%4%' or id = 1", [1, 4]),
    ):
        dataset = ParquetDataset(tmp_path / "source", columns=["id"], filters=filters, shuffle=False)
        assert ids(dataset) == expected, filters
    pqcache.sync(tmp_path / "source", tmp_path / "cache", where="json like '%4%' or id = 1")
    (batch,) = pqcache.Cache.open(tmp_path / "cache").batches(shuffle=False)
    assert batch["id"].to_pylist() == [1, 4]
    assert batch.schema.field("json").type == pa.json_()
