"""Which process this is, as torch.distributed and JAX say, and what Cache.batches does with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import UsageError
from pqcache.reader.ranks import count_and_number

ROWS = 500
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}  # of a job of four tasks


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A complete cache, and one of a node's share."""
    root = tmp_path_factory.mktemp("processes")
    (root / "lake").mkdir()
    for number in range(4):
        ids = list(range(number * 125, number * 125 + 125))
        pq.write_table(pa.table({"id": ids}), root / "lake" / f"{number}.parquet", row_group_size=50)
    pqcache.sync(root / "lake", root / "cache")
    pqcache.sync(root / "lake", root / "share", shard="0/2")
    return [root / "cache", root / "share"]


def jax_of(count: int, number: int, **more: Any) -> Any:
    return SimpleNamespace(process_count=lambda: count, process_index=lambda: number, **more)


def ids_of(cache: Path, **options: Any) -> list[int]:
    found = pqcache.Cache.open(cache).batches(["id"], batch_size=32, **options)
    return [i for batch in found for i in batch["id"].to_pylist()]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_"))]:
        monkeypatch.delenv(name)


def torch_of(count: int, number: int) -> Any:
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: count,
        get_rank=lambda: number,
    )


def test_processes_share_the_batches(caches: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for number in range(2):
        monkeypatch.setitem(sys.modules, "jax", jax_of(2, number))
        seen.append(ids_of(caches[0], seed=4))
    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    assert len(seen[0]) < ROWS
    assert ids_of(caches[0], seed=4, num_replicas=1) == ids_of(caches[0], seed=4, num_replicas=1, rank=0)
    assert sorted(ids_of(caches[0], num_replicas=1)) == list(range(ROWS)), "what is given wins"
    with pytest.raises(UsageError, match="num_replicas=0"):
        ids_of(caches[0], num_replicas=0)


def test_jax_is_not_started_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> int:
        raise AssertionError("this would start the devices")

    idle = SimpleNamespace(is_initialized=lambda: False)
    jax = SimpleNamespace(process_count=start, process_index=start, distributed=idle)
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert count_and_number() == (1, 0)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(backends_are_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "jax", jax_of(4, 3, distributed=idle))
    assert count_and_number() == (4, 3)


def test_processes_that_are_numbered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", jax_of(2, 1))
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_of(2, 1))
    assert count_and_number() == (2, 1)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_of(1, 0))
    assert count_and_number() == (2, 1), "one that trains alone"
    monkeypatch.setitem(sys.modules, "torch.distributed", torch_of(4, 1))
    with pytest.raises(UsageError, match=r"torch\.distributed says 1 of 4 and JAX says 1 of 2"):
        count_and_number()


def test_a_share_is_not_divided_among_the_processes_of_all_nodes(
    caches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ids_of(caches[1])
    assert 0 < len(alone) < ROWS
    monkeypatch.setitem(sys.modules, "jax", jax_of(2, 0))
    with pytest.raises(UsageError, match=r"share 0/2 alone.*num_replicas="):
        ids_of(caches[1])
    assert sorted(ids_of(caches[1], num_replicas=1)) == sorted(alone)


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_a_process_of_a_launcher_says_which_one_it_is(
    caches: list[Path], monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    from pqcache.torch import ParquetDataset

    for read in (lambda: ids_of(caches[0]), lambda: list(ParquetDataset(caches[0]))):
        with pytest.raises(UsageError, match=r"=2: this is one of several processes.*num_replicas=2 and rank=1"):
            read()
    assert len(ids_of(caches[0], num_replicas=2, rank=1)) < ROWS
    assert len(ids_of(caches[0], num_replicas=1, rank=0)) == ROWS


@pytest.mark.parametrize(
    "alone",
    [
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script, which runs once
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_a_process_that_is_alone_reads_everything(
    caches: list[Path], monkeypatch: pytest.MonkeyPatch, alone: dict[str, str]
) -> None:
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    assert len(ids_of(caches[0])) == ROWS
