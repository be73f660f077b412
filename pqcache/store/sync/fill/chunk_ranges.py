"""Where the column chunks of a file lie, from its footer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pqcache.parquet.row_group_stats import first_page, names_of_chunks

Ints = npt.NDArray[np.int64]


def row_group_ranges(metadata: pq.FileMetaData) -> Ints:
    """Return for each row group of a file where its first chunk begins and its last one ends."""
    found = np.zeros((metadata.num_row_groups, 2), np.int64)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(column) for column in range(metadata.num_columns)]
        starts = [first_page(chunk) for chunk in chunks]
        ends = [start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)]
        found[number] = min(starts, default=0), max(ends, default=0)
    return found


def chunk_ranges(path: Path) -> dict[str, Ints]:
    """Return where the chunks of a file lie for each top-level column: row groups x leaves x (start, end).

    Of the file only the footer has to be there, which has been checked.
    """
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        names = names_of_chunks(metadata, file.schema_arrow)
    found: dict[str, list[list[tuple[int, int]]]] = {name: [] for name in names}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for leaves in found.values():
            leaves.append([])
        for column, name in enumerate(names):
            chunk = group.column(column)
            start = first_page(chunk)
            found[name][-1].append((start, start + chunk.total_compressed_size))
    return {name: np.array(leaves, np.int64) for name, leaves in found.items()}
