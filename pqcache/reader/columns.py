"""Columns in memory, stored so that taking rows in any order is cheap.

Numbers and other values of fixed width are numpy arrays, regular lists of them two-dimensional arrays. Texts, binary
and lists of numbers are Arrow binary views: 16 bytes per row that point into the decoded data, so rows are reordered
without moving their bytes, which are copied once, into a batch. Anything else (structs, maps, lists of lists, lists
with nulls) stays an Arrow array, whose rows Arrow takes. A `Kind` says which of these a column is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.parquet.arrow import is_text, numpy_dtype, take, without_views
from pqcache.parquet.dense import Dense
from pqcache.parquet.schema import cast_exactly


@dataclass(frozen=True)
class Kind:
    """How a column is held, and its type in batches.

    Attributes:
        type: Arrow type in a batch, without dictionaries and views.
        bare: the same without extension types.
        held: ``fixed``, ``views`` or ``array``.
        width: bytes of a row (``fixed``) or of an item (``views``; 1 for text and binary).
        length: items per list, if it is the same in all lists of the dataset; else 0.
        stored: how the files hold a dense column.
    """

    type: pa.DataType
    bare: pa.DataType
    held: Literal["fixed", "views", "array"]
    width: int = 0
    length: int = 0
    stored: Dense | None = None

    @property
    def is_list(self) -> bool:
        """Whether rows are lists of items of one width."""
        return self.held == "views" and not is_text(self.bare)


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary and extension."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def fixed_width(kind: pa.DataType) -> int:
    """Bytes per row of a type of fixed width (bool counts one), else 0."""
    kind = storage_type(kind)
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_fixed_size_list(kind):
        return _item_width(kind.value_type) * int(kind.list_size)
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        return 0
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return 0


def _item_width(kind: pa.DataType) -> int:
    """Bytes of a list's item in Arrow's memory; 0 for bits, dictionary codes and items of varying width."""
    bare = storage_type(kind)
    return 0 if pa.types.is_dictionary(kind) or pa.types.is_boolean(bare) else fixed_width(bare)


def number_dtype(kind: pa.DataType) -> Any:
    """The numpy dtype of a type's values, with dates and times as numbers in their own unit; None for other types."""
    return None if isinstance(kind, pa.BaseExtensionType) else _number_dtype(kind)  # which may have no hash


@functools.cache
def _number_dtype(kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return np.dtype(np.bool_)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return numpy_dtype(kind)
    if pa.types.is_temporal(kind):
        try:
            return {32: np.dtype(np.int32), 64: np.dtype(np.int64)}.get(kind.bit_width)
        except ValueError:
            return None
    return None


def kind_of(field: pa.Field, stored: Dense | None = None, length: int = 0) -> Kind:
    """Decide how to hold a field; ``length`` is the common length of its lists, or 0."""
    shown = without_views(field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
    bare = storage_type(shown)
    if width := fixed_width(bare):
        return Kind(shown, bare, "fixed", width, length, stored)
    if is_text(bare):
        return Kind(shown, bare, "views", 1, length, stored)
    if pa.types.is_list(bare) or pa.types.is_large_list(bare):
        item = 0 if pa.types.is_nested(storage_type(bare.value_type)) else _item_width(bare.value_type)
        if item and length:
            return Kind(shown, bare, "fixed", item * length, length, stored)
        if item:
            return Kind(shown, bare, "views", item, 0, stored)
    return Kind(shown, bare, "array", 0, length, stored)


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Fill = npt.NDArray[Any] | bytes  # what stands for a null: a number of the column's dtype, or a text's bytes

_VIEW = "V16"  # an Arrow view, as numpy takes it
_REACH = 2**31 - 1  # bytes: how far a view reaches into its data
_WIDE = 256  # bytes: a list this long is copied once, through a view; shorter ones move with the numbers
_PAGES = 1 << 16  # bytes from which on fresh memory is new pages
_CAST = pc.get_function("cast")
_BYTES, _VIEWS = pc.CastOptions(pa.large_binary()), pc.CastOptions(pa.binary_view())  # made once: that takes long


class IrregularError(ValueError):
    """A column read as lists of one length has a null, or a list of another length."""


@dataclass(slots=True)
class Column:
    """Rows of one column. Never written to; columns of one row group share memory.

    Attributes:
        values: array of shape (rows, ...), binary views, or an Arrow array of ``kind.bare``. A column with ``steps``
            has that many values per row: shape (rows, steps, ...), or rows * steps views or values.
        valid: for each value, whether it is not null; None if there are no nulls.
        wide: dtype and shape of the numbers in each view, for lists of one length.
    """

    kind: Kind
    values: Any
    valid: Bools | None = None
    steps: int = 0
    wide: tuple[np.dtype[Any], tuple[int, ...]] | None = None

    def __len__(self) -> int:
        values = len(self.values)
        return values if isinstance(self.values, np.ndarray) or not self.steps else values // self.steps

    def slice(self, low: int, high: int) -> Column:
        """Rows from ``low`` up to ``high``, not copied."""
        valid = None if self.valid is None else self.valid[low:high]
        if isinstance(self.values, np.ndarray):
            return self._of(self.values[low:high], valid)
        each = max(1, self.steps)
        return self._of(self.values.slice(low * each, (high - low) * each), valid)

    def _of(self, values: Any, valid: Bools | None) -> Column:
        return Column(self.kind, values, valid, self.steps, self.wide)

    def take(self, rows: Ints) -> Column:
        """Rows at positions, which must be within the column; bytes of views are not copied."""
        valid = None if self.valid is None else self.valid.take(rows, axis=0, mode="clip")
        if isinstance(self.values, np.ndarray):
            out = _empty((len(rows), *self.values.shape[1:]), self.values.dtype)
            return self._of(self.values.take(rows, axis=0, out=out, mode="clip"), valid)
        if self.steps:
            rows = (rows[:, None] * self.steps + np.arange(self.steps)).reshape(-1)
        if pa.types.is_binary_view(self.values.type):
            return self._of(take_views(self.values, rows), valid)
        return self._of(take(self.values, rows), valid)

    def with_steps(self, rows: Ints) -> Column:
        """Rows at positions of shape (rows, steps), as values of one row each."""
        taken = self.take(rows.reshape(-1))
        valid = None if taken.valid is None else taken.valid.reshape(rows.shape)
        values = taken.values
        if isinstance(values, np.ndarray):
            values = values.reshape(*rows.shape, *values.shape[1:])
        return replace(taken, values=values, valid=valid, steps=rows.shape[1])

    def packed(self) -> Column:
        """The same rows, with the bytes of views copied to memory of their own."""
        if isinstance(self.values, np.ndarray):
            return self
        if pa.types.is_binary_view(self.values.type):
            return self._of(views_into(*_bytes_of(self.values)), self.valid)
        return self


def hold(array: pa.Array, kind: Kind) -> Column:
    """A decoded array as a column; values are copied only if they are held differently.

    Raises:
        IrregularError: a list does not have ``kind.length`` items.
        pa.ArrowInvalid: a value does not fit ``kind.type``.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if kind.stored is not None and pa.types.is_fixed_size_binary(array.type):
        shape = (len(array), kind.stored.length)
        return _held(kind, _fixed(array, kind.stored.dtype).reshape(shape), _valid(array))
    views = pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type)
    if kind.held == "views" and views and is_text(kind.bare):
        return Column(kind, _bare_views(array), _valid(array))
    if pa.types.is_dictionary(array.type) and is_text(kind.bare) and array.type.value_type == kind.bare:
        return Column(kind, _of_dictionary(array), _valid(array))
    if array.type != kind.bare:
        array = cast_exactly(array, kind.bare)
    if kind.held == "fixed":
        values = _lists_of(array, kind.length) if kind.length else fixed_values(array)
        if values is not None:
            return _held(kind, values, _valid(array))
    elif kind.held == "views":
        if kind.is_list and (values := _regular(array, kind.width)) is not None:
            return Column(kind, values)
        if (values := _views_of(array, kind.width)) is not None:
            return Column(kind, values, _valid(array))
    return Column(kind, array)


def _held(kind: Kind, values: npt.NDArray[Any], valid: Bools | None) -> Column:
    """Values of fixed width; wide rows become views, so that they are copied only once."""
    rows, width = len(values), values[:1].nbytes
    if values.ndim == 1 or width < _WIDE or not rows:
        return Column(kind, values, valid)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    views = views_into(np.arange(rows + 1, dtype=np.int64) * width, pa.py_buffer(data))
    return Column(kind, views, valid, wide=(values.dtype, values.shape[1:]))


def filled(column: Column, fill: Fill) -> Column:
    """A column with ``fill``, a number of its dtype or a text's bytes, in place of its nulls."""
    if column.valid is None:
        return column
    if isinstance(fill, bytes):
        views = pa.concat_arrays([column.values, pa.array([fill], pa.binary_view())])
        rows = np.where(column.valid, np.arange(len(column)), len(column))
        return replace(column, values=take_views(views, rows), valid=None)
    return replace(column, values=np.where(column.valid, column.values, fill.view(column.values.dtype)), valid=None)


def join(columns: Sequence[Column]) -> Column:
    """Rows of several columns of one kind, one after the other."""
    first = columns[0]
    if len(columns) == 1:
        return first
    valid = None
    if any(column.valid is not None for column in columns):
        valid = np.concatenate([_validity(column) for column in columns])
    forms = {_form(column) for column in columns}
    if len(forms) == 1:
        values = [column.values for column in columns]
        if isinstance(first.values, np.ndarray):
            rows = sum(map(len, values))
            joined = np.concatenate(values, out=_empty((rows, *first.values.shape[1:]), first.values.dtype))
        else:
            joined = pa.concat_arrays(values)
        return Column(first.kind, joined, valid, first.steps, first.wide)
    arrays = [_bare_array(column) for column in columns]  # row groups differ: lists of other lengths, or nulls in some
    if _ARRAY not in forms and first.kind.held == "views":
        views = [_views_of(array, first.kind.width) for array in arrays]
        return Column(first.kind, pa.concat_arrays(views), valid, first.steps)
    return Column(first.kind, pa.concat_arrays(arrays), None, first.steps)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array in Arrow's memory, which is reused: the first access to fresh pages costs more than filling them."""
    size = int(np.prod(shape)) * dtype.itemsize
    if size < _PAGES:
        return np.empty(shape, dtype)
    return np.frombuffer(pa.allocate_buffer(size), dtype).reshape(shape)


def _cast(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if values.dtype == dtype:
        return values
    out = _empty(values.shape, dtype)
    out[...] = values
    return out


def to_arrow(column: Column) -> pa.Array:
    """A column as an Arrow array of its kind's type; with ``steps``, as lists of fixed size.

    Texts of more than 2 GB, or lists of more than 2**31 items, get a type with 64-bit offsets, and no extension.
    """
    kind, array = column.kind, _bare_array(column)
    if isinstance(kind.type, pa.BaseExtensionType) and array.type == kind.bare:
        array = kind.type.wrap_array(array)
    return pa.FixedSizeListArray.from_arrays(array, column.steps) if column.steps else array


_ARRAY = "array"


def _form(column: Column) -> Any:
    """The properties that columns must share to be joined without conversion."""
    values = column.values
    if isinstance(values, np.ndarray):
        return values.dtype, values.shape[1:]
    return ("views", column.wide) if pa.types.is_binary_view(values.type) else _ARRAY


def _validity(column: Column) -> Bools:
    if column.valid is not None:
        return column.valid
    if _form(column) == _ARRAY:
        valid = validity_of(column.values)
        return valid.reshape(len(column), column.steps) if column.steps else valid
    return np.ones((len(column), column.steps) if column.steps else len(column), np.bool_)


def _bare_array(column: Column) -> pa.Array:
    """The values as an Arrow array of ``kind.bare``, or its large form; steps follow one another."""
    kind, values = column.kind, column.values
    valid = None if column.valid is None else column.valid.reshape(-1)
    if column.wide is not None:
        dtype, shape = column.wide
        data = _CAST.call([values], _BYTES).buffers()[2]
        size = len(values) * dtype.itemsize * int(np.prod(shape))
        values = np.frombuffer(b"" if data is None else data, np.uint8, size).view(dtype).reshape(len(values), *shape)
    elif isinstance(values, np.ndarray) and column.steps:
        values = values.reshape(len(values) * column.steps, *values.shape[2:])
    if isinstance(values, np.ndarray):
        if kind.held == "fixed" and not kind.length and kind.stored is None:
            return _from_fixed(kind.bare, values, valid)
        dtype = _dtype(storage_type(kind.bare.value_type))
        items = _from_fixed(kind.bare.value_type, _cast(np.ascontiguousarray(values).reshape(-1), dtype))
        if pa.types.is_fixed_size_list(kind.bare):
            return pa.Array.from_buffers(kind.bare, len(values), [_bits(valid)], children=[items])
        ends = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
        return _list(kind.bare, ends, items, valid)
    if not pa.types.is_binary_view(values.type):
        return values
    ends, data = _bytes_of(values)
    if is_text(kind.bare):
        bare, offsets = _with_offsets(kind.bare, ends)
        return pa.Array.from_buffers(bare, len(values), [_bits(valid), offsets, data])
    ends = ends // kind.width
    return _list(kind.bare, ends, pa.Array.from_buffers(kind.bare.value_type, int(ends[-1]), [None, data]), valid)


def _list(kind: pa.DataType, ends: Ints, items: pa.Array, valid: Bools | None) -> pa.Array:
    kind, offsets = _with_offsets(kind, ends)
    return pa.Array.from_buffers(kind, len(ends) - 1, [_bits(valid), offsets], children=[items])


def _with_offsets(kind: pa.DataType, ends: Ints) -> tuple[pa.DataType, pa.Buffer]:
    """A type of lists or texts, in its large form if 32 bits do not suffice for the offsets, and the offsets."""
    if pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return kind, pa.py_buffer(ends)
    if ends[-1] <= _REACH:
        return kind, pa.py_buffer(ends.astype(np.int32))
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_field), pa.py_buffer(ends)
    return pa.large_string() if pa.types.is_string(kind) else pa.large_binary(), pa.py_buffer(ends)


def _bytes_of(views: pa.Array) -> tuple[Ints, pa.Buffer]:
    """The bytes of views, end to end, with the start and end of each."""
    _, ends, data = _CAST.call([views], _BYTES).buffers()
    ends = np.zeros(1, np.int64) if ends is None else np.frombuffer(ends, np.int64, len(views) + 1)
    return ends, pa.py_buffer(b"") if data is None else data


def _bits(valid: Bools | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _valid(array: pa.Array) -> Bools | None:
    return validity_of(array) if array.null_count else None


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    """The numpy dtype for values of fixed width: numbers as they are, booleans as a byte each, others as bytes."""
    if pa.types.is_boolean(kind):
        return np.dtype(np.uint8)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return numpy_dtype(kind)
    width = fixed_width(kind)
    return np.dtype({4: np.int32, 8: np.int64}.get(width, f"V{width}"))


def _fixed(array: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """The data of an array of fixed width as numbers of ``dtype``; a value may have several."""
    size = len(array) * fixed_width(array.type)
    data = array.buffers()[1]
    if data is None:
        return np.zeros(size, np.uint8).view(dtype)
    return np.frombuffer(data, np.uint8, size, array.offset * fixed_width(array.type)).view(dtype)


def fixed_values(array: pa.Array) -> npt.NDArray[Any] | None:
    """Rows of fixed width, with lists of fixed size as further dimensions; None if an item is null."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind, rows = array.type, len(array)
    if pa.types.is_boolean(kind):
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return np.unpackbits(bits, bitorder="little", count=array.offset + rows)[array.offset :]
    if not pa.types.is_fixed_size_list(kind):
        return _fixed(array, _dtype(kind))
    items = array.values.slice(array.offset * kind.list_size, rows * kind.list_size)
    if items.null_count and not validity_of(items)[np.repeat(validity_of(array), kind.list_size)].all():
        return None
    values = fixed_values(items)
    return None if values is None else values.reshape(rows, kind.list_size, *values.shape[1:])


def _from_fixed(kind: pa.DataType, values: npt.NDArray[Any], valid: Bools | None = None) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):  # inside of lists
        return kind.wrap_array(_from_fixed(kind.storage_type, values, valid))
    if pa.types.is_boolean(kind):
        data = np.packbits(values.astype(np.bool_), bitorder="little")
    elif pa.types.is_fixed_size_list(kind):
        items = _from_fixed(kind.value_type, values.reshape(-1, *values.shape[2:]))
        return pa.Array.from_buffers(kind, len(values), [_bits(valid)], children=[items])
    else:
        data = np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [_bits(valid), pa.py_buffer(data)])


def _lists_of(array: pa.Array, length: int) -> npt.NDArray[Any]:
    rows, ends = len(array), array.offsets.to_numpy()
    if array.null_count:
        raise IrregularError("nulls")
    if rows and np.any(np.diff(ends) != length):
        raise IrregularError("lists of other lengths")
    items = array.values.slice(int(ends[0]) if rows else 0, rows * length)
    if items.null_count:
        raise IrregularError("nulls")
    values = fixed_values(items)
    assert values is not None
    return values.reshape(rows, length, *values.shape[1:])


def _regular(array: pa.Array, width: int) -> npt.NDArray[Any] | None:
    """Short lists of one length as a two-dimensional array; None for others."""
    rows = len(array)
    if not rows or array.null_count or pa.types.is_boolean(array.type.value_type):
        return None
    ends = array.offsets.to_numpy()
    length = int(ends[1] - ends[0])
    if not 0 < length * width < _WIDE or np.any(np.diff(ends) != length):
        return None
    items = array.values.slice(int(ends[0]), rows * length)
    if items.null_count:
        return None
    return _fixed(
        items.storage if isinstance(items, pa.ExtensionArray) else items, _dtype(storage_type(items.type))
    ).reshape(rows, length)


def take_views(views: pa.Array, rows: Ints) -> pa.Array:
    _, pointers, *data = views.buffers()
    if pointers is None:
        return views
    taken = np.frombuffer(pointers, _VIEW, len(views), views.offset * 16).take(rows, mode="clip")
    return pa.Array.from_buffers(views.type, len(rows), [None, pa.py_buffer(taken), *data])


def _bare_views(array: pa.Array) -> pa.Array:
    """String or binary views as binary views without a validity bitmap; nulls are empty."""
    _, pointers, *data = array.buffers()
    if array.null_count:
        words = np.frombuffer(pointers, np.uint8, len(array) * 16, array.offset * 16).reshape(-1, 16).copy()
        words[~validity_of(array)] = 0
        return pa.Array.from_buffers(pa.binary_view(), len(array), [None, pa.py_buffer(words), *data])
    return pa.Array.from_buffers(pa.binary_view(), len(array), [None, pointers, *data], offset=array.offset)


def _of_dictionary(array: pa.DictionaryArray) -> pa.Array:
    """Texts of a dictionary as views into it, which saves memory; nulls are empty."""
    words = pa.concat_arrays([_views_of(array.dictionary, 1), pa.array([b""], pa.binary_view())])
    return take_views(words, array.indices.cast(pa.int64()).fill_null(len(words) - 1).to_numpy())


def validity_of(array: pa.Array) -> Bools:
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False))


def _views_of(array: pa.Array, width: int) -> pa.Array | None:
    """Texts or lists as views into the array's own data; None if an item is null."""
    rows, kind = len(array), array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends, items = array.offsets.to_numpy().astype(np.int64), array.values
        items = items.storage if isinstance(items, pa.ExtensionArray) else items
        if items.slice(int(ends[0]), int(ends[-1] - ends[0])).null_count:
            return None
        ends, data = (ends + items.offset) * width, items.buffers()[1]
    else:
        _, offsets, data = array.buffers()
        if offsets is None or not rows:
            return pa.array([], pa.binary_view())
        if not (pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)):
            return _CAST.call(
                [pa.Array.from_buffers(pa.binary(), rows, [None, offsets, data], 0, array.offset)], _VIEWS
            )
        ends = np.frombuffer(offsets, np.int64, rows + 1, array.offset * 8)
    return views_into(ends, data or pa.py_buffer(b""))


def views_into(ends: Ints, data: pa.Buffer) -> pa.Array:
    """Views of consecutive bytes, each from one of ``ends`` to the next."""
    rows, low = len(ends) - 1, 0
    parts: list[pa.Array] = []
    while low < rows or not parts:
        high = int(np.searchsorted(ends, ends[low] + _REACH, side="right")) - 1
        high = rows if high >= rows else max(high, low + 1)
        near = pa.py_buffer(ends[low : high + 1] - ends[low])
        part = data.slice(int(ends[low]), int(ends[high] - ends[low]))
        parts.append(_CAST.call([pa.Array.from_buffers(pa.large_binary(), high - low, [None, near, part])], _VIEWS))
        low = high
    return pa.concat_arrays(parts) if len(parts) > 1 else parts[0]
