"""Servers that send, but hardly anything: no body and no listing takes for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from pqcache.errors import SourceUnavailable
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.timeouts import (
    FLOOR,
    Patience,
    SourceTooSlow,
    SpeedFloor,
    TooSlow,
    with_retries,
    with_time_limit,
)
from tests.store.drivers.web_server import Asked, Server, reply, serving

DATA = b"x" * 3000
_LAST_MODIFIED = "Mon, 02 Nov 2026 04:00:00 GMT"


class Store:
    """Answers as S3 or WebHDFS do; what ``slow`` is in the URL of drips."""

    slow = ""

    def s3(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        drip = 0.05 if self.slow and self.slow in asked.path else 0.0
        if "list-type" in asked.path:
            reply(handler, b"<ListBucketResult>" + b" " * 3000 + b"</ListBucketResult>", drip=drip)
        elif handler.command == "HEAD":
            reply(handler, status=404)
        else:
            reply(
                handler, DATA, 206, drip=drip, Content_Range=f"bytes 0-{len(DATA) - 1}/{len(DATA)}", ETag='"e"',
                Last_Modified=_LAST_MODIFIED,
            )  # fmt: skip

    def webhdfs(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        drip = 0.05 if self.slow and self.slow in asked.path else 0.0
        if "LISTSTATUS" in asked.path:
            reply(handler, b" " * 3000 + json.dumps({"FileStatuses": {"FileStatus": []}}).encode(), drip=drip)
        elif "GETFILESTATUS" in asked.path:
            reply(handler, json.dumps({"FileStatus": {"type": "DIRECTORY", "length": 0}}).encode())
        else:
            reply(handler, DATA, drip=drip)


@pytest.fixture(params=["s3", "webhdfs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Server, Source]]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    made = Store()
    with serving(getattr(made, request.param)) as server:
        if request.param == "s3":
            options = {"endpoint": server.url, "key": "k", "secret": "s", "region": "us-east-1"}
            source = open_source("s3://bucket/wh", options, timeout=0.5)
        else:
            source = open_source(f"webhdfs://127.0.0.1:{server.port}/wh", timeout=0.5)
        yield made, server, source
        source.close()


def test_a_body_that_drips_is_an_error_that_names_the_file(store: tuple[Store, Server, Source]) -> None:
    made, _, source = store
    for _ in range(2):  # the second S3 request is sent without botocore's client
        assert b"".join(source.read("slow.parquet", 0, len(DATA), "e")) == DATA
    made.slow = "slow"
    with pytest.raises(SourceUnavailable, match=r"/wh/slow\.parquet: the server sends fewer than 1,000 bytes a second"):
        list(source.read("slow.parquet", 0, len(DATA), "e"))


def test_the_first_body_that_drips(store: tuple[Store, Server, Source]) -> None:
    made, _, source = store
    made.slow = "slow"
    with pytest.raises(SourceUnavailable, match=r"/wh/slow\.parquet: the server sends fewer than 1,000 bytes a second"):
        list(source.read("slow.parquet", 0, len(DATA), "e"))


def test_a_listing_that_drips_is_an_error(store: tuple[Store, Server, Source]) -> None:
    made, _, source = store
    assert list(source.list()) == []
    made.slow = "LISTSTATUS" if "webhdfs" in source.url else "list-type"
    with pytest.raises(SourceUnavailable, match=r"/wh: the server sends fewer than 1,000 bytes a second"):
        list(source.list())


def test_only_waiting_counts() -> None:
    floor = SpeedFloor(2)
    floor.count(1, 100)  # to the first byte
    for _ in range(100):
        floor.count(FLOOR, 1.0)
    floor.count(0, 1.0)
    with pytest.raises(TooSlow):
        floor.count(2 * FLOOR - 1, 1.0)


def test_items_that_drip() -> None:
    def drip() -> Iterator[bytes]:
        while True:
            pause.wait(0.02)
            yield b"x"

    pause = threading.Event()
    with pytest.raises(TooSlow):
        list(with_time_limit(drip, 0.3, len))


def test_bytes_that_drip_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that grows by a few bytes with every try would be tried for days."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    tries: list[int] = []

    def call(error: Callable[[], SourceUnavailable], most: int) -> None:
        tries.append(1)
        if len(tries) < most:
            raise error()

    with pytest.raises(SourceTooSlow):
        with_retries(lambda: call(lambda: SourceTooSlow("x", "slow"), 99), "x", Patience(3), print, lambda: len(tries))
    assert len(tries) == 4
    tries.clear()
    with_retries(
        lambda: call(lambda: SourceUnavailable("x", "reset"), 30), "x", Patience(3), lambda _: None, lambda: len(tries)
    )
    assert len(tries) == 30
