"""Reads pieces of row groups: rows of a row group that is too large for memory, from the pages that they lie in."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import PqcacheError
from pqcache.parquet.pages.list_rows import RememberedRows
from pqcache.parquet.pages.page_reader import UNREADABLE
from pqcache.parquet.pages.row_ranges import PagedFile
from pqcache.reader.columns.column_data import ColumnData
from pqcache.reader.columns.page_columns import PageColumns, PagedRows
from pqcache.reader.order.epoch_order import Ints
from pqcache.system.buffer_pool import BufferPool
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.reader")


class RowGroupOfFile(NamedTuple):
    """Row group ``number`` of an open file, the file's path and number, by which it is remembered, and its first row
    in the index.
    """

    file: pq.ParquetFile
    file_number: int
    path: Path
    number: int
    first_in_index: int


class PieceReader:
    """Reads pieces of at most ``rows`` rows, into ``memory``; columns that ``pages`` can read by it.

    A column of which it is not known where its pages lie is decoded from the beginning of its row group, and what comes
    before the piece is dropped. ``page_rows`` remembers where pages of lists lie, by row group of the index.
    """

    def __init__(self, rows: int, pages: PageColumns, memory: BufferPool, page_rows: RememberedRows) -> None:
        self._rows, self._pages, self._memory, self._page_rows = rows, pages, memory, page_rows
        self._files: dict[int, PagedFile | None] = {}  # without a lock, as the process may fork

    def clear(self) -> None:
        """Forget what is known of files."""
        self._files.clear()

    def columns(self, group: RowGroupOfFile, low: int, high: int) -> tuple[dict[str, ColumnData], int]:
        """Return rows ``low <= row < high`` of columns, and a number of columns, as `PageColumns.read` does."""
        pa.default_memory_pool().release_unused()  # memory is scarce, and it holds what other pieces have left
        known = self._file(group)
        if known is None:
            return {}, self._pages.long
        piece = PagedRows(known, low, high)
        return self._pages.read(group.file, group.file_number, group.path, group.number, {}, piece)

    def table(
        self, group: RowGroupOfFile, names: list[str], low: int, high: int, coded: Collection[str] = ()
    ) -> pa.Table:
        """Return rows ``low <= row < high`` of the columns ``names``; fewer where the row group has fewer.

        Texts that are ``coded`` may be positions in their dictionaries.
        """
        columns = self._from_pages(group, names, low, high, coded)
        if left := [name for name in names if name not in columns]:
            rest = self._from_beginning(group, left, low, high)
            if rest.num_rows != high - low:
                return rest
            columns |= _by_name(rest)
        return pa.table(columns)

    def rows_at(self, group: RowGroupOfFile, names: list[str], positions: Ints) -> pa.Table:
        """Return the rows at ascending positions, of which a piece is in memory at a time."""
        if not names or not len(positions):
            return pa.schema([]).empty_table()
        first = int(positions[0])
        from_pages = list(self._from_pages(group, names, first, first + 1))
        columns: dict[str, Any] = {}
        if from_pages:
            columns = _by_name(pa.concat_tables(self._rows_in_pages(group, from_pages, positions)))
        if left := [name for name in names if name not in from_pages]:
            columns |= _by_name(self._rows_from_beginning(group, left, positions))
        return pa.table(columns)

    def _rows_in_pages(self, group: RowGroupOfFile, names: list[str], positions: Ints) -> Iterator[pa.Table]:
        done, rows = 0, group.file.metadata.row_group(group.number).num_rows
        while done < len(positions):
            low = int(positions[done])
            high = min(low + self._rows, rows)
            stop = int(np.searchsorted(positions, high))
            yield self.table(group, names, low, high).take(pa.array(positions[done:stop] - low))
            done = max(stop, done + 1)

    def _rows_from_beginning(self, group: RowGroupOfFile, names: list[str], positions: Ints) -> pa.Table:
        found, first, done = [], 0, 0
        for batch in group.file.iter_batches(self._rows, [group.number], names, use_threads=False):
            stop = int(np.searchsorted(positions, first + batch.num_rows))
            if stop > done:
                found.append(batch.take(pa.array(positions[done:stop] - first)))
            first, done = first + batch.num_rows, stop
            if done == len(positions):
                break
        return pa.Table.from_batches(found, schema=None if found else pa.schema([]))

    def _from_pages(
        self, group: RowGroupOfFile, names: list[str], low: int, high: int, coded: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return rows of those of the columns of which it is known where their pages lie."""
        known = self._file(group)
        if known is None or not names:
            return {}
        descriptor = open_regular(group.path)
        try:
            return known.read(descriptor, group.number, names, low, high, self._memory, coded)
        finally:
            os.close(descriptor)

    def _from_beginning(self, group: RowGroupOfFile, names: list[str], low: int, high: int) -> pa.Table:
        found, first = [], 0
        for batch in group.file.iter_batches(self._rows, [group.number], names, use_threads=False):
            begin, end = max(low - first, 0), min(high - first, batch.num_rows)
            if begin < end:
                found.append(batch.slice(begin, end - begin))
            first += batch.num_rows
            if first >= high:
                break
        return pa.Table.from_batches(found, schema=None if found else pa.schema([]))

    def _file(self, group: RowGroupOfFile) -> PagedFile | None:
        """Return what reads ranges of rows of a file; None where its footer does not allow it."""
        if group.file_number not in self._files:
            found = None

            def remembered(name: str, number: int) -> Ints | None:
                return self._page_rows.of(name, group.first_in_index + number)

            try:
                found = PagedFile(group.path, group.file.metadata, group.file.schema_arrow, self._memory, remembered)
            except (PqcacheError, *UNREADABLE) as error:
                log.debug("%s: row groups are decoded from their beginning: %s", group.path, error)
            self._files[group.file_number] = found
        return self._files[group.file_number]


def _by_name(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the columns of a table, of several with one name the first."""
    return {table.field(i).name: table.column(i) for i in reversed(range(table.num_columns))}
