"""A bad network: a failure that passes is retried, one that lasts is named, and a wrong row is never published.

The answers of the real S3 gateway and of the real WebHDFS server come through a proxy that breaks them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Event, Retried
from pqcache.store.arriving import find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.sync import fill
from tests.datasets import shop_table, write_day
from tests.faults import proxy as faults
from tests.faults.checks import Rows, check_clean, check_snapshot, rows_at, same_rows
from tests.faults.proxy import Fault, Proxy
from tests.forked_commands import run_pqcache
from tests.remote import HdfsRemote, Remote, S3Remote, make_remote

USUAL = [f"dt=2026-11-0{day}/part-0000{n}.parquet" for day, n in ((1, 0), (1, 1), (2, 0), (3, 0))]
BIG = "dt=2026-11-02/part-00000.parquet"  # of several MB: so that "in the middle" means something
TIMEOUT = 1.5


@dataclass
class Store:
    """A dataset at a store behind the proxy, its local twin, and a cache of it."""

    kind: str
    proxy: Proxy
    remote: Remote  # goes to the server directly
    url: str  # goes through the proxy
    made: Path
    cache: Path
    old: Rows = field(default_factory=dict)
    _more: set[str] = field(default_factory=set)
    _seed: int = 0

    @property
    def new(self) -> Rows:
        return rows_at(self.made)

    def put(self, path: str) -> None:
        """Upload the local twin's file to the store; one that is not of the usual ones is removed after the test."""
        self.remote.put(path, (self.made / path).read_bytes())
        self._more.add(path)

    def sync(self, **how: object) -> list[Event]:
        """Sync through the proxy; return the events."""
        events: list[Event] = []
        pqcache.sync(self.url, self.cache, on_event=events.append, **{"timeout": TIMEOUT, **how})  # type: ignore[arg-type]
        return events

    def restore(self) -> None:
        """Update the cache to what the source holds, then upload a new version of the big file to the source."""
        self.proxy.clear()
        for path in self._more - set(USUAL):
            self.remote.delete(path)
            (self.made / path).unlink()
        self._more.clear()
        if not self.cache.exists() or not same_rows(rows_at(self.cache / "current"), self.new):
            shutil.rmtree(self.cache, ignore_errors=True)  # of a test that has left it as it was before
            self.sync(timeout=20.0)
        self.old = self.new
        self.next_version()
        self.put(BIG)
        self.proxy.clear()

    def next_version(self) -> None:
        """Write another version of the big file, of as many bytes, to the local twin."""
        self._seed += 1
        write_big(self.made, self._seed)

    def another_version(self) -> bytes:
        """Return other contents of as many bytes than those that the big file has."""
        content = (self.made / BIG).read_bytes()
        self.next_version()
        other = (self.made / BIG).read_bytes()
        (self.made / BIG).write_bytes(content)
        assert len(other) == len(content)
        assert other != content
        return other

    def check_old(self) -> None:
        assert check_snapshot(self.cache, [self.old]) == 0

    def check_new(self) -> None:
        assert check_snapshot(self.cache, [self.new]) == 0
        check_clean(self.cache)

    # the requests by which each store does the same thing
    @property
    def listing(self) -> str:
        return "list-type=2" if self.kind == "s3" else "op=LISTSTATUS"

    def reading(self, path: str) -> dict[str, str]:
        """What matches the request for a file's bytes, or those of all files below a directory."""
        if self.kind == "s3":
            return {"method": "GET", "path": rf"^[^?]*{re.escape(path)}(/[^?]*)?(\?|$)"}
        return {"method": "GET", "path": f"/_to/.*{re.escape(path)}.*op=OPEN"}

    def is_reading(self, path: str, request: faults.Request) -> bool:
        how = self.reading(path)
        return request.method == how["method"] and re.search(how["path"], request.target) is not None

    def asking(self, path: str) -> dict[str, str]:
        """What matches the question whether a file is still the same."""
        if self.kind == "s3":
            return {"method": "HEAD", "path": f"{re.escape(path)}$"}
        return {"method": "GET", "path": f"{re.escape(path)}.*op=GETFILESTATUS"}


def write_big(made: Path, seed: int) -> None:
    """Write a file of 3.2 MB whose size does not depend on the seed."""
    table = pa.table({"id": (np.arange(400_000) * 7919 + seed) << 20})
    (made / BIG).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, made / BIG, compression="none", use_dictionary=False, row_group_size=50_000)


S3, WEBHDFS = pytest.param("s3", marks=pytest.mark.s3), pytest.param("webhdfs", marks=pytest.mark.hdfs)


@pytest.fixture(scope="module", params=[S3, WEBHDFS])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all tests here: what takes time is to make it."""
    directory = tmp_path_factory.mktemp(request.param)
    made, name = directory / "made", f"faults-{uuid.uuid4().hex[:8]}"
    write_day(made, "2026-11-01", files=2, rows=50)
    write_day(made, "2026-11-03", files=1, rows=50, first=1000)
    write_big(made, 0)
    server = request.getfixturevalue("s3" if request.param == "s3" else "hdfs")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for variable in [v for v in os.environ if v.startswith(("AWS_", "HADOOP_"))]:
            patch.delenv(variable)
        for variable in ("no_proxy", "NO_PROXY"):
            patch.setenv(variable, "127.0.0.1")
        remote: Remote
        if request.param == "s3":
            proxy = stack.enter_context(Proxy(server.endpoint))
            for variable, value in server.env.items():
                patch.setenv(variable, value)
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            client = stack.enter_context(contextlib.closing(server.client()))
            client.create_bucket(Bucket=name)
            remote = S3Remote(f"s3://{name}/wh/shop", client)
            url = remote.url
        else:
            proxy = stack.enter_context(Proxy(server.http_url))
            server.mkdirs(f"/{name}")
            remote = HdfsRemote(f"{server.webhdfs_url}/{name}/shop", server)
            url = f"webhdfs://127.0.0.1:{proxy.port}/{name}/shop"
        remote.upload(made)
        yield Store(request.param, proxy, remote, url, made, directory / "cache")


@pytest.fixture
def store(shared: Store) -> Store:
    """The store with one file, BIG, changed since the last sync."""
    shared.restore()
    return shared


MIDDLE = 1_500_000
PIECE = 900_000
TRANSIENT: dict[str, Fault] = {  # first those that let a read get nowhere
    "reset before the head": faults.reset(-1),
    "reset after the head": faults.reset(0),
    "stalls before the head": faults.stall(-1),
    "500": faults.status(500),
    "503": faults.status(503, body=b"<Error><Code>SlowDown</Code></Error>"),
    "429": faults.status(429, retry_after=1),
    "closed in the middle": faults.truncate(PIECE),
    "stalls in the middle": faults.stall(PIECE),
    "reset in the middle": faults.reset(PIECE),
}


def test_what_fails_once_is_tried_again(store: Store) -> None:
    """Listings, reads and questions whether a copied file is still the same meet one fault after the other."""
    reading = store.reading(BIG)
    rules = {("reading", name): store.proxy.rule(fault, **reading, count=1) for name, fault in TRANSIENT.items()}
    for name in ("reset after the head", "stalls before the head", "503"):
        rules["listing", name] = store.proxy.rule(TRANSIENT[name], path=store.listing, count=1)
    if store.kind == "webhdfs":  # a read from S3 names the version: nothing is asked after it
        for name in ("stalls before the head", "503"):
            rules["asking", name] = store.proxy.rule(TRANSIENT[name], **store.asking(BIG), count=1)
    events = store.sync(retries=len(rules))
    assert [name for name, rule in rules.items() if rule.used != 1] == []
    store.check_new()
    assert [event.path for event in events if isinstance(event, Retried)].count(BIG) >= len(TRANSIENT)
    if store.kind == "s3":
        starts = [r.range[0] for r in store.proxy.requests if r.method == "GET" and BIG in r.target and r.range]
        assert starts[-1] > 1.5 * PIECE, f"it began again instead of going on: {starts}"


def test_what_keeps_failing_is_named_and_publishes_nothing(store: Store) -> None:
    cases = [(name, store.reading(BIG)) for name in ("reset before the head", "stalls before the head", "500")]
    cases += [(name, {"path": store.listing}) for name in ("stalls before the head", "503")]
    if store.kind == "webhdfs":
        cases.append(("reset before the head", store.asking(BIG)))
    for name, match in cases:
        store.proxy.rule(TRANSIENT[name], **match)
        with pytest.raises(pqcache.SourceUnavailable) as error:
            store.sync(retries=1, timeout=0.5)
        assert "\n" not in str(error.value)
        assert match["path"] == store.listing or BIG in str(error.value), name
        store.check_old()
        store.proxy.clear()
    store.sync()
    store.check_new()


def test_a_connection_that_breaks_often_but_gets_on_is_good_enough(store: Store) -> None:
    """Retries are for what does not get on; a long download over a bad line does, piece by piece."""
    store.proxy.rule(faults.reset(1_200_000), **store.reading(BIG))
    store.sync(retries=1)
    store.check_new()
    assert len([request for request in store.proxy.requests if store.is_reading(BIG, request)]) >= 3


@pytest.mark.parametrize("by_ranges", [False, True])
def test_a_first_copy_that_arrives_meets_the_same_network(
    by_ranges: bool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it arrives connections break, the server is away until the run has said so, and a file is replaced."""
    if by_ranges:  # as files of many MB are fetched
        monkeypatch.setattr(fill, "_RANGE", 1_000_000)
        monkeypatch.setattr(fill, "_LARGE", 2_000_000)
    cache, hit = CacheDirectory(tmp_path / "cache"), Counter[str]()
    (store.made / BIG).write_bytes(other := store.another_version())
    away = threading.Event()

    def fault(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        if find_arriving(cache) is None:
            return faults.unchanged(request, answer, client)
        if not away.is_set():
            return faults.reset(-1)(request, answer, client)
        if store.is_reading(BIG, request) and (number := hit[BIG]) < 3:
            hit[BIG] += 1
            if number == 1:
                time.sleep(0.002)  # HDFS knows a version by the millisecond
                store.put(BIG)
            return (faults.reset(PIECE), faults.truncate(PIECE), faults.unchanged)[number](request, answer, client)
        return faults.unchanged(request, answer, client)

    def on_event(event: Event) -> None:
        if isinstance(event, Retried):
            away.set()

    store.proxy.rule(fault)
    report = pqcache.sync(store.url, tmp_path / "cache", fill=True, jobs=1, on_event=on_event)
    assert report.published
    assert hit[BIG] == 3
    assert (tmp_path / "cache" / "current" / BIG).read_bytes() == other
    assert check_snapshot(tmp_path / "cache", [store.new]) == 0
    check_clean(tmp_path / "cache")


def test_a_slow_drip_is_not_a_stall(store: Store) -> None:
    store.proxy.rule(faults.drip(700_000, 0.2), **store.reading(BIG))
    events = store.sync(retries=0, timeout=0.6)
    store.check_new()
    assert not [event for event in events if isinstance(event, Retried)]


def test_a_stall_fails_in_time_and_the_command_ends_then(store: Store) -> None:
    """The whole process ends in about the time limit, also while other files stall."""
    for number in range(4):
        name = f"dt=2026-11-04/part-{number:05d}.parquet"
        (store.made / name).parent.mkdir(exist_ok=True)
        pq.write_table(shop_table(5000 + 100 * number, 50), store.made / name)
        store.put(name)
    store.proxy.rule(faults.stall(10), **store.reading("dt=2026-11-04"))
    store.proxy.rule(faults.status(403), **store.reading(BIG))
    words = ["sync", store.url, store.cache, "--retries", "0", "--timeout", "80"]
    done = run_pqcache(*words, timeout=50)  # a run that has failed does not wait for reads that hang
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert BIG in done.stderr
    store.check_old()


def test_a_lying_listing_publishes_nothing(store: Store) -> None:
    """An empty listing, one that lost most files, and what is no listing."""
    lies: list[tuple[type[Exception], Callable[[bytes], bytes]]] = [(pqcache.SourceIncomplete, faults.no_objects)]
    for body in (b"", b"<html>please log in</html>", b"{}", b'<?xml version="1.0"?><ListBucketResult><Cont'):
        lies.append((pqcache.SourceError, lambda _, body=body: body))  # type: ignore[misc]
    half = {"path": store.listing} if store.kind == "s3" else {"path": r"2026-11-0[12].*op=LISTSTATUS"}
    rules = [(error, lie, {"path": store.listing}) for error, lie in lies]
    rules.append((pqcache.SourceIncomplete, faults.half_page if store.kind == "s3" else faults.no_objects, half))
    for kind, lie, match in rules:
        store.proxy.rule(faults.edit(lie), **match)
        with pytest.raises((kind, pqcache.SourceIncomplete)) as error:
            store.sync(max_delete="20%", retries=0)
        assert "\n" not in str(error.value)
        assert kind is pqcache.SourceError or error.value.exit_code == 3  # type: ignore[attr-defined]
        store.check_old()
        store.proxy.clear()


def test_a_listing_that_breaks_on_its_second_page(store: Store) -> None:
    """Half a listing is no listing: it is asked for again from the start, or nothing is published."""
    if store.kind == "webhdfs":  # its pages are directories
        store.proxy.rule(faults.reset(20), path=r"2026-11-02.*op=LISTSTATUS", count=1)
    else:
        store.proxy.rule(faults.edit(faults.first_page(2)), path=r"list-type=2(?!.*continuation)")
        store.proxy.rule(faults.reset(200), path="continuation-token", count=1)
    store.sync()
    store.check_new()
    store.proxy.clear()
    (store.made / "dt=2026-11-01" / "part-00000.parquet").touch()
    store.put("dt=2026-11-01/part-00000.parquet")
    if store.kind == "webhdfs":
        store.proxy.rule(faults.reset(20), path=r"2026-11-02.*op=LISTSTATUS")
    else:
        store.proxy.rule(faults.edit(faults.first_page(2)), path=r"list-type=2(?!.*continuation)")
        store.proxy.rule(faults.reset(200), path="continuation-token")
    before = os.readlink(store.cache / "current")
    with pytest.raises(pqcache.SourceUnavailable):
        store.sync(retries=1)
    assert os.readlink(store.cache / "current") == before


def test_another_range_than_was_asked_for_is_not_taken(store: Store) -> None:
    """All of the file from a server that knows no ranges, or its beginning from a cache on the way."""
    content = (store.made / BIG).read_bytes()

    def wrong(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        assert request.range is not None
        length = request.range[1] - request.range[0] + 1
        answer.set("Content-Range", f"bytes 0-{length - 1}/{len(content)}")
        answer.body = content[:length]
        return faults.unchanged(request, answer, client)

    lies = [faults.ignore_range(content)]
    if store.kind == "s3":  # an OPEN does not say which range it answers
        lies.append(wrong)
    for lie in lies:
        store.proxy.rule(faults.truncate(MIDDLE), **store.reading(BIG), count=1)  # a reset may take back what it sent
        store.proxy.rule(lie, **store.reading(BIG))
        with pytest.raises(pqcache.PqcacheError, match="another range" if store.kind == "s3" else re.escape(BIG)):
            store.sync(retries=1)
        store.check_old()
        store.proxy.clear()
    store.sync()
    store.check_new()


def test_a_lie_in_the_footer_is_seen(store: Store) -> None:
    content = (store.made / BIG).read_bytes()
    schema = 8 + int.from_bytes(content[-8:-4], "little")  # how far from the end the footer begins
    for position in (-1, -6, -schema):  # magic, length, schema
        store.proxy.rule(faults.flip(position), **store.reading(BIG))
        with pytest.raises(pqcache.ParquetError, match=re.escape(BIG)):
            store.sync(retries=0)
        store.check_old()
        store.proxy.clear()
    store.sync()  # what was wrong with the copy is not kept
    store.check_new()


@pytest.mark.parametrize(
    "shared", [S3], indirect=True
)  # HDFS's checksum is one of CRCs, which only its clients compute
def test_a_lie_in_the_rows_is_seen_by_version_or_checksum(store: Store, tmp_path: Path) -> None:
    """An S3 object that was put in one piece has its MD5 as ETag: with --checksum every wrong byte is seen."""
    other = store.another_version()

    def stale(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        answer.set("ETag", f'"{hashlib.md5(other).hexdigest()}"')
        return faults.other_version(other)(request, answer, client)

    def flipped(request: faults.Request, answer: faults.Answer, client: faults.Connection) -> bool:
        return (faults.flip(MIDDLE) if len(answer.body) > MIDDLE else faults.unchanged)(request, answer, client)

    for lie, checksum in ((stale, False), (flipped, True), (faults.other_version(other), True)):
        store.proxy.rule(lie, **store.reading(BIG))
        with pytest.raises(pqcache.PqcacheError, match=re.escape(BIG)):
            store.sync(retries=1, checksum=checksum)
        with pytest.raises(pqcache.PqcacheError, match=re.escape(BIG)):
            pqcache.sync(store.url, tmp_path / "first", fill=True, retries=1, checksum=checksum)
        assert not (tmp_path / "first" / "current").exists()
        store.check_old()
        store.proxy.clear()
    store.sync()
    store.check_new()
    pqcache.sync(store.cache, checksum=False)


@pytest.mark.s3
def test_a_wrong_byte_in_a_rewrite_is_an_error_with_a_name(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --row-group-size everything is decoded: what cannot be decoded fails by name, without a traceback."""
    made, cache = tmp_path / "made", tmp_path / "cache"
    write_day(made, "2026-11-01", files=2, rows=400)
    for remote in make_remote("s3", request, tmp_path):
        remote.upload(made)
        with Proxy(request.getfixturevalue("s3").endpoint) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            proxy.rule(faults.flip(4), method="GET", path=r"part-00001\.parquet")
            with pytest.raises(pqcache.PqcacheError) as error:
                pqcache.sync(remote.url, cache, row_group_size=16 << 10)
            assert "part-00001.parquet" in str(error.value)
            assert not (cache / "current").exists()
            proxy.clear()
            pqcache.sync(cache)
            check_clean(cache)


@pytest.mark.hdfs
def test_a_wrong_byte_on_a_datanode_is_seen(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """hdfs:// checks the CRCs of what a DataNode sends."""
    made, cache = tmp_path / "made", tmp_path / "cache"
    write_big(made, 3)
    for remote in make_remote("hdfs", request, tmp_path):
        assert isinstance(remote, HdfsRemote)
        remote.upload(made)
        content = (made / BIG).read_bytes()
        server = request.getfixturevalue("hdfs")
        blocks = [p for p in (server.directory / "data").rglob("blk_*") if p.suffix != ".meta"]
        (block,) = [p for p in blocks if p.stat().st_size == len(content) and p.read_bytes() == content]
        with block.open("r+b") as file:
            file.seek(MIDDLE)
            file.write(bytes([content[MIDDLE] ^ 0xFF]))
        with pytest.raises(pqcache.SourceError, match=re.escape(BIG)):
            pqcache.sync(remote.url, cache, retries=1, timeout=10)
        assert not (cache / "current").exists()
