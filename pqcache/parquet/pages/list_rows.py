"""How many rows begin in each page of a column with lists, which only the levels of its pages say.

The header of a page of version 1 counts values, and a page may begin within a row. So the repetition levels of a column
chunk are decoded once; what they say is a number for each page, which processes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqcache.parquet.footer import thrift, thrift_fields
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.levels import begins_of_lists
from pqcache.parquet.pages.page_format import Bytes, NotRead, StoredPage
from pqcache.system.buffer_pool import BufferPool
from pqcache.system.shared_numbers import SharedNumbers

Ints = npt.NDArray[np.int64]

_PAGES = 256  # of a column chunk that are remembered, which is 128 MB and more as writers make pages
_PATTERNS = 64  # of levels that are remembered
_LEVELS = 8 << 10  # bytes of levels that are remembered, at most


class RowsOfPage(NamedTuple):
    """How many rows begin in a page, and whether it begins ``within`` a row."""

    rows: int
    within: bool


class RememberedRows:
    """Where it is remembered how many rows begin in pages, for columns ``names`` of so many row groups.

    Processes that are forked later share it.
    """

    def __init__(self, names: Sequence[str], row_groups: int) -> None:
        self._numbers = SharedNumbers(names, row_groups * _PAGES)

    def of(self, name: str, row_group: int) -> Ints | None:
        """Return the numbers of a column of a row group, to be read and written; None for other columns."""
        if name not in self._numbers.names:
            return None
        return self._numbers.numbers(name)[row_group * _PAGES : (row_group + 1) * _PAGES]


class PageRows:
    """Counts the rows that begin in pages of lists; from any thread. Equal levels are decoded once."""

    def __init__(self, memory: BufferPool) -> None:
        self._memory = memory
        self._known: dict[tuple[int, bytes], RowsOfPage] = {}

    def of_chunk(
        self, file: int, chunk: page_format.Chunk, pages: Sequence[StoredPage], repetition: int, remembered: Ints | None
    ) -> list[RowsOfPage]:
        """Return the rows of the data pages of a chunk of the open ``file``, whose largest level is ``repetition``.

        ``remembered`` are the numbers where they are kept. What is damaged raises one of UNREADABLE.
        """
        kept = remembered[: len(pages)] if remembered is not None and len(pages) <= len(remembered) else None
        if kept is not None and kept.all():
            return [RowsOfPage((number - 1) >> 1, bool(number - 1 & 1)) for number in kept.tolist()]
        found = [self._of_page(file, chunk, page, repetition) for page in pages]
        if kept is not None:
            kept[:] = [(rows << 1 | within) + 1 for rows, within in found]
        return found

    def _of_page(self, file: int, chunk: page_format.Chunk, page: StoredPage, repetition: int) -> RowsOfPage:
        counts = page_format.page_counts(page.header)
        if counts is not None and counts.rows is not None:
            return RowsOfPage(counts.rows, within=False)  # as version 2 demands
        about = page.header[page_format.DATA][1]
        body = self._memory.borrow(page.size)
        page_format.read_into(file, body, page.body)
        data = page_format.decompress_page(chunk, body, page.header[page_format.UNCOMPRESSED][1])
        levels, _ = page_format.levels_of(data, about[page_format.REPETITIONS][1])
        return self._of_levels(levels, about[page_format.COUNT][1], repetition)

    def _of_levels(self, levels: bytes, count: int, repetition: int) -> RowsOfPage:
        found = self._known.get((count, levels))
        if found is None:
            if count < 0:
                raise NotRead("a page of fewer than no values")
            begins = begins_of_lists(levels, count, self._memory, repetition)
            found = RowsOfPage(len(begins), bool(count and (not len(begins) or begins[0])))
            if len(self._known) >= _PATTERNS:
                self._known.clear()
            if len(levels) <= _LEVELS:
                self._known[count, levels] = found
        return found


def begun_with_row(page: Bytes, chunk: page_format.Chunk, repetition: int, definition: int, rows: int) -> Bytes:
    """Return a data page that begins within a row as one whose first value begins a row, of which it has ``rows``.

    What is there of the row before is a row then, so that decoders take the page for the first of a chunk. It is of
    version 2, whose values need not be compressed again. ``repetition`` and ``definition`` are the largest levels.
    """
    header, length = page_format.header_in(lambda most: page[:most].tobytes())
    about = header[page_format.DATA][1]
    data = page_format.decompress_page(chunk, page[length:], header[page_format.UNCOMPRESSED][1])
    repetitions, data = page_format.levels_of(data, about[page_format.REPETITIONS][1])
    definitions, data = page_format.levels_of(data, about[page_format.DEFINITIONS][1]) if definition else (b"", data)
    repetitions = _first_to_zero(repetitions, repetition.bit_length())
    fields = {
        page_format.COUNT: about[page_format.COUNT][1],
        page_format.NULLS: 0,  # which no decoder needs
        page_format.ROWS: rows,
        page_format.ENCODING_V2: about[page_format.ENCODING][1],
        page_format.DEFINITION_BYTES: len(definitions),
        page_format.REPETITION_BYTES: len(repetitions),
    }
    size = len(repetitions) + len(definitions) + len(data)
    described = page_format.numbers(fields) | {page_format.IS_COMPRESSED: (thrift.BOOL, False)}
    sizes = page_format.page_sizes(thrift_fields.DATA_PAGE_V2, size)
    start = thrift.encode(sizes | {page_format.DATA_V2: (thrift.STRUCT, described)}) + repetitions + definitions
    return np.concatenate((np.frombuffer(start, np.uint8), data))


def _first_to_zero(levels: bytes, width: int) -> bytes:
    """Return levels of at most eight bits with the first one, which is in a run or in packed bits, as 0."""
    head, at = thrift.read_varint(levels, 0)
    if head & 1:
        return levels[:at] + bytes([levels[at] >> width << width]) + levels[at + 1 :]
    found = bytearray()
    thrift.put_varint(found, 1 << 1)
    found.append(0)
    if head >> 1 > 1:
        thrift.put_varint(found, head - 2)
        found.append(levels[at])
    return bytes(found) + levels[at + 1 :]
