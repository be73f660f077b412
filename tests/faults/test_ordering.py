"""Power loss: what a name makes visible is on disk before the name is.

A run is watched: every fsync is recorded with the state of what it made durable, and at every rename that
makes something visible (a finished download, a rewritten directory, a snapshot, ``current``, pqcache.toml) all
that it depends on, files and directories, must be as it was when it was last fsynced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.checks import rows_at
from tests.faults.runner import Runner
from tests.faults.test_kill import make_scenario


@pytest.mark.parametrize("kind", ["rewritten", "columns", "first", "cut", "keys"])
def test_what_becomes_visible_is_on_disk(kind: str, runner: Runner, tmp_path: Path) -> None:
    scenario = make_scenario(runner, tmp_path, kind)
    scenario.restart()
    ran = runner.run(scenario.cache, *scenario.command, instrument={"kind": "order"})
    assert ran.code == 0, ran.stderr
    assert rows_at(scenario.cache / "current") == scenario.new
    seen = "\n".join(ran.order["seen"])
    assert "-> snapshots/" in seen
    assert "-> current" in seen
    assert kind == "cut" or "/fetch/" in seen
    assert kind not in ("rewritten", "cut") or "/rewrite/" in seen
    assert kind == "first" or "-> tmp/removed-" in seen
    assert ran.order["found"] == []


def test_the_way_to_a_new_cache_is_on_disk(runner: Runner, tmp_path: Path) -> None:
    """A first run that says it is done has made the cache's own directory durable, and those it made above it."""
    scenario = make_scenario(runner, tmp_path, "first")
    cache = tmp_path / "made" / "by" / "sync" / "cache"
    command = [cache if part == scenario.cache else part for part in scenario.command]
    ran = runner.run(cache, *command, instrument={"kind": "order"}, parents=str(tmp_path))
    assert ran.code == 0, ran.stderr
    assert ran.order["found"] == []
