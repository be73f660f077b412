"""The size of rows in Arrow memory, and an estimate of their size on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.binary_views import bytes_in, is_view, offsets_of
from pqcache.parquet.schema_merge import is_text

Floats = npt.NDArray[np.float64]


class Widths(NamedTuple):
    """The bytes that a value of each column of a schema takes in Arrow, 0 where they differ, and those columns."""

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
    """Return an estimate of the bytes each column takes on disk: its Arrow bytes times ``ratios``, and a bit a row."""
    result: Floats = arrow_bytes(table, widths_of(table.schema)) * ratios + table.num_rows / 8
    return result


def least_width(kind: pa.DataType) -> float:
    """Return the least bytes a value of ``kind`` takes in Arrow, where a few bits in Parquet may become eight bytes."""
    if pt.is_struct(kind):
        return sum(least_width(inner.type) for inner in kind.fields)
    if pt.is_fixed_size_list(kind):
        return float(kind.list_size * least_width(kind.value_type))
    try:
        return float(kind.bit_width / 8)
    except ValueError:
        return 4.0
