"""Arrow types and their leaves, nested to any depth; arrays: taking rows, the bytes they hold, strings as views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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


_MAX_RUNS = 512  # slices of one table


def rows_at(table: pa.Table, positions: npt.NDArray[np.int64]) -> pa.Table:
    """Take rows. A few runs of neighbours are taken as slices, which spares importing pyarrow.compute."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    if len(starts) > _MAX_RUNS:
        return take_of_table(table, positions)
    lengths = np.diff(starts, append=len(positions))
    runs = [table.slice(int(positions[at]), int(length)) for at, length in zip(starts, lengths, strict=True)]
    return pa.concat_tables(runs) if runs else table.slice(0, 0)


def take(array: pa.Array, positions: npt.NDArray[np.int64]) -> pa.Array:
    """Take values; ``positions`` must be within the array."""
    import pyarrow.compute as pc

    return pc.take(_without_offset(array), pa.array(positions), boundscheck=False)


def take_of_table(table: pa.Table, positions: npt.NDArray[np.int64]) -> pa.Table:
    for number, field in enumerate(table.schema):
        if _is_taken_wrong(field.type):
            chunks = [_without_offset(chunk) for chunk in table.column(number).chunks]
            table = table.set_column(number, field, pa.chunked_array(chunks, field.type))
    return table.take(pa.array(positions))


def _without_offset(array: pa.Array) -> pa.Array:
    """Copy slices of nested fixed-size lists: pyarrow 26 takes other rows' values or stray memory from them."""
    if _is_taken_wrong(array.type) and _has_offset(array):
        return pa.concat_arrays([array, array.slice(0, 0)])  # a single array would not be copied
    return array


def _is_taken_wrong(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_is_taken_wrong(field.type) for field in kind)
    if isinstance(kind, pa.BaseExtensionType):
        return _is_taken_wrong(kind.storage_type)
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type))


def _has_offset(array: pa.Array) -> bool:
    if isinstance(array, pa.ExtensionArray):
        return _has_offset(array.storage)
    if pa.types.is_struct(array.type):
        return bool(array.offset) or any(_has_offset(array.field(number)) for number in range(array.type.num_fields))
    if pa.types.is_fixed_size_list(array.type):
        return bool(array.offset) or _has_offset(array.values)
    return bool(array.offset)


# ---- The size of rows in Arrow memory, and an estimate of their size on disk

Floats = npt.NDArray[np.float64]


class Widths(NamedTuple):
    """Bytes per value of each column in Arrow (0 if values differ in size), and the columns whose values differ in
    size.
    """

    fixed: Floats
    varying: tuple[int, ...]


def widths_of(schema: pa.Schema) -> Widths:
    """Computed once per schema, as a column's own ``nbytes`` is slow."""
    fixed = [float(kind.bit_width) / 8 if _is_fixed(kind) else 0.0 for kind in schema.types]
    return Widths(np.array(fixed), tuple(n for n, kind in enumerate(schema.types) if not _is_fixed(kind)))


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pt.is_primitive(kind) or pt.is_fixed_size_binary(kind))


def arrow_bytes(table: pa.Table, widths: Widths) -> Floats:
    sizes: Floats = widths.fixed * table.num_rows
    for number in widths.varying:
        column = table.column(number)
        if is_view(column.type):
            sizes[number] = bytes_in(column) + 4 * table.num_rows
        elif pt.is_dictionary(column.type):  # nbytes would count the whole dictionary for every slice
            sizes[number] = sum(chunk.indices.nbytes for chunk in column.chunks)
        else:
            sizes[number] = sum(map(_nbytes, column.chunks))
    return sizes


def _nbytes(chunk: pa.Array) -> int:
    """An array's bytes without its validity bitmaps.

    Arrow's own count releases the interpreter's lock, and frequent counts would wait for it each time.
    """
    kind = chunk.type
    plain = is_text(kind) or ((pt.is_list(kind) or pt.is_large_list(kind)) and _is_fixed(kind.value_type))
    if not plain or not len(chunk):
        return int(chunk.nbytes)
    ends = offsets_of(chunk)
    width = 1.0 if is_text(kind) else kind.value_type.bit_width / 8
    return int(ends.nbytes + width * int(ends[-1] - ends[0]))


def weigh(table: pa.Table, ratios: Floats) -> Floats:
    """Estimate each column's bytes on disk: its Arrow bytes times its ratio, plus a bit for each row."""
    result: Floats = arrow_bytes(table, widths_of(table.schema)) * ratios + table.num_rows / 8
    return result


def least_width(kind: pa.DataType) -> float:
    """The least bytes of a value in Arrow, which may be far more than its bits in Parquet."""
    if pt.is_struct(kind):
        return sum(least_width(inner.type) for inner in kind.fields)
    if pt.is_fixed_size_list(kind):
        return float(kind.list_size * least_width(kind.value_type))
    try:
        return float(kind.bit_width / 8)
    except ValueError:
        return 4.0


# ---- Views: strings and binary that lie in other buffers, such as the pages of a file
#
# A view is the length, and either up to 12 bytes or the first four, the number of the buffer and where in it the bytes
# begin. See https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout.

LONG = 2048  # bytes: longer values are read and written as views
INLINE = 12  # bytes that fit into a view itself


def is_view(kind: pa.DataType) -> bool:
    return bool(pt.is_binary_view(kind) or pt.is_string_view(kind))


def bytes_in(column: pa.ChunkedArray) -> int:
    """The bytes of a column's values; for views, ``nbytes`` would count the whole pages they point into."""
    if not is_view(column.type):
        return int(column.nbytes)
    return sum(int(_words(chunk)[:, 0].sum(dtype=np.int64)) for chunk in column.chunks)


def _words(views: pa.Array) -> npt.NDArray[np.int32]:
    """The four words of each view: length, first four bytes, buffer, and offset in it."""
    if not len(views):
        return np.zeros((0, 4), np.int32)
    return np.frombuffer(views.buffers()[1], "<i4", 4 * len(views), 16 * views.offset).reshape(-1, 4)


def in_one_piece(table: pa.Table) -> pa.Table:
    """Copy strings and binary views to contiguous arrays."""
    for number, field in enumerate(table.schema):
        if is_view(field.type):
            kind = pa.large_string() if pt.is_string_view(field.type) else pa.large_binary()
            table = table.set_column(number, field.with_type(kind), table.column(number).cast(kind))
    return table


def length_prefixed_bytes(views: pa.Array) -> list[tuple[memoryview, npt.NDArray[np.int64]]] | None:
    """Stretches of consecutive length-prefixed values, each with the ends they would have without the prefixes.

    None unless the length lies in front of every value, as in a page.
    """
    words = _words(views)
    lengths, numbers, begins = words[:, 0].astype(np.int64), words[:, 2], words[:, 3].astype(np.int64)
    if np.any(lengths <= INLINE) or np.any(begins < 4):
        return None
    if not len(words):
        return []
    buffers = [np.frombuffer(buffer, np.uint8) for buffer in views.buffers()[2:]]
    cuts = np.flatnonzero((numbers[1:] != numbers[:-1]) | (begins[1:] != begins[:-1] + lengths[:-1] + 4)) + 1
    found = []
    for low, high in pairwise([0, *cuts.tolist(), len(words)]):
        data = buffers[numbers[low]]
        heads = data[begins[low:high, None] + np.arange(-4, 0)].reshape(-1).view("<i4")
        if not np.array_equal(heads, lengths[low:high]):
            return None
        bytes_ = data[begins[low] - 4 : begins[high - 1] + lengths[high - 1]].data
        found.append((bytes_, np.concatenate([[0], np.cumsum(lengths[low:high])])))
    return found


def offsets_of(chunk: pa.Array) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    """Where each list, string or binary value of an array begins, and where the last one ends."""
    large = pt.is_large_binary(chunk.type) or pt.is_large_string(chunk.type) or pt.is_large_list(chunk.type)
    kind = np.int64 if large else np.int32  # to_numpy would import pandas
    if not len(chunk):  # its buffer may be empty
        return np.zeros(1, kind)
    return np.frombuffer(chunk.buffers()[1], kind, len(chunk) + 1, chunk.offset * np.dtype(kind).itemsize)
