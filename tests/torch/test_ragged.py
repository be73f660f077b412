"""Padding of lists, by numpy and where that cannot by torch."""

from __future__ import annotations

import pytest
import torch

from pqcache.torch import Ragged

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
