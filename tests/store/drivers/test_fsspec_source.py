"""Stores of fsspec: memory:// against its bytes, http:// against a server with faults, and what is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.fsspec_source import FsspecSource, identity_of
from pqcache.store.drivers.registry import open_source
from pqcache.store.manifest import Identity
from pqcache.store.urls import redact
from tests.datasets import rows_of, write_day, write_shop
from tests.examples import examples
from tests.forked_commands import run_pqcache
from tests.store.drivers.web_server import Asked, Server, reply, serving

pytestmark = pytest.mark.usefixtures("no_cloud")
PART = "dt=2026-11-01/part-00000.parquet"


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """The file system that all of memory:// share, empty before and after."""
    system = MemoryFileSystem()
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def copy_to_memory(here: Path, system: MemoryFileSystem) -> None:
    for path in here.rglob("*"):
        if path.is_file():
            system.pipe_file(f"/lake/{path.relative_to(here).as_posix()}", path.read_bytes())


NAMES = st.text(st.characters(exclude_characters="/", exclude_categories=("Cs", "Cc")), min_size=1, max_size=5)
PATHS = st.lists(NAMES.filter(lambda name: name.strip(". ") == name and name), min_size=1, max_size=3).map("/".join)


@settings(max_examples=examples(60))
@given(files=st.dictionaries(PATHS, st.binary(max_size=60), min_size=1, max_size=6), data=st.data())
def test_listings_and_ranges_are_the_bytes_that_are_there(files: dict[str, bytes], data: st.DataObject) -> None:
    files = {path: body for path, body in files.items() if not any(other.startswith(f"{path}/") for other in files)}
    system = MemoryFileSystem()
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    for path, body in files.items():
        system.pipe_file(f"/lake/{path}", body)
    source = open_source("memory://lake")
    listed = {file.path: file.identity for file in source.list()}
    assert {path: identity.size for path, identity in listed.items()} == {p: len(body) for p, body in files.items()}
    path = data.draw(st.sampled_from(sorted(files)))
    assert source.stat(path) == listed[path]
    start = data.draw(st.integers(0, len(files[path])))
    length = data.draw(st.integers(0, len(files[path]) - start))
    assert b"".join(source.read(path, start, length)) == files[path][start : start + length]
    source.close()


def test_a_large_file_comes_in_bounded_chunks(memory: MemoryFileSystem) -> None:
    body = os.urandom(9 << 20)
    memory.pipe_file("/lake/x", body)
    chunks = list(open_source("memory://lake").read("x", 5, len(body) - 5))
    assert max(map(len, chunks)) <= 4 << 20
    assert b"".join(chunks) == body[5:]
    assert b"".join(open_source("memory://lake").read("x", len(body) - 2, 10)) == body[-2:]  # it is shorter now


def test_a_store_that_hangs_is_given_up(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/lake/x", b"x")
    source = open_source("memory://lake", timeout=0.2)
    for name, call in (
        ("info", lambda: source.stat("x")),
        ("ls", lambda: list(source.list())),
        ("open", lambda: list(source.read("x", 0, 1))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, name, lambda *_, **__: time.sleep(2))
            with pytest.raises(SourceUnavailable, match=r"^memory://lake(/x)?: no answer in time"):
                call()


def test_a_size_alone_identifies_nothing(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_to_memory(write_shop(tmp_path / "shop", days=1, files=1, rows=20), memory)
    ls, info = MemoryFileSystem.ls, MemoryFileSystem.info

    def without_time(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if name != "created"}

    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *a, **how: list(map(without_time, ls(*a, **how))))
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *a, **how: without_time(info(*a, **how)))
    with pytest.raises(SourceError, match=rf"^memory://lake/{PART}: the store gives its size only.*--compare content"):
        pqcache.sync("memory://lake", tmp_path / "cache")
    assert pqcache.sync("memory://lake", tmp_path / "cache", compare="content").rows == 20
    memory.store[f"/lake/{PART}"].seek(60)
    memory.store[f"/lake/{PART}"].write(b"\xff")  # the size is the same
    assert pqcache.sync(tmp_path / "cache", compare="content").changed == 1


class Web:
    """A directory as a server lists and serves it, with the faults of ``broken``."""

    def __init__(self, root: Path) -> None:
        self.root, self.broken, self.status = root, "", 0
        self.pages: dict[str, bytes] = {}  # in place of listings

    def answer(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        name = unquote(asked.path).strip("/")
        path = self.root / name
        if self.status and self.broken in name:
            reply(handler, status=self.status)
        elif name in self.pages:
            reply(handler, self.pages[name], Content_Type="text/html")
        elif path.is_dir() and asked.path.endswith("/"):
            self._list(path, handler)
        elif path.is_file():
            self._file(name, path, asked, handler)
        else:
            reply(handler, b"nothing", status=404)

    def _list(self, path: Path, handler: BaseHTTPRequestHandler) -> None:
        found = sorted(f"{quote(each.name)}{'/' * each.is_dir()}" for each in path.iterdir())
        links = ["../", "?C=M;O=D", "/", "https://127.0.0.1:1/x.parquet", *found]
        page = "".join(f'<a href="{link}">see https://127.0.0.1:1/y.parquet</a>' for link in links).encode()
        if self.broken == "listing":
            handler.send_response(200)
            handler.send_header("Content-Type", "text/html")
            handler.send_header("Content-Length", str(len(page)))
            handler.end_headers()
            handler.wfile.write(page[:-30])
            handler.close_connection = True
            return
        reply(handler, page, Content_Type="text/html")

    def _file(self, name: str, path: Path, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        body, headers = path.read_bytes(), {"Content_Type": "application/octet-stream"}
        if self.broken != "untagged":
            headers["ETag"] = f'"{path.stat().st_mtime_ns:x}"'
            headers["Last_Modified"] = "Fri, 20 Nov 2026 04:00:00 GMT"
        if asked.headers["Range"] is None or self.broken == "ranges":
            reply(handler, body, **headers)
            return
        first, last = map(int, asked.headers["Range"].removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        if self.broken == "stalls":
            time.sleep(3)
        if self.broken in ("stalls", "truncated"):
            handler.send_response(206)
            handler.send_header("Content-Length", str(len(part)))
            handler.end_headers()
            handler.wfile.write(part[:-1])
            handler.close_connection = True
            return
        if self.broken == "changes":
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        headers["Content_Range"] = f"bytes {first}-{first + len(part) - 1}/{len(body)}"
        reply(handler, part, status=206, **headers)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Web, Server]]:
    made = Web(tmp_path / "web")
    write_shop(tmp_path / "web/lake", days=2, files=2, rows=30)
    with serving(made.answer) as server:
        yield made, server


def test_a_second_night_from_a_web_server(web: tuple[Web, Server], tmp_path: Path) -> None:
    here, url = web[0].root / "lake", f"{web[1].url}/lake"
    odd = here / "dt=2026%2F11 a+b/part-00000.parquet"
    odd.parent.mkdir()
    odd.write_bytes((here / PART).read_bytes())
    assert pqcache.sync(f"{url}/", tmp_path / "cache").added == 5
    assert (tmp_path / "cache/current/dt=2026%2F11 a+b/part-00000.parquet").exists()
    assert rows_of(tmp_path / "cache/current") == rows_of(here)
    assert not pqcache.sync(tmp_path / "cache").published
    odd.unlink()
    write_day(here, "2026-11-02", files=3, rows=20, first=500_000)
    report = pqcache.sync(tmp_path / "cache")
    assert (report.added, report.changed, report.removed) == (1, 2, 1)
    assert rows_of(tmp_path / "cache/current") == rows_of(here)


FORK = """
import os, sys, pqcache
url, cache = sys.argv[1:]
pqcache.sync(url, cache)
if (child := os.fork()) == 0:
    print(sum(batch.num_rows for batch in pqcache.Cache(cache).batches()), pqcache.sync(cache).published, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(pqcache.sync(cache).published)
"""


def test_a_forked_child_syncs_too(web: tuple[Web, Server], tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, f"{web[1].url}/lake", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["120 False", "False"], done.stderr


LOGIN = b'<h1>Index of /lake</h1><form action="/login"><input name="p" type="password"></form> <a href="../">back</a>'
SINGLE_SIGN_ON = b'<script src="/app.js"></script><a href="/">home</a> <a href="help.html">help</a>'


def test_a_page_for_logging_in_is_no_empty_directory(web: tuple[Web, Server], tmp_path: Path) -> None:
    pqcache.sync(f"{web[1].url}/lake", tmp_path / "cache")
    before = rows_of(tmp_path / "cache/current")
    for page, place in (
        (LOGIN, "lake"),
        (SINGLE_SIGN_ON, "lake/dt=2026-11-02"),
        (b"log in", "lake/dt=2026-11-02"),
    ):
        web[0].pages = {place: page}
        said = rf"^{web[1].url}/{place}: .* not a directory listing, perhaps a login form"
        with pytest.raises(SourceError, match=said):
            pqcache.sync(tmp_path / "cache", max_delete="100%", force=True)
        assert rows_of(tmp_path / "cache/current") == before


def test_an_empty_directory_of_a_web_server_is_one(web: tuple[Web, Server]) -> None:
    (web[0].root / "lake" / "empty").mkdir()
    for name in ("_SUCCESS", "notes.txt"):
        (web[0].root / "lake" / "empty" / name).touch()
    for page in (
        b"<title>Index of /lake/empty/</title>",
        b"<title>Directory listing for /lake/empty/</title><ul></ul>",
        b'<a href="../">..</a>',
        b"<A HREF='/lake/'>[To above]</A>",
        b'<a href="../">..</a> <a href="_SUCCESS">_SUCCESS</a> <a href="notes.txt">notes.txt</a>',
    ):
        web[0].pages = {"lake/empty": page}
        found = {file.path for file in open_source(f"{web[1].url}/lake").list()}
        assert len([path for path in found if path.endswith(".parquet")]) == 4, page


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/lake;token=S3CR3T/shop", "http://h/lake;token=***/shop"),
        ("https://h/lake/;a=1;sig_token=S3CR3T?x=1", "https://h/lake/;a=1;sig_token=***"),
        ("http://h/lake#access_key=S3CR3T", "http://h/lake#access_key=***"),
        ("webhdfs://h:1/x;delegation=S3CR3T", "webhdfs://h:1/x;delegation=***"),
        ("http://h/lake?a=1;token=S3CR3T", "http://h/lake?a=1;token=***"),
    ],
)
def test_a_secret_behind_a_semicolon_is_refused_and_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown
    with pytest.raises(UsageError, match="has a secret in its path") as raised:
        open_source(url)
    assert "S3CR3T" not in str(raised.value)
    assert redact("s3://lake/a;token=b") == "s3://lake/a;token=b", "a part of a name there"


def test_one_file_of_a_web_server_and_options_with_secrets(web: tuple[Web, Server], tmp_path: Path) -> None:
    given = '{"headers": {"Authorization": "Bearer SECRET"}}'
    done = run_pqcache("sync", f"{web[1].url}/lake/{PART}", tmp_path / "cache", "-o", f"client_kwargs={given}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "cache/current/part-00000.parquet").read_bytes() == (web[0].root / "lake" / PART).read_bytes()
    assert {asked.headers["Authorization"] for asked in web[1].asked} == {"Bearer SECRET"}
    for path in tmp_path.glob("cache/*"):
        assert not path.is_file() or b"SECRET" not in path.read_bytes()


@pytest.mark.parametrize(
    ("broken", "error", "why"),
    [
        ("truncated", SourceUnavailable, "connection"),
        ("stalls", SourceUnavailable, "no answer in time"),
        ("changes", pqcache.SourceIncomplete, "keeps changing at"),
        ("listing", SourceUnavailable, "connection"),
        ("untagged", SourceError, "the store gives its size only"),
        ("ranges", SourceError, "the server does not serve parts of a file"),
    ],
)
def test_faults_of_a_web_server_are_named(
    broken: str, error: type[Exception], why: str, web: tuple[Web, Server], tmp_path: Path
) -> None:
    web[0].broken = broken
    if broken == "ranges":
        source = open_source(f"{web[1].url}/lake")
        with pytest.raises(error, match=why):
            list(source.read(PART, 100, 50))
        return
    timeout = 0.5 if broken == "stalls" else 20
    with pytest.raises(error, match=why):
        pqcache.sync(f"{web[1].url}/lake", tmp_path / "cache", retries=1, timeout=timeout)
    assert not (tmp_path / "cache/current").exists()


def test_what_a_web_server_refuses_is_no_missing_file(web: tuple[Web, Server]) -> None:
    for status, place, error, why in (
        (401, "", SourceDenied, r"access denied \(401\); check the credentials"),
        (403, "dt=2026-11-02", SourceDenied, r"access denied \(403\)"),
        (403, "part-00001", SourceDenied, r"access denied \(403\)"),
        (500, "", SourceUnavailable, "the server answers 500; try again later"),
        (404, "dt=2026-11-02", SourceNotFound, "no such file or directory"),
    ):
        web[0].status, web[0].broken = status, place
        with pytest.raises(error, match=f"^{web[1].url}/lake.*: {why}"):
            list(open_source(f"{web[1].url}/lake").list())


def test_errors_of_other_clients_are_distinguished() -> None:
    class AuthenticationException(Exception):
        """As paramiko's."""

    class Answer(Exception):
        def __init__(self, code: object) -> None:
            super().__init__("see https://store.example/x?sig=SECRET")
            self.code = code

    class HttpProcessingError(Answer):
        """As aiohttp's, from which it raises another with the same status."""

    source = FsspecSource("memory://host", {})
    hidden, broken = FileNotFoundError("x"), Answer(400)
    hidden.__cause__ = Answer(503)
    broken.__cause__ = HttpProcessingError(400)
    for found, kind in (
        (AuthenticationException(), SourceDenied),
        (PermissionError(13, "Permission denied"), SourceDenied),
        (Answer("403"), SourceDenied),
        (Answer(404), SourceNotFound),
        (hidden, SourceUnavailable),
        (broken, SourceUnavailable),
        (Answer(400), SourceError),
        (ConnectionRefusedError(), SourceUnavailable),
        (TimeoutError(), SourceUnavailable),
        (NotADirectoryError(), SourceNotFound),
        (Answer(None), SourceError),
    ):
        with pytest.raises(kind, match=r"^memory://host/x: ") as error, source.errors("x"):
            raise found
        assert error.type is kind
        assert "SECRET" not in str(error.value)


MOMENT = datetime(2026, 11, 20, 4, 0, 3, 250_000, tzinfo=timezone.utc)
NANOSECONDS = 1_795_147_203_250_000_000


@pytest.mark.parametrize(
    ("info", "identity"),
    [
        ({"size": 5, "mtime": MOMENT}, Identity(5, NANOSECONDS)),  # sftp
        ({"size": 5, "LastModified": "2026-11-20T04:00:03.250Z", "ETag": '"a"'}, Identity(5, NANOSECONDS, "a")),  # oss
        ({"size": 5, "modification_time": NANOSECONDS // 1_000_000}, Identity(5, NANOSECONDS)),  # dbfs
        ({"size": 5, "created": NANOSECONDS / 1e9}, Identity(5, NANOSECONDS)),  # memory
        ({"size": 5, "Last-Modified": "Fri, 20 Nov 2026 04:00:03 GMT"}, Identity(5, NANOSECONDS - 250_000_000)),
        ({"size": 5, "blob_id": "b", "lfs": {"sha256": "s"}, "last_commit": None}, Identity(5, 0, "s")),  # hf
        ({"size": 5, "blob_id": "b", "lfs": None}, Identity(5, 0, "b")),
        ({"size": 5, "generation": "17", "md5Hash": "x=="}, Identity(5, 0, "17")),
        ({"size": 5}, None),
        ({"size": None, "mtime": MOMENT}, None),
        ({"size": 5, "mtime": "soon", "etag": None}, None),
    ],
)
def test_what_identifies_a_file(info: dict[str, Any], identity: Identity | None) -> None:
    assert identity_of(info) == identity


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("nowhere://x", {}, "unknown scheme nowhere://; use a path, hdfs://"),
        ("simplecache::memory://x", {}, "is a chain of file systems; name the store itself"),
        ("zip://x.parquet::https://h/x.zip", {}, "is a chain of file systems"),
        ("reference://x", {}, "reference:// is not a store of its own"),
        ("local:///x", {}, "local:// is not a store of its own; use a path"),
        ("http://127.0.0.1:1/x?page=2", {}, "has a query"),
        ("http://127.0.0.1:1/x", {"colour": "red"}, "-o colour=...: http:// has no such option; it has: client_kwargs"),
        ("memory://x", {"colour": "red"}, "memory:// has no such option; it has: none"),
    ],
)
def test_what_is_no_store_is_refused(url: str, options: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError) as error:
        open_source(url, options)
    assert why in str(error.value)


def test_a_missing_implementation_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ossfs", None)
    with pytest.raises(UsageError, match=r"^oss://b/x: needs ossfs; install it with: pip install ossfs$"):
        open_source("oss://b/x")
