"""The cache directory: publishing, leases, the lock, and what gc leaves."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

import pqcache
from tests.datasets import rows_of, write_day, write_shop
from tests.forked_commands import run_pqcache, true_in_child


@pytest.fixture
def cache(tmp_path: Path) -> pqcache.Cache:
    pqcache.sync(write_shop(tmp_path / "shop", rows=20), tmp_path / "cache")
    return pqcache.Cache.open(tmp_path / "cache")


def new_snapshot(cache: pqcache.Cache, version: int) -> pqcache.Snapshot:
    write_day(cache.path.parent / "shop", "2026-11-01", files=1, seed=version)
    pqcache.sync(cache.path)
    return cache.snapshot()


def test_a_directory_that_is_no_cache_is_named(tmp_path: Path) -> None:
    with pytest.raises(pqcache.CacheError, match="not a pqcache"):
        pqcache.Cache.open(tmp_path)
    (tmp_path / "someone's file").touch()
    with pytest.raises(pqcache.UsageError, match="not empty and not a pqcache"):
        pqcache.Cache(tmp_path).create()
    begun = pqcache.Cache(tmp_path / "begun")
    begun.create()
    (begun.path / "someone's file").touch()
    with pytest.raises(pqcache.UsageError, match="not empty and not a pqcache"):
        begun.create()


def test_no_dangerous_command_is_advised(tmp_path: Path) -> None:
    """As for /var, which has a ``tmp`` that all can write to: ``chmod -R go-w /var`` would break the machine."""
    lake = write_shop(tmp_path / "shop", days=1, files=1, rows=20)
    for number, entries in enumerate((["tmp/x", "www"], ["tmp/x"], ["snapshots/x", "lock"], ["pqcache.toml"], [])):
        place = tmp_path / f"var{number}"
        for name in entries:
            (place / name).mkdir(parents=True)
        place.mkdir(exist_ok=True)
        for path in (place, *place.glob("tmp")):
            path.chmod(0o1777)
        dry_run, add = ("sync", lake, place, "--dry-run"), ("add", lake, place.name, "--root", tmp_path)
        for words in (("sync", lake, place), *([dry_run, add] if number == 0 else [])):
            done = run_pqcache(*words)
            assert (done.returncode, "name a new directory" in done.stderr) == (2 if entries else 1, True), done
            assert "chmod" not in done.stderr
        assert sorted(path.name for path in place.iterdir()) == sorted({name.partition("/")[0] for name in entries})


def test_advised_commands_name_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "it's  two\twords"
    pqcache.sync(write_shop(tmp_path / "shop", days=1), cache)
    cache.chmod(0o777)
    done = run_pqcache("sync", cache)
    command = re.search(r"chmod -R go-w ('.*');", done.stderr)
    assert command is not None, done
    assert shlex.split(command[1]) == [str(cache).replace("\t", "%09")], "what controls a terminal is never printed"


def test_nothing_is_written_into_a_cache(cache: pqcache.Cache) -> None:
    lake, inside = cache.path.parent / "shop", cache.path / "snapshots" / "x"
    before = sorted(cache.path.rglob("*"))
    for words in (
        *(("sync", lake, cache.path / place) for place in ("snapshots/x", "current/x/y", "tmp/x", "x")),
        ("sync", lake, inside, "--dry-run"),
        ("add", lake, inside.name, "--root", inside.parent),
        ("repartition", lake, inside),
        ("repartition", cache.path, inside),
    ):
        done = run_pqcache(*words)
        assert done.returncode == 2, done
        assert f"the cache {cache.path}" in done.stderr or "lies in" in done.stderr
    assert sorted(cache.path.rglob("*")) == before


def test_current_is_a_relative_link(cache: pqcache.Cache) -> None:
    target = os.readlink(cache.path / "current")
    assert target == f"snapshots/{cache.snapshot().id}"
    moved = cache.path.with_name("elsewhere")
    cache.path.rename(moved)
    assert pqcache.Cache.open(moved).snapshot().index().rows.sum() == 180


def test_leased_snapshots_outlive_gc(cache: pqcache.Cache) -> None:
    old, lease = cache.lease()
    assert true_in_child(lambda: lease.release() is None)  # which is not to end it here
    expected = rows_of(old.path)
    for version in (1, 2):
        new_snapshot(cache, version)
    assert old.path.is_dir()
    assert rows_of(old.path) == expected
    assert len(cache.snapshots()) == 3  # current, the one kept, and the leased one
    lease.close()
    new_snapshot(cache, 3)
    assert not old.path.exists()
    assert len(cache.snapshots()) == 2
    with pytest.raises(pqcache.CacheError, match="gone"):
        old.lease()
    with pytest.raises(pqcache.CacheError, match="was removed"):
        cache.snapshot(old.id)


def test_a_lease_ends_with_its_process_even_by_kill(cache: pqcache.Cache) -> None:
    ready, tell = os.pipe()
    reader = os.fork()
    if not reader:
        signal.alarm(60)
        lease = cache.lease()
        os.write(tell, b"x")
        signal.pause()
        os._exit(len(lease))
    assert os.read(ready, 1) == b"x"
    held = cache.snapshot()
    new_snapshot(cache, 1)
    new_snapshot(cache, 2)
    assert held.path.exists()
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    new_snapshot(cache, 3)
    assert not held.path.exists()
    for end in (ready, tell):
        os.close(end)


def test_one_run_at_a_time(cache: pqcache.Cache) -> None:
    with (cache.path / "lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(pqcache.CacheLocked) as caught:
            pqcache.sync(cache.path)
        assert caught.value.exit_code == 75
        start = time.monotonic()
        with pytest.raises(pqcache.CacheLocked, match=r"and has not ended in 0\.5 s; try again later"):
            pqcache.sync(cache.path, wait=0.5)
        assert time.monotonic() - start >= 0.5
        remove = ("remove", cache.path.name, "--root", cache.path.parent, "--wait", "0.2")
        for words, advice in ((("sync", cache.path), "--wait 10m"), (remove, "0.2 s; try again later")):
            done = run_pqcache(*words)
            assert (done.returncode, done.stderr.endswith(f"{advice}\n")) == (75, True), done
        pqcache.sync(cache.path, dry_run=True)  # looking does not wait
    pqcache.sync(cache.path)


def test_damaged_parts_are_named(cache: pqcache.Cache) -> None:
    config = (cache.path / "pqcache.toml").read_text()
    for text, message in [
        (config.replace("format = 1", "format = 99"), "format 99"),
        ("= = =", "cannot be read"),
        ("format = 1\n", "source"),
    ]:
        (cache.path / "pqcache.toml").write_text(text)
        with pytest.raises(pqcache.CacheError, match=message):
            pqcache.sync(cache.path)
    (cache.path / "pqcache.toml").write_text(config)
    (cache.path / "current").unlink()
    (cache.path / "current").symlink_to("snapshots/not-there")
    with pytest.raises(pqcache.CacheError, match="not-there"):
        pqcache.sync(cache.path)
