"""A served cache as a source: the same files and identities as from its directory, and errors by name."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

import pqcache
from pqcache.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
)
from pqcache.events import Event, Fetched, Listed
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.drivers.base import read_range
from pqcache.store.drivers.registry import open_source, open_target
from pqcache.store.drivers.served_snapshot import ServedSource
from tests.datasets import files_of, rows_of, write_day, write_shop
from tests.store.drivers.web_server import Asked, reply, serving
from tests.store.serve.serving import TOKEN, served, with_token
from tests.waiting import becomes_true

pytestmark = pytest.mark.usefixtures(with_token.__name__)
__all__ = ["with_token"]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "lake", files=2, rows=20)


@pytest.fixture
def shop(lake: Path, tmp_path: Path) -> Path:
    pqcache.sync(lake, tmp_path / "shop", keep=1)
    return tmp_path / "shop"


def test_only_what_changed_is_fetched(lake: Path, shop: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with served(shop) as server:
        assert pqcache.sync(server.urls["shop"], copy).added == 6
        assert rows_of(copy / "current") == rows_of(shop / "current")
        assert pqcache.verify(copy, deep=True, source=True).changed == ()
        report = pqcache.sync(copy)
        assert (report.published, report.fetched_bytes, report.unchanged) == (False, 0, 6)
        write_day(lake, "2026-11-02", first=100_000, files=1, rows=20, seed=9)
        pqcache.sync(shop)
        assert pqcache.verify(copy, source=True).changed == ("dt=2026-11-02/part-00000.parquet",)
        report = pqcache.sync(copy)
        assert (report.changed, report.unchanged) == (1, 5)
        assert rows_of(copy / "current") == rows_of(lake)
        assert files_of(copy / "current") == files_of(shop / "current")


def test_a_served_cache_and_its_directory_have_the_same_identities(shop: Path, tmp_path: Path) -> None:
    with served(shop) as server:
        pqcache.sync(shop / "current", tmp_path / "copy")
        assert not pqcache.sync(server.urls["shop"], tmp_path / "copy", new_source=True).published
        assert not pqcache.sync(shop / "current", tmp_path / "copy", new_source=True).published
        with closing(open_source(server.urls["shop"])) as one, closing(open_source(str(shop / "current"))) as two:
            assert isinstance(one, ServedSource)
            assert list(one.list()) == list(two.list())


def test_parts_and_other_commands(shop: Path, tmp_path: Path) -> None:
    path = "dt=2026-11-02/part-00001.parquet"
    with served(shop) as server:
        url = server.urls["shop"]
        pqcache.sync(f"{url}/dt=2026-11-02", tmp_path / "part")
        assert files_of(tmp_path / "part" / "current") == ["part-00000.parquet", "part-00001.parquet"]
        pqcache.sync(f"{url}/{path}", tmp_path / "file")
        assert files_of(tmp_path / "file" / "current") == ["part-00001.parquet"]
        pqcache.sync(url, tmp_path / "some", columns=["id"], where="dt = '2026-11-01' and id < 10")
        assert pqcache.inspect(tmp_path / "some").rows == 10
        found = pqcache.inspect(url)
        assert (found.kind, found.rows, found.files) == ("remote", 120, 6)
        assert pqcache.repartition(url, tmp_path / "out", row_group_size="1MB").rows == 120
        assert rows_of(tmp_path / "out") == rows_of(shop / "current")
        shards = [pqcache.sync(url, tmp_path / f"share-{i}", shard=f"{i}/2").rows for i in range(2)]
        assert sum(shards) == 120
        with pytest.raises(UsageError, match="read, not written"):
            open_target(url)
        with closing(open_source(f"{url}/dt=2020-01-01")) as source, pytest.raises(SourceNotFound, match="no such"):
            list(source.list())
        with closing(open_source(url)) as source:
            whole = read_range(source, path, 0, source.stat(path).size)
            assert whole == (shop / "current" / path).read_bytes()
            assert read_range(source, path, 7, 100, source.stat(path).tag) == whole[7:107]
            assert read_range(source, path, 7, 0) == b""
            with pytest.raises(SourceChanged):
                read_range(source, path, 0, 4, "xxh3:0")
            with pytest.raises(SourceNotFound):
                read_range(source, "nothing", 0, 4)
            fixed = source.pinned_url(url)
        with closing(open_source(fixed)) as source:
            assert len(list(source.list())) == 6
        with closing(open_source(f"{fixed}/dt=2026-11-02")) as source:
            assert len(list(source.list())) == 2


def test_names_that_have_to_be_encoded(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    write_day(lake, "1", files=1, rows=5)
    for name in ("dt=2026%2F11", "dt=a b?c#d&e;é", "dt=%25", "plain"):
        shutil.copytree(lake / "dt=1", lake / name)
    cache = tmp_path / "the shop? 100%"
    pqcache.sync(lake, cache)
    with served(cache) as server:
        pqcache.sync(server.urls[cache.name], tmp_path / "copy")
    assert files_of(tmp_path / "copy" / "current") == files_of(lake)


def test_a_snapshot_is_copied_while_the_server_publishes(lake: Path, shop: Path, tmp_path: Path) -> None:
    """The lease keeps it, and the second listing is of the same one."""
    before, acted = rows_of(shop / "current"), []

    def publish(event: Event) -> None:
        if isinstance(event, Listed) and not acted:
            acted.append(event)
            write_day(lake, "2026-11-02", first=100_000, files=2, rows=20, seed=5)
            assert pqcache.sync(shop).published
            assert len(pqcache.gc(shop, keep=1).removed) == 0

    with served(shop) as server:
        pqcache.sync(server.urls["shop"], tmp_path / "copy", on_event=publish)
        assert acted
        assert rows_of(tmp_path / "copy" / "current") == before
        assert len(CacheDirectory(shop).snapshots()) == 2, "it is leased for a while"
    assert len(pqcache.gc(shop, keep=1).removed) == 1, "and no longer than the server runs"


def test_a_lease_ends_some_time_after_the_last_request(lake: Path, shop: Path, tmp_path: Path) -> None:
    with served(shop, lease_seconds=0.1) as server:
        pqcache.sync(server.urls["shop"], tmp_path / "copy")
        write_day(lake, "2026-11-02", first=100_000, files=2, rows=20, seed=5)
        pqcache.sync(shop)
        assert becomes_true(lambda: len(pqcache.gc(shop, keep=1).removed) == 1)


def test_a_snapshot_that_is_gone_nevertheless(lake: Path, shop: Path, tmp_path: Path) -> None:
    """As on a file system without locks: the client goes on from the snapshot that is current then."""
    acted: list[Event] = []

    def replace(event: Event) -> None:
        if isinstance(event, Fetched) and not acted:
            acted.append(event)
            old = CacheDirectory(shop).snapshot()
            write_day(lake, "2026-11-03", first=200_000, files=2, rows=20, seed=5)
            pqcache.sync(shop)
            old.path.rename(tmp_path / "gone")

    with served(shop) as server:
        report = pqcache.sync(server.urls["shop"], tmp_path / "copy", jobs=1, on_event=replace)
        assert report.published
        assert rows_of(tmp_path / "copy" / "current") == rows_of(lake)
        gone = f"{server.urls['shop']}/snapshots/20200101T000000Z-0001"
        with closing(open_source(gone)) as source, pytest.raises(SourceNotFound, match="was removed"):
            list(source.list())


def test_what_is_damaged_is_not_copied(shop: Path, tmp_path: Path) -> None:
    damaged = next((shop / "current").rglob("*.parquet"))
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.chmod(0o644)
    damaged.write_bytes(content)
    with served(shop) as server:
        with pytest.raises(SourceError, match=rf"{damaged.name}: differs from the manifest of its cache.*--repair"):
            pqcache.sync(server.urls["shop"], tmp_path / "copy")
        damaged.write_bytes(content[:-1])
        with pytest.raises(SourceError, match=rf"{damaged.name}.*it is damaged"):
            pqcache.sync(server.urls["shop"], tmp_path / "copy")
        damaged.unlink()
        with pytest.raises(SourceError, match=rf"{damaged.name} is missing"):
            pqcache.sync(server.urls["shop"], tmp_path / "copy")
    manifest = shop / "current" / "_pqcache" / "files.arrow"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with served(shop) as server, pytest.raises(SourceError, match="is not as it was written"):
        pqcache.sync(server.urls["shop"], tmp_path / "copy")
    assert not (tmp_path / "copy" / "current").exists()


def test_tokens(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("PQCACHE_TOKEN")
    caplog.set_level(logging.DEBUG)
    file, copy = tmp_path / "token", tmp_path / "copy"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o640)
    with served(shop) as server:
        url = server.urls["shop"]
        for options in ({}, {"token": TOKEN[::-1]}, {"token": TOKEN + "0"}):
            with pytest.raises(SourceDenied, match=r"token is missing or wrong.*token_file"):
                pqcache.sync(url, copy, options=options)
        assert not copy.exists()
        pqcache.sync(url, copy, options={"token": TOKEN})
        assert dict(read_config(copy).options) == {}
        with pytest.raises(SourceDenied):
            pqcache.sync(copy)
        pqcache.sync(url, copy, options={"token_file": str(file)})
        assert dict(read_config(copy).options) == {"token_file": str(file)}
        assert not pqcache.sync(copy).published
        for options, reason in (
            ({"token": "short"}, "5 characters"),
            ({"token": "two words, and long enough"}, "spaces or non-ASCII characters"),
            ({"token": TOKEN, "token_file": str(file)}, "exclude each other"),
            ({"token_file": "token"}, "relative"),
            ({"token_file": str(tmp_path / "none")}, "cannot be read"),
            ({"token_file": str(tmp_path)}, "cannot be read"),
            ({"user": "me"}, "no such option"),
        ):
            with pytest.raises(UsageError, match=reason) as error:
                pqcache.sync(url, tmp_path / "other", options=options)
            assert TOKEN not in str(error.value)
        file.chmod(0o644)
        with pytest.raises(UsageError, match="every user can read it; chmod 600"):
            pqcache.sync(url, tmp_path / "other", options={"token_file": str(file)})
    left = [path for path in copy.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert not left
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("pqcache+http://127.0.0.1", "names no cache"),
        ("pqcache+http:///shop", "names no cache"),
        ("pqcache+http://me:secret@127.0.0.1/shop", "has a user"),
        ("pqcache+http://127.0.0.1/shop?token=secret", "has a secret"),
        ("pqcache+http://127.0.0.1:x/shop", "HOST:PORT"),
        ("pqcache+http://me:secret/word@127.0.0.1/shop", "HOST:PORT"),
        ("sftp://me:secret/word@127.0.0.1/shop", "HOST:PORT"),
    ],
)
def test_urls_that_make_no_sense(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        open_source(url)
    assert "secret@" not in str(error.value)
    assert "secret'" not in str(error.value)


def test_what_is_no_pqcache_serve(tmp_path: Path) -> None:
    answers = {
        "/text/current": lambda h: reply(h, b"<html>"),
        "/list/current": lambda h: reply(h, b"[]"),
        "/none/current": lambda h: reply(h, b'{"protocol": 1}'),
        "/deep/current": lambda h: reply(h, b"[" * 4000),
        "/newer/current": lambda h: reply(h, b'{"protocol": 2, "snapshot": "x"}'),
        "/moved/current": lambda h: reply(h, status=302, Location="http://127.0.0.1:1/"),
        "/busy/current": lambda h: reply(h, b'{"error": "busy \\u001b[1m"}', status=503),
        "/gone/current": lambda h: reply(h, b'{"protocol": 1, "snapshot": "x"}'),
        "/gone/snapshots/x/manifest": lambda h: reply(h, b'{"error": ""}', status=410),
        "/cut/current": lambda h: reply(h, b'{"protocol": 1, "snapshot": "x"}'),
        "/cut/snapshots/x/manifest": lambda h: reply(h, b"half of it", ETag='"of all of it"'),
    }

    def answer(asked: Asked, handler: object) -> None:
        answers[asked.path](handler)  # type: ignore[no-untyped-call]

    with serving(answer) as server:
        for name, reason in (
            ("text", "not 'pqcache serve'"),
            ("list", "version None"),
            ("none", "not 'pqcache serve'"),
            ("deep", "not 'pqcache serve'"),
            ("newer", "version 2 of the protocol"),
            ("moved", "redirects"),
            ("busy", r"busy %1B\[1m"),
            ("gone", "snapshot x was current, and was removed before it was read; sync again"),
            ("cut", "the manifest was damaged in transit, or cut short"),
        ):
            with pytest.raises(SourceError, match=reason):
                pqcache.sync(f"pqcache+http://127.0.0.1:{server.port}/{name}", tmp_path / "copy", retries=0)
        assert all("127.0.0.1" in asked.headers["Host"] for asked in server.asked)
    with pytest.raises(SourceUnavailable, match="cannot connect"):
        pqcache.sync(f"pqcache+http://127.0.0.1:{server.port}/text", tmp_path / "copy", retries=0)
    with serving(answer) as server, pytest.raises(SourceError, match=r"SSL|ssl|wrong version|record"):
        pqcache.sync(f"pqcache+https://127.0.0.1:{server.port}/text", tmp_path / "copy", retries=0)


def test_an_answer_with_another_range_is_not_taken(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = ServedSource._get
    # as if something on the way dropped the header with the range
    monkeypatch.setattr(ServedSource, "_get", lambda source, resource, *_: get(source, resource))
    with served(shop) as server, pytest.raises(SourceUnavailable, match="another range than was asked for"):
        pqcache.sync(server.urls["shop"], tmp_path / "copy", columns=["id"], retries=0)


def test_a_server_that_ends_during_a_sync(shop: Path, tmp_path: Path) -> None:
    """Nothing is published, and the next run takes over what was fetched."""
    with served(shop) as server:

        def end(event: Event) -> None:
            if isinstance(event, Fetched):
                server.close()

        with pytest.raises(SourceUnavailable, match=r"part-0000\d\.parquet: "):
            pqcache.sync(server.urls["shop"], tmp_path / "copy", jobs=1, retries=0, on_event=end)
    assert not (tmp_path / "copy" / "current").exists()
    with served(shop, port=server.address[1]) as server:
        size = pqcache.sync(server.urls["shop"], tmp_path / "copy").fetched_bytes
    assert 0 < size < pqcache.inspect(shop).bytes


def test_a_process_that_serves_can_fork(shop: Path, tmp_path: Path) -> None:
    """The child ends, its copies of the sockets and leases hold nothing, and the parent goes on."""
    with served(shop) as server:
        stop = threading.Event()

        def copy() -> None:
            while not stop.is_set():
                with suppress(SourceUnavailable), closing(open_source(server.urls["shop"])) as source:
                    list(source.list())

        thread = threading.Thread(target=copy)
        thread.start()
        children = []
        for _ in range(4):
            child = os.fork()
            if not child:
                threading.Event().wait(0.2)
                os._exit(0)
            children.append(child)
        server.close()  # while the last children live
        with pytest.raises(SourceUnavailable):
            pqcache.sync(server.urls["shop"], tmp_path / "copy", retries=0)
        stop.set()
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
        thread.join(30)
        assert not thread.is_alive()
