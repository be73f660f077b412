"""Columns: rows taken, cut, joined and packed are those that Arrow takes, cuts and joins, for every type."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.reader.columns import column_data as columns_module
from pqcache.reader.columns import row_views
from pqcache.reader.columns.column_data import (
    ColumnData,
    bytes_of_views,
    compact,
    cut,
    cut_all,
    from_arrow,
    join,
    pack_bytes,
    take,
    to_arrow,
)
from pqcache.reader.columns.column_forms import form_of
from pqcache.reader.columns.fill_nulls import fill_nulls
from pqcache.system.buffer_pool import BufferPool
from tests.examples import examples
from tests.reader.reading import everything, plain


def test_views_of_more_than_two_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_views, "_MOST_BYTES", 100)
    for kind in (pa.large_string(), pa.large_binary()):
        array = pa.array(["x" * (i % 60) for i in range(50)], kind).slice(3)
        form = form_of(pa.field("c", kind))
        assert to_arrow(from_arrow(array, form)).equals(array)
    lists = pa.array([list(range(i % 9)) for i in range(50)], pa.list_(pa.int64())).slice(7)
    form = form_of(pa.field("c", lists.type))
    column = from_arrow(lists, form)
    assert to_arrow(column).equals(lists)
    order = np.random.default_rng(0).permutation(43)
    assert to_arrow(compact(take(column, order))).equals(lists.take(pa.array(order)))


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_columns_gather_cut_and_join_like_arrow(data: st.DataObject) -> None:
    table = plain(everything(data.draw(st.integers(0, 1000)), 60))
    name = data.draw(st.sampled_from(table.column_names))
    array = table[name].combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    start = data.draw(st.integers(0, 60))
    array = array.slice(start, data.draw(st.integers(0, 60 - start)))
    form = form_of(pa.field(name, array.type))
    column = from_arrow(array, form)
    rows = np.array(data.draw(st.lists(st.integers(0, max(0, len(array) - 1)), max_size=20 * bool(len(array)))), int)
    expected = array.take(pa.array(rows, pa.int64())).to_pylist()
    assert to_arrow(take(column, rows)).to_pylist() == expected
    assert to_arrow(compact(take(column, rows))).to_pylist() == expected
    half = len(rows) // 2
    assert to_arrow(cut(take(column, rows), half, len(rows))).to_pylist() == expected[half:]
    joined = join([take(column, rows), column, cut(column, 0, 0)], form)
    assert to_arrow(joined).to_pylist() == expected + array.to_pylist()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()], ids=str)
@pytest.mark.parametrize("codes", [pa.int8(), pa.int32(), pa.uint16()], ids=str)
def test_texts_in_a_dictionary_are_those_that_arrow_decodes(kind: pa.DataType, codes: pa.DataType) -> None:
    words = pa.array(["", "b", "longer than a view holds", "d"]).cast(kind)
    indices = pa.array([0, 3, None, 2, 2, None, 1, 0], codes)
    form = form_of(pa.field("c", kind))
    for rows in (slice(0, 8), slice(1, 7), slice(3, 4), slice(2, 3), slice(4, 4)):
        array = pa.DictionaryArray.from_arrays(indices, words)[rows]
        column = from_arrow(array, form)
        assert to_arrow(column).to_pylist() == array.to_pylist()
        filled = fill_nulls(column, b"in place of nulls", BufferPool())
        expected = array.dictionary_decode().fill_null("in place of nulls").to_pylist()
        assert (to_arrow(filled).to_pylist(), filled.valid) == (expected, None)


def test_positions_beyond_a_dictionary_are_refused() -> None:
    form = form_of(pa.field("c", pa.string()))
    for codes in ([0, 2], [0, -1], [None, 3]):
        array = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), ["a", "b"], safe=False)
        with pytest.raises(pa.ArrowInvalid, match="a position beyond the end of its dictionary"):
            from_arrow(array, form)


def test_texts_are_copied_unless_they_are_in_a_small_dictionary() -> None:
    form, words = form_of(pa.field("c", pa.string())), [f"word {i} of more than a view" for i in range(4)]
    array = pa.array(words * 50)
    for found, copied in ((array, True), (array.dictionary_encode(), False)):
        some = take(from_arrow(found, form), np.arange(0, 200, 2))
        kept = compact(some)
        assert to_arrow(kept).equals(array.take(pa.array(range(0, 200, 2))))
        assert (kept is not some) == copied


def test_numbers_are_filled_in_memory_of_the_pool() -> None:
    pool = BufferPool()
    for kind, fill in ((pa.int8(), -1), (pa.uint16(), 9), (pa.float64(), 0.5), (pa.bool_(), True)):
        array = pa.array([1, None, 0, None], pa.int64()).cast(kind)
        form = form_of(pa.field("c", kind))
        column = from_arrow(array, form)
        number = np.array([fill], kind.to_pandas_dtype())
        assert to_arrow(fill_nulls(column, number, pool)).equals(array.fill_null(fill)), "the first array is unchanged"
        assert to_arrow(column).equals(array)
        assert fill_nulls(from_arrow(array[:1], form), number, pool).valid is None
    assert pool.size


def _uuids() -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes([i]) * 16 for i in range(12)], pa.binary(16)))


def _tensors(kind: pa.DataType) -> pa.Array:
    storage = pa.array([[i % 2, i % 3] for i in range(12)], pa.list_(pa.int64(), 2)).cast(pa.list_(kind, 2))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(kind, [2]), storage)


@pytest.mark.parametrize(
    "items",
    [
        _uuids(),
        _tensors(pa.int16()),
        _tensors(pa.bool_()),
        pa.array([["a", "b" * 20, ""][i % 3] for i in range(12)], pa.string_view()),
        pa.array([["a", "b" * 20, ""][i % 3] for i in range(12)]).dictionary_encode(),
        pa.array([i * 10**20 for i in range(12)], pa.decimal128(38, 0)),
    ],
    ids=lambda items: str(items.type),
)
def test_items_whose_bytes_are_not_one_buffer(items: pa.Array) -> None:
    """Extension types, views and codes inside of lists: what lies in a buffer is not what a row is."""
    pairs = pa.FixedSizeListArray.from_arrays(items, 2)
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2, 5, 12], pa.int32()), items)
    for array in (pairs, pa.FixedSizeListArray.from_arrays(pairs, 2), lists):
        expected = array.to_pylist()
        array = array.slice(1)
        column = from_arrow(array, form_of(pa.field("c", array.type)))
        rows = np.arange(len(array))[::-1]
        assert to_arrow(column).to_pylist() == expected[1:]
        assert to_arrow(compact(take(column, rows))).to_pylist() == expected[:0:-1]


@pytest.mark.parametrize("shared", [None, BufferPool()])
def test_long_rows_are_packed(shared: BufferPool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "NEAR", 10_000)  # so that they are copied in pieces
    rng = np.random.default_rng(0)
    values = [rng.bytes(int(n)) for n in rng.choice([0, 3, 12, 13, 5000, 20_000], 200)]
    array = pa.array(values).slice(5)
    column = from_arrow(pa.chunked_array([array.slice(0, 100), array.slice(100)]), form_of(pa.field("b", pa.binary())))
    order = rng.permutation(195)
    expected = array.take(pa.array(order))
    assert to_arrow(take(column, order)).equals(expected)
    again = compact(take(column, order))
    assert to_arrow(again).equals(expected)
    assert to_arrow(cut(again, 50, 195)).equals(expected.slice(50))
    assert bytes_of_views(again) == sum(map(len, values[5:]))
    end_to_end = ColumnData(column.form, pack_bytes(again, shared))
    assert to_arrow(cut(end_to_end, 20, 60)).equals(expected.slice(20, 40))


@given(st.lists(st.integers(0, 40), max_size=30), st.lists(st.integers(0, 30), min_size=2, max_size=6), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_ranges_are_cut_at_once_as_one_by_one(lengths: list[int], bounds: list[int], nulls: bool) -> None:
    values = [None if nulls and i % 4 == 1 else bytes(range(n)) for i, n in enumerate(lengths)]
    column = from_arrow(pa.array(values, pa.binary()), form_of(pa.field("b", pa.binary())))
    bounds = sorted(min(bound, len(values)) for bound in bounds)
    for rows in (column, ColumnData(column.form, pack_bytes(column), column.valid)):
        ranges = [to_arrow(cut(rows, start, stop)) for start, stop in itertools.pairwise(bounds)]
        assert [to_arrow(found) for found in cut_all(rows, bounds)] == ranges
        assert [len(found) for found in cut_all(rows, bounds)] == [len(array) for array in ranges]
