"""The relay passes on what servers say, no faster than it may, and can be away."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import pqcache
from tests.conftest import Bucket
from tests.datasets import rows_of, write_shop
from tests.servers import bandwidth
from tests.servers.bandwidth import BandwidthLimit
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import S3


def test_bytes_are_sent_at_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), now.__setitem__(0, now[0] + seconds)))
    bucket = bandwidth._Bucket()
    bucket.take(1 << 40)
    assert slept == []  # no limit
    bucket.set(1e6)
    for _ in range(100):
        bucket.take(50_000)
    assert sum(slept) == pytest.approx(5.0)
    now[0] += 60
    bucket.take(1_000_000)
    assert slept[-1] == pytest.approx(1.0, abs=2 * bandwidth._BURST)  # a pause saves up next to nothing


def test_in_front_of_s3(s3: S3, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_shop(tmp_path / "made", days=1)
    for path in made.rglob("*.parquet"):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"shop/{path.name}", Body=path.read_bytes())
    with BandwidthLimit([s3.endpoint], rate=50e6) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.url(s3.endpoint))
        report = pqcache.sync(f"{s3_bucket.url}/shop", tmp_path / "cache")
        assert report.files == 3
        line.set(away=True)
        with pytest.raises(pqcache.SourceUnavailable):
            pqcache.sync(tmp_path / "cache", retries=0)
        line.set()
        assert not pqcache.sync(tmp_path / "cache").published


def test_in_front_of_webhdfs(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> None:
    made = write_shop(tmp_path / "made", days=1)
    hdfs.upload_tree(made, hdfs_dir)
    path = hdfs_dir.removeprefix(hdfs.url)
    with BandwidthLimit([hdfs.http_url, hdfs.datanode_http_url]) as line:
        url = line.url(hdfs.webhdfs_url)
        pqcache.sync(f"{url}{path}", tmp_path / "cache")
        assert rows_of(tmp_path / "cache" / "current") == rows_of(made)
        line.set(away=True)
        with pytest.raises(pqcache.SourceUnavailable):
            pqcache.sync(tmp_path / "cache", retries=0)
