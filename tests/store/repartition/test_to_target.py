"""Repartition to a store: whole partitions or nothing, runs that were stopped, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Advanced, Event, Rewrote, Warned
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.store.drivers.base import HIDDEN
from pqcache.store.drivers.registry import open_source, open_target
from pqcache.store.repartition.partition_job import (
    RUN,
    PartitionJob,
    claim,
    make_endpoints,
    read_records,
    run_job,
)
from tests.conftest import Bucket
from tests.datasets import files_of, shop_table, write_shop
from tests.remote import Remote, make_remote

LIMIT = 32 << 10
STORES = [
    "path",
    pytest.param("hdfs", marks=pytest.mark.hdfs),
    pytest.param("s3", marks=pytest.mark.s3),
    pytest.param("gs", marks=[pytest.mark.gcs, pytest.mark.deep]),
    pytest.param("az", marks=pytest.mark.azure),
]


@pytest.fixture(params=STORES)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    """An empty place at each store that can be written."""
    yield from make_remote(request.param, request, tmp_path)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", rows=200)


def contents(url: str) -> dict[str, bytes]:
    """Return every file below a URL, hidden ones included."""
    source = open_source(url)
    try:
        found = list(source.list())
        return {file.path: b"".join(source.read(file.path, 0, file.identity.size)) for file in found}
    except pqcache.SourceNotFound:
        return {}
    finally:
        source.close()


def expected(shop: Path, tmp_path: Path, **how: object) -> dict[str, bytes]:
    """Return what a run to a local directory makes."""
    out = tmp_path / "expected"
    pqcache.repartition(shop, out, row_group_size=LIMIT, **how)  # type: ignore[arg-type]
    return {path: (out / path).read_bytes() for path in files_of(out)}


def job_for(source: Path, target: str, directory: str, how: RewriteOptions, key: str = "k") -> PartitionJob:
    files = tuple(
        sorted(
            (f for f in open_source(str(source)).list() if f.path.startswith(f"{directory}/part")),
            key=lambda f: f.path,
        )
    )
    return PartitionJob(
        endpoints=make_endpoints(str(source), target, {}, None),
        directory=directory,
        files=files,
        options=how,
        key=key,
        is_leaf=True,
        version=pqcache.__version__,
    )


def test_a_run_that_failed_continues_and_any_store_holds_the_same_bytes(
    remote: Remote, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"  # of this test alone: others that run at the same time have spools, too
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    whole = expected(shop, tmp_path)
    bad = shop / "dt=2026-11-03" / "part-00001.parquet"
    good = bad.read_bytes()
    bad.write_bytes(good[:4] + b"\xff" * 20 + good[24:])  # the footer is read before anything is begun
    events: list[Event] = []
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet"):
        pqcache.repartition(shop, remote.url, row_group_size=LIMIT, on_event=events.append)
    (message,) = [e.message for e in events if isinstance(e, Warned) and "are finished" in e.message]
    assert "2 of 3 partition directories are finished; the output so far is in " in message
    left = message.partition(" is in ")[2].partition(", and the same")[0]
    assert left == f"{remote.url}/_pqcache" if "://" in remote.url else Path(left).is_dir(), left
    seen = {path: data for path, data in contents(remote.url).items() if not path.startswith(HIDDEN)}
    if "://" in remote.url:
        assert seen == {path: data for path, data in whole.items() if "dt=2026-11-03" not in path}
    else:
        assert not seen  # a local directory appears when all of it is there
    bad.write_bytes(good)
    plan = pqcache.repartition(shop, remote.url, row_group_size=LIMIT, dry_run=True)
    assert (plan.rewritten, plan.kept) == (1, 2)
    report = pqcache.repartition(shop, remote.url, row_group_size=LIMIT)
    assert (report.rewritten, report.kept, report.rows, report.files_after) == (1, 2, 1800, 3)
    assert contents(remote.url) == whole
    assert not list(temporary.iterdir())
    with pytest.raises(pqcache.UsageError, match="exists and is not empty"):
        pqcache.repartition(shop, remote.url, row_group_size=LIMIT)


def test_a_file_that_changes_while_it_is_rewritten_is_not_published(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, files=1, rows=200)

    def touch(event: Event) -> None:
        if isinstance(event, Advanced) and event.phase == "rewrite" and event.amount:
            os.utime(next(shop.rglob("*.parquet")))

    with pytest.raises(pqcache.SourceIncomplete, match="is not the file that was listed"):
        pqcache.repartition(shop, tmp_path / "out", row_group_size=LIMIT, on_event=touch)
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize("remote", STORES[:1], indirect=True)
def test_what_changed_between_two_runs_is_done_again(remote: Remote, shop: Path, tmp_path: Path) -> None:
    bad = shop / "dt=2026-11-03" / "part-00001.parquet"
    bad.write_bytes(b"not parquet")
    with pytest.raises(pqcache.ParquetError):
        pqcache.repartition(shop, remote.url, row_group_size=LIMIT)
    pq.write_table(shop_table(900_000, 500), bad)
    pq.write_table(shop_table(800_000, 2500), shop / "dt=2026-11-01" / "part-00001.parquet")
    shutil.rmtree(shop / "dt=2026-11-02")
    report = pqcache.repartition(shop, remote.url, row_group_size=LIMIT)
    assert (report.directories, report.kept) == (2, 0)
    assert contents(remote.url) == expected(shop, tmp_path)


def test_a_partition_is_seen_whole_or_not_at_all(remote: Remote, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is at the store before commit, none of it in sight."""
    target = open_target(remote.url)
    target.begin()
    kind = type(target)
    commit, looks = kind.commit, []

    def looking(self: object, token: str, directory: str, staged: object, whole: bool) -> None:
        looks.append([path for path in contents(remote.url) if not path.startswith(HIDDEN)])
        commit(self, token, directory, staged, whole)  # type: ignore[arg-type]
        looks.append([path for path in contents(remote.url) if not path.startswith(HIDDEN)])

    monkeypatch.setattr(kind, "commit", looking)
    monkeypatch.setattr("pqcache.parquet.rewrite.directory._MIN_FILE", 0)
    monkeypatch.setattr("pqcache.parquet.rewrite.directory._FILE_ROW_GROUPS", 1)
    done = run_job(job_for(shop, remote.url, "dt=2026-11-01", RewriteOptions(row_group_size=LIMIT // 2)))
    assert done.files[1] > 3
    assert looks[0] == []
    assert len(looks[1]) == (done.files[1] if "://" in remote.url else 0)
    target.close()


def test_two_may_do_the_same_job(remote: Remote, shop: Path, tmp_path: Path) -> None:
    target = open_target(remote.url)
    target.begin()
    job = job_for(shop, remote.url, "dt=2026-11-01", RewriteOptions(row_group_size=LIMIT))
    assert run_job(job) == run_job(job)
    (whole,), broken = read_records(target)
    assert (whole.key, broken) == ("k", [])
    target.close()


@pytest.mark.s3
def test_unfinished_uploads_of_killed_runs_are_aborted_and_no_others(
    s3_bucket: Bucket, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's backup is below the target itself, and has the name of a file that the run writes."""
    url, client, bucket = f"{s3_bucket.url}/out", s3_bucket.client, s3_bucket.name
    backups = {
        key: client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        for key in ("outside/x", "out/backup.tar", "out/dt=2026-11-01/part-00000.parquet")
    }
    killed = open_target(url)
    killed.begin()
    staged = killed.stage(next(iter(shop.rglob("*.parquet"))), "token", "dt=2026-11-01/part-00000.parquet")
    with monkeypatch.context() as patch:  # killed in the middle of an upload
        patch.setattr(type(killed), "_abort", lambda *_: None)
        patch.setattr(type(killed), "_part", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            killed.stage(staged.file, "token", "dt=2026-11-02/part-00000.parquet")
    assert len(client.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 5
    client.put_object(Bucket=bucket, Key="out/_pqcache/uploads/strange.json", Body=b"no record")
    foreign = json.dumps({"key": "outside/x", "upload": backups["outside/x"]}).encode()
    client.put_object(Bucket=bucket, Key="out/_pqcache/uploads/foreign.json", Body=foreign)
    pqcache.repartition(shop, url, row_group_size=LIMIT)
    left = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    assert {item["Key"]: item["UploadId"] for item in left} == backups
    assert not [path for path in contents(url) if path.startswith(HIDDEN)]
    for key, upload in backups.items():
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)


@pytest.mark.s3
def test_large_files_go_up_in_parts(
    s3_bucket: Bucket, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqcache.store.drivers.s3._PART", 5 << 20)
    file = tmp_path / "big"
    file.write_bytes(os.urandom((12 << 20) + 7))
    target = open_target(f"{s3_bucket.url}/out")
    staged = target.stage(file, "token", "dt=1/big.parquet")
    (record,) = [file.path for file in target.list()]
    assert record.startswith(f"{HIDDEN}/uploads/")
    target.commit("token", "dt=1", [staged], True)
    target.commit("token", "dt=1", [staged], True)  # as after an answer that was lost
    assert contents(f"{s3_bucket.url}/out") == {"dt=1/big.parquet": file.read_bytes()}
    gone = target.stage(file, "token", "dt=2/big.parquet")
    target.discard("token", [gone])
    assert "Uploads" not in s3_bucket.client.list_multipart_uploads(Bucket=s3_bucket.name)
    target.close()


@pytest.mark.hdfs
def test_what_a_dead_run_was_writing_goes(hdfs_dir: str, shop: Path, tmp_path: Path) -> None:
    target = open_target(f"{hdfs_dir}/out")
    target.begin()
    file = tmp_path / "half"
    file.write_bytes(b"half")
    target.stage(file, "token", "dt=1/half.parquet")
    assert [f.path for f in target.list()] == ["_pqcache/tmp/token/half.parquet"]
    target.close()
    pqcache.repartition(shop, f"{hdfs_dir}/out", row_group_size=LIMIT)
    assert contents(f"{hdfs_dir}/out") == expected(shop, tmp_path)


@pytest.mark.parametrize("remote", STORES[:3:2], indirect=True)
def test_files_beside_partition_directories(remote: Remote, tmp_path: Path) -> None:
    shop = tmp_path / "mixed"
    (shop / "a=1" / "b=2").mkdir(parents=True)
    for number, path in enumerate(("x.parquet", "a=1/y.parquet", "a=1/b=2/z.parquet")):
        pq.write_table(shop_table(number * 1000, 700), shop / path)
    pqcache.repartition(shop, remote.url, row_group_size=LIMIT)
    assert contents(remote.url) == expected(shop, tmp_path)


def test_nothing_foreign_is_written_over(remote: Remote, shop: Path) -> None:
    """Not even beside an unfinished run, and not a file that has a record's name but another size."""
    target = open_target(remote.url)
    target.begin()
    job = job_for(shop, remote.url, "dt=2026-11-01", RewriteOptions(row_group_size=LIMIT))
    run_job(job)
    (record,), _ = read_records(target)
    (name,) = record.files
    if "://" in remote.url:
        remote.put(f"dt=2026-11-01/{name}", b"somebody else's")
    else:
        (Path(remote.url).with_name(f".{Path(remote.url).name}.pqcache") / "dt=2026-11-01" / name).write_bytes(b"x")
    target.close()
    with pytest.raises(pqcache.UsageError, match=r"is not empty \(dt=2026-11-01/part-00000.parquet\)"):
        pqcache.repartition(shop, remote.url, row_group_size=LIMIT)


def test_places_that_overlap_are_refused(shop: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(shop)
    pqcache.sync(shop, tmp_path / "cache")
    for target, why in (
        (tmp_path / "cache" / "out", "lies in the cache"),
        (shop, "is the source itself"),
        (link, "is the source itself"),
        (f"file://{shop}", "is the source itself"),
        (shop / "out", "lies inside the source"),
        (tmp_path, "holds the source"),
    ):
        with pytest.raises(pqcache.UsageError, match=why):
            pqcache.repartition(shop, target)
    with pytest.raises(pqcache.UsageError, match="names no directory"):
        pqcache.repartition(shop, "hdfs://")
    with pytest.raises(pqcache.UsageError, match=r"unknown scheme nowhere://"):
        pqcache.repartition(shop, "nowhere://lake/shop")
    for scheme in ("http", "memory"):
        with pytest.raises(pqcache.UsageError, match=rf"{scheme}:// can be read, not written; write to hdfs://, s3://"):
            pqcache.repartition(shop, f"{scheme}://lake/shop")
    account = "acct.dfs.core.windows.net"
    for source, target in (
        ("gs://lake/shop", "gcs://lake/shop/out"),
        ("az://lake/shop", f"abfss://lake@{account}/shop/out"),
        (f"az://lake@{account}/shop", f"abfss://lake@{account}/shop/out"),
        ("s3://lake/shop", "s3://key:secret@lake/shop/out"),
    ):
        with pytest.raises(pqcache.UsageError, match="lies inside the source"):
            make_endpoints(source, target, {}, None)
    for source, target in (
        (f"az://lake@{account}/shop", f"az://lake@other.{account}/shop"),
        (f"az://lake@{account}/shop", f"az://copy@{account}/shop"),
        ("gs://lake/shop", "s3://lake/shop"),
    ):
        make_endpoints(source, target, {}, None)


def test_options_go_to_the_store_that_has_them() -> None:
    given = {"endpoint": "e", "token": "t", "region": "r", "account_name": "a", "service_account": "s", "dfs.x": "d"}
    for source, target, of_source, of_target in (
        ("s3://a/b", "gs://a/c", {"endpoint", "token", "region", "account_name", "dfs.x"}, set()),
        ("gs://a/b", "az://a/c", {"endpoint", "token", "service_account"}, {"endpoint", "token", "account_name"}),
        ("hdfs://a/b", "az://a/c", {"dfs.x"}, {"endpoint", "token", "account_name"}),
        ("az://a/b", "abfss://a/c", set(given), set(given)),
        ("az://a/b", "/c", set(given), set()),
    ):
        found = make_endpoints(source, target, given, None)
        assert set(found.source_options) == of_source
        wanted = of_target or ({"endpoint", "token", "service_account"} if target.startswith("gs") else set())
        assert set(found.target_options) == wanted


@pytest.mark.hdfs
def test_hdfs_says_what_is_wrong(hdfs_dir: str, shop: Path) -> None:
    with pytest.raises(pqcache.SourceUnavailable, match=r"hdfs://127\.0\.0\.1:1/out: .*NameNode"):
        pqcache.repartition(shop, "hdfs://127.0.0.1:1/out")
    with pytest.raises(pqcache.UsageError, match="write to another name"):
        pqcache.repartition(shop, f"{hdfs_dir}/a?b")
    with pytest.raises(pqcache.UsageError, match="multiples of 512"):
        pqcache.repartition(shop, f"{hdfs_dir}/out", block_size=1000)
    pqcache.repartition(shop, f"{hdfs_dir}/out")
    inside = f"{hdfs_dir}/out/dt=2026-11-01/part-00000.parquet"
    with pytest.raises(pqcache.PqcacheError, match="is not empty"):
        pqcache.repartition(shop, inside)
    with pytest.raises(pqcache.PqcacheError, match="is not a directory"):
        pqcache.repartition(shop, f"{inside}/x")


@pytest.mark.s3
def test_s3_says_what_is_wrong(s3_bucket: Bucket, shop: Path) -> None:
    with pytest.raises(pqcache.SourceNotFound, match="no such bucket"):
        pqcache.repartition(shop, "s3://no-such-bucket/out")
    with pytest.raises(pqcache.SourceUnavailable, match="endpoint"):
        pqcache.repartition(shop, f"{s3_bucket.url}/out", options={"endpoint": "http://127.0.0.1:1"})
    with pytest.raises(pqcache.SourceDenied, match="access denied"):
        pqcache.repartition(shop, f"{s3_bucket.url}/out", options={"key": "nobody", "secret": "wrong"})


def test_one_run_at_a_time_on_a_local_target(shop: Path, tmp_path: Path) -> None:
    first = open_target(str(tmp_path / "out"))
    first.begin()
    with pytest.raises(pqcache.CacheLocked, match="another run is writing it"):
        pqcache.repartition(shop, tmp_path / "out")
    first.close()
    pqcache.repartition(shop, tmp_path / "out")


INTERRUPTED = """
import os, signal, time
from pqcache.cli import main
from pqcache.console import terminal
shown = terminal.print_event
def interrupt(event):
    shown(event)
    if type(event).__name__ == "Rewrote":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2)  # while the next directories would be done
terminal.print_event = interrupt
main()
"""


@pytest.mark.parametrize("remote", STORES[:1], indirect=True)
def test_ctrl_c_in_the_middle_and_again(remote: Remote, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=4, rows=100)
    words = ["repartition", str(shop), remote.url, "--row-group-size", "32KB", "-j1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(pqcache.__file__).parent.parent)}
    run = subprocess.run([sys.executable, "-c", INTERRUPTED, *words], env=environment, capture_output=True, text=True)
    assert run.returncode == 130, run.stderr
    assert '"event": "rewrote"' in run.stdout
    events: list[Event] = []
    report = pqcache.repartition(shop, remote.url, row_group_size=LIMIT, on_event=events.append)
    assert 1 <= report.kept < 4
    assert sum(isinstance(event, Rewrote) for event in events) == report.rewritten == 4 - report.kept
    assert contents(remote.url) == expected(shop, tmp_path)


def test_a_job_that_outlived_its_run_publishes_nothing(remote: Remote, shop: Path) -> None:
    """A worker of a run that failed may still be at it when the next run has begun, or has finished."""
    job = job_for(shop, remote.url, "dt=2026-11-01", RewriteOptions(row_group_size=LIMIT))
    old = replace(job, run="0123456789abcdef")
    target = open_target(remote.url)
    target.begin()
    claim(target, "fedcba9876543210")
    with pytest.raises(pqcache.CacheLocked, match="another run writes there now"):
        run_job(old)
    assert not [file for file in target.list() if file.path.endswith(".parquet")]
    forgotten = {file.path for file in target.list()}
    assert forgotten - {"_pqcache/lock"} == {RUN}, forgotten
    if "://" in remote.url:
        target.finish()
        with pytest.raises(pqcache.CacheLocked):
            run_job(old)
    target.close()


def small_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Have the disk of the spool say that so many bytes are free."""

    def disk_usage(path: Path) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(1 << 40, 0, free)

    monkeypatch.setattr("pqcache.store.repartition.partition_job.disk_usage", disk_usage)


@pytest.mark.s3
def test_a_spool_too_small_for_a_partition_is_reported_before_anything_is_done(
    s3_bucket: Bucket, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files lie there where only the target is remote, too, and rows being shuffled take more than files."""
    day = sum(path.stat().st_size for path in (shop / "dt=2026-11-01").glob("part*"))
    small_disk(monkeypatch, (64 << 20) + day // 2)
    with pytest.raises(pqcache.PqcacheError, match=r"partition dt=2026-11-\d\d needs up to .* set TMPDIR"):
        pqcache.repartition(shop, f"{s3_bucket.url}/out", row_group_size=LIMIT, shuffle=5, jobs=1)
    assert contents(f"{s3_bucket.url}/out") == {}
    small_disk(monkeypatch, (64 << 20) + 2 * day)
    with pytest.raises(pqcache.PqcacheError, match="to shuffle its rows"):
        pqcache.repartition(shop, f"{s3_bucket.url}/out", row_group_size=LIMIT, shuffle=5)
    small_disk(monkeypatch, (64 << 20) + 7 * day)
    report = pqcache.repartition(shop, f"{s3_bucket.url}/out", row_group_size=LIMIT, shuffle=5)
    assert report.rows == 1800  # with space for one at a time, they wait for one another


def test_a_place_inside_the_source_cache_is_refused(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    for dest in (cache / "out", cache, cache / "snapshots" / "mine", cache / "tmp"):
        with pytest.raises(pqcache.UsageError, match=r"source"):
            pqcache.repartition(cache, dest)
    assert sorted(path.name for path in (cache / "tmp").iterdir()) == []
