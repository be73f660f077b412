"""Repetition and definition levels of a page: whether they say the same of every row, or where lists begin.

What a writer does for one list it does for the next, so the bytes of their levels repeat. Runs are read up to where
the bytes begin again at the same place of a list; how often they do is then a comparison of bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pqcache.parquet.footer import thrift_fields
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.flat_pages import FlatPages
from pqcache.parquet.pages.leaf_column import LeafColumn
from pqcache.parquet.pages.page_format import NotRead, read_run
from pqcache.system.buffer_pool import BufferPool

_LEVELS = np.arange(256, dtype="<i4")
_LEVEL = LeafColumn(number=0, stored=_LEVELS.dtype, held=_LEVELS.dtype, definition=0, repetition=0)


def are_all(level: int, levels: bytes, count: int) -> bool:
    """Return whether the definition levels of ``count`` values are all ``level``."""
    at = done = 0
    while at < len(levels):
        length, numbers, at = read_run(levels, at, level.bit_length(), count - done)
        if not np.all(numbers == level):
            return False
        done += length
    if done != count:
        raise NotRead("fewer levels than values")
    return True


def are_of_lists(length: int, levels: bytes, count: int, first: int) -> bool:
    """Return whether the repetition levels of ``count`` values are those of lists of ``length`` values.

    ``first`` values of the column come before them.
    """
    at = done = 0
    seen: dict[int, tuple[int, int]] = {}  # by place in a list: where a run began, and the values before it
    while at < len(levels):
        place = (first + done) % length
        begin, before = seen.get(place, (at, done))
        if done > before:
            times = min(_repeats(levels, begin, at), (count - done) // (done - before))
            at, done = at + times * (at - begin), done + times * (done - before)
            seen.clear()
            if at == len(levels):
                break
        seen[place] = at, done
        size, numbers, at = read_run(levels, at, 1, count - done)
        to_next = -place % length  # values before the next list begins
        if isinstance(numbers, int):
            ones = numbers == 1 and to_next >= size
            if not ones and (numbers or to_next or (size > 1 and length > 1)):
                return False
        else:
            begins = numbers[to_next::length]
            if begins.any() or np.count_nonzero(numbers) != size - len(begins):
                return False
        done += size
    if done != count:
        raise NotRead("fewer levels than values")
    return True


def begins_of_lists(levels: bytes, count: int, memory: BufferPool, repetition: int = 1) -> npt.NDArray[np.int64]:
    """Return at which of ``count`` values rows begin; pyarrow decodes the levels, as positions in a dictionary.

    ``repetition`` is the largest level.
    """
    if not 0 < repetition < len(_LEVELS):
        raise NotRead("lists within more lists than expected")
    known = _LEVELS[: repetition + 1]
    pages = FlatPages("INT32", _LEVEL, memory)
    pages.add_dictionary(page_format.dictionary_page_header(len(known), known.nbytes), known.view(np.uint8))
    width = bytes([repetition.bit_length()])
    pages.add(count, thrift_fields.RLE_DICTIONARY, np.frombuffer(width + levels, np.uint8))
    return np.flatnonzero(pages.values() == 0) if count else np.zeros(0, np.int64)


def _repeats(data: bytes, begin: int, end: int) -> int:
    """Return how often the bytes from ``begin`` to ``end`` come again, one time after the other."""
    size = end - begin
    if data[begin:end] != data[end : end + size]:
        return 0
    found = np.frombuffer(data, np.uint8, offset=begin)
    differ = found[size:] != found[:-size]
    at = int(differ.argmax())
    return (at if differ[at] else len(differ)) // size
