"""Page indexes of row groups that were written apart: taken off, shifted, and put before the one footer.

``ColumnIndex`` holds the minimum and maximum of each page, ``OffsetIndex`` where each page lies in the file and
which row it begins with; see parquet.thrift in https://github.com/apache/parquet-format. Only the latter has to
be changed when a row group moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pqcache.errors import ParquetError
from pqcache.parquet import footer

_OFFSET, _COLUMN = (4, 5), (6, 7)  # of a ColumnChunk: where its index lies, and how long it is


@dataclass(frozen=True)
class PageIndex:
    """The encoded indexes of a row group, by position of the column chunk."""

    columns: Mapping[int, bytes]
    offsets: Mapping[int, bytes]


def taken(group: footer.Struct, tail: bytes, start: int, delta: int, name: str) -> PageIndex | None:
    """Return the indexes of a row group whose pages are to lie ``delta`` bytes later.

    ``tail`` is what follows the row group, from position ``start`` on. None where every chunk is one page: its
    statistics say the same then.
    """
    columns: dict[int, bytes] = {}
    offsets: dict[int, bytes] = {}
    several = False

    def piece(chunk: footer.Struct, fields: tuple[int, int]) -> bytes | None:
        if fields[0] not in chunk:
            return None
        at, size = int(chunk[fields[0]][1]) - start, int(chunk[fields[1]][1])
        if at < 0 or at + size > len(tail):
            raise ParquetError(f"{name}: a page index lies outside of its place; please report this")
        return tail[at : at + size]

    for number, chunk in enumerate(group[1][1].values):
        if (found := piece(chunk, _COLUMN)) is not None:
            columns[number] = found
        if (found := piece(chunk, _OFFSET)) is not None:
            index = footer.decode(found, name)
            pages = index[1][1].values
            several = several or len(pages) > 1
            for page in pages:
                page[1] = (footer.I64, page[1][1] + delta)
            offsets[number] = footer.encode(index)
    return PageIndex(columns, offsets) if several else None


def placed(groups: Mapping[int, footer.Struct], indexes: Mapping[int, PageIndex], position: int) -> bytes:
    """Return the bytes of ``indexes`` as they follow at ``position``, and have the row groups point to them."""
    out = bytearray()
    for fields in (_COLUMN, _OFFSET):
        for number, group in groups.items():
            found = indexes[number].columns if fields is _COLUMN else indexes[number].offsets
            chunks = group[1][1].values
            for column, data in found.items():
                more = {fields[0]: (footer.I64, position + len(out)), fields[1]: (footer.I32, len(data))}
                chunks[column] = dict(sorted({**chunks[column], **more}.items()))
                out += data
    return bytes(out)
