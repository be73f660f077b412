"""--scheduler ray://: the jobs of a repartition on a real Ray cluster of 127.0.0.1, one of whose workers is killed."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import pqcache
from pqcache.events import Event, Rewrote
from pqcache.store.repartition import clusters
from tests import ROOT
from tests.datasets import files_of, write_shop
from tests.store.repartition.test_to_target import contents

pytest.importorskip("ray")
pytest.importorskip("grpc", reason="Ray Client needs it: the extra `ray`")
LIMIT = 32 << 10
_WITHIN = 90.0  # seconds for a process to say that it is ready


class Cluster:
    """A node and a server of Ray Client, which listen on 127.0.0.1 and let in who has the token."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        port, address = free_port(), f"127.0.0.1:{free_port()}"
        start = ["ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
        start += [f"--port={address.split(':')[1]}", "--include-dashboard=false", "--disable-usage-stats"]
        start += ["--num-cpus=4", f"--object-store-memory={80 << 20}", f"--temp-dir={directory}"]
        self.head = self._start(stack, start, directory / "head.log", "Ray runtime started")
        serve = ["ray.util.client.server", f"--address={address}", "--host=127.0.0.1", f"--port={port}"]
        # `ray start` has a server that starts one for each client, with packages that Ray's extra `default` has.
        self._start(stack, [*serve, "--mode=legacy"], directory / "server.log", "Starting Ray Client server")
        self.url = f"ray://127.0.0.1:{port}"

    def _start(self, stack: ExitStack, words: list[str], log: Path, ready: str) -> int:
        with log.open("wb") as out:
            started = subprocess.Popen(
                [sys.executable, "-m", *words], stdout=out, stderr=out, env=self.environment, cwd=log.parent
            )
        stack.callback(end, started)
        until = time.monotonic() + _WITHIN
        while ready not in log.read_text():
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        return started.pid

    def at_work(self) -> list[psutil.Process]:
        """Return the workers that do a job."""
        return [child for child in below(self.head) if "run_job" in " ".join(child.cmdline())]


def below(pid: int) -> list[psutil.Process]:
    """Return the processes that one has started, and those that they have."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end(started: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    others = below(started.pid)
    started.terminate()
    started.wait(_WITHIN)
    _, left = psutil.wait_procs(others, timeout=30)
    for process in left:
        process.kill()


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ray") as directory, ExitStack() as stack:  # short, as sockets are in it
        yield Cluster(Path(directory), stack)


def run(source: Path, target: Path, cluster: Cluster, on_event: Callable[[Event], None] = lambda event: None):  # type: ignore[no-untyped-def]
    return pqcache.repartition(source, target, row_group_size=LIMIT, scheduler=cluster.url, on_event=on_event)


def test_a_worker_is_killed_half_way(cluster: Cluster, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=6)
    pqcache.repartition(shop, tmp_path / "local", row_group_size=LIMIT)
    killed: list[int] = []
    events: list[Event] = []

    def kill(event: Event) -> None:
        events.append(event)
        if isinstance(event, Rewrote) and not killed and (workers := cluster.at_work()):
            workers[0].kill()  # while it does a job
            killed.append(workers[0].pid)

    report = run(shop, tmp_path / "out", cluster, kill)
    assert killed
    assert (report.directories, report.rewritten, report.rows) == (6, 6, 7200)
    local = {path: (tmp_path / "local" / path).read_bytes() for path in files_of(tmp_path / "local")}
    assert contents(str(tmp_path / "out")) == local
    assert len([event for event in events if isinstance(event, Rewrote)]) == 6
    assert not list(tmp_path.glob(".*"))


def test_a_job_that_fails_ends_the_run_and_the_next_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=4)
    bad = shop / "dt=2026-11-04" / "part-00001.parquet"
    good = bad.read_bytes()
    bad.write_bytes(good[:4] + b"\xff" * 20 + good[24:])  # the footer is read before anything is begun
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet"):
        run(shop, tmp_path / "out", cluster)
    assert not (tmp_path / "out").exists()
    bad.write_bytes(good)
    report = run(shop, tmp_path / "out", cluster)
    assert report.kept + report.rewritten == 4
    assert pqcache.repartition(shop, tmp_path / "local", row_group_size=LIMIT).rows == report.rows
    assert contents(str(tmp_path / "out")) == contents(str(tmp_path / "local"))


def test_other_versions_and_paths_that_a_node_does_not_see(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = write_shop(tmp_path / "shop")
    real = importlib.metadata.version
    with monkeypatch.context() as patch:  # here, and not there
        patch.setattr(importlib.metadata, "version", as_if := lambda name: "9.9" if name == "pyarrow" else real(name))
        patch.setattr(clusters.RayExecutor, "on_workers", sends(real, as_if, clusters.RayExecutor.on_workers))
        with pytest.raises(pqcache.UsageError, match=r"worker 127\.0\.0\.1: pyarrow is version .*, here it is 9\.9"):
            run(shop, tmp_path / "out", cluster)
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # sent by value: the nodes are blind
    with pytest.raises(pqcache.UsageError, match=r"shop: 1 worker cannot see it \(127\.0\.0\.1\)"):
        run(shop, tmp_path / "out", cluster)
    assert not (tmp_path / "out").exists()


def sends(real: object, patched: object, on_workers: Callable[..., object]) -> Callable[..., object]:
    """Return ``on_workers`` that sends the function that was there before a patch."""

    def send(self: object, function: object, argument: str) -> object:
        return on_workers(self, real if function is patched else function, argument)

    return send


def test_a_job_that_kills_every_worker(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_shop(tmp_path / "shop", days=1)
    monkeypatch.setattr(clusters, "_RAY_RETRIES", 1)
    monkeypatch.setattr("pqcache.store.repartition.to_target.run_job", lambda job: os._exit(3))
    with pytest.raises(pqcache.PqcacheError, match="partition dt=2026-11-01: its workers died again and again"):
        run(shop, tmp_path / "out", cluster)
    monkeypatch.undo()
    run(shop, tmp_path / "out", cluster)
    pqcache.repartition(shop, tmp_path / "local", row_group_size=LIMIT)
    assert contents(str(tmp_path / "out")) == contents(str(tmp_path / "local"))


def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_shop(tmp_path / "shop")
    for address, why in (("ray://127.0.0.1:1", "no Ray cluster answers"), ("ray://127.0.0.1", "write it like ray://")):
        with pytest.raises(pqcache.PqcacheError, match=why):
            pqcache.repartition(shop, tmp_path / "out", scheduler=address)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(pqcache.UsageError, match=r"pip install 'pqcache\[ray\]'"):
        pqcache.repartition(shop, tmp_path / "out", scheduler="ray://127.0.0.1:1")
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]
