"""Errors that may pass: how long they are retried, and that exit code 75 says that a later run may get on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from itertools import repeat
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import pqcache
from tests.datasets import files_of, rows_of, write_shop
from tests.forked_commands import run_pqcache
from tests.store.drivers.fake_s3 import FakeS3, fake_s3, listing_of
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


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    write_shop(tmp_path / "lake", files=2, rows=10)
    objects = {f"shop/{path}": (tmp_path / "lake" / path).read_bytes() for path in files_of(tmp_path / "lake")}
    with fake_s3(listing_of(objects), objects) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.options["endpoint"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        yield found


def error_of(done: CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "refused", "first"),
    [(["--retries", "10"], 6, True), (["--retry-for", "1m"], 7, False)],
)
def test_a_listing_is_retried_as_often_as_was_asked_for(
    options: list[str], refused: int, first: bool, bucket: FakeS3, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    if not first:
        assert run_pqcache("sync", "s3://lake/shop", cache).returncode == 0
    bucket.refusals = repeat((503, SLOW_DOWN), refused)
    done = run_pqcache("sync", "s3://lake/shop", cache, *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("retrying in") == refused
    assert next(bucket.refusals, None) is None
    assert len(rows_of(cache / "current")) == 60


def test_retries_end(bucket: FakeS3, tmp_path: Path) -> None:
    bucket.refusals = repeat((503, SLOW_DOWN))
    for options in ({"retries": 0}, {"retry_for": 0}, {"retries": 2, "retry_for": "10m"}):
        bucket.asked = 0
        with pytest.raises(pqcache.SourceUnavailable, match="503 SlowDown") as error:
            pqcache.sync("s3://lake/shop", tmp_path / "cache", **options)  # type: ignore[arg-type]
        assert error.value.exit_code == LATER
        assert bucket.asked == 1 + int(str(options.get("retries", 0)))
    with pytest.raises(pqcache.UsageError, match="not a duration"):
        pqcache.sync("s3://lake/shop", tmp_path / "cache", retry_for="soon")


def test_what_may_pass_has_an_exit_code_of_its_own(bucket: FakeS3, tmp_path: Path) -> None:
    old = tmp_path / "old"
    assert run_pqcache("sync", "s3://lake/shop", old).returncode == 0
    for answer, code, says in (
        ((503, SLOW_DOWN), LATER, "the server answers 503 SlowDown"),
        ((403, SKEWED), LATER, "the clocks of this machine and of the server differ too much (RequestTimeTooSkewed)"),
        ((400, EXPIRED), LATER, "the credentials have expired (ExpiredToken)"),
        ((403, DENIED), 1, "access denied (403 AccessDenied)"),
        ((404, NO_BUCKET), 1, "no such bucket"),
    ):
        for cache in (old, tmp_path / "new"):
            bucket.refusals, bucket.asked = repeat(answer), 0
            done = run_pqcache("sync", "s3://lake/shop", cache, "--retries", "2")
            assert done.returncode == code
            assert says in error_of(done)
            assert bucket.asked == (3 if answer[0] == 503 else 1) or code != LATER, "only a busy server is asked again"
    assert len(rows_of(old / "current")) == 60


@pytest.mark.parametrize("url", ["gs://lake/shop", "az://lake/shop", "webhdfs://127.0.0.1:{port}/shop"])
def test_expired_tokens_and_wrong_clocks_are_named(url: str, tmp_path: Path) -> None:
    said = ""

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
        for said, says in (
            ("token (token for me: HDFS_DELEGATION_TOKEN owner=me) is expired", "the credentials have expired"),
            ("Token has been expired or revoked.", "the credentials have expired"),
            ("Lifetime validation failed. The token is expired.", "the credentials have expired"),
            ("Signature not valid in the specified time frame", "the credentials have expired"),
            ("GSSAPI: Ticket expired", "the credentials have expired"),
            ("GSSAPI: Clock skew too great", "the clocks of this machine and of the server differ"),
            ("User me may not read /wh/expired token/dt=1", ""),
        ):
            server.asked.clear()
            with pytest.raises(pqcache.SourceError) as error:
                pqcache.sync(url.format(port=server.port), tmp_path / "cache", options=options, timeout=5)
            assert error.value.exit_code == (LATER if says else 1), said
            assert says in error.value.reason
            assert len(server.asked) <= 2


@pytest.mark.parametrize("url", ["s3://lake/shop", "pqcache+http://lake.test/shop", "webhdfs://lake.test:1/shop"])
def test_a_host_that_does_not_exist_is_not_waited_for(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    options = {"endpoint": "http://lake.test:1", "key": "k", "secret": "s"} if url.startswith("s3") else {}
    for number, code, tries in ((socket.EAI_NONAME, 1, 1), (socket.EAI_AGAIN, LATER, 2)):

        def no_host(host: object, *_: object, number: int = number, **__: object) -> None:
            asked.append(host)
            raise socket.gaierror(number, "not known")

        monkeypatch.setattr(socket, "getaddrinfo", no_host)  # no test asks a name server
        asked.clear()
        with pytest.raises(pqcache.SourceError) as error:
            pqcache.sync(url, tmp_path / "cache", options=options, retries=1)
        assert error.value.exit_code == code, error.value
        assert len(asked) == tries
        assert code != 1 or "unknown host" in error.value.reason


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_the_first_contact_of_a_new_cache_is_not_waited_for(tmp_path: Path) -> None:
    options = [f"endpoint={closed_port()}", "key=k", "secret=s"]
    words = [word for option in options for word in ("-o", option)]
    refused = run_pqcache("sync", "s3://lake/shop", tmp_path / "cache", *words)
    assert refused.returncode == LATER
    assert 0 < refused.stderr.count("retrying in") <= 4
    assert "127.0.0.1" in error_of(refused)


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (["busy", "good", "busy"], LATER),
        (["busy", "denied"], 1),
        (["vanished", "denied"], 3),
        (["denied", "busy", "vanished"], 1),
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
