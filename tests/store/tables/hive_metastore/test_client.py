"""The client of the metastore against servers of other versions, with faults, and against servers that are none."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hive_metastore.ttypes import GetTableResult, MetaException, NoSuchObjectException

import pqcache
from pqcache.errors import (
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceIncomplete,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
)
from pqcache.store.repartition.partition_job import make_endpoints
from pqcache.store.tables.base import OpenOptions
from pqcache.store.tables.hive_metastore import BATCH
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import redact
from tests.forked_commands import run_pqcache
from tests.store.tables.hive_metastore.databases import Database, write_ids
from tests.store.tables.hive_metastore.fakes import FakeMetastore, metastore, server

if TYPE_CHECKING:
    from tests.conftest import Bucket


def listed(url: str, timeout: float = 5.0, **options: str) -> list[str]:
    """The paths in a listing of a table."""
    source = open_table(url, OpenOptions(store=options, timeout=timeout))
    try:
        return sorted(file.path for file in source.list())
    finally:
        source.close()


def hold(fake: FakeMetastore, places: Mapping[str, str]) -> None:
    """Have a metastore hold a table ``db.t`` with these partitions: days and locations."""
    database = Database("db", "", fake)
    database.table("t", next(iter(places.values()), "file:/t"), {"dt": "string"})
    database.add("t", *(([day], place) for day, place in places.items()))


@pytest.fixture
def handler(tmp_path: Path) -> FakeMetastore:
    """A metastore's answers about a table of two partitions."""
    fake = FakeMetastore()
    hold(fake, {day: f"file:{write_ids(tmp_path / 't' / f'dt={day}' / 'a.parquet', [int(day)])}" for day in "12"})
    return fake


PATHS = ["dt=1/a.parquet", "dt=2/a.parquet"]


@pytest.mark.parametrize("unknown", ["get_table_req", "get_table"])
def test_an_old_and_a_new_metastore(unknown: str, handler: FakeMetastore) -> None:
    with metastore(handler, unknown=(unknown,)) as port:
        assert listed(f"hive://127.0.0.1:{port}/db.t") == PATHS


def test_many_partitions_are_asked_for_in_batches(handler: FakeMetastore, tmp_path: Path) -> None:
    count = 2 * BATCH
    hold(handler, {f"{day}": f"file:{tmp_path}/t/dt={day}" for day in range(count)})
    with metastore(handler) as port:
        assert listed(f"hive://127.0.0.1:{port}/db.t", timeout=30) == PATHS
    assert handler.asked == [BATCH, BATCH]


def test_a_framed_transport_and_a_login_by_password(handler: FakeMetastore) -> None:
    with metastore(handler, framed=True) as port:
        assert listed(f"hive://127.0.0.1:{port}/db.t", transport="framed") == PATHS
    with metastore(handler, login=(b"alice", b"p:w@1")) as port:
        assert listed(f"hive://127.0.0.1:{port}/db.t", auth="plain", user="alice", password="p:w@1") == PATHS
        assert listed(f"hive://alice:p%3Aw%401@127.0.0.1:{port}/db.t") == PATHS
        said = r"refuses the login .*Error validating the login *alice \*\*\*.*; check user and password"
        with pytest.raises(SourceDenied, match=said):
            listed(f"hive://alice:wrong@127.0.0.1:{port}/db.t")


def test_metastores_are_tried_in_turn(handler: FakeMetastore) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down = f"127.0.0.1:{closed.getsockname()[1]}"
        with metastore(handler) as port:
            assert listed(f"hive://{down},127.0.0.1:{port}/db.t") == PATHS
            with server(lambda client: client.recv(1000) and time.sleep(5)) as silent:
                assert listed(f"hive://127.0.0.1:{silent},127.0.0.1:{port}/db.t", timeout=0.3) == PATHS
        with pytest.raises(
            SourceUnavailable, match=rf"none of 2 metastores answers \({down}: connection refused; {down}"
        ):
            listed(f"hive://{down},{down}/db.t")


def test_errors_of_the_metastore_have_names(handler: FakeMetastore) -> None:
    raised: list[Exception] = [NoSuchObjectException("db.t table not found")]

    def fail(*_: object) -> Any:
        raise raised[0]

    handler.get_table_req = fail  # type: ignore[method-assign]
    with metastore(handler) as port:
        url = f"hive://127.0.0.1:{port}/db.t"
        with pytest.raises(SourceNotFound, match=f"^{url}: the metastore has no such table; check database and name$"):
            listed(url)
        raised[0] = MetaException("org.apache.hadoop.security.AccessControlException: Permission denied: user=x\n at y")
        with pytest.raises(SourceDenied, match=r"Permission denied: user=x; request permission to read this table$"):
            listed(url)
        raised[0] = MetaException("The database is down\x1b[2J")
        with pytest.raises(SourceError, match=r"The database is down%1B\[2J; check the metastore's log$"):
            listed(url)
        raised[0] = MetaException("cannot connect to jdbc:mysql://hive:geheim@db/metastore?password=secret")
        with pytest.raises(SourceError, match=r"cannot connect to jdbc:mysql://\*\*\*@db/metastore\?\*\*\*; check"):
            listed(url)
        raised[0] = RuntimeError("unexpected")
        with pytest.raises(SourceError, match=rf"127.0.0.1:{port}: Internal error; check the metastore's log"):
            listed(url)


def test_answers_that_make_no_table_are_errors(handler: FakeMetastore) -> None:
    with metastore(handler) as port:
        url = f"hive://127.0.0.1:{port}/db.t"
        hold(handler, {"1": "/warehouse/t/dt=1"})
        reason = "has the location '/warehouse/t/dt=1', which names no store"
        with pytest.raises(SourceError, match=f"^{url}/dt=1: {reason}; set it with ALTER TABLE"):
            listed(url)
        hold(handler, {"1": "s5://bucket/x"})
        with pytest.raises(UsageError, match=r"^s5://bucket/x: unknown scheme s5://"):
            listed(url)
        hold(handler, {})
        with pytest.raises(PqcacheError, match="has no partitions in the metastore"):
            listed(url)
        handler.get_table_req = lambda _: GetTableResult()  # type: ignore[method-assign]
        with pytest.raises(SourceError, match="does not answer as a metastore does"):
            listed(url)


def test_partitions_that_are_named_and_not_sent_are_no_deletions(handler: FakeMetastore, tmp_path: Path) -> None:
    """Two that are gone when they are asked for are left out; of two that are there, one is not sent."""
    values = [f"2026/11/{number:02}" for number in range(1, 6)]
    hold(handler, dict.fromkeys(values, f"file:{tmp_path}/t/dt=1"))
    partitions, hidden = handler.get_partitions_by_names, list[str]()

    def fewer(database: str, name: str, asked: list[str]) -> list[Any]:
        for value in values[1:3]:
            handler.partitions["t"].pop((value,), None)
        return [found for found in partitions(database, name, asked) if found.values[0] not in hidden]

    handler.get_partitions_by_names = fewer  # type: ignore[method-assign]
    with metastore(handler) as port:
        url = f"hive://127.0.0.1:{port}/db.t"
        assert {path.rpartition("/")[0] for path in listed(url)} == {
            f"dt={value}".replace("/", "%2F") for value in (values[0], *values[3:])
        }
        hidden.append(values[3])
        reason = f"127.0.0.1:{port} names 3 partitions and sends 2, not dt=2026%2F11%2F04; nothing was published"
        with pytest.raises(SourceIncomplete, match=f"^{url}: {reason}"):
            listed(url)


@pytest.mark.parametrize("properties", ["default", "insert_only"])
def test_transactional_tables_are_refused(handler: FakeMetastore, properties: str) -> None:
    handler.tables["t"].parameters = {"transactional": "TRUE", "transactional_properties": properties}
    with metastore(handler) as port:
        reason = r"is a transactional Hive table, whose .*; write it to an external table of Parquet"
        with pytest.raises(UsageError, match=reason):
            listed(f"hive://127.0.0.1:{port}/db.t")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed the connection; it may need -o auth=kerberos, -o auth=plain or -o transport=framed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, "does not answer as a metastore does"),
        (b"\xff" * 200, "does not answer as a metastore does"),
        (b"\x80\x01\x00\x02\x00\x00\x00\x03abc\x00\x00\x00\x00\x00", r"does not answer as .* \(it answers abc\)"),
        (b"\x80\x01\x00\x02\x00\x00\x00\x0dget_table_req\x00\x00\x00\x00\x0c\x00\x00\x0f" + b"\x7f" * 99, "does not "),
    ],
)  # fmt: skip
def test_a_server_that_is_no_metastore_is_a_clear_error(answer: bytes, reason: str) -> None:
    def serve(client: socket.socket) -> None:
        client.recv(10)
        client.sendall(answer)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1000):
            pass

    with server(serve) as port, pytest.raises(SourceError, match=rf"127.0.0.1:{port}:? {reason}"):
        listed(f"hive://127.0.0.1:{port}/db.t")


def test_a_silent_server_and_one_that_drips_are_given_up(handler: FakeMetastore) -> None:
    def drip(client: socket.socket) -> None:
        client.recv(10)
        for byte in b"\x80\x01\x00\x02" + b"\x00" * 10_000:
            client.sendall(bytes([byte]))
            time.sleep(0.05)

    with (
        server(lambda client: time.sleep(5)) as port,
        pytest.raises(SourceUnavailable, match=r"no answer within 0.2 s"),
    ):
        listed(f"hive://127.0.0.1:{port}/db.t", timeout=0.2)
    with server(drip) as port, pytest.raises(SourceUnavailable, match="responds too slowly"):
        listed(f"hive://127.0.0.1:{port}/db.t", timeout=0.2)


@pytest.mark.s3
def test_options_go_to_the_metastore_or_to_the_store_of_a_location(
    handler: FakeMetastore, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (tmp_path / "t" / "dt=1" / "a.parquet").read_bytes()
    for key in ("deep/dt=a%2Fb/a.parquet", "deep/dt=a%2Fb/_SUCCESS", "deepest/a.parquet"):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=key, Body=data)
    Database("db", "", handler).add(
        "t", (["3"], f"s3a://{s3_bucket.name}/deep/dt=a%2Fb/"), (["4"], f"s3n://{s3_bucket.name}/nothing")
    )
    options = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "transport": "buffered", "dfs.x": "1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    found: list[Any] = []
    with metastore(handler) as port:
        url = f"hive://127.0.0.1:{port}/db.t"
        report = pqcache.sync(url, tmp_path / "cache", options=options, on_event=found.append)
        assert (report.added, report.rows) == (3, 3)
        assert not pqcache.sync(tmp_path / "cache").published
        assert pqcache.inspect(url, options=options).rows == 3
    assert sorted(path.parent.name for path in (tmp_path / "cache/current/").glob("*/*.parquet")) == [
        "dt=1",
        "dt=2",
        "dt=3",
    ]
    assert sorted(event.message for event in found if hasattr(event, "message")) == [
        f"{url}: -o dfs.x was not used, by the metastore or by the stores of the locations",
        f"{url}: no files in 1 of 4 partitions (dt=4 at s3://{s3_bucket.name}/nothing)",
    ]


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("hive://h:9083", {}, "names no table of a metastore; write hive://HOST:9083/DATABASE.TABLE"),
        ("hive://h:9083/t", {}, "names no table of a metastore"),
        ("hive://h/a.b.c", {}, "names no table of a metastore"),
        ("hive://u:1/2p@h/a.b", {}, "hive://***@h/a.b: names no table"),
        ("hive:///a.b", {}, "names no table of a metastore"),
        ("hive://h:x/a.b", {}, "'h:x' is not HOST:PORT"),
        ("hive://h:70000/a.b", {}, "'h:70000' is not HOST:PORT"),
        ("hive://h:1,,g/a.b", {}, "'' is not HOST:PORT"),
        ("hive://h/a.b", {"transport": "http"}, "-o transport=http: choose buffered or framed"),
        ("hive://h/a.b", {"auth": "ldap"}, "-o auth=ldap: choose none, plain or kerberos"),
        ("hive://h/a.b", {"auth": "plain"}, "-o auth=plain: needs a user and a password; give them"),
        ("hive://u:p@h/a.b", {"auth": "none"}, "-o password: is given with -o auth=none"),
        ("hive://u:p@h/a.b", {"transport": "framed"}, "-o transport=framed: does not go with -o auth=plain"),
        (
            "hive://h/a.b",
            {"auth": "kerberos", "principal": "hive"},
            "-o principal=hive: is not a Kerberos principal; write",
        ),
    ],
)
def test_wrong_urls_and_options_are_refused(url: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        open_table(url, OpenOptions(store=options))
    assert message in str(error.value)
    assert "p@" not in str(error.value)


def test_what_a_login_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kerberos", None)
    with pytest.raises(UsageError, match=r"^-o auth=kerberos: needs pure-sasl and kerberos; .* 'pure-sasl\[gssapi\]'$"):
        open_table("hive://h/a.b", OpenOptions(store={"auth": "kerberos"}))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "thrift"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "pqcache.store.tables.hive_metastore", raising=False)
    monkeypatch.setitem(sys.modules, "thrift", None)
    with pytest.raises(UsageError, match=r"^hive://h/a.b: needs thrift; install .*pip install 'pqcache\[hive\]'$"):
        open_table("hive://h/a.b", OpenOptions())


def test_the_command_line(handler: FakeMetastore, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with metastore(handler, login=(b"alice", b"geheim")) as port:
        hosts = f"127.0.0.1:{port},127.0.0.1:1"
        url, shown = f"hive://alice:geheim@{hosts}/db.t", f"hive://alice@{hosts}/db.t"
        assert redact(url) == shown
        first = run_pqcache("sync", url, cache, "--json")
        assert first.returncode == 0, first.stderr
        assert json.loads(first.stdout.splitlines()[-1])["source"] == shown
        again = run_pqcache("sync", cache, "-o", "password=geheim")
        assert again.returncode == 0, again.stderr
        refused = run_pqcache("sync", cache, "-o", "password=falsch", "--retries", "0")
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        said = refused.stderr.partition(" cache: ")[2]
        assert said.startswith(f"pqcache: error: {shown}: 127.0.0.1:{port} refuses the login")
        inspected = run_pqcache("inspect", url)
        assert inspected.returncode == 0
        assert "dt=2" in inspected.stdout
        everything = [cache / "pqcache.toml", *(cache / "current" / "_pqcache").iterdir()]
        assert not any(b"geheim" in path.read_bytes() for path in everything if path.is_file())
        for run in (first, again, refused, inspected):
            assert "geheim" not in run.stdout + run.stderr
            assert "falsch" not in run.stderr
        text = (cache / "pqcache.toml").read_text()
        assert f'source = "{shown}"' in text
    down = run_pqcache("sync", cache, "-o", "password=geheim", "--retries", "0")
    assert (down.returncode, down.stderr.count("\n")) == (75, 1)
    assert "connection refused" in down.stderr
    wrong = run_pqcache("sync", "hive://127.0.0.1/table", cache)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_a_table_is_repartitioned_to_a_directory(handler: FakeMetastore, tmp_path: Path) -> None:
    with metastore(handler, framed=True) as port:
        url = f"hive://127.0.0.1:{port}/db.t"
        report = pqcache.repartition(url, tmp_path / "to", row_group_size="1MB", options={"transport": "framed"})
    assert (report.rows, sorted(path.name for path in (tmp_path / "to").glob("dt=*"))) == (2, ["dt=1", "dt=2"])


def test_options_of_a_metastore_are_not_those_of_a_target() -> None:
    options = {"auth": "kerberos", "dfs.x": "1", "endpoint": "http://127.0.0.1:1"}
    for target, expected in (("hdfs://h/t", ["dfs.x"]), ("s3://b/t", ["endpoint"]), ("/t", [])):
        endpoints = make_endpoints("hive://h/a.b", target, options, None)
        assert (endpoints.source_options, list(endpoints.target_options)) == (options, expected)
