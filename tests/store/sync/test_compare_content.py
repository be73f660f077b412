"""Files whose size and mtime are those of another: inodes, ctimes, and comparison by content."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import cli
from pqcache.events import Event, Fetched, Warned
from pqcache.store.drivers import hdfs, local
from pqcache.store.drivers.local import LocalSource
from pqcache.store.drivers.s3 import S3Source
from pqcache.store.manifest import Identity
from tests.datasets import rows_of
from tests.remote import Remote, make_remote

NAME = "dt=2026-11-01/part-00000.parquet"


def write_file(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"id": [value] * 100}), path, **plain)


def overwrite(path: Path, value: int) -> None:
    """Write another file of the same size, and give it the same mtime, as ``cp -p`` of an edited copy does."""
    before = path.stat()
    other = path.with_name(".other")
    write_file(other, value)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.copy2(other, path)
    other.unlink()
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    for day in (1, 2, 3):
        write_file(tmp_path / "lake" / f"dt=2026-11-{day:02d}" / "part-00000.parquet", day)
    return tmp_path / "lake"


@pytest.fixture
def untagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without stable inodes."""
    monkeypatch.setattr(local, "has_stable_inodes", lambda path: False)


def sync(*arguments: Any, **how: Any) -> tuple[pqcache.SyncReport, list[str], list[str]]:
    """Run a sync; return its report, what was fetched, and its warnings."""
    events: list[Event] = []
    report = pqcache.sync(*arguments, on_event=events.append, **how)
    return (
        report,
        sorted(event.path for event in events if isinstance(event, Fetched)),
        [event.message for event in events if isinstance(event, Warned)],
    )


def test_a_file_of_the_same_size_and_mtime_is_seen(lake: Path, tmp_path: Path) -> None:
    pqcache.sync(str(lake), tmp_path / "cache")
    overwrite(lake / NAME, 7)
    report, fetched, _ = sync(tmp_path / "cache")
    assert (report.changed, fetched) == (1, [NAME])
    assert rows_of(tmp_path / "cache" / "current") == rows_of(lake)
    other = lake / ".replaced"
    write_file(other, 8)
    os.utime(other, ns=((lake / NAME).stat().st_mtime_ns,) * 2)
    other.replace(lake / NAME)
    assert sync(tmp_path / "cache")[1] == [NAME]
    assert not pqcache.sync(tmp_path / "cache").published


def test_a_cache_without_tags_is_not_fetched_again(lake: Path, tmp_path: Path) -> None:
    """It gets them when something is published next, and from then on they count."""
    cache = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "has_stable_inodes", lambda path: False)
        pqcache.sync(str(lake), cache)
        assert all(file.identity.tag == "" for file in sources(cache))
    assert not pqcache.sync(cache).published
    assert pqcache.verify(cache, source=True).changed == ()
    write_file(lake / "dt=2026-11-04" / "new.parquet", 4)
    report, fetched, _ = sync(cache)
    assert fetched == ["dt=2026-11-04/new.parquet"]
    assert (report.added, report.changed, report.unchanged) == (1, 0, 3)
    assert all(file.identity.tag.startswith("inode:") for file in sources(cache))
    overwrite(lake / NAME, 7)
    assert sync(cache)[1] == [NAME]
    assert rows_of(cache / "current") == rows_of(lake)


def sources(cache: Path) -> list[Any]:
    return [file for entry in pqcache.Cache(cache).snapshot().manifest().files for file in entry.sources]


def test_nodes_with_copies_of_a_source_agree(lake: Path, tmp_path: Path) -> None:
    """Inodes and ctimes of two copies differ, so what nodes compare is without them."""
    shutil.copytree(lake, tmp_path / "copy")
    listings = []
    for node, source in enumerate((lake, tmp_path / "copy")):
        pqcache.sync(str(source), tmp_path / f"{node}", shard=f"{node}/2")
        listings.append(pqcache.Cache(tmp_path / f"{node}").snapshot().manifest().listing)
    assert listings[0] == listings[1]


@pytest.fixture
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    yield from make_remote(request.param, request, tmp_path / "remote")


@pytest.mark.parametrize(
    ("remote", "how"),
    [
        ("path", {}),
        ("path", {"columns": ["id"]}),
        pytest.param("hdfs", {}, marks=pytest.mark.hdfs),
    ],
    indirect=["remote"],
    ids=str,
)
def test_content_is_compared_on_request(
    how: dict[str, Any], remote: Remote, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose identities do not change when its files do: only content tells."""
    cache = tmp_path / "cache"
    remote.upload(lake)
    freeze_identities(monkeypatch)
    pqcache.sync(remote.url, cache, **how)
    write_file(lake / NAME, 7)
    remote.put(NAME, (lake / NAME).read_bytes())
    assert not pqcache.sync(cache).published
    held = rows_of(cache / "current")
    plan, fetched, warnings = sync(cache, compare="content", dry_run=True)
    assert fetched == []
    if not how:
        assert plan.changed == 1
        assert warnings == [f"1 file of equal size and time differ in content, like {NAME}"]
        assert pqcache.verify(cache, compare="content").changed == (NAME,)
        assert cli.run(["verify", str(cache), "--compare", "content", "-q"]) == 1
    else:
        with pytest.raises(pqcache.UsageError, match="3 files of the cache are not copies of source files"):
            pqcache.verify(cache, compare="content")
    assert rows_of(cache / "current") == held
    report, fetched, _ = sync(cache, compare="content")
    assert report.published
    assert fetched == ([NAME] if not how else sorted(f"dt=2026-11-0{day}/part-00000.parquet" for day in (1, 2, 3)))
    assert rows_of(cache / "current") == rows_of(lake)
    assert pqcache.verify(cache, deep=True).ok
    assert not pqcache.sync(cache).published


def freeze_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stores report the same identity of a file for ever."""
    monkeypatch.setattr(local, "has_stable_inodes", lambda path: False)
    monkeypatch.setattr(
        LocalSource, "_identity", lambda self, path, status: Identity(status.st_size, 1_700_000_000_000_000_000)
    )
    monkeypatch.setattr(hdfs, "_identity", lambda status: Identity(status.length, 1_700_000_000_000_000_000))


@pytest.mark.s3
def test_the_md5_of_the_store_saves_the_download(s3_bucket: Any, lake: Path, tmp_path: Path) -> None:
    from tests.remote import S3Remote

    remote, cache = S3Remote(f"{s3_bucket.url}/wh", s3_bucket.client), tmp_path / "cache"
    remote.upload(lake)
    pqcache.sync(remote.url, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Source, "read", None)
        assert not pqcache.sync(cache, compare="content").published
    held = cache / "current" / NAME
    held.chmod(0o644)
    content = bytearray(held.read_bytes())
    content[10] ^= 1
    held.write_bytes(content)
    assert sync(cache, compare="content")[1] == [NAME]
    assert rows_of(cache / "current") == rows_of(lake)


def test_key_indexes_follow_content(lake: Path, tmp_path: Path, untagged: None) -> None:
    """Rows of equal identity are not taken for the rows that were indexed."""
    cache = tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    pqcache.index(cache, keys=["id"])
    overwrite(lake / NAME, 7)
    assert not pqcache.sync(cache).published
    assert pqcache.sync(cache, compare="content").published
    opened = pqcache.Cache(cache)
    assert len(opened.lookup("id", [7])) == 100
    assert len(opened.lookup("id", [1])) == 0


def test_what_a_dead_run_left_is_not_trusted(lake: Path, tmp_path: Path, untagged: None) -> None:
    """It is found by identity."""
    cache = tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    overwrite(lake / NAME, 7)

    def stop(event: Event) -> None:
        if isinstance(event, Fetched):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        pqcache.sync(cache, compare="content", on_event=stop)
    assert list((cache / "tmp").rglob("fetch/*"))
    overwrite(lake / NAME, 8)
    pqcache.sync(cache, compare="content")
    assert rows_of(cache / "current") == rows_of(lake)


def test_a_file_without_a_suffix_becomes_parquet(lake: Path, tmp_path: Path, untagged: None) -> None:
    cache, file = tmp_path / "cache", lake / "dt=2026-11-03" / "part-1"
    write_file(file, 7)
    good, moment = file.read_bytes(), file.stat().st_mtime_ns
    for content, rows in ((bytes(len(good)), 300), (good, 400)):
        file.write_bytes(content)
        os.utime(file, ns=(moment, moment))
        assert pqcache.sync(lake, cache, compare="content").rows == rows


def test_other_comparisons_are_refused(lake: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sync", str(lake), str(tmp_path / "cache"), "--compare", "bytes"]) == 2
    assert "--compare bytes: choose identity or content" in capfd.readouterr().err
