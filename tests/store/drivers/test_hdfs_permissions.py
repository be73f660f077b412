"""What a user may not read is an error that names it: never an empty directory, never a smaller snapshot."""

from __future__ import annotations

import os
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
    native = f"{hdfs_dir}/shop"
    http = native.replace(hdfs.url, hdfs.webhdfs_url)
    url, env = (
        (native, {"HADOOP_USER_NAME": OTHER}) if request.param == "hdfs" else (http.replace("://", f"://{OTHER}@"), {})
    )
    made = Lake(server=hdfs, native=native, url=url, env=env, shop=write_shop(tmp_path / "made"))
    made.upload()
    return made


@pytest.mark.parametrize(
    ("denied", "mode"),
    [
        ("", 0o711),
        ("dt=2026-11-02", 0o744),
        ("dt=2026-11-03", 0o700),
    ],
)
def test_a_denied_directory_publishes_nothing(denied: str, mode: int, lake: Lake, tmp_path: Path) -> None:
    """One in the middle and the last that is listed; readable without being searchable, or the other way round."""
    lake.chmod(denied, mode)
    line = error_of(run("sync", lake.url, tmp_path / "cache", env=lake.env), 1)
    assert lake.url in line
    assert "permission denied" in line
    assert not (tmp_path / "cache").exists()


def test_a_directory_above_that_is_denied(lake: Lake, tmp_path: Path) -> None:
    lake.chmod("", 0o700)
    line = error_of(run("sync", f"{lake.url}/dt=2026-11-01", tmp_path / "cache", env=lake.env), 1)
    # hdfs:// names the directory that denies, WebHDFS says only what was asked for
    denied = lake.url if lake.url.startswith("hdfs:") else f"{lake.url}/dt=2026-11-01"
    assert f"{denied}: permission denied" in line
    assert not (tmp_path / "cache").exists()


def test_a_cache_keeps_its_snapshot_when_a_directory_is_denied(lake: Lake, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run("sync", lake.url, cache, env=lake.env).returncode == 0
    before, rows = os.readlink(cache / "current"), rows_of(cache / "current")
    assert rows == rows_of(lake.shop)
    lake.chmod("dt=2026-11-02", 0o700)
    for how in ([], ["--force"], ["--dry-run"]):
        line = error_of(run("sync", cache, *how, env=lake.env), 1)
        assert lake.url in line
        assert "permission denied" in line
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows
    lake.chmod("dt=2026-11-02", 0o755)
    assert run("sync", cache, env=lake.env).returncode == 0
    assert os.readlink(cache / "current") == before  # nothing had changed


def test_a_file_that_cannot_be_read_is_named(lake: Lake, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run("sync", lake.url, cache, env=lake.env).returncode == 0
    before, rows = os.readlink(cache / "current"), rows_of(cache / "current")
    write_day(lake.shop, "2026-11-04", files=2, first=900_000)
    lake.upload()
    lake.chmod("dt=2026-11-04/part-00001.parquet", 0o600)
    line = error_of(run("sync", cache, env=lake.env), 1)
    assert f"{lake.url}/dt=2026-11-04/part-00001.parquet: permission denied" in line
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows
    lake.chmod("dt=2026-11-04/part-00001.parquet", 0o644)
    assert run("sync", cache, env=lake.env).returncode == 0
    assert rows_of(cache / "current") == rows_of(lake.shop)
