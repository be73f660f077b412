"""Footers under which pyarrow returns columns as the bytes that are stored, whatever their types are.

Of some columns pyarrow does not say what they hold: a leaf with the annotation UNKNOWN is null to it in all rows, and
an INT96 time stamp of Julian day 0 is 1970-01-01.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.footer import MAGIC, read_local_tail
from pqcache.parquet.footer.thrift import I32, STRUCT, Items, Struct
from pqcache.parquet.footer.thrift_fields import FIXED_LEN_BYTE_ARRAY, INT96, STATISTICS, TYPE

INT96_BYTES = 12
_ANNOTATIONS = (6, 10)  # of a schema element: converted_type and logicalType
_COLUMN_ORDERS = 7  # of the footer


def stored_bytes_metadata(data: bytes, leaves: Collection[int], name: str) -> pq.FileMetaData:
    """Return the footer ``data`` with the columns ``leaves`` as they are stored: INT96 as 12 bytes, all unannotated.

    A file opened with it returns these columns so. ``name`` is the file to blame for a footer that is damaged.
    """
    fields = thrift.decode(data, name)
    schema = footer.schema_of(fields, name)
    all_leaves = footer.leaves_of(schema, name)
    int96 = set()
    for number in leaves:
        position = all_leaves[number].element
        element = {field: entry for field, entry in schema[position].items() if field not in _ANNOTATIONS}
        if element[TYPE][1] == INT96:
            int96.add(number)
            element |= {1: (I32, FIXED_LEN_BYTE_ARRAY), 2: (I32, INT96_BYTES)}
        schema[position] = dict(sorted(element.items()))
    groups = [_with_bytes(group, int96, set(leaves), name) for group in footer.row_groups_of(fields, name)]
    rows = fields[3][1]
    fields.pop(_COLUMN_ORDERS, None)
    end = MAGIC + footer.footer_and_magic(footer.make_footer(fields, schema, groups, rows, {}))
    with pq.ParquetFile(pa.BufferReader(end)) as file:
        return file.metadata


def local_stored_bytes_metadata(path: Path, leaves: Collection[int]) -> pq.FileMetaData:
    """Return the footer of the file ``path`` as `stored_bytes_metadata` does."""
    return stored_bytes_metadata(read_local_tail(path).footer, leaves, str(path))


def _with_bytes(group: Struct, int96: Collection[int], leaves: Collection[int], name: str) -> Struct:
    """Return a row group in which the chunks of ``leaves`` have no statistics, and those of ``int96`` another type."""
    kind, chunks = group[1]
    found = []
    for number, (chunk, meta) in enumerate(zip(chunks.values, footer.columns_of(group, name), strict=True)):
        if number in leaves:
            meta = {field: entry for field, entry in meta.items() if field != STATISTICS}
            if number in int96:
                meta[TYPE] = (I32, FIXED_LEN_BYTE_ARRAY)
            chunk = {**chunk, 3: (STRUCT, meta)}
        found.append(chunk)
    return {**group, 1: (kind, Items(STRUCT, found))}
