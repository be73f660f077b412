"""HDFS with two NameNodes: one that is down, or takes connections and never answers, costs seconds, not the run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import pqcache
from pqcache.errors import SourceUnavailable
from pqcache.store.drivers.hdfs import HdfsSource
from tests.datasets import rows_of, write_shop
from tests.servers.hdfs import Hdfs

pytestmark = pytest.mark.hdfs


@contextmanager
def silent() -> Iterator[str]:
    """A NameNode that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Relay:
    """A way to a NameNode that can freeze: nothing more goes through it, and nothing is refused."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self._open.wait()
            target.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def nameservice(*addresses: str) -> dict[str, str]:
    names = [f"nn{number}" for number in range(len(addresses))]
    return {
        "dfs.nameservices": "lake",
        "dfs.ha.namenodes.lake": ",".join(names),
        "dfs.client.failover.proxy.provider.lake": (
            "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
        ),
        **{f"dfs.namenode.rpc-address.lake.{name}": to for name, to in zip(names, addresses, strict=True)},
    }


def write_conf(directory: Path, properties: Mapping[str, str]) -> None:
    directory.mkdir()
    text = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in properties.items())
    for name in ("core-site.xml", "hdfs-site.xml"):
        (directory / name).write_text(f"<configuration>{text}</configuration>")


@pytest.fixture
def shop(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> str:
    """The path of a dataset on the real HDFS."""
    write_shop(tmp_path / "shop", days=2, files=1, rows=50)
    hdfs.upload_tree(tmp_path / "shop", f"{hdfs_dir}/shop")
    return f"{hdfs_dir}/shop".removeprefix(hdfs.url)


@pytest.mark.parametrize(("first", "given_by"), [("silent", "conf"), ("refused", "options")])
def test_the_second_namenode_serves_when_the_first_does_not(
    first: str, given_by: str, hdfs: Hdfs, shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hdfs.url.removeprefix("hdfs://")
    with silent() as mute:
        keys = nameservice(mute if first == "silent" else refused(), real)
        url = f"hdfs://lake{shop}"
        if given_by == "conf":
            write_conf(tmp_path / "conf", {**keys, "fs.defaultFS": "hdfs://${dfs.nameservices}"})
            monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
            url, keys = f"hdfs://{shop}", {}
        pqcache.sync(url, tmp_path / "cache", options=keys, timeout=1)
    assert rows_of(tmp_path / "cache" / "current") == rows_of(tmp_path / "shop")


def test_when_no_namenode_answers_the_run_fails_by_name(tmp_path: Path) -> None:
    with silent() as one, silent() as two, pytest.raises(SourceUnavailable, match="hdfs://lake/x: no answer in time"):
        pqcache.sync("hdfs://lake/x", tmp_path / "cache", options=nameservice(one, two), timeout=0.3)


def test_a_namenode_that_falls_silent_during_the_run_is_passed_over(hdfs: Hdfs, shop: str) -> None:
    real = hdfs.url.removeprefix("hdfs://")
    relay = Relay(real)
    source = HdfsSource(f"hdfs://lake{shop}", nameservice(relay.address, real), 2)
    files = list(source.list())
    relay.freeze()
    path, size = files[0].path, files[0].identity.size
    with pytest.raises(SourceUnavailable):
        list(source.read(path, 0, size))
    assert sum(map(len, source.read(path, 0, size))) == size
    source.close()
    relay.close()
