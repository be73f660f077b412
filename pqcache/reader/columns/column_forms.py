"""How a column's rows are held in memory: which columns have rows of fixed width, and which are bytes of any length."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.parquet.dense_columns import Dense
from pqcache.parquet.numpy_types import numpy_dtype
from pqcache.parquet.schema_merge import is_text, without_views


@dataclass(frozen=True, kw_only=True)
class ColumnForm:
    """How a column's rows are held in memory.

    ``kind``     "fixed", "bytes" or "other"; see `pqcache.reader.columns.column_data`
    ``type``     the Arrow type that users see; dictionaries are decoded
    ``width``    bytes of a row ("fixed") or of a list's item ("bytes"; 1 for strings and binary)
    ``dense``    the length of lists that are all of one length, which are "fixed"; else 0
    ``stored``   how a dense column's lists are stored in the files; rows are held like that until `as_typed`
    """

    name: str
    type: pa.DataType
    kind: str
    width: int = 0
    dense: int = 0
    stored: Dense | None = None


def storage_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionary and extension."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def fixed_width(kind: pa.DataType) -> int:
    """Return the bytes per row of a type whose rows are all as wide (bool counts one), else 0."""
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
    """Return the bytes of a list's item in Arrow's memory; 0 where items are bits, codes or not all as wide."""
    bare = storage_type(kind)
    return 0 if pa.types.is_dictionary(kind) or pa.types.is_boolean(bare) else fixed_width(bare)


def number_dtype(kind: pa.DataType, dense: bool = False) -> Any:
    """Return the numpy dtype that a type's values have as numbers, or those of its lists (``dense``); else None.

    Dates, times and timestamps count as numbers in their own unit.
    """
    if dense:
        kind = storage_type(kind).value_type
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


def form_of(field: pa.Field, dense: int = 0) -> ColumnForm:
    """Return how to hold a column; ``dense`` is the length of its lists where that is known to be constant."""
    kind = without_views(field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
    bare = storage_type(kind)
    if width := fixed_width(bare):
        return ColumnForm(name=field.name, type=kind, kind="fixed", width=width)
    if is_text(bare):
        return ColumnForm(name=field.name, type=kind, kind="bytes", width=1)
    if pa.types.is_list(bare) or pa.types.is_large_list(bare):
        item = 0 if pa.types.is_nested(storage_type(bare.value_type)) else _item_width(bare.value_type)
        if item:
            if dense:
                return ColumnForm(name=field.name, type=kind, kind="fixed", width=item * dense, dense=dense)
            return ColumnForm(name=field.name, type=kind, kind="bytes", width=item)
    return ColumnForm(name=field.name, type=kind, kind="other")


def dense_dtype(form: ColumnForm) -> np.dtype[Any]:
    """Return the numpy dtype of the numbers in a dense column's lists."""
    return numpy_dtype(storage_type(storage_type(form.type).value_type))


def typed_form(form: ColumnForm) -> ColumnForm:
    """Return the form of a column that is held as it is stored, once its rows are numbers of its type."""
    if form.stored is None:
        return form
    if form.kind != "fixed":
        return replace(form, stored=None)
    return replace(form, stored=None, width=form.stored.length * dense_dtype(form).itemsize)


def stored_as(form: ColumnForm, stored: Dense | None) -> ColumnForm:
    """Return the form of a column that the files hold dense."""
    if stored is None:
        return form
    return replace(form, stored=stored, width=stored.width if form.kind == "fixed" else form.width)
