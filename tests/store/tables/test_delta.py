"""Delta tables as sources: after each sync a cache has the rows that deltalake reads of the same version."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

import pqcache
from pqcache.errors import SourceError, SourceIncomplete, SourceNotFound, UsageError
from pqcache.events import Event, Retried, Started
from pqcache.store.tables.base import OpenOptions
from pqcache.store.tables.open_table import open_table
from pqcache.torch import ParquetDataset
from tests.delta_tables import add, commit, field, held, in_order, judged, metadata, protocol
from tests.forked_commands import run_pqcache, true_in_child
from tests.remote import make_remote


def rows(start: int, stop: int, **more: pa.Array) -> pa.Table:
    """Rows with the ids from ``start`` to ``stop``, in three partitions."""
    ids = range(start, stop)
    return pa.table({"id": pa.array(ids, pa.int64()), "dt": pa.array([f"2026-11-0{i % 3 + 1}" for i in ids]), **more})


def append(table: Path, start: int, stop: int, **options: Any) -> None:
    write_deltalake(str(table), rows(start, stop), mode="append", partition_by=["dt"], **options)


def vacuum(table: Path) -> None:
    DeltaTable(str(table)).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of three versions: 0 and 1 are appended, 2 deletes some."""
    place = tmp_path / "lake" / "shop"
    append(place, 0, 9)
    append(place, 9, 18)
    DeltaTable(str(place)).delete("id < 2")
    return place


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_live_files_are_fetched_once_and_removed_ones_are_dropped(table: Path, cache: Path) -> None:
    report = pqcache.sync(table, cache)
    assert (report.version, report.rows, report.added) == ("2", 16, 6)
    assert held(cache) == judged(table)
    assert not pqcache.sync(cache).published
    DeltaTable(str(table)).optimize.compact()
    report = pqcache.sync(cache)
    assert (report.version, report.added, report.removed) == ("3", 3, 6)
    assert held(cache) == judged(table)
    vacuum(table)
    assert not pqcache.sync(cache).published, "a commit that changes no file"
    assert pqcache.verify(cache, deep=True, source=True).ok
    table.rename(table.with_name("moved"))
    report = pqcache.sync(table.with_name("moved"), cache, new_source=True)
    assert (report.fetched_bytes, report.unchanged) == (0, 3)


def test_versions_and_times(table: Path, cache: Path, tmp_path: Path) -> None:
    for number in range(3):
        os.utime(table / "_delta_log" / f"{number:020}.json", (1000 * (number + 1),) * 2)
    report = pqcache.sync(table, cache, version=0)
    assert (report.version, held(cache)) == ("0", judged(table, 0))
    assert pqcache.sync(cache).version == "0", "it is remembered"
    assert pqcache.inspect(cache).version == "Delta version 0 of 1970-01-01T00:16:40.000+00:00"
    for time, version in (("1970-01-01T00:16:40Z", 0), ("1970-01-01T00:49:59+00:00", 1), ("2026-01-01", 2)):
        assert pqcache.sync(cache, version="", as_of=time, force=True).version == str(version)
        assert held(cache) == judged(table, version)
    for options, text in (
        ({"version": 3}, r"--version 3: .* it has 0 of 1970-01-01T00:16:40.000\+00:00 to 2 of 1970-01-01T00:50:00"),
        ({"as_of": "1970-01-01T00:16:39"}, r"--as-of 1970-01-01T00:16:39: .* it has 0 of 1970-01-01T00:16:40"),
        ({"version": 20261101040000}, r"--version 20261101040000: .* to 2 of 1970-01-01T00:50:00"),
        ({"version": "9" * 5000}, r"--version 9+: .* to 2 of 1970-01-01T00:50:00"),
        ({"version": -1}, r"--version -1: .* to 2 of 1970-01-01T00:50:00"),
        ({"version": "x"}, "--version x: invalid version of a Delta table: expected a number; the newest is 2"),
        ({"as_of": "soon"}, "--as-of soon: is not an ISO 8601 time"),
    ):
        with pytest.raises((SourceNotFound, UsageError), match=text):
            pqcache.sync(table, tmp_path / "other", **options)  # type: ignore[arg-type]
    report = pqcache.sync(cache, as_of="")
    assert report.version == "2"


def test_a_log_that_was_cleaned_up_has_its_last_versions_only(table: Path, cache: Path) -> None:
    DeltaTable(str(table)).create_checkpoint()
    append(table, 18, 20)
    for number in range(3):
        (table / "_delta_log" / f"{number:020}.json").unlink()
    assert pqcache.sync(table, cache).version == "3"
    assert held(cache) == judged(table)
    assert pqcache.sync(cache, version=2).version == "2"
    with pytest.raises(SourceNotFound, match=r"does not have that version: it has 2 of .* to 3 of "):
        pqcache.sync(cache, version=1)


def test_times_in_commits_count_more_than_those_of_files(tmp_path: Path, cache: Path) -> None:
    table = tmp_path / "t"
    properties = {"enableInCommitTimestamps": "true"}
    for version in range(3):
        info = {"commitInfo": {"inCommitTimestamp": 10_000 * (version + 1), "operation": "WRITE"}}
        first = [protocol("v2Checkpoint"), metadata([field("a", "long")], **properties)] if version == 0 else []
        commit(table, version, info, *first, add(table, f"{version}.parquet", pa.table({"a": [version]})))
    assert pqcache.sync(table, cache, as_of="1970-01-01T00:00:29").version == "1"
    assert pqcache.inspect(cache).version == "Delta version 1 of 1970-01-01T00:00:20.000+00:00"


TYPED = {
    "day": (pa.array([dt.date(2026, 11, 1), None, dt.date(1969, 1, 1)]), "day >= '2026-01-01'"),
    "at": (
        pa.array([dt.datetime(2026, 1, 1, 1, 2, 3, 456), None, dt.datetime(1960, 1, 1)], pa.timestamp("us", "UTC")),
        "at > '2026-01-01T01:02:03Z'",
    ),
    "ntz": (
        pa.array([dt.datetime(2026, 1, 1, 1, 2, 3, 456), None, dt.datetime(1960, 1, 1)], pa.timestamp("us")),
        "ntz > '2026-01-01 01:02:03'",
    ),
    "flag": (pa.array([True, None, False]), "flag = true"),
    "price": (pa.array([Decimal("22.00"), None, Decimal("1.50")], pa.decimal128(10, 2)), "price > 2"),
    "x": (pa.array([2.5, None, -2.5e30]), "x > 0"),
    "n": (pa.array([7, None, -(2**60)]), "n = 7"),
    "code": (pa.array(["007", None, "1"]), "code = '007'"),
    "text": (pa.array(["__HIVE_DEFAULT_PARTITION__", None, ".a/b=c%:ä é'"]), "text = '__HIVE_DEFAULT_PARTITION__'"),
}


def test_partition_values_have_the_types_of_the_table_everywhere(tmp_path: Path, cache: Path) -> None:
    table, names = str(tmp_path / "lake"), list(TYPED)
    written = pa.table({"id": [0, 1, 2], **{name: values for name, (values, _) in TYPED.items()}})
    write_deltalake(table, written, partition_by=names)
    assert pqcache.sync(table, cache).rows == 3
    assert held(cache) == in_order(written.to_pylist())
    for batch in pqcache.Cache.open(cache).batches():
        assert [batch.schema.field(name).type for name in names] == [written.schema.field(name).type for name in names]
    for name, (_, condition) in TYPED.items():
        assert [row["id"] for row in held(cache, columns=["id"], filters=condition)] == [0], condition
        assert [row["id"] for row in held(cache, columns=["id"], filters=f"{name} is null")] == [1]
    everything = " and ".join(condition for _, condition in TYPED.values())
    assert pqcache.sync(table, tmp_path / "some", where=f"{everything} and id >= 0").rows == 1
    assert held(tmp_path / "some") == in_order(written.to_pylist()[:1])
    numbers = [name for name in names if name not in ("code", "text")]
    [batch] = ParquetDataset(cache, columns=["id", *numbers], batch_size=3, nulls="mask", shuffle=False)
    assert batch["day"].tolist().count(20758) == 1
    pqcache.repartition(cache, row_group_size="1MB")
    assert held(cache) == in_order(written.to_pylist())
    pqcache.index(cache, keys=["id"])
    opened = pqcache.Cache.open(cache)
    assert opened.read(opened.lookup("id", [0])).select(names).to_pylist() == written.select(names).to_pylist()[:1]
    assert {column.name for column in pqcache.inspect(cache).columns if column.partition} == set(names)
    assert not pqcache.sync(cache).published


def test_paths_are_those_of_the_log_and_become_hive_paths(tmp_path: Path, cache: Path) -> None:
    """Files under random prefixes, with encoded names, with absolute paths as in a clone, and two of one name."""
    table, other = tmp_path / "my table%41", tmp_path / "original"
    one = field("a", "long"), field("dt", "string")
    files = [
        add(table, "xY/part 0+%20.parquet", pa.table({"a": [0]}), "xY/part%200+%2520.parquet"),
        add(table, "Zq/f", pa.table({"a": [1]})),
        add(table, "_hidden/f", pa.table({"a": [2]})),
        add(other, "data#1.parquet", pa.table({"a": [3]}), (other / "data#1.parquet").as_uri()),
        add(other, "b.parquet", pa.table({"a": [4]}), str(other / "b.parquet")),
        add(other, "c.parquet", pa.table({"a": [5]}), f"file:{other}/c.parquet"),
    ]
    for number, action in enumerate(files):
        action["add"]["partitionValues"] = {"dt": None if number == 4 else "" if number == 5 else "2026/11"}
    commit(table, 0, protocol(), metadata(one, ["dt"]), *files)
    assert pqcache.sync(table, cache).rows == 6
    assert held(cache) == [{"a": i, "dt": "2026/11"} for i in range(4)] + [{"a": i, "dt": None} for i in (4, 5)]
    found = sorted(str(path.relative_to(cache / "current")) for path in (cache / "current").glob("dt=*/*"))
    assert found[:2] == ["dt=2026%2F11/data#1.parquet", found[1]]
    assert re.fullmatch(r"dt=2026%2F11/f-[0-9a-f]{12}\.parquet", found[1])
    assert [path.rpartition("/")[2] for path in found[3:]] == ["part 0+%20.parquet", "b.parquet", "c.parquet"]
    assert pqcache.verify(cache, source=True).ok
    for path in ("../original/b.parquet", "a//b.parquet", "%2e%2e/b.parquet"):
        commit(table, 1, add(other, "b.parquet", path=path))
        with pytest.raises(SourceError, match="leads out of it"):
            pqcache.sync(cache)


def test_columns_that_are_added_later_are_null_in_older_files(table: Path, cache: Path) -> None:
    pqcache.sync(table, cache)
    more = rows(18, 20, note=pa.array(["a", None]), price=pa.array([1.5, 2.5]))
    write_deltalake(str(table), more, mode="append", schema_mode="merge", partition_by=["dt"])
    report = pqcache.sync(cache)
    assert (report.added, report.unchanged) == (2, 6)
    assert held(cache) == judged(table)
    assert [row["id"] for row in held(cache, columns=["id"], filters="price > 2")] == [19]
    DeltaTable(str(table)).alter.add_columns([Field("later", PrimitiveType("integer"))])
    report = pqcache.sync(cache)
    assert (report.published, report.fetched_bytes) == (True, 0), "the schema alone"
    assert held(cache) == judged(table)
    assert pqcache.sync(table, cache, columns=["id", "later"]).published
    assert {row["later"] for row in held(cache)} == {None}
    other = pa.table({"key": ["x"], "dt": ["2026-11-01"]})
    write_deltalake(str(table), other, mode="overwrite", schema_mode="overwrite", partition_by=["dt"])
    pqcache.sync(cache, columns=[], force=True)
    assert held(cache) == judged(table) == [{"key": "x", "dt": "2026-11-01"}]


def test_a_table_is_taken_in_parts(table: Path, tmp_path: Path) -> None:
    expected = judged(table)
    parts = []
    for node in range(2):
        pqcache.sync(table, tmp_path / f"node{node}", shard=f"{node}/2", row_group_size="1MB")
        parts += held(tmp_path / f"node{node}")
    assert sorted(parts, key=repr) == expected
    report = pqcache.sync(table, tmp_path / "some", where="dt = '2026-11-02' and id > 5", columns=["id"])
    assert (report.rows, report.version) == (4, "2")
    assert report.files == 2, "other partitions are left out"
    assert held(tmp_path / "some") == [row for row in expected if row["dt"] == "2026-11-02" and row["id"] > 5]
    for option in ({"marker": "_SUCCESS"}, {"settle": "1h"}):
        with pytest.raises(UsageError, match="is a table, whose files are complete"):
            pqcache.sync(table, tmp_path / "other", **option)  # type: ignore[arg-type]
    out = tmp_path / "out"
    assert pqcache.repartition(table, out, row_group_size="1MB").rows == 16
    assert pqcache.inspect(table).rows == 16


KINDS = ("append", "overwrite", "column", "delete", "update", "merge", "compact", "vacuum", "checkpoint")


class Writer:
    """Makes random commits to a table of ids, days and values."""

    def __init__(self, table: Path, seed: int) -> None:
        self.path, self.random = str(table), random.Random(seed)
        self.next, self.columns = 0, 0

    def rows(self, count: int) -> pa.Table:
        ids = range(self.next, self.next + count)
        self.next += count
        more = {f"c{i}": pa.array([float(n) for n in ids]) for i in range(self.columns)}
        return rows(ids.start, ids.stop, v=pa.array([n % 7 for n in ids], pa.int64()), **more)

    def commit(self) -> str:
        """Make one commit, and return what it was."""
        table = DeltaTable(self.path)
        kind = self.random.choice(KINDS)
        if kind in ("append", "overwrite"):
            write_deltalake(self.path, self.rows(self.random.randint(1, 30)), mode=kind, schema_mode="merge")
        elif kind == "column":
            self.columns += 1
            write_deltalake(self.path, self.rows(5), mode="append", schema_mode="merge")
        elif kind == "delete":
            table.delete(f"v = {self.random.randint(0, 6)} and id % 2 = {self.random.randint(0, 1)}")
        elif kind == "update":
            table.update(predicate=f"v = {self.random.randint(0, 6)}", updates={"v": "v + 1"})
        elif kind == "merge":
            new = self.rows(8)
            old = pa.array(self.random.sample(range(self.next), 4) + new["id"].to_pylist()[:4], pa.int64())
            new = new.set_column(0, "id", old)
            merged = table.merge(new, predicate="s.id = t.id", source_alias="s", target_alias="t")
            merged = merged.when_matched_update({"v": "s.v"})
            merged.when_not_matched_insert({"id": "s.id", "dt": "s.dt", "v": "s.v"}).execute()
        elif kind == "compact":
            table.optimize.compact()
        elif kind == "vacuum":
            vacuum(Path(self.path))
        else:
            table.create_checkpoint()
        return kind


def check_commits(tmp_path: Path, seed: int, commits: int) -> None:
    table, cache = tmp_path / f"t{seed}", tmp_path / f"c{seed}"
    writer = Writer(table, seed)
    write_deltalake(str(table), writer.rows(30), partition_by=["dt"])
    for number in range(commits):
        done = writer.commit() if number else "first"
        report = pqcache.sync(table, cache, force=True)
        assert report.version == str(DeltaTable(str(table)).version())
        assert held(cache) == judged(table), f"seed {seed}, after {number} commits, the last: {done}"
    assert pqcache.verify(cache, deep=True, source=True).ok


@pytest.mark.parametrize("commits", [8, pytest.param(100, marks=pytest.mark.deep)])
def test_random_commits(tmp_path: Path, commits: int) -> None:
    check_commits(tmp_path, random.randrange(1 << 30), commits)


def interrupted(table: Path) -> tuple[Callable[[Event], None], list[Event]]:
    """Return what overwrites a table and vacuums it when the download begins, once."""
    seen: list[Event] = []

    def on_event(event: Event) -> None:
        if isinstance(event, Started) and event.phase == "fetch" and not seen:
            seen.append(event)
            write_deltalake(str(table), rows(100, 120), mode="overwrite")
            vacuum(table)

    return on_event, seen


@pytest.mark.parametrize("where", ["", "id >= 0"])
def test_files_that_vacuum_takes_away_during_a_sync(where: str, table: Path, cache: Path, tmp_path: Path) -> None:
    on_event, seen = interrupted(table)
    report = pqcache.sync(table, cache, where=where, on_event=on_event)
    assert len(seen) == 1
    assert report.version == "5", "the vacuum's own commits count"
    assert held(cache) == judged(table)
    with pytest.raises(SourceIncomplete, match="vanished from") as error:
        pqcache.sync(table, tmp_path / "old", version=1)
    assert error.value.exit_code == 3
    assert not (tmp_path / "old" / "current").exists()


def test_a_log_that_changes_between_its_listing_and_its_reading(table: Path) -> None:
    with closing(open_table(str(table), OpenOptions())) as source:
        append(table, 18, 21)
        DeltaTable(str(table)).create_checkpoint()
        for number in range(4):
            (table / "_delta_log" / f"{number:020}.json").unlink()
        assert len(list(source.list())) == 9
        assert source.table_version.version == "3"  # type: ignore[attr-defined]


@pytest.mark.hdfs
def test_a_table_in_another_store(table: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    DeltaTable(str(table)).create_checkpoint()
    append(table, 18, 24)
    for remote in make_remote("hdfs", request, tmp_path):
        remote.upload(table)
        cache = tmp_path / "cache"
        report = pqcache.sync(remote.url, cache)
        assert (report.version, report.rows) == ("3", 22)
        assert held(cache) == judged(table)
        assert not pqcache.sync(cache).published
        before = {str(path.relative_to(table)) for path in table.rglob("*") if path.is_file()}
        DeltaTable(str(table)).optimize.compact()
        for path in {str(path.relative_to(table)) for path in table.rglob("*") if path.is_file()} - before:
            remote.put(path, (table / path).read_bytes())
        for path in judged_files(table, 3) - judged_files(table, 4):
            remote.delete(path)
        report = pqcache.sync(cache)
        assert (report.version, report.published) == ("4", True)
        assert held(cache) == judged(table)
        assert pqcache.verify(cache, source=True).ok
        with pytest.raises(SourceIncomplete, match="vanished"):
            pqcache.sync(cache, version=3)
        with pytest.raises(UsageError, match=r"is a part of a Delta table .*name the table's own directory"):
            pqcache.sync(f"{remote.url}/dt=2026-11-01", tmp_path / "part")


def judged_files(table: Path, version: int) -> set[str]:
    found = DeltaTable(str(table), version=version).file_uris()
    return {str(Path(path).relative_to(table)) for path in found}


def test_the_command_line(table: Path, cache: Path, tmp_path: Path) -> None:
    done = run_pqcache("sync", table, cache)
    assert (done.returncode, done.stderr) == (0, "")
    assert "version 2" in done.stdout
    *_, summary = run_pqcache("sync", cache, "--version", "1", "--json").stdout.splitlines()
    assert json.loads(summary)["version"] == "1"
    heading, *runs = run_pqcache("log", cache).stdout.splitlines()
    assert heading.split()[-1] == "version"
    assert [run.split()[-1] for run in runs if run.startswith("20")] == ["2", "1"]
    for words, code, text in (
        (["sync", table, tmp_path / "x", "--version", "9"], 1, "--version 9: the log of"),
        (["sync", table, tmp_path / "x", "--version", "1", "--as-of", "2026-01-01"], 2, "name two versions"),
        (["sync", table.parent, tmp_path / "x"], 2, "name the table's own directory"),
        (["sync", table / "dt=2026-11-01", tmp_path / "x"], 2, "is a part of a Delta table"),
    ):
        done = run_pqcache(*words)
        assert (done.returncode, done.stderr.count("\n"), text in done.stderr) == (code, 1, True), done.stderr
    done = run_pqcache("sync", table, tmp_path / "files", "--as-files")
    assert (done.returncode, "version" in done.stdout) == (0, False)


def test_a_table_without_rows_never_replaces_what_is_held(table: Path, cache: Path) -> None:
    pqcache.sync(table, cache)
    DeltaTable(str(table)).delete()
    with pytest.raises(SourceIncomplete, match="no Parquet file"):
        pqcache.sync(cache)
    assert len(held(cache)) == 16


def test_deltalake_is_asked_for_by_name(table: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pqcache.store.tables.delta", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    said = r"is a Delta table, which needs deltalake; install the extra with: pip install 'pqcache\[delta\]'"
    with pytest.raises(UsageError, match=said):
        pqcache.sync(table, cache)


def test_a_sync_with_nothing_to_do_imports_no_arrow(table: Path, cache: Path) -> None:
    pqcache.sync(table, cache)
    code = (
        "import sys; sys.modules.update(pyarrow=None, numpy=None, rich=None); "
        "from pqcache.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "sync", str(cache), "-q"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_commit_during_a_sync_is_left_for_the_next(table: Path, cache: Path) -> None:
    def commits(event: Event) -> None:
        if isinstance(event, Started) and event.phase == "fetch":
            append(table, 18, 21)

    before = judged(table)
    assert pqcache.sync(table, cache, on_event=commits).version == "2"
    assert held(cache) == before
    assert pqcache.sync(cache).version == "3"
    assert held(cache) == judged(table)


@pytest.mark.parametrize("part", [{}, {"columns": ["id"]}])
def test_a_file_that_is_shorter_than_in_the_log_is_not_waited_for(
    part: dict[str, Any], table: Path, cache: Path
) -> None:
    file = Path(DeltaTable(str(table), version=1).file_uris()[0])
    os.truncate(file, file.stat().st_size - 9)
    events: list[Event] = []
    with pytest.raises(SourceError, match=r"has [0-9,]+ bytes, and [0-9,]+ in the log of its table"):
        pqcache.sync(table, cache, version=1, on_event=events.append, **part)
    assert not any(isinstance(event, Retried) for event in events)


def test_a_table_that_has_lost_its_log(table: Path, cache: Path) -> None:
    """Its files alone have rows that it has deleted."""
    pqcache.sync(table, cache)
    before = held(cache)
    (table / "_delta_log").rename(table.parent / "log")
    for dry_run in (True, False):
        with pytest.raises(UsageError, match="no log of a table any more, and the cache holds Delta version 2"):
            pqcache.sync(cache, dry_run=dry_run)
    assert held(cache) == before
    pqcache.sync(cache, as_files=True)
    assert len(held(cache)) > len(before)
    (table.parent / "log").rename(table / "_delta_log")
    pqcache.sync(cache, as_files=False, force=True)
    assert held(cache) == before


def torn_commit(log: Path) -> str:
    file = log / f"{1:020}.json"
    file.write_bytes(file.read_bytes()[:-20])
    return rf"{file}: deltalake cannot read its log .*; check the table with the engine that wrote it"


def torn_checkpoint(log: Path) -> str:
    DeltaTable(log.parent).create_checkpoint()
    [file] = log.glob("*.checkpoint.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    return rf"{file}: deltalake cannot read its log .*; check the table with the engine that wrote it"


def null_in_a_path(log: Path) -> str:
    commit = log / f"{0:020}.json"
    commit.write_text(commit.read_text().replace('"path":"', '"path":"a%00/'))
    return r"the table has a file with this name, which is invalid; check the table"


def test_a_hint_and_a_checkpoint_that_are_not_there_do_not_matter(table: Path, cache: Path) -> None:
    expected = judged(table)
    (table / "_delta_log" / "_last_checkpoint").write_text('{"version": 2, "size": 1}')
    (table / "_delta_log" / f"{1:020}.checkpoint.parquet").touch()  # of a writer that was killed
    assert pqcache.sync(table, cache).version == "2"
    assert held(cache) == expected


def test_a_process_forked_from_one_that_has_read_a_table(table: Path, cache: Path) -> None:
    pqcache.sync(table, cache)

    def is_refused() -> bool:
        signal.alarm(60)  # where it is not refused, it hangs
        with pytest.raises(SourceError, match="forked from one that has used it; start that process with spawn"):
            pqcache.sync(table, f"{cache}2")
        return True

    assert true_in_child(is_refused)


def test_a_temporary_directory_that_deltalake_cannot_read(
    table: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, percent = tmp_path / "a%2Fb", tmp_path / "100%"
    encoded.mkdir()
    percent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(encoded))  # which is TMPDIR in a new process
    with pytest.raises(UsageError, match="set TMPDIR to another directory"):
        pqcache.sync(table, cache)
    monkeypatch.setattr("tempfile.tempdir", str(percent))
    assert pqcache.sync(table, cache).published
    assert not list(percent.iterdir())


@pytest.mark.parametrize("damage", [torn_commit, torn_checkpoint, null_in_a_path])
def test_a_damaged_log_is_named(damage: Callable[[Path], str], table: Path, cache: Path) -> None:
    said = damage(table / "_delta_log")
    done = run_pqcache("sync", table, cache)
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_partition_types_are_those_of_the_table(tmp_path: Path) -> None:
    table, cache = tmp_path / "table", tmp_path / "cache"
    write_deltalake(str(table), pa.table({"hour": ["07", "08", "10"], "id": [7, 8, 10]}), partition_by=["hour"])
    with pytest.raises(UsageError, match="is a table, which declares its own types"):
        pqcache.sync(table, cache, partition_types={"hour": "int"})
    with pytest.raises(UsageError, match=r"hour is text, and 8 is a number; compare it as text with hour < '08'$"):
        pqcache.sync(table, cache, where="hour < 8")
    assert pqcache.sync(table, cache, where="hour < '08'").rows == 1
    (batch,) = pqcache.Cache.open(cache).batches(filters="hour = 7", partition_types={"hour": "int"})
    assert batch["hour"].to_pylist() == [7]
