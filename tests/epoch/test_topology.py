"""Ranks and workers: each batch once, the same whoever reads it, and as many for every rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pqcache.torch import Loader
from tests.epoch.cases import CASES, Case
from tests.epoch.reading import Parts, Read, Reader, differences, read_tensors
from tests.epoch.tables import FEW, Source

LANES: dict[str, Any] = {"lanes": 12, "window": 3, "batch_size": 10, "seed": 7}
ONE = Reader()
ARROW = Reader("Cache.batches")


def read_ranks(source: Source, reader: Reader, columns: list[str], ranks: int, **options: Any) -> list[list[Read]]:
    return [reader.read(source, columns, ranks=ranks, rank=rank, **options)[0] for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (3, 0)])
def test_lanes_that_are_not_given(narrow: Source, ranks: int, workers: int) -> None:
    reader = Reader("Loader", workers)
    rows = reader.expected(narrow, FEW)
    for case in (Case(), CASES["partitions"]):
        ranks_of = read_ranks(narrow, reader, FEW, ranks, batch_size=10, **case.options)
        assert len({len(batches) for batches in ranks_of}) == 1
        once = {batch.index: batch.rows for batches in ranks_of for batch in batches}
        chosen = [rows[number] for number in case.chosen(narrow) or []]
        total = -(-len(chosen) // 10)
        assert not differences([row for index in range(total) for row in once[index]], chosen)
        assert sorted(once) == list(range(-(-total // ranks) * ranks))


@pytest.mark.parametrize(("ranks", "workers"), [(4, 0), (3, 2)])
def test_ranks_that_repeat_nothing(narrow: Source, ranks: int, workers: int) -> None:
    reader = Reader("DataLoader", workers)
    for options in ({"shuffle": False}, {"lanes": 12, "window": 2}):
        how: dict[str, Any] = {**options, "batch_size": 9, "pad": False}
        whole, _ = ONE.read(narrow, FEW, **how)
        parts = Parts(whole)
        parts.add(read_ranks(narrow, reader, FEW, ranks, **how), uneven=True)
        parts.check(ranks, pad=False)


def test_epochs_of_one_loader(narrow: Source) -> None:
    """Each epoch has an order of its own, which depends on its number alone."""
    wanted = [ONE.read(narrow, FEW, epoch=epoch, **LANES)[0] for epoch in range(3)]
    assert len({str([batch.rows for batch in batches]) for batches in wanted}) == 3
    every = [Counter(row for batch in batches for row in batch.rows) for batches in wanted]
    assert every[0] == every[1] == every[2]
    loader = Loader(ONE.dataset(narrow, FEW, **LANES), num_workers=2)
    assert [_rest(loader) for _ in range(2)] == wanted[:2]
    loader.set_epoch(1)
    assert _rest(loader) == wanted[1], "again"
    assert loader.epoch == 2
    dataset = ONE.dataset(narrow, FEW, **LANES)
    for epoch in (2, 1):
        assert read_tensors(dataset, "DataLoader", epoch=epoch)[0] == wanted[epoch]


def _rest(loader: Loader) -> list[Read]:
    return [Read.of(batch) for batch in loader]


def test_another_seed_is_another_order(narrow: Source) -> None:
    orders = [ARROW.read(narrow, ["id"], seed=seed, lanes=2, window=3)[0] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
