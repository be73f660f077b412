"""What a user may not read is an error that names it: never an empty directory, never a smaller snapshot."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.datasets import rows_of, write_day, write_shop
from tests.test_cli import error_of, run

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

pytestmark = pytest.mark.hdfs
OTHER = "nobody2"


@dataclass(frozen=True, kw_only=True)
class Lake:
    """A dataset on HDFS that belongs to the superuser, and how the other user reads it."""

    server: Hdfs
    native: str  # the superuser's hdfs:// URL
    url: str
    env: Mapping[str, str]
    shop: Path

    def upload(self) -> None:
        self.server.upload_tree(self.shop, self.native)

    def chmod(self, path: str, mode: int) -> None:
        self.server.chmod(f"{self.native}/{path}".rstrip("/"), mode)


@pytest.fixture(params=["hdfs", "webhdfs"])
def lake(request: pytest.FixtureRequest, hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> Lake:
    native, user = f"{hdfs_dir}/shop", {"HADOOP_USER_NAME": OTHER} if request.param == "hdfs" else {}
    http = native.replace(hdfs.url, hdfs.webhdfs_url)
    url = native if user else http.replace("://", f"://{OTHER}@")
    shop = write_shop(tmp_path / "made", rows=50)
    made = Lake(server=hdfs, native=native, url=url, env=user, shop=shop)
    made.upload()
    return made


def test_what_is_denied_is_named_and_publishes_nothing(lake: Lake, tmp_path: Path) -> None:
    """Directories: above, all of it, one in the middle, the last one; not to be searched, or only that. And a file."""
    cache = tmp_path / "cache"
    assert run("sync", lake.url, cache, env=lake.env).returncode == 0
    before, rows = os.readlink(cache / "current"), rows_of(cache / "current")
    assert rows == rows_of(lake.shop)
    write_day(lake.shop, "2026-11-04", files=2, first=900_000)
    lake.upload()
    for denied, mode, good in (
        ("", 0o711, 0o755),
        ("dt=2026-11-02", 0o744, 0o755),
        ("dt=2026-11-03", 0o700, 0o755),
        ("dt=2026-11-04/part-00001.parquet", 0o600, 0o644),
    ):
        lake.chmod(denied, mode)
        for words in ([cache], [cache, "--force"], [lake.url, tmp_path / "new"]):
            done = run("sync", *words, env=lake.env)
            assert done.returncode == 1
            assert re.search(rf"{re.escape(lake.url)}/?{denied}.*: permission denied", done.stderr.splitlines()[-1])
        lake.chmod(denied, good)
    lake.chmod("", 0o700)
    line = error_of(run("sync", f"{lake.url}/dt=2026-11-01", tmp_path / "new", env=lake.env), 1)
    # hdfs:// names the directory that denies, WebHDFS says only what was asked for
    named = lake.url if lake.url.startswith("hdfs:") else f"{lake.url}/dt=2026-11-01"
    assert f"{named}: permission denied" in line
    lake.chmod("", 0o755)
    assert not (tmp_path / "new" / "current").exists()
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows
    assert run("sync", cache, env=lake.env).returncode == 0
    assert rows_of(cache / "current") == rows_of(lake.shop)
