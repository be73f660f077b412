"""Tables of a metastore: which files are taken, what is refused, and what a second night finds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import SourceError, SourceIncomplete, UsageError
from pqcache.events import Event, Warned
from pqcache.store.tables import hive_metastore as hive_table
from tests.forked_commands import run_pqcache
from tests.store.tables.hive_metastore.databases import IN_BOTH, ORC, PARQUET, Database, write_ids

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

HUDI = ("org.apache.hudi.hadoop.HoodieParquetInputFormat", PARQUET[1])
SYMLINKS = ("org.apache.hadoop.hive.ql.io.SymlinkTextInputFormat", PARQUET[1])


def held(cache: Path) -> dict[str, list[int]]:
    """The ids in each directory of a cache, by what is on its disk."""
    found: dict[str, list[int]] = {}
    root = Path(os.path.realpath(cache / "current"))
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        directory = path.parent.relative_to(root).as_posix()
        if not directory.startswith("_"):
            found.setdefault(directory, []).extend(pq.read_table(path, partitioning=None)["id"].to_pylist())
    return {directory: sorted(ids) for directory, ids in found.items()}


def warnings_of(url: str, cache: Path, **options: str) -> list[str]:
    """Sync; return the warnings."""
    found: list[Event] = []
    pqcache.sync(url, cache, on_event=found.append, **options)  # type: ignore[arg-type]
    return [event.message for event in found if isinstance(event, Warned)]


def daily(database: Database, home: Path, days: int = 3) -> str:
    """Make a table of some days with ten rows each, below the table's own location; return its URL."""
    url = database.table("t", home, {"dt": "string"})
    places = [write_ids(home / f"dt={day}" / "part-0.parquet", range(day * 10, day * 10 + 10)) for day in range(days)]
    database.add("t", *(([f"{day}"], place) for day, place in enumerate(places)))
    return url


@IN_BOTH
def test_partitions_are_taken_wherever_they_are_and_others_are_not(database: Database, tmp_path: Path) -> None:
    home = tmp_path / "t"
    url = database.table("t", home, {"dt": "string", "region": "int"})
    write_ids(home / "dt=1" / "region=7" / "part-0.parquet", [1, 2])
    write_ids(home / "dt=1" / "region=7" / "_temporary" / "part-1.parquet", [3])
    write_ids(home / "dt=2" / "region=7" / "part-0.parquet", [4])  # of a partition that the metastore does not know
    write_ids(tmp_path / "elsewhere" / "000000_0", [5])
    write_ids(tmp_path / "elsewhere" / "1" / "000000_0", [6])  # as Tez writes a UNION
    write_ids(tmp_path / "a=b%2Fc #1?" / "x.parquet", [7])  # spelled as it is
    shared = write_ids(tmp_path / "shared" / "a.parquet", [8])
    database.add(
        "t",
        (["1", "7"], home / "dt=1" / "region=7"),
        (["1", "8"], tmp_path / "elsewhere"),
        (["2026/11", "__HIVE_DEFAULT_PARTITION__"], tmp_path / "a=b%2Fc #1?"),
        (["3", "1"], shared),
        (["3", "2"], f"file://{shared}/"),
    )
    report = pqcache.sync(url, tmp_path / "cache")
    assert (report.added, report.rows, report.version) == (6, 7, None)
    assert held(tmp_path / "cache") == {
        "dt=1/region=7": [1, 2],
        "dt=1/region=8": [5],
        "dt=1/region=8/1": [6],
        "dt=2026%2F11/region=__HIVE_DEFAULT_PARTITION__": [7],
        **{f"dt=3/region={region}": [8] for region in (1, 2)},
    }
    again = pqcache.sync(tmp_path / "cache")
    assert (again.published, again.unchanged, again.fetched_bytes) == (False, 6, 0)


def test_a_location_may_be_one_file(database: Database, tmp_path: Path) -> None:
    url = database.table("t", tmp_path / "t", {"dt": "int"})
    database.add("t", (["1"], write_ids(tmp_path / "one" / "a.parquet", [8]) / "a.parquet"))
    pqcache.sync(url, tmp_path / "cache")
    assert held(tmp_path / "cache") == {"dt=1": [8]}


@IN_BOTH
def test_partition_columns_have_the_types_of_the_table(database: Database, tmp_path: Path) -> None:
    kinds = {"a": "string", "b": "int", "c": "date", "d": "decimal(9,2)", "e": "varchar(9)", "f": "timestamp"}
    url = database.table("t", tmp_path / "t", kinds)
    database.add(
        "t", (["1", "2", "2026-11-01", "3.5", "4", "2026-11-01 01:02:03"], write_ids(tmp_path / "x/a.parquet", [1]))
    )
    pqcache.sync(url, tmp_path / "cache")
    for target in (tmp_path / "cache", url):
        columns = {column.name: column.type for column in pqcache.inspect(target).columns if column.partition}
        assert columns == {
            "a": "string", "b": "int32", "c": "date32[day]", "d": "decimal128(9, 2)", "e": "string",
            "f": "timestamp[us]",
        }  # fmt: skip
    assert pqcache.sync(url, tmp_path / "cache", where="c = '2026-11-01' and a = '1'").rows == 1
    assert pqcache.sync(url, tmp_path / "other", columns=["id"]).rows == 1
    with pytest.raises(UsageError, match="no column 'nothing'; there are: id"):
        pqcache.sync(url, tmp_path / "third", columns=["nothing"])


def test_a_value_that_is_none_of_its_type_is_refused(database: Database, tmp_path: Path) -> None:
    url = database.table("t", tmp_path / "t", {"n": "string"})
    database.add("t", (["seven"], write_ids(tmp_path / "x" / "a.parquet", [1])))
    found = database.client.get_table(database.name, "t")
    found.partitionKeys[0].type = "int"
    database.client.alter_table(database.name, "t", found)
    with pytest.raises(SourceError, match="column 'n': is int32 in the table, and a value in a path is not"):
        pqcache.sync(url, tmp_path / "cache")


@IN_BOTH
def test_a_second_night_with_an_added_a_dropped_and_a_moved_partition(database: Database, tmp_path: Path) -> None:
    url = daily(database, tmp_path / "t", 4)
    pqcache.sync(url, tmp_path / "cache")
    database.drop("t", "0")
    database.move("t", ["1"], write_ids(tmp_path / "moved" / "part-0.parquet", range(100, 110)))
    database.add("t", (["9"], write_ids(tmp_path / "new" / "part-0.parquet", [90])))
    report = pqcache.sync(tmp_path / "cache")
    assert (report.added, report.changed, report.removed, report.unchanged) == (1, 1, 1, 2)
    expected = {"dt=1": [*range(100, 110)], "dt=2": [*range(20, 30)], "dt=3": [*range(30, 40)], "dt=9": [90]}
    assert held(tmp_path / "cache") == expected


def test_a_file_belongs_to_the_innermost_location(database: Database, tmp_path: Path) -> None:
    url = database.table("t", tmp_path / "t", {"dt": "int"})
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    database.add(
        "t", (["1"], write_ids(outer / "a.parquet", [1])), (["2"], write_ids(inner / "sub" / "b.parquet", [2]).parent)
    )
    for where in ("", "dt = 1", "dt = 2"):
        pqcache.sync(url, tmp_path / "cache", where=where, force=True)
        expected = {"dt=1": [1], "dt=2/sub": [2]}
        assert held(tmp_path / "cache") == {k: v for k, v in expected.items() if where[-1:] in k}, where


def test_directories_of_unknown_partitions_inside_of_a_location_are_not_taken(
    database: Database, tmp_path: Path
) -> None:
    url = database.table("t", tmp_path / "t")
    write_ids(tmp_path / "t" / "a.parquet", [1])
    write_ids(tmp_path / "t" / "dt=1" / "b.parquet", [2])
    write_ids(tmp_path / "t" / ".staging" / "dt=1" / "c.parquet", [3])
    (warning,) = warnings_of(url, tmp_path / "cache")
    assert warning.endswith(f"that the metastore does not know were not taken ({tmp_path}/t/dt=1/b.parquet)")
    assert held(tmp_path / "cache") == {".": [1]}


@IN_BOTH
def test_directories_of_skewed_values_are_the_tables_own(database: Database, tmp_path: Path) -> None:
    url = database.table("t", tmp_path / "t", subdirectories=True)
    write_ids(tmp_path / "t" / "id=1" / "000000_0", [1])
    write_ids(tmp_path / "t" / "HIVE_DEFAULT_LIST_BUCKETING_DIR_NAME" / "000000_0", [2])
    assert warnings_of(url, tmp_path / "cache") == []
    assert held(tmp_path / "cache") == {"id%3D1": [1], "HIVE_DEFAULT_LIST_BUCKETING_DIR_NAME": [2]}
    assert [column.name for column in pqcache.inspect(tmp_path / "cache").columns] == ["id"]


@pytest.mark.parametrize("at_once", [100, 2])
def test_links_to_nothing_matter_in_known_partitions_alone(
    at_once: int, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the location of the table is listed once for many partitions, as it is above a limit."""
    url = daily(database, tmp_path / "t", 3)
    database.add("t", (["x"], write_ids(tmp_path / "x" / "a.parquet", [99])))
    monkeypatch.setattr(hive_table, "_AT_ONCE", at_once)
    (tmp_path / "t" / "dt=unknown").mkdir()
    (tmp_path / "t" / "dt=unknown" / "a.parquet").symlink_to("nowhere")
    pqcache.sync(url, tmp_path / "cache")
    assert list(held(tmp_path / "cache")) == ["dt=0", "dt=1", "dt=2", "dt=x"]
    (tmp_path / "t" / "dt=1" / "a.parquet").symlink_to("nowhere")
    with pytest.raises(SourceError, match=r"dt=1/a.parquet: is a link to nothing"):
        pqcache.sync(url, tmp_path / "cache")
    shutil.rmtree(tmp_path / "t" / "dt=1")
    (tmp_path / "t" / "dt=1").symlink_to(tmp_path / "t" / "dt=1")
    with pytest.raises(SourceError, match="dt=1: "):  # which cannot be listed, and is not empty
        pqcache.sync(url, tmp_path / "cache", retries=0)


def test_partitions_without_files_are_reported(database: Database, tmp_path: Path) -> None:
    url = daily(database, tmp_path / "t", 2)
    database.add("t", (["8"], tmp_path / "nowhere"), (["9"], tmp_path / "t" / "empty"))
    (tmp_path / "t" / "empty").mkdir(exist_ok=True)
    assert warnings_of(url, tmp_path / "cache") == [
        f"{url}: no files in 2 of 4 partitions (dt=8 at {tmp_path}/nowhere)"
    ]
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(SourceIncomplete, match=f"no file at any of 4 locations, the first {tmp_path}/t/dt=0; nothing"):
        pqcache.sync(tmp_path / "cache")
    assert len(held(tmp_path / "cache")) == 2


@IN_BOTH
def test_a_table_without_partitions(database: Database, tmp_path: Path) -> None:
    url = database.table("t", tmp_path / "t")
    with pytest.raises(SourceIncomplete, match=f"there is no file at {tmp_path}/t; nothing was published"):
        pqcache.sync(url, tmp_path / "cache")
    write_ids(tmp_path / "t" / "a.parquet", [1])
    assert pqcache.sync(url, tmp_path / "cache").rows == 1
    assert held(tmp_path / "cache") == {".": [1]}
    empty = database.table("empty", tmp_path / "empty", {"dt": "string"})
    with pytest.raises(SourceIncomplete, match="has no partitions in the metastore; nothing was published, add them"):
        pqcache.sync(empty, tmp_path / "other")


@IN_BOTH
def test_where_leaves_out_locations_before_they_are_listed(database: Database, tmp_path: Path) -> None:
    url = daily(database, tmp_path / "t", 3)
    database.add("t", (["old"], write_ids(tmp_path / "orc" / "000000_0", [1])), stored=ORC)
    shut = tmp_path / "t" / "dt=2"
    shutil.rmtree(shut)
    shut.symlink_to(tmp_path / "nothing" / "nowhere")
    report = pqcache.sync(url, tmp_path / "cache", where="dt < '2'")
    assert (report.rows, sorted(held(tmp_path / "cache"))) == (20, ["dt=0", "dt=1"])
    assert pqcache.sync(url, tmp_path / "rows", where="(dt < '2' or dt = '2') and id = 3 and not dt = '2'").rows == 1
    with pytest.raises(UsageError, match="dt=old: is not stored as Parquet"):
        pqcache.sync(url, tmp_path / "rows", where="dt < '2' or id = 3")
    with pytest.raises(SourceIncomplete, match="no partition satisfies --where \"dt = 'x'\""):
        pqcache.sync(url, tmp_path / "cache", where="dt = 'x'")


def test_marker_and_settle_are_as_for_a_directory(database: Database, tmp_path: Path) -> None:
    url = daily(database, tmp_path / "t", 2)
    (tmp_path / "t" / "dt=0" / "_SUCCESS").touch()
    pqcache.sync(url, tmp_path / "cache", marker="_SUCCESS")
    assert sorted(held(tmp_path / "cache")) == ["dt=0"]
    with pytest.raises(SourceIncomplete, match="all files there still wait for --marker or --settle"):
        pqcache.sync(url, tmp_path / "young", settle="1h")


def test_copies_are_as_private_as_the_tables_directory(database: Database, tmp_path: Path) -> None:
    url = daily(database, tmp_path / "t", 1)
    os.chmod(tmp_path / "t", 0o700)
    pqcache.sync(url, tmp_path / "cache")
    (copy,) = (tmp_path / "cache" / "current" / "dt=0").iterdir()
    assert copy.stat().st_mode & 0o077 == 0


@IN_BOTH
@pytest.mark.parametrize(
    ("stored", "parameters", "reason"),
    [
        (ORC, {}, "is not stored as Parquet; its files are read by OrcInputFormat and OrcSerde; write it to an"),
        (SYMLINKS, {}, "has lists of files in its location and not files; name"),
        (HUDI, {}, "is a Hudi table, whose timeline says which files count; write"),
        (PARQUET, {"spark__sql__sources__provider": "hudi"}, "is a Hudi table"),
        (PARQUET, {"spark__sql__sources__provider": "delta"}, "is a Delta table, .*; name its location, file:/"),
        (ORC, {"table_type": "ICEBERG"}, "is an Iceberg table, .*; name it by iceberg://"),
        (ORC, {"storage_handler": "org.x.KuduHandler"}, "is stored by org.x.KuduHandler; write"),
        (ORC, {"spark__sql__sources__provider": "parquet"}, "is stored by Spark in a way that Hive"),
        (PARQUET, {"kind": "VIRTUAL_VIEW"}, "is a virtual view, not a table; name the table behind it"),
    ],
)
def test_what_cannot_be_read_right_is_refused_by_name(
    database: Database, tmp_path: Path, stored: tuple[str, str], parameters: dict[str, str], reason: str
) -> None:
    location = None if "kind" in parameters else tmp_path / "t"
    url = database.table("t", location, stored=stored, **parameters)
    write_ids(tmp_path / "t" / "part-0.parquet", [1])
    with pytest.raises(UsageError, match=f"^{url}: .*{reason}"):
        pqcache.sync(url, tmp_path / "cache")


def test_deltas_of_a_transactional_table_are_found_where_the_metastore_does_not_say_so(
    database: Database, tmp_path: Path
) -> None:
    url = database.table("t", tmp_path / "t", {"dt": "string"})
    place = write_ids(tmp_path / "x" / "delta_0000001_0000001_0000" / "bucket_00000", [1]).parent
    database.add("t", (["1"], place))
    with pytest.raises(UsageError, match=r"is a transactional Hive table \(dt=1/delta_0000001_0000001_0000/"):
        pqcache.sync(url, tmp_path / "cache")


@pytest.mark.hdfs
def test_locations_may_be_on_hdfs(database: Database, hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> None:
    url = database.table("t", f"{hdfs_dir}/t", {"dt": "string"})
    data = (write_ids(tmp_path / "x" / "000000_0", [1]) / "000000_0").read_bytes()
    hdfs.put(f"{hdfs_dir}/t/dt=2026%2F11/000000_0", data)
    hdfs.put(f"{hdfs_dir}/t/dt=unknown/000000_0", data)
    database.add("t", (["1"], tmp_path / "x"), (["2026/11"], f"{hdfs_dir}/t/dt=2026%2F11"), (["2"], f"{hdfs_dir}/no"))
    options = {"dfs.client.failover.max.attempts": "2"}
    # in a process of its own: this one must not have a client of hdfs-native when it forks
    run = run_pqcache("sync", url, tmp_path / "cache", *(f"-o{name}={value}" for name, value in options.items()))
    assert run.returncode == 0, run.stderr
    assert "no files in 1 of 3 partitions (dt=2 at hdfs://" in run.stderr
    assert held(tmp_path / "cache") == {"dt=1": [1], "dt=2026%2F11": [1]}
    again = run_pqcache("sync", tmp_path / "cache", "--json")
    assert '"published": false' in again.stdout, again.stdout + again.stderr
