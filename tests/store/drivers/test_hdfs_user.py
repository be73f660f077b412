"""Each hdfs:// URL is opened as the user that it names, or not at all."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pqcache.errors import UsageError
from pqcache.store.drivers import hdfs
from pqcache.store.drivers.hdfs3 import login
from pqcache.store.drivers.registry import open_source, open_target

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have left open is not counted."""
    monkeypatch.setattr(hdfs, "_open", hdfs._Clients())


@pytest.fixture(params=[None, "carol"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The user in the environment."""
    monkeypatch.delenv("HADOOP_USER_NAME", raising=False)
    if request.param is not None:
        monkeypatch.setenv("HADOOP_USER_NAME", request.param)
    user: str | None = request.param
    return user


def test_one_after_the_other_and_the_environment_is_as_before(own: str | None) -> None:
    for user in ("alice", "bob"):
        source = open_source(f"hdfs://{user}@{NOWHERE}/x")
        assert os.environ["HADOOP_USER_NAME"] == user
        same = open_source(f"hdfs://{user}@{NOWHERE}/y")
        source.close()
        source.close()
        assert os.environ["HADOOP_USER_NAME"] == user
        same.close()
        assert os.environ.get("HADOOP_USER_NAME") == own


def test_two_users_at_once_are_refused(own: str | None) -> None:
    alice = open_source(f"hdfs://alice@{NOWHERE}/x")
    me = own or pwd.getpwuid(os.geteuid()).pw_name
    for url, user in ((f"hdfs://bob@{NOWHERE}/y", "bob"), (f"hdfs://{NOWHERE}/y", me)):
        with pytest.raises(UsageError, match=f"^{url}: cannot be opened as {user} while {alice.url} is open as alice"):
            open_source(url)
    assert login(f"hdfs://{NOWHERE}/y", {}, {}) == ({"user": own} if own else {}), "hdfs3 has a user for each client"
    del alice  # which nobody has closed
    open_source(f"hdfs://bob@{NOWHERE}/y").close()


def test_files_belong_to_the_user_of_each_url(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> None:
    hdfs.chmod(hdfs_dir, 0o777)
    for user in ("alice", "bob"):
        target = open_target(hdfs_dir.replace("://", f"://{user}@") + f"/{user}")
        target.begin()
        target.write("file", b"x")
        assert target._source.client.get_file_info(f"{target._source._root}/file").owner == user  # type: ignore[attr-defined]
        target.close()
