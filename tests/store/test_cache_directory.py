"""The cache directory: publishing, leases, the lock, and what gc leaves."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pqcache
from tests.datasets import rows_of, write_day, write_shop
from tests.forked_commands import run_pqcache


@pytest.fixture
def cache(tmp_path: Path) -> pqcache.Cache:
    pqcache.sync(str(write_shop(tmp_path / "shop")), tmp_path / "cache")
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


@pytest.mark.parametrize("entries", [["tmp/x", "www"], ["tmp/x"], ["snapshots/x", "lock"], ["pqcache.toml"], []])
def test_no_dangerous_command_is_advised(entries: list[str], cache: pqcache.Cache) -> None:
    """As for /var, which has a ``tmp`` that all can write to: ``chmod -R go-w /var`` would break the machine."""
    lake, place = cache.path.parent / "shop", cache.path.with_name("var")
    for name in entries:
        (place / name).mkdir(parents=True)
    place.mkdir(exist_ok=True)
    for path in (place, *place.glob("tmp")):
        path.chmod(0o1777)
    for words in (
        ("sync", lake, place),
        ("sync", lake, place, "--dry-run"),
        ("add", lake, "var", "--root", place.parent),
    ):
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


@pytest.mark.parametrize("place", ["snapshots/x", "current/x/y", "tmp/x", "x"])
def test_nothing_is_written_into_a_cache(place: str, cache: pqcache.Cache) -> None:
    lake, inside = cache.path.parent / "shop", cache.path / place
    before = sorted(cache.path.rglob("*"))
    for words in (
        ("sync", lake, inside),
        ("sync", lake, inside, "--dry-run"),
        ("add", lake, inside.name, "--root", inside.parent),
        ("repartition", lake, inside),
        ("repartition", cache.path, inside),
    ):
        done = run_pqcache(*words)
        assert (done.returncode, f"the cache {cache.path}" in done.stderr or "lies in" in done.stderr) == (2, True), (
            done
        )
    assert sorted(cache.path.rglob("*")) == before


def test_current_is_a_relative_link(cache: pqcache.Cache) -> None:
    target = os.readlink(cache.path / "current")
    assert target == f"snapshots/{cache.snapshot().id}"
    moved = cache.path.with_name("elsewhere")
    cache.path.rename(moved)
    assert pqcache.Cache.open(moved).snapshot().index().rows.sum() == 3600


def test_leased_snapshots_outlive_gc(cache: pqcache.Cache) -> None:
    old, lease = cache.lease()
    expected = rows_of(old.path)
    for version in (1, 2, 3):
        new_snapshot(cache, version)
    assert old.path.is_dir()
    assert rows_of(old.path) == expected
    assert len(cache.snapshots()) == 3  # current, the one kept, and the leased one
    lease.close()
    new_snapshot(cache, 4)
    assert not old.path.exists()
    assert len(cache.snapshots()) == 2


def _hold(path: Path, ready: object, release: object) -> None:
    lease = pqcache.Cache.open(path).lease()
    ready.set()  # type: ignore[attr-defined]
    release.wait(60)  # type: ignore[attr-defined]
    lease[1].close()


def test_a_lease_ends_with_its_process_even_by_kill(cache: pqcache.Cache) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    reader = context.Process(target=_hold, args=(cache.path, ready, release))
    reader.start()
    assert ready.wait(30)
    held = cache.snapshot()
    new_snapshot(cache, 1)
    new_snapshot(cache, 2)
    assert held.path.exists()
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    reader.join(30)
    new_snapshot(cache, 3)
    assert not held.path.exists()


def test_a_lease_on_what_is_gone_is_an_error(cache: pqcache.Cache) -> None:
    old = cache.snapshot()
    new_snapshot(cache, 1)
    new_snapshot(cache, 2)
    with pytest.raises(pqcache.CacheError, match="gone"):
        old.lease()
    with pytest.raises(pqcache.CacheError, match="not kept any more"):
        cache.snapshot(old.id)


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
        for words in (("sync", cache.path), ("remove", cache.path.name, "--root", cache.path.parent)):
            for wait, advice in (((), "wait for it with --wait 10m"), (("--wait", "0.2"), "0.2 s; try again later")):
                done = run_pqcache(*words, *wait)
                assert (done.returncode, done.stderr.endswith(f"{advice}\n")) == (75, True), done
        pqcache.sync(cache.path, dry_run=True)  # looking does not wait
    pqcache.sync(cache.path)


def test_damaged_parts_are_named(cache: pqcache.Cache) -> None:
    config = (cache.path / "pqcache.toml").read_text()
    for text, message in [
        (config.replace("format = 1", "format = 99"), "format 99"),
        ("= = =", "cannot be read"),
        ("format = 1\n", "source"),
        (config.replace("keep = 2", "keep = 0"), "keep=0: has to be at least 1"),
        (config.replace("keep = 2", "keep = 'many'"), "many"),
    ]:
        (cache.path / "pqcache.toml").write_text(text)
        with pytest.raises(pqcache.CacheError, match=message):
            pqcache.sync(cache.path)
    (cache.path / "pqcache.toml").write_text(config)
    (cache.path / "current").unlink()
    (cache.path / "current").symlink_to("snapshots/not-there")
    with pytest.raises(pqcache.CacheError, match="not-there"):
        pqcache.sync(cache.path)


def test_nothing_but_the_torch_companion_needs_torch(tmp_path: Path) -> None:
    """Importing and using the library in an interpreter where torch cannot be imported."""
    shop = write_shop(tmp_path / "shop")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pqcache, pqcache.cli, pqcache.console.terminal\n"
        "import pqcache.reader.order, pqcache.reader.epoch\n"
        f"pqcache.sync({str(shop)!r}, {str(tmp_path / 'c')!r}, row_group_size=65536)\n"
        f"assert pqcache.inspect({str(tmp_path / 'c')!r}).rows == 3600\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
