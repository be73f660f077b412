"""Page indexes of row groups that were written apart: shifted, and put before the one footer.

``ColumnIndex`` holds the minimum and maximum of each page, ``OffsetIndex`` where each page lies in the file and
which row it begins with; see parquet.thrift in https://github.com/apache/parquet-format. Only the latter has to
be changed when a row group moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pqcache.parquet.footer import thrift
from pqcache.parquet.footer.thrift_fields import ASCENDING, COLUMN_INDEX, DESCENDING, OFFSET_INDEX


@dataclass(frozen=True)
class PageIndex:
    """Encoded indexes of a row group, by position of the column chunk."""

    columns: Mapping[int, bytes]
    offsets: Mapping[int, bytes]


def shift_page_index(
    offsets: Mapping[int, thrift.Struct], columns: Mapping[int, bytes], delta: int
) -> PageIndex | None:
    """Move the indexes of a row group whose pages move by ``delta`` bytes; None if there are none."""
    moved = {}
    for number, index in offsets.items():
        pages = [{**page, 1: (thrift.I64, page[1][1] + delta)} for page in index[1][1].values]
        moved[number] = thrift.encode({**index, 1: (thrift.LIST, thrift.Items(thrift.STRUCT, pages))})
    return PageIndex(columns, moved) if moved else None


def boundary_order(bounds: Iterable[tuple[Any, Any]]) -> int:
    """BoundaryOrder of pages: 1 ascending, 2 descending, 0 neither."""
    pages = list(bounds)
    if all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(pages)):
        return ASCENDING
    return DESCENDING if all(a[0] >= b[0] and a[1] >= b[1] for a, b in pairwise(pages)) else 0


def place_page_indexes(groups: Mapping[int, thrift.Struct], indexes: Mapping[int, PageIndex], position: int) -> bytes:
    """Encode ``indexes`` as they follow at ``position``, and point the row groups to them."""
    out = bytearray()
    for place in (COLUMN_INDEX, OFFSET_INDEX):
        for number, group in groups.items():
            found = indexes[number].columns if place is COLUMN_INDEX else indexes[number].offsets
            chunks = group[1][1].values
            for column, data in found.items():
                more = {place[0]: (thrift.I64, position + len(out)), place[1]: (thrift.I32, len(data))}
                chunks[column] = dict(sorted({**chunks[column], **more}.items()))
                out += data
    return bytes(out)
