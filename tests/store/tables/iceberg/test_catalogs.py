"""Tables of catalogs: SQL and REST, whose files are on local disk, HDFS and S3; servers that refuse or say nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io import FileIO, InputFile, OutputFile

import pqcache
from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable, UsageError
from tests.conftest import Bucket
from tests.forked_commands import run_pqcache
from tests.servers.hdfs import Hdfs
from tests.store.drivers.web_server import Asked, reply, serving
from tests.store.tables.iceberg.lakes import Lake, commit, local, place, position_deletes, rows_in, rows_of


def sold(first: int) -> pa.Table:
    return pa.table({"id": pa.array(range(first, first + 6), pa.int64()), "kind": ["a", "b", "c d/e"] * 2})


NONE = (404, {"error": {"message": "no such table", "type": "NoSuchTableException", "code": 404}})


@contextmanager
def rest_catalog(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """Run a server that answers paths with a status and JSON; return its URL."""

    def answer(asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        status, body = answers.get(asked.path.partition("?")[0], NONE)
        reply(handler, json.dumps(body).encode(), status)

    with serving(answer) as server:
        yield server.url


def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **properties: str) -> None:
    lines = "".join(f"    {name}: {value}\n" for name, value in properties.items())
    (tmp_path / ".pyiceberg.yaml").write_text(f"catalog:\n  rest:\n{lines}")
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_rest_catalog(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = lake.create("sales", sold(0).schema, by=["kind"])
    answers: dict[str, tuple[int, Any]] = {"/v1/config": (200, {"defaults": {}, "overrides": {}})}

    def publish() -> None:
        location = table.refresh().metadata_location
        loaded = {"metadata-location": location, "metadata": json.loads(local(location).read_bytes())}
        answers["/v1/namespaces/shop/tables/sales"] = (200, {**loaded, "config": {"token": "vended-secret"}})

    table.append(sold(0))
    publish()
    with rest_catalog(answers) as uri:
        configure(tmp_path, monkeypatch, uri=uri, token="my-secret")
        pqcache.sync("iceberg://rest/shop.sales", tmp_path / "cache")
        assert rows_of(tmp_path / "cache") == rows_in(table)
        table.append(sold(6))
        publish()
        done = run_pqcache("sync", tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        assert rows_of(tmp_path / "cache") == rows_in(table)
        assert "secret" not in done.stdout + done.stderr
        kept = (tmp_path / "cache" / "pqcache.toml").read_text()
        assert 'source = "iceberg://rest/shop.sales"' in kept
        assert "secret" not in kept
        for name, status, error in (
            ("none", 404, SourceNotFound),
            ("mine", 401, SourceDenied),
            ("theirs", 403, SourceDenied),
            ("busy", 503, SourceUnavailable),
            ("broken", 500, SourceUnavailable),
            ("odd", 200, SourceError),
        ):
            message = "said about my-secret of postgresql://me:their-pw@db/x?sig=signed"
            body = {"error": {"message": message, "type": "E", "code": status}}
            answers[f"/v1/namespaces/shop/tables/{name}"] = (status, body)
            with pytest.raises(error) as raised:
                pqcache.sync(f"iceberg://rest/shop.{name}", tmp_path / "other", retries=0)
            assert not any(secret in str(raised.value) for secret in ("my-secret", "their-pw", "signed"))
            assert "said about *** of postgresql://***@db/x?***" in str(raised.value) or name == "odd"
        with pytest.raises(UsageError, match="no such option"):
            pqcache.sync("iceberg://rest/shop.sales", tmp_path / "other", options={"endpoint": uri})
    with pytest.raises(SourceUnavailable, match="its catalog does not answer"):
        pqcache.sync(tmp_path / "cache", retries=0)


def test_a_silent_catalog_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        configure(tmp_path, monkeypatch, uri=f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(SourceUnavailable, match="its catalog has not answered for"):
            pqcache.sync("iceberg://rest/shop.sales", tmp_path / "cache", retries=0, timeout=0.3)


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"uri": "ftp://127.0.0.1/"}, "cannot read it"),
        ({"type": "sql", "uri": "nonsense://me:my-secret@127.0.0.1/x"}, "its catalog's database cannot be read"),
        ({"type": "sql", "uri": "sqlite:////none/such/catalog.db"}, "unable to open database file"),
        ({"type": "what"}, "cannot read it"),
        ({"type": "rest"}, "URI missing"),
    ],
)
def test_catalogs_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, properties: dict[str, str], said: str
) -> None:
    configure(tmp_path, monkeypatch, **properties)
    with pytest.raises(SourceError, match=said) as error:
        pqcache.sync("iceberg://rest/shop.sales", tmp_path / "cache", retries=0)
    assert "my-secret" not in str(error.value)


def test_a_catalog_is_read_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(SourceError, match="no such table"):
        pqcache.sync("iceberg://rest/shop.sales", tmp_path / "cache", retries=0)
    assert not (tmp_path / "other.db").exists() or not (tmp_path / "other.db").stat().st_size


def test_without_pyiceberg(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = lake.create("sales", sold(0).schema)
    table.append(sold(0))
    sources = (place(table), "iceberg://lake/shop.sales", local(table.refresh().metadata_location))
    for name in [*sys.modules]:
        if name.partition(".")[0] == "pyiceberg" or name.startswith("pqcache.store.tables.iceberg"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    said = r"is an Iceberg table, which needs pyiceberg; install the extra with: pip install 'pqcache\[iceberg\]'"
    for source in sources:
        with pytest.raises(UsageError, match=said):
            pqcache.sync(source, tmp_path / "cache")


class WritingToHdfs(FileIO):
    """Writes through hdfs-native, as pyiceberg itself needs a JVM; nothing is read by it."""

    def new_input(self, location: str) -> InputFile:
        from pyiceberg.io.fsspec import FsspecInputFile

        return FsspecInputFile(location, self._store())

    def new_output(self, location: str) -> OutputFile:
        from pyiceberg.io.fsspec import FsspecOutputFile

        return FsspecOutputFile(location, self._store())

    def delete(self, location: Any) -> None: ...

    def _store(self) -> Any:
        from hdfs_native.fsspec import HdfsFileSystem

        port = int(self.properties["hdfs.port"])
        return HdfsFileSystem(host="127.0.0.1", port=port, skip_instance_cache=True)  # its end hangs in a fork


@pytest.mark.hdfs
def test_a_table_on_hdfs(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = hdfs.url.rpartition(":")[2]
    written = {"py-io-impl": f"{__name__}.WritingToHdfs", "hdfs.port": port}
    lake = Lake(tmp_path / "lake", warehouse=hdfs_dir, properties=written)
    lake.configure(monkeypatch)
    table = lake.create("sales", sold(0).schema, by=["kind"])
    table.append(sold(0))
    table.append(sold(6))
    url = "iceberg://lake/shop.sales"
    pqcache.sync(url, tmp_path / "cache")
    expected = sorted((row["id"], row["kind"]) for part in (sold(0), sold(6)) for row in part.to_pylist())
    assert [tuple(dict(row).values()) for row in rows_of(tmp_path / "cache")] == [
        (str(number), repr(kind)) for number, kind in sorted(expected, key=lambda row: str(row[0]))
    ]
    pqcache.sync(table.location(), tmp_path / "direct")
    assert rows_of(tmp_path / "direct") == rows_of(tmp_path / "cache")
    for part in ("data", "data/kind=a"):
        with pytest.raises(UsageError, match="is a part of an Iceberg table"):
            pqcache.sync(f"{table.location()}/{part}", tmp_path / "part")
    lake.catalog.close()


@pytest.mark.s3
def test_a_table_on_s3_with_the_credentials_of_its_catalog(
    s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "s3.endpoint": os.environ["AWS_ENDPOINT_URL"],
        "s3.access-key-id": os.environ["AWS_ACCESS_KEY_ID"],
        "s3.secret-access-key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "s3.region": "us-east-1",
    }
    lake = Lake(tmp_path / "lake", warehouse=f"s3a://{s3_bucket.name}/lake", properties=given)
    lake.configure(monkeypatch)
    table = lake.create("sales", sold(0).schema, by=["kind"])
    table.append(sold(0))
    direct = tmp_path / "direct"
    pqcache.sync(table.location().replace("s3a://", "s3://"), direct)
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    pqcache.sync("iceberg://lake/shop.sales", tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_of(direct) == rows_in(table)
    assert given["s3.secret-access-key"] not in (tmp_path / "cache" / "pqcache.toml").read_text()
    table.append(sold(6))
    pqcache.sync(tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    lake.catalog.close()


def test_a_table_of_several_places(lake: Lake, tmp_path: Path) -> None:
    """Data elsewhere than the table, as ``write.data.path`` has it, and names that URLs would encode."""
    table = lake.create("apart", sold(0).schema, **{"write.data.path": f"file://{tmp_path}/more data%20x"})
    table.append(sold(0))
    pqcache.sync("iceberg://lake/shop.apart", tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    (uri,) = [task.file.file_path for task in table.scan().plan_files()]
    commit(table, [position_deletes(table, [(uri, 1)])])
    pqcache.sync(tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
