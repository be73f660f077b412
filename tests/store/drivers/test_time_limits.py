"""Servers that accept and never answer: an error within a few times the limit, and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.store.drivers.timeouts import Stalled, with_time_limit
from tests.datasets import rows_of, write_day, write_shop
from tests.remote import make_remote

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs


def soon(happened: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether it happens within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    return happened()


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


@pytest.mark.parametrize("items", [0, 1, 8, 9, 1000])
def test_items_keep_their_order(items: int) -> None:
    client = Client(items)
    assert list(with_time_limit(client, 60)) == list(range(items))
    assert soon(lambda: client.gone)


def test_nothing_starts_before_it_is_asked_for() -> None:
    client = Client(1)
    taken = with_time_limit(client, 60)
    time.sleep(0.05)
    assert client.thread is None
    assert next(taken) == 0


class Panic(BaseException):
    """As hdfs-native's: no Exception."""


@pytest.mark.parametrize("error", [OSError(5, "lost"), Panic("index out of range"), KeyboardInterrupt()])
def test_an_error_comes_after_the_items_before_it(error: BaseException) -> None:
    def fail() -> None:
        raise error

    taken: list[int] = []
    client = Client(20, fail)
    with pytest.raises(type(error)) as raised:
        taken.extend(with_time_limit(client, 60))
    assert raised.value is error
    assert taken == list(range(20))
    assert soon(lambda: client.gone)


def test_an_error_before_the_first_item() -> None:
    def fail() -> Iterator[int]:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        next(with_time_limit(fail, 5))


@pytest.mark.parametrize("items", [0, 3])
def test_silence_is_an_error(items: int) -> None:
    release = threading.Event()
    taken: list[int] = []
    client = Client(items, lambda: release.wait(60))
    start = time.monotonic()
    with pytest.raises(Stalled):
        taken.extend(with_time_limit(client, 1))
    assert time.monotonic() - start >= 1
    assert taken == list(range(items))
    assert not client.gone  # a call that hangs cannot be ended
    release.set()
    assert soon(lambda: client.gone)  # but when it returns, so does its thread


def test_slow_is_not_silent() -> None:
    def drip() -> Iterator[int]:
        for number in range(6):
            time.sleep(0.4)
            yield number

    assert list(with_time_limit(drip, 2)) == list(range(6))


def test_a_slow_caller_is_no_stall_and_bounds_the_queue() -> None:
    client = Client(100)
    taken = with_time_limit(client, 1)
    assert next(taken) == 0
    time.sleep(1.5)
    assert client.made < 20
    assert list(taken) == list(range(1, 100))


@pytest.mark.parametrize("how", ["close", "drop", "throw"])
def test_an_abandoned_client_is_closed(how: str) -> None:
    client = Client(1_000_000)
    taken = with_time_limit(client, 60)
    assert next(taken) == 0
    if how == "close":
        taken.close()  # type: ignore[attr-defined]
    elif how == "drop":
        del taken
    else:
        with pytest.raises(KeyboardInterrupt):
            taken.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert client.closed.wait(60)
    assert soon(lambda: client.gone)
    assert client.made < 20


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    release = threading.Event()
    client = Client(0, lambda: release.wait(60))
    with pytest.raises(Stalled):
        next(with_time_limit(client, 0.1))
    assert client.thread is not None
    assert client.thread.daemon
    release.set()


@pytest.mark.hdfs
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hdfs", "webhdfs"])
@pytest.mark.parametrize("part", ["namenode", "datanode"])
def test_a_server_that_stalls(kind: str, part: str, hdfs: Hdfs, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The names are known and the data does not come, or not even the names: the old snapshot is kept."""
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    places = make_remote(kind, request, tmp_path)
    remote = next(places)
    remote.upload(shop)
    assert pqcache.sync(remote.url, cache, timeout=20).published
    before, rows = os.readlink(cache / "current"), rows_of(cache / "current")
    write_day(shop, "2026-11-04", files=2, first=900_000)
    for file in (shop / "dt=2026-11-04").iterdir():
        remote.put(f"dt=2026-11-04/{file.name}", file.read_bytes())
    with hdfs.paused(part):
        start = time.monotonic()
        with pytest.raises(pqcache.SourceUnavailable) as stalled:
            pqcache.sync(cache, timeout=1, retries=0)
        took = time.monotonic() - start
    assert took < 30  # the usual limits would take minutes
    assert remote.url.partition("://")[2] in str(stalled.value)
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows
    assert pqcache.sync(cache, timeout=20).published
    assert rows_of(cache / "current") == rows_of(shop)
