"""A low limit of open files: what does not fit is an error that names the limit, and never damage."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError
from pqcache.torch import ParquetDataset


@pytest.fixture
def many(tmp_path: Path) -> Path:
    for number in range(100):
        (tmp_path / "many" / f"n={number % 3}").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [number]}), tmp_path / "many" / f"n={number % 3}" / f"{number}.parquet")
    return tmp_path / "many"


def limited_to(descriptors: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pqcache", *map(str, arguments)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_256_are_enough_for_many_jobs_and_too_few_are_named(many: Path, tmp_path: Path) -> None:
    done = limited_to(256, "sync", many, tmp_path / "cache", "--jobs", 64, "--row-group-size", "1MB")
    assert done.returncode == 0, done.stderr
    done = limited_to(5, "sync", many, tmp_path / "other", "--jobs", 32)  # too few to list directories
    assert done.returncode == 1
    assert "too many open files; raise the limit with 'ulimit -n 4096', or use fewer jobs or workers" in done.stderr
    assert not (tmp_path / "other" / "current").exists()


def test_the_loader_does_not_call_a_file_damaged(many: Path) -> None:
    dataset = ParquetDataset(many, ["id"], batch_size=10)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(ParquetError, match=r"\d+\.parquet: too many open files; raise the limit"):
            list(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert pqcache.inspect(many) is not None
