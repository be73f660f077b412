"""kill -9 at any instant of a rollback or a pin leaves a valid cache, and exactly what is so in the history."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import pqcache
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.history import read_history
from tests.datasets import write_day
from tests.faults.checks import Rows, check_clean, check_snapshot, rows_at, same_rows
from tests.faults.runner import Runner
from tests.faults.sweep import DEPTHS, points_to_try


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A cache of two nights."""
    for day in (1, 2):
        write_day(tmp_path / "lake", f"2026-11-0{day}", files=1, rows=20, first=day * 1000)
        pqcache.sync(tmp_path / "lake", tmp_path / "start")
    return tmp_path / "start"


@pytest.mark.parametrize("deep", DEPTHS)
@pytest.mark.parametrize("words", [("rollback", "1"), ("pin", "1", "--name", "paper")], ids=["rollback", "pin"])
def test_killed_before_each_operation(
    words: tuple[str, ...], deep: bool, start: Path, runner: Runner, tmp_path: Path
) -> None:
    cache, command = tmp_path / "cache", words[0]
    old, new = (rows_at(path) for path in (start / "current", sorted((start / "snapshots").iterdir())[0]))

    def restart() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(start, cache, symlinks=True)

    restart()
    points = runner.run(cache, command, cache, *words[1:], instrument={"kind": "count"}).points
    assert any("snapshots.json" in point for point in points)
    assert any("current" in point for point in points) is (command == "rollback")
    for at in points_to_try(points, deep):
        restart()
        ran = runner.run(cache, command, cache, *words[1:], instrument={"kind": "kill", "at": at})
        assert ran.code in (-9, 0), ran.stderr
        check_snapshot(cache, [old, new])
        assert {view.name for view in pqcache.snapshots(cache)} <= {None, "paper"}
        again = runner.run(cache, command, cache, *words[1:])
        assert again.code == 0, f"killed at {points[at]}: {again.stderr}"
        assert check_snapshot(cache, [old, new]) == (1 if command == "rollback" else 0)
        done = [r for r in read_history(cache) if r["command"] == command and r["result"] == "done"]
        moved = [r["snapshot"] for r in done if r.get("previous") != r["snapshot"]]
        assert set(moved) == {r["snapshot"] for r in done}, f"killed at {points[at]}"
        assert len(moved) == 1 or command == "pin", f"killed at {points[at]}"
        assert pqcache.sync(cache).published is (command == "rollback")
        check_clean(cache)


@pytest.mark.parametrize("deep", DEPTHS)
@pytest.mark.parametrize("words", [("sync",), ("rollback", "--release"), ("rollback", "1", "--hold")], ids=" ".join)
def test_killed_while_it_is_held(
    words: tuple[str, ...], deep: bool, start: Path, runner: Runner, tmp_path: Path
) -> None:
    """Of two nights, of which the first is served, there is a candidate; at the source there is a third one."""
    cache, lake, command = tmp_path / "cache", tmp_path / "lake", (words[0], tmp_path / "cache", *words[1:])
    first, second = (rows_at(path) for path in sorted((start / "snapshots").iterdir()))
    if "--hold" not in words:
        pqcache.rollback(start, "1", hold=True)
        pqcache.sync(start)
    write_day(lake, "2026-11-03", files=1, rows=20, first=3000)
    third = rows_at(lake)

    def restart() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(start, cache, symlinks=True)

    def waiting() -> Rows | None:
        found = CacheDirectory(cache).candidate()
        return None if found is None else rows_at(found.path)

    restart()
    points = runner.run(cache, *command, instrument={"kind": "count"}).points
    for at in points_to_try(points, deep):
        restart()
        ran = runner.run(cache, *command, instrument={"kind": "kill", "at": at})
        assert ran.code in (-9, 0), ran.stderr
        current, held = check_snapshot(cache, [first, second]), waiting()
        assert pqcache.status(cache).caches[0].error is None
        if command[0] == "sync":
            assert current == 0
            assert held is not None, f"killed at {points[at]}"
            assert same_rows(held, second) or same_rows(held, third)
        assert runner.run(cache, *command).code == 0, f"killed at {points[at]}"
        if "--hold" in words:
            assert check_snapshot(cache, [first, second]) == 0
            assert pqcache.sync(cache).candidate is not None
        elif "--release" in words:
            assert check_snapshot(cache, [first, second]) == 1, f"killed at {points[at]}"
            done = [r for r in read_history(cache) if r["command"] == "rollback" and r["result"] == "done"]
            assert len([r for r in done[1:] if r["previous"] != r["snapshot"]]) == 1, f"killed at {points[at]}"
            assert pqcache.sync(cache).published, "nothing is held"
            check_clean(cache)
            continue
        else:
            assert check_snapshot(cache, [first, second]) == 0
        found = waiting()
        assert found is not None
        assert same_rows(found, third), f"killed at {points[at]}"
        assert len(list((cache / "candidate").iterdir())) == 1
        check_clean(cache)
        assert pqcache.rollback(cache, release=True).published
        assert check_snapshot(cache, [third]) == 0
