"""A FIFO in place of a file: opening one waits for a writer, who never comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.errors import PqcacheError
from pqcache.store.drivers.local import LocalSource
from pqcache.torch import ParquetDataset
from tests.datasets import write_shop


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """What blocks is ended: the tests fail in place of hanging."""

    def blocked(*_: Any) -> None:
        raise AssertionError("it waits for a writer")

    before = signal.signal(signal.SIGALRM, blocked)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_fifo(path: Path) -> None:
    path.parent.chmod(0o755)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_a_source(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, rows=20)
    source = LocalSource(str(shop), {})
    file = next(file for file in source.list() if file.path.endswith("part-00000.parquet"))
    make_fifo(shop / file.path)
    for call in (
        lambda: list(source.read(file.path, 0, file.identity.size)),  # it was exchanged after it was listed
        lambda: list(source.list()),
        lambda: pqcache.sync(shop, tmp_path / "cache"),
        lambda: pqcache.repartition(shop, tmp_path / "out", row_group_size="1MB"),
        lambda: pqcache.inspect(shop),
        lambda: ParquetDataset(shop),
    ):
        with pytest.raises(PqcacheError, match=f"{file.path}: not a regular file; move it away"):
            call()
    assert not (tmp_path / "cache").exists()


def test_a_file_of_the_cache(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1, rows=20), tmp_path / "cache"
    pqcache.sync(shop, cache)
    for name in ("lock", "history.jsonl.zst"):
        (cache / name).rename(tmp_path / name)
        make_fifo(cache / name)
        with pytest.raises((PqcacheError, OSError), match=name):
            pqcache.sync(cache)
        (tmp_path / name).rename(cache / name)


@pytest.mark.parametrize("name", ["checksums.json", "files.arrow", "lease", "row_groups.arrow", "summary.json"])
def test_a_file_of_the_snapshot(name: str, tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1, rows=20), tmp_path / "cache"
    pqcache.sync(shop, cache)
    make_fifo(cache / "current" / "_pqcache" / name)
    calls: list[Callable[[], object]] = [
        lambda: list(ParquetDataset(cache, ["id"], batch_size=100)),
        lambda: pqcache.inspect(cache),
        lambda: pqcache.verify(cache),
        lambda: pqcache.sync(cache),
    ]
    for call in calls:  # some do not need the file
        with suppress(PqcacheError):
            call()


def test_a_data_file_of_the_snapshot(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1, rows=20), tmp_path / "cache"
    pqcache.sync(shop, cache)
    path = next((cache / "current").resolve().rglob("*.parquet"))
    make_fifo(path)
    with pytest.raises(PqcacheError, match=f"{path.name}: not a regular file; move it away"):
        list(ParquetDataset(cache, ["id"], batch_size=100))
    assert not pqcache.verify(cache).ok
