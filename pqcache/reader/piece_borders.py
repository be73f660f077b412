"""How many rows pieces of a row group have, so that they begin where pages do."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import pyarrow.types as pt

from pqcache.errors import PqcacheError
from pqcache.parquet.footer.footer import read_local_tail
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.nested import names_of_chunks
from pqcache.parquet.pages.page_format import NotRead
from pqcache.parquet.pages.page_locations import PageLocations, locations_in_headers
from pqcache.parquet.pages.page_reader import UNREADABLE
from pqcache.reader.columns.column_forms import storage_type
from pqcache.reader.memory import Window
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_group_reader import RowGroupReader
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.reader")

_LARGE = 8  # times the bytes of a column whose pages matter are more than those of all columns
_LEAST = 0.75  # of the rows that memory allows: smaller pieces mix fewer rows
_WORTH = 1.1  # times the bytes, from which on it is worth having smaller pieces
_ALIKE = 1.02  # times the fewest bytes: larger pieces are better then
_MOST_IN_PAGES = 64  # pieces that end where a page does, at most


def along_pages(plan: ReadPlan, window: Window, number: int) -> Window:
    """Return a window whose pieces begin where pages of a row group do, or the same where that gains little.

    Pages of lists do not count: without an offset index, which another process may not see while a file is still
    arriving, all of them would have to be decoded. Nor do small columns.
    """
    index, row = plan.data.index, plan.row_groups[number : number + 1]
    sizes = {form.name: int(index.optional(f"{form.name}:bytes")[row[0]]) for form in plan.file_forms}
    kinds = {form.name: storage_type(form.type) for form in plan.file_forms if form.stored is None}
    large = [
        name for name, kind in kinds.items() if not pt.is_nested(kind) and _LARGE * sizes[name] >= sum(sizes.values())
    ]
    if not window.piece_rows or not large:
        return window
    reader = RowGroupReader(plan.data, row)

    def locations() -> list[PageLocations]:
        with reader.opened(0, large) as (opened, path):
            columns, tail = names_of_chunks(opened.metadata, opened.schema_arrow), read_local_tail(path)
            check_footer(tail.footer, str(path), tail.size)
            group = opened.metadata.row_group(int(reader.row_group[0]))
            chunks = [group.column(columns.index(name)) for name in large]
            if any(chunk.file_path for chunk in chunks):
                raise NotRead("another file")
            file = open_regular(path)
            try:
                return [locations_in_headers(file, chunk, int(reader.rows[0]), None) for chunk in chunks]
            finally:
                os.close(file)

    try:
        return Window(window.row_groups, rows_along_pages(plan.data.while_moving(locations), window.piece_rows))
    except (PqcacheError, *UNREADABLE) as error:  # it is read from its beginning, or refused
        log.debug("%s: pieces do not begin where pages do: %s", reader.path(0), error)
        return window


def rows_along_pages(columns: Sequence[PageLocations], most: int) -> int:
    """Return how many rows pieces have for which few bytes of ``columns`` are read: ``most``, or down to 3/4 of them.

    A page is read for each piece that has rows of it. Pages rarely have the same numbers of rows in all row groups, but
    often multiples of one: writers look how large a page is after so many rows.
    """
    stored = sum(int(pages.sizes.sum()) for pages in columns)
    if not stored or (anywhere := _bytes_read(columns, most)) <= _WORTH * stored:
        return most
    sizes = {int(rows): _bytes_read(columns, int(rows)) for rows in _along(columns, most)}
    fewest = min(sizes.values(), default=anywhere)
    if anywhere <= _WORTH * fewest:
        return most
    return max(rows for rows, size in sizes.items() if size <= _ALIKE * fewest)


def _along(columns: Sequence[PageLocations], most: int) -> Ints:
    """Return how many rows pieces may have of which one ends where a page does."""
    begins = np.unique(np.concatenate([pages.rows[1:] for pages in columns]))
    found = [begins[begins % number == 0] // number for number in range(1, _MOST_IN_PAGES + 1)]
    rows = np.unique(np.concatenate(found))
    return np.asarray(rows[(rows >= max(1, _LEAST * most)) & (rows <= most)], np.int64)


def _bytes_read(columns: Sequence[PageLocations], rows: int) -> int:
    """Return the bytes of the pages that are read for pieces of so many ``rows``."""
    total = 0
    for pages in columns:
        begins = np.arange(0, int(pages.rows[-1]), rows)
        first = np.searchsorted(pages.rows[:-1], begins, side="right") - 1
        past = np.searchsorted(pages.rows[:-1], begins + rows, side="left")
        before = np.append(0, np.cumsum(pages.sizes))
        total += int((before[past] - before[first]).sum())
    return total
