"""Batches by tokens: every document once, within the budget, whole, in any topology, resumed at any batch."""

from __future__ import annotations

import itertools
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
from pqcache.torch import ParquetDataset
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
