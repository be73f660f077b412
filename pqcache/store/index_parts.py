"""Rows of row-group indexes, joined in the order of a new snapshot's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import ParquetError
from pqcache.parquet.arrow_rows import rows_at
from pqcache.parquet.row_group_stats import BASE

_BATCH = 8_192  # files, or row groups, handled at once


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Return tables one after another, with the columns of all."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise ParquetError("row-group index", f"the types of two files do not fit together: {error}") from error


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
                pieces.append(rows_at(piece, inside - low).set_column(0, BASE.field("file"), numbers))
        block = join_tables(pieces)
        order = np.lexsort((block["row_group"].to_numpy(), block["file"].to_numpy()))
        yield rows_at(block, order).combine_chunks()
