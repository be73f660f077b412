"""gs:// and az:// against emulators: syncs, versions, credentials, forks; and against servers that misbehave."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.errors import (
    PqcacheError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
)
from pqcache.store.drivers.object_store import place_of
from pqcache.store.drivers.registry import open_source, open_target
from pqcache.store.urls import is_secret, redact
from tests.conftest import NOWHERE
from tests.datasets import rows_of, write_day, write_shop
from tests.forked_commands import run_pqcache, true_in_child
from tests.servers.tls import Tls
from tests.store.drivers.web_server import Asked, reply, serving

if TYPE_CHECKING:
    from tests.servers.azure import Azure
    from tests.servers.gcs import Gcs

pytestmark = pytest.mark.usefixtures("no_cloud")
KINDS = [pytest.param("gs", marks=pytest.mark.gcs), pytest.param("az", marks=pytest.mark.azure)]
DAY = "dt=2026-11-02"


@dataclass(frozen=True)
class Lake:
    """A bucket or container of its own."""

    scheme: str
    bucket: str
    server: Azure | Gcs
    options: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}/wh/shop"

    @property
    def words(self) -> list[str]:
        """The options for the command line."""
        return [word for name, value in self.options.items() for word in ("-o", f"{name}={value}")]

    def put(self, path: str, data: bytes) -> None:
        self.server.put(f"{self.bucket}/wh/shop/{path}", data)

    def delete(self, path: str) -> None:
        self.server.delete(f"{self.bucket}/wh/shop/{path}")

    def upload(self, root: Path) -> None:
        self.server.upload_tree(root, f"{self.bucket}/wh/shop")


@pytest.fixture(params=KINDS)
def lake(request: pytest.FixtureRequest) -> Iterator[Lake]:
    name = f"lake-{uuid.uuid4().hex[:12]}"
    if request.param == "gs":
        google: Gcs = request.getfixturevalue("gcs")
        google.create_bucket(name)
        yield Lake("gs", name, google, google.options)
    else:
        azure: Azure = request.getfixturevalue("azure")
        azure.create_container(name)
        yield Lake("az", name, azure, azure.options)
        azure.delete_container(name)


def test_a_second_night_fetches_what_changed(lake: Lake, tmp_path: Path) -> None:
    here = write_shop(tmp_path / "shop", rows=50)
    lake.upload(here)
    done = run_pqcache("sync", lake.url, tmp_path / "cache", "--json", *lake.words)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["added"] == 9
    remembered = (tmp_path / "cache/pqcache.toml").read_text()
    for name, value in lake.options.items():
        assert (value in remembered) is not is_secret(name)
        assert value not in done.stdout or not is_secret(name)
    assert rows_of(tmp_path / "cache/current") == rows_of(here)
    assert not pqcache.sync(tmp_path / "cache", options=lake.options).published

    write_day(here, "2026-11-02", files=1, rows=50, first=900_000)
    write_day(here, "2026-11-04", files=1, rows=50, first=910_000)
    (here / "dt=2026-11-01/part-00001.parquet").unlink()
    lake.upload(here)
    lake.delete("dt=2026-11-01/part-00001.parquet")
    (here / f"{DAY}/part-00001.parquet").unlink()
    lake.delete(f"{DAY}/part-00001.parquet")
    report = pqcache.sync(tmp_path / "cache", options=lake.options)
    assert (report.added, report.removed) == (1, 2)
    assert report.changed >= 1
    assert rows_of(tmp_path / "cache/current") == rows_of(here)


def test_names_and_ranges_are_those_of_the_store(lake: Lake) -> None:
    names = ["a b#?.parquet", "dt=2026%2F11/p+q.parquet", "dt=ü/p", "empty/none", "z"]
    for name in names:
        lake.put(name, b"" if "empty" in name else name.encode())
    lake.server.put(f"{lake.bucket}/wh/shopping/x", b"beside it")
    source = open_source(lake.url, lake.options)
    found = {file.path: file.identity for file in source.list()}
    assert set(found) == set(names)
    for name in names:
        identity = found[name]
        assert source.stat(name) == identity
        assert identity.tag
        data = b"".join(source.read(name, 0, identity.size, identity.tag))
        assert data == (b"" if "empty" in name else name.encode())
        if identity.size > 2:
            assert b"".join(source.read(name, 1, identity.size - 2)) == data[1:-1]
    lake.put("z", b"y")  # only the version that was listed is read
    with pytest.raises(SourceChanged, match=rf"^{lake.url}/z: is not the version that was listed"):
        list(source.read("z", 0, 1, found["z"].tag))
    assert not found["z"].is_still(source.stat("z"))
    one = open_source(f"{lake.url}/z", lake.options)
    for _ in range(2):
        assert [file.path for file in one.list()] == ["z"]
    assert b"".join(one.read("z", 0, 1)) == b"y"
    with pytest.raises(SourceNotFound, match=rf"^{lake.url}/y: no such object"):
        one.stat("y")
    assert list(open_source(f"{lake.url}/nothing", lake.options).list()) == []


@pytest.mark.gcs
def test_a_listing_of_several_pages(gcs: Gcs) -> None:
    gcs.create_bucket(name := f"pages-{uuid.uuid4().hex[:12]}")
    for number in range(41):  # the emulator has 20 on a page
        gcs.put(f"{name}/x/{number:04d}", b"x")
    assert len(list(open_source(f"gs://{name}/x", gcs.options).list())) == 41


def test_wrong_credentials_and_missing_buckets_are_named(lake: Lake, tmp_path: Path) -> None:
    lake.put("x.parquet", b"PAR1")
    secret = "WRONGWRONGWRONGWRONG"
    name = "token" if lake.scheme == "gs" else "account_key"
    source = open_source(lake.url, {**lake.options, name: secret})
    for call in (source.list, lambda: iter([source.stat("x.parquet")]), lambda: source.read("x.parquet", 0, 2)):
        with pytest.raises(SourceDenied, match=rf"^{lake.url}.*: access denied .*; check ") as error:
            list(call())
        assert secret not in str(error.value)
    missing = f"{lake.scheme}://nothing-here-{uuid.uuid4().hex}/x"
    word = "bucket" if lake.scheme == "gs" else "container"
    done = run_pqcache("sync", missing, tmp_path / "cache", *lake.words)
    assert done.returncode == 1
    assert done.stderr.endswith(f"Z cache: pqcache: error: {missing}: no such {word}; check the URL\n")
    assert not (tmp_path / "cache/current").exists()


def test_a_forked_child_reads_the_cache_and_is_refused_at_the_store(lake: Lake, tmp_path: Path) -> None:
    lake.upload(write_shop(tmp_path / "shop", days=1, files=1, rows=20))
    pqcache.sync(lake.url, tmp_path / "cache", options=lake.options)

    def refused() -> bool:
        rows = sum(batch.num_rows for batch in pqcache.Cache(tmp_path / "cache").batches())
        said = f"{lake.url}: obstore was used before this process was forked, and cannot be used in it"
        with pytest.raises(SourceError, match=f"^{said}; fork before the first use, or start processes with 'spawn'"):
            pqcache.sync(tmp_path / "cache", options=lake.options)
        return rows == 20

    assert true_in_child(refused)
    assert not pqcache.sync(tmp_path / "cache", options=lake.options).published


@pytest.mark.azure
def test_a_shared_access_signature_is_a_secret(azure: Azure, tmp_path: Path) -> None:
    azure.create_container(name := f"sas-{uuid.uuid4().hex[:8]}")
    azure.upload_tree(write_shop(tmp_path / "shop", days=1, files=1, rows=20), f"{name}/shop")
    given = {"account_name": azure.options["account_name"], "endpoint": azure.options["endpoint"]}
    parts = f"AccountName={given['account_name']};BlobEndpoint={given['endpoint']}"
    for secret in (
        {**given, "sas_token": azure.sas_token},
        {"connection_string": f"{parts};AccountKey={azure.key}"},
        {"connection_string": f"{parts};SharedAccessSignature={azure.sas_token}"},
    ):
        assert pqcache.sync(f"az://{name}/shop", tmp_path / "cache", options=secret).rows == 20
    remembered = (tmp_path / "cache/pqcache.toml").read_text()
    assert "sig" not in remembered
    assert azure.key not in remembered
    with pytest.raises(PqcacheError) as error:
        list(open_source("az://nobody/x", {**given, "sas_token": azure.sas_token}).list())
    assert "sig=" not in str(error.value)
    azure.delete_container(name)


class Bucket:
    """A store of one object that answers as its fields say."""

    data = b"0123456789" * 400
    drip, status, cut, tag = 0.0, 0, 0, '"one"'

    def answer(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if self.status:
            reply(handler, b"<Error><Code>Broken</Code></Error>", status=self.status)
            return
        headers = {"ETag": self.tag, "Last_Modified": "Fri, 20 Nov 2026 04:00:00 GMT"}
        if asked.headers["Range"] is None:
            reply(handler, self.data, **headers)
            return
        first, last = map(int, asked.headers["Range"].removeprefix("bytes=").split("-"))
        body = self.data[first : last + 1]
        headers["Content_Range"] = f"bytes {first}-{last}/{len(self.data)}"
        if not self.cut:
            reply(handler, body, status=206, drip=self.drip, **headers)
            return
        handler.send_response(206)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body[: self.cut])
        handler.wfile.flush()
        if self.drip:
            time.sleep(self.drip)
        handler.close_connection = True


def test_bad_servers_are_unavailable_and_never_waited_for() -> None:
    bucket = Bucket()
    with serving(bucket.answer) as server:

        def read(timeout: float = 5.0, tag: str = "one") -> bytes:
            options = {"endpoint": server.url, "anon": "true"}
            return b"".join(open_source("gs://lake", options, timeout).read("x", 0, len(bucket.data), tag))

        assert read() == bucket.data
        bucket.status = 503
        with pytest.raises(SourceUnavailable, match=r"^gs://lake/x: the server answers 503 Broken; try again later"):
            read()
        bucket.status = 400
        with pytest.raises(SourceError, match=r"^gs://lake/x: the server answers 400 Broken"):
            read()
        bucket.status, bucket.cut = 0, 1000
        source, got = open_source("gs://lake", {"endpoint": server.url, "anon": "true"}, 5.0), list[bytes]()
        with pytest.raises(SourceUnavailable, match=r"^gs://lake/x: .*check the endpoint and the network"):
            got.extend(source.read("x", 0, len(bucket.data), "one"))
        assert b"".join(got) == bucket.data[:1000], "what came before the error"
        bucket.drip = 3.0
        with pytest.raises(SourceUnavailable, match=r"^gs://lake/x: no answer in time"):
            read(timeout=0.3)
        bucket.cut, bucket.drip = 0, 0.01
        with pytest.raises(SourceUnavailable, match=r"fewer than 1,000 bytes a second"):
            read(timeout=0.3)
        bucket.drip, bucket.tag = 0.0, '"two"'  # a server that takes no notice of If-Match
        with pytest.raises(SourceChanged):
            read()
    gone = (
        rf"^gs://lake/x: {server.url[7:]} cannot be reached \(connection refused\); check the endpoint and the network"
    )
    with pytest.raises(SourceUnavailable, match=gone):
        read()


def test_a_host_with_a_wrong_certificate_is_named(tmp_path: Path) -> None:
    server = Tls("http://127.0.0.1:1", tmp_path)
    server.use(server.certificate("IP:127.0.0.1"))  # of an authority that nobody knows
    with pytest.raises(SourceError, match=rf"{server.url[8:]} cannot be reached \(its certificate is not valid"):
        next(open_source("gs://lake/x", {"endpoint": server.url, "token": "t"}).list())
    server.close()


@pytest.mark.parametrize("url", ["gs://lake/x", "az://lake/x"])
def test_without_credentials_a_server_without_tls_is_asked_and_no_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the addresses at which machines in a cloud ask for their account; no test can reach these."""
    assert {os.environ[name] for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT")} == {NOWHERE}
    assert NOWHERE in os.environ["IDENTITY_ENDPOINT"]
    with (
        serving(lambda _, handler: reply(handler, b"{}")) as account,
        serving(lambda _, handler: reply(handler, status=404)) as server,
    ):
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
            monkeypatch.setenv(name, account.url[7:])
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{account.url}/msi")
        options = {"endpoint": server.url, **({"account_name": "a"} if url.startswith("az") else {})}
        source = open_source(url, options)
        for call in (lambda: list(source.list()), lambda: source.stat("y"), lambda: list(source.read("y", 0, 1))):
            with suppress(PqcacheError):
                call()
        with pytest.raises(UsageError, match="is written with credentials only"):
            open_target(url, options)
        assert len(server.asked) >= 3
        assert account.asked == []
        with suppress(PqcacheError):  # whoever names a server with TLS may rely on the machine's account
            list(open_source(url, {**options, "endpoint": "https://127.0.0.1:1"}).list())
        assert account.asked != []


AZURE_URL = "abfss://lake@account.dfs.core.windows.net/wh/shop"


@pytest.mark.parametrize(
    ("url", "options", "config"),
    [
        (AZURE_URL, {}, {"account_name": "account"}),
        ("az://lake/wh/shop", {"account_name": "a", "sas_token": "s"}, {"account_name": "a", "sas_key": "s"}),
        (
            "abfs://lake@a.blob.core.chinacloudapi.cn/wh/shop",
            {"anon": "true"},
            {"account_name": "a", "endpoint": "https://a.blob.core.chinacloudapi.cn", "skip_signature": "true"},
        ),
        (
            "az://lake/wh/shop",
            {"connection_string": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==;EndpointSuffix=x.y"},
            {"account_name": "a", "account_key": "k==", "endpoint": "https://a.blob.x.y"},
        ),
        ("gs://lake/wh/shop", {"token": "t"}, {"bearer_token": "t"}),
        ("gcs://lake/wh/shop", {"service_account": "/f"}, {"service_account": "/f"}),
    ],
)
def test_what_a_url_and_options_say(url: str, options: dict[str, str], config: dict[str, str]) -> None:
    place = place_of(url, options)
    assert (place.bucket, place.root, dict(place.config)) == ("lake", "wh/shop", config)
    assert redact(url) == url  # a container is no password


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("gs://", {}, "no bucket; write gs://BUCKET/PATH"),
        ("az://", {}, "no container; write az://CONTAINER@ACCOUNT"),
        ("az://lake/x", {}, "names no storage account; write az://CONTAINER@ACCOUNT"),
        ("az://lake@somewhere/x", {}, "names no storage account"),
        ("gs://lake/x", {"project": "p"}, "-o project=...: gs:// has no such option; it has: anon, endpoint"),
        ("az://lake/x", {"connection_string": "nonsense"}, "the connection string: has no AccountName"),
        ("gs://user:PASS@lake/x", {}, "has a user, a password or a port"),
        ("gs://lake/x", {"endpoint": "http://u:PASS@127.0.0.1:1"}, "-o endpoint: holds a user"),
        ("az://lake/x", {"account_name": "a", "account_key": "PASS%%%"}, "check the options and the AZURE_"),
        ("gs://lake/x", {"service_account": "/PASS/nowhere"}, "check the options and the GOOGLE_"),
        ("zip::gs://lake/x", {}, "is a chain of file systems"),
        ("gs://lake/x?token=PASS", {}, "has a secret in its path"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, options: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError) as error:
        open_source(url, {**options, **({"account_name": "a"} if "connection" in options else {})})
    assert why in str(error.value)
    assert "PASS" not in str(error.value) or "nowhere" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_machine_without_an_account_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda asked, handler: reply(handler, status=403)) as server:
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{server.url}/msi")
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, server.url)
        source = open_source("az://lake/x", {"account_name": "a", "endpoint": "https://127.0.0.1:1/a"}, timeout=2)
        with pytest.raises(SourceDenied, match=r"^az://lake/x: no credentials found, and this machine has no account"):
            list(source.list())
