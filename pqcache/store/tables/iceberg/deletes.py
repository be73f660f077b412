"""The rows of data files that a table's delete files delete: positions in Parquet, or deletion vectors.

They are read when the first data file that needs them is downloaded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import first_line
from pqcache.store.tables.deletion_vector import Positions, deleted_positions, unframed
from pqcache.store.tables.iceberg.errors import damaged
from pqcache.store.tables.iceberg.file_io import TableAccess

_MAX_CACHED = 16 << 20  # positions, of 8 bytes each
_BATCH = 1 << 16  # rows


@dataclass(frozen=True, order=True)
class DeleteFile:
    """What deletes rows of a data file: a Parquet file, or ``size`` bytes from ``offset`` on of a Puffin file."""

    uri: str
    offset: int = 0
    size: int = 0


class Deletes:
    """Reads the delete files of one version of a table; threads may share it.

    The positions of the delete files that were used last are kept in memory, for the next data files that need them.
    """

    def __init__(self, access: TableAccess) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, Mapping[str, Positions]] = OrderedDict()

    def rows_of(self, data_file: str, deletes: Sequence[DeleteFile]) -> Positions:
        """Return the positions of the deleted rows of a data file, ascending; ``data_file`` is as its table names it.

        Raises SourceError where a delete file cannot be read, and ParquetError where it is damaged.
        """
        found = [self._vector(delete) if delete.size else self._positions(delete.uri, data_file) for delete in deletes]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def _positions(self, uri: str, data_file: str) -> Positions:
        with self._lock:  # others of the same file wait for it, and do not read it too
            if uri in self._cached:
                self._cached.move_to_end(uri)
            else:
                with self._access.open(uri) as stream:
                    try:
                        file = pq.ParquetFile(stream)
                        if file.metadata.num_rows > _MAX_CACHED:
                            return _grouped(file, _groups_of(file, data_file), data_file).get(data_file, _none())
                        self._cached[uri] = _grouped(file, range(file.num_row_groups))
                    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                        raise damaged(uri, f"this delete file cannot be read ({first_line(error)})") from error
                self._shrink()
            return self._cached[uri].get(data_file, _none())

    def _shrink(self) -> None:
        """Forget the delete files that were not used for longest, until the others fit in memory."""
        sizes = {uri: sum(map(len, positions.values())) for uri, positions in self._cached.items()}
        while len(self._cached) > 1 and sum(sizes.values()) > _MAX_CACHED:
            del sizes[self._cached.popitem(last=False)[0]]

    def _vector(self, delete: DeleteFile) -> Positions:
        """Return the positions in a deletion vector."""
        try:
            return deleted_positions(unframed(self._access.read(delete.uri, delete.offset, delete.size)))
        except ValueError as error:
            raise damaged(delete.uri, f"the deletion vector at {delete.offset:,} is damaged: {error}") from error


def _grouped(file: pq.ParquetFile, groups: Sequence[int], only: str | None = None) -> Mapping[str, Positions]:
    """Return the positions in some row groups of a delete file by data file, or those of one data file alone."""
    parts: dict[str, list[Positions]] = {}
    columns = ["file_path", "pos"]
    for batch in file.iter_batches(_BATCH, row_groups=groups, columns=columns, use_threads=False):
        for path, positions in _by_path(batch):
            if only is None or path == only:
                parts.setdefault(path, []).append(positions)
    return {path: np.concatenate(found) for path, found in parts.items()}


def _by_path(batch: pa.RecordBatch) -> Iterator[tuple[str, Positions]]:
    kinds = batch.schema.field("file_path").type, batch.schema.field("pos").type
    if kinds != (pa.string(), pa.int64()):
        raise ValueError(f"its columns are {kinds[0]} and {kinds[1]}")
    if batch["file_path"].null_count or batch["pos"].null_count:
        raise ValueError("it has nulls")
    paths = batch["file_path"].dictionary_encode()
    codes, positions = paths.indices.to_numpy(), batch["pos"].to_numpy()
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(paths.dictionary) + 1))
    for code, path in enumerate(paths.dictionary.to_pylist()):
        yield path, positions[order[starts[code] : starts[code + 1]]]


def _groups_of(file: pq.ParquetFile, data_file: str) -> list[int]:
    """Return the row groups of a delete file, which is sorted by data file, that may be about one of them."""
    column = file.schema_arrow.names.index("file_path")
    found = []
    for group in range(file.num_row_groups):
        known = file.metadata.row_group(group).column(column).statistics
        if known is None or not known.has_min_max or known.min <= data_file <= known.max:
            found.append(group)
    return found


def _none() -> Positions:
    return np.empty(0, np.int64)
