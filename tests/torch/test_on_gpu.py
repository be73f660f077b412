"""Batches on a real GPU, where there is one: what a late device stands in for elsewhere.

Work of the trainer keeps the GPU behind the program all the time, so that what is not waited for is seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pqcache.torch import Batch, Loader, ParquetDataset, Prefetch, Ragged
from tests.torch.conftest import ids_of
from tests.torch.test_prefetch import EVERY_ROW, SHAPES, content, dataset

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"),
    pytest.mark.usefixtures("few_cores_are_fine"),
]

READ: dict[str, Any] = {"batch_size": 64, "nulls": "mask", "seed": 1, "lanes": 2}


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with columns of all kinds, of 4 KB to 400 KB a batch of 64."""
    rng, rows = np.random.default_rng(0), 4000
    lengths = rng.integers(0, 2000, rows)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = rng.integers(0, 1000, ends[-1]).astype(np.int32)
    table = {
        "id": np.arange(rows),
        "flag": np.arange(rows) % 3 > 0,
        "small": pa.array([None if i % 7 == 0 else i % 100 for i in range(rows)], pa.int8()),
        "half": rng.random(rows).astype(np.float16),
        "text": [f"row {i} é" for i in range(rows)],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(16 * rows)), 16),
        "tokens": pa.ListArray.from_arrays(pa.array(ends), pa.array(values)),
        "nested": [[[i] * (i % 3)] * (i % 4) for i in range(rows)],
        "empty": pa.array([[]] * rows, pa.list_(pa.int32())),
    }
    root = tmp_path_factory.mktemp("columns")
    pq.write_table(pa.table(table), root / "a.parquet", row_group_size=250)
    return root


@pytest.fixture(scope="module")
def expected(columns: Path) -> list[Any]:
    """The batches in host memory, whoever reads them."""
    return [content(batch) for batch in Loader(ParquetDataset(columns, **READ))]


def kept_behind(batches: Any) -> Iterator[Any]:
    """Yield batches, each after much work was given to the GPU: it is far behind when the program has all of them."""
    matrix = torch.rand(1024, 1024, device="cuda")
    for batch in batches:
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(0, 1)
        yield batch


def changed(batch: Batch) -> Batch:
    """Return a batch whose tensors the GPU makes from another one's, on the current stream, when its work comes."""

    def of(value: Any) -> Any:
        if isinstance(value, Ragged):
            return Ragged(of(value.values), of(value.offsets), value.kind)
        if isinstance(value, torch.Tensor):
            assert value.is_cuda
            return value.clone()
        return value

    return Batch({name: of(value) for name, value in batch.items()}, batch.position)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory", ["1GB", "1MB", "100KB"])
def test_every_batch_arrives_whole(columns: Path, expected: list[Any], workers: int, memory: str) -> None:
    """With enough pinned memory, with just enough for most batches, and with too little for any."""
    loader = Prefetch(Loader(ParquetDataset(columns, **READ), num_workers=workers), "cuda", memory=memory)
    copies = [changed(batch) for batch in kept_behind(loader)]
    assert [content(batch.to("cpu")) for batch in copies] == expected


def test_batches_that_are_kept_are_not_written_to(columns: Path, expected: list[Any]) -> None:
    kept = list(kept_behind(Prefetch(Loader(ParquetDataset(columns, **READ)), "cuda")))
    assert [content(batch.to("cpu")) for batch in kept] == expected


def test_a_trainer_on_a_stream_of_its_own(columns: Path, expected: list[Any]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        loader = Prefetch(Loader(ParquetDataset(columns, **READ)), "cuda", memory="1MB")
        copies = [changed(batch) for batch in kept_behind(loader)]
        assert [content(batch.to("cpu")) for batch in copies] == expected


@pytest.mark.parametrize("memory", [1 << 20, 3 << 20, 1 << 30])
def test_no_more_than_memory_is_pinned(columns: Path, memory: int) -> None:
    gc.collect()  # what other tests pinned
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    loader = Prefetch(Loader(ParquetDataset(columns, batch_size=64, nulls="mask")), "cuda", memory=memory)
    most = 0
    for _ in range(3):
        for _ in kept_behind(loader):
            most = max(most, torch.cuda.host_memory_stats()["allocated_bytes.current"] - before)
    assert 0 < most <= min(memory, 4 << 20)  # a batch has less than 1 MB


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_moves_its_batches(columns: Path, expected: list[Any], workers: int, pinned: bool) -> None:
    loader = Loader(ParquetDataset(columns, **READ), num_workers=workers, device="cuda", pin_memory=pinned)
    copies = [changed(batch) for batch in kept_behind(loader)]
    assert [content(batch.to("cpu")) for batch in copies] == expected


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("sparse", "with a gradient")])
def test_what_transforms_return(table: Path, shape: str) -> None:
    expected = [content(batch) for batch in Loader(dataset(table, batch_size=20, transform=SHAPES[shape]))]
    found = list(kept_behind(Prefetch(Loader(dataset(table, batch_size=20, transform=SHAPES[shape])), "cuda")))
    assert [content(batch) for batch in found] == expected


def test_sparse_tensors_and_those_with_a_gradient_are_moved(table: Path) -> None:
    made = dataset(table, transform=lambda b: {"ids": b["id"], "s": torch.eye(3).to_sparse(), "g": torch.ones(2)})
    for batch in kept_behind(Prefetch(Loader(made), "cuda")):
        assert {value.device.type for value in batch.values()} == {"cuda"}
        assert batch["s"].to_dense().tolist() == torch.eye(3).tolist()


def test_an_epoch_that_is_left_and_the_ones_after_it(table: Path) -> None:
    loader = Prefetch(Loader(dataset(table), num_workers=2), "cuda")
    first = [batch["id"].tolist() for _, batch in zip(range(5), kept_behind(loader), strict=False)]
    state = loader.state_dict()
    rest = Prefetch(Loader(dataset(table)), "cuda")
    rest.load_state_dict(state)
    assert sorted([*chain(*first), *ids_of(kept_behind(rest))]) == EVERY_ROW
    assert sorted(ids_of(kept_behind(loader))) == EVERY_ROW


def test_a_graph_that_is_captured_in_the_loop(columns: Path) -> None:
    """Other threads may use the GPU meanwhile if the capture is of its own thread, as torch.compile's are."""
    expected = [batch["vector"].sum() for batch in Loader(ParquetDataset(columns, columns=["vector"], batch_size=64))]
    total, totals = torch.zeros((), dtype=torch.float64, device="cuda"), []
    for batch in kept_behind(Prefetch(Loader(ParquetDataset(columns, columns=["vector"], batch_size=64)), "cuda")):
        vector = batch["vector"]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total.copy_(vector.sum())
        graph.replay()
        totals.append(total.clone())
    assert torch.allclose(torch.stack(totals).cpu(), torch.stack(expected))


def test_lightning(columns: Path) -> None:
    """Lightning moves the batches of a Loader itself, and those of a Prefetch are there already."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(16, 1), []

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            places = {batch["id"].device.type, batch["vector"].device.type, batch["tokens"].values.device.type}
            assert places == {"cuda"}
            self.seen.append(batch["id"].clone())
            return self.layer(batch["vector"].float()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    for ahead in (False, True):
        dataset = ParquetDataset(columns, columns=["id", "vector", "tokens"], batch_size=64)
        loader: Any = Loader(dataset, num_workers=2)
        if ahead:
            loader = Prefetch(loader, "cuda")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        model = Model()
        lightning.Trainer(accelerator="gpu", devices=1, max_epochs=2, **quiet).fit(model, loader)
        assert sorted(torch.cat(model.seen).tolist()) == sorted([*range(4000)] * 2)
