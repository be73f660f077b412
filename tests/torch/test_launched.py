"""Processes of a launcher, and ranks that are others than when a share was opened."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
from pqcache.torch.distributed import NodeShares

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = 200


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": np.arange(ROWS)}), tmp_path / "a.parquet", row_group_size=50)
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts a process."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def rows_in(batches: Any) -> int:
    return sum(len(batch["id"]) for batch in batches)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("context", [None, "fork"])
def test_ranks_without_a_process_group_do_not_read_everything(table: Path, context: str | None) -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context} if context else {}
    data = ParquetDataset(table, batch_size=32)  # may be made before init_process_group
    mix = Mix({"a": ParquetDataset(table, batch_size=32)})
    reads = [lambda: list(DataLoader(data, batch_size=None, **options)), lambda: list(Loader(mix, **options))]
    for read in (*reads, lambda: len(data)):
        with pytest.raises(UsageError, match=r"WORLD_SIZE=2.*init_process_group\(\).*num_replicas="):
            read()
    assert rows_in(ParquetDataset(table, num_replicas=1, rank=0)) == ROWS


def test_one_process_of_a_launcher_reads_everything(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # without a RANK no launcher has started this process
    assert rows_in(ParquetDataset(table)) == ROWS
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rows_in(ParquetDataset(table)) == ROWS


def test_a_share_is_read_on_the_rank_that_opened_it(table: Path) -> None:
    data = ParquetDataset(table, batch_size=32)
    shares = {"node": 0, "rows": (ROWS, ROWS), "ranks": 1, "rank": 0, "listing": "", "row_groups": "", "largest": ()}
    data._reader.nodes = NodeShares(**shares, of_all=(2, 0))
    for other in (data, pickle.loads(pickle.dumps(ParquetDataset(table)))):
        other._reader.nodes = data._reader.nodes
        with pytest.raises(UsageError, match=r"share 0/2: it was opened on rank 0 of 2 and is read on rank 0 of 1"):
            list(other)
