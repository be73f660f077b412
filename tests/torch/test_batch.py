"""What a batch is outside of the loader: moved, pinned, padded, sent."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from pqcache.torch import Batch, Loader, ParquetDataset, Ragged
from tests.torch.conftest import ROWS, ids_of

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


def _receive(received: Any, sent: Any) -> None:
    batch = received.get(timeout=60)
    batch["id"][0] = -5
    sent.put((batch.index, batch["tokens"].to_list()))


def test_a_batch_may_be_sent_to_another_process(table: Path) -> None:
    loader = Loader(ParquetDataset(table, batch_size=32, seed=1, lanes=2), num_workers=1)
    context = multiprocessing.get_context("fork")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(there, back))
    process.start()
    batches = list(loader)
    there.put(batches[3])
    assert back.get(timeout=60) == (3, batches[3]["tokens"].to_list())
    process.join(60)
    assert process.exitcode == 0
    assert sorted(ids_of(loader)) == list(range(ROWS))


def _with_complex(batch: Batch) -> Any:
    values = torch.complex(batch["id"] / 2, batch["id"].float())
    return {"id": batch["id"], "conjugate": values.conj(), "negative": values.conj().imag, "sum": values.sum().conj()}


def test_conjugate_tensors_of_a_transform_come_from_workers_as_they_were_made(table: Path) -> None:
    read = [ParquetDataset(table, batch_size=32, seed=1, lanes=2, transform=_with_complex) for _ in range(2)]
    alone, sent = list(Loader(read[0])), list(Loader(read[1], num_workers=1))
    assert len(alone) == len(sent) == 16
    for one, other in zip(alone, sent, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


OFFSETS = torch.tensor([0, 3, 3, 8, 9])
KINDS = [torch.int64, torch.uint8, torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


def items_of(kind: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(9 * max(1, sum(shape))).reshape(9, *shape).to(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (2,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("length", [None, 0, 2, 5, 7])
def test_padding_is_the_items_and_the_value(kind: torch.dtype, shape: tuple[int, ...], length: int | None) -> None:
    values = items_of(kind, *shape)
    expected = torch.full((4, 5 if length is None else length, *shape), 1, dtype=kind)
    for row, (start, stop) in enumerate(zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)):
        item = values[start:stop][: expected.shape[1]]
        expected[row, : len(item)] = item
    found = Ragged(values, OFFSETS).to_padded(1, length)
    assert found.dtype == kind
    assert torch.equal(found, expected)
    assert torch.equal(Ragged(values, OFFSETS)[1:].to_padded(1, length), expected[1:, : found.shape[1]]) or not length


def test_padding_keeps_gradients() -> None:
    values = items_of(torch.float32).requires_grad_()
    found = Ragged(values, OFFSETS).to_padded(-1.0, length=4)
    assert found.tolist() == [[0, 1, 2, -1], [-1] * 4, [3, 4, 5, 6], [8, -1, -1, -1]]
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 1, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("kind", [torch.int32, torch.bfloat16], ids=str)
def test_nothing_is_padded_to_the_value(kind: torch.dtype) -> None:
    empty = Ragged(torch.zeros(0, dtype=kind), torch.zeros(3, dtype=torch.int64))
    assert empty.to_padded(7, length=2).tolist() == [[7, 7], [7, 7]]
    assert empty.to_padded(7).shape == (2, 0)
    assert Ragged(torch.zeros(0, dtype=kind), torch.zeros(1, dtype=torch.int64)).to_padded(7).shape == (0, 0)
