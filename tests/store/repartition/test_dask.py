"""--scheduler: the same jobs on a real Dask cluster, in processes of its own, some of which are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pqcache
from pqcache.events import Event, Rewrote, Started
from tests.datasets import files_of, write_day, write_shop
from tests.store.repartition.test_to_target import contents
from tests.store.serve.serving import TOKEN, served

if TYPE_CHECKING:
    from tests.conftest import Bucket
    from tests.servers.hdfs import Hdfs

pytest.importorskip("distributed")
pytestmark = pytest.mark.xdist_group("hdfs")  # one cluster, in the process that has the HDFS of a test
LIMIT = 32 << 10
_WITHIN = 60.0  # seconds for a process to say that it is ready


class Cluster:
    """A scheduler and its workers, each a process that listens on 127.0.0.1."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.workers: list[subprocess.Popen[bytes]] = []
        self._start_scheduler()

    def _start_scheduler(self) -> None:
        self.scheduler, log = self._start("scheduler", [], {})
        self.url = wait_for(self.scheduler, log, "Scheduler at:").split()[-1]

    def at_least(self, count: int) -> Cluster:
        """Start what is not at work any more, and return when that many workers are registered."""
        if self.scheduler.poll() is not None:
            self._start_scheduler()
            self.workers = []
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        self.workers += self.add(max(0, count - len(self.workers)), {})
        return self

    def add(self, count: int, environment: dict[str, str], *options: str) -> list[subprocess.Popen[bytes]]:
        words = [self.url, "--no-nanny", "--nthreads", "1", "--memory-limit", "0", *options]
        started = [self._start("worker", words, environment) for _ in range(count)]
        for process, log in started:
            wait_for(process, log, "Registered to:")
        return [process for process, _ in started]

    @contextmanager
    def odd_worker(self, environment: dict[str, str], *options: str) -> Iterator[None]:
        """A worker that is not as the others, for a test."""
        (worker,) = self.add(1, environment, *options)
        try:
            yield
        finally:
            worker.kill()
            worker.wait()

    def _start(self, what: str, words: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.directory / f"{what}-{len(list(self.directory.iterdir()))}.log"
        root = str(Path(pqcache.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
        command = [sys.executable, "-m", "dask", what, *words, "--host", "127.0.0.1", "--no-dashboard"]
        command += ["--port", "0"] if what == "scheduler" else ["--local-directory", str(self.directory / "spill")]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **environment, "PYTHONPATH": path}
            )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process, log


def wait_for(process: subprocess.Popen[bytes], log: Path, text: str) -> str:
    """Return the line of ``log`` that holds ``text``."""
    until = time.monotonic() + _WITHIN
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if text in line:
                return line
        time.sleep(0.05)
    raise AssertionError(f"{log.name} never said {text!r}:\n{log.read_text()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests; each says how many workers it needs."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PQCACHE_TOKEN", TOKEN)
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", days=4, files=2, rows=300)


def run(source: object, target: object, cluster: Cluster, on_event: Callable[[Event], None] = lambda event: None):  # type: ignore[no-untyped-def]
    return pqcache.repartition(str(source), str(target), row_group_size=LIMIT, scheduler=cluster.url, on_event=on_event)


@pytest.mark.hdfs
def test_a_worker_is_killed_half_way(hdfs: Hdfs, hdfs_dir: str, cluster: Cluster, shop: Path, tmp_path: Path) -> None:
    hdfs.upload_tree(shop, f"{hdfs_dir}/source")
    pqcache.repartition(f"{hdfs_dir}/source", tmp_path / "local", row_group_size=LIMIT)
    events, (worker, *_) = list[Event](), cluster.at_least(2).workers

    def kill(event: Event) -> None:
        events.append(event)
        if isinstance(event, Rewrote) and worker.poll() is None:
            worker.kill()  # while it does a job and others wait for it
            worker.wait()

    report = run(f"{hdfs_dir}/source", f"{hdfs_dir}/target", cluster, kill)
    assert worker.returncode == -signal.SIGKILL
    assert sorted(event.directory for event in events if isinstance(event, Rewrote)) == sorted(
        path.name for path in (tmp_path / "local").iterdir()
    )
    local = {path: (tmp_path / "local" / path).read_bytes() for path in files_of(tmp_path / "local")}
    assert contents(f"{hdfs_dir}/target") == local
    assert (report.directories, report.rewritten, report.rows) == (4, 4, 2400)


def test_a_served_cache_that_publishes(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, each with a source of its own, read the snapshot that was listed."""
    lake, node = write_shop(tmp_path / "lake", days=2, files=2, rows=300), tmp_path / "node"
    pqcache.sync(lake, node, keep=1)
    pqcache.repartition(node / "current", tmp_path / "local", row_group_size=LIMIT)
    monkeypatch.setenv("PQCACHE_TOKEN", TOKEN)
    cluster.at_least(1)

    def publish(event: Event) -> None:
        if isinstance(event, Started) and event.phase == "rewrite":
            write_day(lake, "2026-11-01", files=2, seed=9)
            assert pqcache.sync(node).published

    with served(node) as server:
        run(server.urls["node"], tmp_path / "target", cluster, publish)
    assert contents(str(tmp_path / "target")) == contents(str(tmp_path / "local"))


@pytest.mark.s3
@pytest.mark.deep
def test_s3_and_a_shared_path(s3_bucket: Bucket, shop: Path, tmp_path: Path) -> None:
    pqcache.repartition(shop, tmp_path / "local", row_group_size=LIMIT)
    local = contents(str(tmp_path / "local"))
    directory = tmp_path / "cluster"
    directory.mkdir()
    with ExitStack() as stack:  # workers need the environment of the bucket
        cluster = Cluster(directory, stack).at_least(1)
        run(shop, f"{s3_bucket.url}/out", cluster)
        assert contents(f"{s3_bucket.url}/out") == local
        run(f"{s3_bucket.url}/out", tmp_path / "again", cluster)
    assert contents(str(tmp_path / "again")) == local
    assert not list(tmp_path.glob(".*"))


def test_a_job_that_fails_ends_the_run_and_the_next_goes_on(cluster: Cluster, shop: Path, tmp_path: Path) -> None:
    bad = shop / "dt=2026-11-04" / "part-00001.parquet"
    good = bad.read_bytes()
    bad.write_bytes(good[:4] + b"\xff" * 20 + good[24:])  # the footer is read before anything is begun
    cluster.at_least(1)
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet"):
        run(shop, tmp_path / "out", cluster)
    assert not (tmp_path / "out").exists()
    bad.write_bytes(good)
    report = run(shop, tmp_path / "out", cluster)
    assert (report.kept, report.rewritten) == (3, 1)


def test_no_scheduler(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, why in (
        ("tcp://127.0.0.1:1", "no Dask scheduler answers"),
        ("127.0.0.1:8786", "write it like tcp://"),
        ("tcp://127.0.0.1:port", "write it like tcp://"),
    ):
        with pytest.raises(pqcache.PqcacheError, match=why):
            pqcache.repartition(shop, tmp_path / "out", scheduler=address)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(pqcache.UsageError, match=r"pip install 'pqcache\[dask\]'"):
        pqcache.repartition(shop, tmp_path / "out", scheduler="tcp://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


def test_another_version_on_a_worker(cluster: Cluster, shop: Path, tmp_path: Path) -> None:
    other = tmp_path / "site" / "pqcache-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pqcache\nVersion: 9.9\n")
    reason = r"worker tcp://127\.0\.0\.1:\d+: pqcache is version 9\.9, here it is"
    worker = cluster.at_least(0).odd_worker({"PYTHONPATH": str(tmp_path / "site")})
    with worker, pytest.raises(pqcache.UsageError, match=reason):
        run(shop, tmp_path / "out", cluster)
    assert not (tmp_path / "out").exists()


def test_a_path_that_a_worker_does_not_see(cluster: Cluster, shop: Path, tmp_path: Path) -> None:
    """A worker that looks at another disk: its file system is blind to what lies in the test's directory."""
    blind = tmp_path / "blind.py"
    blind.write_text(
        "import genericpath\n"  # where os.path.exists comes from
        "genericpath.sees = see = getattr(genericpath, 'sees', genericpath.exists)\n"  # it is loaded twice
        f"genericpath.exists = lambda path: str(path) != {str(shop)!r} and see(path)\n"
    )
    reason = r"shop: 1 worker cannot see it"
    with cluster.at_least(0).odd_worker({}, "--preload", str(blind)), pytest.raises(pqcache.UsageError, match=reason):
        run(shop, tmp_path / "out", cluster)


def test_the_scheduler_is_killed_half_way(cluster: Cluster, shop: Path, tmp_path: Path) -> None:
    cluster.at_least(1)

    def kill(event: Event) -> None:
        if isinstance(event, Rewrote):
            cluster.scheduler.kill()
            cluster.scheduler.wait()

    with pytest.raises(pqcache.SourceUnavailable, match="the cluster is gone or has dropped partition dt="):
        run(shop, tmp_path / "out", cluster, kill)
    assert pqcache.repartition(shop, tmp_path / "out", row_group_size=LIMIT).kept >= 1


def test_a_job_of_another_version_is_refused(shop: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from pqcache.parquet.rewrite.recipe import RewriteOptions
    from pqcache.store.repartition.partition_job import run_job
    from tests.store.repartition.test_to_target import job_for

    job = job_for(shop, str(tmp_path / "out"), "dt=2026-11-01", RewriteOptions(row_group_size=LIMIT))
    with pytest.raises(pqcache.UsageError, match=r"not the version that was started, 9\.9"):
        run_job(replace(job, version="9.9"))
    endpoints = replace(job.endpoints, source="s3://key:hidden@lake/shop", source_options={"secret": "hidden"})
    assert "hidden" not in repr(endpoints)
    assert "hidden" not in repr(replace(job, endpoints=endpoints))
