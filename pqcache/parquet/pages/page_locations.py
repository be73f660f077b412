"""Where the data pages of a column chunk lie, and which row each begins with.

The offset index says it, where a writer wrote one; see parquet.thrift in https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pqcache.parquet.footer import thrift_fields
from pqcache.parquet.footer.thrift import I32, I64, LIST, read_varint
from pqcache.parquet.footer.thrift_walk import Checks, items_at, key, walk_struct
from pqcache.parquet.pages import page_format
from pqcache.parquet.row_group_stats import first_page

Ints = npt.NDArray[np.int64]

_MOST_INDEX = 16 << 20  # bytes of an offset index
_PAGE = (0x16, 0x15, 0x16, 0)  # what is before each number of a PageLocation, and behind the last


@dataclass(frozen=True, kw_only=True)
class PageLocations:
    """The data pages of a column chunk, in the order of their rows.

    ``offsets``   where each page's header begins in the file
    ``sizes``     bytes of each page with its header
    ``rows``      the first row that begins in each page or behind it, and at the end the rows of the row group
    """

    offsets: Ints
    sizes: Ints
    rows: Ints


@dataclass(frozen=True)
class OffsetIndexes:
    """Where the offset index of each column chunk of a file begins and how long it is; 0 where there is none."""

    offsets: Ints
    lengths: Ints

    @staticmethod
    def of(footer: bytes, leaves: int) -> OffsetIndexes:
        """Return those that a ``footer`` of ``leaves`` columns names; it has to have been checked."""
        found: list[int] = []
        walk_struct(footer, 0, _FILE, found)
        each = np.array(found, np.int64).reshape(-1, leaves, 2) if leaves else np.zeros((0, 0, 2), np.int64)
        return OffsetIndexes(each[:, :, 0], each[:, :, 1])

    def read(self, file: int, group: int, leaf: int) -> bytes | None:
        """Return the offset index of a column chunk of the open ``file``; None without one."""
        offset, length = int(self.offsets[group, leaf]), int(self.lengths[group, leaf])
        if not (offset > 0 and 0 < length <= _MOST_INDEX):
            return None
        return os.pread(file, length, offset)


def _chunks_of_groups(data: bytes, at: int, found: Any) -> int:
    count, _, at = items_at(data, at)
    for _ in range(count):
        at = walk_struct(data, at, _GROUP, found)
    return at


def _chunks(data: bytes, at: int, found: Any) -> int:
    count, _, at = items_at(data, at)
    for _ in range(count):
        found += (0, 0)
        at = walk_struct(data, at, _CHUNK, found)
    return at


def _offset(data: bytes, at: int, found: Any) -> int:
    number, at = read_varint(data, at)
    found[-2] = number >> 1
    return at


def _length(data: bytes, at: int, found: Any) -> int:
    number, at = read_varint(data, at)
    found[-1] = number >> 1
    return at


_CHUNK: Checks = {key(thrift_fields.OFFSET_INDEX[0], I64): _offset, key(thrift_fields.OFFSET_INDEX[1], I32): _length}
_GROUP: Checks = {key(1, LIST): _chunks}
_FILE: Checks = {key(4, LIST): _chunks_of_groups}


def locations_in_index(index: bytes, chunk: pq.ColumnChunkMetaData, rows: int) -> PageLocations:
    """Return the pages of a chunk of ``rows`` rows that its offset index names; NotRead for what contradicts the chunk.

    All of a list of PageLocations are numbers of seven bits a byte, those that say which number follows too.
    """
    try:
        if index[:1] != b"\x19":
            raise page_format.NotRead("an offset index of another form")
        count, _, at = items_at(index, 1)
        pages, at = _varints(index, at, len(_PAGE) + 3, count)
        if (pages[:, ::2] != _PAGE).any():
            raise page_format.NotRead("an offset index of another form")
        numbers = pages[:, 1::2] >> 1
    except (IndexError, ValueError) as error:
        raise page_format.NotRead("a damaged offset index") from error
    offsets, sizes, firsts = (np.ascontiguousarray(numbers[:, i]) for i in range(3))
    return _checked(PageLocations(offsets=offsets, sizes=sizes, rows=np.append(firsts, rows)), chunk)


def _varints(data: bytes, at: int, each: int, count: int) -> tuple[Ints, int]:
    """Return ``count`` times ``each`` numbers that begin at byte ``at``, not yet zigzag, and where they end."""
    window = np.frombuffer(data, np.uint8, offset=at)
    ends = np.flatnonzero(window < 0x80)[: each * count]
    if len(ends) < each * count:
        raise IndexError
    begins = np.append(0, ends[:-1] + 1)
    lengths = ends - begins + 1
    if len(lengths) and lengths.max() > 9:
        raise ValueError("an integer of more than 63 bits")
    found = np.zeros(len(ends), np.int64)
    for position in range(int(lengths.max(initial=0))):
        some = lengths > position
        found[some] |= (window[begins[some] + position] & 0x7F).astype(np.int64) << (7 * position)
    return found.reshape(count, each), at + (int(ends[-1]) + 1 if len(ends) else 0)


def _checked(pages: PageLocations, chunk: pq.ColumnChunkMetaData) -> PageLocations:
    """Return ``pages``; raise NotRead unless they lie in their chunk one after the other, and cover its rows."""
    begin = first_page(chunk)
    ends = pages.offsets + pages.sizes
    apart = len(ends) > 0 and pages.offsets[0] >= begin and ends[-1] <= begin + chunk.total_compressed_size
    if not (apart and (pages.sizes > 0).all() and (pages.offsets[1:] == ends[:-1]).all()):
        raise page_format.NotRead("pages that do not lie one after the other in their chunk")
    if pages.rows[0] != 0 or (np.diff(pages.rows) < 0).any():
        raise page_format.NotRead("pages whose rows are not in order")
    return pages
