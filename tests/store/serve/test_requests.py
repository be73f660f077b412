"""What the server answers to clients that are not ours: too slow, too long, wrong, or looking for other files."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import CacheError, PqcacheError, UsageError
from pqcache.store import http_server
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.serve import CacheServer
from tests.datasets import write_shop
from tests.examples import examples
from tests.store.serve.serving import TOKEN, ask, connect, send, served
from tests.waiting import becomes_true

FILE = "dt=2026-11-01/part-00000.parquet"
CURRENT = f"GET /shop/current HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    pqcache.sync(write_shop(root / "lake", files=1, rows=20), root / "shop")
    (root / "secret").write_text("what nobody may read")
    return root / "shop"


@pytest.fixture(scope="module")
def server(shop: Path) -> Iterator[CacheServer]:
    with served(shop) as running:
        yield running


def url_of(shop: Path, path: str = FILE) -> str:
    return f"/shop/snapshots/{CacheDirectory(shop).snapshot().id}/files/{path}"


def test_the_protocol(server: CacheServer, shop: Path) -> None:
    snapshot = CacheDirectory(shop).snapshot()
    about = ask(server, "/shop/current")
    assert about.status == 200
    assert json.loads(about.body) == {
        "protocol": 1,
        "pqcache": pqcache.__version__,
        "snapshot": snapshot.id,
        "created": snapshot.manifest().created,
    }
    manifest = ask(server, f"/shop/snapshots/{snapshot.id}/manifest")
    recorded = json.loads((snapshot.path / "_pqcache" / "checksums.json").read_text())["_pqcache/files.arrow"]
    assert manifest.body == (snapshot.path / "_pqcache" / "files.arrow").read_bytes()
    assert manifest.headers["etag"] == f'"{recorded}"'
    tag = next(entry.checksum for entry in snapshot.manifest().files if entry.path == FILE)
    content = (snapshot.path / FILE).read_bytes()
    whole = ask(server, url_of(shop))
    assert (whole.status, whole.body, whole.headers["etag"]) == (200, content, f'"{tag}"')
    part = ask(server, url_of(shop), Range="bytes=5-14", If_Match=f'"{tag}"')
    assert (part.status, part.body) == (206, content[5:15])
    assert part.headers["content-range"] == f"bytes 5-14/{len(content)}"
    head = ask(server, url_of(shop), method="HEAD", Range="bytes=5-14")
    assert (head.status, head.body, head.headers["content-length"]) == (206, b"", "10")


@pytest.mark.parametrize(
    ("asked", "status", "first", "last"),
    [
        ("bytes=0-0", 206, 0, 0),
        ("bytes=10-", 206, 10, None),
        ("bytes=10-99999999999", 206, 10, None),
        ("bytes=99999999999-", 416, 0, 0),
        ("bytes=-5", 206, -5, None),
        ("bytes=-99999999999", 206, 0, None),
        ("bytes=9-3", 416, 0, 0),
        ("bytes=0-1,3-4", 416, 0, 0),
        ("bytes=-", 416, 0, 0),
        ("bytes=a-b", 416, 0, 0),
        ("rows=0-1", 416, 0, 0),
        ("bytes=" + "9" * 40 + "-", 416, 0, 0),
        ("bytes=" + "9" * 5000 + "-", 416, 0, 0),
        ("", 416, 0, 0),
    ],
)
def test_ranges(server: CacheServer, shop: Path, asked: str, status: int, first: int, last: int | None) -> None:
    content = (shop / "current" / FILE).read_bytes()
    answer = ask(server, url_of(shop), Range=asked)
    assert answer.status == status
    if status == 206:
        assert answer.body == content[first : len(content) if last is None else last + 1]
    elif status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(content)}"


def test_another_version_is_refused(server: CacheServer, shop: Path) -> None:
    for tag in ('"xxh3:0"', "xxh3", '""', 'W/"x"'):
        assert ask(server, url_of(shop), If_Match=tag, Range="bytes=0-3").status == 412
    assert ask(server, url_of(shop), If_Match="*", Range="bytes=0-3").body == b"PAR1"


@pytest.mark.parametrize(
    "path",
    [
        "../../../secret", "..%2f..%2f..%2fsecret", "%2e%2e/%2e%2e/%2e%2e/secret", "dt=2026-11-01/../../../../secret",
        "/etc/passwd", "%2fetc%2fpasswd", "%00", f"{FILE}%00", f"{FILE}/", f"./{FILE}", f"/{FILE}", "",
        "_pqcache/files.arrow", "_pqcache/lease", "_pqcache/checksums.json", ".", "..", "x" * 60_000,
        "dt=2026-11-01", "%ff", "%c0%ae%c0%ae/secret", "..\\..\\secret",
    ],
)  # fmt: skip
def test_nothing_but_the_files_of_the_manifest(server: CacheServer, shop: Path, path: str) -> None:
    for target in (url_of(shop, path), f"/shop/{path}", f"/shop/snapshots/{path}/manifest", f"/{path}"):
        answer = ask(server, target)
        assert answer.status in (400, 404, 410), target
        assert b"nobody" not in answer.body
        assert "etag" not in answer.headers


def test_long_and_malformed_requests(server: CacheServer) -> None:
    host = b"\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer " + TOKEN.encode()
    for data, status in (
        (b"GET /shop/current HTTP/1.1" + host, 200),
        (b"GET http://127.0.0.1/shop/current HTTP/1.1" + host, 200),
        (b"GET /shop/current?x=1 HTTP/1.1" + host, 200),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\nContent-Length: 5", 200),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\nTransfer-Encoding: chunked", 200),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1" + host, 400),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\nX: " + b"y" * 70_000, 400),
        (b"GET /shop/current HTTP/x" + host, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /shop/current HTTP/1.1\r\nConnection: close", 400),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\nHost: other", 400),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\n folded", 400),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\nX: a\x00b", 400),
        (b"GET /shop/current HTTP/1.1" + host + b"\r\nX: a\nb", 400),
        (b"POST /shop/current HTTP/1.1" + host, 405),
        (b"PUT /shop/current HTTP/1.1" + host + b"\r\nContent-Length: 5", 405),
        (b"DELETE /shop/current HTTP/1.1" + host, 405),
    ):
        assert send(server, data + b"\r\n\r\n").status == status, data[:80]


def test_a_wrong_token_learns_nothing(server: CacheServer, shop: Path) -> None:
    for target in ("/shop/current", "/nothing/current", url_of(shop), "/"):
        for token in ("", "x", TOKEN + "x", TOKEN[:-1], "é"):
            answer = ask(server, target, token=token)
            assert (answer.status, answer.error) == (401, "the token is missing or wrong")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert ask(server, target, token="", Authorization=f"Basic {TOKEN}").status == 401


@pytest.mark.parametrize("sent", [b"", b"GET /shop/current HTTP/1.1\r\nHost: 127", CURRENT, CURRENT + b"GET /sh"])
def test_a_client_that_asks_for_nothing_holds_nothing(shop: Path, sent: bytes) -> None:
    with served(shop, idle_seconds=0.3) as server, connect(server) as silent:
        silent.sendall(sent)
        answers = b""
        while data := silent.recv(1 << 16):
            answers += data
        assert answers.count(b"HTTP/1.1 200 OK") == sent.count(CURRENT)


def test_a_client_that_does_not_take_its_answers(shop: Path) -> None:
    with served(shop, stall_seconds=0.3) as server, socket.socket() as client:
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # that few requests fill
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        client.connect(server.address)
        with suppress(ConnectionError):
            for _ in range(100_000):
                client.sendall(CURRENT * 100)
            pytest.fail("a client that takes no answers can ask for ever")


def test_a_client_that_does_not_take_a_file(shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pqcache.serve")
    (tmp_path / "lake").mkdir()
    table = pa.table({"x": [os.urandom(1 << 20) for _ in range(32)]})
    pq.write_table(table, tmp_path / "lake" / "x.parquet", compression="none")
    pqcache.sync(tmp_path / "lake", tmp_path / "large")
    target = f"/large/snapshots/{CacheDirectory(tmp_path / 'large').snapshot().id}/files/x.parquet"
    line = f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with served(tmp_path / "large", stall_seconds=0.3) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(30)
            client.connect(server.address)
            client.sendall(line)
            assert becomes_true(lambda: "ended by the client takes nothing" in caplog.text)
        with connect(server) as client:
            client.sendall(line)
            client.recv(100)
        assert ask(server, target, Range="bytes=0-3").body == b"PAR1", "one that goes away harms no other"
        began = time.monotonic()
        with connect(server) as client:
            client.sendall(line)
            client.recv(100)
            server.close()  # in the middle of a file
        assert time.monotonic() - began < 30


def test_too_many_connections(shop: Path) -> None:
    with served(shop, connections=2) as server:
        with connect(server) as one, connect(server) as two:
            for client in (one, two):
                client.sendall(CURRENT)
                assert client.recv(100)
            answer = ask(server, "/shop/current")
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
            assert "too many connections" in answer.error
        deadline = time.monotonic() + 30
        while ask(server, "/shop/current").status != 200:
            assert time.monotonic() < deadline
        assert pqcache.sync(server.urls["shop"], shop.parent / "waits", options={"token": TOKEN}).published


def test_clients_without_a_token_keep_nobody_out(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_STRANGERS", 1)  # so that a few are too many
    strangers: list[socket.socket] = []
    with ExitStack() as stack, pqcache.serve([shop], port=0, token_file=token_of(shop), connections=3) as server:
        for number in range(8):
            stranger = stack.enter_context(connect(server))
            strangers.append(stranger)
            stranger.sendall(
                (b"", b"GET /shop/current HTTP/1.1\r\n", CURRENT.replace(TOKEN.encode(), b"x"))[number % 3]
            )
            if number % 3 == 2:
                assert b" 401 " in stranger.recv(100)
        with suppress(ConnectionError):
            assert strangers[0].recv(1) == b"", "the oldest one has to go"
        report = pqcache.sync(server.urls["shop"], shop.parent / "crowd", options={"token": TOKEN}, retries=0)
        assert report.published


def token_of(shop: Path) -> Path:
    file = shop.parent / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    return file


def test_without_a_token(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what every user can read, and only to hosts that a page in a browser cannot have another name for."""
    monkeypatch.delenv("PQCACHE_TOKEN", raising=False)
    with TemporaryDirectory() as open_to_all:  # pytest's own is not
        root = Path(open_to_all)
        cache, file = root / "shop", root / "shop" / "current" / FILE
        pqcache.sync(shop / "current", cache)
        with pytest.raises(CacheError, match=r"is closed to other users, and there is no token; set .*--token-file"):
            pqcache.serve([cache], port=0)
        root.chmod(0o711)
        file = file.resolve()
        with pqcache.serve([cache], port=0) as server:
            assert ask(server, "/shop/current", token="").status == 200
            assert ask(server, url_of(cache), token="", Range="bytes=0-3").body == b"PAR1"
            file.chmod(0o440)
            answer = ask(server, url_of(cache), token="", Range="bytes=0-3")
            reason = "part-00000.parquet is not readable by every user, and there is no token"
            assert (answer.status, answer.error) == (403, reason)
            line = "GET /shop/current HTTP/1.1\r\nConnection: close\r\nHost: "
            for host in ("localhost:1", "[::1]:1", "127.0.0.9"):
                assert send(server, f"{line}{host}\r\n\r\n".encode()).status == 200
            for host in ("a.example", "a.example:8700", "10.0.0.1", "["):
                assert send(server, f"{line}{host}\r\n\r\n".encode()).status == 403
        with pytest.raises(CacheError, match="is not readable by every user"):
            pqcache.serve([cache], port=0)
        with pytest.raises(UsageError, match=r"--bind 0\.0\.0\.0: other machines can connect.*--token-file FILE"):
            pqcache.serve([cache], bind="0.0.0.0")


def test_links_are_not_followed(shop: Path, tmp_path: Path) -> None:
    """Also where others could plant them in a cache that is served by somebody else."""
    pqcache.sync(shop / "current", tmp_path / "copy")
    file = tmp_path / "copy" / "current" / FILE
    size = file.stat().st_size
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / file.name).write_bytes(b"x" * size)
    target = url_of(tmp_path / "copy").replace("/shop/", "/copy/")
    with served(tmp_path / "copy") as server:
        assert ask(server, target).status == 200
        file.parent.rename(tmp_path / "away")
        file.parent.symlink_to(tmp_path / "private")
        assert (ask(server, target).status, ask(server, target).error) == (500, f"{FILE} is reached by a link")
        file.parent.unlink()
        (tmp_path / "away").rename(file.parent)
        file.unlink()
        file.symlink_to(tmp_path / "private" / file.name)
        assert ask(server, target).status == 503
    (tmp_path / "alias").symlink_to(tmp_path / "copy")
    with served(tmp_path / "alias") as server:
        assert ask(server, "/alias/current").status == 200


def test_what_cannot_be_served(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PQCACHE_TOKEN", TOKEN)
    pqcache.sync(shop / "current", tmp_path / "shop")
    with pytest.raises(UsageError, match="are both named shop"):
        pqcache.serve([shop, tmp_path / "shop"], port=0)
    with pytest.raises(CacheError, match="not a pqcache"):
        pqcache.serve([tmp_path], port=0)
    with pytest.raises(UsageError, match="no cache is named"):
        pqcache.serve([], port=0)
    for option, reason in (
        ({"bind": "no such host"}, "not an address"),
        ({"port": 70_000}, "not a port"),
        ({"connections": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=reason):
            pqcache.serve([shop], **{"port": 0, **option})  # type: ignore[arg-type]
    with served(shop) as server, pytest.raises(PqcacheError, match=r"cannot be listened on.*in use.*--port"):
        pqcache.serve([shop], port=server.address[1])
    new = tmp_path / "empty"
    pqcache.sync(shop / "current", new)
    (new / "current").unlink()
    with served(new) as server:
        assert (ask(server, "/empty/current").status) == 404
        assert "nothing is published" in ask(server, "/empty/current").error
        assert ask(server, "/shop/current").error == "no cache of this name is served, but empty"


@given(
    st.binary(max_size=300) | st.from_regex(rb"GET /[a-z/.%0-9]* HTTP/1.1\r\nHost: x(\r\n[A-Z]+: .*)*", fullmatch=True)
)
@settings(max_examples=examples(200))
def test_whatever_comes_gets_nothing_without_a_token(server: CacheServer, head: bytes) -> None:
    with connect(server) as client:
        client.sendall(head + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    assert not answer or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ", b"HTTP/1.0 400 "))
    assert ask(server, "/shop/current").status == 200


def test_without_aiohttp(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pqcache.store.http_server")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UsageError, match=r"^pqcache serve: needs aiohttp; install .*pip install 'pqcache\[serve\]'$"):
        pqcache.serve([shop], port=0)
