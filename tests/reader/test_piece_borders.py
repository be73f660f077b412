"""How many rows pieces have, of pages that begin with given rows."""

from __future__ import annotations

import numpy as np
import pytest

from pqcache.parquet.pages.page_locations import PageLocations
from pqcache.reader.piece_borders import rows_along_pages


def pages(*rows: int, row_bytes: int = 1_000) -> PageLocations:
    """Return pages of so many rows each, one after the other."""
    sizes = np.array(rows, np.int64) * row_bytes
    return PageLocations(offsets=4 + np.cumsum(sizes) - sizes, sizes=sizes, rows=np.cumsum([0, *rows]))


REGULAR = pages(*[1_024] * 15, 542)


@pytest.mark.parametrize(
    ("columns", "most", "expected"),
    [
        ([REGULAR], 2_272, 2_048),
        ([REGULAR], 2_048, 2_048),
        ([REGULAR], 1_900, 1_536),  # ends in the middle of every second page
        ([REGULAR], 1_000, 1_000),
        ([REGULAR], 600, 512),
        ([REGULAR], 300, 300),
        ([pages(*[10] * 1_000)], 2_272, 2_272),  # small pages are not worth it
        ([pages(15_902)], 2_272, 2_272),
        ([pages(12_793, 3_109)], 2_272, 2_272),
        ([pages(1_024, 2_048, 1_024, 3_072, 1_024)], 2_272, 2_048),
        ([REGULAR, pages(*[1_500] * 10, 902, row_bytes=10)], 2_272, 2_048),  # the larger column counts
        ([REGULAR], 20_000, 20_000),
        ([REGULAR], 1, 1),
        ([pages(0, 0)], 5, 5),
        ([], 5, 5),
    ],
)
def test_pieces_of_which_few_pages_are_read_twice(columns: list[PageLocations], most: int, expected: int) -> None:
    assert rows_along_pages(columns, most) == expected


def test_random_pages() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        columns = [pages(*rng.integers(0, 500, rng.integers(1, 40))) for _ in range(rng.integers(1, 4))]
        most = int(rng.integers(1, 3_000))
        assert 0.75 * most <= rows_along_pages(columns, most) <= most
