"""Finds the pages of column chunks of one file, and remembers where they lie."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from pqcache.parquet.codecs import IN_METADATA
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.list_rows import PageRows, RowsOfPage
from pqcache.parquet.pages.page_format import NotRead, StoredPage
from pqcache.parquet.pages.page_locations import (
    Ints,
    OffsetIndexes,
    PageLocations,
    Rows,
    locations_in_headers,
    locations_in_index,
)

log = logging.getLogger("pqcache.parquet")

_MOST_LOCATED = 4096  # column chunks whose pages are remembered


class CountedRows(NamedTuple):
    """What counts the rows of pages of lists: ``names`` are the columns of one leaf, by its number.

    ``remembered`` returns where it is kept how many rows begin in the pages of a column of a row group, if it is.
    """

    names: Mapping[int, str]
    page_rows: PageRows
    remembered: Callable[[str, int], Ints | None]


class PageFinder:
    """Finds the pages of a file whose footer is known, by its offset ``indexes``, or page headers; from any thread."""

    def __init__(self, path: Path, metadata: pq.FileMetaData, indexes: OffsetIndexes, counted: CountedRows) -> None:
        self._path, self._metadata, self._indexes, self._counted = path, metadata, indexes, counted
        self._located: dict[tuple[int, int], PageLocations] = {}  # by row group and leaf

    def of(self, file: int, group: int, leaf: int) -> PageLocations:
        """Return where the pages of a leaf of a row group lie; NotRead where that is not known."""
        found = self._located.get((group, leaf))
        if found is None:
            row_group = self._metadata.row_group(group)
            chunk, rows = row_group.column(leaf), row_group.num_rows
            if chunk.file_path or chunk.compression not in IN_METADATA:
                raise NotRead("another file or an unknown codec")
            found = self._in_index(file, group, leaf)
            if found is None:
                found = locations_in_headers(file, chunk, rows, self._rows_of_lists(file, group, leaf))
            if len(self._located) >= _MOST_LOCATED:
                self._located.clear()
            self._located[group, leaf] = found
        return found

    def _in_index(self, file: int, group: int, leaf: int) -> PageLocations | None:
        index = self._indexes.read(file, group, leaf)
        if index is None:
            return None
        row_group = self._metadata.row_group(group)
        try:
            return locations_in_index(index, row_group.column(leaf), row_group.num_rows)
        except NotRead as error:  # of a file that is still arriving it may not be there yet
            log.debug("%s: %s: pages are found by their headers", self._path, error)
            return None

    def _rows_of_lists(self, file: int, group: int, leaf: int) -> Rows | None:
        """Return what counts the rows of the pages of a leaf without an offset index; None where it has no lists."""
        repetition = self._metadata.schema.column(leaf).max_repetition_level
        if not repetition:
            return None
        chunk, (names, page_rows, remembered) = self._metadata.row_group(group).column(leaf), self._counted

        def count(pages: Sequence[StoredPage]) -> list[RowsOfPage]:
            if leaf in names:
                return page_rows.of_chunk(file, chunk, pages, repetition, remembered(names[leaf], group))
            counts = [page_format.page_counts(page.header) for page in pages]
            if any(of_page is None or of_page.rows is None for of_page in counts):
                raise NotRead(
                    "pages of lists of several columns without an offset index"
                )  # which rarely begin together
            return [RowsOfPage(of_page.rows or 0, within=False) for of_page in counts if of_page is not None]

        return count
