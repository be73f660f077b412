"""The hdfs3 driver: no error is lost, and no value that libhdfs3 cannot parse reaches it.

No package registry ships libhdfs3.so, so most tests run the real hdfs3 0.3.1 on a stand-in for that library. Its
answers and error texts, quirks included, are those of libhdfs3 (compiled from conda's sources) with Hadoop 3.3.6. The
tests at the end use the real library and a real HDFS, where libhdfs3.so can be loaded.
"""

from __future__ import annotations

import collections
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.hdfs3 import Hdfs3Source
from pqcache.store.manifest import Identity
from tests import ROOT
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


def test_the_root_directory_and_names_that_are_no_utf8(library: FakeLibhdfs3) -> None:
    strange = b"dt=\xff/a".decode("utf-8", "surrogateescape")
    library.put(f"/{strange}", b"1")
    source = Hdfs3Source(URL, {})
    assert paths(source) == [strange]
    assert b"".join(source.read(strange, 0, 1)) == b"1"
    source.close()


def test_one_file(library: FakeLibhdfs3) -> None:
    library.put("/wh/a.parquet", b"abc")
    library.put("/wh/b.parquet", b"def")
    source = Hdfs3Source(f"{URL}/wh/a.parquet", {})
    for _ in range(2):
        assert paths(source) == ["a.parquet"]
    assert b"".join(source.read("a.parquet", 1, 2)) == b"bc"
    source.close()


def test_an_empty_directory_is_empty_and_a_missing_one_is_not(library: FakeLibhdfs3) -> None:
    library.tree["/wh"] = None
    assert paths(Hdfs3Source(f"{URL}/wh", {})) == []
    for missing in ("/nope", "/wh/x/y"):
        with pytest.raises(SourceNotFound, match=f"nn:8020{missing}: no such file"):
            paths(Hdfs3Source(URL + missing, {}))


def test_a_file_in_place_of_a_directory_is_that_file(library: FakeLibhdfs3) -> None:
    """The library lists a file as 'name/': what was a directory when its parent was listed may be one by now."""
    library.put("/wh/dt=1", b"now a file")
    source = Hdfs3Source(f"{URL}/wh", {})
    with source._connected("/wh") as handle:
        (entry,) = source._infos(handle, "/wh/dt=1")
    assert (entry.name, entry.is_directory) == ("", False)
    with pytest.raises(SourceNotFound):
        source.stat("dt=1/a.parquet")
    source.close()


@pytest.mark.parametrize("denied", ["/wh", "/wh/dt=1", "/wh/dt=3", "/wh/dt=2/h=1"])
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
    with pytest.raises(SourceUnavailable, match="cannot read file"):
        list(source.read("FileNotFoundException/Kerberos", 0, 1))
    with pytest.raises(SourceNotFound):
        source.stat("nope")
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


def test_errors_of_unreadable_files_differ(library: FakeLibhdfs3) -> None:
    for name in ("lost", "secret"):
        library.put(f"/wh/{name}", b"abc")
    library.unreadable.add("/wh/lost")
    library.denied.add("/wh/secret")
    source = Hdfs3Source(f"{URL}/wh", {})
    with pytest.raises(SourceUnavailable, match=r"wh/lost: .*Connect to 127.0.0.1:9866 failed"):
        list(source.read("lost", 0, 3))
    with pytest.raises(SourceDenied, match="wh/secret: permission denied"):
        list(source.read("secret", 0, 3))
    with pytest.raises(SourceNotFound, match="wh/gone: no such file"):
        list(source.read("gone", 0, 3))
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
def test_a_library_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.cdll, "LoadLibrary", lambda name: ctypes.CDLL(None))
    with pytest.raises(UsageError, match=r"needs hdfs3 and libhdfs3 .conda.*undefined symbol: hdfs"):
        Hdfs3Source(f"{URL}/wh", {})


@pytest.fixture
def real(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> tuple[str, Path]:
    """The URL of a dataset on a real HDFS, and its local twin, where the real library can be loaded."""
    try:
        ctypes.CDLL("libhdfs3.so")
    except OSError:
        pytest.skip("libhdfs3.so is not installed (conda-forge has it)")
    shop = write_shop(tmp_path / "shop")
    hdfs.upload_tree(shop, f"{hdfs_dir}/shop")
    return f"{hdfs_dir}/shop", shop


@needs_hdfs3
@pytest.mark.hdfs
@pytest.mark.slow
def test_the_real_library(real: tuple[str, Path], hdfs: Hdfs, tmp_path: Path) -> None:
    """Sync, denied, paused and dead, each in a process of its own as libhdfs3 may end it."""
    url, shop = real
    cache = tmp_path / "cache"

    def run(*more: str, user: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pqcache", "sync", url, str(cache), "--hdfs-driver", "hdfs3", *more]
        env = {**os.environ, **({"HADOOP_USER_NAME": user} if user else {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)

    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert rows_of(cache / "current") == rows_of(shop)
    assert "nothing" in run().stdout or "unchanged" in run().stdout
    before = os.readlink(cache / "current")
    hdfs.chmod(f"{url}/dt=2026-11-02", 0o700)
    denied = run(user="nobody2")
    assert denied.returncode == 1
    assert f" cache: pqcache: error: {url}/dt=2026-11-02: permission denied" in denied.stderr
    for wrong in ("rpc.client.timeout=abc", "dfs.client.read.shortcircuit=perhaps"):
        assert run("-o", wrong).returncode == 2
    with hdfs.paused("namenode"):
        start = time.monotonic()
        stalled = run("--timeout", "2", "--retries", "0")
        assert time.monotonic() - start < 20
    assert stalled.returncode == 75
    assert "no answer for 2 s" in stalled.stderr
    hdfs.kill_namenode()
    try:
        dead = run("--timeout", "2", "--retries", "0")
    finally:
        hdfs.restart_namenode()
    assert dead.returncode == 75
    assert "check that the NameNode runs" in dead.stderr
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows_of(shop)


@needs_hdfs3
@pytest.mark.hdfs
def test_the_real_library_reads_from_threads_and_refuses_a_fork(real: tuple[str, Path]) -> None:
    code = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pqcache.errors import SourceError
from pqcache.store.drivers.hdfs3 import Hdfs3Source
source, shop = Hdfs3Source(sys.argv[1], {}, 10), Path(sys.argv[2])
files = [file for file in source.list()] * 5
with ThreadPoolExecutor(8) as pool:
    for file, data in zip(files, pool.map(lambda f: b"".join(source.read(f.path, 0, f.identity.size)), files)):
        assert data == (shop / file.path).read_bytes(), file
pid = os.fork()
if not pid:
    try:
        source.stat(files[0].path)
    except SourceError:
        source.close()
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert source.stat(files[0].path) == files[0].identity
source.close()
"""
    command = [sys.executable, "-c", code, real[0], str(real[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
