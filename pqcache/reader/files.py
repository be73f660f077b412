"""The files of an opened dataset, and their row groups; every error names the file."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pyarrow as pa

from pqcache.errors import ParquetError
from pqcache.parquet.footer.doubtful import may_be_doubtful
from pqcache.parquet.row_group_reader import RowGroupFile
from pqcache.reader.open_dataset import LocalDataset
from pqcache.store.cache_directory import advice_for_file
from pqcache.system.disk import read_ahead
from pqcache.system.shared_numbers import SharedNumbers
from pqcache.units import format_count

log = logging.getLogger("pqcache.reader")

_FILES = 256  # open ones of a process, as parsing a footer again takes time
_REPLACED = "the file was replaced while in use: open the dataset again"
_PART_BYTES, _PART_ROWS = 4 << 20, 64 << 10  # of columns that are looked at, about, and at most


class Files:
    """The files of a dataset, each opened once by a process; from any thread."""

    def __init__(self, data: LocalDataset) -> None:
        self.data = data
        self._open: dict[int, RowGroupFile] = {}  # without a lock, as the process may fork
        doubtful = [field.name for field in data.index.schema if may_be_doubtful(field.type)]
        self._read_right = SharedNumbers(doubtful, len(data.index))  # 1 for those that were checked

    def group(self, number: int) -> RowGroup:
        """Row group ``number`` of the index."""
        return RowGroup(self.data, number)

    def file(self, group: RowGroup) -> RowGroupFile:
        """Open the file of a row group; ParquetError if file and index disagree about its row groups."""
        found = self._open.get(group.file)
        if found is None or found.path != group.path:  # which changes when an arriving snapshot is published
            if len(self._open) >= _FILES:
                log.debug("more than %d files are read: their footers are parsed again", _FILES)
                self._open.clear()
            found = RowGroupFile(group.path)
            self._check_row_groups(group.file, found)
            self._open[group.file] = found
        return found

    def _check_row_groups(self, file: int, found: RowGroupFile) -> None:
        index, metadata = self.data.index, found.metadata
        low, high = np.searchsorted(index.numbers("file"), [file, file + 1]).tolist()
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        numbers = index.numbers("row_group")[low:high]
        if np.array_equal(index.rows[low:high], rows) and np.array_equal(numbers, np.arange(len(rows))):
            return
        for group in map(self.group, range(low, high)):
            there = rows[group.row_group] if group.row_group < len(rows) else 0
            if there != group.rows:
                raise group.replaced(there)
        raise ParquetError(
            found.path,
            f"it has {format_count(len(rows), 'row group')}, where the index has other ones",
            advice_for_file(found.path, _REPLACED),
        )

    @contextmanager
    def reading(self, group: RowGroup) -> Iterator[RowGroupFile]:
        """Read a row group once it has arrived; errors name the file, and what to do about it."""
        self.data.wait(np.array([group.number]))
        try:
            group.check_identity()
            yield self.file(group)
            group.check_identity()  # it may be written in place
        except ParquetError as error:
            group.check_identity()
            if error.subject != str(group.path) or "again" not in error.advice:  # to fetch, write or open it
                raise
            damaged = error.reason != "the file is gone"
            advice = advice_for_file(group.path, error.advice, deep=damaged)
            raise ParquetError(group.path, error.reason, advice) from error

    def has_page_index(self, group: RowGroup, columns: Sequence[str]) -> bool:
        """Whether rows of these columns can be read page by page; not before the whole dataset has arrived."""
        arrivals = self.data.arrivals
        return (arrivals is None or arrivals.is_complete) and self.file(group).has_page_index(group.row_group, columns)

    def read_rows(self, group: RowGroup, columns: Sequence[str], low: int, high: int) -> dict[str, pa.Array]:
        """Rows ``low`` up to ``high`` of those ``columns`` that the file has."""
        known = [name for name in columns if name in self._read_right.names]
        trusted = [name for name in known if self._read_right.numbers(name)[group.number]]
        found = self.file(group).read_rows(group.row_group, columns, low, high, trusted=trusted)
        for name in known:
            self._read_right.numbers(name)[group.number] = 1
        return found

    def parts(self, group: RowGroup, columns: Sequence[str]) -> Generator[pa.Table]:
        """All rows, some at a time, of those ``columns`` that are in the file or its path; types are the file's."""
        if not columns:
            yield no_columns(group.rows)
            return
        with self.reading(group) as file:
            wanted = [name for name in columns if name in file.schema.names]
            if not wanted:
                yield group.with_path_values(no_columns(group.rows), columns)
                return
            each = self.data.index.decoded(group.number, wanted) / max(1, group.rows)
            rows = int(np.clip(_PART_BYTES / max(each, 1), 1, _PART_ROWS))
            left = group.rows
            with closing(file.batches(group.row_group, wanted, rows)) as batches:
                for batch in batches:
                    left -= batch.num_rows
                    yield group.with_path_values(pa.Table.from_batches([batch]), columns)
            if left:
                raise group.replaced(group.rows - left)


class RowGroup:
    """Where row group ``number`` of the index is."""

    def __init__(self, data: LocalDataset, number: int) -> None:
        self._data, index = data, data.index
        self.number = number
        self.file = int(index.numbers("file")[self.number])
        self.row_group = int(index.numbers("row_group")[self.number])
        self.rows = int(index.rows[self.number])
        self.path = data.path_of(number)

    def path_value(self, name: str) -> pa.Scalar | None:
        """The value of a column that is in this file's path; None if it is inside, as it may be in others."""
        values = self._data.index.path_values
        if name not in values.column_names:
            return None
        value = values[name][self.file]
        return value if value.is_valid else None

    def with_path_values(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Add those ``columns`` that the path holds, while other files have them inside."""
        for name in self._data.index.path_values.column_names:
            value = self.path_value(name)
            if name in columns and value is not None:
                if name in table.column_names:  # null, as a rewrite adds columns that a file lacks
                    table = table.drop_columns([name])
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table

    def read_ahead(self) -> None:
        """Ask the kernel for all of it at once: a cold disk is slow page by page."""
        table = self._data.index.table
        read_ahead(self.path, *(table[name][self.number].as_py() for name in ("offset", "bytes")))

    def check_identity(self) -> None:
        """Raise ParquetError if a plain file was replaced since it was indexed, even by one of the same layout."""
        if self._data.identities is None:
            return
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise self.gone() from error
        if not self._data.identities[self.file].matches(status):
            raise ParquetError(
                self.path,
                "was replaced or written to since the dataset was opened",
                "open the dataset again; a cache has snapshots, which do not change",
            )

    def gone(self) -> ParquetError:
        return ParquetError(
            self.path, "the file is gone", advice_for_file(self.path, "open the dataset again", deep=False)
        )

    def replaced(self, rows: int) -> ParquetError:
        return ParquetError(
            self.path,
            f"row group {self.row_group} has {rows} rows where the index has {self.rows}",
            advice_for_file(self.path, _REPLACED),
        )


def no_columns(rows: int) -> pa.Table:
    """A table of ``rows`` rows without columns; Arrow only makes one from a table with columns."""
    return pa.table({"": pa.nulls(rows)}).select([])
