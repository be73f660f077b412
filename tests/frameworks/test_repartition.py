"""Jobs of a repartition on a real Ray cluster of 127.0.0.1 and on Spark on this machine, some of whose workers die."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import pqcache
from pqcache.events import Event, Rewrote
from pqcache.store.repartition import clusters
from tests import ROOT
from tests.datasets import files_of, write_shop
from tests.store.repartition.test_to_target import contents

LIMIT = 32 << 10
_WITHIN = 90.0  # seconds for a process to say that it is ready


@dataclass(frozen=True)
class Scheduler:
    """What ``scheduler=`` names, and the processes that do its jobs."""

    url: str
    workers: Callable[[], list[psutil.Process]]


@pytest.fixture(scope="module")
def ray() -> Iterator[Scheduler]:
    """A node and a server of Ray Client, which listen on 127.0.0.1 and let in who has the token."""
    pytest.importorskip("ray")
    pytest.importorskip("grpc", reason="Ray Client needs it: the extra `ray`")
    port, address = free_port(), f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="ray") as name, ExitStack() as stack:  # short, as sockets are in it
        start = ["ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
        start += [f"--port={address.split(':')[1]}", "--include-dashboard=false", "--disable-usage-stats"]
        start += ["--num-cpus=4", f"--object-store-memory={80 << 20}", f"--temp-dir={name}"]
        head = start_process(stack, start, Path(name, "head.log"), "Ray runtime started")
        serve = ["ray.util.client.server", f"--address={address}", "--host=127.0.0.1", f"--port={port}"]
        # `ray start` has a server that starts one for each client, with packages that Ray's extra `default` has.
        start_process(stack, [*serve, "--mode=legacy"], Path(name, "server.log"), "Starting Ray Client server")

        def workers() -> list[psutil.Process]:
            return [child for child in below(head) if "run_job" in " ".join(child.cmdline())]

        yield Scheduler(f"ray://127.0.0.1:{port}", workers)


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Two tasks at once, each four times at most."""
    pytest.importorskip("pyspark")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)

    def workers() -> list[psutil.Process]:
        """Return the processes that call Python functions for Spark: children of its daemon."""
        about = []
        for process in below(os.getpid()):
            with suppress(psutil.Error):  # it has ended meanwhile
                about.append((process, process.ppid(), process.cmdline()))
        daemons = {process.pid for process, _, words in about if "pyspark.daemon" in words}
        return [process for process, parent, _ in about if parent in daemons]

    return Scheduler("local[2,4]", workers)


@pytest.fixture(params=["ray", "spark"])
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    found: Scheduler = request.getfixturevalue(request.param)
    return found


def start_process(stack: ExitStack, words: list[str], log: Path, ready: str) -> int:
    """Start a Python module, wait for what it says when it is ready, and have it ended with what it has started."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as out:
        command, environment = [sys.executable, "-m", *words], {**os.environ, "PYTHONPATH": path}
        started = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
    stack.callback(end, started)
    until = time.monotonic() + _WITHIN
    while ready not in log.read_text():
        assert started.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    return started.pid


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


def run(source: Path, target: Path, url: str, on_event: Callable[[Event], None] = lambda event: None):  # type: ignore[no-untyped-def]
    return pqcache.repartition(source, target, row_group_size=LIMIT, scheduler=url, on_event=on_event)


def check_target(target: Path, shop: Path) -> None:
    """Compare files with those of a repartition in this process, byte by byte."""
    local = target.with_name("local")
    pqcache.repartition(shop, local, row_group_size=LIMIT)
    assert contents(str(target)) == {path: (local / path).read_bytes() for path in files_of(local)}


def test_a_worker_is_killed_half_way(scheduler: Scheduler, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=6)
    killed: list[int] = []
    events: list[Event] = []

    def kill(event: Event) -> None:
        events.append(event)
        if isinstance(event, Rewrote) and not killed and (found := scheduler.workers()):
            found[0].kill()
            killed.append(found[0].pid)

    before = signal.getsignal(signal.SIGINT)
    report = run(shop, tmp_path / "out", scheduler.url, kill)
    assert killed
    assert signal.getsignal(signal.SIGINT) is before
    assert (report.directories, report.rewritten, report.rows) == (6, 6, 7200)
    assert len([event for event in events if isinstance(event, Rewrote)]) == 6
    assert not list(tmp_path.glob(".*"))
    check_target(tmp_path / "out", shop)


def test_a_job_that_fails_ends_the_run_and_the_next_goes_on(ray: Scheduler, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=4)
    bad = shop / "dt=2026-11-04" / "part-00001.parquet"
    good = bad.read_bytes()
    bad.write_bytes(good[:4] + b"\xff" * 20 + good[24:])  # the footer is read before anything is begun
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet"):
        run(shop, tmp_path / "out", ray.url)
    assert not (tmp_path / "out").exists()
    bad.write_bytes(good)
    report = run(shop, tmp_path / "out", ray.url)
    assert report.kept + report.rewritten == 4
    check_target(tmp_path / "out", shop)


def test_a_job_that_kills_every_worker(scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_shop(tmp_path / "shop", days=1)
    monkeypatch.setattr(clusters, "_RAY_RETRIES", 1)
    monkeypatch.setattr("pqcache.store.repartition.to_target.run_job", lambda job: os._exit(3))  # it is sent by value
    with pytest.raises(pqcache.PqcacheError, match="partition dt=2026-11-01: its workers died again and again"):
        run(shop, tmp_path / "out", scheduler.url)


def test_other_versions_and_paths_that_a_node_of_ray_does_not_see(
    ray: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = write_shop(tmp_path / "shop")
    real = importlib.metadata.version
    with monkeypatch.context() as patch:  # here, and not there
        patch.setattr(importlib.metadata, "version", as_if := lambda name: "9.9" if name == "pyarrow" else real(name))
        patch.setattr(clusters.RayExecutor, "on_workers", sends(real, as_if, clusters.RayExecutor.on_workers))
        with pytest.raises(pqcache.UsageError, match=r"worker 127\.0\.0\.1: pyarrow is version .*, here it is 9\.9"):
            run(shop, tmp_path / "out", ray.url)
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # sent by value: the nodes are blind
    with pytest.raises(pqcache.UsageError, match=r"shop: 1 worker cannot see it \(127\.0\.0\.1\)"):
        run(shop, tmp_path / "out", ray.url)
    assert not (tmp_path / "out").exists()


def sends(real: object, patched: object, on_workers: Callable[..., object]) -> Callable[..., object]:
    """Return ``on_workers`` that sends the function that was there before a patch."""

    def send(self: object, function: object, argument: str) -> object:
        return on_workers(self, real if function is patched else function, argument)

    return send


def test_another_version_on_a_worker_of_spark(
    spark: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = write_shop(tmp_path / "shop", days=1)
    other = tmp_path / "site" / "pqcache-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pqcache\nVersion: 9.9\n")
    there = tmp_path / "python"
    there.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site:$PYTHONPATH" exec {sys.executable} "$@"\n')
    there.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(there))
    here = importlib.metadata.version("pqcache")
    with pytest.raises(pqcache.UsageError, match=rf"pqcache is version 9\.9, here it is {here}"):
        run(shop, tmp_path / "out", spark.url)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "why", "module", "extra"),
    [
        ("ray://127.0.0.1", "no Ray cluster answers", "grpc", "ray"),
        ("spark://127.0.0.1", "no Spark master answers", "pyspark", "spark"),
    ],
)
def test_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, why: str, module: str, extra: str
) -> None:
    pytest.importorskip(module)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    shop = write_shop(tmp_path / "shop", days=1)
    for address, said in ((f"{url}:1", why), (url, f"write it like {extra}://")):
        with pytest.raises(pqcache.PqcacheError, match=said):
            pqcache.repartition(shop, tmp_path / "out", scheduler=address)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pqcache.UsageError, match=rf"pip install 'pqcache\[{extra}\]'"):
        pqcache.repartition(shop, tmp_path / "out", scheduler=f"{url}:1")
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]
