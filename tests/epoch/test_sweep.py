"""Options and topologies drawn at random, many of them: what the other modules say of a few."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pqcache import Split
from tests.epoch.reading import Reader
from tests.epoch.tables import FEW, Source
from tests.epoch.test_resume import run_with

pytestmark = pytest.mark.deep

CHOICES: list[dict[str, Any]] = [
    {},
    {"filters": "label > 0"},
    {"filters": "id in (100, 150, 222, 399)"},
    {"split": Split("id", 0.1, 0.6)},
    {"sample": 0.4},
    {"limit": 123},
    {"weights": "weight"},
    {"balance": "label"},
    {"shuffle": False},
    {"weights": {"label": {0: 2.5, ...: 0.5}}, "filters": "id < 350", "limit": 200},
]


@pytest.mark.parametrize("number", range(20))
def test_a_chain_of_topologies(narrow: Source, number: int) -> None:
    """An epoch that is stopped several times, and goes on with other ranks and workers each time."""
    rng = random.Random(number)
    options: dict[str, Any] = {
        **CHOICES[number % len(CHOICES)],
        "batch_size": rng.choice([1, 7, 16, 64]),
        "lanes": rng.choice([1, 4, 6, 12]),
        "window": rng.choice([1, 3, 40]),
        "seed": rng.randrange(100),
        "drop_last": rng.random() < 0.3,
    }
    epoch, steps = rng.randrange(3), list[tuple[int, Reader, int | None]]()
    if Reader().dataset(narrow, FEW, **options).batches_of(epoch) < 5:
        options["batch_size"] = 1
    left = Reader().dataset(narrow, FEW, **options).batches_of(epoch)
    while not steps or steps[-1][2] is not None:
        ranks = rng.choice([1, 1, 2, 3, 5])
        way, workers = rng.choice(["Loader", "Loader", "DataLoader"]), rng.choice([0, 0, 1, 2, 3]) if ranks < 3 else 0
        stop = None if len(steps) == 3 or left <= 2 * ranks else rng.randrange(1, 1 + left // ranks // 2)
        way = "Loader" if stop and workers else way  # a DataLoader's workers have no common state
        steps.append((ranks, Reader(way, workers), stop))
        left -= ranks * (stop or 0)
    run_with(narrow, FEW, options, steps, epoch)
