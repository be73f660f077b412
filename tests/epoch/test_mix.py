"""Mix: the rows of each dataset pass after pass, its share of the batches, the same whoever reads them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pqcache.torch import Loader, Mix, ParquetDataset
from tests.epoch.forms import Row, form_of
from tests.epoch.reading import Parts, Read, differences, read_tensors
from tests.epoch.tables import FEW, Source, fills_of

MORE = ["id", "tensor", "user", "tokens", "string null", "hour"]


class Parted:
    """Datasets of one mix: their options, and the rows that each pass of one has."""

    def __init__(self, source: Source) -> None:
        self.source, self.fills = source, fills_of(source.rows.select(FEW))
        rows, hours = source.rows_in(MORE, "mask"), source.rows["hour"].to_pylist()
        self.rows: dict[str, list[Row]] = {
            "all": source.rows_in(FEW, self.fills),
            "some": [row for row, hour in zip(rows, hours, strict=True) if hour == 8],
        }

    def datasets(self, shuffle: bool = True) -> dict[str, ParquetDataset]:
        """Return the datasets, opened anew."""
        path = self.source.path
        few: dict[str, Any] = {"filters": "hour = 8", "batch_size": 9, "window": 2, "seed": 1}
        return {
            "all": ParquetDataset(path, FEW, nulls=self.fills, batch_size=12, window=3, shuffle=shuffle),
            "some": ParquetDataset(path, MORE, nulls="mask", shuffle=shuffle, **few),
        }

    def mix(self, shuffle: bool = True, **options: Any) -> Mix:
        """Return a mix."""
        return Mix(self.datasets(shuffle), **{"lanes": 6, "seed": 3, **options})


@pytest.fixture
def parted(narrow: Source) -> Parted:
    return Parted(narrow)


def by_source(batches: list[Read], parted: Parted) -> dict[str, list[Row]]:
    """Return the rows of each dataset; they have different numbers of columns."""
    widths = {len(rows[0]): name for name, rows in parted.rows.items()}
    found: dict[str, list[Row]] = {name: [] for name in parted.rows}
    for batch in batches:
        found[widths[len(batch.rows[0])]] += batch.rows
    return found


def test_an_epoch_is_each_row_of_each_dataset_once(parted: Parted) -> None:
    mix = parted.mix()
    batches, _ = read_tensors(mix, "Loader", 2, epoch=1)
    assert [batch.index for batch in batches] == list(range(len(mix)))
    found = by_source(batches, parted)
    for name, rows in parted.rows.items():
        assert not differences(found[name], rows)


@pytest.mark.parametrize(("epoch_length", "shuffle"), [("first_exhausted", False), (17, True)])
def test_passes_have_each_row_once(parted: Parted, epoch_length: Any, shuffle: bool) -> None:
    """Over epochs; and after any number of batches each dataset has given its share."""
    mix = parted.mix(shuffle, weights={"all": 1, "some": 3}, epoch_length=epoch_length, lanes=2)
    total: dict[str, list[Row]] = {"all": [], "some": []}
    for epoch in range(4):
        mix.set_epoch(epoch)
        given: Counter[str] = Counter()
        for batch in mix:
            given[batch.source] += 1
            assert abs(given["some"] - 0.75 * given.total()) <= 2
            total[batch.source] += Read.of(batch).rows
        assert given == mix.counts
    for name, found in total.items():
        times = Counter(found)
        assert times.keys() <= set(parted.rows[name])
        passes, more = divmod(len(found), len(parted.rows[name]))
        assert set(times.values()) <= {passes, passes + 1}
        assert sum(count == passes + 1 for count in times.values()) == more


STEPS: list[tuple[dict[str, Any], list[tuple[int, int, int | None]]]] = [  # ranks, workers, batches of each rank
    ({}, [(1, 2, 5), (2, 1, 4), (1, 0, None)]),
    ({"weights": {"all": 2, "some": 1}, "epoch_length": 31}, [(3, 0, 3), (5, 0, 2), (2, 0, None)]),
]


@pytest.mark.parametrize(("options", "steps"), STEPS, ids=["once", "shares"])
def test_any_batch_with_any_ranks_and_workers(
    parted: Parted, options: dict[str, Any], steps: list[tuple[int, int, int | None]]
) -> None:
    parts = Parts(read_tensors(parted.mix(**options), "ParquetDataset")[0])
    state: dict[str, Any] | None = None
    for ranks, workers, stop in steps:
        found, states = [], []
        for rank in range(ranks):
            mix = parted.mix(num_replicas=ranks, rank=rank, **options)
            batches, after = read_tensors(mix, "Loader", workers, state=state, stop=stop)
            found.append(batches)
            states.append(after)
        assert all(one == states[0] for one in states)
        parts.add(found)
        state = states[0]
    parts.check(steps[-1][0])


def test_rows_of_several_datasets_in_one_batch(parted: Parted) -> None:
    narrow, fills, rows = parted.source, parted.fills, parted.rows["all"]
    labels = narrow.rows["label"].to_pylist()
    datasets = {
        f"label {label}": ParquetDataset(
            narrow.path, FEW, nulls=fills, filters=f"label = {label}", batch_size=6 - label, drop_last=True, window=2
        )
        for label in (0, 1)
    }
    found: list[Row] = []
    for batch in Loader(Mix(datasets, within_batch=True, lanes=2), num_workers=2):
        assert batch.parts == {"label 0": 6, "label 1": 5}
        assert batch["label"].tolist() == [0] * 6 + [1] * 5
        assert {name: form_of(column) for name, column in batch.items()} == narrow.forms_in(FEW, fills)
        found += Read.of(batch).rows
    chosen = Counter(row for row, label in zip(rows, labels, strict=True) if label < 2)
    assert len(found) > 100
    assert not Counter(found) - chosen, "each at most once"
