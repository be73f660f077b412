"""Batches that are read ahead: in order, within a limit, and errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError
from pqcache.parquet.rewrite.decode import RowBatch, join_small_batches, prefetch
from tests.examples import examples
from tests.parquet.rewrite.test_writer import batches_of


def test_prefetch_runs_ahead_by_no_more_than_its_limit_and_stops() -> None:
    table = pa.table({"x": np.zeros(1000)})
    made = 0

    def counted() -> Iterator[RowBatch]:
        nonlocal made
        for batch in batches_of(pa.concat_tables([table] * 100), 1000):
            made += 1
            yield batch

    stream = prefetch([counted], 5 * table.nbytes)
    assert next(stream).done == 1000
    assert next(stream).done == 2000
    stream.close()  # joins the thread
    assert made <= 10


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 6), max_size=9), st.integers(1, 4), st.sampled_from([0, 100, 1 << 30]))
def test_stretches_come_in_their_order_whatever_the_threads(counts: list[int], threads: int, limit: int) -> None:
    table = pa.table({"x": np.arange(sum(counts) * 10)})
    ends = np.cumsum([0, *counts]) * 10
    tasks = [
        (lambda low=low, high=high: (batch for batch in batches_of(table.slice(low, high - low), 10) if low < high))
        for low, high in pairwise(ends.tolist())
    ]
    found = [batch.table for batch in prefetch(tasks, limit, threads)]
    assert pa.concat_tables([table.slice(0, 0), *found]).equals(table)


def test_an_error_comes_after_what_is_before_it_and_ends_all_threads() -> None:
    table = pa.table({"x": np.arange(100)})

    def failing() -> Iterator[RowBatch]:
        raise ParquetError("b.parquet", "broken")
        yield

    stream = prefetch([lambda: batches_of(table, 10), failing, lambda: batches_of(table, 10)], 1 << 20, 2)
    assert sum(next(stream).table.num_rows for _ in range(10)) == 100
    with pytest.raises(ParquetError, match="broken"):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name == "pqcache-decode"]


def test_joined_keeps_rows_and_weights() -> None:
    table = pa.table({"x": np.arange(10_000), "d": pa.array([f"{n % 30}" for n in range(10_000)]).dictionary_encode()})
    parts = [table.take(np.arange(first, min(first + 7, 10_000))) for first in range(0, 10_000, 7)]
    before = [batch for part in parts for batch in batches_of(part, 7, ratio=0.5)]
    before = [replace(batch, numbers=range(7 * n, 7 * n + batch.table.num_rows)) for n, batch in enumerate(before)]
    after = list(join_small_batches(iter(before), 20_000))
    assert len(after) < len(before) / 30
    assert pa.concat_tables([batch.table for batch in after]).to_pydict() == table.to_pydict()
    assert sum(batch.weights.sum() for batch in after) == pytest.approx(
        sum(batch.weights.sum() for batch in before), rel=0.02
    )
    assert [batch.numbers[0] for batch in after] == list(np.cumsum([0, *(p.table.num_rows for p in after[:-1])]))
