"""How many rows pieces of a row group have, so that they begin where pages do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pqcache.parquet.pages.page_locations import PageLocations
from pqcache.reader.order.epoch_order import Ints

_LEAST = 0.75  # of the rows that memory allows: smaller pieces mix fewer rows
_WORTH = 1.1  # times the bytes, from which on it is worth having smaller pieces
_ALIKE = 1.02  # times the fewest bytes: larger pieces are better then
_MOST_IN_PAGES = 64  # pieces that end where a page does, at most


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
