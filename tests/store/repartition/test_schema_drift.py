"""Partitions whose schemas drifted apart come out as one table, with every value, or are refused by name."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.parquet.dense import Dense, with_dense_columns
from pqcache.parquet.schema import SPARK
from pqcache.torch import ParquetDataset
from tests.datasets import files_of

LIMIT = 16 << 10
ROWS = 3_000


def write_table(root: Path, *tables: pa.Table, **options: Any) -> Path:
    """Write each table as a partition of its own."""
    for number, table in enumerate(tables):
        directory = root / f"day={number}"
        directory.mkdir(parents=True)
        pq.write_table(table, directory / "part-0.parquet", row_group_size=500, **options)
    return root


def rows_of(root: Path, columns: str = "*") -> list[tuple[Any, ...]]:
    """Return every row as DuckDB reads it, each file under its own schema, in the order of the rows."""
    rows = []
    for path in files_of(root):
        rows += duckdb.sql(f"select {columns} from read_parquet('{root / path}', hive_partitioning = true)").fetchall()
    return rows


def schemas(root: Path) -> list[pa.Schema]:
    return [pq.read_schema(root / path).remove_metadata() for path in files_of(root)]


D = Decimal
DRIFTS: list[tuple[Any, ...]] = [
    (pa.int32(), pa.int64(), [1, None], [2**40, None], pa.int64()),
    (pa.int64(), pa.int32(), [2**40], [1], pa.int64()),
    (pa.float32(), pa.float64(), [0.5, float("inf")], [0.1], pa.float64()),
    (pa.int32(), pa.float64(), [2**31 - 1, -(2**31), None], [0.1], pa.float64()),
    (pa.float64(), pa.uint32(), [0.25], [2**32 - 1], pa.float64()),
    (pa.int16(), pa.float32(), [-(2**15), 2**15 - 1], [0.5], pa.float32()),
    (pa.float32(), pa.int32(), [0.5], [2**31 - 1], pa.float64()),
    (pa.null(), pa.string(), [None], ["", "x", None], pa.string()),
    (pa.list_(pa.int32()), pa.null(), [[1, None], [], None], [None], pa.list_(pa.field("element", pa.int32()))),
    (pa.decimal128(5, 2), pa.decimal128(9, 4), [D("123.45")], [D("12345.6789")], pa.decimal128(9, 4)),
    (pa.string(), pa.large_string(), ["x", None], ["y", ""], pa.large_string()),
    (pa.timestamp("ms"), pa.timestamp("us"), [datetime.datetime(2024, 1, 1)], [None], pa.timestamp("us")),
]


def drifted(root: Path) -> Path:
    """Write three partitions with a column for each drift, and one more that the first lacks."""
    tables = []
    for number in range(3):
        columns: dict[str, Any] = {"id": range(ROWS)}
        for drift, (one, other, first, second, _) in enumerate(DRIFTS):
            kind, values = (other, second) if number == 1 else (one, first)
            columns[f"v{drift}"] = pa.array((values * ROWS)[:ROWS], kind)
        if number:
            columns["late"] = pa.array(["x", None, ""] * (ROWS // 3))
        tables.append(pa.table(columns).select([*reversed(columns)] if number == 2 else [*columns]))
    return write_table(root, *tables)


UNION = "from read_parquet('{}/**/*.parquet', union_by_name = true, hive_partitioning = true) order by day, id"


def test_partitions_get_one_schema(tmp_path: Path) -> None:
    source = drifted(tmp_path / "in")
    pqcache.repartition(source, tmp_path / "out", row_group_size=LIMIT)
    found = schemas(tmp_path / "out")
    assert all(schema.equals(found[0], check_metadata=True) for schema in found)
    assert found[0].names == ["id", *(f"v{drift}" for drift in range(len(DRIFTS))), "late"]
    assert [found[0].field(f"v{drift}").type for drift in range(len(DRIFTS))] == [drift[-1] for drift in DRIFTS]
    for name in found[0].names[:-1]:
        assert rows_of(tmp_path / "out", f"{name}, day") == rows_of(source, f"{name}, day"), name
    before, after = (duckdb.sql(f"select id, late, day {UNION.format(root)}") for root in (source, tmp_path / "out"))
    assert after.fetchall() == before.fetchall()
    assert ds.dataset(tmp_path / "out", partitioning="hive").to_table().num_rows == 3 * ROWS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array(["x"])),
        (pa.array([D("0.5")]), pa.array([0.5])),
        (pa.array([0], pa.timestamp("us")), pa.array([0], pa.timestamp("us", "UTC"))),
    ],
    ids=str,
)
def test_what_does_not_mix_is_refused_by_file_and_type(tmp_path: Path, one: pa.Array, other: pa.Array) -> None:
    source = write_table(tmp_path / "in", pa.table({"v": one}), pa.table({"w": [1]}), pa.table({"v": other}))
    for dry_run in (True, False):
        with pytest.raises(pqcache.ParquetError) as caught:
            pqcache.repartition(source, tmp_path / "out", dry_run=dry_run)
        text = str(caught.value)
        for part in ("day=0/part-0.parquet", "day=2/part-0.parquet", "column 'v'", str(one.type), str(other.type)):
            assert part in text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_files_that_fit_are_still_linked(tmp_path: Path) -> None:
    """Key-values, and field metadata, may differ from partition to partition."""
    tables = [
        pa.table({"v": pa.array(range(10), pa.int32())}).replace_schema_metadata({"day": str(number)})
        for number in range(2)
    ]
    source = write_table(tmp_path / "in", *tables, pa.table({"v": pa.array(range(10), pa.int64())}))
    pqcache.repartition(source, tmp_path / "same", row_group_size=LIMIT)
    (tmp_path / "in" / "day=2" / "part-0.parquet").unlink()
    pqcache.repartition(source, tmp_path / "linked", row_group_size=LIMIT)
    for number in range(2):
        path = f"day={number}/part-0.parquet"
        assert (tmp_path / "linked" / path).stat().st_ino == (source / path).stat().st_ino
    for number, path in enumerate(files_of(tmp_path / "same")[:2]):
        assert pq.read_schema(tmp_path / "same" / path).metadata == {b"day": str(number).encode()}
        assert pq.read_schema(tmp_path / "same" / path).field("v").type == pa.int64()


def test_sparks_own_schema_goes_where_it_is_no_longer_true(tmp_path: Path) -> None:
    """Spark believes it rather than the file."""
    spark = {SPARK: b'{"type":"struct","fields":[]}', b"mine": b"1"}
    tables = [pa.table({"v": pa.array([1], kind)}).replace_schema_metadata(spark) for kind in (pa.int32(), pa.int64())]
    source = write_table(tmp_path / "in", *tables, compression="gzip")
    pqcache.repartition(source, tmp_path / "out", row_group_size=LIMIT, compression="zstd")
    found = [pq.read_schema(tmp_path / "out" / path).metadata for path in files_of(tmp_path / "out")]
    assert found == [{b"mine": b"1"}, spark]


def stamps(*values: datetime.datetime | None, ns: int = 0) -> pa.Array:
    epoch = datetime.datetime(1970, 1, 1)
    numbers = [None if v is None else (v - epoch) // datetime.timedelta(microseconds=1) for v in values]
    if ns:
        return pa.array([None if n is None else n * 1_000 + ns for n in numbers], pa.timestamp("ns"))
    return pa.array(numbers, pa.timestamp("us"))


def test_a_changed_schema_does_everything_again(tmp_path: Path) -> None:
    """What an earlier run has finished under another schema is not kept."""
    source = write_table(tmp_path / "in", *(pa.table({"v": pa.array(range(2_000), pa.int32())}),) * 2)
    last = source / "day=1" / "part-0.parquet"
    data = bytearray(last.read_bytes())
    good = bytes(data)
    data[4:24] = b"\xff" * 20  # the first page header
    last.write_bytes(data)
    with pytest.raises(pqcache.ParquetError):
        pqcache.repartition(source, tmp_path / "out", row_group_size=LIMIT, compression="zstd", jobs=1)
    last.write_bytes(good)
    (source / "day=2").mkdir()
    pq.write_table(pa.table({"v": pa.array([2**40])}), source / "day=2" / "part-0.parquet")
    report = pqcache.repartition(source, tmp_path / "out", row_group_size=LIMIT, compression="zstd")
    assert report.kept == 0
    assert {schema.field("v").type for schema in schemas(tmp_path / "out")} == {pa.int64()}
    assert rows_of(tmp_path / "out") == rows_of(source)


# ---- a cache in place


def add_day(source: Path, number: int, *tables: pa.Table) -> None:
    directory = source / f"day={number}"
    directory.mkdir()
    for file, table in enumerate(tables):
        pq.write_table(table, directory / f"part-{file}.parquet", row_group_size=500)


def numbers(kind: pa.DataType, first: int = 0) -> pa.Table:
    values = np.random.default_rng(first).integers(0, 1 << 15, ROWS)
    return pa.table({"id": range(first, first + ROWS), "v": pa.array(values.tolist(), kind)})


def inodes(cache: Path) -> dict[str, int]:
    return {path: (cache / "current" / path).stat().st_ino for path in files_of(cache / "current")}


def assert_one_table(cache: Path, source: Path, columns: str = "*") -> pa.Schema:
    """Every reader sees one table with every value: file by file, as a whole, and by the index."""
    found = schemas(cache / "current")
    assert all(schema.equals(found[0]) for schema in found)
    assert rows_of(cache / "current", columns) == rows_of(source, columns)
    index = pqcache.Cache.open(cache).snapshot().index()
    assert index.uniform
    assert index.data_schema.equals(found[0])
    assert pqcache.verify(cache, deep=True).ok
    return found[0]


@pytest.mark.parametrize("as_it_comes", [False, True], ids=["repartition", "sync"])
def test_a_cache_in_place_gets_one_schema(tmp_path: Path, as_it_comes: bool) -> None:
    source, cache = drifted(tmp_path / "in"), tmp_path / "cache"
    if as_it_comes:
        pqcache.sync(str(source), cache, row_group_size=LIMIT)
    else:
        pqcache.sync(str(source), cache)
        pqcache.repartition(cache, row_group_size=LIMIT)
    found = assert_one_table(cache, source, "id, v0, v4, v8, day")
    assert [found.field(f"v{drift}").type for drift in range(len(DRIFTS))] == [drift[-1] for drift in DRIFTS]
    assert pqcache.repartition(cache, row_group_size=LIMIT).rewritten == 0
    assert not pqcache.sync(cache).published


def test_a_night_on_which_a_column_becomes_wider(tmp_path: Path) -> None:
    source, cache = write_table(tmp_path / "in", numbers(pa.int32()), numbers(pa.int32())), tmp_path / "cache"
    pqcache.sync(str(source), cache, row_group_size=LIMIT)
    before = inodes(cache)
    add_day(source, 2, numbers(pa.int16()))  # narrower: it alone is written, as the table is
    report = pqcache.sync(cache)
    assert (report.added, report.rewritten) == (1, 1)
    assert inodes(cache).items() > before.items()
    assert assert_one_table(cache, source).field("v").type == pa.int32()

    add_day(source, 3, numbers(pa.int64()).append_column("w", pa.array(["x"] * ROWS)))
    events: list[Any] = []
    report = pqcache.sync(cache, on_event=events.append)
    assert (report.added, report.fetched_bytes) == (1, (source / "day=3" / "part-0.parquet").stat().st_size)
    assert report.rewritten == 4
    assert not inodes(cache).items() & before.items()
    found = assert_one_table(cache, source, "id, v, day")
    assert (found.names, found.field("v").type) == (["id", "v", "w"], pa.int64())
    assert [event.message for event in events if isinstance(event, pqcache.events.Warned)] == [
        f"{source}: schemas differ; 3 partition directories rewritten with the one that holds them all"
    ]
    assert not pqcache.sync(cache).published


@pytest.mark.parametrize("first", [0, 10])
def test_items_of_lists_that_have_other_names(tmp_path: Path, first: int) -> None:
    numbers = np.random.default_rng(1).integers(0, 100, 40_000) * 1_000_000_007
    values = numbers.reshape(-1, 4).tolist()
    (tmp_path / "source").mkdir()
    for name, some in (("item", values[:first]), ("element", values[first:])):
        table = pa.table({"v": pa.array(some, pa.list_(pa.field(name, pa.int64())))})
        path = tmp_path / "source" / f"{len(some):05d}.parquet"
        pq.write_table(table, path, use_compliant_nested_type=False)
    pqcache.repartition(tmp_path / "source", tmp_path / "out", row_group_size=8192, compression="zstd")
    (path,) = (tmp_path / "out").glob("*.parquet")
    with pq.ParquetFile(path) as file:
        chunks = [file.metadata.row_group(number).column(0) for number in range(file.metadata.num_row_groups)]
        assert len(chunks) > 2
        assert {(chunk.path_in_schema, chunk.compression) for chunk in chunks} == {("v.list.item", "ZSTD")}
        assert file.read()["v"].to_pylist() == values
    assert duckdb.sql(f"select v from read_parquet('{path}')").fetchall() == [(value,) for value in values]


def test_files_rewritten_to_one_schema_keep_their_order_and_full_row_groups(tmp_path: Path) -> None:
    source, cache = tmp_path / "in", tmp_path / "cache"
    source.mkdir()
    add_day(source, 0, numbers(pa.int32()), numbers(pa.int32(), ROWS))
    add_day(source, 1, numbers(pa.int32()), numbers(pa.float64(), ROWS))
    pqcache.sync(str(source), cache)
    pqcache.repartition(cache, row_group_size=LIMIT // 4, shuffle=7)
    pqcache.repartition(source, tmp_path / "out", row_group_size=LIMIT // 4, shuffle=7)
    assert rows_of(cache / "current") == rows_of(tmp_path / "out")
    add_day(source, 2, numbers(pa.float64()).append_column("w", pa.array(range(ROWS))))
    pqcache.sync(cache)
    pqcache.repartition(source, tmp_path / "again", row_group_size=LIMIT // 4, shuffle=7)
    assert rows_of(cache / "current") == rows_of(tmp_path / "again")
    for directory in (cache / "current").glob("day=*"):
        footers = [pq.read_metadata(path) for path in sorted(directory.iterdir())]
        groups = [footer.row_group(n) for footer in footers for n in range(footer.num_row_groups)]
        sizes = [sum(group.column(c).total_compressed_size for c in range(3)) for group in groups]
        assert max(sizes) <= LIMIT // 4
        assert min(sizes[:-1]) >= 0.95 * LIMIT // 4


def test_a_refusal_leaves_a_cache_as_it_was(tmp_path: Path) -> None:
    source, cache = write_table(tmp_path / "in", numbers(pa.int64()), numbers(pa.int64())), tmp_path / "cache"
    pqcache.sync(str(source), cache, row_group_size=LIMIT)
    add_day(source, 2, numbers(pa.int64()), numbers(pa.timestamp("us")))
    first, before = pqcache.Cache.open(cache).snapshot().id, inodes(cache)
    config = (cache / "pqcache.toml").read_text()
    with pytest.raises(pqcache.ParquetError) as caught:
        pqcache.sync(cache)
    for part in ("day=2/part-1.parquet", "day=0/part-0", "column 'v'", "int64", "timestamp[us]"):
        assert part in str(caught.value)
    assert all(Path(name).is_file() for name in str(caught.value).partition(": column")[0].split(" and "))
    assert (pqcache.Cache.open(cache).snapshot().id, inodes(cache)) == (first, before)
    assert (cache / "pqcache.toml").read_text() == config
    pq.write_table(numbers(pa.int64()), source / "day=2" / "part-1.parquet")
    pqcache.sync(cache)
    pqcache.repartition(cache, row_group_size=LIMIT)
    assert_one_table(cache, source)


@pytest.mark.parametrize("finer", [0, 7])
def test_int96_has_one_unit_in_a_cache(tmp_path: Path, finer: int) -> None:
    source, cache = tmp_path / "in", tmp_path / "cache"
    early = datetime.datetime(2026, 11, 3, 1, 2, 3, 4)
    columns = [stamps(early, None, *[early] * 3_000), stamps(datetime.datetime(2026, 1, 1), ns=finer)]
    write_table(source, *(pa.table({"at": column}) for column in columns), use_deprecated_int96_timestamps=True)
    pqcache.sync(str(source), cache, row_group_size=LIMIT)
    expected = pa.timestamp("ns" if finer else "us")
    assert_one_table(cache, source, 'count("at")')
    assert {schema.field("at").type for schema in schemas(cache / "current")} == {expected}
    for number, column in enumerate(columns):
        parts = sorted((cache / "current" / f"day={number}").iterdir())
        found = pa.concat_tables([pq.read_table(path, partitioning=None) for path in parts])
        assert found.column("at").to_pylist() == column.cast(expected).to_pylist()
    far = stamps(datetime.datetime(9999, 12, 31))
    (source / "day=2").mkdir()
    pq.write_table(pa.table({"at": far}), source / "day=2" / "part-0.parquet", use_deprecated_int96_timestamps=True)
    if finer:
        with pytest.raises(
            pqcache.ParquetError, match=r"day=2/part-0\.parquet: column 'at' is timestamp\[us\] and holds 9999"
        ):
            pqcache.sync(cache)
    else:
        pqcache.sync(cache)
        assert {schema.field("at").type for schema in schemas(cache / "current")} == {expected}


def test_dense_columns_of_a_cache_and_a_night_of_lists(tmp_path: Path) -> None:
    source, cache = tmp_path / "in", tmp_path / "cache"
    lists = pa.table({"x": pa.array([[n, n + 1] for n in range(10)], pa.list_(pa.int32()))})
    dense = with_dense_columns(lists.schema, {"x": Dense("int32", 2)})
    stored = pa.table([pa.array([bytes(8)] * 10, pa.binary(8))], schema=dense)
    pqcache.sync(str(write_table(source, stored)), cache, row_group_size=LIMIT)
    add_day(source, 1, lists)
    pqcache.sync(cache)
    assert {schema.field("x").type for schema in schemas(cache / "current")} == {pa.binary(8)}
    first = pqcache.Cache.open(cache).snapshot().id
    add_day(source, 2, pa.table({"y": [1]}))
    with pytest.raises(pqcache.ParquetError, match=r"day=2/part-0\.parquet: has no column 'x'"):
        pqcache.sync(cache)
    assert pqcache.Cache.open(cache).snapshot().id == first


_VIEW = pa.list_view(pa.int32())
LIST_VIEWS: list[tuple[pa.DataType, list[Any]]] = [
    (_VIEW, [[1, 2], None, []]),
    (pa.large_list_view(pa.int64()), [[1, 2], None, []]),
    (pa.list_view(pa.string()), [["a"], None, ["b", "c"]]),
    (pa.list_view(pa.string_view()), [["a"], None, ["b"]]),
    (pa.list_view(_VIEW), [[[1], [2]], None, [[]]]),
    (pa.list_(_VIEW), [[[1], [2]], None, []]),
    (pa.struct([("x", _VIEW)]), [{"x": [1]}, None, {"x": []}]),
    (pa.list_view(pa.struct([("a", pa.int32())])), [[{"a": 1}], None, []]),
    (pa.map_(pa.string(), _VIEW), [[("a", [1])], None, []]),
    (pa.list_(_VIEW, 2), [[[1], [2]], None, [[], [3, 4]]]),
]


def test_list_views_are_lists(tmp_path: Path) -> None:
    source, cache, target = tmp_path / "in", tmp_path / "cache", tmp_path / "out"
    columns = {f"x{number}": pa.array(values, kind) for number, (kind, values) in enumerate(LIST_VIEWS)}
    rows = [{"id": row + 1, **{name: values[row].as_py() for name, values in columns.items()}} for row in range(3)]
    source.mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"id": [1, 2, 3], **columns}), source / f"{name}.parquet")
    pqcache.sync(source, cache)
    pqcache.repartition(cache, row_group_size="4KB")
    pqcache.repartition(source, target, row_group_size="4KB", shuffle=1)
    (file,) = target.glob("*.parquet")
    assert sorted(map(str, pq.read_table(file).to_pylist())) == sorted(map(str, rows * 2))
    for where in (source, cache):
        assert len(ParquetDataset(where, ["id"], filters="x0 is not null", batch_size=1)) == 4
    (batch,) = pqcache.Cache(cache).batches(shuffle=False, batch_size=9)
    batch.validate(full=True)
    assert batch.to_pylist() == rows * 2
    pqcache.sync(source, tmp_path / "some", where="id > 1")
    (batch,) = pqcache.Cache(tmp_path / "some").batches(shuffle=False, batch_size=9)
    assert batch.to_pylist() == rows[1:] * 2
