"""Servers that never answer, or hardly send anything: an error, and nothing is left behind."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.errors import SourceUnavailable
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.timeouts import (
    FLOOR,
    Patience,
    SourceTooSlow,
    SpeedFloor,
    Stalled,
    TooSlow,
    with_retries,
    with_time_limit,
)
from tests.datasets import rows_of, write_day, write_shop
from tests.remote import make_remote
from tests.store.drivers.web_server import Asked, reply, serving
from tests.waiting import becomes_true

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

DATA = b"x" * 3000


class Client:
    """An iterator like a network client's: some items, then whatever ``end`` does; knows whether it ended."""

    def __init__(self, items: int, end: Callable[[], object] = lambda: None) -> None:
        self.items, self.end = items, end
        self.made = 0
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> Iterator[int]:
        self.thread = threading.current_thread()
        try:
            for number in range(self.items):
                self.made += 1
                yield number
            self.end()
        finally:
            self.closed.set()

    @property
    def gone(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()


class Panic(BaseException):
    """As hdfs-native's: no Exception."""


@pytest.mark.parametrize(("items", "error"), [(9, None), (0, OSError(5, "lost")), (9, Panic("index out of range"))])
def test_items_keep_their_order_and_an_error_comes_after_them(items: int, error: BaseException | None) -> None:
    def fail() -> None:
        if error is not None:
            raise error

    taken: list[int] = []
    client = Client(items, fail)
    with nullcontext() if error is None else pytest.raises(type(error)) as raised:
        taken.extend(with_time_limit(client, 60))
    assert raised is None or raised.value is error
    assert taken == list(range(items))
    assert becomes_true(lambda: client.gone)


def test_silence_is_an_error() -> None:
    release = threading.Event()
    taken: list[int] = []
    client = Client(3, lambda: release.wait(60))
    with pytest.raises(Stalled):
        taken.extend(with_time_limit(client, 0.3))
    assert taken == [0, 1, 2]
    assert client.thread is not None
    assert client.thread.daemon, "a call that hangs cannot be ended, and does not keep the process"
    release.set()
    assert becomes_true(lambda: client.gone), "but when it returns, so does its thread"


def test_a_slow_caller_is_no_stall_and_bounds_the_queue() -> None:
    client = Client(100)
    taken = with_time_limit(client, 0.3)
    assert next(taken) == 0
    time.sleep(0.5)
    assert client.made < 20
    assert list(taken) == list(range(1, 100))


def test_an_abandoned_client_is_closed() -> None:
    client = Client(1_000_000)
    taken = with_time_limit(client, 60)
    assert next(taken) == 0
    del taken
    assert client.closed.wait(60)
    assert becomes_true(lambda: client.gone)
    assert client.made < 20


class Store:
    """Answers as S3 or WebHDFS do; drips where ``slow`` is in the URL."""

    slow = ""

    def s3(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if "list-type" in asked.path:
            self._send(asked, handler, b"<ListBucketResult>" + b" " * 3000 + b"</ListBucketResult>")
        elif handler.command == "HEAD":
            reply(handler, status=404)
        else:
            self._send(asked, handler, DATA, 206, Content_Range="bytes 0-2999/3000", ETag='"e"')

    def webhdfs(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if "LISTSTATUS" in asked.path:
            self._send(asked, handler, b" " * 3000 + json.dumps({"FileStatuses": {"FileStatus": []}}).encode())
        elif "GETFILESTATUS" in asked.path:
            reply(handler, json.dumps({"FileStatus": {"type": "DIRECTORY", "length": 0}}).encode())
        else:
            self._send(asked, handler, DATA)

    def _send(
        self, asked: Asked, handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str
    ) -> None:
        reply(handler, body, status, drip=0.02 if self.slow and self.slow in asked.path else 0.0, **headers)


@pytest.fixture(params=["s3", "webhdfs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Source]]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    made = Store()
    with serving(getattr(made, request.param)) as server:
        url, options = f"webhdfs://127.0.0.1:{server.port}/wh", {}
        if request.param == "s3":
            url = "s3://bucket/wh"
            options = {"endpoint": server.url, "key": "k", "secret": "s", "region": "us-east-1"}
        source = open_source(url, options, timeout=0.3)
        yield made, source
        source.close()


def test_answers_that_drip_are_errors_that_name_the_file(store: tuple[Store, Source]) -> None:
    """On new connections and on those that have been used before."""
    made, source = store
    said = "the server sends fewer than 1,000 bytes a second"
    for _ in range(2):
        made.slow = "slow"
        with pytest.raises(SourceUnavailable, match=rf"/wh/slow\.parquet: {said}"):
            list(source.read("slow.parquet", 0, len(DATA), "e"))
        made.slow = ""
        assert b"".join(source.read("slow.parquet", 0, len(DATA), "e")) == DATA
    assert list(source.list()) == []
    made.slow = "LISTSTATUS" if "webhdfs" in source.url else "list-type"
    with pytest.raises(SourceUnavailable, match=rf"/wh: {said}"):
        list(source.list())


def test_only_waiting_counts() -> None:
    floor = SpeedFloor(2)
    floor.count(1, 100)  # to the first byte
    for _ in range(100):
        floor.count(FLOOR, 1.0)
    floor.count(0, 1.0)
    with pytest.raises(TooSlow):
        floor.count(2 * FLOOR - 1, 1.0)


def test_bytes_that_drip_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that grows by a few bytes with every try would be tried for days."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    tries: list[int] = []

    def call(error: SourceUnavailable, most: int) -> None:
        tries.append(1)
        if len(tries) < most:
            raise error

    def tried(error: SourceUnavailable, most: int) -> int:
        tries.clear()
        with_retries(lambda: call(error, most), "x", Patience(3), lambda _: None, lambda: len(tries))
        return len(tries)

    with pytest.raises(SourceTooSlow):
        tried(SourceTooSlow("x", "slow"), 99)
    assert len(tries) == 4
    assert tried(SourceUnavailable("x", "reset"), 30) == 30


@pytest.mark.hdfs
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), [("hdfs", "namenode"), ("hdfs", "datanode")])
def test_a_server_that_stalls(kind: str, part: str, hdfs: Hdfs, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The names are known and the data does not come, or not even the names: the old snapshot is kept."""
    shop, cache = write_shop(tmp_path / "shop", files=1), tmp_path / "cache"
    places = make_remote(kind, request, tmp_path)
    remote = next(places)
    remote.upload(shop)
    assert pqcache.sync(remote.url, cache, timeout=20).published
    before, rows = os.readlink(cache / "current"), rows_of(cache / "current")
    write_day(shop, "2026-11-04", files=2, first=900_000)
    for file in (shop / "dt=2026-11-04").iterdir():
        remote.put(f"dt=2026-11-04/{file.name}", file.read_bytes())
    with hdfs.paused(part), pytest.raises(pqcache.SourceUnavailable) as stalled:
        pqcache.sync(cache, timeout=1, retries=0)
    assert remote.url.partition("://")[2] in str(stalled.value)
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows
    assert pqcache.sync(cache, timeout=20).published
    assert rows_of(cache / "current") == rows_of(shop)
