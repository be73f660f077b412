"""Another source in the place of the one that a cache is a copy of: refused, or asked for and recorded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pqcache
from pqcache.store.drivers.registry import is_same_source
from pqcache.store.history import append_history
from pqcache.torch import ParquetDataset
from tests.datasets import rows_of, write_shop
from tests.forked_commands import run_pqcache
from tests.remote import make_remote


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", days=2, files=1, rows=40)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "other", days=2, files=1, rows=40, seed=5)


@pytest.fixture
def cache(tmp_path: Path, shop: Path) -> Path:
    pqcache.sync(shop, tmp_path / "cache")
    return tmp_path / "cache"


def edit(cache: Path, old: Path, new: Path) -> None:
    file = cache / "pqcache.toml"
    file.write_text(file.read_text().replace(f'"{old}"', f'"{new}"'))


def test_another_source_is_refused_and_named(shop: Path, other: Path, cache: Path) -> None:
    before = (cache / "pqcache.toml").read_bytes()
    for more in ([], ["--dry-run"], ["--force", "-q"]):
        result = run_pqcache("sync", other, cache, *more)
        assert (result.returncode, result.stdout) == (2, "")
        assert f"{cache}: is a copy of {shop}, and {other} is another source" in result.stderr
        assert "--new-source" in result.stderr
    assert before == (cache / "pqcache.toml").read_bytes()
    assert [record["result"] for record in pqcache.log(cache)] == ["done", "failed", "failed"]
    assert rows_of(cache / "current") == rows_of(shop)


def test_a_new_source_is_taken_and_recorded(shop: Path, other: Path, cache: Path) -> None:
    report = pqcache.sync(other, cache, new_source=True)
    assert (report.published, report.previous_source) == (True, str(shop))
    assert rows_of(cache / "current") == rows_of(other)
    assert [run["previous_source"] for run in pqcache.log(cache)] == [None, str(shop)]
    assert "new source" in run_pqcache("log", cache).stdout
    assert pqcache.sync(cache).previous_source is None
    with pytest.raises(pqcache.UsageError, match=f"is a copy of {other}, and {shop} is another source"):
        pqcache.sync(shop, cache)


def test_a_table_that_has_moved_is_the_same_data_at_another_place(shop: Path, cache: Path) -> None:
    moved = shop.rename(shop.parent / "moved")
    with pytest.raises(pqcache.UsageError, match="--new-source"):
        pqcache.sync(moved, cache)
    report = pqcache.sync(moved, cache, new_source=True)
    assert report.previous_source == str(shop)
    with pytest.raises(pqcache.UsageError, match=f"is a copy of {moved}"):  # also where nothing was published
        pqcache.sync(shop, cache)


def test_an_edited_source_is_refused(shop: Path, other: Path, cache: Path) -> None:
    edit(cache, shop, other)
    with pytest.raises(pqcache.UsageError, match=rf"pqcache\.toml: names the source {other}, and .* a copy of {shop}"):
        pqcache.sync(cache)
    assert rows_of(cache / "current") == rows_of(shop)
    with pytest.raises(pqcache.UsageError, match=f"is a copy of {shop}, and not of {other}"):
        ParquetDataset(cache, source=other)
    assert not pqcache.sync(shop, cache).published  # it is named again, and remembered again
    edit(cache, shop, other)
    assert pqcache.sync(cache, new_source=True).previous_source == str(shop)
    assert rows_of(cache / "current") == rows_of(other)


def test_a_cache_whose_history_is_lost_knows_its_source_from_its_snapshot(shop: Path, other: Path, cache: Path) -> None:
    (cache / "history.jsonl.zst").unlink()
    edit(cache, shop, other)
    with pytest.raises(pqcache.UsageError, match=f"a copy of {shop}"):
        pqcache.sync(cache)
    append_history(
        cache, {"time": "2026-11-01T04:00:00+00:00", "command": "sync", "source": str(other)}
    )  # older than the snapshot, which it does not name
    with pytest.raises(pqcache.UsageError, match=f"a copy of {shop}"):
        pqcache.sync(cache)


def test_a_first_run_that_failed_binds_nobody(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(pqcache.ParquetError):
        pqcache.sync(tmp_path / "bad", tmp_path / "cache")
    assert pqcache.sync(shop, tmp_path / "cache").previous_source is None


def test_other_spellings_are_the_same_source(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shop.parent / "link").symlink_to(shop)
    monkeypatch.chdir(shop.parent)
    for spelling in ("shop", f"{shop}/", f"file://{shop}", "./shop/../shop", "link"):
        report = pqcache.sync(spelling, cache)
        assert (report.published, report.previous_source) == (False, None)
    assert not pqcache.sync(cache).published
    assert len(ParquetDataset(cache, source=shop, columns=["id"], batch_size=80)) == 1
    with pytest.raises(pqcache.UsageError, match=r"leave source= out, or take it with 'pqcache sync --new-source'"):
        ParquetDataset(cache, source=str(shop.parent))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("s3a://lake/shop/", "s3://lake/shop", True),
        ("S3N://lake/shop", "s3://key@lake/shop", True),
        ("s3://lake/shop", "s3://lake/shops", False),
        ("s3://lake/a//b", "s3://lake/a/b", False),
        ("gcs://lake/shop", "gs://lake/shop", True),
        ("az://box/shop", "abfss://box@account.dfs.core.windows.net/shop", True),
        ("abfss://box@one.dfs.core.windows.net/shop", "abfss://box@two.dfs.core.windows.net/shop", False),
        ("hdfs://localhost/shop", "hdfs://alice@LOCALHOST:8020/shop/", True),
        ("hdfs://localhost/shop", "hdfs://127.0.0.1/shop", True),
        ("hdfs://localhost/shop", "hdfs://localhost:9000/shop", False),
        ("webhdfs://localhost/shop", "webhdfs://127.0.0.1:9870/shop", True),
        ("webhdfs://localhost/shop", "hdfs://localhost/shop", False),
        ("http://localhost/shop", "http://127.0.0.1:80/shop", True),
        ("http://127.0.0.1/a", "http://127.0.0.1/b", False),
        ("hive://127.0.0.1:9083/shop/a", "hive://127.0.0.1:9083/shop/b", False),
    ],
)
def test_spellings(one: str, other: str, same: bool) -> None:
    assert is_same_source(one, other, {}, {}) is same
    assert is_same_source(other, one, {}, {}) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://localhost:9000", "http://127.0.0.1:9000/", True),
        ("http://127.0.0.1", "http://127.0.0.1:80", True),
        ("http://127.0.0.1:9000", "http://127.0.0.1:9001", False),
        ("http://127.0.0.1:9000", None, True),
    ],
)
def test_endpoints(one: str, other: str | None, same: bool) -> None:
    options = {} if other is None else {"endpoint": other}
    assert is_same_source("s3://lake/shop", "s3a://lake/shop", {"endpoint": one}, options) is same


def test_a_name_node_of_a_nameservice_is_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {
        "fs.defaultFS": "hdfs://lake",
        "dfs.namenode.rpc-address.lake.nn1": "127.0.0.1:8020",
        "dfs.namenode.rpc-address.lake.nn2": "127.0.0.1:9020",
    }
    text = "".join(f"<property><name>{n}</name><value>{v}</value></property>" for n, v in properties.items())
    (tmp_path / "core-site.xml").write_text(f"<configuration>{text}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", os.fspath(tmp_path))
    for spelling in ("hdfs://127.0.0.1:9020/shop", "hdfs://localhost/shop", "hdfs:///shop"):
        assert is_same_source("hdfs://lake/shop", spelling, {}, {})
    assert not is_same_source("hdfs://lake/shop", "hdfs://127.0.0.1:9999/shop", {}, {})


@pytest.mark.s3
def test_hadoop_names_of_s3_are_read(shop: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (remote,) = make_remote("s3", request, tmp_path)
    remote.upload(shop)
    hadoop = remote.url.replace("s3://", "s3a://")
    report = pqcache.sync(hadoop, tmp_path / "c")
    assert (report.source, report.added) == (remote.url, 2)
    for spelling in (remote.url, f"{hadoop}/", remote.url.replace("s3://", "s3n://")):
        assert not pqcache.sync(spelling, tmp_path / "c").published
    pqcache.repartition(hadoop, remote.url.replace("s3://", "s3a://") + "-2", row_group_size="1MB")
    assert pqcache.inspect(f"{hadoop}-2").rows == 80
