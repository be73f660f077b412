"""Levels of lists of one length are known as such, however they are encoded, and those of other lists are not."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.parquet.encodings import LIMITED
from pqcache.parquet.footer import thrift
from pqcache.parquet.pages import levels, page_format
from pqcache.parquet.pages.levels import are_all, are_of_lists
from tests.examples import examples


def encoded(numbers: list[int], sizes: list[int]) -> bytes:
    """Return levels of one bit as packed bits (even sizes, in groups of eight) and runs of one number (odd sizes)."""
    data, at, turn = bytearray(), 0, 0
    while at < len(numbers):
        size = sizes[turn % len(sizes)]
        turn += 1
        if size % 2:
            stop = at + 1
            while stop < min(len(numbers), at + size) and numbers[stop] == numbers[at]:
                stop += 1
            thrift.put_varint(data, stop - at << 1)
            data.append(numbers[at])
            at = stop
        else:
            some = numbers[at : at + 8 * size]
            thrift.put_varint(data, size << 1 | 1)
            data += np.packbits(some + [0] * (8 * size - len(some)), bitorder="little").tobytes()
            at += 8 * size
    return bytes(data)


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data(), length=st.integers(1, 70), count=st.integers(1, 900), first=st.integers(0, 200))
def test_lists_of_one_length_and_all_others(data: st.DataObject, length: int, count: int, first: int) -> None:
    wanted = [int(value % length > 0) for value in range(first, first + count)]
    sizes = data.draw(st.lists(st.integers(1, 63), min_size=1, max_size=4))
    assert are_of_lists(length, encoded(wanted, sizes), count, first)
    at = data.draw(st.integers(0, count - 1))
    other = [*wanted[:at], 1 - wanted[at], *wanted[at + 1 :]]
    assert not are_of_lists(length, encoded(other, sizes), count, first)
    for wrong in (count - 1, count + 1, count + 700):
        good = encoded(wanted, [1, 9])  # runs, which nothing fills up
        with pytest.raises(page_format.NotRead):
            are_of_lists(length, good, wrong, first)


@pytest.mark.parametrize("length", [2, 7, 100, 512])
def test_the_levels_that_pyarrow_writes_are_looked_at_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What repeats is compared as bytes: a page of ten thousand lists takes no longer than one of ten."""
    runs = 0

    def counted(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        return page_format.read_run(*arguments)

    monkeypatch.setattr(levels, "read_run", counted)
    found = []
    for rows in (1_000, 10_000):
        ends = np.arange(rows + 1, dtype=np.int32) * length
        table = pa.table({"t": pa.ListArray.from_arrays(ends, np.zeros(rows * length, np.int8))})
        sink = io.BytesIO()
        more = {"max_rows_per_page": 1 << 30} if LIMITED else {}
        pq.write_table(table, sink, compression="none", data_page_size=1 << 30, **more)
        chunk = pq.read_metadata(sink).row_group(0).column(0)
        header, size = thrift.decode_first(sink.getvalue()[chunk.data_page_offset :], "")
        body = np.frombuffer(sink.getvalue(), np.uint8, header[3][1], chunk.data_page_offset + size)
        runs, (data, _) = 0, page_format.levels_of(body, 3)
        assert are_of_lists(length, data, rows * length, 0)
        assert not are_of_lists(length + 1, data, rows * length, 0)
        found.append(runs)
    assert found[1] <= found[0] + 8, found


def test_definition_levels_are_all_the_same() -> None:
    ones = encoded([1] * 50, [2, 5, 9])
    assert are_all(1, ones, 50)
    assert not are_all(1, encoded([1] * 40 + [0] + [1] * 9, [2, 5, 9]), 50)
    assert not are_all(3, b"\x10\x02", 8)
    assert are_all(3, b"\x10\x03", 8)
    for count in (7, 9):
        with pytest.raises(page_format.NotRead):
            are_all(3, b"\x10\x03", count)
