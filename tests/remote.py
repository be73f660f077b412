"""One view of the four stores, so that a test of what sync does runs against each of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    import hdfs_native


@dataclass(frozen=True)
class Remote:
    """A dataset's place at a store: ``url`` for pqcache, and the few changes that tests make there."""

    url: str
    client: Any = None

    def put(self, path: str, data: bytes) -> None:
        """Write a file, replacing one of that name."""
        raise NotImplementedError

    def delete(self, path: str) -> None:
        """Remove one file."""
        raise NotImplementedError

    def upload(self, root: Path) -> None:
        """Put every file below ``root`` there."""
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(8) as pool:  # closing a small file on HDFS takes half a second
            list(pool.map(lambda p: self.put(p.relative_to(root).as_posix(), p.read_bytes()), files))


class LocalRemote(Remote):
    def put(self, path: str, data: bytes) -> None:
        file = Path(self.url.removeprefix("file://")) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.stat().st_mtime_ns if file.exists() else 0
        file.write_bytes(data)
        if file.stat().st_mtime_ns == before:  # two writes within one tick of the clock
            os.utime(file, ns=(before, before + 1))

    def delete(self, path: str) -> None:
        (Path(self.url.removeprefix("file://")) / path).unlink()


class HdfsRemote(Remote):
    """``client`` is hdfs-native's; ``url`` may be hdfs:// or webhdfs://."""

    client: hdfs_native.Client

    def put(self, path: str, data: bytes) -> None:
        import hdfs_native

        name = f"{urlsplit(self.url).path}/{path}"
        self.client.mkdirs(name.rpartition("/")[0], create_parent=True)
        with self.client.create(name, hdfs_native.WriteOptions(overwrite=True)) as file:
            file.write(data)

    def delete(self, path: str) -> None:
        self.client.delete(f"{urlsplit(self.url).path}/{path}")


class S3Remote(Remote):
    def put(self, path: str, data: bytes) -> None:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=bucket, Key=f"{prefix}/{path}", Body=data)

    def delete(self, path: str) -> None:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.client.delete_object(Bucket=bucket, Key=f"{prefix}/{path}")


def make_remote(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    """Yield an empty place at a store of this kind: path, file, hdfs, webhdfs or s3."""
    if kind in ("path", "file"):
        directory = tmp_path / "lake" / "shop"
        directory.mkdir(parents=True)
        yield LocalRemote(f"file://{directory}" if kind == "file" else str(directory))
        shutil.rmtree(directory)
    elif kind == "s3":
        bucket = request.getfixturevalue("s3_bucket")
        yield S3Remote(f"{bucket.url}/wh/shop", bucket.client)
    else:
        import hdfs_native

        server = request.getfixturevalue("hdfs")
        url: str = request.getfixturevalue("hdfs_dir")
        client = hdfs_native.Client(server.url)
        base = url if kind == "hdfs" else url.replace(server.url, server.webhdfs_url)
        yield HdfsRemote(f"{base}/shop", client)
