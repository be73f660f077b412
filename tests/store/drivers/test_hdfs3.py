"""The hdfs3 driver: no error is lost, and no value that libhdfs3 cannot parse reaches it.

No package registry ships libhdfs3.so, so most tests run the real hdfs3 0.3.1 on a stand-in for that library. Its
answers and error texts, quirks included, are those of libhdfs3 (compiled from conda's sources) with Hadoop 3.3.6. One
test uses the real library and a real HDFS, where libhdfs3.so can be loaded.
"""

from __future__ import annotations

import collections
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.hdfs3 import Hdfs3Source, settings
from pqcache.store.manifest import Identity
from tests.datasets import files_of, rows_of, write_shop
from tests.store.drivers.fake_libhdfs3 import MODIFIED, FakeLibhdfs3

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

needs_hdfs3 = pytest.mark.skipif(find_spec("hdfs3") is None, reason="hdfs3 is not installed")
pytestmark = pytest.mark.usefixtures("clean_hdfs3")
URL = "hdfs://nn:8020"


def paths(source: Hdfs3Source) -> list[str]:
    return sorted(file.path for file in source.list())


def test_lists_every_file_with_its_identity(library: FakeLibhdfs3) -> None:
    for name in ("dt=1/a.parquet", "dt=1/h=2/b c%20?#é.parquet", "_SUCCESS", "dt=1/.x.crc"):
        library.put(f"/wh/{name}", b"x" * len(name))
    library.tree["/wh/empty"] = None
    source = Hdfs3Source(f"{URL}/wh/", {})
    assert library.connections == 0  # nothing is contacted before it is used
    found = {file.path: file for file in source.list()}
    assert sorted(found) == ["_SUCCESS", "dt=1/.x.crc", "dt=1/a.parquet", "dt=1/h=2/b c%20?#é.parquet"]
    file = found["dt=1/a.parquet"]
    assert (file.identity, file.block_size) == (Identity(14, MODIFIED * 10**9), 128 << 20)
    assert source.stat("dt=1/a.parquet") == file.identity
    assert source.url == f"{URL}/wh"
    source.close()
    assert library.connections == 0
    one = Hdfs3Source(f"{URL}/wh/dt=1/a.parquet", {})
    for _ in range(2):
        assert paths(one) == ["a.parquet"]
    assert b"".join(one.read("a.parquet", 1, 2)) == b"xx"
    one.close()
    strange = b"dt=\xff/a".decode("utf-8", "surrogateescape")
    library.tree = {"/": None}
    library.put(f"/{strange}", b"1")
    root = Hdfs3Source(URL, {})
    assert paths(root) == [strange]
    assert b"".join(root.read(strange, 0, 1)) == b"1"
    root.close()


def test_an_empty_directory_is_empty_and_a_missing_one_is_not(library: FakeLibhdfs3) -> None:
    library.tree["/wh"] = None
    assert paths(Hdfs3Source(f"{URL}/wh", {})) == []
    for missing in ("/nope", "/wh/x/y"):
        with pytest.raises(SourceNotFound, match=f"nn:8020{missing}: no such file"):
            paths(Hdfs3Source(URL + missing, {}))


@pytest.mark.parametrize("denied", ["/wh", "/wh/dt=3", "/wh/dt=2/h=1"])
def test_a_denied_directory_is_an_error_where_hdfs3_sees_nothing(denied: str, library: FakeLibhdfs3) -> None:
    for day in (1, 2, 3):
        library.put(f"/wh/dt={day}/h=1/a.parquet", b"x")
    library.denied.add(denied)
    source = Hdfs3Source(f"{URL}/wh", {})
    with pytest.raises(SourceDenied, match=f"hdfs://nn:8020{denied}: permission denied") as error:
        paths(source)
    assert "\n" not in str(error.value)
    assert source._fs.ls(denied) == []  # what an adapter over hdfs3's own functions would have believed
    source.close()


def test_error_names_in_a_path_are_no_errors(library: FakeLibhdfs3) -> None:
    library.put("/Permission denied/FileNotFoundException/Kerberos", b"x")
    library.unreadable.add("/Permission denied/FileNotFoundException/Kerberos")
    source = Hdfs3Source(f"{URL}/Permission denied", {})
    library.put("/Permission denied/secret", b"x")
    library.denied.add("/Permission denied/secret")
    with pytest.raises(SourceUnavailable, match=r"cannot read file.*Connect to 127.0.0.1:9866 failed"):
        list(source.read("FileNotFoundException/Kerberos", 0, 1))
    with pytest.raises(SourceDenied, match="secret: permission denied"):
        list(source.read("secret", 0, 1))
    for call in (lambda: source.stat("nope"), lambda: list(source.read("nope", 0, 1))):
        with pytest.raises(SourceNotFound, match="nope: no such file"):
            call()
    source.close()


def test_a_dead_namenode_is_never_an_empty_directory(library: FakeLibhdfs3) -> None:
    library.put("/wh/a.parquet", b"abc")
    source = Hdfs3Source(f"{URL}/wh", {}, 7)
    library.dead = True
    calls: list[Callable[[], object]] = [
        lambda: paths(source),
        lambda: source.stat("a.parquet"),
        lambda: list(source.read("a.parquet", 0, 3)),
    ]
    for connected in (False, True):
        for call in calls:
            with pytest.raises(SourceUnavailable, match=r"hdfs://nn:8020/wh.*: no answer for 7 s") as error:
                call()
            assert "\n" not in str(error.value)
        library.dead = connected
        assert connected or paths(source) == ["a.parquet"]
        library.dead = True
    library.dead = False
    assert paths(source) == ["a.parquet"]
    source.close()


def test_reads_ranges_in_pieces(library: FakeLibhdfs3) -> None:
    data = os.urandom((2 << 20) + 12_345)
    library.put("/wh/a", data)
    source = Hdfs3Source(f"{URL}/wh", {})
    pieces = list(source.read("a", 0, len(data)))
    assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, 12_345]
    assert b"".join(pieces) == data
    assert b"".join(source.read("a", 1000, 300)) == data[1000:1300]
    assert list(source.read("a", 5, 0)) == []
    # a shorter file gives what it has; the caller then asks for its identity
    assert b"".join(source.read("a", len(data) - 5, 100)) == data[-5:]
    assert b"".join(source.read("a", len(data) + 5, 100)) == b""
    source.close()


def test_every_read_opens_the_file_itself(library: FakeLibhdfs3) -> None:
    contents = {f"f{number}": os.urandom(300_000 + number) for number in range(16)}
    for name, data in contents.items():
        library.put(f"/wh/{name}", data)
    source = Hdfs3Source(f"{URL}/wh", {})
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda n: b"".join(source.read(n, 0, 400_000)), list(contents) * 2)
        assert list(read) == list(contents.values()) * 2
    assert library.opened == 32
    assert library.connections == 1
    source.close()


def test_close_leaves_a_connection_in_use_alone(library: FakeLibhdfs3) -> None:
    library.put("/wh/a", bytes(3 << 20))
    source = Hdfs3Source(f"{URL}/wh", {})
    reader = source.read("a", 0, 3 << 20)
    next(reader)
    source.close()
    assert library.connections == 1
    assert len(b"".join(reader)) == 2 << 20


def test_a_forked_process_is_refused(library: FakeLibhdfs3, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("/wh/a", b"x")
    source = Hdfs3Source(f"{URL}/wh", {})
    assert paths(source) == ["a"]
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    for call in (lambda: paths(source), lambda: source.stat("a"), lambda: list(source.read("a", 0, 1))):
        with pytest.raises(SourceError, match=r"forked.*spawn"):
            call()
    with pytest.raises(SourceError, match="forked"):
        Hdfs3Source(f"{URL}/wh", {})  # a new connection gives wrong answers as well
    source.close()
    assert library.connections == 1  # the parent's


@pytest.mark.parametrize("path", ["a\0b", "\0"])
def test_a_nul_in_a_path_is_refused(path: str, library: FakeLibhdfs3) -> None:
    library.put("/wh/a", b"x")
    with pytest.raises(UsageError, match="NUL"):
        Hdfs3Source(f"{URL}/wh/{path}", {})
    source = Hdfs3Source(f"{URL}/wh", {})
    with pytest.raises(UsageError, match="NUL"):
        source.stat(path)
    with pytest.raises(UsageError, match="NUL"):
        list(source.read(path, 0, 1))


def test_sync(library: FakeLibhdfs3, tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    for file in shop.rglob("*"):
        if file.is_file():
            library.put(f"/wh/shop/{file.relative_to(shop)}", file.read_bytes())
    report = pqcache.sync(f"{URL}/wh/shop", cache, hdfs_driver="hdfs3")
    assert report.published
    assert files_of(cache / "current") == files_of(shop)
    assert rows_of(cache / "current") == rows_of(shop)
    assert not pqcache.sync(cache).published
    before = os.readlink(cache / "current")
    library.denied.add("/wh/shop/dt=2026-11-02")
    with pytest.raises(SourceDenied, match="dt=2026-11-02: permission denied"):
        pqcache.sync(cache)
    library.denied.clear()
    library.dead = True
    with pytest.raises(SourceUnavailable, match="no answer"):
        pqcache.sync(cache, retries=0)
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows_of(shop)


def test_the_import_restores_the_environment(
    library: FakeLibhdfs3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name>\n<value>hdfs://nn:8020/</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))  # hdfs3 itself fails on the slash in it
    before = dict(os.environ)
    Hdfs3Source(f"{URL}/wh", {})
    assert not hasattr(collections, "MutableMapping")
    assert dict(os.environ) == before
    assert "hdfs3.mapping" in sys.modules


def test_the_configuration_that_the_library_gets(library: FakeLibhdfs3, monkeypatch: pytest.MonkeyPatch) -> None:
    library.put("/wh/a", b"x")
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    given = {"input.read.max.retry": "007", "dfs.my.own": "Some Thing"}
    source = Hdfs3Source("hdfs://nn/wh", given, 12)
    assert paths(source) == ["a"]
    assert library.address == ("nn", 8020, "me")
    expected = {
        "rpc.client.timeout": "6000",  # an RPC takes twice its timeout
        "rpc.client.connect.timeout": "6000",
        "rpc.client.connect.retry": "1",
        "input.read.timeout": "12000",
        "input.read.max.retry": "7",
        "dfs.client.read.shortcircuit": "false",
        "dfs.client.log.severity": "FATAL",
        "dfs.my.own": "Some Thing",
    }
    assert {name: library.configured.get(name) for name in expected} == expected
    source.close()
    source = Hdfs3Source("hdfs://you:pw@nn:9000/wh", {})
    assert paths(source) == ["a"]
    assert library.address == ("nn", 9000, "you")
    assert "pw" not in source.url
    source.close()


BAD = [
    ("rpc.client.timeout", "abc"),
    ("rpc.client.timeout", ""),
    ("rpc.client.timeout", "30s"),
    ("rpc.client.timeout", "1.5"),
    ("rpc.client.timeout", "٣"),
    ("rpc.client.timeout", "99999999999"),
    ("rpc.client.connect.retry", "0"),
    ("input.read.max.retry", "-1"),
    ("dfs.client.failover.max.attempts", "-1"),
    ("dfs.default.blocksize", "128m"),
    ("dfs.default.blocksize", "1000"),
    ("dfs.client.read.shortcircuit", "yes"),
    ("dfs.client.log.severity", "LOUD"),
    ("hadoop.rpc.protection", "perhaps"),
    ("some.key", "a\0b"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_values_that_would_end_the_process_are_refused(name: str, value: str, library: FakeLibhdfs3) -> None:
    with pytest.raises(UsageError, match=name) as error:
        Hdfs3Source(f"{URL}/wh", {name: value})
    assert "\n" not in str(error.value)
    assert library.configured == {}


def test_unknown_and_conflicting_options_and_hosts_are_refused(library: FakeLibhdfs3) -> None:
    for options in ({"colour": "red"}, {"token": "a", "ticket_cache": "b"}):
        with pytest.raises(UsageError, match=next(iter(options))):
            Hdfs3Source(f"{URL}/wh", options)
    for url in ("hdfs:///x", "hdfs://a b/x", "hdfs://nn:x/y", "hdfs://nn:99999/y", "hdfs://:1/y"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            Hdfs3Source(url, {})


def write_xml(path: Path, properties: dict[str, str], more: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    lines = "".join(
        f"<property>\n <name>{name}</name>\n <!-- why --><value>\n{value}\n</value>\n</property>"
        for name, value in properties.items()
    )
    head = '<?xml version="1.0"?>\n<configuration xmlns:xi="http://www.w3.org/2001/XInclude">'
    path.write_text(f"{head}{lines}{more}</configuration>")


def test_ha_from_the_site_configuration(library: FakeLibhdfs3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    write_xml(conf / "core-site.xml", {"fs.defaultFS": "hdfs://${dfs.nameservices}", "rpc.client.timeout": "1"})
    names = {"dfs.nameservices": "Lake", "dfs.ha.namenodes.Lake": "n1,n2", "empty.one": "", "user": "evil"}
    write_xml(conf / "hdfs-site.xml", names, '<xi:include href="more.xml"/>')
    write_xml(conf / "more.xml", {f"dfs.namenode.rpc-address.Lake.n{n}": f"h{n}.${{env.SITE}}:8020" for n in (1, 2)})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(conf))
    monkeypatch.setenv("SITE", "example.com")
    library.put("/wh/a", b"x")
    for url in ("hdfs:///wh", "hdfs://Lake/wh"):
        source = Hdfs3Source(url, {}, 10)
        assert paths(source) == ["a"]
        assert library.address[:2] == ("Lake", None)
        assert library.configured["dfs.namenode.rpc-address.Lake.n2"] == "h2.example.com:8020"
        assert library.configured["rpc.client.timeout"] == "5000"  # --timeout means what it says
        assert "empty.one" not in library.configured
        assert library.address[2] is None
        source.close()
    assert os.environ["HADOOP_CONF_DIR"] == str(conf)
    assert "LIBHDFS3_CONF" not in os.environ


def test_with_kerberos_hadoop_user_name_is_ignored(library: FakeLibhdfs3, monkeypatch: pytest.MonkeyPatch) -> None:
    library.tree["/wh"] = None
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    source = Hdfs3Source(f"{URL}/wh", {"hadoop.security.authentication": "kerberos"})
    assert paths(source) == []
    assert library.address[2] is None
    source.close()


def test_broken_configuration_files_are_named_before_the_library_reads_them(
    library: FakeLibhdfs3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    for text in ("<configuration><property>", "", "<other/>"):
        (tmp_path / "hdfs-site.xml").write_text(text)
        with pytest.raises(UsageError, match=r"hdfs-site\.xml"):
            Hdfs3Source(f"{URL}/wh", {})
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("LIBHDFS3_CONF", str(tmp_path / "mine.xml"))
    with pytest.raises(UsageError, match=r"mine\.xml.*LIBHDFS3_CONF"):
        Hdfs3Source(f"{URL}/wh", {})
    write_xml(tmp_path / "mine.xml", {"rpc.client.max.idle": "soon"})
    with pytest.raises(UsageError, match=r"rpc\.client\.max\.idle"):
        Hdfs3Source(f"{URL}/wh", {})
    write_xml(tmp_path / "mine.xml", {}, "<what/>")
    with pytest.raises(UsageError, match=r"mine\.xml"):
        Hdfs3Source(f"{URL}/wh", {})
    monkeypatch.delenv("LIBHDFS3_CONF")
    (tmp_path / "hdfs-client.xml").write_text("no XML")  # it takes this one from the working directory
    with pytest.raises(UsageError, match=r"hdfs-client\.xml"):
        Hdfs3Source(f"{URL}/wh", {})


def test_of_several_values_the_first_counts(tmp_path: Path) -> None:
    configured = settings(URL, {"hadoop.rpc.protection": "privacy,authentication"}, 30)
    assert configured["hadoop.rpc.protection"] == "privacy"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs3", None)
    with pytest.raises(UsageError, match=r"--hdfs-driver hdfs3 needs hdfs3 and libhdfs3 .conda install -c conda-forge"):
        Hdfs3Source(f"{URL}/wh", {})
    monkeypatch.undo()


@needs_hdfs3
def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes.cdll, "LoadLibrary", fail)
    with pytest.raises(UsageError, match=r"needs hdfs3 and libhdfs3 .conda.*Can not find.*libhdfs3\.so") as error:
        Hdfs3Source(f"{URL}/wh", {})
    assert "\n" not in str(error.value)


@needs_hdfs3
@pytest.mark.hdfs
@pytest.mark.slow
def test_the_real_library(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> None:
    """In a process of its own, as libhdfs3 may end it."""
    try:
        ctypes.CDLL("libhdfs3.so")
    except OSError:
        pytest.skip("libhdfs3.so is not installed (conda-forge has it)")
    url, shop, cache = f"{hdfs_dir}/shop", write_shop(tmp_path / "shop"), tmp_path / "cache"
    hdfs.upload_tree(shop, url)

    def run(*more: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pqcache", "sync", url, str(cache), "--hdfs-driver", "hdfs3", *more]
        env = {**os.environ, **({"HADOOP_USER_NAME": user} if user else {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)

    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert rows_of(cache / "current") == rows_of(shop)
    hdfs.chmod(f"{url}/dt=2026-11-02", 0o700)
    assert f"error: {url}/dt=2026-11-02: permission denied" in run(user="nobody2").stderr
    assert run("-o", "rpc.client.timeout=abc").returncode == 2
    with hdfs.paused("namenode"):
        stalled = run("--timeout", "2", "--retries", "0")
    assert (stalled.returncode, "no answer for 2 s" in stalled.stderr) == (75, True)
    assert rows_of(cache / "current") == rows_of(shop)
