"""``source=`` with the run that users get, from a real S3 that answers slowly: killed, stalled, and cut off."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import SourceError, UsageError
from pqcache.reader.arriving import ArrivalQueue
from pqcache.store import background_run
from pqcache.store.cache_directory import CacheDirectory
from pqcache.torch import Loader, ParquetDataset
from tests.conftest import Bucket
from tests.faults.proxy import Proxy, both, stall, status
from tests.remote import S3Remote
from tests.torch.conftest import RunRanks
from tests.waiting import becomes_true, wait_for

DAYS, FILES, ROW_GROUPS, ROWS = 2, 3, 4, 250  # rows of a row group


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days of three files with four row groups each: 6,000 rows of 1 KB of noise."""
    root, rng = tmp_path_factory.mktemp("lake"), np.random.default_rng(1)
    rows = ROW_GROUPS * ROWS
    for number in range(DAYS * FILES):
        path = root / f"dt=2026-11-{number // FILES + 1:02d}" / f"part-{number % FILES}.parquet"
        path.parent.mkdir(exist_ok=True)
        noise = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(1000), rows, [None, pa.py_buffer(rng.bytes(1000 * rows))]
        )
        ids = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
        pq.write_table(pa.table({"id": ids, "noise": noise}), path, row_group_size=ROWS, use_dictionary=False)
    return root


@pytest.fixture(scope="module")
def published(lake: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of it."""
    cache = tmp_path_factory.mktemp("published") / "cache"
    pqcache.sync(str(lake), str(cache))
    return cache


@pytest.fixture
def remote(lake: Path, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its URL on S3; reports of runs are in a directory of the test."""
    S3Remote(f"{s3_bucket.url}/shop", s3_bucket.client).upload(lake)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return f"{s3_bucket.url}/shop"


@pytest.fixture
def slow(s3_env: Mapping[str, str]) -> Iterator[Proxy]:
    """A server in front of S3 that takes 50 ms for each range of a file."""
    with Proxy(s3_env["AWS_ENDPOINT_URL"]) as proxy:
        proxy.rule(both(lambda request: time.sleep(0.05)), method="GET", path=r"\.parquet")
        yield proxy


def dataset_of(cache: Path, remote: str, proxy: Proxy) -> ParquetDataset:
    """Return a dataset that has its cache filled through the proxy."""
    return ParquetDataset(cache, batch_size=100, source=remote, source_options={"endpoint": proxy.url})


def values_of(batch: Any) -> tuple[Any, ...]:
    """Return a batch as plain values."""
    return batch.index, batch["id"].tolist(), batch["noise"].numpy().tobytes()


def expected(published: Path, lanes: int = 1) -> list[tuple[Any, ...]]:
    """Return the batches of the epoch of the published snapshot."""
    return [values_of(batch) for batch in ParquetDataset(published, batch_size=100, lanes=lanes)]


def check_cache(cache: Path, lake: Path) -> None:
    """Compare what is published in the end with the source."""
    wait_for(lambda: CacheDirectory(cache).current() is not None)
    for path in lake.rglob("*.parquet"):
        assert (cache / "current" / path.relative_to(lake)).read_bytes() == path.read_bytes()
    assert pqcache.verify(cache, deep=True).damage == ()


def test_an_epoch_from_nothing(
    remote: str, slow: Proxy, published: Path, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, blocked, result = itertools.count(), threading.Event(), ArrivalQueue.result

    def hold(_: object) -> None:
        """Let the footers through, and the rest when the reader waits for it."""
        if next(seen) >= DAYS * FILES:
            blocked.wait(60)
        time.sleep(0.05)

    def asked_for(queue: ArrivalQueue, future: Any) -> Any:
        blocked.set()
        return result(queue, future)

    monkeypatch.setattr(ArrivalQueue, "result", asked_for)
    slow.clear()
    slow.rule(both(hold), method="GET", path=r"\.parquet")
    dataset = dataset_of(tmp_path / "cache", remote, slow)
    assert dataset.stats().arrivals.wanted_arrived_bytes < dataset.stats().arrivals.wanted_bytes
    assert [values_of(batch) for batch in dataset] == expected(published)
    assert dataset.stats().arrivals.waited_seconds > 0
    check_cache(tmp_path / "cache", lake)
    assert dataset.snapshot == CacheDirectory(tmp_path / "cache").snapshot().id
    dataset.set_epoch(1)
    assert len(list(dataset)) == 60


def test_a_run_that_is_killed_is_continued(
    remote: str, slow: Proxy, published: Path, lake: Path, tmp_path: Path
) -> None:
    footers, most = DAYS * FILES, DAYS * FILES + 2
    seen, killed = itertools.count(1), threading.Event()
    passed = threading.Semaphore(0)

    def hold(_: object) -> None:
        """Let the footers and two ranges through until the run is killed."""
        if next(seen) > most:
            killed.wait(60)
        passed.release()

    slow.clear()
    slow.rule(both(hold), method="GET", path=r"\.parquet")
    before = set(background_run._started)  # those of other tests may still be ending
    dataset = dataset_of(tmp_path / "cache", remote, slow)
    (run,) = set(background_run._started) - before
    loader = iter(Loader(dataset, num_workers=2, multiprocessing_context="fork"))
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: [values_of(batch) for batch in loader])
        for _ in range(footers + 2):
            assert passed.acquire(timeout=60)
        os.kill(run.pid, signal.SIGKILL)
        killed.set()
        assert found.result() == expected(published, 2)
    dataset_of(tmp_path / "cache", remote, slow)  # where all that is read was there, nobody has missed the run
    check_cache(tmp_path / "cache", lake)


def test_ranks_that_start_at_once_read_from_one_run(
    lake: Path, published: Path, tmp_path: Path, run_ranks: RunRanks
) -> None:
    cache = tmp_path / "cache"
    found = run_ranks([cache] * 2, workers=1, batch_size=100, source=str(lake))
    assert found == run_ranks([published] * 2, workers=1, batch_size=100)
    check_cache(cache, lake)
    becomes_true(lambda: len(pqcache.log(cache)) > 0)  # written when it is published
    assert [entry["published"] for entry in pqcache.log(cache)] == [True]


def test_a_server_that_is_silent_for_a_while(
    remote: str, slow: Proxy, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.clear()
    silent = slow.rule(stall(0, seconds=1.5), method="GET", path=r"\.parquet", first=DAYS * FILES, count=4)
    dataset = dataset_of(tmp_path / "cache", remote, slow)
    assert [values_of(batch) for batch in Loader(dataset)] == expected(published)
    assert silent.used == 4


def test_a_file_that_is_gone(remote: str, slow: Proxy, tmp_path: Path) -> None:
    slow.clear()
    slow.rule(status(404), method="GET", path=r"11-02/part-1\.parquet", first=1)  # its footer is read before
    dataset = dataset_of(tmp_path / "cache", remote, slow)
    with pytest.raises(SourceError, match=r"dt=2026-11-02/part-1\.parquet"):
        list(Loader(dataset))


def test_a_cache_of_another_source_is_refused(published: Path, lake: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(UsageError, match=f"is a copy of {lake}, and not of {other}; name another directory"):
        ParquetDataset(published, source=str(other))
    assert len(ParquetDataset(published, source=f"file://{lake}", batch_size=100)) == 60
