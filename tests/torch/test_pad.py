"""pad=False: every row once over all ranks, nothing repeated, for evaluation."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
from tests.torch.conftest import ROWS, ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

BATCHES = 16


def dataset(table: Path, ranks: int, rank: int, **options: Any) -> ParquetDataset:
    chosen = {"batch_size": 32, "shuffle": False, "pad": False, "num_replicas": ranks, "rank": rank, **options}
    return ParquetDataset(table, **chosen)


def test_training_on_uneven_ranks_is_warned_of(table: Path) -> None:
    for ranks, with_gradients, said in ((3, True, 1), (3, False, 0), (4, True, 0)):
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(with_gradients):
            warnings.simplefilter("always")
            next(iter(Loader(dataset(table, ranks, 0))))
        assert sum("pad=False" in str(warning.message) for warning in caught) == said


def test_rows_without_a_batch_size(table: Path) -> None:
    data = [dataset(table, 3, rank, batch_size=None) for rank in range(3)]
    assert sorted(int(row["id"]) for one in data for row in one) == list(range(ROWS))
    assert [len(one) for one in data] == [167, 167, 166] == list(data[0].batches_per_rank)


@pytest.mark.parametrize(("workers", "stops"), [(0, (2, 4, 5, 6)), (2, (4,))])
def test_every_rank_goes_on_where_it_was(table: Path, workers: int, stops: tuple[int, ...]) -> None:
    """States are equal on ranks that have consumed as many batches, and at the end of the epoch."""
    for stop in stops:
        states, seen = [], []
        for rank in range(3):
            loader = Loader(dataset(table, 3, rank, lanes=6), num_workers=workers)
            for number, batch in enumerate(loader, 1):
                seen += ids_of([batch])
                if number == stop:
                    break
            states.append(loader.state_dict())
        if stop != 6:
            assert states[0] == states[1] == states[2]
        else:  # rank 0 gave the last batch of all; the others have seen the end of the epoch
            assert {state["batch"] for state in states} == {BATCHES}
        for ranks in (2, 3):
            rest = []
            for rank in range(ranks):
                loader = Loader(dataset(table, ranks, rank))
                loader.load_state_dict(states[-1])
                if loader.epoch == 0:
                    rest += ids_of(loader)
            assert sorted(seen + rest) == list(range(ROWS)), (stop, ranks)


def test_a_plain_dataset_goes_on_where_it_was(table: Path) -> None:
    data = dataset(table, 3, 1)
    assert len(list(data)) == 5
    assert data.state_dict()["batch"] == BATCHES, "this rank has no batch in the last round"


def test_a_mix_is_not_padded_either(table: Path) -> None:
    def mix(rank: int) -> Mix:
        parts = {name: ParquetDataset(table, batch_size=32, seed=i) for i, name in enumerate("ab")}
        return Mix(parts, pad=False, num_replicas=5, rank=rank)

    seen = [(b.source, i) for rank in range(5) for b in mix(rank) for i in b["id"].tolist()]
    assert Counter(seen) == Counter((name, i) for name in "ab" for i in range(ROWS))
    assert mix(0).batches_per_rank == (7, 7, 6, 6, 6)
    with pytest.raises(UsageError, match=r"dataset 'a'.*pad=False.*mix instead"):
        Mix({"a": ParquetDataset(table, pad=False)})


def test_what_cannot_be_said_together(table: Path) -> None:
    with pytest.raises(UsageError, match="drop_last=True and pad=False"):
        dataset(table, 2, 0, drop_last=True)
