"""Errors that may pass: how long they are retried, and that exit code 75 says that a later run may get on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from subprocess import CompletedProcess
from urllib.parse import parse_qs, unquote

import pytest

import pqcache
from tests.datasets import rows_of, write_shop
from tests.forked_commands import run_pqcache
from tests.store.drivers.web_server import Asked, reply, serving

LATER = 75
SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
SKEWED = (
    "<Error><Code>RequestTimeTooSkewed</Code>"
    "<Message>The difference between the request time and the current time is too large.</Message></Error>"
)
EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
NO_BUCKET = "<Error><Code>NoSuchBucket</Code><Message>The bucket does not exist</Message></Error>"


class Bucket:
    """S3 with the files below ``root``; the next requests get ``refusals``, and each of them gets ``always``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refusals: list[tuple[int, str]] = []
        self.always: tuple[int, str] | None = None
        self.asked = 0

    def answer(self, asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        if self.refusals or self.always:
            status, body = self.refusals.pop() if self.refusals else self.always or (500, "")
            reply(handler, body.encode(), status=status)
        elif "list-type=2" in asked.path:
            prefix = parse_qs(asked.path.partition("?")[2])["prefix"][0]
            contents = "".join(
                f"<Contents><Key>{key}</Key><Size>{path.stat().st_size}</Size>"
                f'<LastModified>2026-11-20T04:00:03.000Z</LastModified><ETag>"e"</ETag></Contents>'
                for path in sorted(self.root.rglob("*.parquet"))
                if (key := f"shop/{path.relative_to(self.root)}").startswith(prefix)
            )
            head = "<Name>lake</Name><IsTruncated>false</IsTruncated>"
            reply(handler, f"<ListBucketResult>{head}{contents}</ListBucketResult>".encode())
        elif not (path := self.root / unquote(asked.path.partition("?")[0]).removeprefix("/lake/shop/")).is_file():
            reply(handler, status=404)
        else:
            data = path.read_bytes()
            first, _, last = (asked.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")
            body = data[int(first) : int(last) + 1 if last else None]
            about = {"ETag": '"e"', "Last_Modified": "Fri, 20 Nov 2026 04:00:03 GMT"}
            about["Content_Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}"
            reply(handler, body, status=206 if asked.headers["Range"] else 200, **about)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    write_shop(tmp_path / "lake", files=2, rows=10)
    found = Bucket(tmp_path / "lake")
    with serving(found.answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        yield found


def error_of(done: CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "refused"), [(["--retries", "10"], 6), (["--retry-for", "1m"], 7), (["--retries", "3"], 3)]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_listing_is_retried_as_often_as_was_asked_for(
    options: list[str], refused: int, first: bool, bucket: Bucket, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    if not first:
        assert run_pqcache("sync", "s3://lake/shop", cache).returncode == 0
    bucket.refusals = [(503, SLOW_DOWN)] * refused
    done = run_pqcache("sync", "s3://lake/shop", cache, *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("retrying in") == refused
    assert not bucket.refusals
    assert len(rows_of(cache / "current")) == 60


@pytest.mark.parametrize("options", [{"retries": 0}, {"retry_for": 0}, {"retries": 2, "retry_for": "10m"}])
def test_retries_end(options: dict[str, object], bucket: Bucket, tmp_path: Path) -> None:
    bucket.always = 503, SLOW_DOWN
    with pytest.raises(pqcache.SourceUnavailable, match="503 SlowDown") as error:
        pqcache.sync("s3://lake/shop", tmp_path / "cache", **options)  # type: ignore[arg-type]
    assert error.value.exit_code == LATER
    assert bucket.asked == 1 + int(str(options.get("retries", 0)))
    with pytest.raises(pqcache.UsageError, match="not a duration"):
        pqcache.sync("s3://lake/shop", tmp_path / "cache", retry_for="soon")


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ((503, SLOW_DOWN), LATER, "the server answers 503 SlowDown"),
        ((403, SKEWED), LATER, "the clocks of this machine and of the server differ too much (RequestTimeTooSkewed)"),
        ((400, EXPIRED), LATER, "the credentials have expired (ExpiredToken)"),
        ((403, EXPIRED), LATER, "the credentials have expired (ExpiredToken)"),
        ((403, DENIED), 1, "access denied (403 AccessDenied)"),
        ((404, NO_BUCKET), 1, "no such bucket"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_what_may_pass_has_an_exit_code_of_its_own(
    answer: tuple[int, str], code: int, says: str, first: bool, bucket: Bucket, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    if not first:
        assert run_pqcache("sync", "s3://lake/shop", cache).returncode == 0
    bucket.always, bucket.asked = answer, 0
    done = run_pqcache("sync", "s3://lake/shop", cache, "--retries", "2")
    assert done.returncode == code
    assert says in error_of(done)
    assert bucket.asked == (3 if answer[0] == 503 else 1) or code != LATER, "only a busy server is asked again"
    assert first or len(rows_of(cache / "current")) == 60


@pytest.mark.parametrize("url", ["gs://lake/shop", "az://lake/shop", "webhdfs://127.0.0.1:{port}/shop"])
@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("token (token for me: HDFS_DELEGATION_TOKEN owner=me) is expired", "the credentials have expired"),
        ("Token has been expired or revoked.", "the credentials have expired"),
        ("Lifetime validation failed. The token is expired.", "the credentials have expired"),
        ("Signature not valid in the specified time frame", "the credentials have expired"),
        ("GSSAPI: Ticket expired", "the credentials have expired"),
        ("GSSAPI: Clock skew too great", "the clocks of this machine and of the server differ"),
        ("User me may not read /wh/expired token/dt=1", ""),
    ],
)
def test_expired_tokens_and_wrong_clocks_are_named(url: str, said: str, says: str, tmp_path: Path) -> None:
    def answer(asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        if "/webhdfs/" in asked.path:
            error = {"RemoteException": {"exception": "AccessControlException", "message": said}}
            reply(handler, json.dumps(error).encode(), status=403)
        else:
            body = f"<Error><Code>Forbidden</Code><Message>{said}</Message></Error>"
            reply(handler, body.encode(), status=403)

    with serving(answer) as server:
        options = {} if url.startswith("webhdfs") else {"endpoint": server.url, "anon": "true"}
        options |= {"account_name": "me"} if url.startswith("az") else {}
        place = url.format(port=server.port)
        with pytest.raises(pqcache.SourceError) as error:
            pqcache.sync(place, tmp_path / "cache", options=options, timeout=5)
    assert error.value.exit_code == (LATER if says else 1)
    assert says in error.value.reason
    assert len(server.asked) <= 2


@pytest.mark.parametrize("url", ["s3://lake/shop", "pqcache+http://lake.test/shop", "webhdfs://lake.test:1/shop"])
@pytest.mark.parametrize(("number", "code"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, LATER)])
def test_a_host_that_does_not_exist_is_not_waited_for(
    url: str, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def no_host(host: object, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror(number, "Name or service not known" if code == 1 else "Temporary failure")

    monkeypatch.setattr(socket, "getaddrinfo", no_host)
    options = {"endpoint": "http://lake.test:1", "key": "k", "secret": "s"} if url.startswith("s3") else {}
    with pytest.raises(pqcache.SourceError) as error:
        pqcache.sync(url, tmp_path / "cache", options=options, retries=1)
    assert error.value.exit_code == code, error.value
    assert len(asked) == (1 if code == 1 else 2)
    assert code != 1 or "unknown host" in error.value.reason


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_restarts(bucket: Bucket, tmp_path: Path) -> None:
    """A refused connection may pass, but the first contact of a new cache is not waited for."""
    refused = run_pqcache("sync", "s3://lake/shop", tmp_path / "other", "-o", f"endpoint={closed_port()}")
    assert refused.returncode == LATER
    assert 0 < refused.stderr.count("retrying in") <= 4
    assert "127.0.0.1" in error_of(refused)


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (["busy", "busy"], LATER),
        (["busy", "good"], LATER),
        (["good", "denied"], 1),
        (["busy", "denied"], 1),
        (["vanished", "denied"], 3),
        (["denied", "busy", "vanished"], 1),
        (["good", "good"], 0),
    ],
)
def test_all_tables_are_to_be_done_later_only_if_all_that_failed_are(
    answers: list[str], code: int, tmp_path: Path
) -> None:
    write_shop(tmp_path / "good")
    (tmp_path / "vanished").mkdir()

    def answer(asked: Asked, handler: BaseHTTPRequestHandler) -> None:
        status, body = (503, SLOW_DOWN) if "busy" in asked.path else (403, DENIED)
        reply(handler, body.encode(), status=status)

    with serving(answer) as server:
        root = tmp_path / "caches"
        root.mkdir()
        local = {"good", "vanished"}
        lines = [
            f'[tables.t{number}]\nsource = "{tmp_path / name if name in local else f"s3://{name}/x"}"\n'
            + ("" if name in local else f'options = {{ endpoint = "{server.url}", anon = "true" }}\n')
            for number, name in enumerate(answers)
        ]
        (root / "pqcache.toml").write_text("\n".join(lines))
        done = run_pqcache("sync", "--all", root, "--retries", "0", "-q")
    assert done.returncode == code, done.stderr
