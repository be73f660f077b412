"""The checks against a bad night: markers, young files, too many deletions, another source by mistake."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import SourceIncomplete
from pqcache.events import Listed, Warned
from pqcache.store.config import read_config
from pqcache.store.sync import safety_checks
from tests.datasets import shop_table, write_day
from tests.faults.checks import check_snapshot, rows_at
from tests.faults.lakes import lake_of, rewrite_day
from tests.forked_commands import run_pqcache


def test_marker(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    (lake / "dt=2026-11-04" / "_SUCCESS").unlink()
    without = {name: rows for name, rows in rows_at(lake).items() if name != "dt=2026-11-04"}
    report = pqcache.sync(str(lake), cache, marker="_SUCCESS")
    assert report.added == 6
    assert check_snapshot(cache, [without]) == 0
    (lake / "dt=2026-11-04" / "_SUCCESS").touch()
    pqcache.sync(cache)
    held = rows_at(lake)
    assert check_snapshot(cache, [held]) == 0

    # the nightly job writes a partition anew: it is held as it was until the marker is back
    (lake / "dt=2026-11-02" / "_SUCCESS").unlink()
    (lake / "dt=2026-11-02" / "part-00000.parquet").unlink()
    pq.write_table(shop_table(9, 9), lake / "dt=2026-11-02" / "part-00001.parquet")
    assert not pqcache.sync(cache).published
    assert check_snapshot(cache, [held]) == 0
    (lake / "dt=2026-11-02" / "part-00001.parquet").unlink()
    (lake / "dt=2026-11-02" / "_temporary" / "0").mkdir(parents=True)
    pq.write_table(shop_table(9, 9), lake / "dt=2026-11-02" / "_temporary" / "0" / "part-00000.parquet")
    assert not pqcache.sync(cache).published, "a partition whose writer is at work has gone"
    assert check_snapshot(cache, [held]) == 0
    rewrite_day(lake, "2026-11-02")
    assert pqcache.sync(cache).published
    assert check_snapshot(cache, [rows_at(lake)]) == 0

    for marker in lake.rglob("_SUCCESS"):
        marker.unlink()
    with pytest.raises(pqcache.SourceIncomplete, match="still wait for --marker or --settle") as error:
        pqcache.sync(str(lake), tmp_path / "other", marker="_SUCCESS")
    assert error.value.exit_code == 3
    assert pqcache.sync(cache, marker="").snapshot
    assert read_config(cache).marker is None


def test_marker_above_the_files(tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for hour in ("00", "01"):
        write_day(lake / "dt=2026-11-01", f"h{hour}", files=1, rows=5)
        (lake / "dt=2026-11-01" / f"dt=h{hour}" / "_SUCCESS").unlink()
    (lake / "_SUCCESS").touch()  # of a job long ago: says nothing about partitions
    with pytest.raises(pqcache.SourceIncomplete):
        pqcache.sync(str(lake), cache, marker="_SUCCESS")
    (lake / "dt=2026-11-01" / "_SUCCESS").touch()
    assert pqcache.sync(str(lake), cache, marker="_SUCCESS").added == 2


def test_settle(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    with pytest.raises(pqcache.SourceIncomplete, match="still wait for --marker or --settle"):
        pqcache.sync(str(lake), cache, settle=600)
    old = time.time() - 3600
    for path in lake.rglob("*.parquet"):
        os.utime(path, (old, old))
    young = lake / "dt=2026-11-04" / "part-00001.parquet"
    young.touch()
    settled = {**rows_at(lake), "dt=2026-11-04": shop_table(4000, 20).replace_schema_metadata()}
    report = pqcache.sync(str(lake), cache, settle=600, row_group_size=16 << 10)
    assert report.added == 7
    assert check_snapshot(cache, [settled]) == 0
    os.utime(young, (old, old))
    assert pqcache.sync(cache).added == 1
    held = rows_at(lake)
    assert check_snapshot(cache, [held]) == 0

    pq.write_table(shop_table(77, 7), lake / "dt=2026-11-01" / "part-00000.parquet")  # young: as it was before
    assert not pqcache.sync(cache).published
    assert check_snapshot(cache, [held]) == 0
    rewrite_day(lake, "2026-11-03")  # gone under its old names, too young under its new ones
    pqcache.sync(cache)
    assert check_snapshot(cache, [held]) == 0, "a partition that is being overwritten has gone"
    assert pqcache.sync(cache, settle=0.0).published
    assert check_snapshot(cache, [rows_at(lake)]) == 0


def test_max_delete(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache)
    everything = rows_at(lake)
    shutil.copytree(lake, tmp_path / "backup")
    shutil.rmtree(lake / "dt=2026-11-01")
    shutil.rmtree(lake / "dt=2026-11-02")
    (lake / "dt=2026-11-03" / "part-00000.parquet").unlink()  # 5 of 8
    for limit in (None, "62%", "4", "0"):
        with pytest.raises(pqcache.SourceIncomplete, match=r"5 files of the 8.*--force") as error:
            pqcache.sync(cache, max_delete=limit)
        assert error.value.exit_code == 3
        assert check_snapshot(cache, [everything]) == 0
        assert read_config(cache).max_delete == "50%", "a refused run is remembered"
    for bad in ("-1", "101%", "half", "5 files", ""):
        with pytest.raises(pqcache.UsageError):
            safety_checks.parse_max_delete(bad)
    assert pqcache.sync(cache, force=True).removed == 5
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    shutil.rmtree(lake)
    shutil.copytree(tmp_path / "backup", lake)
    pqcache.sync(cache)
    shutil.rmtree(lake / "dt=2026-11-01")
    shutil.rmtree(lake / "dt=2026-11-02")  # 4 of 8: not more than half
    assert pqcache.sync(cache).removed == 4
    assert check_snapshot(cache, [rows_at(lake)]) == 0


@pytest.mark.parametrize("partitioned", [True, False])
def test_a_touched_file_does_not_switch_the_guard_off(tmp_path: Path, partitioned: bool) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    directory = lake / "dt=2026-11-01" if partitioned else lake
    directory.mkdir(parents=True)
    for number in range(10):
        pq.write_table(pa.table({"n": [number]}), directory / f"{number}.parquet")
    pqcache.sync(str(lake), cache)
    for number in range(1, 10):
        (directory / f"{number}.parquet").unlink()
    pq.write_table(pa.table({"n": [100, 101]}), directory / "0.parquet")
    with pytest.raises(pqcache.SourceIncomplete, match="9 files of the 10"):
        pqcache.sync(cache, max_delete="10%")
    pq.write_table(pa.table({"n": [102]}), directory / "new.parquet")
    with pytest.raises(pqcache.SourceIncomplete, match=f"{9 if partitioned else 8} files of the 10"):
        pqcache.sync(cache, max_delete="10%")


def test_a_nightly_overwrite_under_new_names_is_no_loss(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path)
    pqcache.sync(str(lake), cache, max_delete="0")
    for day in range(1, 5):
        rewrite_day(lake, f"2026-11-{day:02d}", files=2)
    report = pqcache.sync(cache)
    assert (report.added, report.removed) == (8, 8)
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    rewrite_day(lake, "2026-11-04", files=1, seed=10)  # compacted: fewer files, nothing lost
    assert pqcache.sync(cache).removed == 2
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    for path in (lake / "dt=2026-11-04").glob("*.parquet"):
        path.unlink()
    with pytest.raises(pqcache.SourceIncomplete, match="1 file of the 7"):
        pqcache.sync(cache)


def test_a_local_listing_survives_what_it_does_not_need(tmp_path: Path) -> None:
    """Locks that editors leave (dangling links), pipes and sockets beside the data are no reason to stop."""
    lake, cache = lake_of(tmp_path)
    (lake / ".#notes").symlink_to("user@host.1234:1690000000")
    (lake / "dt=2026-11-01" / "_latest").symlink_to("gone")
    os.mkfifo(lake / "dt=2026-11-01" / ".pipe")
    pqcache.sync(str(lake), cache)
    (lake / "dt=2026-11-02" / "part-00009.parquet").symlink_to("gone")
    with pytest.raises(pqcache.PqcacheError, match=r"part-00009\.parquet"):
        pqcache.sync(cache)


def write_files(directory: Path, names: str, files: int, rows: int, compression: str = "none") -> None:
    """Write ``files`` files of ``rows`` rows in place of all that a partition has."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for number in range(files):
        table = pa.table({"id": [number * rows + row for row in range(rows)], "text": ["x" * 200] * rows})
        pq.write_table(table, directory / f"{names}-{number:05d}.parquet", compression=compression)


def partitions(root: Path) -> list[Path]:
    return [root / f"dt=2026-11-{day:02d}" for day in range(1, 5)]


def being_overwritten(root: Path, **how: Any) -> Path:
    """Return a cache of four partitions of five files, each of which has the first of its new files by now."""
    for directory in partitions(root / "lake"):
        write_files(directory, "a", files=5, rows=4)
    pqcache.sync(str(root / "lake"), root / "cache", **how)
    for directory in partitions(root / "lake"):
        write_files(directory, "b", files=1, rows=1)
    return root / "cache"


def test_an_overwrite_in_progress_is_refused(tmp_path: Path) -> None:
    """Each partition has the first of its new files; new partitions do not make up for that."""
    lake, cache = tmp_path / "lake", being_overwritten(tmp_path, row_group_size=8 << 10)
    held = rows_at(cache / "current")
    write_files(lake / "dt=2026-12-01", "b", files=1, rows=500)
    for max_delete, share in ((None, "50%"), ("5%", "5%"), ("1000", "50%")):
        message = rf"76 rows of the 80 .* more than --max-delete {share}.*dt=2026-11-04 \(20 rows, now 1\).*--force"
        with pytest.raises(pqcache.SourceIncomplete, match=message) as error:
            pqcache.sync(cache, max_delete=max_delete)
        assert error.value.exit_code == 3
        assert check_snapshot(cache, [held]) == 0
    assert pqcache.sync(cache, force=True).published
    assert check_snapshot(cache, [rows_at(lake)]) == 0


def test_partitions_that_lose_rows_count_by_their_rows(tmp_path: Path) -> None:
    """Also in files of the same names. Partitions that grow do not make up for it."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for rows, growing in ((10, 20), (6, 500)):
        for directory in partitions(lake):
            write_files(directory, "a", files=2, rows=rows)
        write_files(lake / "dt=2026-12-01", "a", files=1, rows=growing)
        if rows == 10:
            pqcache.sync(str(lake), cache)
    with pytest.raises(pqcache.SourceIncomplete, match="32 rows of the 100"):
        pqcache.sync(cache, max_delete="31%")
    assert rows_at(cache / "current") != rows_at(lake)
    assert pqcache.sync(cache, max_delete="32%").published


def test_a_dry_run_is_refused_as_the_run_would_be(tmp_path: Path) -> None:
    """By the rows that footers have: a smaller file of as many rows is no loss."""
    cache = being_overwritten(tmp_path)
    said = [run_pqcache("sync", cache, *words) for words in (["--dry-run"], [])]
    assert [done.returncode for done in said] == [3, 3]
    errors = [re.findall("pqcache: error: .*", done.stderr) for done in said]
    assert errors[0] == errors[1]
    assert "76 rows of the 80" in errors[0][0]
    assert run_pqcache("sync", cache, "--dry-run", "--force").returncode == 0
    for directory in partitions(tmp_path / "lake"):
        write_files(directory, "b", files=1, rows=20, compression="zstd")
    assert run_pqcache("sync", cache, "--dry-run").returncode == 0
    (partitions(tmp_path / "lake")[0] / "b-00000.parquet").write_bytes(b"PAR1" + bytes(50))
    for words, code in (([], 1), (["--skip-bad"], 5)):
        said = [run_pqcache("sync", cache, *words, *dry) for dry in (["--dry-run"], [])]
        assert [done.returncode for done in said] == [code, code]


def test_a_dry_run_goes_on_from_a_new_listing_too(tmp_path: Path) -> None:
    cache, written = being_overwritten(tmp_path), list[Path]()

    def overwrite(event: object) -> None:
        if isinstance(event, Listed) and not written:
            for directory in partitions(tmp_path / "lake"):
                write_files(directory, "c", files=1, rows=20)
                written.append(directory)

    report = pqcache.sync(cache, dry_run=True, on_event=overwrite)
    assert (report.added, report.removed, report.skipped) == (4, 20, ())


def test_bytes_are_compared_where_rows_cannot_be(tmp_path: Path) -> None:
    """With another condition, other rows are taken of each file."""
    cache = being_overwritten(tmp_path)
    with pytest.raises(pqcache.SourceIncomplete, match="bytes of the"):
        pqcache.sync(cache, where="id >= 0")
    assert pqcache.sync(cache, where="id >= 0", force=True).published


def age(directory: Path, minutes: float = 60) -> None:
    """Make everything in a partition so many minutes older than it is."""
    for path in directory.rglob("*"):
        moment = path.stat().st_mtime - 60 * minutes
        os.utime(path, (moment, moment))


def days_in_cache(root: Path, large: bool = True, **how: Any) -> tuple[list[Path], Path]:
    """Return four partitions of a lake, of five files of twenty rows each, and a cache of it; one more may be large."""
    days = [root / "lake" / f"dt={day:04d}" for day in range(4)]
    for day in days:
        write_files(day, "old", files=5, rows=20)
        age(day)
    if large:
        write_files(root / "lake" / "dt=1000", "old", files=1, rows=12_000)
    pqcache.sync(str(root / "lake"), root / "cache", **how)
    return days, root / "cache"


def check_waiting(cache: Path, held: dict[str, pa.Table], partition: str, why: str) -> None:
    """Sync, which is to keep the old version of a partition, to say why, and to publish everything else.

    A dry run is to say the same.
    """
    warned: list[str] = []
    planned = pqcache.sync(cache, dry_run=True)
    report = pqcache.sync(cache, on_event=lambda event: isinstance(event, Warned) and warned.append(event.message))
    assert [(item.partition, item.kept) for item in report.skipped] == [(partition, True)]
    assert planned.skipped == report.skipped
    assert (planned.added, planned.changed, planned.removed) == (report.added, report.changed, report.removed)
    assert re.search(why, report.skipped[0].reason), report.skipped
    assert any(re.search(rf"partition {partition}: its old version is kept: .*{why}", text) for text in warned)
    assert check_snapshot(cache, [held]) == 0


@pytest.mark.parametrize("names", ["new", "old"])
def test_one_partition_that_is_being_overwritten_waits_and_the_rest_is_published(names: str, tmp_path: Path) -> None:
    """Its writer has deleted all of it and writes one file after the other, under new names or the same."""
    days, cache = days_in_cache(tmp_path)
    lake, old = tmp_path / "lake", rows_at(tmp_path / "lake")[days[3].name]
    write_files(lake / "dt=2000", "new", files=1, rows=7)
    write_files(days[3], names, files=2, rows=20)
    held = {**rows_at(lake), days[3].name: old}
    for _ in range(2):  # also where nothing else has changed
        check_waiting(cache, held, days[3].name, r"has 40 in place of 100 rows; .* younger than 10 min")
    for words in ([], ["--dry-run"]):
        done = run_pqcache("sync", cache, *words)
        assert done.returncode == 5
        assert "nothing to do" in done.stdout
        assert "; 1 partition skipped" in done.stdout
        assert f"1 partition skipped: {days[3].name}" in done.stderr
    for path in days[3].glob("*.parquet"):
        path.unlink()
    (days[3] / ".hive-staging_hive_2026").mkdir()
    (days[3] / ".hive-staging_hive_2026" / "000000_0").write_bytes(b"half")
    check_waiting(
        cache, held, days[3].name, r"has 0 in place of 100 rows; .* at work in dt=0003/\.hive-staging_hive_2026"
    )
    write_files(days[3], names, files=3, rows=20)  # more than half
    report = pqcache.sync(cache)
    assert (report.published, report.skipped) == (True, ())
    assert check_snapshot(cache, [rows_at(lake)]) == 0


def test_a_partition_that_has_shrunk_is_taken_once_its_files_have_settled(tmp_path: Path) -> None:
    days, cache = days_in_cache(tmp_path, row_group_size=16 << 10)
    lake, held = tmp_path / "lake", rows_at(tmp_path / "lake")
    write_files(days[0], "new", files=1, rows=20)
    age(days[0], minutes=9)
    check_waiting(cache, held, days[0].name, "may be younger than 10 min")
    for staging in (days[0] / "_temporary", lake / "_temporary", lake / ".spark-staging-1" / days[0].name):
        staging.mkdir(parents=True)
        (staging / "part").write_bytes(b"half")
        age(days[0], minutes=9)
        top = staging.relative_to(lake).parts[-1 if days[0] in staging.parents else 0]
        check_waiting(cache, held, days[0].name, rf"has 20 in place of 100 rows; its writer may be at work in .*{top}")
        shutil.rmtree(lake / staging.relative_to(lake).parts[0] if days[0] not in staging.parents else staging)
    (days[0] / "next").touch()
    age(days[0])
    check_waiting(cache, held, days[0].name, "next is empty")
    (days[0] / "next").unlink()
    (lake / "_temporary").mkdir()
    (lake / "_temporary" / "left").write_bytes(b"by a job that died long ago")
    age(lake / "_temporary", minutes=60 * 48)
    report = pqcache.sync(cache)
    assert (report.published, report.skipped) == (True, ())
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    write_files(days[1], "new", files=1, rows=20)
    age(days[1], minutes=2)
    assert len(pqcache.sync(cache).skipped) == 1
    assert pqcache.sync(cache, settle="1m").published, "--settle says how long it waits"
    assert check_snapshot(cache, [rows_at(lake)]) == 0


def test_a_partition_that_loses_much_of_the_table_waits_for_force(tmp_path: Path) -> None:
    days, cache = days_in_cache(tmp_path, large=False)
    held = rows_at(tmp_path / "lake")
    write_files(days[0], "new", files=1, rows=20)
    age(days[0])
    check_waiting(cache, held, days[0].name, r"loses 20\.0% of the table's rows, .*less than 1% may go; .*--force")
    assert pqcache.sync(cache, force=True).skipped == ()
    assert check_snapshot(cache, [rows_at(tmp_path / "lake")]) == 0
    write_files(days[0], "new", files=1, rows=3)  # under all its names: nothing that it had is gone
    assert pqcache.sync(cache).skipped == ()
    write_files(days[1], "new", files=1, rows=60)
    assert pqcache.sync(cache).skipped == ()
    shutil.rmtree(days[2])  # dropped, and not being overwritten
    report = pqcache.sync(cache)
    assert (report.removed, report.skipped) == (5, ())
    for path in sorted(days[3].glob("*.parquet"))[2:]:
        path.unlink()  # files that are as they were show that it is not being overwritten
    report = pqcache.sync(cache)
    assert (report.removed, report.skipped) == (3, ())
    assert check_snapshot(cache, [rows_at(tmp_path / "lake")]) == 0


def test_a_partition_that_is_overwritten_under_the_same_names_is_as_it_was_until_it_settles(tmp_path: Path) -> None:
    """With --settle too, where its first new file has the name of an old one, and the others are not there yet."""
    days, cache = days_in_cache(tmp_path, large=False)
    held = rows_at(tmp_path / "lake")
    write_files(days[0], "old", files=1, rows=20)
    assert not pqcache.sync(cache, settle="10m").published
    assert check_snapshot(cache, [held]) == 0


def write_versioned(directory: Path, version: str, rows: list[int], units: int = 1) -> None:
    """Write a file for each of some numbers of rows, all of about the same size."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(rows):
        table = pa.table({"version": [version] * count, "text": ["x" * (20_000 * units // count)] * count})
        pq.write_table(table, directory / f"{version}-{number}.parquet", compression="none", use_dictionary=False)
        (directory / "_SUCCESS").touch()


def two_nodes(root: Path, **how: Any) -> tuple[list[Path], Path]:
    """Return the caches of two nodes that share a table of three days, and the day that is on both."""
    for day in (1, 2, 3):
        write_versioned(root / f"lake/dt={day}", "old", [100] * 4)
    nodes = [root / "0", root / "1"]
    for number, node in enumerate(nodes):
        pqcache.sync(root / "lake", node, shard=f"{number}/2", **how)
    (shared,) = [day for day in (1, 2, 3) if all((node / f"current/dt={day}").is_dir() for node in nodes)]
    return nodes, root / f"lake/dt={shared}"


def damage_footer(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


@pytest.mark.parametrize("damaged", [False, True])
def test_nodes_that_share_a_partition_do_not_mix_its_versions(damaged: bool, tmp_path: Path) -> None:
    """One of them would keep its files of the old version, and the other take those of the new one."""
    nodes, shared = two_nodes(tmp_path, skip_bad=damaged)
    shutil.rmtree(shared)
    # of equal size: one node loses much, and the other nothing
    write_versioned(shared, "new", [100] * 4 if damaged else [10, 10, 100, 100])
    if damaged:
        damage_footer(shared / "new-0.parquet")
    for node in nodes:
        with suppress(SourceIncomplete):
            pqcache.sync(node)
    held = [rows_at(node / "current")[shared.name]["version"].unique().to_pylist() for node in nodes]
    assert held[0] == held[1] or len({pqcache.inspect(node).listing for node in nodes}) == 2, "training refuses these"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_partition_whose_old_version_is_kept_while_it_moves_to_another_node(damaged: bool, tmp_path: Path) -> None:
    nodes, shared = two_nodes(tmp_path, skip_bad=True, marker="_SUCCESS")

    def sync() -> tuple[int, int]:
        """Return how many rows of the partition both nodes hold together, and of how many listings they are."""
        for node in nodes:
            pqcache.sync(node)
        rows = [rows_at(node / "current").get(shared.name, pa.table({})).num_rows for node in nodes]
        return sum(rows), len({pqcache.inspect(node).listing for node in nodes})

    first, second = ({path.name for path in node.glob("current/dt=*")} for node in nodes)
    (before,) = first - second
    write_versioned(tmp_path / "lake" / before, "more", [100], units=6)  # enough for the first node
    if damaged:
        damage_footer(shared / "old-3.parquet")  # which the second node has, and has to take all of now
        rows, listings = sync()
        assert rows < 400, "nobody can have all of it"
        assert listings == 2, "training refuses these"
        assert sync() == (rows, 2)
        (shared / "_SUCCESS").unlink()
        assert sync() == (rows, 2)
    else:
        (shared / "_SUCCESS").unlink()
        assert sync() == (400, 1), "each node keeps what it has"
    assert (nodes[0] / "current" / before / "more-0.parquet").exists()
    write_versioned(shared, "old", [100] * 4)
    assert sync() == (400, 1)
    assert not (nodes[0] / "current" / shared.name).exists()
