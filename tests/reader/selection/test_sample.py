"""sample= and limit=: exact numbers of rows, row groups that are not read, and the same rows every time."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import UsageError
from pqcache.reader.epoch_options import RowOptions
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.read_plan import make_read_plan
from pqcache.torch import ParquetDataset, Sequence, Split
from tests.examples import examples


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 rows in 100 row groups of two files; ids are in the order of the files."""
    root = tmp_path_factory.mktemp("lake")
    for number in range(2):
        ids = np.arange(number * 1000, (number + 1) * 1000)
        pq.write_table(pa.table({"id": ids, "x": ids % 10}), root / f"{number}.parquet", row_group_size=20)
    return root


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in np.asarray(batch["id"]).tolist()]


@pytest.mark.parametrize(("share", "groups"), [(0.333, 34), (0.01, 16), (0.0001, 1)])
def test_a_sample_is_a_share_of_the_rows_in_few_row_groups(lake: Path, share: float, groups: int) -> None:
    ds = ParquetDataset(lake, ["id"], sample=share, batch_size=16)
    found = ids_of(ds)
    assert len(set(found)) == len(found) == max(1, round(share * 2000))
    assert len(ds) == -(-len(found) // 16)
    assert len({i // 20 for i in found}) == groups
    ds.set_epoch(1)
    again = ids_of(ds)
    assert sorted(again) == sorted(found)
    assert again != found or len(found) < 3
    other = ids_of(ParquetDataset(lake, ["id"], sample=share, batch_size=16, seed=1))
    assert sorted(other) != sorted(found) or share == 1


@settings(max_examples=examples(20), deadline=None)
@given(
    share=st.floats(1e-6, 1), seed=st.integers(0, 99), filters=st.sampled_from([None, "x < 4", "id >= 1990", "id < 0"])
)
def test_samples_of_selected_rows_have_the_exact_number(
    lake: Path, share: float, seed: int, filters: str | None
) -> None:
    data = open_local_dataset(lake)[0]
    with pytest.warns(UserWarning, match="no row is left") if filters == "id < 0" else nullcontext():
        rows = int(make_read_plan(data, ["id"], RowOptions(filters=filters)).counts.sum())
        plan = make_read_plan(data, ["id"], RowOptions(filters=filters, sample=share), seed=seed)
    assert plan.counts.sum() == (max(1, round(share * rows)) if rows else 0)
    assert (plan.counts > 0).all()


def test_a_small_sample_is_of_random_rows(lake: Path) -> None:
    times = np.zeros(20)
    for seed in range(20):
        for i in ids_of(ParquetDataset(lake, ["id"], sample=0.02, batch_size=64, shuffle=False, seed=seed)):
            times[i % 20] += 1
    assert times.sum() == 20 * 40
    assert (np.abs(times / times.sum() - 1 / 20) < 0.03).all()  # no place in a row group comes more often


def test_a_limit_is_the_first_rows(lake: Path) -> None:
    for limit in (1, 1001, 5000):
        assert sorted(ids_of(ParquetDataset(lake, ["id"], limit=limit))) == list(range(min(limit, 2000)))
    half = {"filters": "x = 3", "split": Split("id", 0.0, 0.5), "shuffle": False}
    every = ids_of(ParquetDataset(lake, ["id"], **half))
    assert ids_of(ParquetDataset(lake, ["id"], limit="40", **half)) == every[:40]


@pytest.mark.parametrize(("how", "row_groups"), [({"limit": 25}, 2), ({"sample": 0.2}, 20)])
def test_other_row_groups_are_not_read(lake: Path, how: dict[str, Any], row_groups: int) -> None:
    ds = ParquetDataset(lake, ["id"], **how)
    ids_of(ds)
    assert ds.stats().total.row_groups == row_groups


def test_samples_go_with_weights_states_and_places(lake: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"sample": 0.3, "limit": 500, "batch_size": 16, "seed": 2, "filters": "x != 1"}
    weights = {"x": {3: 2, ...: 1}}
    ds = ParquetDataset(lake, ["id"], weights=weights, **how)
    plain = sorted(ids_of(ParquetDataset(lake, ["id"], **how)))
    assert len(plain) == 500
    assert sorted(ids_of(ds)) == sorted(plain + [i for i in plain if i % 10 == 3])
    state = ds.state_dict(after=3)
    ds.load_state_dict(state)
    for other in ({**how, "sample": 0.31}, {**how, "limit": 499}, {**how, "sample": None}):
        with pytest.raises(UsageError, match="it was taken with other filters"):
            ParquetDataset(lake, ["id"], weights=weights, **other).load_state_dict(state)
    for batch in itertools.islice(ds, 3):
        places = batch.rows()
        assert (places.rows_in_file + 1000 * places.files).tolist() == batch["id"].tolist()
    named = {name: how[name] for name in ("sample", "limit", "filters")}
    found = pqcache.rows(lake, state, batch.index, weights=weights, **named)
    assert (found.rows == places.rows).all()
    pqcache.sync(lake, tmp_path / "cache")
    batches = pqcache.Cache.open(tmp_path / "cache").batches(["id"], **how)
    assert sorted(ids_of(batches)) == plain


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sample": 0}, "sample=0: give a number above 0"),
        ({"sample": True}, "sample=True"),
        ({"sample": "1%"}, "sample='1%'"),
        ({"limit": 0}, "limit=0: has to be at least 1"),
        ({"sample": 0.5, "sequence": Sequence(2, order_by="id")}, "in the middle of sequences"),
        ({"limit": 5, "sequence": Sequence(2, order_by="id")}, "in the middle of sequences"),
    ],
)
def test_what_makes_no_sense_is_refused(lake: Path, how: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParquetDataset(lake, ["id"], **how)
