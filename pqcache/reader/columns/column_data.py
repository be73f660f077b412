"""The rows of a column in memory, between Arrow's arrays and a batch, and how they are taken, cut and joined.

Most columns have rows of equal width and become one numpy array, so that rows are taken by one call that runs
without the interpreter's lock. Strings, binary and lists of numbers are bytes of any length: they are held as Arrow's
binary views (16 bytes per row that point into the decoded data), so that rows of several row groups are put in any
order by moving 16 bytes each, and their bytes are copied once, at the end. Everything else (structs, maps, lists of
lists, lists with nulls in them) is held as an Arrow array, and Arrow takes its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.parquet.dense_columns import dense_to_lists
from pqcache.parquet.schema_merge import cast_exactly, is_text
from pqcache.reader.columns.column_forms import ColumnForm, dense_dtype, fixed_width, storage_type, typed_form
from pqcache.reader.columns.row_bytes import PackedBytes, ViewEnds, ViewLists
from pqcache.reader.columns.row_views import (
    VIEW,
    bytes_pointed_into,
    copied_views,
    lengths_of_views,
    packed_views,
    point_to_little,
    take_views,
    views_of_array,
    views_of_codes,
)
from pqcache.system.buffer_pool import BufferPool

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[Any]  # (rows,) of unsigned ints, or (rows, width) of uint8

NEAR = 1 << 20  # bytes that fit into the cache of a processor
MORE_KEPT = 1.25  # times the bytes of a piece, that it may keep in memory
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True)  # not frozen, which takes three times as long to make
class ColumnData:
    """Rows of one column, which does not change; ``valid`` is None when no row is null.

    ``values`` is a numpy array (``fixed``), an Arrow binary-view array without nulls of its own or its rows'
    bytes packed (``bytes``), or an Arrow array (``other``; its nulls are its own and ``valid`` is None).
    """

    form: ColumnForm
    values: Any
    valid: Bools | None = None

    def __len__(self) -> int:
        return len(self.values)


class NotConstant(ValueError):
    """A list column that is held dense has nulls, or lists of another length."""


def from_arrow(array: pa.Array | pa.ChunkedArray, form: ColumnForm) -> ColumnData:
    """Return an Arrow array as a column; values are copied only where their form differs."""
    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks != 1:
            return join([from_arrow(chunk, form) for chunk in array.chunks], form)
        array = array.chunk(0)
    bare = storage_type(form.type)
    if pa.types.is_dictionary(array.type):
        if form.kind == "bytes" and is_text(bare) and len(array) and not array.dictionary.null_count:
            valid = _valid(array)
            return ColumnData(form, views_of_codes(array, bare, valid), valid)
        array = array.dictionary_decode()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if form.stored is not None and pa.types.is_fixed_size_binary(array.type):
        if form.kind == "fixed":
            return ColumnData(form, _fixed_values(array), _valid(array))
        array = dense_to_lists(array, form.stored, bare)
    if array.type != bare:
        array = cast_exactly(array, bare)
    if form.kind == "fixed":
        values = _dense_values(array, form) if form.dense else _fixed_values(array)
        if values is not None:
            return ColumnData(form, values, _valid(array))
    elif form.kind == "bytes":
        views = views_of_array(array, form.width)
        if views is not None:
            return ColumnData(form, views, _valid(array))
    return ColumnData(form, array)


def as_typed(column: ColumnData, memory: BufferPool) -> ColumnData:
    """Return a column that is held as it is stored with the numbers of its type, which are written to ``memory``."""
    form = column.form
    if form.stored is None:
        return column
    typed = typed_form(form)
    if form.kind != "fixed":
        return ColumnData(typed, column.values, column.valid)
    stored = np.ascontiguousarray(column.values).reshape(-1).view(np.uint8)
    if has_bits_of_type(form):
        return ColumnData(typed, _words(stored, typed.width), column.valid)
    numbers = memory.borrow(len(column) * typed.width)
    write_typed(form, stored, numbers)
    return ColumnData(typed, _words(numbers, typed.width), column.valid)


def has_bits_of_type(form: ColumnForm) -> bool:
    """Return whether rows that are held as they are stored have the same bytes as numbers of their type."""
    if form.stored is None:
        return True
    stored, item = np.dtype(form.stored.dtype), dense_dtype(form)
    return stored == item or (stored.itemsize == item.itemsize and item.kind in "iu")


def write_typed(form: ColumnForm, stored: Bytes, out: Bytes) -> None:
    """Write the bytes of rows as they are ``stored`` to the bytes ``out``, as numbers of their type."""
    assert form.stored is not None
    np.copyto(out.view(dense_dtype(form)), stored.view(form.stored.dtype), casting="unsafe")


def take(column: ColumnData, rows: npt.NDArray[np.int64]) -> ColumnData:
    """Return rows at positions ``rows``, in their order; the bytes of strings and lists are not copied."""
    valid = None if column.valid is None else column.valid.take(rows)
    return ColumnData(column.form, _take(column.values, rows), valid)


def cut(column: ColumnData, start: int, stop: int) -> ColumnData:
    """Return a range of rows without copying."""
    values: Any
    if isinstance(column.values, PackedBytes):
        ends = column.values.ends[start : stop + 1]
        views = None if column.values.views is None else column.values.views.cut(start, stop)
        values = PackedBytes(ends - ends[0], column.values.data[ends[0] : ends[-1]], views)
    elif isinstance(column.values, ViewLists):
        ends = column.values.ends[start : stop + 1]
        values = ViewLists(ends - ends[0], column.values.views.slice(ends[0], ends[-1] - ends[0]))
    elif isinstance(column.values, pa.Array):
        values = column.values.slice(start, stop - start)
    else:
        values = column.values[start:stop]
    return ColumnData(column.form, values, None if column.valid is None else column.valid[start:stop])


def cut_all(column: ColumnData, bounds: Sequence[int]) -> list[ColumnData]:
    """Return the ranges of rows between two ``bounds`` each, one after the other, without copying."""
    packed = column.values
    if not isinstance(packed, PackedBytes) or packed.views is not None or column.valid is not None or len(bounds) == 2:
        return [cut(column, start, stop) for start, stop in itertools.pairwise(bounds)]
    counts = np.diff(bounds) + 1  # the ends of all are found at once, as those of many small ranges take long
    rows = np.arange(counts.sum()) + bounds[0] - np.repeat(np.arange(len(counts)), counts)
    bytes_before = packed.ends.take(bounds)
    ends = packed.ends.take(rows) - np.repeat(bytes_before[:-1], counts)
    found, first = [], 0
    for count, (begin, end) in zip(counts.tolist(), itertools.pairwise(bytes_before.tolist()), strict=True):
        found.append(ColumnData(column.form, PackedBytes(ends[first : first + count], packed.data[begin:end])))
        first += count
    return found


def compact(column: ColumnData) -> ColumnData:
    """Return the same rows with the bytes they point to copied, so that the decoded data can be freed.

    Those that point to little, as to a dictionary, are returned as they are.
    """
    if not is_views(column) or (not isinstance(column.values, ViewLists) and point_to_little(column.values)):
        return column
    return _with_own_bytes(column)


def compact_piece(column: ColumnData) -> ColumnData:
    """Return the rows of a piece, their bytes copied where the pages or dictionary they point into are much more."""
    if not is_views(column):
        return column
    views = _views_of(column)
    own = VIEW * len(views)
    if own + bytes_pointed_into(views) <= MORE_KEPT * (own + bytes_of_views(column)):
        return column
    return _with_own_bytes(column)


def _with_own_bytes(column: ColumnData) -> ColumnData:
    """Return a column of views with the bytes copied that they point to."""
    copied = copied_views(_views_of(column))
    values = ViewLists(column.values.ends, copied) if isinstance(column.values, ViewLists) else copied
    return ColumnData(column.form, values, column.valid)


def join(columns: Sequence[ColumnData], form: ColumnForm) -> ColumnData:
    """Return the rows of all columns, one after the other."""
    if len(columns) == 1:
        return columns[0]
    if not columns:
        return from_arrow(pa.array([], storage_type(form.type)), form)
    if isinstance(columns[0].values, ViewLists):
        sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(c.values.ends) for c in columns)])
        return ColumnData(form, ViewLists(np.cumsum(sizes), pa.concat_arrays([c.values.views for c in columns])))
    kinds = {c.values.type if isinstance(c.values, pa.Array) else None for c in columns}
    if len(kinds) > 1:  # some row groups have nulls inside lists, so that all must be Arrow arrays
        arrays = [to_arrow(c) for c in columns]
        return ColumnData(
            form, pa.concat_arrays([a.storage if isinstance(a, pa.ExtensionArray) else a for a in arrays])
        )
    valid = None
    if any(c.valid is not None for c in columns):
        valid = np.concatenate([np.ones(len(c), np.bool_) if c.valid is None else c.valid for c in columns])
    if None in kinds:
        return ColumnData(form, np.concatenate([c.values for c in columns]), valid)
    return ColumnData(form, pa.concat_arrays([c.values for c in columns]), valid)


def is_views(column: ColumnData) -> bool:
    """Return whether a column's rows are views into decoded data."""
    if isinstance(column.values, ViewLists):
        return True
    return isinstance(column.values, pa.Array) and bool(pa.types.is_binary_view(column.values.type))


def ends_of_views(column: ColumnData) -> npt.NDArray[np.int64]:
    """Return where the rows of a column of views end if they lie end to end, after a 0 for where the first begins."""
    ends = _ends(_views_of(column))
    return ends[column.values.ends] if isinstance(column.values, ViewLists) else ends


def _views_of(column: ColumnData) -> pa.Array:
    return column.values.views if isinstance(column.values, ViewLists) else column.values


def are_empty(column: ColumnData, rows: Bools) -> bool:
    """Return whether the marked rows of a column of views or packed bytes have no bytes."""
    packed = isinstance(column.values, PackedBytes | ViewLists)
    ends = column.values.ends if packed else _ends(column.values)
    return not (ends[1:] != ends[:-1])[rows].any()


def _ends(array: pa.Array) -> npt.NDArray[np.int64]:
    ends = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths_of_views(array), out=ends[1:])
    return ends


def bytes_of_views(column: ColumnData) -> int:
    """Return how many bytes the rows of a column point to; 0 for a column that has no views."""
    return int(lengths_of_views(_views_of(column)).sum(dtype=np.int64)) if is_views(column) else 0


def pack_bytes(column: ColumnData, memory: BufferPool | None = None) -> PackedBytes:
    """Return a ``bytes`` column's rows end to end; their bytes are copied, to ``memory`` if they are many."""
    if isinstance(column.values, PackedBytes):
        return column.values
    if isinstance(column.values, ViewLists):
        parts = pack_bytes(ColumnData(column.form, column.values.views), memory)
        ends = column.values.ends
        return PackedBytes(parts.ends[ends], parts.data, ViewEnds(rows=ends, ends=parts.ends))
    if memory is not None:
        ends = ends_of_views(column)
        if ends[-1] > NEAR:
            return PackedBytes(ends, _copied(column.values, ends, memory.borrow(int(ends[-1]))))
    ends, data = packed_views(column.values)
    return PackedBytes(ends, data)


def _copied(views: pa.Array, ends: npt.NDArray[np.int64], into: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Copy the bytes of views ``into`` memory, in parts that fit into the processor's cache."""
    first = 0
    while first < len(views):
        past = max(first + 1, int(np.searchsorted(ends, ends[first] + NEAR, "right")) - 1)
        np.copyto(into[ends[first] : ends[past]], packed_views(views.slice(first, past - first))[1])
        first = past
    return into


def to_arrow(column: ColumnData) -> pa.Array:
    """Return a column as an Arrow array of its form's type."""
    form, values, valid = column.form, column.values, column.valid
    bare = storage_type(form.type)
    if form.kind == "fixed" and not isinstance(values, pa.Array):
        if form.dense:
            ends = np.arange(len(values) + 1, dtype=np.int64) * form.dense
            array = _list(bare, ends, pa.py_buffer(values), valid)
        else:
            array = _from_fixed(bare, np.ascontiguousarray(values), valid)
    elif form.kind == "bytes" and (isinstance(values, PackedBytes) or is_views(column)):
        rows = pack_bytes(column)
        ends, data = rows.ends, rows.data
        if is_text(bare):
            ends = ends if pa.types.is_large_binary(bare) or pa.types.is_large_string(bare) else _int32(ends)
            buffers = [_bits(valid), pa.py_buffer(ends), pa.py_buffer(data)]
            array = pa.Array.from_buffers(bare, len(values), buffers)
        else:
            array = _list(bare, ends // form.width, pa.py_buffer(data), valid)
    else:
        array = values
    return form.type.wrap_array(array) if isinstance(form.type, pa.BaseExtensionType) else array


def _take(values: Any, rows: npt.NDArray[np.int64]) -> Any:
    if isinstance(values, np.ndarray):
        return values.take(rows, axis=0, mode="clip")  # "clip" because it neither checks nor buffers
    if isinstance(values, ViewLists):
        sizes = np.diff(values.ends)[rows]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        views = np.repeat(values.ends[rows] - ends[:-1], sizes) + np.arange(ends[-1])
        return ViewLists(ends, _take(values.views, views))
    if pa.types.is_binary_view(values.type):
        return take_views(values, rows)
    return pc.take(values, pa.array(rows), boundscheck=False)


def _fixed_values(array: pa.Array) -> Bytes | None:
    """Return the rows of a fixed-width array; None where an item inside a list is null."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind, rows = array.type, len(array)
    if pa.types.is_boolean(kind):
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return np.unpackbits(bits, bitorder="little", count=array.offset + rows)[array.offset :]
    if pa.types.is_fixed_size_list(kind):
        inner = array.values.slice(array.offset * kind.list_size, rows * kind.list_size)
        if inner.null_count and (array.null_count == 0 or not _null_only_in_null_lists(array, inner)):
            return None
        items = _fixed_values(inner)
        return None if items is None else _words(items.reshape(-1).view(np.uint8), fixed_width(kind))
    width = fixed_width(kind)
    data = array.buffers()[1]
    if data is None:
        return _words(np.zeros(rows * width, np.uint8), width)
    return _words(np.frombuffer(data, np.uint8, rows * width, array.offset * width), width)


def _dense_values(array: pa.Array, form: ColumnForm) -> Bytes:
    rows = len(array)
    if array.null_count or array.values.null_count:
        raise NotConstant("nulls")
    ends = array.offsets.to_numpy()
    if rows and (np.any(np.diff(ends) != form.dense)):
        raise NotConstant("lists of other lengths")
    first = int(ends[0]) if rows else 0
    values = _fixed_values(array.values.slice(first, rows * form.dense))
    assert values is not None
    return _words(values.reshape(-1).view(np.uint8), form.width)


def as_rows(values: npt.NDArray[Any], width: int) -> Bytes:
    """Return the bytes of ``values``, which lie end to end, as rows of ``width`` bytes."""
    return _words(values.view(np.uint8), width)


def _words(data: npt.NDArray[np.uint8], width: int) -> Bytes:
    if width in WORDS:
        return data.view(WORDS[width])
    return data.reshape(-1, width)


def _valid(array: pa.Array) -> Bools | None:
    if not array.null_count:
        return None
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=np.bool_)


def _null_only_in_null_lists(array: pa.Array, inner: pa.Array) -> bool:
    valid = _valid(array)
    expected = np.repeat(valid, array.type.list_size) if valid is not None else np.ones(len(inner), np.bool_)
    return bool(_valid(inner)[expected].all())  # type: ignore[index]


def _bits(valid: Bools | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _from_fixed(kind: pa.DataType, values: Bytes, valid: Bools | None) -> pa.Array:
    rows = len(values)
    if pa.types.is_boolean(kind):
        data = np.packbits(values.astype(np.bool_), bitorder="little")
        return pa.Array.from_buffers(kind, rows, [_bits(valid), pa.py_buffer(data)])
    if pa.types.is_fixed_size_list(kind):
        flat, inner_kind = values.reshape(-1).view(np.uint8), storage_type(kind.value_type)
        inner = _from_fixed(inner_kind, _words(flat, fixed_width(inner_kind)), None)
        if isinstance(kind.value_type, pa.BaseExtensionType):  # of which Arrow only has arrays that are wrapped
            inner = kind.value_type.wrap_array(inner)
        return pa.Array.from_buffers(kind, rows, [_bits(valid)], children=[inner])
    return pa.Array.from_buffers(kind, rows, [_bits(valid), pa.py_buffer(values)])


def _list(kind: pa.DataType, ends: npt.NDArray[np.int64], data: pa.Buffer, valid: Bools | None) -> pa.Array:
    items = pa.Array.from_buffers(kind.value_type, int(ends[-1]), [None, data])
    ends = ends if pa.types.is_large_list(kind) else _int32(ends)
    return pa.Array.from_buffers(kind, len(ends) - 1, [_bits(valid), pa.py_buffer(ends)], children=[items])


def _int32(ends: npt.NDArray[np.int64]) -> Any:
    if len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError("a batch has more than 2 GB in one column; choose a smaller batch_size")
    return ends.astype(np.int32)
