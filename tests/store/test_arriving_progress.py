"""Inspect of a cache whose first snapshot is arriving: all that the index knows, and how far it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import pqcache
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.sync import fill
from tests.forked_commands import run_pqcache
from tests.store.sync.fill.filling import Filling, LocalReads
from tests.store.sync.fill.test_snapshot import write_wide


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> LocalReads:
    monkeypatch.setattr(fill, "_LOOK", 0.0)
    return LocalReads(monkeypatch)


def test_how_far_it_is(reads: LocalReads, tmp_path: Path) -> None:
    made, cache = write_wide(tmp_path / "made"), tmp_path / "cache"
    filling = Filling(reads, made, cache)
    snapshot = filling.arriving()
    found = pqcache.inspect(cache)
    assert (found.files, found.rows, found.row_groups, found.snapshot) == (3, 72_000, 12, snapshot.id)
    assert found.arriving is not None
    assert 0 == found.arriving.bytes < found.arriving.total_bytes == found.bytes
    assert (found.arriving.files, found.arriving.changed, found.arriving.abandoned) == (0, 0, False)
    assert str(os.getpid()) in found.arriving.run
    shown = run_pqcache("inspect", cache)
    assert shown.returncode == 0, shown.stderr
    assert "0 of 3 files" in shown.stdout
    assert f"fetched by process {os.getpid()}" in shown.stdout
    assert len(run_pqcache("inspect", cache, "--row-groups", "--json").stdout.splitlines()) == 12
    assert json.loads(run_pqcache("inspect", cache, "--json").stdout)["arriving"]["total_bytes"] == found.bytes
    sample = run_pqcache("inspect", cache, "--sample", "3")
    assert (sample.returncode, "still arriving" in sample.stderr) == (2, True)
    for words in (
        ("verify", cache),
        ("index", cache, "--key", "id"),
        ("repartition", cache, "--row-group-size", "1MB"),
    ):
        refused = run_pqcache(*words)
        assert refused.returncode in (1, 75), refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert run_pqcache("log", cache).returncode == 0
    filling.end()
    published = pqcache.inspect(cache)
    assert published.arriving is None
    assert published.snapshot == snapshot.id


def test_a_run_that_has_ended(reads: LocalReads, tmp_path: Path) -> None:
    made, cache = write_wide(tmp_path / "made"), tmp_path / "cache"
    filling = Filling(reads, made, cache, jobs=1)
    filling.arriving()

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    reads.before = end
    with pytest.raises(KeyboardInterrupt):
        filling.end()
    found = pqcache.inspect(cache)
    assert found.arriving is not None
    assert found.arriving.run == ""
    assert "no run is fetching it" in run_pqcache("inspect", cache).stdout


def test_a_first_sync_at_work_is_said(tmp_path: Path) -> None:
    """Nothing is published yet, and a run without --fill shows nothing of what it fetches."""
    cache = CacheDirectory(tmp_path / "cache")
    cache.create()
    write_config(cache.path, Config(source=str(tmp_path / "lake")))
    with cache.lock():
        shown = run_pqcache("inspect", cache.path)
    assert shown.returncode == 1
    assert f"nothing is published yet, and process {os.getpid()} of " in shown.stderr
    assert shown.stderr.endswith(" is at work here; wait for its end\n")
    ended = run_pqcache("inspect", cache.path)
    assert ended.stderr.endswith(f"nothing is published yet; run 'pqcache sync {cache.path}'\n")
