"""The limit of bytes a second: one for all threads, by the time of day, for every way of downloading."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.store.sync.cache_run import BandwidthLimit, parse_timetable
from tests.conftest import Bucket
from tests.datasets import files_of, write_shop
from tests.forked_commands import run_pqcache

NOON = datetime(2026, 11, 20, 12, 0)


class Clock:
    """A clock that goes on by what is slept."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def limit(self, text: str) -> BandwidthLimit:
        return BandwidthLimit(text, clock=lambda: self.seconds, sleep=self.sleep, now=self.now)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds)


def test_bytes_take_their_time() -> None:
    clock = Clock()
    limit = clock.limit("100MB")
    for _ in range(300):
        limit.take(1 << 20)
    assert clock.seconds == pytest.approx(3.0)
    clock.seconds += 100  # what was not used is not saved up
    limit.take(200 << 20)
    assert clock.seconds == pytest.approx(105.0)


def test_the_limit_changes_while_a_thread_waits() -> None:
    clock = Clock()
    limit = clock.limit("08:00,1M 12:01,off 19:00,2M")
    limit.take(600 << 20)  # ten minutes at this rate, but a minute later there is none
    assert clock.seconds == pytest.approx(60, abs=1)
    limit.take(1 << 40)
    assert clock.seconds == pytest.approx(60, abs=1)
    clock.seconds = 7 * 3600
    limit.take(20 << 20)
    assert clock.seconds == pytest.approx(7 * 3600 + 10)
    clock.seconds = 17 * 3600  # five in the morning: as since the evening
    assert limit.rate() == 2 << 20


def test_threads_share_one_limit() -> None:
    def sleep(seconds: float) -> None:
        raise InterruptedError

    limit = BandwidthLimit("1MB", clock=lambda: 0.0, sleep=sleep)

    def take() -> None:
        with contextlib.suppress(InterruptedError):
            limit.take(1 << 19)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(take)
    assert limit._free == pytest.approx(2.0), "the bytes of all threads follow one another"


@pytest.mark.parametrize("text", ["", "fast", "8:00", "25:00,1M", "08:00,1M 9", "08:00,fast", "0", "08:00,0"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(pqcache.UsageError, match="--bwlimit"):
        parse_timetable(text)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that limits were asked for, which wait for none."""
    found: list[int] = []
    monkeypatch.setattr(BandwidthLimit, "take", lambda self, amount: found.append(amount))
    return found


@pytest.mark.parametrize("how", [{}, {"fill": True}, {"columns": ["id"]}, {"where": "id > 10"}])
def test_every_way_of_downloading_is_limited(how: dict[str, Any], taken: list[int], tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=2, files=1, rows=50)
    report = pqcache.sync(tmp_path / "shop", tmp_path / "cache", bwlimit="100MB", **how)
    assert sum(taken) == report.fetched_bytes > 0


def test_what_is_compared_and_repaired_is_limited(taken: list[int], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    size = pqcache.sync(write_shop(tmp_path / "shop", days=2, files=1, rows=50), cache).bytes
    pqcache.sync(cache, compare="content", bwlimit="100MB")
    assert sum(taken) == size
    pqcache.verify(cache, compare="content", bwlimit="100MB")
    assert sum(taken) == 2 * size
    damaged = cache / "current" / files_of(cache / "current")[0]
    damaged.chmod(0o644)
    damaged.write_bytes(b"PAR1")
    assert pqcache.verify(cache, repair=True, bwlimit="100MB").ok
    assert sum(taken) == 2 * size + damaged.stat().st_size


@pytest.mark.s3
def test_a_repartition_of_a_remote_source_is_limited(taken: list[int], s3_bucket: Bucket, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, files=2, rows=50)
    for path in shop.rglob("*.parquet"):
        s3_bucket.client.upload_file(str(path), s3_bucket.name, f"shop/{path.relative_to(shop)}")
    report = pqcache.repartition(f"{s3_bucket.url}/shop", tmp_path / "dest", bwlimit="100MB", row_group_size="1MB")
    assert report.rows == 100
    assert sum(taken) == sum(path.stat().st_size for path in shop.rglob("part*.parquet"))


def test_where_there_is_nothing_to_limit(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, files=1, rows=50)
    pqcache.sync(shop, tmp_path / "cache")
    with pytest.raises(pqcache.UsageError, match="--bwlimit: is only for writing to DEST"):
        pqcache.repartition(tmp_path / "cache", bwlimit="1MB")
    with pytest.raises(pqcache.UsageError, match="--bwlimit: excludes --scheduler"):
        pqcache.repartition(shop, tmp_path / "dest", bwlimit="1MB", scheduler="tcp://127.0.0.1:1")


def test_the_option(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1, rows=50)
    done = run_pqcache("sync", tmp_path / "shop", tmp_path / "cache", "--bwlimit", "00:00,1G 12:00,off")
    assert done.returncode == 0, done.stderr
    assert "bwlimit" not in (tmp_path / "cache" / "pqcache.toml").read_text()
    assert run_pqcache("sync", tmp_path / "cache", "--bwlimit", "fast").returncode == 2
