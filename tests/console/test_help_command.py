"""``pqcache help``, and what the command line says of numbers and durations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.datasets import write_shop
from tests.forked_commands import run_pqcache


def test_help_is_a_command_too() -> None:
    for words, same in ((["help"], ["--help"]), (["help", "gc"], ["gc", "-h"]), (["help", "help"], ["help", "-h"])):
        result = run_pqcache(*words)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.strip() == run_pqcache(*same).stdout.strip()
    result = run_pqcache("help", "synk")
    assert result.returncode == 2
    assert "help synk: there is no such command; did you mean 'sync'?" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sync", "a", "b", "--jobs", "x"], "--jobs x: not a whole number; write it like 8"),
        (["sync", "a", "b", "-j", "1.5"], "--jobs 1.5: not a whole number"),
        (["sync", "a", "b", "--keep", "0"], "--keep 0: has to be at least 1"),
        (["sync", "a", "b", "--wait", "10x"], "--wait 10x: not a duration; write it like 90s, 10m, 48h or 2d"),
        (["sync", "a", "b", "--timeout", "0"], "--timeout 0: has to be at least 0.1"),
        (["sync", "a", "b", "--settle", "soon"], "--settle soon: not a duration"),
        (["gc", "b", "--older-than", "-1h"], "--older-than -1h: not a duration"),
        (["bench", "b", "--seconds", "x"], "--seconds x: not a duration"),
        (["serve", "b", "--port", "http"], "--port http: not a whole number"),
        (["log", "b", "-n", "0"], "--last 0: has to be at least 1"),
    ],
)
def test_numbers_that_make_no_sense(words: list[str], said: str) -> None:
    result = run_pqcache(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pqcache: error: {said}"), result.stderr


def test_durations_are_written_alike_everywhere(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1, files=1, rows=10), tmp_path / "cache"
    words = ["--wait", "1m", "--timeout", "2m", "--settle", "0.5s"]
    assert run_pqcache("sync", shop, cache, *words, "--dry-run").returncode == 3  # all are younger than that, or wait
    assert run_pqcache("sync", shop, cache, "--wait", "90", "--timeout", "1h").returncode == 0
    assert run_pqcache("gc", cache, "--wait", "1m", "--older-than", "2d").returncode == 0


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("dt = 2026-11-01", "2026-11-01 without quotes is arithmetic; write dates and times in quotes: '2026-11-01'"),
        ("dt IN (2026/11/01)", "2026/11/01 without quotes is arithmetic"),
        ("dt BETWEEN 2026-11-01 AND '2026-11-03'", "2026-11-01 without quotes is arithmetic"),
        ("dt > 2026-11-01 04:00", "not a complete condition; write dates and times in quotes: '2026-11-01 04:00'"),
        ("dt > '2026-11-01' and", "not a complete condition; use comparisons"),
        ("id = price", "'price' is not a constant but a column; write text in quotes: 'price'"),
        ("day = 1", "there is no column day; there are: id, "),
    ],
)
def test_hints_about_conditions(where: str, said: str, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, files=1, rows=10)
    result = run_pqcache("sync", shop, tmp_path / "cache", "--where", where)
    assert result.returncode == 2
    assert said in result.stderr
    if "no column" in said:
        assert result.stderr.rstrip().endswith(", dt")
