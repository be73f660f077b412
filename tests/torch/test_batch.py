"""What a batch is outside of the loader: moved, pinned, kept, changed, sent."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pqcache.torch import Batch, Loader, ParquetDataset, Ragged

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Own:
    """Moves itself, as tokenizers' outputs do."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any, non_blocking: bool = False) -> Own:
        return Own(str(device))


def nested() -> dict[str, Any]:
    ones = torch.ones(3)
    return {
        "list": [ones, "text", [ones]],
        "tuple": (ones, 7, None),
        "pair": Pair(ones, {"inner": ones}),
        "ordered": OrderedDict(a=ones),
        "sample": Sample(ones, "x"),
        "ragged": [Ragged(ones, torch.tensor([0, 1, 3]))],
        "own": [Own()],
        "bytes": b"x",
    }


def test_to_moves_what_is_in_containers_and_keeps_their_types() -> None:
    found = Batch(nested()).to("meta")
    assert type(found) is Batch
    tensors = [
        *(found["list"][0], found["list"][2][0], found["tuple"][0], found["pair"].left, found["pair"].right["inner"]),
        *(found["ordered"]["a"], found["sample"].image, found["ragged"][0].values, found["ragged"][0].offsets),
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (type(found["pair"]), type(found["ordered"]), type(found["sample"])) == (Pair, OrderedDict, Sample)
    assert (found["list"][1], found["tuple"][1:], found["sample"].name, found["bytes"]) == (
        "text",
        (7, None),
        "x",
        b"x",
    )
    assert found["own"][0].device == "meta"


def test_pin_memory_reaches_what_is_in_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)  # there is no GPU to pin for
    found = Batch(nested()).pin_memory()
    tensors = [
        found["list"][0],
        found["tuple"][0],
        found["pair"].left,
        found["sample"].image,
        found["ragged"][0].values,
    ]
    assert all(tensor.tolist() == [2, 2, 2] for tensor in tensors)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("table")
    ids = np.arange(320)
    pq.write_table(pa.table({"id": ids, "x": ids * 0.5}), root / "a.parquet", row_group_size=80)
    return root


def _receive(received: Any, sent: Any) -> None:
    batch = received.get(timeout=60)
    batch["id"][0] = -5
    sent.put((batch.index, batch["x"].tolist()))


def test_a_batch_may_be_sent_to_another_process(table: Path) -> None:
    loader = Loader(ParquetDataset(table, batch_size=32, seed=1, lanes=2), num_workers=1)
    context = multiprocessing.get_context("fork")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(there, back))
    process.start()
    batches = list(loader)
    there.put(batches[3])
    assert back.get(timeout=60) == (3, batches[3]["x"].tolist())
    process.join(60)
    assert process.exitcode == 0
    assert sorted(i for batch in loader for i in batch["id"].tolist()) == list(range(320))


def _with_complex(batch: Batch) -> Any:
    values = torch.complex(batch["x"].float(), batch["id"].float())
    return {"id": batch["id"], "conjugate": values.conj(), "negative": values.conj().imag, "sum": values.sum().conj()}


def test_conjugate_tensors_of_a_transform_come_from_workers_as_they_were_made(table: Path) -> None:
    alone, sent = (
        list(
            Loader(ParquetDataset(table, batch_size=32, seed=1, lanes=2, transform=_with_complex), num_workers=workers)
        )
        for workers in (0, 1)
    )
    assert len(alone) == len(sent) == 10
    for one, other in zip(alone, sent, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
