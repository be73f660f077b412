"""The hdfs3 driver: no error is lost, and no value that libhdfs3 cannot parse reaches it.

No package registry ships libhdfs3.so, so these tests run on a stand-in for the few functions that the driver calls,
with the answers and error texts of libhdfs3 and Hadoop 3.3.6.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pqcache
from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers import hdfs3
from pqcache.store.drivers.hdfs3 import Hdfs3Source
from tests.datasets import rows_of, write_shop

URL = "hdfs://127.0.0.1:8020"
DENIED = 'Permission denied: user=me, access=READ_EXECUTE, inode="{}":root:supergroup:drwx------\n\tat org.apache'
DEAD = "Hdfs::HdfsRpcException: Timeout when wait for response from RPC channel\tCaused by: Hdfs::HdfsTimeoutException"
DATANODE = "HdfsIOException: InputStreamImpl: cannot read file: {}.\tCaused by: Connect to 127.0.0.1:9866 failed"


class Library:
    """libhdfs3 and hdfs3's connection; ``tree`` maps a path to a file's bytes, or to None for a directory."""

    _first_pid = None

    def __init__(self) -> None:
        self.tree: dict[str, bytes | None] = {"/": None}
        self.denied = self.unreadable = ""
        self.dead = False
        self.readers: dict[int, tuple[str, list[int]]] = {}  # path and position of open files
        self.opened = 0
        self._handle: int | None = None
        self._why = ""

    def put(self, path: str, data: bytes) -> None:
        self.tree[path] = data
        while path := path.rpartition("/")[0]:
            self.tree.setdefault(path, None)

    def __call__(self, **how: Any) -> Library:
        self.asked = how
        return self

    def connect(self) -> None:
        if self.dead:
            raise OSError(DEAD)
        self._handle = 1

    def disconnect(self) -> None:
        self._handle = None

    def _refused(self, name: str) -> bool:
        if self.dead:
            self._why = DEAD
        elif self.denied and f"{name}/".startswith(f"{self.denied}/"):
            self._why = DENIED.format(name)
        elif name not in self.tree:
            self._why = f"FileNotFoundException: Path {name} does not exist."
        else:
            return False
        return True

    def _info(self, name: str) -> SimpleNamespace:
        data, kind = self.tree[name], "D" if self.tree[name] is None else "F"
        return SimpleNamespace(name=name.encode(), kind=ord(kind), size=len(data or b""), last_mod=7, block_size=1)

    def hdfsGetLastError(self) -> bytes:
        return self._why.encode()

    def hdfsGetPathInfo(self, handle: int, path: bytes) -> list[Any] | None:
        name = path.decode()
        return None if self._refused(name) else [self._info(name)]

    def hdfsListDirectory(self, handle: int, path: bytes, count: Any) -> list[Any] | None:
        name = path.decode()
        if self._refused(name):
            return None
        found = [self._info(other) for other in self.tree if other != "/" and other.rpartition("/")[0] == name]
        count._obj.value = len(found)
        return [*found, None]  # never NULL

    def hdfsFreeFileInfo(self, found: list[Any], count: int) -> None:
        found.clear()

    def hdfsOpenFile(self, handle: int, path: bytes, *how: int) -> int | None:
        if self._refused(path.decode()):
            return None
        self.opened += 1
        self.readers[self.opened] = (path.decode(), [0])
        return self.opened

    def hdfsSeek(self, handle: int, file: int, offset: int) -> int:
        name, position = self.readers[file]
        self._why = "HdfsEndOfStream: InputStreamImpl: seek over EOF"
        position[0] = offset
        return -1 if offset > len(self.tree[name] or b"") else 0

    def hdfsRead(self, handle: int, file: int, buffer: Any, size: int) -> int:
        name, position = self.readers[file]
        if name == self.unreadable:
            self._why = DATANODE.format(name)
            return -1
        piece = (self.tree[name] or b"")[position[0] :][: min(size, 1 << 16)]
        ctypes.memmove(buffer, piece, len(piece))
        position[0] += len(piece)
        return len(piece)

    def hdfsCloseFile(self, handle: int, file: int) -> None:
        del self.readers[file]


@pytest.fixture(autouse=True)
def no_hadoop_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("HADOOP_", "LIBHDFS3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in for what cannot be installed, in place of hdfs3 and its library."""
    found = Library()
    monkeypatch.setattr(hdfs3, "_load", lambda url: SimpleNamespace(HDFileSystem=found, _lib=found))
    return found


def read(source: Hdfs3Source, path: str, offset: int, length: int) -> bytes:
    return b"".join(source.read(path, offset, length))


def test_a_sync_and_errors_that_hdfs3_takes_for_an_empty_directory(library: Library, tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=20), tmp_path / "cache"
    for file in shop.rglob("*"):
        if file.is_file():
            library.put(f"/wh/shop/{file.relative_to(shop)}", file.read_bytes())
    assert pqcache.sync(f"{URL}/wh/shop", cache, hdfs_driver="hdfs3").published
    assert rows_of(cache / "current") == rows_of(shop)
    assert not pqcache.sync(cache).published
    before = os.readlink(cache / "current")
    library.denied = "/wh/shop/dt=2026-11-02"
    with pytest.raises(SourceDenied, match="dt=2026-11-02: permission denied") as error:
        pqcache.sync(cache, force=True)
    assert "\n" not in str(error.value)
    library.denied, library.dead = "", True
    with pytest.raises(SourceUnavailable, match=f"{URL}/wh/shop: no answer for 7 s"):
        pqcache.sync(cache, retries=0, timeout=7, force=True)
    library.dead = False
    with pytest.raises(SourceNotFound, match="wh/nothing: no such file"):
        pqcache.sync(f"{URL}/wh/nothing", tmp_path / "other", hdfs_driver="hdfs3")
    library.put("/wh/FileNotFoundException/Kerberos.parquet", b"x")  # words of errors in a path are none
    library.unreadable = "/wh/FileNotFoundException/Kerberos.parquet"
    with pytest.raises(SourceUnavailable, match=r"cannot read file.*Connect to 127.0.0.1:9866 failed"):
        pqcache.sync(f"{URL}{library.unreadable}", tmp_path / "other", hdfs_driver="hdfs3", retries=0)
    assert os.readlink(cache / "current") == before
    assert library.readers == {}
    assert library._handle is None


def test_ranges_are_the_bytes_that_are_there(library: Library) -> None:
    data = os.urandom((1 << 20) + 12_345)
    library.put("/wh/a", data)
    source = Hdfs3Source(f"{URL}/wh/a", {})
    assert [(file.path, file.identity.size) for file in source.list()] == [("a", len(data))]
    assert read(source, "a", 0, len(data)) == data
    assert read(source, "a", 1000, 300) == data[1000:1300]
    assert read(source, "a", len(data) - 5, 100) == data[-5:], "the file is shorter now"
    assert read(source, "a", len(data) + 5, 100) == b""
    reader = source.read("a", 0, len(data))
    next(reader)
    source.close()
    assert library._handle is None
    assert len(b"".join(reader)) == 12_345
    assert library.readers == {}


def test_a_forked_process_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("/wh/a", b"x")
    source = Hdfs3Source(f"{URL}/wh", {})
    assert [file.path for file in source.list()] == ["a"]
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    for call in (lambda: list(source.list()), lambda: source.stat("a"), lambda: read(source, "a", 0, 1)):
        with pytest.raises(SourceError, match=r"forked.*spawn"):
            call()


def test_the_configuration_that_the_library_gets(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the site, with its NameNodes; what the command line says comes first."""
    properties = {
        "fs.defaultFS": "hdfs://${dfs.nameservices}", "dfs.nameservices": "Lake", "rpc.client.timeout": "1",
        "dfs.namenode.rpc-address.Lake.n1": "${env.SITE}:8020", "empty.one": "", "user": "evil",
    }  # fmt: skip
    lines = "".join(f"<property><name>{k}</name><value>\n{v}\n</value></property>" for k, v in properties.items())
    (tmp_path / "core-site.xml").write_text(f"<configuration>{lines}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("SITE", "127.0.0.1")
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    Hdfs3Source("hdfs:///wh", {"input.read.max.retry": "007"}, 12)
    assert (library.asked["host"], library.asked["port"]) == ("Lake", None)
    expected = {
        "user": "me", "rpc.client.timeout": "6000", "input.read.timeout": "12000", "input.read.max.retry": "7",
        "dfs.namenode.rpc-address.Lake.n1": "127.0.0.1:8020",
    }  # fmt: skip
    assert expected.items() <= library.asked["pars"].items()
    assert "empty.one" not in library.asked["pars"]
    source = Hdfs3Source("hdfs://you:pw@127.0.0.1:9000/wh", {"hadoop.rpc.protection": "privacy,authentication"})
    assert (library.asked["port"], library.asked["pars"]["user"]) == (9000, "you")
    assert library.asked["pars"]["hadoop.rpc.protection"] == "privacy"
    assert "pw" not in source.url
    Hdfs3Source(f"{URL}/wh", {"hadoop.security.authentication": "kerberos"})
    assert "user" not in library.asked["pars"]
    (tmp_path / "core-site.xml").write_text("<configuration><property>")
    with pytest.raises(UsageError, match=r"core-site\.xml"):
        Hdfs3Source(URL, {})
    monkeypatch.setenv("LIBHDFS3_CONF", str(tmp_path / "mine.xml"))  # which the library reads by itself
    with pytest.raises(UsageError, match=r"mine\.xml.*LIBHDFS3_CONF"):
        Hdfs3Source(URL, {})


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        *(
            (URL, {name: value}, name)
            for name, value in [
                ("rpc.client.timeout", ""),
                ("rpc.client.timeout", "30s"),
                ("rpc.client.timeout", "٣"),
                ("rpc.client.timeout", "99999999999"),
                ("rpc.client.connect.retry", "0"),
                ("dfs.default.blocksize", "1000"),
                ("dfs.client.read.shortcircuit", "yes"),
                ("hadoop.rpc.protection", "perhaps"),
                ("some.key", "a\0b"),
                ("colour", "red"),
            ]
        ),
        (URL, {"token": "a", "ticket_cache": "b"}, "token"),
        (f"{URL}/a\0b", {}, "NUL"),
        *((url, {}, "HOST:PORT") for url in ("hdfs:///x", "hdfs://a b/x", "hdfs://127.0.0.1:99999/y", "hdfs://:1/y")),
    ],
)
def test_what_would_end_the_process_is_refused(url: str, options: dict[str, str], why: str, library: Library) -> None:
    with pytest.raises(UsageError, match=why) as error:
        Hdfs3Source(url, options)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    said = r"--hdfs-driver hdfs3 needs hdfs3 and libhdfs3 .conda install -c conda-forge"
    if find_spec("hdfs3") is not None:
        monkeypatch.setattr(ctypes.cdll, "LoadLibrary", fail)
        before = dict(os.environ)
        with pytest.raises(UsageError, match=rf"{said}.*Can not find.*libhdfs3\.so") as error:
            Hdfs3Source(URL, {})
        assert "\n" not in str(error.value)
        assert dict(os.environ) == before
        assert not hasattr(collections, "MutableMapping")
    for name in [name for name in sys.modules if name.partition(".")[0] == "hdfs3"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hdfs3", None)
    with pytest.raises(UsageError, match=said):
        Hdfs3Source(URL, {})
