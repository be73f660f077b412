"""One view of the stores, so that a test of what sync does runs against each of them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers.upload import for_each_file

if TYPE_CHECKING:
    from tests.servers.azure import Azure
    from tests.servers.gcs import Gcs
    from tests.servers.hdfs import Hdfs


# for @pytest.fixture(params=STORES), with make_remote
STORES = [
    "path",
    pytest.param("hdfs", marks=pytest.mark.hdfs),
    pytest.param("webhdfs", marks=pytest.mark.hdfs),
    pytest.param("s3", marks=pytest.mark.s3),
]


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

    def rename(self, path: str, to: str) -> None:
        """Rename a file or a directory; what is in it keeps its times."""
        raise NotImplementedError

    def upload(self, root: Path) -> None:
        """Put every file below ``root`` there."""
        for_each_file(root, lambda file, path: self.put(path, file.read_bytes()))


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

    def rename(self, path: str, to: str) -> None:
        root = Path(self.url.removeprefix("file://"))
        (root / path).rename(root / to)


class HdfsRemote(Remote):
    """``client`` is the server, which is written to over HTTP; ``url`` may be hdfs:// or webhdfs://."""

    client: Hdfs

    def put(self, path: str, data: bytes) -> None:
        self.client.put(f"{self.url}/{path}", data)

    def delete(self, path: str) -> None:
        self.client.delete(f"{self.url}/{path}")

    def rename(self, path: str, to: str) -> None:
        self.client.rename(f"{self.url}/{path}", f"{self.url}/{to}")


class S3Remote(Remote):
    def put(self, path: str, data: bytes) -> None:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=bucket, Key=f"{prefix}/{path}", Body=data)

    def delete(self, path: str) -> None:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.client.delete_object(Bucket=bucket, Key=f"{prefix}/{path}")


class CloudRemote(Remote):
    """``client`` is the emulator, which is written to as ``url`` without its scheme."""

    def put(self, path: str, data: bytes) -> None:
        self.client.put(f"{self.url.partition('://')[2]}/{path}", data)

    def delete(self, path: str) -> None:
        self.client.delete(f"{self.url.partition('://')[2]}/{path}")


def make_cloud(kind: str, request: pytest.FixtureRequest) -> Iterator[Remote]:
    """Yield an empty place in an emulator, which the environment leads to."""
    request.getfixturevalue("no_cloud")
    monkeypatch, name = request.getfixturevalue("monkeypatch"), f"lake-{uuid.uuid4().hex[:12]}"
    if kind == "gs":
        google: Gcs = request.getfixturevalue("gcs")
        google.create_bucket(name)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", google.endpoint)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", google.token)
        yield CloudRemote(f"gs://{name}/wh/shop", google)
        return
    azure: Azure = request.getfixturevalue("azure")
    azure.create_container(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure.connection_string)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure.options["account_name"])
    yield CloudRemote(f"az://{name}/wh/shop", azure)
    azure.delete_container(name)


def make_remote(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    """Yield an empty place at a store of this kind: path, file, hdfs, webhdfs, s3, gs or az."""
    if kind in ("path", "file"):
        directory = tmp_path / "lake" / "shop"
        directory.mkdir(parents=True)
        yield LocalRemote(f"file://{directory}" if kind == "file" else str(directory))
        shutil.rmtree(directory)
    elif kind == "s3":
        bucket = request.getfixturevalue("s3_bucket")
        yield S3Remote(f"{bucket.url}/wh/shop", bucket.client)
    elif kind in ("gs", "az"):
        yield from make_cloud(kind, request)
    else:
        server = request.getfixturevalue("hdfs")
        url: str = request.getfixturevalue("hdfs_dir")
        base = url if kind == "hdfs" else url.replace(server.url, server.webhdfs_url)
        yield HdfsRemote(f"{base}/shop", server)
