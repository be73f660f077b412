"""Takes rows of Arrow arrays and tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MAX_RUNS = 512  # slices of one table


def rows_at(table: pa.Table, positions: npt.NDArray[np.int64]) -> pa.Table:
    """Return the rows at ``positions``; few runs of neighbours are slices, without importing pyarrow.compute."""
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
    """Copy slices that pyarrow takes wrongly.

    pyarrow 26 takes other rows' values, or stray memory, of a slice of fixed-size lists of fixed-size lists, also as
    fields of structs.
    """
    if _is_taken_wrong(array.type) and _has_offset(array):
        return pa.concat_arrays([array, array.slice(0, 0)])  # alone it would not be copied
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
