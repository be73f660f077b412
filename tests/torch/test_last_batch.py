"""The last batch as Accelerate expects it: of one size on every rank, with the number of rows that are real."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pqcache.reader.order import EpochShare
from pqcache.torch import Batch, Ragged
from pqcache.torch.batch import Position
from pqcache.torch.foreign_loaders import filled, is_last, rows_of_last_round

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Columns:
    x: torch.Tensor


def test_what_has_rows_is_filled_up_with_them() -> None:
    strings = Ragged(torch.tensor(list(b"abbccc"), dtype=torch.uint8), torch.tensor([0, 1, 3, 6]), "str")
    lists = Ragged(strings, torch.tensor([0, 2, 2, 3]))
    batch = Batch(
        {"id": torch.arange(3), "name": strings, "names": lists, "user": {"age": torch.ones(3, 2)}},
        Position(epoch=2, index=9),
    )
    found = filled(batch, 3, 8)
    assert type(found) is Batch
    assert (found.epoch, found.index) == (2, 9)
    assert found["id"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert found["name"].to_list() == ["a", "bb", "ccc", "a", "bb", "ccc", "a", "bb"]
    assert found["names"].to_list() == [["a", "bb"], [], ["ccc"]] * 2 + [["a", "bb"], []]
    assert found["user"]["age"].shape == (8, 2)


def test_what_a_transform_returns_is_filled_up() -> None:
    x = torch.arange(3)
    assert [len(v) for v in filled((x, np.arange(3), ["a", "b", "c"]), 3, 4)] == [4, 4, 4]
    assert filled(Pair(x, [x, x]), 3, 4).y[1].tolist() == [0, 1, 2, 0]
    assert filled(Columns(x), 3, 4).x.tolist() == [0, 1, 2, 0]
    other = {"weight": torch.tensor(2.0), "table": torch.zeros(5, 3), "name": "batch", "lengths": np.array(3)}
    assert all(filled(other, 3, 4)[name] is value for name, value in other.items()), "not rows"


@pytest.mark.parametrize(
    ("share", "rows", "last"),
    [
        ({"total": 9}, 4, [True]),
        ({"total": 9, "ranks": 2}, 4, [True, False]),
        ({"total": 10, "ranks": 2}, 14, [False, True]),
        ({"total": 11, "ranks": 4, "start": 8}, 24, [False, False, True, False]),
        ({"total": 11, "ranks": 4, "drop_last": True}, 40, [False] * 4),
        ({"total": 9, "ranks": 2, "start": 3}, -1, [True, False]),
        ({"total": 1, "ranks": 2}, 4, [True, True]),  # the repeat of a short batch is short
    ],
)
def test_the_rows_of_the_last_round_are_counted(share: dict[str, int], rows: int, last: list[bool]) -> None:
    """Batches of 10 rows, the last of 4."""
    ranks = share.get("ranks", 1)
    shares = [EpochShare(lanes=ranks, rank=rank, **share) for rank in range(ranks)]  # type: ignore[arg-type]
    assert {rows_of_last_round(share, 10, 4) for share in shares} == {rows}
    assert [is_last(share) for share in shares] == last


def test_a_packed_batch_is_filled_with_its_sequences() -> None:
    packed = {
        "tokens": torch.arange(12).reshape(3, 4),
        "position_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2]]),
        "cu_seqlens": torch.tensor([0, 4, 6, 8, 9, 12], dtype=torch.int32),
    }
    batch = filled(Batch(packed, Position(index=5)), 3, 5)
    assert batch["tokens"].tolist() == [packed["tokens"][row].tolist() for row in (0, 1, 2, 0, 1)]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 8, 9, 12, 16, 18, 20]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert (list(batch), batch.index) == (list(packed), 5)
