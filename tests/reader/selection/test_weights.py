"""weights= and balance=: how often rows come, counted over epochs, and exactly what a slow oracle says."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.epoch_options import RowOptions
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.order import random_words, scatter_order
from pqcache.reader.read_plan import make_read_plan
from pqcache.reader.selection import selection
from pqcache.torch import Loader, Mix, ParquetDataset, Sequence, Split
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")
ONE = 1 << 32


def write(root: Path, columns: dict[str, Any], group: int = 40, files: int = 2) -> Path:
    """Write columns with the number of each row as its id."""
    rows = len(next(iter(columns.values())))
    table = pa.table({"id": np.arange(rows), **columns})
    each = -(-rows // files)
    for number in range(files):
        (root / f"dt={number}").mkdir(parents=True)
        part = table.slice(number * each, each)
        pq.write_table(part, root / f"dt={number}" / "a.parquet", row_group_size=group)
    return root


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    w = np.round(rng.choice([0.0, 0.25, 0.5, 1.0, 1.3, 2.0, 3.75], 400), 2)
    label = rng.choice([0, 0, 0, 0, 1, 1, 2], 400).astype(np.int8)
    kind = pa.array([["cat", "dog", None][i] for i in label]).dictionary_encode()
    return write(tmp_path_factory.mktemp("lake"), {"w": w, "label": label, "kind": kind, "x": np.arange(400) % 10})


def column(lake: Path, name: str) -> list[Any]:
    return pq.read_table(lake, columns=[name])[name].to_pylist()


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in np.asarray(batch["id"]).tolist()]


def slow_counts(groups: list[list[int]], weight: list[float], seed: int, epoch: int) -> Counter[int]:
    """Return how often each row comes: ``groups`` are the ids of each row group in the order of the index."""
    found: Counter[int] = Counter()
    at = int(random_words(1, seed, epoch, 4, 1, 0)[0]) % ONE
    for number, ids in enumerate(groups):
        rests = [round(weight[i] * ONE) % ONE for i in ids]
        for row in scatter_order(len(ids), seed, epoch, 2**64 - 1, number).tolist() if any(rests) else ():
            before, at = at, at + rests[row]
            found[ids[row]] += at // ONE - before // ONE
        for i in ids:
            found[i] += round(weight[i] * ONE) // ONE
    return +found


def groups_of(rows: int, group: int = 40, files: int = 2) -> list[list[int]]:
    each = -(-rows // files)
    starts = [(f, i) for f in range(files) for i in range(f * each, min((f + 1) * each, rows), group)]
    return [list(range(i, min(i + group, (f + 1) * each, rows))) for f, i in starts]


WEIGHTS = st.lists(st.one_of(st.sampled_from([0.0, 1.0, 0.5, 3.0]), st.floats(0, 5)), min_size=1, max_size=60)


@settings(max_examples=examples(30))
@given(WEIGHTS, st.integers(1, 20), st.integers(0, 9), st.integers(0, 2**40))
def test_counts_are_those_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, some: list[float], group: int, epoch: int, seed: int
) -> None:
    root = write(tmp_path_factory.mktemp("w"), {"w": some}, group, 1)
    data = open_local_dataset(root)[0]
    plan = make_read_plan(data, ["id"], RowOptions(weights="w")).at_epoch(epoch, seed)
    expected = slow_counts(groups_of(len(some), group, 1), some, seed, epoch)
    by_group = [sum(expected[i] for i in ids) for ids in groups_of(len(some), group, 1)]
    assert plan.counts.tolist() == by_group
    found: list[int] = []
    table = pq.read_table(root, columns=["w"], partitioning=None)
    for number, ids in enumerate(groups_of(len(some), group, 1)):
        found += (plan.selection.positions(number, [table.slice(ids[0], len(ids))]).rows + ids[0]).tolist()
    assert Counter(found) == expected
    constant = [make_read_plan(data, ["id"], RowOptions(weights="w")).at_epoch(e, seed, True) for e in range(5)]
    assert len({int(plan.counts.sum()) for plan in constant}) == 1


def test_the_mean_over_epochs_is_the_weight_and_neighbours_are_independent(lake: Path) -> None:
    w, epochs = np.array(column(lake, "w")), 1000
    data = open_local_dataset(lake)[0]
    plan = make_read_plan(data, ["id"], RowOptions(weights="w"))
    table = pq.read_table(lake, columns=["w"], partitioning=None)
    times = np.zeros((epochs, 40))
    for epoch in range(epochs):
        found = plan.at_epoch(epoch, 7).selection.positions(2, [table.slice(80, 40)])
        times[epoch] = np.bincount(found.rows, minlength=40)
    rest = w[80:120] % 1
    error = np.sqrt(rest * (1 - rest) / epochs)
    assert (np.abs(times.mean(0) - w[80:120]) <= 5 * error + 1e-9).all()
    drawn = times[:, rest > 0] - w[80:120][rest > 0]
    correlation = np.corrcoef(drawn.T)
    beside = np.abs(np.diagonal(correlation, 1))
    assert beside.max() < 0.2  # of rows in turn without the random order it would be up to 1


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({"label": {0: 0.25, 1: 2, 2: 3.5}}, lambda row: [0.25, 2, 3.5][row["label"]]),
        ({"label": {np.int8(1): np.float32(2.5), ...: 0.5}}, lambda row: 2.5 if row["label"] == 1 else 0.5),
        ({"kind": {"cat": 1, None: 0.1, ...: 0}}, lambda row: {"cat": 1, None: 0.1}.get(row["kind"], 0)),
        ({"dt": {0: 0.75, 1: 1.5}}, lambda row: 0.75 if row["id"] < 200 else 1.5),
        (lambda epoch: {"label": {0: 1 + epoch, ...: 0.5}}, lambda row: 3 if row["label"] == 0 else 0.5),
        (lambda epoch: ["w", None, "w"][epoch], lambda row: row["w"]),
    ],
)
def test_weights_by_value_and_by_epoch(lake: Path, given: Any, weight: Any) -> None:
    rows = [
        {"id": i, **dict(zip(("label", "kind", "w"), values, strict=True))}
        for i, values in enumerate(zip(column(lake, "label"), column(lake, "kind"), column(lake, "w"), strict=True))
    ]
    ds = ParquetDataset(lake, ["id"], weights=given, batch_size=16, seed=1)
    ds.set_epoch(2)
    expected = slow_counts(groups_of(400), [float(weight(row)) for row in rows], 1, 2)
    assert Counter(ids_of(ds)) == expected
    assert len(ds) == -(-sum(expected.values()) // 16)


def test_weights_by_partition_are_counted_from_the_index(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("row groups were looked at one by one")

    half, every = [0.5] * 200 + [2.25] * 200, [1.0] * 400
    with monkeypatch.context() as patched:
        patched.setattr(selection, "map_row_groups", refuse)
        for wanted, weight in (
            ({"dt": {0: 0.5, 1: 2.25}}, half),
            ("dt", [0.0] * 200 + [1.0] * 200),
            ({"dt": {...: 1}}, every),
        ):
            ds = ParquetDataset(lake, ["id"], weights=wanted, seed=5)
            assert Counter(ids_of(ds)) == slow_counts(groups_of(400), weight, 5, 0)
    few = ParquetDataset(lake, ["id"], balance="dt", filters="id >= 150")  # 50 rows of one, 200 of the other
    found = Counter(i < 200 for i in ids_of(few))
    assert abs(found[True] - 125) <= 1
    assert abs(found[False] - 125) <= 1
    with pytest.raises(UsageError, match="there are rows with 1, which has no weight"):
        ParquetDataset(lake, ["id"], weights={"dt": {0: 1.0}})


def test_a_partition_that_is_no_weight_is_named(tmp_path: Path) -> None:
    for name in ("w=1", "w=-2"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"id": range(9)}), tmp_path / name / "a.parquet", row_group_size=3)
    with pytest.raises(ParquetError, match=r"w=-2/a\.parquet: row group 0 has the weight -2 in column 'w'"):
        ParquetDataset(tmp_path, ["id"], weights="w")
    assert sorted(ids_of(ParquetDataset(tmp_path, ["id"], weights="w", filters="w > 0"))) == list(range(9))


def test_balance_gives_every_label_the_same_part(lake: Path) -> None:
    label = np.array(column(lake, "label"))
    ds = ParquetDataset(lake, ["id"], balance="label", batch_size=16)
    found = Counter(label[ids_of(ds)].tolist())
    assert abs(sum(found.values()) - 400) <= 1
    assert all(abs(count - 400 / 3) < 12 for count in found.values())
    means = np.zeros(3)
    for epoch in range(10):
        ds.set_epoch(epoch)
        means += np.bincount(label[ids_of(ds)], minlength=3) / 10
    assert np.abs(means - 400 / 3).max() < 4
    few = ParquetDataset(lake, ["id"], balance="label", filters="x < 5", split=Split("id", 0.0, 0.5))
    every = sorted(ids_of(ParquetDataset(lake, ["id"], filters="x < 5", split=Split("id", 0.0, 0.5))))
    assert set(ids_of(few)) <= set(every)
    assert abs(len(ids_of(few)) - len(every)) <= 1
    with pytest.raises(UsageError, match=r"balance='kind': it is null in \d+ rows; leave them out"):
        ParquetDataset(lake, ["id"], balance="kind")
    assert len(ids_of(ParquetDataset(lake, ["id"], balance="kind", filters="kind is not null"))) > 0


@pytest.mark.parametrize("given", ["w", {"label": {...: 0}}])
def test_weights_that_are_all_0_are_named(given: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(20), "w": [0.0] * 20, "label": [1] * 20}), tmp_path / "a.parquet")
    name = given if isinstance(given, str) else "label"
    with pytest.warns(UserWarning, match=f"the weights in '{name}' are all 0, so there are no batches"):
        assert len(ParquetDataset(tmp_path, ["id"], weights=given)) == 0


def test_states_know_of_weights(lake: Path) -> None:
    state = ParquetDataset(lake, ["id"], weights="w").state_dict()
    same = {"label": {0: 1.0, 1: 2.0, 2: 1.0}}
    for other in (None, "x", same):
        with pytest.raises(UsageError, match="another split, sequence, pack or weights"):
            ParquetDataset(lake, ["id"], weights=other).load_state_dict(state)
    by_value = ParquetDataset(lake, ["id"], weights=same).state_dict()
    ParquetDataset(lake, ["id"], weights={"label": {2: 1, 1: 2, 0: 1}}).load_state_dict(by_value)
    with pytest.raises(UsageError, match="weights"):
        ParquetDataset(lake, ["id"], balance="label").load_state_dict(by_value)
    curriculum = ParquetDataset(lake, ["id"], weights=lambda epoch: {"label": {0: 1 + epoch, ...: 1}})
    curriculum.set_epoch(3)
    state = curriculum.state_dict(after=0)
    curriculum.load_state_dict(state)
    with pytest.raises(UsageError, match="weights"):
        ParquetDataset(lake, ["id"], weights=lambda epoch: {"label": {0: 2 + epoch, ...: 1}}).load_state_dict(state)


def test_lengths_follow_the_epoch(lake: Path) -> None:
    ds = ParquetDataset(lake, ["id"], weights=lambda epoch: {"label": {0: 1 + epoch, ...: 1}}, batch_size=16)
    loader = Loader(ds, num_workers=2)
    lengths = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(3):
            lengths.append(len(loader))
            assert [(batch.epoch, len(loader)) for batch in loader] == [(epoch, lengths[-1])] * lengths[-1]
    assert lengths == sorted(set(lengths))
    assert [ds.batches_of(epoch) for epoch in range(3)] == lengths
    loader.set_epoch(1)
    assert len(loader) == lengths[1]


def test_nothing_is_read_again_for_another_epoch(lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pqcache.sync(lake, tmp_path / "cache")
    made = [{"weights": "w"}, {"balance": "label"}, {"weights": {"label": {0: 2, ...: 1}}}]
    first = [ParquetDataset(tmp_path / "cache", ["id"], **how) for how in made]
    plain = [ParquetDataset(lake, ["id"], **how) for how in made]
    monkeypatch.setattr(selection, "map_row_groups", lambda *_: pytest.fail("counted again"))
    again = [ParquetDataset(tmp_path / "cache", ["id"], **how) for how in made]
    for one, two, three in zip(first, again, plain, strict=True):
        copies = [pickle.loads(pickle.dumps(ds)) for ds in (one, three)]
        assert len({ds.batches_of(7) for ds in (one, two, three, *copies)}) == 1
        assert ids_of(copies[1]) == ids_of(three)
        assert ids_of(copies[0]) == ids_of(one)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"weights": "w", "balance": "label"}, UsageError, "choose one of them"),
        ({"weights": {"label": {0: 1}, "kind": {}}}, UsageError, "name a column, or give weights by value"),
        ({"weights": "nothing"}, UsageError, "weights: no column 'nothing'"),
        ({"weights": "kind"}, UsageError, "name a column of numbers"),
        ({"weights": {"label": {0: -1, ...: 1}}}, UsageError, "0 has the weight -1; give a number from 0"),
        ({"weights": {"label": {0: float("inf"), ...: 1}}}, UsageError, "give a number from 0"),
        ({"weights": {"label": {"cat": 1, ...: 1}}}, UsageError, "not all are values of 'label', which is int8"),
        ({"weights": {"label": {0: 1}}}, UsageError, "there are rows with [12], which has no weight"),
        ({"weights": {"kind": {"cat": 1, "dog": 1}}}, UsageError, "there are rows with None"),
        ({"weights": {"w": {0.5: 1}}}, UsageError, "'w' is double"),
        ({"balance": 3}, UsageError, "name one column"),
        ({"weights": "w", "sequence": Sequence(2, order_by="id")}, UsageError, "a sequence has no weight"),
        ({"weights": lambda epoch: 7}, UsageError, r"weights\(0\), which is 7: name a column"),
    ],
)
def test_what_makes_no_sense_is_refused(lake: Path, how: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParquetDataset(lake, ["id"], **how)


def test_weights_of_the_epoch_are_refused_in_a_mix(lake: Path) -> None:
    with pytest.raises(UsageError, match="passes of a mix must have the same length"):
        Mix({"a": ParquetDataset(lake, ["id"], weights=lambda epoch: "w")})


@pytest.mark.parametrize("bad", [None, -0.5, float("nan"), float("inf"), 2e6])
def test_values_that_are_no_weights_are_named(tmp_path: Path, bad: float | None) -> None:
    root = write(tmp_path, {"w": [1.0] * 50 + [bad] + [1.0] * 49}, 20)
    shown = "nan" if bad is None else str(bad)
    with pytest.raises(
        ParquetError, match=rf"dt=1/a\.parquet: row group 0 has the weight ({shown}|None) in column 'w'"
    ):
        ParquetDataset(root, ["id"], weights="w")
    assert len(ids_of(ParquetDataset(root, ["id"], weights="w", filters="id != 50"))) == 99


@pytest.mark.filterwarnings("ignore:.*are all 0, so there are no batches")
def test_weights_may_be_of_any_number_type(tmp_path: Path) -> None:
    whole = [i % 3 for i in range(60)]
    for number, kind in enumerate((pa.int8(), pa.uint64(), pa.float32(), pa.decimal128(5, 2))):
        values = pa.array([Decimal(i) for i in whole] if number == 3 else whole, kind)
        root = write(tmp_path / str(number), {"w": values}, 20)
        assert Counter(ids_of(ParquetDataset(root, ["id"], weights="w"))) == +Counter(dict(enumerate(whole)))
    ds = ParquetDataset(root, ["id"], weights={"dt": {0: 0, 1: 0}})
    with pytest.warns(UserWarning, match="the weights in 'dt' are all 0"):
        assert len(ds) == 0
    assert ids_of(ds) == []
