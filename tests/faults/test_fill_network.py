"""A bad network while a first copy arrives: what passes is waited for, and a wrong byte is never published."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pqcache
from pqcache.events import Event, Retried
from pqcache.store.arriving import find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.sync import fill
from tests.datasets import files_of
from tests.faults import proxy as faults
from tests.faults.proxy import Proxy
from tests.remote import HdfsRemote, Remote, make_remote
from tests.store.sync.fill.filling import check_same, wait_for
from tests.store.sync.fill.test_snapshot import write_wide


@dataclass(frozen=True)
class Store:
    """A dataset behind a proxy, its local twin, and the request that reads a range of a file."""

    proxy: Proxy
    remote: Remote
    url: str  # goes through the proxy
    made: Path
    kind: str

    def range_of(self, path: str) -> str:
        return path if self.kind == "s3" else rf"{path}\?.*op=OPEN"


S3, WEBHDFS = pytest.param("s3", marks=pytest.mark.s3), pytest.param("webhdfs", marks=pytest.mark.hdfs)
on_s3 = pytest.mark.parametrize("store", [S3], indirect=True)
on_hdfs = pytest.mark.parametrize("store", [WEBHDFS], indirect=True)


@pytest.fixture(params=[S3, WEBHDFS])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = write_wide(tmp_path / "made")
    for remote in make_remote(request.param, request, tmp_path):
        remote.upload(made)
        server = request.getfixturevalue("s3" if request.param == "s3" else "hdfs")
        with Proxy(server.endpoint if request.param == "s3" else server.http_url) as proxy:
            url = remote.url
            if isinstance(remote, HdfsRemote):
                url = url.replace(server.webhdfs_url, f"webhdfs://127.0.0.1:{proxy.port}")
            else:
                monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield Store(proxy, remote, url, made, request.param)


def check(store: Store, cache: Path, tmp_path: Path, columns: list[str] | None = None) -> None:
    store.proxy.clear()
    pqcache.sync(store.url, tmp_path / "plain", columns=columns)
    check_same(tmp_path / "plain", cache)


def test_connections_that_break(store: Store, tmp_path: Path) -> None:
    store.proxy.rule(faults.reset(after=50_000), path=store.range_of("part-00000.parquet"), first=3, count=4)
    store.proxy.rule(faults.truncate(after=70_000), path=store.range_of("part-00000.parquet"), first=4, count=4)
    report = pqcache.sync(store.url, tmp_path / "cache", fill=True)
    size = sum((store.made / path).stat().st_size for path in files_of(store.made))
    assert size <= report.fetched_bytes < 1.01 * size  # what was written of a block is fetched again
    check(store, tmp_path / "cache", tmp_path)


@on_hdfs
def test_connections_that_end_in_the_middle_of_some_columns(store: Store, tmp_path: Path) -> None:
    """What is fetched at once lies in several ranges at the source, of which each may end early."""
    hit: list[int] = []

    def shortened(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        if find_arriving(CacheDirectory(tmp_path / "cache")) is None or len(hit) == 8:
            return faults.unchanged(request, answer, client)
        hit.append(len(answer.body))
        return faults.truncate(after=len(answer.body) // 2)(request, answer, client)

    store.proxy.rule(shortened, path=store.range_of("part-00000.parquet"))
    pqcache.sync(store.url, tmp_path / "cache", fill=True, columns=["a", "e"])
    assert len(hit) == 8
    check(store, tmp_path / "cache", tmp_path, columns=["a", "e"])


@on_s3
def test_a_server_that_is_away_for_a_while(store: Store, tmp_path: Path) -> None:
    """All requests fail until the run has said so; it goes on as soon as the server is there again."""
    cache, away = CacheDirectory(tmp_path / "cache"), threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, Retried):
            away.set()

    def unless_back(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        fault = faults.unchanged if away.is_set() or find_arriving(cache) is None else faults.reset(after=-1)
        return fault(request, answer, client)

    store.proxy.rule(unless_back)
    report = pqcache.sync(store.url, tmp_path / "cache", fill=True, jobs=2, on_event=on_event)
    assert report.published
    assert away.is_set()
    check(store, tmp_path / "cache", tmp_path)


def test_a_file_that_is_replaced(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte of the new version counts as one of the old."""
    monkeypatch.setattr(fill, "_RANGE", 200_000)
    monkeypatch.setattr(fill, "_LARGE", 400_000)
    cache, path = CacheDirectory(tmp_path / "cache"), files_of(store.made)[1]
    other = bytearray((store.made / path).read_bytes())
    other[1000:200_000:100] = bytes(byte ^ 0xFF for byte in other[1000:200_000:100])
    replaced = threading.Event()

    def replace(_: object) -> None:
        if not replaced.is_set() and find_arriving(cache) is not None:
            replaced.set()
            time.sleep(0.002)  # HDFS knows a version by the millisecond
            store.remote.put(path, bytes(other))

    store.proxy.rule(faults.both(replace), path=store.range_of(path))
    report = pqcache.sync(store.url, tmp_path / "cache", fill=True, jobs=1)
    assert replaced.is_set()
    assert report.published
    assert (tmp_path / "cache" / "current" / path).read_bytes() == other
    check(store, tmp_path / "cache", tmp_path)


@on_s3  # which has an MD5
def test_a_byte_that_is_damaged_on_its_way(store: Store, tmp_path: Path) -> None:
    cache = CacheDirectory(tmp_path / "cache")
    hit = threading.Event()

    def once(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        if not hit.is_set() and find_arriving(cache) is not None and len(answer.body) > 100_000:
            hit.set()
            return faults.flip(50_000)(request, answer, client)
        return faults.unchanged(request, answer, client)

    store.proxy.rule(once, method="GET", path="part-00000.parquet")
    pqcache.sync(store.url, tmp_path / "cache", fill=True, checksum=True)
    assert hit.is_set()
    for path in files_of(store.made):
        assert (tmp_path / "cache" / "current" / path).read_bytes() == (store.made / path).read_bytes()


@on_s3
def test_the_published_snapshot_is_read_meanwhile(store: Store, tmp_path: Path) -> None:
    """A reader that has the arriving snapshot open keeps it by its lease, through its publication."""
    cache = CacheDirectory(tmp_path / "cache")
    done: list[pqcache.SyncReport] = []
    store.proxy.rule(faults.drip(20_000, 0.01), path=store.range_of("part-00000.parquet"), first=6)
    thread = threading.Thread(target=lambda: done.append(pqcache.sync(store.url, tmp_path / "cache", fill=True)))
    thread.start()
    snapshot = wait_for(lambda: find_arriving(cache))
    with snapshot.lease():
        thread.join(60)
        assert done[0].snapshot == snapshot.id
        assert pqcache.gc(tmp_path / "cache", keep=1).removed == ()
        assert snapshot.published_path.is_dir()
