"""Arrow types and their leaves, with structs, maps and lists nested to any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

_LISTS = (
    (pt.is_list, pa.list_),
    (pt.is_large_list, pa.large_list),
    (pt.is_list_view, pa.list_view),
    (pt.is_large_list_view, pa.large_list_view),
)


def leaves_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Leaf types of a column, in Parquet's order."""
    if pt.is_struct(kind):
        for i in range(kind.num_fields):
            yield from leaves_in(kind.field(i).type)
    elif pt.is_map(kind):
        yield from leaves_in(kind.key_type)
        yield from leaves_in(kind.item_type)
    elif pt.is_nested(kind):
        yield from leaves_in(kind.value_type)
    else:
        yield kind


def leaves_of(array: pa.Array) -> Iterator[pa.Array]:
    """Leaf arrays, without the items of null lists and maps. Extension arrays count as leaves."""
    if pt.is_struct(array.type):
        for child in array.flatten():
            yield from leaves_of(child)
    elif pt.is_map(array.type):
        yield from leaves_of(array.keys)
        yield from leaves_of(array.items)
    elif pt.is_nested(array.type):
        yield from leaves_of(array.flatten())
    else:
        yield array


def top_level_names(metadata: pq.FileMetaData, schema: pa.Schema) -> list[str]:
    """The top-level column of each leaf. Names may contain dots, so leaves are counted in schema order."""
    names = [field.name for field in schema for _ in leaves_in(field.type)]
    if len(names) == metadata.num_columns:
        return names
    # An Arrow type has other leaves in Parquet. After a use of metadata.schema, pyarrow's footer refers to itself, and
    # lives until the next garbage collection.
    if metadata.num_row_groups:
        first = metadata.row_group(0)
        return [first.column(i).path_in_schema.split(".")[0] for i in range(metadata.num_columns)]
    return [metadata.schema.column(i).path.split(".")[0] for i in range(metadata.num_columns)]


def with_changed_types(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Apply ``change`` to the item types of a struct, map or list."""

    def changed(field: pa.Field) -> pa.Field:
        return field.with_type(change(field.type))

    if pt.is_struct(kind):
        return pa.struct([changed(field) for field in kind.fields])
    if pt.is_map(kind):
        return pa.map_(changed(kind.key_field), changed(kind.item_field), kind.keys_sorted)
    if pt.is_fixed_size_list(kind):
        return pa.list_(changed(kind.value_field), kind.list_size)
    for is_kind, make in _LISTS:
        if is_kind(kind):
            return make(changed(kind.value_field))
    return kind


def with_types_like(
    kind: pa.DataType, other: pa.DataType, change: Callable[[pa.DataType, pa.DataType], pa.DataType]
) -> pa.DataType:
    """Apply ``change`` to each leaf type and its counterpart in ``other``; struct fields are matched by name."""
    if not pt.is_nested(kind):
        return kind if pt.is_nested(other) else change(kind, other)
    if pt.is_struct(kind) and pt.is_struct(other):
        inside = {field.name: field.type for field in other.fields}
        fields = [f.with_type(with_types_like(f.type, inside.get(f.name, f.type), change)) for f in kind.fields]
        return pa.struct(fields)
    if pt.is_map(kind) and pt.is_map(other):
        kinds = iter((other.key_type, other.item_type))
        return with_changed_types(kind, lambda inner: with_types_like(inner, next(kinds), change))
    if is_list(kind) and is_list(other):
        return with_changed_types(kind, lambda inner: with_types_like(inner, other.value_type, change))
    return kind


def is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_fixed_size_list(kind) or any(is_kind(kind) for is_kind, _ in _LISTS))


def numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """numpy's type for an Arrow number; ``to_pandas_dtype`` imports pandas before pyarrow 26."""
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    return np.dtype(f"{letter}{kind.bit_width // 8}")


def without_views(kind: pa.DataType) -> pa.DataType:
    """Replace views with plain strings, binary and lists: Arrow can't join or take most views."""
    if pt.is_string_view(kind):
        return pa.string()
    if pt.is_binary_view(kind):
        return pa.binary()
    return with_changed_types(plain_list(kind), without_views)


def plain_list(kind: pa.DataType) -> pa.DataType:
    if pt.is_list_view(kind):
        return pa.list_(kind.value_field)
    return pa.large_list(kind.value_field) if pt.is_large_list_view(kind) else kind


def plain_lists(kind: pa.DataType) -> pa.DataType:
    """Replace list views with lists, also inside."""
    return with_changed_types(plain_list(kind), plain_lists)


def is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_binary(kind) or pt.is_large_string(kind) or pt.is_large_binary(kind))
