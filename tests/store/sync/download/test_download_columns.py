"""Columns and filters at the source: what is fetched, and that what is made of it is true to the byte and the row."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet import footer, thrift
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.local import LocalSource
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync.download.download_columns import download_columns
from pqcache.store.sync.download.subset import Subset
from tests.examples import examples
from tests.filters.test_pruning import conditions, tables

SLACK = 64 << 10  # the tail that is read for the footer


class Counting(Source):
    """A local source that counts, and that may be cut short or changed on its way."""

    def __init__(self, root: Path) -> None:
        self.inner = LocalSource(str(root), {})
        self.url = self.inner.url
        self.ranges: list[tuple[int, int]] = []
        self.change: Callable[[int, bytes], bytes] = lambda offset, data: data

    def list(self) -> Iterator[SourceFile]:
        return self.inner.list()

    def stat(self, path: str) -> Identity:
        return self.inner.stat(path)

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        assert length > 0
        assert offset + length <= self.stat(path).size
        self.ranges.append((offset, length))
        for data in self.inner.read(path, offset, length):
            yield self.change(offset, data)
            offset += len(data)

    def close(self) -> None:
        pass

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.ranges)


class Remote:
    """One file at a source, and what is made of it."""

    def __init__(self, root: Path, data: pa.Table | bytes, **options: Any) -> None:
        (root / "source").mkdir(parents=True)
        self.path = root / "source" / "a.parquet"
        if isinstance(data, bytes):
            self.path.write_bytes(data)
        else:
            pq.write_table(data, self.path, **options)
        self.source = Counting(self.path.parent)
        self.target = root / "out.parquet"
        self.received = 0

    @property
    def file(self) -> SourceFile:
        return SourceFile(self.path.name, self.source.stat(self.path.name))

    def fetch(
        self,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        partitions: Mapping[str, pa.Scalar] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> pa.Table:
        def count(more: int) -> None:
            self.received += more

        subset = Subset(None if columns is None else tuple(columns), where, {"": partitions or {}})
        download_columns(self.source, self.file, self.target, subset, count, stopped=stopped)
        assert self.received == self.source.bytes
        assert [path.name for path in self.target.parent.iterdir() if path.is_file()] == [self.target.name]
        return pq.ParquetFile(self.target).read()

    def chunks(self, path: Path, columns: Sequence[str]) -> list[bytes]:
        """The bytes of every chunk of some top-level columns without dots in their names."""
        data = path.read_bytes()
        metadata = pq.read_metadata(path)
        found = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for position in range(group.num_columns):
                column = group.column(position)
                if column.path_in_schema.split(".")[0] in columns:
                    start = column.dictionary_page_offset or column.data_page_offset
                    found.append(data[start : start + column.total_compressed_size])
        return found


def everything(rows: int = 3000) -> pa.Table:
    rng = np.random.default_rng(rows)
    base = dt.datetime(2026, 11, 1, tzinfo=dt.timezone.utc)
    columns = {
        "id": pa.array(range(rows), pa.int64()),
        "noise": pa.array(rng.random(rows)),
        "words": pa.array([[f"w{n % 7}"] * (n % 4) if n % 11 else None for n in range(rows)]),
        "tree": pa.array([{"a": {"b": [n, None]}, "c": str(n % 13)} for n in range(rows)]),
        "pairs": pa.array([[("k", n), ("l", None)][: n % 3] for n in range(rows)], pa.map_(pa.string(), pa.int64())),
        "fixed": pa.array([[n, n + 1] for n in range(rows)], pa.list_(pa.float32(), 2)),
        "kind": pa.array([f"kind {n % 5}" for n in range(rows)]).dictionary_encode(),
        "a.b": pa.array([n % 3 == 0 for n in range(rows)]),
        "when": pa.array([base + dt.timedelta(minutes=n) for n in range(rows)], pa.timestamp("us", "UTC")),
        "price": pa.array([Decimal(n) / 4 if n % 9 else None for n in range(rows)], pa.decimal128(12, 2)),
        "text": pa.array([f"text {n:05d}" for n in range(rows)], pa.large_string()),
        "blob": pa.array([rng.bytes(40) for _ in range(rows)], pa.binary()),
    }
    fields = [pa.field(name, array.type, metadata={"of": name}) for name, array in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields, metadata={"mine": "kept"}))


ALL = everything()
WRITERS = {
    "default": {},
    "v2 zstd": {"data_page_version": "2.0", "compression": "zstd"},
    "page index": {"write_page_index": True, "compression": "none", "write_page_checksum": True},
    "mixed codecs": {"compression": {"id": "gzip", "noise": "lz4", "text": "brotli", "blob": "none"}},
    "no arrow schema": {"store_schema": False, "version": "1.0"},
    "old lists": {"use_compliant_nested_type": False, "use_dictionary": False, "write_statistics": False},
    "int decimals": {"store_decimal_as_integer": True, "column_encoding": {"id": "DELTA_BINARY_PACKED"}},
}
WRITERS["int decimals"]["use_dictionary"] = ["kind"]
SOME = [["id"], ["kind", "tree", "pairs", "words", "a.b"], None]


@pytest.mark.parametrize("columns", SOME, ids=str)
@pytest.mark.parametrize("writer", WRITERS)
def test_columns_are_copied_as_bytes(tmp_path: Path, writer: str, columns: list[str] | None) -> None:
    remote = Remote(tmp_path, ALL, row_group_size=700, **WRITERS[writer])
    table = remote.fetch(columns)
    whole = pq.ParquetFile(remote.path).read()
    names = [name for name in whole.schema.names if columns is None or name in columns]
    assert table.equals(whole.select(names), check_metadata=True)
    assert remote.chunks(remote.target, names) == remote.chunks(remote.path, names)
    metadata, before = pq.read_metadata(remote.target), pq.read_metadata(remote.path)
    assert metadata.created_by == before.created_by
    assert metadata.num_row_groups == before.num_row_groups == 5
    first = metadata.row_group(1).column(0)
    position = before.schema.names.index(metadata.schema.names[0]) if columns == ["id"] else None
    if position is not None:
        assert first.statistics == before.row_group(1).column(position).statistics
        assert metadata.row_group(1).total_byte_size == first.total_uncompressed_size
    assert not first.has_offset_index
    quoted = ", ".join(f'"{name}"' for name in names)
    both = [f"(select {quoted} from '{path}')" for path in (remote.target, remote.path)]
    for one, other in (both, both[::-1]):
        assert duckdb.sql(f"select count(*) from ({one} except all {other})").fetchall() == [(0,)]
    assert len(pd.read_parquet(remote.target)) == ALL.num_rows


def test_near_ranges_are_read_in_one_go(tmp_path: Path) -> None:
    table = pa.table({f"c{n:02d}": np.random.default_rng(n).random(5000) for n in range(40)})
    remote = Remote(tmp_path, table, row_group_size=1000, use_dictionary=False)
    got = remote.fetch([f"c{n:02d}" for n in range(0, 40, 3)])
    assert got.column_names == [f"c{n:02d}" for n in range(0, 40, 3)]
    assert len(remote.source.ranges) == 2  # the tail, and the rest at once
    small = Remote(tmp_path / "small", everything(100))
    small.fetch(["id", "tree"], "id > 50")
    assert small.source.ranges == [(0, small.file.identity.size)]


CONDITIONS = [
    "id >= 650 and id < 2800",
    "noise < 0.5 or id between 1400 and 2099",
    "kind = 'kind 3' and not \"a.b\"",
    "price > 300.25 and \"when\" < '2026-11-02 12:00:00Z'",
    "text like 'text 02%' or text in ('text 00001', 'text 00002')",
    "not (kind in ('kind 1', 'kind 2') or id > 100)",
    "price is null",
    "id < 0",
    "id >= 0",
]


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_are_filtered_as_duckdb_does(tmp_path: Path, writer: str) -> None:
    remote = Remote(tmp_path, ALL, row_group_size=700, **WRITERS[writer])
    whole = pq.ParquetFile(remote.path).read()
    for where in CONDITIONS if writer == "default" else CONDITIONS[::3]:
        table = remote.fetch(["tree", "kind", "pairs", "price", "blob", "a.b"], where)
        sql = where.replace("Z'", "+00'")
        wanted = duckdb.sql(f"select id from '{remote.path}' where {sql} order by id").fetchall()
        expected = whole.take(pa.array([number for (number,) in wanted], pa.int64()))
        expected = expected.select(["tree", "pairs", "kind", "a.b", "price", "blob"])
        assert table.schema.equals(expected.schema, check_metadata=True)
        assert table.to_pylist() == expected.to_pylist(), where
        assert duckdb.sql(f"select count(*) from '{remote.target}'").fetchall() == [(len(wanted),)]
        assert len(pd.read_parquet(remote.target)) == len(wanted)
        elements = footer.schema_of(thrift.decode(footer.read_local_tail(remote.target).footer, "out"), "out")
        before = footer.schema_of(thrift.decode(footer.read_local_tail(remote.path).footer, "in"), "in")
        assert all(element in before for element in elements[1:])


@given(st.data())
@settings(deadline=None, max_examples=examples(50))
def test_any_condition_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    names = ["i8", "i64", "u64", "s", "d", "ok", "day", "ns", "n"]
    names = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    groups = data.draw(st.lists(tables(names, 6), min_size=1, max_size=4))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, groups[0].schema.append(pa.field("row", pa.int64()))) as writer:
        first = 0
        for group in groups:
            rows = pa.array(range(first, first + group.num_rows), pa.int64())
            writer.write_table(group.append_column("row", rows), row_group_size=100)
            first += group.num_rows
    remote = Remote(tmp_path_factory.mktemp("any"), sink.getvalue())
    where = data.draw(conditions(names).filter(lambda text: "\\" not in text))
    got = remote.fetch(["row"], where)
    expected = duckdb.sql(f"select row from '{remote.path}' where {where} order by row").fetchall()
    assert [(row,) for row in got["row"].to_pylist()] == expected
    whole = pq.read_table(remote.path).take(got["row"])
    assert remote.fetch(None, where).to_pylist() == whole.to_pylist()


def test_partition_columns_are_constants(tmp_path: Path) -> None:
    table = pa.table({"id": range(100), "hour": [7] * 100})
    remote = Remote(tmp_path, table, row_group_size=25)
    partitions = {"dt": pa.scalar("2026-11-01"), "hour": pa.scalar(23), "region": pa.scalar(None, pa.string())}
    for where, expected in [
        ("dt = '2026-11-01'", range(100)),
        ("dt > '2026-11-01'", []),
        ("dt like '2026-%' and id < 30", range(30)),
        ("hour = 23 and id in (1, 99)", [1, 99]),
        ("hour = 7 or id = 3", [3]),
        ("region = 'kr' or id >= 50", range(50, 100)),
        ("not region = 'kr'", []),
    ]:
        assert remote.fetch(["id", "dt", "hour"], where, partitions)["id"].to_pylist() == list(expected)
    assert remote.fetch(["id", "dt"], None, partitions).column_names == ["id"]


def test_key_values_are_kept_and_schemas_in_them_cut(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]}, index=pd.Index([7, 8, 9], name="key"))
    table = pa.Table.from_pandas(frame)
    spark = {"type": "struct", "fields": [{"name": name, "type": "long"} for name in table.column_names]}
    name = b"org.apache.spark.sql.parquet.row.metadata"
    table = table.replace_schema_metadata({**table.schema.metadata, name: json.dumps(spark), b"own": b"\xff"})
    remote = Remote(tmp_path, table)
    for where in (None, "a <> 2"):
        remote.fetch(["b"], where)
        before, after = pq.read_metadata(remote.path).metadata, pq.read_metadata(remote.target).metadata
        assert {key: value for key, value in after.items() if key not in (name, b"ARROW:schema")} == {
            key: value for key, value in before.items() if key not in (name, b"ARROW:schema")
        }
        assert [field["name"] for field in json.loads(after[name])["fields"]] == ["b"]
        inner = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(after[b"ARROW:schema"])))
        assert inner.names == ["b"]
        assert list(pd.read_parquet(remote.target)["b"]) == (["x", "y", "z"] if where is None else ["x", "z"])
    remote.fetch(["a", "key"])
    assert list(pd.read_parquet(remote.target).index) == [7, 8, 9]


def test_sorting_columns_hold_up_to_the_first_that_is_gone(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 1], "b": [1, 2], "c": [1, 2]})
    order = [pq.SortingColumn(2), pq.SortingColumn(1, descending=True), pq.SortingColumn(0)]
    remote = Remote(tmp_path, table, sorting_columns=order)
    for columns, expected in [(["b", "c"], [(1, False), (0, True)]), (["a", "c"], [(1, False)]), (["a", "b"], [])]:
        remote.fetch(columns)
        found = pq.read_metadata(remote.target).row_group(0).sorting_columns
        assert [(column.column_index, column.descending) for column in found] == expected


def test_int96_times_beyond_nanoseconds_are_compared(tmp_path: Path) -> None:
    times = [dt.datetime(1, 1, 1), dt.datetime(2026, 11, 1), dt.datetime(9999, 12, 31, 23)]
    table = pa.table({"t": pa.array(times, pa.timestamp("us")), "n": [1, 2, 3]})
    remote = Remote(tmp_path, table, use_deprecated_int96_timestamps=True)
    assert remote.fetch(["n"], "t > '9000-01-01 00:00:00'")["n"].to_pylist() == [3]
    assert remote.fetch(["n"], "t < '2026-01-01 00:00:00'")["n"].to_pylist() == [1]
    assert remote.fetch(None, "n >= 2")["t"].to_pylist() == times[1:]


def test_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    rows = 800_000
    table = pa.table({"x": np.random.default_rng(1).random(rows), "y": range(rows)})
    remote = Remote(tmp_path, table, row_group_size=100_000, use_dictionary=False, compression="none")
    for where in (None, "y > 100"):
        remote.source.ranges.clear()
        remote.received = 0
        calls = iter(range(1000))
        with pytest.raises(KeyboardInterrupt):
            remote.fetch(["x"], where, stopped=lambda calls=calls: next(calls) == 4)  # type: ignore[misc]
        before = remote.received
        remote.received = 0
        remote.source.ranges.clear()
        got = remote.fetch(["x"], where)
        assert got.num_rows == rows - (101 if where else 0)
        assert got["x"].to_pylist() == table["x"].to_pylist()[-got.num_rows :]
        columns = 1 if where is None else 2
        assert before > 1 << 20
        assert remote.received <= columns * (8 * rows + 100_000) - before + 3 * SLACK


def test_another_version_never_mixes_with_what_was_there(tmp_path: Path) -> None:
    remote = Remote(tmp_path, pa.table({"x": np.arange(2_000_000)}), use_dictionary=False, compression="none")
    with pytest.raises(KeyboardInterrupt):
        remote.fetch(["x"], stopped=lambda: len(remote.source.ranges) > 1)
    [left] = [path for path in tmp_path.iterdir() if path.is_file()]
    newer = pa.table({"x": np.arange(2_000_000) + 1})
    pq.write_table(newer, remote.path, use_dictionary=False, compression="none")
    remote.received = 0
    remote.source.ranges.clear()
    download_columns(remote.source, remote.file, remote.target, Subset(("x",)), lambda count: None)
    assert pq.read_table(remote.target).equals(newer)
    assert left.exists()  # the caller's to remove: it knows which versions are still wanted


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    remote = Remote(tmp_path, pa.table({"a.b": [1], "c": [2]}))
    for columns, where, message in [
        (["c", "d"], None, "a.parquet: no column 'd'; there are: a.b, c"),
        ([], None, "none of its columns is wanted"),
        (None, "d = 1", "a.parquet: --where 'd = 1': no column 'd'; there are: a.b, c"),
        (None, "c = 'x'", "a.parquet: --where \"c = 'x'\": 'x' is not a value of c"),
        (None, "c.x = 1", "no column 'c.x'"),
    ]:
        with pytest.raises(UsageError) as caught:
            remote.fetch(columns, where)
        assert message in str(caught.value)
    assert remote.fetch(None, "a.b = 1").num_rows == 1


def test_damaged_files_are_named(tmp_path: Path) -> None:
    sink = io.BytesIO()
    pq.write_table(everything(50), sink, write_page_checksum=True)
    whole = sink.getvalue()
    length = int.from_bytes(whole[-8:-4], "little")
    for number, data in enumerate([b"", b"PAR1", b"x" * 100, whole[:-1], whole[:-8] + b"\xff\xff\xff\x7fPAR1"]):
        with pytest.raises(ParquetError, match=r"a\.parquet"):
            Remote(tmp_path / str(number), data).fetch(["id"])
    rng = np.random.default_rng(0)
    for number in range(40):
        data = bytearray(whole)
        data[len(whole) - 8 - int(rng.integers(1, length))] ^= 1 << int(rng.integers(8))
        remote = Remote(tmp_path / f"flip{number}", bytes(data))
        where = None if number % 2 else "id > 20"
        with contextlib.suppress(ParquetError, UsageError):  # a flipped bit may well be in a column's name
            subset = Subset(("id", "tree"), where)
            download_columns(remote.source, remote.file, remote.target, subset, lambda count: None)
    middle = bytearray(whole)
    middle[200] ^= 1
    with pytest.raises(ParquetError, match=r"a\.parquet: cannot be decoded"):
        Remote(tmp_path / "page", bytes(middle)).fetch(["id"], "id = 20")


@pytest.mark.deep
@pytest.mark.parametrize("where", [None, "x > 0.5"])
def test_memory_is_bounded(tmp_path: Path, where: str | None) -> None:
    rng = np.random.default_rng(0)
    rows = 8 << 20  # 64 MiB a column, all in one row group
    table = pa.table({name: rng.random(rows) for name in "xyz"})
    remote = Remote(tmp_path, table, use_dictionary=False, compression="none", row_group_size=rows)
    del table
    pa.default_memory_pool().release_unused()
    peak, done = 0, threading.Event()
    process = psutil.Process()
    start = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    download_columns(remote.source, remote.file, remote.target, Subset(("x", "y"), where), lambda count: None)
    done.set()
    thread.join()
    # 64 MiB of rows are kept and encoded, which takes 64 again; read, filtered and written at once they take 340
    assert peak - start < (220 << 20 if where else 30 << 20)
