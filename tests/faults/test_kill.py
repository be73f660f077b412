"""kill -9 at any instant leaves the old snapshot or the new one, and the next run finishes the work.

The sweep kills a run before each operation on the cache that it makes (and in the middle of writes), so it
covers download, rewrite, index, publish and gc without relying on luck. A few runs of the real command are
killed after random delays as well, from each kind of store.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pqcache.store.drivers.registry import open_source
from pqcache.store.history import read_history
from pqcache.store.key_lookup import check_key_index, columns_indexed, directory_of
from pqcache.store.sync.snapshot_job import file_key
from tests.datasets import shop_table, write_day
from tests.faults.checks import Rows, check_clean, check_snapshot, rows_at
from tests.faults.runner import Runner, RunResult
from tests.faults.sweep import DEPTHS, points_to_try

SIZE = ["--row-group-size", "32k"]
PART = ["--columns", "id,title,price", "--where", "price < 0.7"]


@dataclass(frozen=True)
class Scenario:
    """A cache of yesterday's table (``start``), today's table (``lake``), and the command that updates the cache."""

    start: Path
    lake: Path
    cache: Path
    command: tuple[object, ...]
    old: Rows | None
    new: Rows

    def restart(self) -> None:
        """Put the cache back to how it was before the run."""
        shutil.rmtree(self.cache, ignore_errors=True)
        if self.start.exists():
            shutil.copytree(self.start, self.cache, symlinks=True)

    def finished_downloads(self) -> set[str]:
        """Return the source files that killed runs have downloaded to the end."""
        keys = {path.name for path in self.cache.glob("tmp/*/fetch/*")}
        source = open_source(str(self.lake))
        return {file.path for file in source.list() if file_key(str(self.lake), file) in keys}


def yesterday(lake: Path) -> None:
    write_day(lake, "2026-11-01", files=2, rows=200, first=0)
    write_day(lake, "2026-11-02", files=2, rows=200, first=100_000)
    write_day(lake, "2026-11-03", files=1, rows=100, first=200_000)


def today(lake: Path) -> None:
    """One file changes, one goes, with less than half of the rows; a partition goes, one comes, one is the same."""
    pq.write_table(shop_table(700_000, 250), lake / "dt=2026-11-01" / "part-00000.parquet")
    (lake / "dt=2026-11-01" / "part-00001.parquet").unlink()
    shutil.rmtree(lake / "dt=2026-11-03")
    write_day(lake, "2026-11-04", files=2, rows=150, first=300_000)


def make_scenario(runner: Runner, tmp_path: Path, kind: str) -> Scenario:
    """Return a scenario of this kind.

    That is plain, rewritten, columns (some columns and rows of the source), first (there is no cache yet), cut
    (a repartition), keys (a cache with key indexes) or index (key indexes are made and dropped).
    """
    lake, start, cache = tmp_path / "lake", tmp_path / "start", tmp_path / "cache"
    yesterday(lake)
    extra = ["--jobs", "2", "--keep", "1", "--json"]
    if kind == "columns":
        extra += PART
    elif kind not in ("plain", "keys", "index"):
        extra += SIZE
    if kind == "first":
        return Scenario(start, lake, cache, ("sync", lake, cache, *extra), None, rows_at(lake))
    arguments = [argument for argument in extra if argument not in SIZE] if kind == "cut" else extra
    assert runner.run(cache, "sync", lake, cache, *arguments).code == 0
    if kind in ("keys", "index"):
        assert runner.run(cache, "index", cache, "--key", "id", "--key", "title").code == 0
    if kind == "index":
        (directory_of((cache / "current").resolve(), "id") / "index.arrow").unlink()  # to be made again
    shutil.copytree(cache, start, symlinks=True)
    part = wanted if kind == "columns" else lambda rows: rows
    old = part(rows_at(lake))
    if kind == "cut":  # nothing comes from the source: the same rows in other row groups, and a gc
        return Scenario(start, lake, cache, ("repartition", cache, *SIZE), old, old)
    if kind == "index":
        command = ("index", cache, "--key", "id", "--key", "note", "--drop", "title")
        return Scenario(start, lake, cache, command, old, old)
    today(lake)
    return Scenario(start, lake, cache, ("sync", cache, *extra), old, part(rows_at(lake)))


def wanted(rows: Rows) -> Rows:
    """Return what PART takes of a dataset."""
    return {
        directory: table.filter(pc.less(table["price"], 0.7)).select(["id", "title", "price"])
        for directory, table in rows.items()
    }


def killed(runner: Runner, scenario: Scenario, at: int) -> RunResult:
    """Run, to be killed at ``at``; check what is left, let the next run finish, and check again."""
    ran = runner.run(scenario.cache, *scenario.command, instrument={"kind": "kill", "at": at})
    assert ran.code in (-9, 0), ran.stderr  # 0: threads took another way through the points
    versions = [scenario.old, scenario.new]
    check_snapshot(scenario.cache, versions)
    return finished(runner, scenario)


def finished(runner: Runner, scenario: Scenario) -> RunResult:
    downloaded = scenario.finished_downloads()
    again = runner.run(scenario.cache, *scenario.command)
    assert again.code == 0, again.stderr
    assert check_snapshot(scenario.cache, [scenario.new]) == 0
    check_clean(scenario.cache)
    assert not downloaded & set(again.read), "a finished download was fetched again"
    records = read_history(scenario.cache)
    assert records[-1]["published"] in (True, False)
    kept = {path.name for path in (scenario.cache / "snapshots").iterdir()}
    assert kept <= {record.get("snapshot") for record in records}, "a snapshot is missing from the history"
    return again


@pytest.mark.parametrize("deep", DEPTHS)
@pytest.mark.parametrize("kind", ["rewritten", pytest.param("columns", marks=pytest.mark.deep), "first", "cut", "keys"])
def test_killed_before_each_operation(kind: str, deep: bool, runner: Runner, tmp_path: Path) -> None:
    scenario = make_scenario(runner, tmp_path, kind)
    scenario.restart()
    complete = runner.run(scenario.cache, *scenario.command, instrument={"kind": "count"})
    assert complete.code == 0, complete.stderr
    check_snapshot(scenario.cache, [scenario.new])
    check_clean(scenario.cache)
    points = complete.points
    assert len(points) > 60
    for phase in ("fetch/", "snapshot/", "current", "history", "removed-"):
        if not (kind == "first" and phase == "removed-") and not (kind == "cut" and phase == "fetch/"):
            assert any(phase in point for point in points), f"no point in {phase}: the sweep misses a phase"
    for at in points_to_try(points, deep):
        scenario.restart()
        try:
            killed(runner, scenario, at)
        except AssertionError as error:
            raise AssertionError(f"killed at {at} ({points[at]}): {error}") from error


@pytest.mark.parametrize("deep", DEPTHS)
def test_killed_while_key_indexes_are_made(deep: bool, runner: Runner, tmp_path: Path) -> None:
    """The data is never touched, and there is a complete key index or none."""
    scenario = make_scenario(runner, tmp_path, "index")
    scenario.restart()
    points = runner.run(scenario.cache, *scenario.command, instrument={"kind": "count"}).points
    assert any("keys-" in point for point in points)
    assert any("os.rename" in point and "removed-" not in point for point in points)
    for at in points_to_try(points, deep):
        scenario.restart()
        runner.run(scenario.cache, *scenario.command, instrument={"kind": "kill", "at": at})
        snapshot = (scenario.cache / "current").resolve()
        there = columns_indexed(snapshot)
        for column in there:
            if not (column == "id" and not (directory_of(snapshot, "id") / "index.arrow").exists()):  # not begun yet
                check_key_index(directory_of(snapshot, column), deep=True)
        assert rows_at(snapshot) == scenario.old
        again = runner.run(scenario.cache, *scenario.command)
        assert again.code == 0 or (again.code == 2 and "title" not in there), points[at]  # 2: it was dropped already
        assert {"id", "note"} <= set(columns_indexed(snapshot)), points[at]
        check_clean(scenario.cache)


@pytest.mark.parametrize("deep", DEPTHS)
def test_killed_again_and_again(deep: bool, runner: Runner, tmp_path: Path) -> None:
    """Every run is killed a little later than the one before; ``tmp/`` does not grow and nothing is lost."""
    scenario = make_scenario(runner, tmp_path, "rewritten")
    rng = random.Random(3)
    size = sum(path.stat().st_size for path in scenario.lake.rglob("*.parquet"))
    for _ in range(8 if deep else 1):
        scenario.restart()
        for number in range(10):
            at = rng.randrange(20, 90 + number * 25)
            runner.run(scenario.cache, *scenario.command, instrument={"kind": "kill", "at": at})
            check_snapshot(scenario.cache, [scenario.old, scenario.new])
            seen: set[tuple[int, int]] = set()
            for path in (scenario.cache / "tmp").rglob("*.p*"):
                seen.add((path.stat().st_ino, path.stat().st_size))
            assert sum(bytes_ for _, bytes_ in seen) < 4 * size + (1 << 20), "tmp/ grows from run to run"
        finished(runner, scenario)
