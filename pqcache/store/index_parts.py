"""Rows of row-group indexes, joined in the order of a new snapshot's files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.parquet.arrow_rows import rows_at
from pqcache.parquet.row_group_stats import BASE, EXTREMES

log = logging.getLogger("pqcache.store")

_BATCH = 8_192  # files, or row groups, handled at once


def with_columns(table: pa.Table, columns: pa.Schema) -> pa.Table:
    """Return a table of an index with other columns; extremes that do not fit their new type are unknown."""
    arrays: dict[str, pa.Array | pa.ChunkedArray | None] = {}
    unknown: set[str] = set()
    for field in columns:
        found = table.schema.get_field_index(field.name)
        array = table.column(found) if found >= 0 else None
        try:
            arrays[field.name] = array if array is None or array.type == field.type else array.cast(field.type)
        except pa.ArrowException as error:
            log.debug("%s does not fit %s, and prunes nothing: %s", field.name, field.type, error)
            arrays[field.name] = None
            unknown.add(field.name.rpartition(":")[0])
    for name, array in arrays.items():
        column, _, what = name.rpartition(":")
        if array is None or (column in unknown and what in EXTREMES):
            arrays[name] = pa.nulls(table.num_rows, columns.field(name).type)
    return pa.table([arrays[name] for name in columns.names], schema=columns)


@dataclass(frozen=True)
class IndexPart:
    """Rows of an index and the position in path order that each row's file has now, -1 where it is gone."""

    table: pa.Table
    files: npt.NDArray[np.int32]


def index_part(table: pa.Table, position_of: npt.NDArray[np.int32]) -> IndexPart:
    """Return rows of an index whose files have new positions."""
    return IndexPart(table, position_of[table["file"].to_numpy()])


def merged_parts(parts: Sequence[IndexPart], files: int, columns: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of ``parts`` in the order of files and row groups, a few thousand files at a time."""
    for first in range(0, files, _BATCH):
        pieces = [columns.empty_table()]
        for part in parts:
            inside = np.nonzero((part.files >= first) & (part.files < first + _BATCH))[0]
            if len(inside):
                low, high = int(inside[0]), int(inside[-1]) + 1
                piece = part.table.slice(low, high - low)
                files = pa.py_buffer(part.files[inside])
                numbers = pa.Array.from_buffers(pa.int32(), len(inside), [None, files])
                piece = rows_at(piece, inside - low).set_column(0, BASE.field("file"), numbers)
                pieces.append(with_columns(piece, columns))
        block = pa.concat_tables(pieces)
        order = np.lexsort((block["row_group"].to_numpy(), block["file"].to_numpy()))
        yield rows_at(block, order).combine_chunks()
