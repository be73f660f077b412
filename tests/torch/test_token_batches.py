"""Batches by tokens: every document once, within the budget, whole, in any topology, resumed at any batch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache import TokenBatches
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.packing import batch_ends
from pqcache.torch import Batch, Loader, Mix, ParquetDataset
from pqcache.torch.batch import Ragged, to_rows
from tests.examples import examples
from tests.reader.reading import everything

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

BUDGET = 64


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Columns of every kind beside documents of 0 to 40 tokens."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 1000, n).tolist() for n in rng.integers(0, 41, 300)]
    other = everything(0, 300).select(
        ["id", "int16 nulls", "string nulls", "fixed binary", "list of string", "fixed list", "struct", "double nulls"]
    )
    return other.append_column("tokens", pa.array(documents, pa.list_(pa.int32())))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, table: pa.Table) -> Path:
    root = tmp_path_factory.mktemp("token_batches")
    for day, first in (("1", 0), ("2", 140)):
        (root / f"dt={day}").mkdir()
        part = table[first : 140 if day == "1" else 300]
        pq.write_table(part, root / f"dt={day}" / "a.parquet", row_group_size=45)
    return root


def read(root: Path, budget: int = BUDGET, **options: Any) -> ParquetDataset:
    return ParquetDataset(root, nulls="mask", pack=TokenBatches("tokens", tokens_per_batch=budget), **options)


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    columns = {name: to_rows(value) for name, value in batch.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_document_once_per_epoch(root: Path, table: pa.Table, shuffle: bool) -> None:
    dataset = read(root, shuffle=shuffle)
    plain = ParquetDataset(root, nulls="mask", batch_size=300, shuffle=False, ragged=["tokens"])
    expected = {row["id"]: row for row in rows_of(next(iter(plain)))}
    orders = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        batches = list(dataset)
        assert [batch.index for batch in batches] == list(range(len(dataset)))
        rows = [row for batch in batches for row in rows_of(batch)]
        orders.append([row["id"] for row in rows])
        assert sorted(orders[-1]) == list(range(300))
        assert all(str(row) == str(expected[row["id"]]) for row in rows)  # NaN equals NaN there
        for batch in batches:
            assert isinstance(batch["tokens"], Ragged)
            assert len(batch["tokens"]) * int(batch["tokens"].lengths().max()) <= BUDGET
    assert (orders[0] != orders[1]) == shuffle
    tokens = sum(map(len, table["tokens"].to_pylist()))
    assert dataset.fill == tokens / (BUDGET * len(batches))


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_ends_of_batches(data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 60))
    buckets = data.draw(st.none() | st.lists(st.integers(1, 80), min_size=1, max_size=5))
    most = data.draw(st.none() | st.integers(1, 6))
    lengths = sorted(data.draw(st.lists(st.integers(0, budget), max_size=60)))
    spec = TokenBatches("tokens", tokens_per_batch=budget, buckets=buckets, most_rows=most)
    ends = batch_ends(np.array(lengths, np.int64), spec).tolist()
    assert ends[0] == 0
    assert ends[-1] == len(lengths)
    batches = [lengths[a:b] for a, b in itertools.pairwise(ends)]
    for batch in batches:
        assert batch
        assert len(batch) * max(batch) <= budget
        assert most is None or len(batch) <= most
    counts = np.bincount(np.searchsorted(spec.bounds, lengths), minlength=len(spec.bounds))
    assert len(batches) <= sum(-(-int(count) // int(rows)) for count, rows in zip(counts, spec.rows, strict=True))


def test_the_same_batches_in_any_topology(root: Path) -> None:
    def collect(ranks: int, workers: int = 0) -> dict[int, list[Any]]:
        found = {}
        for rank in range(ranks):
            dataset = read(root, lanes=6, num_replicas=ranks, rank=rank)
            batches = list(Loader(dataset, num_workers=workers))
            assert len(batches) == len(dataset)
            found.update({b.index: b["id"].tolist() for b in batches})
        return found

    one = collect(1)
    for ranks, workers in ((2, 0), (3, 0), (1, 2)):
        some = collect(ranks, workers)
        assert {index: some[index] for index in one} == one


def test_resumed_at_every_batch(root: Path) -> None:
    dataset = read(root, columns=["id", "tokens", "dt"], lanes=2)
    batches = list(dataset)
    for done in range(0, len(batches) - 1, 3):
        resumed = read(root, columns=["id", "tokens", "dt"])
        resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict(after=batches[done]))))
        first = next(iter(resumed))
        assert first.index == done + 1
        assert rows_of(first) == rows_of(batches[done + 1])


def test_with_filters_and_in_a_mix(root: Path) -> None:
    mix = Mix({"low": read(root, filters="id < 100"), "high": read(root, filters="id >= 250")})
    found: dict[str, list[int]] = {"low": [], "high": []}
    for batch in mix:
        found[batch.source] += batch["id"].tolist()
    assert sorted(found["low"]) == list(range(100))
    assert sorted(found["high"]) == list(range(250, 300))


def test_documents_and_options_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"documents have more than tokens_per_batch=30 tokens, the longest 40"):
        read(root, budget=30)
    with pytest.raises(UsageError, match="tokens_per_batch= says how large batches are"):
        read(root, batch_size=8)
    with pytest.raises(UsageError, match="'tokens' is not among the columns"):
        read(root, columns=["id"])
    for options in (
        {"tokens_per_batch": 0},
        {"tokens_per_batch": 8, "buckets": []},
        {"tokens_per_batch": 8, "most_rows": 0},
    ):
        with pytest.raises(UsageError, match="pack"):
            TokenBatches("tokens", **options)  # type: ignore[arg-type]
    pq.write_table(pa.table({"tokens": pa.array([[1], None], pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    with pytest.raises(ParquetError, match="'tokens' has documents that are null"):
        ParquetDataset(tmp_path, pack=TokenBatches("tokens", tokens_per_batch=8))


def test_a_dense_column_is_ragged_too(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[i, i] for i in range(10)], pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    pqcache.sync(tmp_path, tmp_path.parent / "cache_of_two")
    dataset = ParquetDataset(tmp_path.parent / "cache_of_two", pack=TokenBatches("tokens", tokens_per_batch=6))
    batches = list(dataset)
    assert torch.cat([b["tokens"].values for b in batches]).sort().values.tolist() == sorted([*range(10), *range(10)])
    assert sorted(len(b["tokens"]) for b in batches) == [2, 2, 3, 3]
