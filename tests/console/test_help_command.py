"""``pqcache help``, and what the command line says of numbers and durations."""

from __future__ import annotations

from pathlib import Path

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


def test_durations_are_written_alike_everywhere(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1, files=1, rows=10), tmp_path / "cache"
    words = ["--wait", "1m", "--timeout", "2m", "--settle", "0.5s"]
    assert run_pqcache("sync", shop, cache, *words, "--dry-run").returncode == 3  # all are younger than that, or wait
    assert run_pqcache("sync", shop, cache, "--wait", "90", "--timeout", "1h").returncode == 0
    assert run_pqcache("gc", cache, "--wait", "1m", "--older-than", "2d").returncode == 0
