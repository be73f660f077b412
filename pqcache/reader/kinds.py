"""How the rows of a column are held in memory, by its type."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pqcache.parquet.dense_columns import Dense
from pqcache.parquet.numpy_types import numpy_dtype
from pqcache.parquet.schema_merge import is_text, without_views


@dataclass(frozen=True)
class Kind:
    """How a column is held and what a batch shows.

    Attributes:
        type: Arrow type in a batch, without dictionaries and views.
        bare: the same without extension types.
        held: ``fixed``, ``views`` or ``array``.
        width: bytes of a row (``fixed``) or of an item (``views``; 1 for text and binary).
        length: items of each list, where all lists of the dataset have as many; else 0.
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
    """The numpy dtype of a type's values as numbers, dates and times in their own unit; None if they are none."""
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
