"""Where the column chunks of a file lie, from its footer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pqcache.parquet.nested import names_of_chunks
from pqcache.parquet.projection import bytes_after_chunks
from pqcache.parquet.row_group_stats import first_page

Ints = npt.NDArray[np.int64]


def row_group_ranges(metadata: pq.FileMetaData, size: int) -> Ints:
    """Return for each row group of a file of ``size`` bytes where its first chunk begins and its last one ends."""
    found = np.zeros((metadata.num_row_groups, 2), np.int64)
    for number, chunks in enumerate(_chunks(metadata, size)):
        found[number] = min((start for start, _ in chunks), default=0), max((end for _, end in chunks), default=0)
    return found


def chunk_ranges(path: Path) -> dict[str, Ints]:
    """Return where the chunks of a file lie for each top-level column: row groups x leaves x (start, end).

    Of the file only the footer has to be there, which has been checked.
    """
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        names = names_of_chunks(metadata, file.schema_arrow)
    found: dict[str, list[list[tuple[int, int]]]] = {name: [] for name in names}
    for chunks in _chunks(metadata, path.stat().st_size):
        for leaves in found.values():
            leaves.append([])
        for name, chunk in zip(names, chunks, strict=True):
            found[name][-1].append(chunk)
    return {name: np.array(leaves, np.int64) for name, leaves in found.items()}


def _chunks(metadata: pq.FileMetaData, size: int) -> list[list[tuple[int, int]]]:
    """Return for each row group where its chunks begin and end, with what is read behind them."""
    more = bytes_after_chunks((metadata.created_by or "").encode())
    limit = size - 8 - metadata.serialized_size
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(column) for column in range(metadata.num_columns)]
        starts = [first_page(chunk) for chunk in chunks]
        sizes = [chunk.total_compressed_size for chunk in chunks]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        found.append([(start, max(end, min(end + more, limit))) for start, end in zip(starts, ends, strict=True)])
    return found
