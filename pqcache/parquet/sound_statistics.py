"""Which minima and maxima in a footer are those of the values, as far as its column orders say.

Statistics have two pairs of fields. ``min_value`` and ``max_value`` are in the order that ``column_orders`` says, and
without these undefined. ``min`` and ``max`` are deprecated: their writers compared binary values, decimals among them,
with signed bytes, and unsigned numbers as signed ones; parquet-mr before 1.8 wrote minima and maxima of binary values
that were none (PARQUET-251). pyarrow returns one pair or the other, does not say which, and lets pass what it does not
know to be wrong, like those of a writer that does not say its version. Here the deprecated pair is used for signed
numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.footer.footer import MAGIC
from pqcache.parquet.footer.thrift import LIST, STRUCT, put_varint
from pqcache.parquet.footer.thrift_walk import items_at, key, skip_value, walk_struct

_COLUMN_ORDERS = 7  # of FileMetaData
_TYPE_DEFINED = b"\x1c\0\0"  # a ColumnOrder: the order that the column's type has
_SIGNED = frozenset(("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE"))


def type_ordered(metadata: pq.FileMetaData) -> Sequence[bool]:
    """Return for each leaf whether its minima and maxima are in the order that its type has.

    pyarrow does not tell, but writes a footer as it has parsed it, and the column orders at its end.
    """
    sink, leaves = pa.BufferOutputStream(), metadata.num_columns
    metadata.write_metadata_file(sink)
    footer = sink.getvalue()[len(MAGIC) : -8].to_pybytes()
    size = bytearray(((min(leaves, 15) << 4) | STRUCT,))
    if leaves >= 15:
        put_varint(size, leaves)
    if footer.endswith(bytes(size) + _TYPE_DEFINED * leaves + b"\0"):  # as nearly all files have it
        return [True] * leaves
    found: list[bool] = []
    walk_struct(footer, 0, {key(_COLUMN_ORDERS, LIST): _orders}, found)
    return found if len(found) == leaves else [False] * leaves


def _orders(data: bytes, at: int, found: list[bool]) -> int:
    count, kind, at = items_at(data, at)
    for _ in range(count):
        end = skip_value(data, at, kind, 0)
        found.append(data[at:end] == _TYPE_DEFINED)
        at = end
    return at


def is_sound(chunk: pq.ColumnChunkMetaData, kind: pa.DataType, ordered: bool) -> bool:
    """Return whether the minimum and maximum that pyarrow returns for a chunk are those of its values.

    ``kind`` is the Arrow type of the column, and ``ordered`` what `type_ordered` says of it.
    """
    if ordered:
        return not pa.types.is_timestamp(kind) or bool(chunk.physical_type != "INT96")  # which has no order
    return chunk.physical_type in _SIGNED and not pa.types.is_unsigned_integer(kind)
