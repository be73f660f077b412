"""Whom WebHDFS tells what: credentials are for the NameNode alone, wherever it redirects to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pqcache.errors import SourceDenied, SourceError
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.webhdfs import WebHdfsSource, redirect_target
from tests.store.drivers.web_server import Asked, Server, reply, serving

DATA = b"0123456789"
STATUS = {"type": "FILE", "length": len(DATA), "modificationTime": 1, "pathSuffix": "", "blockSize": 1}
SECRETS = ("Authorization", "Cookie")


class Cluster:
    """A NameNode that sends a reader to ``location``, and a DataNode of another port."""

    location = ""

    def name_node(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if asked.headers["Authorization"] is None and "/open/" not in asked.path:
            reply(handler, status=401)
        elif "op=OPEN" in asked.path or "elsewhere" in asked.path:
            reply(handler, status=307, Location=self.location, Set_Cookie="hadoop.auth=SECRET; Path=/")
        else:
            body = json.dumps({"FileStatus": STATUS}).encode()
            reply(handler, body, Set_Cookie="hadoop.auth=SECRET; Path=/")

    def data_node(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if "GETFILESTATUS" in asked.path:
            reply(handler, json.dumps({"FileStatus": STATUS}).encode())
        else:
            reply(handler, DATA, status=401 if "denied" in asked.path else 200)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Cluster, Server, Server]]:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password NETRC\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    made = Cluster()
    with serving(made.name_node) as name_node, serving(made.data_node) as data_node:
        made.location = f"{data_node.url}/webhdfs/v1/x?op=OPEN&delegation=TOKEN&offset=0"
        yield made, name_node, data_node


def opened(name_node: Server) -> WebHdfsSource:
    source = open_source(f"webhdfs://alice:PASSWORD@127.0.0.1:{name_node.port}/wh", timeout=5)
    assert isinstance(source, WebHdfsSource)
    return source


def test_a_data_node_gets_the_token_in_its_url_and_nothing_else(cluster: tuple[Cluster, Server, Server]) -> None:
    _, name_node, data_node = cluster
    source = opened(name_node)
    assert source.stat("x").size == len(DATA)
    for _ in range(2):
        assert b"".join(source.read("x", 0, len(DATA))) == DATA
    assert all(asked.headers["Authorization"].startswith("Basic ") for asked in name_node.asked)
    assert name_node.asked[-1].headers["Cookie"] == "hadoop.auth=SECRET"
    assert len(data_node.asked) == 2
    for asked in data_node.asked:
        assert "delegation=TOKEN" in asked.path
        assert [asked.headers[name] for name in SECRETS] == [None, None]
    source.close()


def test_a_redirect_of_metadata_takes_credentials_to_the_same_server_only(
    cluster: tuple[Cluster, Server, Server],
) -> None:
    made, name_node, data_node = cluster
    source = opened(name_node)
    made.location = f"{data_node.url}/webhdfs/v1/x?op=GETFILESTATUS"
    assert source.stat("elsewhere").size == len(DATA)
    assert [data_node.asked[0].headers[name] for name in SECRETS] == [None, None]
    made.location = "/webhdfs/v1/data?op=GETFILESTATUS"
    assert source.stat("elsewhere").size == len(DATA)
    assert name_node.asked[-1].headers["Authorization"] is not None
    source.close()


def test_a_data_node_that_wants_a_password_is_named(cluster: tuple[Cluster, Server, Server]) -> None:
    made, name_node, data_node = cluster
    made.location = f"{data_node.url}/denied?delegation=TOKEN"
    source = opened(name_node)
    with pytest.raises(SourceDenied, match=f"access denied by {data_node.url}, to which the NameNode") as error:
        list(source.read("x", 0, len(DATA)))
    assert "TOKEN" not in str(error.value)
    source.close()


def test_a_redirect_out_of_http_or_without_end_is_refused(cluster: tuple[Cluster, Server, Server]) -> None:
    made, name_node, _ = cluster
    source = opened(name_node)
    for made.location in ("file:///etc/passwd", "ftp://127.0.0.1/x", "http://[", "gopher:x"):
        for call in (lambda: list(source.read("x", 0, 5)), lambda: source.stat("elsewhere")):
            with pytest.raises(SourceError, match=f"^{name_node.url}: redirects to a URL that is not http"):
                call()
    made.location = "/webhdfs/v1/elsewhere"
    with pytest.raises(SourceError, match="redirects 5 times"):
        source.stat("elsewhere")
    source.close()


def test_a_redirect_from_https_to_http_is_refused() -> None:
    url = "https://127.0.0.1:9871/webhdfs/v1/x?op=OPEN"
    secure = "https://127.0.0.2:9865/webhdfs/v1/x?delegation=TOKEN"
    assert redirect_target(url, secure) == secure
    assert redirect_target(url, "/y") == "https://127.0.0.1:9871/y"
    assert redirect_target(url.replace("https", "http"), secure) == secure
    with pytest.raises(SourceError, match=r"redirects from https:// to http://127\.0\.0\.2:9864, where") as error:
        redirect_target(url, "http://127.0.0.2:9864/webhdfs/v1/x?delegation=TOKEN")
    assert "TOKEN" not in str(error.value)
