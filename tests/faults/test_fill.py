"""Faults while a first copy arrives: kill -9 at any instant, a full or failing disk, a power loss."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pqcache.store.arriving import ArrivingSnapshot, arriving_snapshots
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.layout import PUBLISHING
from tests.datasets import write_day
from tests.faults.checks import Rows, check_clean, check_error, check_snapshot, rows_at
from tests.faults.runner import Runner
from tests.faults.sweep import CHANGES, DEPTHS, points_to_try


@dataclass(frozen=True)
class Scenario:
    """A lake, and the command that makes a cache of it, which is not there yet."""

    lake: Path
    cache: Path
    rows: Rows
    options: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[object, ...]:
        return ("sync", self.lake, self.cache, "--fill", "--jobs", "3", "--json", *self.options)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    lake = tmp_path / "lake"
    write_day(lake, "2026-11-01", files=2, rows=1500)
    write_day(lake, "2026-11-02", files=1, rows=1500, first=100_000)
    write_day(lake, "2026-11-03", files=1, rows=50, first=200_000)
    return Scenario(lake, tmp_path / "cache", rows_at(lake))


def check_arriving(scenario: Scenario) -> tuple[str, dict[str, int]]:
    """Assert that the files that are there of an arriving snapshot are those at the source.

    Return the ID of the snapshot that the next run will publish, empty for a new one, and the bytes there, by file.
    """
    cache = CacheDirectory(scenario.cache)
    found = arriving_snapshots(cache) if cache.exists() else []
    assert len(found) <= 1
    if (scenario.cache / PUBLISHING).exists():  # all is there, and some files of the run may be gone
        sizes = {
            f"{name}/{path.name}": path.stat().st_size for name in scenario.rows for path in files_in(scenario, name)
        }
        return (scenario.cache / PUBLISHING).read_text(), sizes
    if not found or found[0].is_abandoned():
        return "", {}
    return found[0].id, there_of(found[0], scenario.lake)


def below(scenario: Scenario, points: list[str]) -> list[str]:
    """Return points with their paths in the cache: those above it must not look like a phase of the run."""
    return [point.replace(str(scenario.cache), "cache", 1) for point in points]


def files_in(scenario: Scenario, directory: str) -> list[Path]:
    return sorted((scenario.lake / directory).glob("*.parquet"))


def there_of(snapshot: ArrivingSnapshot, lake: Path) -> dict[str, int]:
    held = {}
    for path in snapshot.arrived(entry.path for entry in snapshot.manifest().files):
        assert (snapshot.path / path).read_bytes() == (lake / path).read_bytes(), path
        held[path] = (lake / path).stat().st_size
    return held


def check_next_run(runner: Runner, scenario: Scenario, plain: bool = False) -> None:
    """Assert that the next run finishes, under the same ID, and fetches nothing again that is there."""
    name, held = check_arriving(scenario)
    command = [word for word in scenario.command if word != "--fill" or not plain]
    ran = runner.run(scenario.cache, *command)
    assert ran.code == 0, ran.stderr
    assert check_snapshot(scenario.cache, [scenario.rows]) == 0
    check_clean(scenario.cache)
    current = CacheDirectory(scenario.cache).current()
    assert current is not None
    assert current.id == (name or current.id)
    for path, there in held.items():
        assert ran.read.get(path, 0) + there <= (scenario.lake / path).stat().st_size, f"{path} was fetched again"


@pytest.mark.parametrize("deep", DEPTHS)
def test_killed_before_each_operation(deep: bool, runner: Runner, scenario: Scenario) -> None:
    complete = runner.run(scenario.cache, *scenario.command, instrument={"kind": "count"})
    assert complete.code == 0, complete.stderr
    for phase in ("snapshot/_pqcache", "/arriving/", "publishing", "arrived.jsonl", "current", "history"):
        assert any(phase in point for point in complete.points), f"no point in {phase}: the sweep misses a phase"
    arriving = 0
    for at in points_to_try(below(scenario, complete.points), deep, {*CHANGES, "fsync"}):
        shutil.rmtree(scenario.cache, ignore_errors=True)
        try:
            ran = runner.run(scenario.cache, *scenario.command, instrument={"kind": "kill", "at": at})
            assert ran.code in (-9, 0), ran.stderr
            check_snapshot(scenario.cache, [None, scenario.rows])
            arriving += bool(check_arriving(scenario)[0])
            check_next_run(runner, scenario, plain=at % 3 == 0)
        except AssertionError as error:
            raise AssertionError(f"killed at {at} ({complete.points[at]}): {error}") from error
    assert arriving >= (20 if deep else 5)


@pytest.mark.parametrize("deep", DEPTHS)
def test_killed_again_and_again(deep: bool, runner: Runner, scenario: Scenario) -> None:
    """What is there grows from run to run until all of it is."""
    rng, held = np.random.default_rng(5), 0
    points = len(runner.run(scenario.cache, *scenario.command, instrument={"kind": "count"}).points)
    shutil.rmtree(scenario.cache)
    for _ in range(12 if deep else 4):
        at = int(rng.integers(points // 5, points // 2))
        runner.run(scenario.cache, *scenario.command, instrument={"kind": "kill", "at": at})
        check_snapshot(scenario.cache, [None, scenario.rows])
        before, held = held, sum(check_arriving(scenario)[1].values())
        assert held >= before or (scenario.cache / "current").is_symlink()
    check_next_run(runner, scenario)


@pytest.mark.parametrize("deep", DEPTHS)
def test_every_operation_may_fail(deep: bool, runner: Runner, scenario: Scenario) -> None:
    """In turn on a disk that is full from then on, and on one that fails once."""
    points = runner.run(scenario.cache, *scenario.command, instrument={"kind": "count"}).points
    failed = 0
    tried = points_to_try(below(scenario, points), deep, {*CHANGES, "fsync", *(["open"] if deep else [])})
    for turn, at in enumerate(tried):
        number = errno.EIO if turn % 2 else errno.ENOSPC
        shutil.rmtree(scenario.cache, ignore_errors=True)
        try:
            instrument = {"kind": "fail", "at": at, "errno": number, "on": number == errno.ENOSPC}
            ran = runner.run(scenario.cache, *scenario.command, instrument=instrument)
            failed += ran.code != 0
            check_snapshot(scenario.cache, [None, scenario.rows])
            check_error(ran)
            check_next_run(runner, scenario)
        except AssertionError as error:
            raise AssertionError(f"failed at {at} ({points[at]}): {error}") from error
    assert failed >= len(tried) // 4, "hardly anything failed: the sweep does not reach the cache"


def test_what_failed_to_become_durable_is_not_trusted(runner: Runner, scenario: Scenario) -> None:
    instrument = {"kind": "fail", "first": r"fsync .*/fetch/", "errno": errno.EIO}
    ran = runner.run(scenario.cache, *scenario.command, instrument=instrument)
    assert ran.code == 1
    snapshot = arriving_snapshots(CacheDirectory(scenario.cache))[0]
    assert len(snapshot.arrived(entry.path for entry in snapshot.manifest().files)) < 4
    check_next_run(runner, scenario)


def test_what_becomes_visible_is_on_disk(runner: Runner, scenario: Scenario) -> None:
    ran = runner.run(scenario.cache, *scenario.command, instrument={"kind": "order"})
    assert ran.code == 0, ran.stderr
    assert any(line.startswith("arriving/") and "-> snapshots/" in line for line in ran.order["seen"])
    assert ran.order["found"] == []
