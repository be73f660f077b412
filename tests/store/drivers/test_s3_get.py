"""S3: GETs of signed URLs do what those of botocore's client would do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pqcache.errors import SourceChanged, SourceDenied, SourceError, SourceNotFound, SourceUnavailable
from pqcache.store.drivers.s3 import S3Source
from pqcache.store.manifest import Identity
from tests.faults import proxy as faults
from tests.faults.proxy import Proxy
from tests.servers.tls import Tls

if TYPE_CHECKING:
    from tests.conftest import Bucket
    from tests.servers.s3 import S3

pytestmark = pytest.mark.s3

DATA = os.urandom(1 << 20)
NAMES = [
    "dt=2026%2F11/x.parquet",
    "dt=2026/11/x.parquet",
    "a b+c&d=é.parquet",
    "a%20b+c&d=é.parquet",
    "x=%C3%A9/é.parquet",
    "tilde~and-dash_.!*'();:@,$=.parquet",
    'quote"back\\slash<>{}|^`[].parquet',
    "?query=1#fragment.parquet",
    "😀/part.parquet",
    "trailing space /x.parquet ",
    "..a/b../c.parquet",
]


@pytest.fixture
def source(s3_bucket: Bucket) -> Iterator[S3Source]:
    made = S3Source(f"{s3_bucket.url}/wh", {}, 5)
    yield made
    made.close()


@pytest.fixture
def proxied(s3: S3, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, S3Source]]:
    """A source that reaches the server through a proxy that can disturb it; it has a file ``x.parquet``."""
    put(s3_bucket, "x.parquet", DATA)
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        made = S3Source(f"{s3_bucket.url}/wh", {}, 0.5)
        yield proxy, made
        made.close()


def put(bucket: Bucket, path: str, data: bytes) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key=f"wh/{path}", Body=data)


def read(source: S3Source, path: str, identity: Identity) -> bytes:
    return b"".join(source.read(path, 0, identity.size, identity.tag))


def count(source: S3Source) -> list[str]:
    """Return the list to which the name of every operation that goes through the client is added."""
    calls: list[str] = []
    source._client.meta.events.register("before-call.s3", lambda model, **_: calls.append(model.name))
    return calls


def test_every_name_is_read_as_the_client_reads_it(source: S3Source, s3_bucket: Bucket) -> None:
    """Each key has contents of its own, and keys that are one when decoded once are among them."""
    for name in NAMES:
        put(s3_bucket, name, name.encode() * 3)
    calls = count(source)
    listed = {file.path: file.identity for file in source.list()}
    assert set(listed) == set(NAMES)
    for name in (*NAMES, *reversed(NAMES)):
        assert read(source, name, listed[name]) == name.encode() * 3
    assert calls == [], "GETs do not go through the client"


def test_errors_are_those_of_the_client(source: S3Source, s3_bucket: Bucket) -> None:
    put(s3_bucket, "x.parquet", b"one")
    old = source.stat("x.parquet")
    put(s3_bucket, "x.parquet", b"two")
    with pytest.raises(SourceChanged, match=r"wh/x\.parquet: is not the version that was listed"):
        read(source, "x.parquet", old)
    with pytest.raises(SourceNotFound, match=r"wh/gone\.parquet: no such object"):
        read(source, "gone.parquet", Identity(3, 0, ""))
    assert b"".join(source.read("x.parquet", 1, 1)) == b"w"
    assert read(source, "x.parquet", source.stat("x.parquet")) == b"two"


def test_refreshed_credentials_sign_the_next_request(
    s3: S3, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that end soon are asked for before each GET; an error about them does not hold the secret."""
    issued = tmp_path / "credentials.json"
    (tmp_path / "config").write_text(f"[profile short-lived]\ncredential_process = cat {issued}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def issue(secret: str) -> None:
        ends = (datetime.now(timezone.utc) + timedelta(minutes=5)).isoformat()
        keys = {"Version": 1, "AccessKeyId": s3.access_key, "SecretAccessKey": secret, "Expiration": ends}
        issued.write_text(json.dumps(keys))

    issue(s3.secret_key)
    put(s3_bucket, "x.parquet", b"one")
    source = S3Source(f"{s3_bucket.url}/wh", {"profile": "short-lived"}, 5)
    calls, identity = count(source), source.stat("x.parquet")
    for _ in range(2):
        assert read(source, "x.parquet", identity) == b"one"
    assert calls == ["HeadObject"]
    issue("not-the-secret")
    with pytest.raises(SourceDenied) as error:
        read(source, "x.parquet", identity)
    assert "not-the-secret" not in str(error.value)
    assert s3.secret_key not in str(error.value)
    issue(s3.secret_key)
    assert read(source, "x.parquet", identity) == b"one"
    source.close()


def test_public_data_is_read_unsigned(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.parquet", "y.parquet"):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"wh/{name}", Body=name.encode(), ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    source = S3Source(f"{s3_bucket.url}/wh", {"anon": "true"}, 5)
    calls = count(source)
    for name in ("x.parquet", "y.parquet", "x.parquet"):
        assert b"".join(source.read(name, 0, len(name))) == name.encode()
    assert calls == []
    source.close()


def test_an_answer_of_another_length_is_not_read(proxied: tuple[Proxy, S3Source]) -> None:
    """A body that was compressed on its way says the right range and a length of its own; none of it is kept."""
    proxy, source = proxied
    identity = source.stat("x.parquet")
    for more in (-100, 100):
        proxy.rule(faults.edit(lambda body, more=more: b"z" * (len(body) + more)), method="GET", path=r"x\.parquet")  # type: ignore[misc]
        with pytest.raises(SourceUnavailable, match="another range"):
            next(iter(source.read("x.parquet", 0, identity.size, identity.tag)))
        with pytest.raises(SourceUnavailable, match="another range"):
            next(iter(source.read_into(memoryview(bytearray(10)), "x.parquet", 0, identity.size, identity.tag)))
        proxy.clear()


def test_bodies_are_read_into_memory(source: S3Source, s3_bucket: Bucket) -> None:
    """Only the last time is the memory not full."""
    data = os.urandom((2 << 20) + 12_345)
    put(s3_bucket, "x.parquet", data)
    identity = source.stat("x.parquet")
    buffer = memoryview(bytearray(1 << 20))
    coming = source.read_into(buffer, "x.parquet", 7, len(data) - 7, identity.tag)
    got = [bytes(buffer[:count]) for count in coming]
    assert [len(piece) for piece in got] == [1 << 20, 1 << 20, 12_338]
    assert b"".join(got) == data[7:]
    assert list(source.read_into(buffer, "x.parquet", 7, 0)) == []
    with pytest.raises(SourceChanged):
        list(source.read_into(buffer, "x.parquet", 0, 1, "another"))


@pytest.mark.parametrize("fault", [faults.reset(900_000), faults.stall(900_000)], ids=["reset", "stall"])
def test_bytes_before_an_error_are_yielded(fault: faults.Fault, proxied: tuple[Proxy, S3Source]) -> None:
    proxy, source = proxied
    identity = source.stat("x.parquet")
    proxy.rule(fault, method="GET", path=r"x\.parquet", count=1)
    buffer, got = memoryview(bytearray(1 << 20)), list[int]()
    with pytest.raises(SourceUnavailable, match=r"wh/x\.parquet"):
        got.extend(source.read_into(buffer, "x.parquet", 0, identity.size, identity.tag))
    assert len(got) == 1
    assert 0 < got[0] < len(DATA)
    assert buffer[: got[0]] == DATA[: got[0]]


def test_redirects_go_through_the_client(proxied: tuple[Proxy, S3Source]) -> None:
    proxy, source = proxied
    identity, calls = source.stat("x.parquet"), count(source)
    for code in (301, 307, 400):
        proxy.rule(faults.status(code), method="GET", path=r"x\.parquet", count=1)
        assert read(source, "x.parquet", identity) == DATA
    assert calls == ["GetObject"] * 3


def test_a_proxy_is_left_to_the_client(s3: S3, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    put(s3_bucket, "x.parquet", b"one")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        source = S3Source(f"{s3_bucket.url}/wh", {}, 5)
        calls = count(source)
        for _ in range(2):
            assert b"".join(source.read("x.parquet", 0, 3)) == b"one"
        assert calls == ["GetObject"] * 2
        assert len(proxy.requests) == 2
        source.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates")
def test_direct_connections_check_certificates(
    s3: S3, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections without the client trust whom the client trusts, and nobody else."""
    put(s3_bucket, "x.parquet", b"one")
    with closing(Tls(s3.endpoint, tmp_path)) as tls:
        known, elsewhere = tls.certificate("IP:127.0.0.1"), tls.certificate("DNS:elsewhere")
        (tmp_path / "ca.pem").write_text(known.read_text() + elsewhere.read_text())
        tls.use(known)
        monkeypatch.setenv("AWS_ENDPOINT_URL", tls.url)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        source = S3Source(f"{s3_bucket.url}/wh", {}, 5)
        calls, identity = count(source), source.stat("x.parquet")
        for _ in range(3):
            assert read(source, "x.parquet", identity) == b"one"
        assert calls == ["HeadObject"]
        for wrong in (elsewhere, tls.certificate("DNS:localhost,IP:127.0.0.1")):  # trusted, not ours; ours, not trusted
            tls.use(wrong)
            source._ranges.close()
            with pytest.raises(SourceError, match=r"wh/x\.parquet: the certificate is not trusted"):
                read(source, "x.parquet", identity)
        source.close()
