"""--scheduler local[2,4]: the jobs of a repartition as Spark jobs on this machine, one of whose workers is killed."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import pqcache
from pqcache.events import Event, Rewrote
from tests.datasets import files_of, write_shop
from tests.store.repartition.test_to_target import contents

pytest.importorskip("pyspark")
LIMIT = 32 << 10
MASTER = "local[2,4]"  # two tasks at once, each four times at most


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)


def run(source: Path, target: Path, on_event: Callable[[Event], None] = lambda event: None):  # type: ignore[no-untyped-def]
    return pqcache.repartition(source, target, row_group_size=LIMIT, scheduler=MASTER, on_event=on_event)


def workers() -> list[psutil.Process]:
    """Return the processes that call Python functions for Spark: children of its daemon."""
    about = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            about.append((process, process.ppid(), process.cmdline()))
    daemons = {process.pid for process, _, words in about if "pyspark.daemon" in words}
    return [process for process, parent, _ in about if parent in daemons]


def test_a_worker_is_killed_half_way(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=6)
    pqcache.repartition(shop, tmp_path / "local", row_group_size=LIMIT)
    killed: list[int] = []
    events: list[Event] = []

    def kill(event: Event) -> None:
        events.append(event)
        if isinstance(event, Rewrote) and not killed and (found := workers()):
            found[0].kill()
            killed.append(found[0].pid)

    before = signal.getsignal(signal.SIGINT)
    report = run(shop, tmp_path / "out", kill)
    assert killed
    assert signal.getsignal(signal.SIGINT) is before
    assert (report.directories, report.rewritten, report.rows) == (6, 6, 7200)
    local = {path: (tmp_path / "local" / path).read_bytes() for path in files_of(tmp_path / "local")}
    assert contents(str(tmp_path / "out")) == local
    assert len([event for event in events if isinstance(event, Rewrote)]) == 6


def test_a_job_that_fails_ends_the_run_and_the_next_goes_on(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=4)
    bad = shop / "dt=2026-11-04" / "part-00001.parquet"
    good = bad.read_bytes()
    bad.write_bytes(good[:4] + b"\xff" * 20 + good[24:])  # the footer is read before anything is begun
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet"):
        run(shop, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    bad.write_bytes(good)
    report = run(shop, tmp_path / "out")
    assert report.kept + report.rewritten == 4
    assert pqcache.repartition(shop, tmp_path / "local", row_group_size=LIMIT).rows == report.rows
    assert contents(str(tmp_path / "out")) == contents(str(tmp_path / "local"))


def test_another_version_on_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        run(shop, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_job_that_kills_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_shop(tmp_path / "shop", days=1)
    monkeypatch.setattr("pqcache.store.repartition.to_target.run_job", lambda job: os._exit(3))
    with pytest.raises(pqcache.PqcacheError, match="partition dt=2026-11-01: its workers died again and again"):
        run(shop, tmp_path / "out")


def test_no_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_shop(tmp_path / "shop", days=1)
    for address, why in (("spark://127.0.0.1:1", "no Spark master answers"), ("spark://h", "write it like spark://")):
        with pytest.raises(pqcache.PqcacheError, match=why):
            pqcache.repartition(shop, tmp_path / "out", scheduler=address)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(pqcache.UsageError, match=r"pip install 'pqcache\[spark\]'"):
        pqcache.repartition(shop, tmp_path / "out", scheduler=MASTER)
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]
