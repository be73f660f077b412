"""Column chunks read page by page, where values lie in their pages as they lie in memory.

A general decoder takes levels and values apart one by one. Where no value is null and all lists are of one length, the
levels of a page say the same thing for every row: they are compared with what they have to be, and the values are
copied. Long strings and binary need not even be copied. Everything else is decoded by pyarrow, what is damaged too: its
errors say what is wrong.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.codecs import IN_METADATA
from pqcache.parquet.footer import thrift_fields
from pqcache.parquet.footer.thrift import Struct
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.flat_pages import FlatPages
from pqcache.parquet.pages.leaf_column import LeafColumn
from pqcache.parquet.pages.levels import are_all, are_of_lists, begins_of_lists
from pqcache.parquet.pages.page_format import Page
from pqcache.system.buffer_pool import Arena, BufferPool

Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("pqcache.parquet")

_LEVELS = 64 << 10  # bytes of a page that are not values, at most
_PATTERNS = 256  # of levels that are remembered
_REMEMBERED = 8 << 10  # bytes of levels that are remembered, at most
_TOGETHER = 4 << 20  # bytes of pages that are decoded together, as many as caches hold
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, struct.error)


@dataclass(frozen=True)
class ByteArrays:
    """Rows of strings or binary where they lie: row i is ``pages[p][1][begins[i]:begins[i] + lengths[i]]``.

    ``pages`` are (first row, bytes), and p is the last page whose first row is not beyond i.
    """

    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    pages: list[tuple[int, Bytes]]


class Lists(NamedTuple):
    """Lists of any lengths: list i is ``values[ends[i]:ends[i + 1]]``, and ``ends`` begins with 0."""

    ends: npt.NDArray[np.int64]
    values: Values


@dataclass(frozen=True, kw_only=True)
class PageLevels:
    """The levels of a page's ``count`` values, ``first`` values of its chunk before them; ``rows`` where it says so."""

    count: int
    first: int
    rows: int | None
    repetitions: bytes
    definitions: bytes


def has_nulls(chunk: pq.ColumnChunkMetaData) -> bool:
    """Return whether the footer says that values of a column chunk are null, or lists empty."""
    statistics = chunk.statistics
    return statistics is not None and statistics.has_null_count and bool(statistics.null_count)


def log_decoded_by_arrow(chunk: page_format.Chunk, reason: object) -> None:
    """Log that pyarrow decodes a column chunk, and why."""
    if log.isEnabledFor(logging.DEBUG):
        name, at = chunk.path_in_schema, chunk.data_page_offset
        log.debug("column %s: pyarrow decodes the chunk at byte %d: %s", name, at, reason)


@dataclass
class Reader:
    """Reads column chunks into ``memory``; from any thread. It remembers which levels it has found to be regular.

    ``checked`` compares pages with their checksums, where they have any.
    """

    memory: BufferPool
    checked: bool = False
    _known: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def values(
        self, file: int, chunk: page_format.Chunk, leaf: LeafColumn, length: int, into: Arena | None = None
    ) -> Values | None:
        """Return all values of a column chunk of the open ``file``, rows of ``length`` values end to end.

        ``length`` is 0 for a column without lists. They are in ``into``, where that is held. None where the values are
        not to be had this way: some are null, or lists are of other lengths, or the chunk is damaged.
        """
        total, part = chunk.num_values, isinstance(chunk, page_format.ChunkPart)
        if bool(length) != bool(leaf.repetition) or leaf.repetition > 1 or (length and not part and total % length):
            log_decoded_by_arrow(chunk, "lists of other lengths")
            return None
        if chunk.file_path or chunk.compression not in IN_METADATA:
            log_decoded_by_arrow(chunk, "another file or an unknown codec")
            return None
        plain = not chunk.has_dictionary_page and {"PLAIN", "RLE"}.issuperset(chunk.encodings)
        before = chunk.values_before if isinstance(chunk, page_format.ChunkPart) else 0
        check = partial(self._check_regular, leaf, length, before)
        try:
            if plain and leaf.held == leaf.stored and IN_METADATA[chunk.compression].arrow is None and not self.checked:
                found = self._borrow(chunk, leaf, total, into)
                self._read_in_place(file, chunk, leaf, check, found.view(np.uint8))
            else:
                found = self._page_by_page(file, chunk, leaf, check, into)
            return _complete_lists(found, length, before) if part and length else found
        except page_format.MoreValues:
            raise
        except UNREADABLE as error:
            log_decoded_by_arrow(chunk, error)
            return None

    def lists(self, file: int, chunk: page_format.Chunk, leaf: LeafColumn) -> Lists | None:
        """Return the lists of a column chunk, of any lengths; None as `values` does, or where one is empty."""
        if leaf.repetition != 1 or chunk.file_path or chunk.compression not in IN_METADATA:
            log_decoded_by_arrow(chunk, "no lists, another file or an unknown codec")
            return None
        if not isinstance(chunk, page_format.ChunkPart) and has_nulls(chunk):
            log_decoded_by_arrow(chunk, "nulls, or empty lists")
            return None
        begins: list[npt.NDArray[np.int64]] = []

        def check(page: PageLevels) -> None:
            if leaf.definition and not are_all(leaf.definition, page.definitions, page.count):
                raise page_format.NotRead("nulls, or empty lists")
            begins.append(page.first + begins_of_lists(page.repetitions, page.count, self.memory))
            if page.rows not in (None, len(begins[-1])):
                raise page_format.NotRead("another number of rows than its header says")

        try:
            values = self._page_by_page(file, chunk, leaf, check, None)
            ends = np.concatenate([*begins, [len(values)]])
            if ends[0] and not (isinstance(chunk, page_format.ChunkPart) and chunk.within):
                raise page_format.NotRead("values before the first list")
            return Lists(ends - ends[0], values[ends[0] :])
        except page_format.MoreValues:
            raise
        except UNREADABLE as error:
            log_decoded_by_arrow(chunk, error)
            return None

    def _borrow(self, chunk: page_format.Chunk, leaf: LeafColumn, plain: int, into: Arena | None) -> Values:
        """Return memory for all values of a chunk, so many of which are plain."""
        if plain * leaf.stored.itemsize > chunk.total_uncompressed_size:
            raise page_format.NotRead("fewer bytes than its values take")
        return (into or self.memory).borrow(chunk.num_values * leaf.held.itemsize).view(leaf.held)

    def _read_in_place(
        self, file: int, chunk: page_format.Chunk, leaf: LeafColumn, check: Callable[[PageLevels], None], out: Bytes
    ) -> None:
        """Read the values of pages that are neither compressed nor encoded to where they belong, all of ``out``."""
        first, width = 0, leaf.stored.itemsize
        head = np.empty(_LEVELS, np.uint8)
        for header, at, size in page_format.page_bodies(file, chunk):
            values, _ = page_format.count_and_encoding(header)
            _check_count(values, chunk, first)
            place = out[first * width :][: values * width]
            levels = size - len(place)
            if not 0 <= levels <= len(head):
                raise page_format.NotRead("a page with larger levels than expected")
            if os.preadv(file, [head[:levels].data, place.data], at) != size:
                raise page_format.NotRead("the file ends within a page")
            count, encoding, rest = self._page(header, head[:levels], chunk, leaf, first, check, len(place))
            if encoding != thrift_fields.PLAIN or len(rest) or count * width != len(place):
                raise page_format.NotRead("a page that is not plain")
            first += count
        if first * width != len(out):
            raise page_format.NotRead("fewer values than the footer says")

    def _page_by_page(
        self,
        file: int,
        chunk: page_format.Chunk,
        leaf: LeafColumn,
        check: Callable[[PageLevels], None],
        into: Arena | None,
    ) -> Values:
        """Copy the values of plain pages to their place, and have pyarrow decode the others, a few at a time."""
        pages = list(page_format.page_bodies(file, chunk))
        found = self._borrow(chunk, leaf, _count_plain(pages, chunk), into)
        coded = FlatPages(chunk.physical_type, leaf, self.memory)
        first = done = 0  # values before the page, and those that are in their place
        for header, body in self._bodies(file, pages, max((length for _, _, length in pages), default=0)):
            if header[page_format.TYPE][1] == thrift_fields.DICTIONARY_PAGE:
                coded.add_dictionary(
                    header, page_format.decompress_page(chunk, body, header[page_format.UNCOMPRESSED][1])
                )
                continue
            count, encoding, data = self._page(header, body, chunk, leaf, first, check)
            del body
            if encoding != thrift_fields.PLAIN:
                coded.add(count, encoding, data)
                first += count
                if coded.size < _TOGETHER:
                    continue
            coded.decode(found[done:first])
            if encoding == thrift_fields.PLAIN:
                _copy_plain(found[first : first + count], data, leaf)
                first += count
            done = first
        coded.decode(found[done:first])
        return found

    def byte_arrays(self, file: int, chunk: page_format.Chunk, leaf: LeafColumn) -> ByteArrays | None:
        """Return the rows of a column chunk of strings or binary; None as `values` does."""
        try:
            found = list(self.byte_pages(file, chunk, leaf))
        except page_format.MoreValues:
            raise
        except UNREADABLE as error:
            log_decoded_by_arrow(chunk, error)
            return None
        firsts = np.cumsum([0, *(len(some.begins) for some in found)])
        if not found or firsts[-1] != chunk.num_values:
            return None
        pages = [(int(first), some.pages[0][1]) for first, some in zip(firsts, found, strict=False)]
        begins, lengths = (np.concatenate(parts) for parts in zip(*((f.begins, f.lengths) for f in found), strict=True))
        return ByteArrays(begins, lengths, pages)

    def byte_pages(self, file: int, chunk: page_format.Chunk, leaf: LeafColumn) -> Iterator[ByteArrays]:
        """Yield the rows of a column chunk of strings or binary page by page; raise UNREADABLE where that cannot be."""
        if leaf.repetition or chunk.file_path or chunk.compression not in IN_METADATA:
            raise page_format.NotRead("lists, another file or an unknown codec")
        first, dictionary, check = 0, None, partial(self._check_regular, leaf, 0, 0)
        for header, body in self._bodies(file, page_format.page_bodies(file, chunk)):
            if header[page_format.TYPE][1] == thrift_fields.DICTIONARY_PAGE:
                data = page_format.decompress_page(chunk, body, header[page_format.UNCOMPRESSED][1])
                if header[page_format.DICTIONARY][1][page_format.ENCODING][1] not in (
                    thrift_fields.PLAIN,
                    thrift_fields.PLAIN_DICTIONARY,
                ):
                    raise page_format.NotRead("a dictionary that is not plain")
                dictionary = _split(data, header[page_format.DICTIONARY][1][page_format.COUNT][1])
                continue
            count, encoding, data = self._page(header, body, chunk, leaf, first, check)
            del body  # a large one that was compressed
            first += count
            if not count:
                continue
            if encoding == thrift_fields.PLAIN:
                yield _split(data, count)
            elif encoding in (thrift_fields.PLAIN_DICTIONARY, thrift_fields.RLE_DICTIONARY) and dictionary is not None:
                numbers = page_format.decode_hybrid(data[1:].tobytes(), int(data[0]), count)
                yield ByteArrays(dictionary.begins[numbers], dictionary.lengths[numbers], dictionary.pages)
            else:
                raise page_format.NotRead("an encoding that is not read here")

    def _bodies(self, file: int, pages: Iterable[Page], largest: int = 0) -> Iterator[tuple[Struct, Bytes]]:
        """Yield each page's header and bytes; the ``largest`` length has one block serve all pages."""
        for header, at, length in pages:
            body = self.memory.borrow(largest or length)[:length]
            page_format.read_into(file, body, at)
            if (
                self.checked
                and page_format.CHECKSUM in header
                and zlib.crc32(body.data) != header[page_format.CHECKSUM][1] & 0xFFFFFFFF
            ):
                raise page_format.NotRead("a page that differs from its checksum")
            held = [body]
            del body  # it comes back when whoever takes it lets go of it
            yield header, held.pop()

    def _page(
        self,
        header: Struct,
        body: Bytes,
        chunk: page_format.Chunk,
        leaf: LeafColumn,
        first: int,
        check: Callable[[PageLevels], None],
        apart: int = 0,
    ) -> tuple[int, int, Bytes]:
        """Return the number of values in a page, their encoding and their bytes; ``check`` is given its levels.

        ``apart`` are bytes of values that ``body`` lacks.
        """
        rows = None
        kind, size = header[page_format.TYPE][1], header[page_format.UNCOMPRESSED][1]
        if kind == thrift_fields.DATA_PAGE:
            about = header[page_format.DATA][1]
            encoding = about[page_format.ENCODING][1]
            body = page_format.decompress_page(chunk, body, size - apart)
            repetitions, body = (
                page_format.levels_of(body, about[page_format.REPETITIONS][1]) if leaf.repetition else (b"", body)
            )
            definitions, body = (
                page_format.levels_of(body, about[page_format.DEFINITIONS][1]) if leaf.definition else (b"", body)
            )
        elif kind == thrift_fields.DATA_PAGE_V2:
            about = header[page_format.DATA_V2][1]
            encoding = about[page_format.ENCODING_V2][1]
            middle = about[page_format.REPETITION_BYTES][1]
            end = middle + about[page_format.DEFINITION_BYTES][1]
            if not 0 <= middle <= end <= len(body):
                raise page_format.NotRead("levels that reach beyond their page")
            repetitions, definitions, body = body[:middle].tobytes(), body[middle:end].tobytes(), body[end:]
            if about.get(page_format.IS_COMPRESSED, (0, True))[1] and len(body):
                body = page_format.decompress_page(chunk, body, size - apart - end)
            elif len(body) != size - apart - end:
                raise page_format.NotRead("a page of another size than its header says")
            rows = about[page_format.ROWS][1]
            if about[page_format.NULLS][1]:
                raise page_format.NotRead("nulls")
        else:
            raise page_format.NotRead("a page that holds no data")
        count = about[page_format.COUNT][1]
        _check_count(count, chunk, first)
        check(PageLevels(count=count, first=first, rows=rows, repetitions=repetitions, definitions=definitions))
        return count, encoding, body

    def _check_regular(self, leaf: LeafColumn, length: int, before: int, page: PageLevels) -> None:
        """Raise NotRead where a value is null, or not every ``length``-th value of the chunk begins a list.

        ``before`` are the values before those that are read.
        """
        if page.rows is not None and page.rows * max(1, length) != page.count:
            raise page_format.NotRead("another number of rows than of values")
        place = (before + page.first) % length if length else 0
        key = (page.count, place, length, leaf.definition, page.repetitions, page.definitions)
        regular = self._known.get(key)
        if regular is None:
            regular = not leaf.repetition or are_of_lists(length, page.repetitions, page.count, place)
            regular = regular and (not leaf.definition or are_all(leaf.definition, page.definitions, page.count))
            if len(self._known) >= _PATTERNS:
                self._known.clear()
            if len(page.repetitions) + len(page.definitions) <= _REMEMBERED:
                self._known[key] = regular
        if not regular:
            raise page_format.NotRead("nulls, or lists of other lengths")


def _complete_lists(values: Values, length: int, before: int) -> Values:
    """Return the lists that begin among ``values`` and are complete; ``before`` values of the column come before."""
    begin = -before % length
    return values[begin : len(values) - (len(values) - begin) % length] if begin <= len(values) else values[:0]


def _copy_plain(place: Values, data: Bytes, leaf: LeafColumn) -> None:
    """Copy the values of a plain page to their place."""
    if len(data) != len(place) * leaf.stored.itemsize:
        raise page_format.NotRead("a page of another size than its values take")
    if leaf.held == leaf.stored:  # as bytes, which need not be aligned
        np.copyto(place.view(np.uint8), data)
    else:
        np.copyto(place, data.view(leaf.stored), casting="unsafe")


def _count_plain(pages: Iterable[Page], chunk: page_format.Chunk) -> int:
    """Return how many values of a chunk are plain; raise NotRead where all are not as many as the footer says."""
    plain = total = 0
    for header, _, _ in pages:
        if header[page_format.TYPE][1] != thrift_fields.DICTIONARY_PAGE:
            count, encoding = page_format.count_and_encoding(header)
            _check_count(count, chunk, total)
            total += count
            plain += count if encoding == thrift_fields.PLAIN else 0
    if total != chunk.num_values:
        raise page_format.NotRead("fewer values than the footer says")
    return plain


def _check_count(count: int, chunk: page_format.Chunk, first: int) -> None:
    """Raise NotRead where a page of ``count`` values, before which there are ``first``, does not fit its chunk."""
    if count < 0:
        raise page_format.NotRead("a page of fewer than no values")
    if count > chunk.num_values - first:
        raise page_format.MoreValues("more values than the footer says")


def _split(data: Bytes, count: int) -> ByteArrays:
    """Return where each of the byte arrays of a plain page is; its length is in front of it."""
    at, view = 4, data.data
    begins = [at]
    length_at, note = struct.Struct("<I").unpack_from, begins.append
    for _ in range(count):
        at += length_at(view, at - 4)[0] + 4
        note(at)
    if at - 4 != len(data):
        raise page_format.NotRead("values that are not all of their page")
    found = np.array(begins, np.int64)
    return ByteArrays(found[:-1], np.diff(found) - 4, [(0, data)])
