"""gs:// and az:// as targets of a repartition; what holds for all targets is in tests/store/repartition."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

import pqcache
from pqcache.errors import SourceDenied, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.base import HIDDEN
from pqcache.store.drivers.object_store import ObjectStoreTarget
from pqcache.store.drivers.registry import open_target
from tests.datasets import files_of, write_shop
from tests.remote import Remote, make_remote
from tests.store.drivers.web_server import reply, serving

FILE = "dt=1/part 0%2F.parquet"


@pytest.fixture(params=[pytest.param("gs", marks=pytest.mark.gcs), pytest.param("az", marks=pytest.mark.azure)])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    yield from make_remote(request.param, request, tmp_path)


@pytest.fixture
def target(remote: Remote) -> Iterator[ObjectStoreTarget]:
    found = open_target(remote.url)
    assert isinstance(found, ObjectStoreTarget)
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "new.parquet"
    place.write_bytes(os.urandom(30_000))
    return place


def paths(target: ObjectStoreTarget) -> list[str]:
    return sorted(file.path for file in target.list())


def test_a_large_file_goes_up_in_parts_and_appears_at_once(
    target: ObjectStoreTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqcache.store.drivers.object_store._PART", 5 << 20)
    file = tmp_path / "big"
    file.write_bytes(os.urandom((6 << 20) + 7))
    staged = target.stage(file, "token", FILE)
    assert paths(target) == [f"{HIDDEN}/tmp/token/part 0%2F.parquet"]
    target.commit("token", "dt=1", [staged], True)
    target.commit("token", "dt=1", [staged], True)  # as after an answer that was lost
    assert paths(target) == [FILE]
    assert target.read_start(FILE, file.stat().st_size) == file.read_bytes()


def test_what_is_not_committed_goes(target: ObjectStoreTarget, file: Path) -> None:
    staged = [target.stage(file, "token", f"dt=1/{name}.parquet") for name in ("a", "b")]
    target.remove([staged[0].handle])
    target.discard("token", staged)  # of which one is gone
    assert paths(target) == []
    target.stage(file, "killed", FILE)
    target.write(f"{HIDDEN}/run", b"run")
    target.begin()
    assert paths(target) == [f"{HIDDEN}/run"]
    target.finish()
    assert paths(target) == []


def test_a_commit_without_its_files_is_an_error(target: ObjectStoreTarget, remote: Remote, file: Path) -> None:
    """Another run has begun, and removed them; another file of that size is not taken for the one that was sent."""
    staged = target.stage(file, "token", FILE)
    target.begin()
    with pytest.raises(SourceNotFound, match=r"part 0%2F\.parquet: no such object"):
        target.commit("token", "dt=1", [staged], True)
    remote.put(FILE, bytes(file.stat().st_size))
    with pytest.raises(SourceUnavailable, match="is not the file that was copied there"):
        target.commit("token", "dt=1", [staged], True)


def test_a_short_upload_is_sent_again(target: ObjectStoreTarget, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, key, data, **_: put(store, key, Path(data).read_bytes()[:-1]))
    with pytest.raises(SourceUnavailable, match="has 29,999 bytes of 30,000 that were sent"):
        target.stage(file, "token", FILE)


def test_many_files_are_removed_in_several_requests(target: ObjectStoreTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pqcache.store.drivers.object_store._DELETED_AT_ONCE", 2)
    names = [f"dt={number}/x" for number in range(5)]
    for name in names:
        target.write(name, b"x")
    target.remove(["dt=0/none", *names, "dt=1/x"])
    assert paths(target) == []


def test_a_run_that_was_killed_is_continued(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends between two copies: one file of the partition is there, and the next run removes it."""
    shop = write_shop(tmp_path / "shop", days=2, files=1, rows=400)
    monkeypatch.setattr("pqcache.parquet.rewrite.directory._MIN_FILE", 0)
    monkeypatch.setattr("pqcache.parquet.rewrite.directory._FILE_ROW_GROUPS", 1)
    size = 8 << 10
    pqcache.repartition(shop, tmp_path / "expected", row_group_size=size)
    with monkeypatch.context() as patch:
        copy, copied = ObjectStoreTarget._copy, []

        def dies(self: ObjectStoreTarget, to: str, key: str) -> None:
            if len(copied) == 4:
                raise KeyboardInterrupt
            copied.append(to)
            copy(self, to, key)

        patch.setattr(ObjectStoreTarget, "_copy", dies)
        patch.setattr(ObjectStoreTarget, "discard", lambda *_: None)
        patch.setattr(ObjectStoreTarget, "abandon", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            pqcache.repartition(shop, remote.url, row_group_size=size, jobs=1)
    left = open_target(remote.url)
    assert any(file.path.startswith(f"{HIDDEN}/tmp/") for file in left.list())
    pqcache.repartition(shop, remote.url, row_group_size=size)
    found = {file.path: left.read_start(file.path, file.identity.size) for file in left.list()}
    assert found == {path: (tmp_path / "expected" / path).read_bytes() for path in files_of(tmp_path / "expected")}
    left.close()


def test_what_is_wrong_is_said(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_shop(tmp_path / "shop", days=1, files=1, rows=20)
    scheme, _, rest = remote.url.partition("://")
    with pytest.raises(SourceNotFound, match=r"no such (bucket|container)"):
        pqcache.repartition(shop, f"{scheme}://none-{rest}")
    wrong = {"token": "wrong"} if scheme == "gs" else {"account_key": "d3Jvbmc="}
    with pytest.raises(SourceDenied, match="access denied"):
        pqcache.repartition(shop, remote.url, options=wrong)
    with pytest.raises(SourceUnavailable, match=r"127\.0\.0\.1:1\b"):
        pqcache.repartition(shop, remote.url, options={"endpoint": "http://127.0.0.1:1"})
    for name in ("GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"is written with credentials only; give -o (token|account_key)="):
        pqcache.repartition(shop, remote.url, options={"endpoint": "http://127.0.0.1:1"})


@pytest.mark.usefixtures("no_cloud")
def test_a_copy_that_is_under_way_is_tried_again(file: Path) -> None:
    """As Azure answers to a second copy while it works on the first."""
    body = b"<?xml version='1.0'?><Error><Code>PendingCopyOperation</Code></Error>"
    with serving(lambda _, handler: reply(handler, body, 409)) as server:
        target = open_target("az://lake/x", {"endpoint": server.url, "account_name": "a", "account_key": "d3Jvbmc="})
        with pytest.raises(SourceUnavailable, match="the server answers 409 PendingCopyOperation"):
            target.read_start(FILE, 5)
        target.close()
