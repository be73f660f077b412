"""A cache that another user can change: what was planted is neither followed, believed, published nor waited for."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pqcache
from pqcache.store import ownership, snapshot
from pqcache.store.drivers.local import LocalSource
from pqcache.store.ownership import CACHES, GROUPS
from pqcache.store.sync import snapshot_job as workdir
from tests.datasets import write_day
from tests.faults.checks import check_clean, check_snapshot, rows_at
from tests.faults.lakes import lake_of, state_of
from tests.forked_commands import true_in_child

NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can give files to another user")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    lake, cache = lake_of(tmp_path, days=2)
    pqcache.sync(str(lake), cache)
    write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
    return cache


def everything(cache: Path) -> list[Callable[[], object]]:
    """Return all that writes to a cache, or contacts the source that it names."""
    return [
        lambda: pqcache.sync(cache),
        lambda: pqcache.sync(cache, dry_run=True),
        lambda: pqcache.gc(cache, keep=1),
        lambda: pqcache.repartition(cache, row_group_size=4096),
        lambda: pqcache.index(cache, keys=["id"]),
        lambda: pqcache.verify(cache, source=True),
    ]


@as_root
def test_a_part_that_belongs_to_another_user_is_refused(cache: Path) -> None:
    for part in ("", "pqcache.toml", "tmp", "snapshots", "lock", "history.jsonl.zst", "current"):
        os.chown(cache / part, NOBODY, NOBODY, follow_symlinks=False)
        before = state_of(cache)
        for run in everything(cache):
            with pytest.raises(pqcache.CacheError, match=rf"{part}: belongs to nobody.* chown -R root {cache}"):
                run()
        assert state_of(cache) == before
        assert pqcache.inspect(str(cache)).rows == 80
        assert pqcache.verify(cache).ok
        os.chown(cache / part, 0, 0, follow_symlinks=False)
    (cache.parent / "new").mkdir()
    os.chown(cache.parent / "new", NOBODY, NOBODY)
    with pytest.raises(pqcache.CacheError, match="belongs to nobody"):
        pqcache.sync(cache.parent / "lake", cache.parent / "new")
    assert list((cache.parent / "new").iterdir()) == []


@pytest.mark.parametrize(("mode", "who"), [(0o777, "every user"), (0o775, "group")])
def test_a_part_that_others_can_write_is_refused(mode: int, who: str, cache: Path) -> None:
    for part in ("", "pqcache.toml", "tmp", "snapshots", "current/"):
        path = (cache / part).resolve()
        if os.getuid() == 0:
            os.chown(path, 0, 12345)
        elif mode == 0o775 and ownership._is_private(path.stat().st_gid, os.getuid()):
            pytest.skip("NOT TESTED: the group of this user is private")
        path.chmod(mode)
        before = state_of(cache)
        for run in everything(cache):
            with pytest.raises(pqcache.CacheError, match=f"{path.name}: can be written by {who}") as caught:
                run()
        assert state_of(cache) == before
        assert pqcache.inspect(str(cache)).rows == 80
        subprocess.run(caught.value.advice.partition(";")[0], shell=True, check=True)
    assert pqcache.sync(cache).published


@as_root
def test_downloads_that_another_user_planted_are_not_published(cache: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    other = tmp_path / "planted"
    write_day(other, "2026-11-01", files=2, rows=20, first=1000, seed=4)
    files = [file for file in LocalSource(str(lake), {}).list() if file.path.endswith("-01/part-00000.parquet")]
    key = workdir.file_key(str(lake), files[0])
    run = cache / "tmp" / f"{workdir._boot_id()}-1-00000000"
    (run / "fetch").mkdir(parents=True)
    shutil.copy2(other / files[0].path, run / "fetch" / key)
    shutil.copystat(lake / files[0].path, run / "fetch" / key)
    planted = [run / "fetch" / key, run / "fetch", run]
    for path in planted:
        os.chown(path, NOBODY, NOBODY)
    with pytest.raises(pqcache.CacheError, match=rf"belongs to nobody.* rm -r {run}"):
        pqcache.sync(cache)
    os.chown(run, 0, 0)
    pqcache.sync(cache)  # what is in it is not taken over
    assert check_snapshot(cache, [rows_at(lake)]) == 0
    check_clean(cache)


@pytest.mark.parametrize("kind", ["fetch", "rewrite"])
def test_what_others_could_change_is_not_taken_over(kind: str, cache: Path) -> None:
    run = cache / "tmp" / "run"
    left = run / kind / "key"
    left.parent.mkdir(parents=True)
    left.touch() if kind == "fetch" else left.mkdir()
    opened = pqcache.Cache.open(cache)
    left.chmod(0o777)
    mine = workdir.make_workdir(opened)
    workdir.take_over_or_remove(opened, mine, ["key"], ["key"])
    assert list((mine / kind).iterdir()) == []
    assert list((cache / "tmp").iterdir()) == [mine]


@pytest.mark.parametrize("umask", [0, 0o077])
def test_what_a_sync_makes_is_writable_by_its_owner_alone(umask: int, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=1)
    before = os.umask(umask)
    try:
        for _ in range(2):
            pqcache.sync(str(lake), cache, row_group_size=4096)
            write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
        pqcache.index(cache, keys=["id"])
    finally:
        os.umask(before)
    for path in (cache, *cache.rglob("*")):
        assert path.is_symlink() or not path.stat().st_mode & 0o022, path
        assert not path.lstat().st_mode & umask or path.is_symlink(), path
    assert (cache / "lock").stat().st_mode & 0o777 == 0o600
    assert (cache / "tmp").stat().st_mode & 0o777 == 0o700, "others can read downloads"


@as_root
def test_a_group_that_is_trusted_may_share_a_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = NOBODY
    for path in (cache, *cache.rglob("*")):
        if not path.is_symlink():
            os.chown(path, NOBODY, group)
            path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(pqcache.CacheError, match="belongs to nobody"):
        pqcache.sync(cache)
    monkeypatch.setenv(GROUPS, "no-such-group")
    with pytest.raises(pqcache.CacheError, match="there is no group 'no-such-group'"):
        pqcache.sync(cache)
    monkeypatch.setenv(GROUPS, f"root, {group}")
    assert pqcache.sync(cache).published
    (cache / "tmp").chmod(0o777)
    with pytest.raises(pqcache.CacheError, match="every user"):
        pqcache.sync(cache)
    monkeypatch.delenv(GROUPS)
    monkeypatch.setenv(CACHES, f"/elsewhere:{cache}")
    pqcache.sync(cache)


def test_who_holds_the_lock_is_named(cache: Path) -> None:
    with (cache / "lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(pqcache.CacheLocked, match=rf"another run is at work here \(process {os.getpid()} of \w+\)"):
            pqcache.sync(cache)


def test_a_lease_does_not_wait_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can read a lease can lock it exclusively, as only gc should, and for as long as a rename takes."""
    monkeypatch.setattr(snapshot, "LEASE_WAIT", 0.05)
    opened = pqcache.Cache.open(cache)
    with (cache / "current" / "_pqcache" / "lease").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(pqcache.CacheLocked, match=rf"lease: process {os.getpid()} of \w+ keeps it locked"):
            opened.lease()
        assert pqcache.sync(cache).published  # it waits for no lease
    assert pqcache.sync(cache).snapshot


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that every user can enter, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp(prefix="pqcache-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@as_root
def test_another_user_can_read_a_cache(open_to_all: Path) -> None:
    lake, cache = lake_of(open_to_all, days=1)
    pqcache.sync(str(lake), cache)

    def rows() -> tuple[int, int]:
        batches = pqcache.Cache.open(cache).batches(["id"], filters="price >= 0")
        return sum(len(batch) for batch in batches), pqcache.inspect(str(cache)).rows

    def as_another() -> bool:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return rows() == found and not os.access(cache / "lock", os.R_OK)

    found = rows()  # imports, which the other user may not be able to do
    assert true_in_child(as_another)
    assert found == (40, 40)


def modes(cache: Path) -> dict[str, int]:
    """Return the modes of the files of the current snapshot, by name."""
    root = (cache / "current").resolve()
    return {p.relative_to(root).as_posix(): p.stat().st_mode & 0o777 for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("private", "row_group_size"),
    [
        ("dt=2026-11-01/part-00000.parquet", None),
        ("dt=2026-11-01/part-00000.parquet", 4096),
        ("dt=2026-11-01", 4096),
        ("", None),
    ],
)
def test_a_copy_is_not_more_readable_than_its_source(private: str, row_group_size: int | None, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=2)
    pqcache.sync(str(lake), cache, row_group_size=row_group_size)
    assert set(modes(cache).values()) == {0o444, 0o644}
    pqcache.index(cache, keys=["id"])
    write_day(lake, "2026-11-01", files=2, rows=20, first=1000, seed=3)
    (lake / private).chmod(0o600 if private.endswith(".parquet") else 0o700)
    if not private:
        write_day(lake, "2026-11-02", files=2, rows=20, first=2000, seed=3)
    pqcache.sync(cache)
    found = modes(cache)
    for name in ("files.arrow", "row_groups.arrow", "summary.json", "checksums.json"):
        assert found[f"_pqcache/{name}"] == 0o600  # minima and maxima are values of the files
    assert all(mode & 0o077 == 0 for name, mode in found.items() if name.startswith("_pqcache/keys"))
    copies = {name: mode for name, mode in found.items() if name.startswith(private.removesuffix("part-00000.parquet"))}
    if private.endswith(".parquet") and row_group_size is None:
        assert found[private] == 0o400
        assert found["dt=2026-11-01/part-00001.parquet"] == 0o444
    else:
        assert {mode for name, mode in copies.items() if name.endswith(".parquet")} == {0o400}
    if private:
        assert {mode for name, mode in found.items() if name.startswith("dt=2026-11-02")} == {0o444}


@pytest.mark.parametrize("row_group_size", [None, 4096])
def test_kept_files_become_as_private_as_their_source(row_group_size: int | None, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=2)
    pqcache.sync(str(lake), cache, row_group_size=row_group_size)
    (lake / "dt=2026-11-01").chmod(0o700)  # which leaves the identity of its files as it is
    report = pqcache.sync(cache)
    assert not report.published
    copies = modes(cache)
    assert {mode for name, mode in copies.items() if name.startswith("dt=2026-11-01")} == {0o400}
    assert {mode for name, mode in copies.items() if name.startswith("dt=2026-11-02")} == {0o444}
    assert copies["_pqcache/row_groups.arrow"] == copies["_pqcache/files.arrow"] == 0o600
    (lake / "dt=2026-11-01").chmod(0o755)
    write_day(lake, "2026-11-03", files=1, rows=20, first=3000, seed=3)
    pqcache.sync(cache, keep=2)
    assert {mode for name, mode in modes(cache).items() if name.startswith("dt=2026-11-01")} == {0o400}
    (lake / "dt=2026-11-02").chmod(0o700)
    write_day(lake, "2026-11-04", files=1, rows=20, first=4000, seed=3)
    assert pqcache.sync(cache).published
    assert {mode for name, mode in modes(cache).items() if name.startswith("dt=2026-11-02")} == {0o400}


@as_root
def test_group_permissions_are_those_of_the_same_group(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=1)
    for path in lake.glob("dt=*/*.parquet"):
        path.chmod(0o640)
    other = lake / "dt=2026-11-01" / "part-00001.parquet"
    os.chown(other, 0, 12345)
    pqcache.sync(str(lake), cache)
    assert modes(cache)["dt=2026-11-01/part-00000.parquet"] == 0o440
    assert modes(cache)["dt=2026-11-01/part-00001.parquet"] == 0o400
    os.chown(other, 0, 0)
    for path in lake.glob("dt=*/*.parquet"):
        path.chmod(0o644)
    pqcache.sync(str(lake), cache := tmp_path / "kept")
    kept = sorted((cache / "current").resolve().glob("dt=*/*.parquet"))
    os.chown(kept[0], 0, 12345)
    lake.chmod(0o750)
    os.chown(lake, 0, 0)
    pqcache.sync(cache)
    assert stat.S_IMODE(kept[0].stat().st_mode) == 0o400  # group 12345 cannot enter the lake
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept[1:]} == {0o440}


@as_root
@pytest.mark.parametrize("what", ["file", "directory", "writable"])
def test_files_of_a_snapshot_that_others_can_change_are_fetched_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, cache = lake_of(tmp_path, days=2)
    pqcache.sync(str(lake), cache)
    path = cache / "current" / "dt=2026-11-01" / ("" if what == "directory" else "part-00000.parquet")
    os.chown(path, *((0, 12345) if what == "writable" else (NOBODY, NOBODY)))
    with monkeypatch.context() as trusted:
        trusted.setenv(CACHES, str(cache))
        assert not pqcache.sync(cache).published
    if what == "writable":
        path.chmod(0o464)
    before = rows_at(cache / "current")
    events: list[object] = []
    report = pqcache.sync(cache, on_event=events.append)
    assert report.published
    assert any("because others own them or can write to them (dt=2026-11-01/part-00000" in str(e) for e in events)
    for found in (cache / "current" / "dt=2026-11-01").iterdir():
        assert (found.stat().st_uid, found.stat().st_mode & 0o222) == (0, 0)
    assert rows_at(cache / "current") == before
    assert not pqcache.sync(cache).published


@as_root
def test_metadata_that_another_user_can_change_is_refused(cache: Path) -> None:
    for name in ("", "files.arrow", "row_groups.arrow", "checksums.json", "summary.json"):
        os.chown(cache / "current" / "_pqcache" / name, NOBODY, NOBODY)
        with pytest.raises(pqcache.CacheError, match=rf"_pqcache/?{name}: belongs to nobody"):
            pqcache.sync(cache)
        os.chown(cache / "current" / "_pqcache" / name, 0, 0)


@as_root
@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_link_of_another_user_out_of_the_source_is_refused(what: str, tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=1)
    write_day(tmp_path / "private", "2026-11-02", files=1, rows=20, seed=5)
    name = "dt=2026-11-02/part-00000.parquet" if what == "file" else "dt=2026-11-02"
    link = lake / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "private" / name)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(pqcache.SourceError, match=f"{link}: is a link of nobody to a file outside the source"):
        pqcache.sync(str(lake), cache)
    os.chown(link, 0, 0, follow_symlinks=False)
    assert pqcache.sync(str(lake), cache).rows == 60


@as_root
def test_links_of_others_count_by_where_they_lead(tmp_path: Path) -> None:
    lake, cache = lake_of(tmp_path, days=2)
    file = lake / "dt=2026-11-02" / "part-00009.parquet"
    file.symlink_to("../dt=2026-11-01/part-00000.parquet")
    os.chown(file, NOBODY, NOBODY, follow_symlinks=False)
    assert pqcache.sync(str(lake), cache).rows == 80  # the rows that it leads to come once
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(lake)
    os.chown(elsewhere, NOBODY, NOBODY, follow_symlinks=False)
    assert pqcache.sync(str(elsewhere), tmp_path / "second").rows == 80  # the source itself is what the user names
    shutil.copy(file, tmp_path / "private.parquet")
    link = lake / "latest.parquet"
    link.symlink_to("dt=2026-11-01/part-00000.parquet")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    assert pqcache.sync(str(link), tmp_path / "inside").files == 1
    link.unlink()
    link.symlink_to(tmp_path / "private.parquet")
    assert pqcache.sync(str(link), tmp_path / "own").files == 1
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(pqcache.SourceDenied, match=r"latest\.parquet: is a link of nobody to a file outside"):
        pqcache.sync(str(link), tmp_path / "outside")


@as_root
def test_a_file_that_becomes_a_link_after_it_was_listed_is_not_read(tmp_path: Path) -> None:
    lake, _ = lake_of(tmp_path, days=1)
    source = LocalSource(str(lake), {})
    (file, *_) = source.list()
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)
    (lake / file.path).unlink()
    (lake / file.path).symlink_to(secret)
    os.chown(lake / file.path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(pqcache.SourceError, match="is a link of nobody"):
        list(source.read(file.path, 0, 10))
