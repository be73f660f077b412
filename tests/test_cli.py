"""The command line as a person and as cron meet it: lines, JSON, exit codes, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from tests.datasets import rows_of, write_day, write_shop
from tests.forked_commands import run_pqcache
from tests.remote import make_remote

if TYPE_CHECKING:
    from tests.conftest import Bucket
    from tests.servers.hdfs import Hdfs

PQCACHE = [sys.executable, "-m", "pqcache"]


def run(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run pqcache without a terminal; what it must never do is show a traceback."""
    result = run_pqcache(*arguments, env={**os.environ, **(env or {})})
    assert "Traceback" not in result.stdout + result.stderr
    return result


def error_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the one line of an error, after checking that it is one and that nothing else was said."""
    assert result.returncode == code, result.stderr
    lines = [line for line in map(unstamped, result.stderr.splitlines()) if not line.startswith("retrying")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("pqcache: error: ")
    assert result.stdout == ""
    return lines[0]


def unstamped(line: str) -> str:
    """Return a line without the time and the cache's name, with which lines of a run begin where no terminal is."""
    return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \S+: ", "", line)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop")


def test_one_line_on_success_also_when_there_is_nothing_to_do(shop: Path, tmp_path: Path) -> None:
    first = run("sync", shop, tmp_path / "cache")
    assert first.returncode == 0
    assert first.stderr == ""
    (line,) = first.stdout.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ cache: synced 9 new files in dt=2026-11-01, ", line)
    assert "3,600 rows" in line
    (line,) = map(unstamped, run("sync", tmp_path / "cache").stdout.splitlines())
    assert line.startswith("nothing to do in ")
    (line,) = map(unstamped, run("sync", tmp_path / "cache", "--dry-run").stdout.splitlines())
    assert line == "nothing to do; not taken: 5 hidden"
    (line,) = run("repartition", tmp_path / "cache", "--row-group-size", "32k").stdout.splitlines()
    line = unstamped(line)
    assert line.startswith("repartitioned 3 directories in ")
    (line,) = run("repartition", tmp_path / "cache", "--row-group-size", "32KB").stdout.splitlines()
    assert unstamped(line).startswith("nothing to do")
    rows = ["--where", "dt > '2026-11-01'", "--row-group-size", "16KB"]
    (line,) = map(unstamped, run("sync", tmp_path / "cache", *rows).stdout.splitlines())
    assert line.startswith("synced 3 removed files in dt=2026-11-01, 0 B fetched, 2 directories rewritten in ")


def test_quiet_is_quiet(shop: Path, tmp_path: Path) -> None:
    for arguments in (["sync", shop, tmp_path / "c", "-q"], ["repartition", tmp_path / "c", "--quiet"]):
        result = run(*arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_json_is_one_object_per_event_and_a_summary(shop: Path, tmp_path: Path) -> None:
    events = [json.loads(line) for line in run("sync", shop, tmp_path / "c", "--json").stdout.splitlines()]
    assert [event["event"] for event in events if event["event"] != "fetched"] == [
        "started",  # to list
        "listed",
        "started",
        "started",  # to list again
        "published",
        "summary",
    ]
    assert len([event for event in events if event["event"] == "fetched"]) == 9
    summary = events[-1]
    assert set(summary) == {
        "event", "cache", "source", "snapshot", "published", "dry_run", "added", "changed", "removed",
        "unchanged", "fetched_again", "rewritten", "fetched_bytes", "files", "row_groups", "rows", "bytes", "seconds",
        "shard", "version", "newest", "newest_of", "previous_source", "skipped", "touched", "passed_over", "expect",
        "candidate",
    }  # fmt: skip
    assert (summary["added"], summary["rows"], summary["published"]) == (9, 3600, True)
    failed = run("sync", tmp_path / "nowhere", tmp_path / "d", "--json")
    _, event = [json.loads(line) for line in failed.stdout.splitlines()]
    assert (event["event"], event["kind"], event["exit_code"]) == ("error", "SourceNotFound", 1)


def test_inspect_shows_and_tells(shop: Path, tmp_path: Path) -> None:
    result = run("inspect", shop, "--block-size", "10k", env={"COLUMNS": "80"})
    assert result.returncode == 0
    assert "3 partitions, 9 files, 3,600 rows" in result.stdout
    assert "18 of 18 row groups exceed 10 KB" in result.stdout
    assert f"pqcache repartition {shop} DEST --row-group-size 10KB" in result.stdout
    assert json.loads(run("inspect", shop, "--json").stdout)["rows"] == 3600


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_output_in_any_locale(encoding: str, shop: Path) -> None:
    result = subprocess.run(
        [*PQCACHE, "inspect", str(shop)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )
    assert result.returncode == 0
    assert ("█" in result.stdout) is (encoding == "utf-8")


def test_usage_errors(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for arguments, part in [
        (["sync", "nowhere://bucket/x", cache], "unknown scheme nowhere://"),
        (["sync", cache], "not a pqcache yet"),
        (["sync", shop, cache, "--row-group-size", "5x"], "--row-group-size 5x: not a size; write it like"),
        (["sync", shop, cache, "--row-group-size", "0"], "--row-group-size 0: has to be at least 1"),
        (["sync", shop, cache, "--where", "dt >"], "not a complete condition"),
        (["sync", shop, cache, "--where", "region = 'kr'"], "no column 'region'; there are: id, "),
        (["sync", shop, cache, "-o", "endpoint"], "KEY=VALUE"),
        (["sync", "s3://", cache], "no bucket"),
        (["sync", "", cache], "an empty path"),
        (["inspect", "file://"], "an empty path"),
        (["inspect", "webhdfs://u:1[x"], "webhdfs://u:1[x: has no valid host and port; write webhdfs://HOST:PORT/PATH"),
        (["sync", "s3://[x", cache], "write s3://BUCKET/PATH"),
        (["repartition", shop, "hdfs://h:x/y"], "write hdfs://HOST:PORT/PATH"),
        (["inspect", "webhdfs://h:1/x?delegation=S3CR3T"], "x?delegation=***: has a secret in its path"),
        (["repartition", shop], "needs a directory to write to"),
    ]:
        assert part in error_of(run(*arguments), 2)
    for arguments in (
        ["sync"],
        ["sync", shop, cache, "--jobs", "0"],
        ["fetch"],
        ["sync", shop, cache, "--nope"],
    ):
        result = run(*arguments)
        assert result.returncode == 2
        assert unstamped(result.stderr).startswith("pqcache: error: ")
    assert not cache.exists()


def test_nothing_to_publish_is_3(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no Parquet file" in error_of(run("sync", tmp_path / "empty", tmp_path / "c"), 3)
    assert "no partition satisfies" in error_of(run("sync", shop, tmp_path / "c", "--where", "dt > '3'"), 3)


def test_not_parquet_and_no_permission_are_1(shop: Path, tmp_path: Path) -> None:
    (shop / "dt=2026-11-02" / "part-00001.parquet").write_bytes(b"hello")
    line = error_of(run("sync", shop, tmp_path / "c"), 1)
    assert "dt=2026-11-02/part-00001.parquet: not a Parquet file" in line
    assert "part-00001.parquet" in error_of(run("inspect", shop), 1)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run_pqcache("inspect", tmp_path / "nowhere", env={**os.environ, "PQCACHE_DEBUG": "1"})
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs", "s3"])
def test_a_server_that_is_down_is_named(scheme: str, tmp_path: Path) -> None:
    port = free_port()
    url = f"{scheme}://127.0.0.1:{port}/x"
    extra = ["-o", f"endpoint=http://127.0.0.1:{port}", "-o", "key=a", "-o", "secret=b"] if scheme == "s3" else []
    url = "s3://bucket/x" if scheme == "s3" else url
    line = error_of(run("sync", url, tmp_path / "c", *extra), 75)
    assert str(port) in line
    assert "check" in line
    assert not (tmp_path / "c").exists()


def test_a_server_that_never_answers_is_given_up_within_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        s3 = ["s3://bucket/x", "-o", f"endpoint=http://{place}", "-o", "key=a", "-o", "secret=b"]
        runs = [
            subprocess.Popen([*PQCACHE, "sync", *urls, str(tmp_path / "c")], stderr=subprocess.PIPE, text=True)
            for urls in ([f"hdfs://{place}/x"], [f"webhdfs://{place}/x"], s3)
        ]
        for process in runs:
            _, stderr = process.communicate(timeout=60)  # three tries of the usual 30 s would take 90
            assert process.returncode == 75
            assert len(stderr.splitlines()) == 1, stderr


@pytest.mark.hdfs
def test_errors_of_hdfs(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> None:
    assert "no such file or directory" in error_of(run("sync", f"{hdfs_dir}/nope", tmp_path / "c"), 1)
    assert "no Parquet file" in error_of(run("sync", hdfs_dir, tmp_path / "c"), 3)
    rpc, http = hdfs.url.rpartition(":")[2], hdfs.webhdfs_url.rpartition(":")[2]
    assert "RPC port" in error_of(run("sync", f"hdfs://127.0.0.1:{http}/x", tmp_path / "c"), 75)
    assert "HTTP port" in error_of(run("sync", f"webhdfs://127.0.0.1:{rpc}/x", tmp_path / "c"), 1)


@pytest.mark.s3
def test_errors_of_s3(s3_bucket: Bucket, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    wrong = {"AWS_SECRET_ACCESS_KEY": "wrong"}
    assert "access denied" in error_of(run("sync", f"{s3_bucket.url}/x", cache, env=wrong), 1)
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert "no credentials" in error_of(run("sync", f"{s3_bucket.url}/x", cache, env=none), 1)
    assert "no such bucket" in error_of(run("sync", "s3://not-there/x", cache), 1)
    assert "access denied" in error_of(run("sync", f"{s3_bucket.url}/x", cache, "-o", "anon=true"), 1)
    assert "no such option" in error_of(run("sync", f"{s3_bucket.url}/x", cache, "-o", "colour=red"), 2)
    s3_bucket.client.put_object(Bucket=s3_bucket.name, Key="x/../../evil.parquet", Body=b"x")
    line = error_of(run("sync", f"{s3_bucket.url}/x", cache), 1)
    assert "evil.parquet: has a '.' or '..' segment" in line
    assert not cache.exists()


@pytest.mark.s3
def test_no_secret_is_written_anywhere(
    s3_bucket: Bucket, s3_env: Mapping[str, str], shop: Path, tmp_path: Path
) -> None:
    for path in shop.rglob("*.parquet"):
        s3_bucket.client.upload_file(str(path), s3_bucket.name, f"x/{path.relative_to(shop)}")
    key, secret = s3_env["AWS_ACCESS_KEY_ID"], s3_env["AWS_SECRET_ACCESS_KEY"]
    empty = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    for number, how in enumerate(
        [
            [f"{s3_bucket.url}/x", "-o", f"key={key}", "-o", f"secret={secret}"],
            [f"s3://{key}:{secret}@{s3_bucket.name}/x"],
        ]
    ):
        cache = tmp_path / f"c{number}"
        result = run("sync", how[0], cache, "--json", *how[1:], env=empty)
        assert result.returncode == 0, result.stderr
        written = b"".join(p.read_bytes() for p in cache.rglob("*") if p.is_file())
        written += subprocess.run(["zstdcat", cache / "history.jsonl.zst"], capture_output=True).stdout
        assert secret.encode() not in written + result.stdout.encode() + result.stderr.encode()
        failed = run("sync", cache, env=empty)
        assert "no credentials" in error_of(failed, 1)


@pytest.mark.hdfs
def test_lock_and_interrupt(hdfs: Hdfs, request: pytest.FixtureRequest, shop: Path, tmp_path: Path) -> None:
    """A run stopped by SIGTERM while its source stalls ends within seconds, with nothing changed."""
    cache = tmp_path / "cache"
    for remote in make_remote("hdfs", request, tmp_path):
        remote.upload(shop)
        run("sync", remote.url, cache)
        before = os.readlink(cache / "current")
        write_day(shop, "2026-11-01", seed=7)
        remote.upload(shop)
        with hdfs.paused("datanode"):
            process = subprocess.Popen([*PQCACHE, "sync", str(cache)], stderr=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 30
            while not any((cache / "tmp").glob("*/fetch/*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert error_of(run("sync", cache), 75).endswith("wait for it with --wait 10m")
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "interrupted" in stderr
        assert os.readlink(cache / "current") == before
        assert run("sync", cache).returncode == 0
        assert rows_of(cache / "current") == rows_of(shop)
        assert not any((cache / "tmp").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sync"], r"Missing argument 'SOURCE'; 'pqcache sync -h' shows the usage"),
        (["syn"], r"No such command 'syn'.*'sync'"),
        (["sync", "--frob"], r"No such option: --frob"),
        (["sync", "a", "b", "--jobs", "x"], r"--jobs x: not a whole number"),
        (["gc", ""], r"CACHE: an empty path"),  # "$CACHE" where it is not set; not the working directory
        (["sync", "lake", ""], r"CACHE: an empty path"),
        (["bench", ""], r"TARGET: an empty path"),
    ],
)
def test_what_the_parser_refuses_is_one_line(arguments: list[str], message: str) -> None:
    assert re.search(message, error_of(run(*arguments), 2))


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("pqcache 0.")
    for command in ("sync", "repartition", "inspect"):
        result = run(command, "--help", env={"COLUMNS": "80"})
        assert result.returncode == 0
        assert max(map(len, result.stdout.splitlines())) <= 80


NEVER = (
    "pandas",
    "tenacity",
    "sqlglot",
    "rich",
    "pydantic",
    "fsspec",
    "aiohttp",
    "pqcache.parquet.rewrite.directory",
    "pqcache.store.key_index",
)
NO_ARROW = (
    "pyarrow",
    "numpy",
    "tomlkit",
    "logging",
    "concurrent.futures",
    "mmap",
    "pqcache.store.sync.incremental",
    "pqcache.store.sync.build_snapshot",
)


def test_a_command_imports_only_what_it_needs(tmp_path: Path) -> None:
    """Most of the time of a sync that finds nothing to do would go into modules that it does not use."""
    write_day(tmp_path / "lake", "2026-11-01", files=1, rows=10)
    lake, cache = str(tmp_path / "lake"), str(tmp_path / "cache")
    for words, unused in (
        (["sync", lake, cache, "--newest", "free", "-q"], (*NEVER, "pyarrow.dataset")),
        (["sync", lake, cache], (*NEVER, *NO_ARROW)),
        (["sync", cache, "--row-group-size", "1MB", "-q"], ("sqlglot", "rich", "tenacity", "pydantic")),
        (["sync", cache, "--json"], (*NEVER, *NO_ARROW)),
        (["sync", cache, "--dry-run"], (*NEVER, *NO_ARROW)),
        (["gc", cache], (*NEVER, *NO_ARROW)),
        (["log", cache, "--json"], (*NEVER, *NO_ARROW)),
        (["--version"], (*NEVER, *NO_ARROW, "pqcache.store")),
    ):
        code = (
            "import json, sys; from pqcache.cli import run, hide_pandas; hide_pandas(); "
            "code = run(sys.argv[1:]); "
            f"print(json.dumps([code, [name for name in {unused!r} if name in sys.modules]]))"
        )
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout.splitlines()[-1]) == [0, []], f"{words}: {done.stderr}"


@pytest.mark.parametrize("source", ["lake", "hdfs://u:topsecret@127.0.0.1:1/x", "s3://lake/x"])
def test_source_and_cache_in_the_wrong_order_are_named(source: str, shop: Path, tmp_path: Path) -> None:
    shop.rename(tmp_path / "lake")
    pqcache.sync(str(tmp_path / "lake"), tmp_path / "cache")
    where = source if "://" in source else str(tmp_path / source)
    message = error_of(run("sync", str(tmp_path / "cache"), where), 2)
    assert "'pqcache sync SOURCE CACHE'" in message
    assert "topsecret" not in message
    with pytest.raises(pqcache.UsageError, match=r"the two may be swapped: write"):
        pqcache.sync(str(tmp_path / "cache"), where)
