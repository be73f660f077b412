"""Links planted in a cache are neither followed nor published."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import pqcache
from pqcache.store.drivers.local import LocalSource
from pqcache.store.sync import snapshot_job as workdir
from tests.damage import flip
from tests.datasets import write_day
from tests.faults.checks import check_clean, check_snapshot, rows_at
from tests.faults.lakes import lake_of, state_of


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory that no sync may touch; checked at the end."""
    directory = tmp_path / "outside"
    shutil.copytree(lake_of(tmp_path)[0], directory / "lake")
    (directory / "precious").write_bytes(b"precious")
    before = state_of(directory)
    yield directory
    assert state_of(directory) == before, "something outside of the cache was touched"


def test_a_part_of_the_cache_that_is_a_link_is_refused(outside: Path, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
    moved = tmp_path / "moved"
    places = {"tmp": outside, "snapshots": outside, "pqcache.toml": moved}
    for name in ("tmp", "snapshots", "lock", "history.jsonl.zst", "memo.json", "pqcache.toml"):
        (cache / name).rename(moved) if (cache / name).exists() else moved.touch()
        (cache / name).symlink_to(places.get(name, outside / "precious"))
        for run in (lambda: pqcache.sync(cache), lambda: pqcache.gc(cache, keep=1), lambda: pqcache.repartition(cache)):
            with pytest.raises(pqcache.CacheError, match=f"{name}: is a symbolic link"):
                run()
        (cache / name).unlink()
        moved.rename(cache / name)


def test_links_in_tmp_are_removed_and_not_followed(outside: Path, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
    source = LocalSource(str(lake), {})
    keys = [workdir.file_key(str(lake), file) for file in source.list() if "2026-11-01" in file.path]
    boot = f"{workdir._boot_id()}-1-00000000"
    for place in (outside / "run" / "fetch", outside / "fetch"):
        place.mkdir(parents=True)
        for key in keys:
            (place / key).write_bytes(b"not it")
            (place / f"{key}.part").write_bytes(b"")
    state = state_of(outside)
    (cache / "tmp" / boot).symlink_to(outside / "run")
    second = cache / "tmp" / boot.replace("-1-", "-2-")
    second.mkdir()
    (second / "fetch").symlink_to(outside / "fetch")
    third = cache / "tmp" / boot.replace("-1-", "-3-")
    (third / "fetch").mkdir(parents=True)
    for key in keys:
        (third / "fetch" / key).symlink_to(outside / "precious")
        (third / "fetch" / f"{key}.part").symlink_to(outside / "precious")
    (cache / "tmp" / "stray").symlink_to(outside)
    (cache / "tmp" / "file").symlink_to(outside / "precious")
    try:
        pqcache.sync(cache)
        assert check_snapshot(cache, [rows_at(lake)]) == 0
        check_clean(cache)
        assert state_of(outside) == state, "a link in tmp/ was followed"
    finally:
        shutil.rmtree(outside / "run")
        shutil.rmtree(outside / "fetch")


@pytest.mark.parametrize("what", ["file", "directory", "snapshot", "metadata"])
def test_links_in_the_current_snapshot_are_not_taken_for_data(what: str, outside: Path, tmp_path: Path) -> None:
    """What was replaced by a link is fetched again; what the link points at is neither published nor touched."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache, keep=1)
    snapshot = (cache / "current").resolve()
    victim = {
        "file": snapshot / "dt=2026-11-02" / "part-00000.parquet",
        "directory": snapshot / "dt=2026-11-02",
        "snapshot": snapshot,
        "metadata": snapshot / "_pqcache",
    }[what]
    copy = outside / "copy"
    (shutil.copytree if victim.is_dir() else shutil.copy2)(victim, copy)
    for path in (copy, *copy.rglob("*.parquet")):
        if path.is_file():
            flip(path, 100)  # other rows, in files of the same size
    state = state_of(outside)
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    victim.symlink_to(copy)
    try:
        pqcache.sync(cache)
        write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
        pqcache.sync(cache)
        now = (cache / "current").resolve()
        assert cache in now.parents, "the current snapshot is outside of the cache"
        assert check_snapshot(cache, [rows_at(lake)]) == 0
        inodes = {path.stat().st_ino for path in copy.rglob("*.parquet")} | {copy.stat().st_ino}
        assert not inodes & {path.stat().st_ino for path in now.rglob("*.parquet")}, "a file from outside was published"
        check_clean(cache)
    except pqcache.CacheError:
        if what not in ("snapshot", "metadata"):  # where refusing is as good
            raise
    finally:
        assert state_of(outside) == state
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


def test_a_current_that_points_elsewhere_is_not_followed(outside: Path, tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    for target in (f"{outside}/lake", "snapshots/../../outside/lake", "/", "snapshots/", "gone", "current"):
        (cache / "current").unlink()
        (cache / "current").symlink_to(target)
        with pytest.raises(pqcache.CacheError, match="current"):
            pqcache.sync(cache)
        (cache / "current").unlink()
        pqcache.sync(cache)
        assert check_snapshot(cache, [rows_at(lake)]) == 0
