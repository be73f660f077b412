"""Key indexes: a lookup finds what a scan finds, whatever the type, and after whatever nights."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache import cli
from pqcache.dataset import Cache
from pqcache.errors import CacheError, DamagedError, UsageError
from pqcache.events import Event, Started, Warned
from pqcache.store import key_index, key_lookup
from pqcache.store.config import read_config
from pqcache.store.key_lookup import SelectedRows, check_key_index, directory_of, read_key_index
from pqcache.store.snapshot import Snapshot
from tests.damage import flip, truncate
from tests.datasets import write_day, write_shop
from tests.examples import examples
from tests.waiting import becomes_true

UTC = datetime.timezone.utc
DAY = datetime.date(2026, 11, 1)
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.integers(-5, 5)),
    "wide int64": (pa.int64(), st.sampled_from([-(2**63), -1, 0, 7, 2**40, 2**63 - 1]) | st.integers(-9, 9)),
    "uint64": (pa.uint64(), st.sampled_from([0, 1, 2**63, 2**64 - 1])),
    "string": (pa.string(), st.text("abü\0", max_size=3) | st.sampled_from(["x" * 7, "x" * 8, "x" * 9, "x" * 40])),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b", ""])),
    "binary": (pa.binary(), st.binary(max_size=2) | st.sampled_from([b"\0" * 8, b"\0" * 9, b"\0" * 16])),
    "fixed": (pa.binary(5), st.sampled_from([b"abcde", b"abcd\0", b"\0bcde"])),
    "date": (pa.date32(), st.dates(DAY, DAY + datetime.timedelta(9))),
    "time": (pa.time64("us"), st.times(datetime.time(1), datetime.time(1, 0, 0, 9))),
    "timestamp": (pa.timestamp("ms"), st.integers(0, 9).map(lambda n: datetime.datetime(2026, 1, 1 + n))),
    "tz": (pa.timestamp("us", "UTC"), st.integers(0, 9).map(lambda n: datetime.datetime(2026, 1, 1 + n, tzinfo=UTC))),
    "decimal": (pa.decimal128(10, 2), st.integers(-9, 9).map(lambda n: Decimal(n) / 4)),
    "bool": (pa.bool_(), st.booleans()),
}


@contextmanager
def short_runs(bits: int = 5) -> Iterator[None]:
    """Make runs of 2 ** bits rows and decode few rows at once, so that little data has many of both."""
    rows = 1 << bits
    with ExitStack() as stack:
        for module in (key_lookup, key_index):
            stack.enter_context(mock.patch.multiple(module, BITS=bits, ROWS=rows))
        stack.enter_context(mock.patch.multiple(key_index, _MIN_ROWS=rows // 2, _BATCH=rows // 4))
        yield


def write_files(root: Path, files: Sequence[pa.Table], row_group: int) -> Path:
    for number, table in enumerate(files):
        directory = root / f"p={number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, directory / f"part-{number:05d}.parquet", row_group_size=row_group)
    return root


def found_by(cache: Cache, rows: SelectedRows) -> list[tuple[str, int]]:
    """Return the rows as (path, row in the file), which is how scans name them."""
    index = cache.snapshot(rows.snapshot).index()
    before = np.zeros(len(index), np.int64)
    files = index.numbers("file")
    for group in range(1, len(index)):
        before[group] = before[group - 1] + index.rows[group - 1] if files[group] == files[group - 1] else 0
    groups = np.repeat(rows.groups, rows.counts)
    return sorted(
        (index.paths[files[group]], int(before[group] + row)) for group, row in zip(groups, rows.rows, strict=True)
    )


def scanned(cache: Cache, column: str, values: pa.Array) -> list[tuple[str, int]]:
    """Return the same from DuckDB, reading everything."""
    snapshot = cache.snapshot().path
    with duckdb.connect() as connection:
        connection.register("wanted", pa.table({"v": values}))
        rows = connection.execute(
            f"select filename, file_row_number from read_parquet('{snapshot}/**/*.parquet', filename = true, "
            f"file_row_number = true, union_by_name = true) where {column} in (select v from wanted)"
        ).fetchall()
    return sorted((os.path.relpath(path, snapshot), row) for path, row in rows)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[pa.Table], list[Any], pa.DataType]:
    kind, values = TYPES[draw(st.sampled_from(sorted(TYPES)))]
    pool = draw(st.lists(values, min_size=1, max_size=8, unique=True))
    row = st.none() | st.sampled_from(pool)
    files = draw(st.lists(st.lists(row, max_size=60), min_size=1, max_size=4))
    wanted = draw(st.lists(st.sampled_from(pool) | values, max_size=4))
    return [pa.table({"k": pa.array(rows, kind)}) for rows in files], wanted, kind


@settings(max_examples=examples(50), deadline=None)
@given(drawn=tables(), row_group=st.sampled_from([7, 40, 100]), bits=st.sampled_from([4, 6, 21]))
def test_a_lookup_finds_what_a_scan_finds(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[list[pa.Table], list[Any], pa.DataType],
    row_group: int,
    bits: int,
) -> None:
    files, wanted, kind = drawn
    place = tmp_path_factory.mktemp("keys")
    pqcache.sync(str(write_files(place / "lake", files, row_group)), place / "cache")
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    with short_runs(bits):
        pqcache.index(place / "cache", keys=["k"])
        cache = Cache.open(place / "cache")
        rows = cache.lookup("k", pa.array(wanted, kind))
        assert found_by(cache, rows) == scanned(cache, "k", pa.array(wanted, plain))
        assert found_by(cache, cache.lookup("k", wanted)) == found_by(cache, rows)
        (known,) = pqcache.index(place / "cache").keys
        assert known.rows == sum(len(table) for table in files)
        assert sorted(map(str, cache.read(rows)["k"].to_pylist())) == sorted(
            str(v) for table in files for v in table["k"].to_pylist() if v in wanted and v is not None
        )
    shutil.rmtree(place)


def test_types_that_duckdb_lacks(tmp_path: Path) -> None:
    wide = [Decimal(10**60 + n % 7) for n in range(100)]
    columns = {
        "duration": pa.array([n % 5 for n in range(100)], pa.duration("ms")),
        "wide": pa.array(wide, pa.decimal256(70, 0)),
        "large": pa.array([f"v{n % 5}" for n in range(100)], pa.large_string()),
        "a": pa.array([None if n % 9 == 0 else {"b": None if n % 4 == 0 else {"c": n % 5}} for n in range(100)]),
        "a.b.d": pa.array([n % 5 for n in range(100)]),
    }
    pqcache.sync(str(write_files(tmp_path / "lake", [pa.table(columns)] * 2, 40)), tmp_path / "cache")
    with short_runs():
        pqcache.index(tmp_path / "cache", keys=["duration", "wide", "large", "a.b.c", "a.b.d"])
        cache = Cache.open(tmp_path / "cache")
        assert len(cache.lookup("duration", datetime.timedelta(milliseconds=3))) == 40
        assert len(cache.lookup("wide", [wide[0], Decimal(5)])) == 2 * wide.count(wide[0])
        assert len(cache.lookup("large", "v1")) == 40
        assert len(cache.lookup("a.b.d", 1)) == 40
        rows = cache.lookup("a.b.c", 3)
        expected = [n for n in range(100) if n % 9 and n % 4 and n % 5 == 3]
        assert [row for _, row in found_by(cache, rows)] == expected * 2


def test_partition_columns_need_no_key_index(tmp_path: Path) -> None:
    lake = write_shop(tmp_path / "lake", rows=100)
    write_day(lake, "__HIVE_DEFAULT_PARTITION__", rows=10)
    pqcache.sync(str(lake), tmp_path / "cache")
    cache = Cache.open(tmp_path / "cache")
    rows = cache.lookup("dt", ["2026-11-02", "2026-11-05"])
    assert set(cache.read(rows, ["dt"])["dt"].to_pylist()) == {"2026-11-02"}
    assert len(rows) == 300
    assert len(cache.lookup("dt", "nowhere")) == 0


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "lake", days=3, files=2, rows=100)


@pytest.fixture
def cache(tmp_path: Path, lake: Path) -> Cache:
    pqcache.sync(str(lake), tmp_path / "cache", keep=3)
    pqcache.index(tmp_path / "cache", keys=["id", "title"])
    return Cache.open(tmp_path / "cache")


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Such a cache for tests that leave it as it is."""
    place = tmp_path_factory.mktemp("unchanged")
    pqcache.sync(write_shop(place / "lake", days=3, files=2, rows=100), place / "cache")
    pqcache.index(place / "cache", keys=["id", "title"])
    return Cache.open(place / "cache")


def test_values_come_as_anything(unchanged: Cache) -> None:
    cache = unchanged
    expected = [5, 100_005]
    for values in (
        expected,
        tuple(expected),
        set(expected),
        iter(expected),
        np.array(expected, np.uint32),
        pa.array(expected),
        pa.chunked_array([[5], [100_005, 5]]),
        pa.array(expected).dictionary_encode(),
        {5: "a", 100_005: "b"}.keys(),
    ):
        assert sorted(cache.read(cache.lookup("id", values), ["id"])["id"].to_pylist()) == expected
    for value in (5, np.int64(5), pa.scalar(5)):
        assert len(cache.lookup("id", value)) == 1
    assert len(cache.lookup("title", "item 5 of 0")) == len(cache.lookup("title", np.array(["item 5 of 0"]))) == 1
    assert len(cache.lookup("id", [])) == len(cache.lookup("title", [])) == 0


@pytest.mark.parametrize(
    ("column", "values", "kind", "said"),
    [
        ("id", "5", UsageError, "lookup of id: its keys are int64, and these values are string"),
        ("id", [5, None], UsageError, "lookup of id: None cannot be a key"),
        ("id", [5.0], UsageError, "these values are double"),
        ("id", True, UsageError, "these values are bool"),
        ("id", 2**64, UsageError, "lookup of id: "),
        ("id", [5, "a"], UsageError, "not of one type"),
        ("title", b"item 5 of 0", UsageError, "its keys are string, and these values are binary"),
        ("dt", 5, UsageError, "dt is text, and 5 is a number"),
        ("nothing", 5, UsageError, "nothing: there is no such column; choose one of id, title,"),
        ("note", 5, CacheError, "cache --key note'"),
        ("note.x", 5, UsageError, "note.x: there is no 'x' in it, it is int32"),
    ],
)
def test_what_cannot_be_looked_up(unchanged: Cache, column: str, values: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as raised:
        unchanged.lookup(column, values)
    assert said in str(raised.value)


def test_timestamps_with_and_without_a_zone_are_not_mixed(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 11, 1, 12)
    table = pa.table({"at": pa.array([moment], pa.timestamp("us")), "z": pa.array([moment], pa.timestamp("s", "UTC"))})
    pqcache.sync(str(write_files(tmp_path / "lake", [table], 10)), tmp_path / "cache")
    pqcache.index(tmp_path / "cache", keys=["at", "z"])
    cache = Cache.open(tmp_path / "cache")
    aware = moment.replace(tzinfo=UTC)
    assert len(cache.lookup("at", moment)) == len(cache.lookup("z", aware)) == 1
    east = datetime.timezone(datetime.timedelta(hours=9))
    assert len(cache.lookup("z", aware.astimezone(east))) == 1
    for column, value in (("at", aware), ("z", moment), ("at", moment.date()), ("at", "2026-11-01")):
        with pytest.raises(UsageError, match=f"lookup of {column}: its keys are timestamp"):
            cache.lookup(column, value)
    with pytest.raises(UsageError, match="not all values fit timestamp"):
        cache.lookup("z", aware.replace(microsecond=1))


def test_files_whose_types_differ(tmp_path: Path) -> None:
    files = [
        pa.table({"k": pa.array([1, 2, None], pa.int32())}),
        pa.table({"k": pa.array([2, 3, 2**40], pa.int64())}),
        pa.table({"x": [1, 2]}),
    ]
    pqcache.sync(str(write_files(tmp_path / "lake", files, 10)), tmp_path / "cache")
    pqcache.index(tmp_path / "cache", keys=["k"])
    cache = Cache.open(tmp_path / "cache")
    assert cache.read(cache.lookup("k", [2, 2**40]), ["k"])["k"].to_pylist() == [2, 2, 2**40]


class Nights:
    """A lake that changes at random, and a cache that follows it."""

    def __init__(self, place: Path, seed: int) -> None:
        self.lake, self.path = place / "lake", place / "cache"
        self.random = np.random.default_rng(seed)
        self.first = 0
        for number in range(6):
            self.write(number)
        pqcache.sync(str(self.lake), self.path)

    def write(self, number: int) -> None:
        rows = int(self.random.integers(1, 90))
        values = self.random.integers(0, 50, rows)
        table = pa.table({"k": values, "s": [f"key {v}" for v in values], "id": range(self.first, self.first + rows)})
        self.first += rows
        directory = self.lake / f"p={number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, directory / f"part-{number:05d}.parquet", row_group_size=int(self.random.integers(5, 60)))

    def pass_by(self) -> None:
        """Change, remove and add files."""
        there = sorted(self.lake.rglob("*.parquet"))
        for path in self.random.choice(np.array(there, object), min(len(there) - 1, 2), replace=False):
            number = int(path.stem[-5:])
            if self.random.integers(2):
                path.unlink()
            else:
                self.write(number)
        self.write(int(self.random.integers(20)))

    def check(self) -> None:
        cache = Cache.open(self.path)
        for column, wanted in (("k", [3, 7, 60]), ("s", ["key 3", "key 7", "key 60"])):
            found = found_by(cache, cache.lookup(column, wanted))
            assert found == scanned(cache, column, pa.array(wanted))
            check_key_index(directory_of(cache.snapshot().path, column), deep=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2, 3))])
def test_each_night_has_its_key_indexes(tmp_path: Path, seed: int) -> None:
    with short_runs():
        nights = Nights(tmp_path, seed)
        pqcache.index(nights.path, keys=["k", "s"])
        for night in range(6):
            nights.check()
            nights.pass_by()
            pqcache.sync(nights.path, row_group_size=4096 if night == 3 else None, force=True)
        nights.check()
        pqcache.repartition(nights.path, row_group_size=8192)
        nights.check()
        known = read_key_index(directory_of(nights.path / "current", "k"))
        assert len(known.runs) <= 2 + 2 * known.rows // key_lookup.ROWS


def indexed_rows(events: list[Event]) -> list[int]:
    return [event.total for event in events if isinstance(event, Started) and event.phase == "index"]


def test_only_what_is_new_is_read(cache: Cache, lake: Path) -> None:
    with short_runs():
        pqcache.index(cache.path, drop=["id", "title"])
        pqcache.index(cache.path, keys=["id"])
        before = read_key_index(directory_of(cache.path / "current", "id"))
        write_day(lake, "2026-11-09", files=1, rows=50, first=900_000)
        events: list[Event] = []
        pqcache.sync(cache.path, on_event=events.append)
        after = read_key_index(directory_of(cache.path / "current", "id"))
        (rows,) = indexed_rows(events)
        assert 50 <= rows < 50 + key_lookup.ROWS  # and the last run, if it was short
        linked = {run.file for run in before.runs} & {run.file for run in after.runs}
        assert len(linked) >= len(before.runs) - 1
        for name in linked:
            assert (before.directory.resolve() / name).stat().st_nlink == 2
        assert len(cache.lookup("id", [900_003, 3])) == 2


def test_a_night_without_the_column_goes_on(cache: Cache, lake: Path) -> None:
    events: list[Event] = []
    pqcache.sync(cache.path, columns=["id", "price"], on_event=events.append)
    (warning,) = [event.message for event in events if isinstance(event, Warned)]
    assert "title: there is no such column" in warning
    assert len(cache.lookup("id", 5)) == 1
    report = pqcache.index(cache.path)
    assert [(key.column, key.damage is None) for key in report.keys] == [("id", True), ("title", False)]
    assert pqcache.inspect(cache.path).keys == ("id",)
    events.clear()
    pqcache.sync(cache.path, columns=[], on_event=events.append)
    assert indexed_rows(events) == [600, 600]
    assert len(cache.lookup("title", "item 5 of 0")) == 1


def test_rows_belong_to_their_snapshot(cache: Cache, lake: Path) -> None:
    from pqcache.torch import ParquetDataset

    rows = cache.lookup("id", [5, 100_005])
    dataset = ParquetDataset(cache.path, columns=["id"], batch_size=2, rows=rows)
    assert sorted(i for batch in dataset for i in batch["id"].tolist()) == [5, 100_005]
    write_day(lake, "2026-10-01", files=1, rows=50, first=900_000)
    pqcache.sync(cache.path)
    assert cache.read(rows, ["id"])["id"].to_pylist() == [5, 100_005]
    with pytest.raises(UsageError, match=f"differ from those of {rows.snapshot}"):
        ParquetDataset(cache.path / "current", rows=rows)
    del dataset

    def collected() -> bool:
        pqcache.gc(cache.path, keep=1)
        return not (cache.path / "snapshots" / rows.snapshot).exists()

    assert becomes_true(collected)  # threads that decoded let go of the lease a moment after the last batch
    with pytest.raises(CacheError, match=f"{rows.snapshot} was removed"):
        cache.read(rows)
    assert cache.read(cache.lookup("id", [5, 100_005]), ["id"])["id"].to_pylist() == [5, 100_005]
    assert cache.read(cache.lookup("id", -1), ["id", "dt"]).schema.names == ["id", "dt"]
    for wanted in ([5], [-1]):
        with pytest.raises(UsageError, match="no column 'nothing'"):
            cache.read(cache.lookup("id", wanted), ["nothing"])


def test_the_command(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(cache.path)
    assert cli.run(["index", path]) == 0
    lines = [line.partition(" cache: ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["id: int64, 600 rows, 4.7 KB", "title: string, 600 rows, 9.4 KB"]
    assert cli.run(["index", path, "--key", "note", "--key", "id", "--drop", "title", "--json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert (summary["built"], summary["dropped"]) == (["note"], ["title"])
    assert [key["column"] for key in summary["keys"]] == ["id", "note"]
    assert read_config(cache.path).keys == ("id", "note")
    assert cli.run(["index", path, "--drop", "note", "--drop", "id", "-q"]) == 0
    assert cli.run(["index", path]) == 0
    assert (
        capsys.readouterr().out.partition(" cache: ")[2]
        == f"no key index; 'pqcache index {path} --key COLUMN' builds one\n"
    )
    assert "keys" not in (cache.path / "pqcache.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--key", "price"], "--key price: is double, and rounded numbers cannot be keys"),
        (["--key", "tokens"], "--key tokens: is list<element: int32>, and values of this type cannot be keys"),
        (["--key", "dt"], "--key dt: is a partition column"),
        (["--key", "nope"], "nope: there is no such column"),
        (["--drop", "note"], "--drop note: "),
        (["--key", "id", "--drop", "id"], "--drop id: "),
    ],
)
def test_what_the_command_refuses(
    unchanged: Cache, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    before = sorted(unchanged.path.rglob("*"))
    assert cli.run(["index", str(unchanged.path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(unchanged.path.rglob("*")) == before


def run_of(snapshot: Snapshot, column: str) -> Path:
    directory = directory_of(snapshot.path, column)
    return directory / read_key_index(directory).runs[0].file


def test_damage_is_found_and_mended(cache: Cache) -> None:
    title = directory_of(cache.snapshot().path, "title")
    advice = f"'pqcache index {cache.path} --key title' rebuilds"
    damages: dict[str, Callable[[Path], object]] = {
        "run cut": lambda run: truncate(run, 4000),
        "run gone": Path.unlink,
        "run flipped": lambda run: flip(run, 4000),
        "index flipped": lambda _: flip(title / "index.arrow", 700),
        "checksums gone": lambda _: (title / "checksums.json").unlink(),
    }
    for what, damage in damages.items():
        damage(run_of(cache.snapshot(), "title"))
        report = pqcache.verify(cache.path, deep=what == "run flipped")
        assert [(item.path, item.column) for item in report.damage] == [("_pqcache/keys/title", "title")], what
        with pytest.raises(DamagedError, match=f"{advice} that"):
            report.raise_if_not_ok()
        if what in ("run cut", "run gone"):
            with pytest.raises(DamagedError, match=f"{advice} it"):
                cache.lookup("title", "item 5 of 0")
        assert pqcache.index(cache.path, keys=["id", "title"]).built == ("title",), what
        assert not pqcache.verify(cache.path, deep=True).damage, what
        assert len(cache.lookup("title", "item 5 of 0")) == 1


def test_damage_is_mended_by_a_repair_and_does_not_reach_the_next_snapshot(cache: Cache, lake: Path) -> None:
    flip(run_of(cache.snapshot(), "title"), 4000)
    report = pqcache.verify(cache.path, deep=True, repair=True)
    assert report.repaired is not None
    assert report.ok
    assert not pqcache.verify(cache.path, deep=True).damage
    (directory_of(cache.snapshot().path, "title") / "index.arrow").unlink()
    truncate(run_of(cache.snapshot(), "id"), 4000)
    write_day(lake, "2026-11-09", files=1, rows=50, first=900_000)
    pqcache.sync(cache.path)
    assert not pqcache.verify(cache.path, deep=True).damage
    assert len(cache.lookup("title", ["item 5 of 0", "item 900003 of 0"])) == 2
