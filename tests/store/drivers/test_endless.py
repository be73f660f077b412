"""Listings without end: each is an error that names the source, and takes no memory without bound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pqcache.errors import SourceError
from pqcache.store.drivers import base, webhdfs
from pqcache.store.drivers.local import LocalSource
from pqcache.store.drivers.registry import open_source
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync import listing
from pqcache.store.sync.listing import list_source
from tests.store.drivers.web_server import Asked, Server, reply, serving

DIRECTORY = {"type": "DIRECTORY", "length": 0, "modificationTime": 0}


@pytest.fixture(params=["d" * 200, ".", ""])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A WebHDFS server of which every directory holds two directories."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")

    def answer(asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if "GETFILESTATUS" in asked.path:
            reply(handler, json.dumps({"FileStatus": DIRECTORY}).encode())
        else:
            items = [{**DIRECTORY, "pathSuffix": request.param + end} for end in ("", "e")]
            reply(handler, json.dumps({"FileStatuses": {"FileStatus": items}}).encode())

    with serving(answer) as running:
        yield running


def test_directories_that_hold_themselves(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_PATH", 1000)
    monkeypatch.setattr(base, "MAX_DIRECTORIES", 20)
    source = open_source(f"webhdfs://127.0.0.1:{server.port}/wh")
    with pytest.raises(SourceError, match=r"/wh: has (directories nested without end|more than 20 directories)"):
        list(source.list())
    source.close()


def test_an_answer_without_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhdfs, "MAX_ANSWER", 100)
    source = open_source(f"webhdfs://127.0.0.1:{server.port}/wh")
    with pytest.raises(SourceError, match=r"the answer about /webhdfs/v1/wh has more than 100 bytes"):
        list(source.list())
    source.close()


def test_a_link_to_a_directory_above(tmp_path: Path) -> None:
    (tmp_path / "shop" / "dt=1").mkdir(parents=True)
    (tmp_path / "shop" / "dt=1" / "up").symlink_to("..")
    assert list(open_source(str(tmp_path / "shop")).list()) == []


def test_files_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_FILES", 1000)

    class Endless(LocalSource):
        def list(self) -> Iterator[SourceFile]:
            number = 0
            while True:
                number += 1
                yield SourceFile(f"{number}.parquet", Identity(1, 1))

    with pytest.raises(SourceError, match=r": lists more than 1,000 files; name a dir"):
        list_source(Endless(str(tmp_path), {}), print)
