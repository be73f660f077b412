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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.codecs import IN_METADATA
from pqcache.parquet.footer import footer, thrift, thrift_fields
from pqcache.parquet.footer.thrift import Struct
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.leaf_column import LeafColumn
from pqcache.system.buffer_pool import Arena, BufferPool

Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("pqcache.parquet")

_LEVELS = 64 << 10  # bytes of a page that are not values, at most
_PATTERNS = 256  # of levels that are remembered, of some kilobytes each
_PHYSICAL = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, struct.error)


@dataclass(frozen=True)
class ByteArrays:
    """Rows of strings or binary where they lie: row i is ``pages[p][1][begins[i]:begins[i] + lengths[i]]``.

    ``pages`` are (first row, bytes), and p is the last page whose first row is not beyond i.
    """

    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    pages: list[tuple[int, Bytes]]


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
        total = chunk.num_values
        if bool(length) != bool(leaf.repetition) or leaf.repetition > 1 or (length and total % length):
            log_decoded_by_arrow(chunk, "lists of other lengths")
            return None
        if chunk.file_path or chunk.compression not in IN_METADATA:
            log_decoded_by_arrow(chunk, "another file or an unknown codec")
            return None
        plain = not chunk.has_dictionary_page and {"PLAIN", "RLE"}.issuperset(chunk.encodings)
        try:
            if plain and leaf.held == leaf.stored and IN_METADATA[chunk.compression].arrow is None and not self.checked:
                found = self._borrow(chunk, leaf, np.zeros(0, leaf.held), into)
                self._read_in_place(file, chunk, leaf, length, found.view(np.uint8))
                return found
            return self._page_by_page(file, chunk, leaf, length, into)
        except page_format.MoreValues:
            raise
        except UNREADABLE as error:
            log_decoded_by_arrow(chunk, error)
            return None

    def _borrow(self, chunk: page_format.Chunk, leaf: LeafColumn, decoded: Values, into: Arena | None) -> Values:
        """Return memory for all values of a chunk that begins with those that were ``decoded``; the rest is plain."""
        if not 0 <= (chunk.num_values - len(decoded)) * leaf.stored.itemsize <= chunk.total_uncompressed_size:
            raise page_format.NotRead("fewer bytes than its values take")
        found = (into or self.memory).borrow(chunk.num_values * leaf.held.itemsize).view(leaf.held)
        found[: len(decoded)] = decoded
        return found

    def _read_in_place(self, file: int, chunk: page_format.Chunk, leaf: LeafColumn, length: int, out: Bytes) -> None:
        """Read the values of pages that are neither compressed nor encoded to where they belong, all of ``out``."""
        first, width = 0, leaf.stored.itemsize
        head = np.empty(_LEVELS, np.uint8)
        for header, at, size in page_format.page_bodies(file, chunk):
            about = header[
                page_format.DATA if header[page_format.TYPE][1] == thrift_fields.DATA_PAGE else page_format.DATA_V2
            ][1]
            _check_count(about[page_format.COUNT][1], chunk, first)
            place = out[first * width :][: about[page_format.COUNT][1] * width]
            levels = size - len(place)
            if not 0 <= levels <= len(head):
                raise page_format.NotRead("a page with larger levels than expected")
            if os.preadv(file, [head[:levels].data, place.data], at) != size:
                raise page_format.NotRead("the file ends within a page")
            count, encoding, rest = self._page(header, head[:levels], chunk, leaf, length, first, len(place))
            if encoding != thrift_fields.PLAIN or len(rest) or count * width != len(place):
                raise page_format.NotRead("a page that is not plain")
            first += count
        if first * width != len(out):
            raise page_format.NotRead("fewer values than the footer says")

    def _page_by_page(
        self, file: int, chunk: page_format.Chunk, leaf: LeafColumn, length: int, into: Arena | None
    ) -> Values:
        """Copy the values of plain pages. Have pyarrow decode those before them, if any: of a dictionary, mostly.

        Writers begin with a dictionary and leave it where it does not pay.
        """
        coded, first = _DecodedByArrow(chunk, leaf), 0
        found: Values | None = None
        for header, body in self._pages(file, chunk):
            if header[page_format.TYPE][1] == thrift_fields.DICTIONARY_PAGE:
                coded.add_dictionary(
                    header, page_format.decompress_page(chunk, body, header[page_format.UNCOMPRESSED][1])
                )
                continue
            count, encoding, data = self._page(header, body, chunk, leaf, length, first)
            del body
            if not count:  # pyarrow takes an empty page of such a column for its end
                continue
            if encoding == thrift_fields.PLAIN:
                if found is None:
                    found = self._borrow(chunk, leaf, coded.values(), into)
                _copy_plain(found[first : first + count], data, leaf)
            elif found is None:
                coded.add(count, encoding, data)
            else:
                raise page_format.NotRead("a plain page before one with a dictionary")
            first += count
        if first != chunk.num_values:
            raise page_format.NotRead("fewer values than the footer says")
        if found is None:
            found = coded.values()
            return found if into is None else self._borrow(chunk, leaf, found, into)
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
        first, dictionary = 0, None
        for header, body in self._pages(file, chunk):
            if header[page_format.TYPE][1] == thrift_fields.DICTIONARY_PAGE:
                data = page_format.decompress_page(chunk, body, header[page_format.UNCOMPRESSED][1])
                if header[page_format.DICTIONARY][1][page_format.ENCODING][1] not in (
                    thrift_fields.PLAIN,
                    thrift_fields.PLAIN_DICTIONARY,
                ):
                    raise page_format.NotRead("a dictionary that is not plain")
                dictionary = _split(data, header[page_format.DICTIONARY][1][page_format.COUNT][1])
                continue
            count, encoding, data = self._page(header, body, chunk, leaf, 0, first)
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

    def _pages(self, file: int, chunk: page_format.Chunk) -> Iterator[tuple[Struct, Bytes]]:
        """Yield each page's header and bytes."""
        for header, at, length in page_format.page_bodies(file, chunk):
            body = self.memory.borrow(length)
            if length and os.preadv(file, [body.data], at) != length:
                raise page_format.NotRead("the file ends within a page")
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
        length: int,
        first: int,
        apart: int = 0,
    ) -> tuple[int, int, Bytes]:
        """Return the number of values in a page, their encoding and their bytes; its levels have to be regular.

        ``apart`` are bytes of values that ``body`` lacks.
        """
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
            if about[page_format.NULLS][1] or rows * max(1, length) != about[page_format.COUNT][1]:
                raise page_format.NotRead("nulls, or another number of rows than of values")
        else:
            raise page_format.NotRead("a page that holds no data")
        count = about[page_format.COUNT][1]
        _check_count(count, chunk, first)
        key = (count, first % length if length else 0, length, leaf.definition, repetitions, definitions)
        regular = self._known.get(key)
        if regular is None:
            regular = _regular(count, first, length, leaf, repetitions, definitions)
            if len(self._known) >= _PATTERNS:
                self._known.clear()
            self._known[key] = regular
        if not regular:
            raise page_format.NotRead("nulls, or lists of other lengths")
        return count, encoding, body


class _DecodedByArrow:
    """Pages that pyarrow decodes, without their levels: as a file of one column of its own."""

    def __init__(self, chunk: page_format.Chunk, leaf: LeafColumn) -> None:
        self._physical, self._leaf = _PHYSICAL.index(chunk.physical_type), leaf
        self._parts = [footer.MAGIC]
        self._count, self._dictionary = 0, 0

    def add_dictionary(self, header: Struct, data: Bytes) -> None:
        """Add the page of a dictionary."""
        sizes = page_format.numbers(
            {
                page_format.TYPE: thrift_fields.DICTIONARY_PAGE,
                page_format.UNCOMPRESSED: len(data),
                page_format.COMPRESSED: len(data),
            }
        )
        self._parts += [thrift.encode(sizes | {page_format.DICTIONARY: header[page_format.DICTIONARY]}), data.tobytes()]
        self._dictionary = len(footer.MAGIC)

    def add(self, count: int, encoding: int, data: Bytes) -> None:
        """Add a page of ``count`` values."""
        self._parts += [page_format.data_page_header(count, encoding, len(data)), data.tobytes()]
        self._count += count

    def values(self) -> Values:
        """Return all values; raise NotRead where they are not as many as the pages say."""
        if not self._count:
            return np.zeros(0, self._leaf.held)
        size, leaf = sum(map(len, self._parts)), self._leaf
        at = len(footer.MAGIC) + (sum(map(len, self._parts[1:3])) if self._dictionary else 0)
        end = footer.footer_and_magic(_one_column_footer(self._physical, leaf, self._count, size, at, self._dictionary))
        with pq.ParquetFile(pa.BufferReader(b"".join([*self._parts, end])), pre_buffer=False) as alone:
            column = alone.read_row_group(0, use_threads=False).column(0)
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if len(values) != self._count or values.null_count:
            raise page_format.NotRead("pyarrow decodes another number of values")
        width = leaf.stored.itemsize
        found = np.frombuffer(values.buffers()[1], np.uint8, self._count * width, values.offset * width)
        numbers = found.view(leaf.stored)
        return numbers if leaf.held == leaf.stored else numbers.astype(leaf.held)


def _copy_plain(place: Values, data: Bytes, leaf: LeafColumn) -> None:
    """Copy the values of a plain page to their place."""
    if len(data) != len(place) * leaf.stored.itemsize:
        raise page_format.NotRead("a page of another size than its values take")
    if leaf.held == leaf.stored:  # as bytes, which need not be aligned
        np.copyto(place.view(np.uint8), data)
    else:
        np.copyto(place, data.view(leaf.stored), casting="unsafe")


def _one_column_footer(physical: int, leaf: LeafColumn, count: int, size: int, data: int, dictionary: int) -> Struct:
    """Return the footer of a file of one column without levels, whose pages are bytes 4 to ``size``."""
    i32, i64, binary, struct_ = thrift.I32, thrift.I64, thrift.BINARY, thrift.STRUCT
    root = {4: (binary, b"schema"), 5: (i32, 1)}
    element = {1: (i32, physical), 2: (i32, leaf.stored.itemsize), 3: (i32, 0), 4: (binary, b"values")}
    length = size - len(footer.MAGIC)
    chunk = {
        **thrift_fields.column_metadata(physical, [b"values"], 0, [thrift_fields.PLAIN], count, length, length),
        thrift_fields.DATA: (i64, data),
    }
    if dictionary:
        chunk[thrift_fields.DICTIONARY] = (i64, dictionary)
    column = {2: (i64, 0), 3: (struct_, chunk)}
    group = {1: (thrift.LIST, thrift.Items(struct_, [column])), 2: (i64, size), 3: (i64, count)}
    return {
        1: (i32, 2),
        2: (thrift.LIST, thrift.Items(struct_, [root, element])),
        3: (i64, count),
        4: (thrift.LIST, thrift.Items(struct_, [group])),
    }


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


def _regular(count: int, first: int, length: int, leaf: LeafColumn, repetitions: bytes, definitions: bytes) -> bool:
    """Return whether no value is null, and of those of the chunk every ``length``-th one begins a list."""
    if leaf.repetition:
        begins = (np.arange(first, first + count) % length == 0).astype(np.uint8)
        if not np.array_equal(page_format.decode_hybrid(repetitions, 1, count), 1 - begins):
            return False
    if leaf.definition:
        return bool(
            (page_format.decode_hybrid(definitions, leaf.definition.bit_length(), count) == leaf.definition).all()
        )
    return True
