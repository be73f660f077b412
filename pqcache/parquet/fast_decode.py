"""Decodes column chunks faster than pyarrow's general decoder: long lists of numbers, long strings and binary.

pyarrow decodes a level for every value of a list, which takes several times as long as the value. Here levels are
examined on their own, plain values are copied to their place, and pyarrow decodes encoded values from a file in memory
whose only column has no levels. Long strings and binary aren't copied at all: they become views into their decompressed
pages.

Damaged or unsupported chunks, and those that gain little, are left to pyarrow, which decodes them or reports the
damage.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import INLINE, is_text, numpy_dtype
from pqcache.parquet.pages import (
    IN_METADATA,
    NONE,
    Bytes,
    File,
    MoreValues,
    NotRead,
    Page,
    data_page_header,
    decode_hybrid,
    decompress_page,
    dictionary_page_header,
    levels_of,
    memory,
    pages_in,
    read_bytes,
    read_run,
    text_lengths,
)
from pqcache.parquet.statistics import first_page, stated_nulls
from pqcache.parquet.thrift import BINARY, I32, I64, LIST, STRUCT, Items, Struct

log = logging.getLogger("pqcache.parquet")

Numbers = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, struct.error)

_LONG_TEXT = 4096  # average bytes of strings for which views pay
_LONG_LIST, _LONG_REGULAR = 64, 16  # average length of lists that pay; levels of regular ones repeat
_MANY = 200_000  # values of a chunk; pyarrow is faster for fewer,
_MANY_IN_PAGE = 25_000  # for fewer in an average page,
_PAGE = 64 << 10  # or for fewer bytes of strings in it
_TOGETHER = 4 << 20  # bytes of encoded pages decoded by one call, few enough for caches
_MOST = 2**31 - 1  # the largest offset in views and lists
_PHYSICAL = {"INT32": (1, "<i4"), "INT64": (2, "<i8"), "FLOAT": (4, "<f4"), "DOUBLE": (5, "<f8")}
_LEVELS = np.arange(256, dtype="<i4")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A top-level column with a single leaf that `read_chunk` may decode.

    ``physical`` and ``stored`` are the types of a number in a page, and ``held`` is its type in memory; they are 0 and
    None for strings and binary. ``definition`` and ``repetition`` are the largest levels.
    """

    type: pa.DataType
    physical: int
    stored: np.dtype[Any] | None
    held: np.dtype[Any] | None
    definition: int
    repetition: int


def leaf_of(column: pq.ColumnSchema, field: pa.Field) -> Leaf | None:
    """None for types that are never decoded here."""
    kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
    physical: tuple[int, np.dtype[Any] | None, np.dtype[Any] | None] = (0, None, None)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        item, (code, letters) = kind.value_type, _PHYSICAL.get(column.physical_type, (0, ""))
        if not code or not (pt.is_integer(item) or pt.is_float32(item) or pt.is_float64(item)):
            return None
        physical = (code, np.dtype(letters), numpy_dtype(item))
        if (letters[1] == "f") != pt.is_floating(item) or numpy_dtype(item).itemsize > np.dtype(letters).itemsize:
            return None
    elif not (kind == field.type and is_text(kind) and column.physical_type == "BYTE_ARRAY"):
        return None
    if column.max_repetition_level != int(physical[0] > 0):
        return None
    return Leaf(
        type=field.type,
        physical=physical[0],
        stored=physical[1],
        held=physical[2],
        definition=column.max_definition_level,
        repetition=column.max_repetition_level,
    )


def read_chunk(file: File, chunk: pq.ColumnChunkMetaData, leaf: Leaf, rows: int) -> pa.Array | None:
    """Decode a chunk of ``rows`` rows to an array equal to pyarrow's, or to views of the same values.

    Returns None if pyarrow has to decode the chunk.

    Raises:
        MoreValues: the pages hold more values than the footer says; pyarrow would silently drop some.
    """
    if not pays(chunk, leaf, rows):
        return None
    try:
        array = _lists(file, chunk, leaf) if leaf.repetition else _views(file, chunk, leaf)
        if len(array) != rows:
            raise NotRead("the number of rows differs from the footer")
    except MoreValues:
        raise
    except UNREADABLE as error:
        name, at = chunk.path_in_schema, chunk.data_page_offset
        log.debug("column %s: pyarrow decodes the chunk at byte %d: %s", name, at, error)
        return None
    return array


def pays(chunk: pq.ColumnChunkMetaData, leaf: Leaf, rows: int) -> bool:
    """Whether the footer suggests that `read_chunk` is faster."""
    if chunk.file_path or chunk.compression not in IN_METADATA:
        return False
    if leaf.repetition:
        long = _LONG_REGULAR if pt.is_fixed_size_list(leaf.type) else _LONG_LIST
        return bool(chunk.num_values >= max(_MANY, long * rows)) and not stated_nulls(chunk)
    return bool(chunk.num_values and _LONG_TEXT * chunk.num_values <= chunk.total_uncompressed_size)


# Pages


def _pages(file: File, chunk: pq.ColumnChunkMetaData, most: int) -> list[Page]:
    """The pages of a chunk, checked against the footer; raises NotRead for more than ``most``."""
    found: list[Page] = []
    for page in pages_in(file, first_page(chunk), chunk.total_compressed_size):
        if len(found) == most:
            raise NotRead("pages are too small to pay")
        found.append(page)
    values = sum(page.values for page in found if not page.is_dictionary)
    if values > chunk.num_values:
        raise MoreValues("more values than in the footer")
    if values < chunk.num_values or sum(page.uncompressed for page in found) > chunk.total_uncompressed_size:
        raise NotRead("pages differ from the footer")
    return found


class _Data(NamedTuple):
    """The parts of a data page: its levels, and the bytes of its values other than nulls."""

    repetitions: bytes
    definitions: bytes
    values: Bytes


def _parts_of(chunk: pq.ColumnChunkMetaData, leaf: Leaf, page: Page, body: Bytes) -> _Data:
    repetitions = definitions = b""
    if page.kind == thrift.DATA_PAGE:
        body = decompress_page(chunk, body, page.uncompressed)
        if leaf.repetition:
            repetitions, body = levels_of(body, page.repetitions)
        if leaf.definition:
            definitions, body = levels_of(body, page.definitions)
        return _Data(repetitions, definitions, body)
    middle, end = page.repetitions, page.repetitions + page.definitions
    if not 0 <= middle <= end <= min(len(body), page.uncompressed):
        raise NotRead("levels reach beyond their page")
    repetitions, definitions, body = body[:middle].tobytes(), body[middle:end].tobytes(), body[end:]
    if page.stored == NONE and len(body):
        body = decompress_page(chunk, body, page.uncompressed - end)
    elif len(body) != page.uncompressed - end:
        raise NotRead("page size differs from its header")
    return _Data(repetitions, definitions, body)


def _dictionary_of(chunk: pq.ColumnChunkMetaData, page: Page, body: Bytes) -> Bytes:
    if page.encoding not in (thrift.PLAIN, thrift.PLAIN_DICTIONARY):
        raise NotRead("the dictionary isn't plain")
    return decompress_page(chunk, body, page.uncompressed)


# Pages without levels, and levels as pages


class _Coded:
    """Pages of encoded values, which pyarrow decodes a few at a time as a file of one column without levels."""

    def __init__(self, physical: int, dtype: np.dtype[Any]) -> None:
        self._physical, self._dtype = physical, dtype
        self._dictionary: list[Bytes] = []
        self._pages: list[Bytes] = []
        self.count = self.size = 0  # of values, and of their bytes when decoded, or encoded if that is more

    def add_dictionary(self, count: int, data: Bytes) -> None:
        if self._dictionary or self.count:
            raise NotRead("the dictionary follows values")
        header = thrift.encode(dictionary_page_header(count, len(data)))
        self._dictionary = [np.frombuffer(header, np.uint8), data]

    def add(self, count: int, encoding: int, data: Bytes) -> None:
        if count:  # pyarrow stops at an empty page of such a column
            header = data_page_header(count, encoding, len(data))
            self._pages += [np.frombuffer(header, np.uint8), data]
            self.count += count
            self.size += max(len(data), count * self._dtype.itemsize)

    def take(self) -> Numbers:
        """Decode and forget the pages that were added."""
        if not self.count:
            return np.zeros(0, self._dtype)
        parts = [np.frombuffer(footer.MAGIC, np.uint8), *self._dictionary, *self._pages]
        parts.append(np.frombuffer(footer.footer_and_magic(self._footer(sum(map(len, parts)))), np.uint8))
        data = np.concatenate(parts, out=memory(sum(map(len, parts))))
        with pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)), pre_buffer=False) as alone:
            column = alone.read_row_group(0, use_threads=False).column(0)
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if len(values) != self.count or values.null_count:
            raise NotRead("pyarrow decoded a different number of values")
        found = np.frombuffer(values.buffers()[1], self._dtype, self.count, values.offset * self._dtype.itemsize)
        self._pages, self.count, self.size = [], 0, 0
        return found

    def _footer(self, size: int) -> Struct:
        begin = len(footer.MAGIC)
        root: Struct = {4: (BINARY, b"schema"), 5: (I32, 1)}
        element: Struct = {1: (I32, self._physical), 3: (I32, 0), 4: (BINARY, b"values")}
        encodings, length = [thrift.PLAIN], size - begin
        chunk = thrift.column_metadata(self._physical, [b"values"], 0, encodings, self.count, length, length)
        chunk[thrift.DATA] = (I64, begin + sum(map(len, self._dictionary)))
        if self._dictionary:
            chunk[thrift.DICTIONARY] = (I64, begin)
        column = {2: (I64, 0), 3: (STRUCT, chunk)}
        group: Struct = {1: (LIST, Items(STRUCT, [column])), 2: (I64, size), 3: (I64, self.count)}
        return footer.make_footer({1: (I32, 2)}, [root, element], [group], self.count, {})


def _decode_levels(most: int, levels: Sequence[tuple[int, bytes]]) -> Numbers:
    """Decode levels as if they were codes of a dictionary of the numbers from 0 to ``most``."""
    if not 0 < most < len(_LEVELS):
        raise NotRead("lists are nested too deep")
    known, width = _LEVELS[: most + 1], bytes([most.bit_length()])
    pages = _Coded(1, _LEVELS.dtype)
    pages.add_dictionary(len(known), known.view(np.uint8))
    for count, data in levels:
        pages.add(count, thrift.RLE_DICTIONARY, np.frombuffer(width + data, np.uint8))
    return pages.take()


def _are_all(level: int, levels: bytes, count: int) -> bool:
    at = done = 0
    while at < len(levels):
        length, numbers, at = read_run(levels, at, level.bit_length(), count - done)
        if not np.all(numbers == level):
            return False
        done += length
    if done != count:
        raise NotRead("fewer levels than values")
    return True


# Lists of numbers

_Repetitions = tuple[int, bytes, int]
"""The number of values in a page, their repetition levels, and the number of rows, `NONE` if unknown."""


def _lists(file: File, chunk: pq.ColumnChunkMetaData, leaf: Leaf) -> pa.Array:
    assert leaf.stored is not None
    assert leaf.held is not None
    pages = _pages(file, chunk, most=chunk.num_values // _MANY_IN_PAGE + 2)
    values = memory(chunk.num_values * leaf.held.itemsize).view(leaf.held)
    coded = _Coded(leaf.physical, leaf.stored)
    levels: list[_Repetitions] = []
    at = done = 0  # values read, and values in place

    def put_coded() -> None:
        nonlocal done
        np.copyto(values[done:at], coded.take(), casting="unsafe")
        done = at

    for page in pages:
        body = read_bytes(file, page.body, page.size)
        if page.is_dictionary:
            coded.add_dictionary(page.values, _dictionary_of(chunk, page, body))
            continue
        data = _parts_of(chunk, leaf, page, body)
        if leaf.definition and not _are_all(leaf.definition, data.definitions, page.values):
            raise NotRead("there are nulls or empty lists")
        if page.nulls > 0:
            raise NotRead("the number of nulls differs from the page header")
        levels.append((page.values, data.repetitions, page.rows))
        if page.encoding == thrift.PLAIN:
            put_coded()
            _copy_plain(values[at : at + page.values], data.values, leaf.stored)
            done = at = at + page.values
        else:
            coded.add(page.values, page.encoding, data.values)
            at += page.values
            if coded.size >= _TOGETHER:
                put_coded()
    put_coded()
    return _list_array(leaf.type, np.append(_begins(levels), at), values)


def _copy_plain(place: Numbers, data: Bytes, stored: np.dtype[Any]) -> None:
    if len(data) != len(place) * stored.itemsize:
        raise NotRead("page size differs from the size of its values")
    if place.dtype == stored:  # as bytes, which need not be aligned
        np.copyto(place.view(np.uint8), data)
    else:
        np.copyto(place, data.view(stored), casting="unsafe")


def _begins(pages: Sequence[_Repetitions]) -> Ints:
    """Where lists begin. Equal levels, which pages of regular lists have, are decoded once."""
    begins: dict[_Repetitions, Ints] = {}
    waiting: list[_Repetitions] = []
    distinct = dict.fromkeys(pages)
    for number, page in enumerate(distinct, 1):
        waiting.append(page)
        if number < len(distinct) and sum(count for count, _, _ in waiting) * _LEVELS.itemsize < _TOGETHER:
            continue
        levels = _decode_levels(1, [(count, data) for count, data, _ in waiting])
        parts = np.split(levels, np.cumsum([count for count, _, _ in waiting])[:-1])
        begins |= {page: np.flatnonzero(part == 0) for page, part in zip(waiting, parts, strict=True)}
        waiting = []
    if any(rows not in (NONE, len(found)) for (_, _, rows), found in begins.items()):
        raise NotRead("the number of rows differs from the page header")
    firsts = np.cumsum([0, *(count for count, _, _ in pages[:-1])])
    return np.concatenate([begins[page] + first for page, first in zip(pages, firsts, strict=True)])


def _list_array(kind: pa.DataType, ends: Ints, values: Numbers) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(_list_array(kind.storage_type, ends, values))
    if ends[0]:
        raise NotRead("there are values before the first list")
    items = pa.Array.from_buffers(kind.value_type, len(values), [None, pa.py_buffer(values)])
    if pt.is_fixed_size_list(kind):
        if (np.diff(ends) != kind.list_size).any():
            raise NotRead("lists differ in length")
        return pa.Array.from_buffers(kind, len(ends) - 1, [None], children=[items])
    if not pt.is_large_list(kind):
        if ends[-1] > _MOST:
            raise NotRead("too many values for 32-bit offsets")
        ends = ends.astype(np.int32)
    return pa.Array.from_buffers(kind, len(ends) - 1, [None, pa.py_buffer(ends)], children=[items])


# Strings and binary


class Texts(NamedTuple):
    """Rows of strings or binary: which are not null (``there``), and their positions in ``data``."""

    there: npt.NDArray[np.bool_]
    data: Bytes
    begins: Ints
    lengths: Ints


def text_pages(
    file: File, chunk: pq.ColumnChunkMetaData, leaf: Leaf, pages: Iterable[Page], checked: bool = False
) -> Iterator[Texts]:
    """Yield the rows of ``pages`` of a chunk; raises one of `UNREADABLE` if pyarrow has to decode them.

    With ``checked``, pages are compared with their checksums, if they have any.
    """
    dictionary = None
    for page in pages:
        body = read_bytes(file, page.body, page.size)
        if checked and page.checksum != NONE and zlib.crc32(body.data) != page.checksum & 0xFFFFFFFF:
            raise NotRead("page checksum mismatch")
        if page.is_dictionary:
            data = _dictionary_of(chunk, page, body)
            dictionary = data, *_split(data, page.values)
            continue
        parts = _parts_of(chunk, leaf, page, body)
        count, there = page.values, np.ones(page.values, np.bool_)
        if leaf.definition and not _are_all(leaf.definition, parts.definitions, count):
            there = _decode_levels(leaf.definition, [(count, parts.definitions)]) == leaf.definition
            count = int(np.count_nonzero(there))
        if page.rows not in (NONE, page.values) or page.nulls not in (NONE, page.values - count):
            raise NotRead("counts differ from the page header")
        data = parts.values
        if page.encoding == thrift.PLAIN or not count:
            yield Texts(there, data, *_split(data if count else data[:0], count))
        elif page.encoding in (thrift.PLAIN_DICTIONARY, thrift.RLE_DICTIONARY) and dictionary is not None:
            numbers = decode_hybrid(data[1:].tobytes(), int(data[0]), count)
            yield Texts(there, dictionary[0], dictionary[1][numbers], dictionary[2][numbers])
        else:
            raise NotRead("unsupported encoding")


def views_of(parts: Sequence[Texts], kind: pa.DataType, whole: Bytes | None = None) -> pa.Array:
    """Rows as views into ``whole``, or by default into the bytes of each part."""
    there = np.concatenate([part.there for part in parts])
    words = np.zeros((len(there), 4), np.int32)
    buffers: dict[int, Bytes] = {}
    numbers: list[int] = []
    for part in parts:
        data = part.data if whole is None else whole
        buffers.setdefault(id(data), data)
        numbers.append(list(buffers).index(id(data)))
    if any(len(data) > _MOST for data in buffers.values()):
        raise NotRead("too many bytes for views")
    found = [_words(number, part, whole) for number, part in zip(numbers, parts, strict=True)]
    words[there] = np.concatenate(found)
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(kind, len(there), [valid, *map(pa.py_buffer, (words, *buffers.values()))])


def view_type(kind: pa.DataType) -> pa.DataType:
    return pa.string_view() if pt.is_string(kind) or pt.is_large_string(kind) else pa.binary_view()


def _views(file: File, chunk: pq.ColumnChunkMetaData, leaf: Leaf) -> pa.Array:
    pages = _pages(file, chunk, most=chunk.total_uncompressed_size // _PAGE + 2)
    whole = None
    if IN_METADATA[chunk.compression].arrow is None:  # one buffer, as an array of views keeps all its buffers
        begin = first_page(chunk)
        whole = file = read_bytes(file, begin, chunk.total_compressed_size)
        pages = [page._replace(body=page.body - begin) for page in pages]
    return views_of(list(text_pages(file, chunk, leaf, pages)), view_type(leaf.type), whole)


def _split(data: Bytes, count: int) -> tuple[Ints, Ints]:
    """Where the values of a plain page begin, and their lengths."""
    lengths = text_lengths(data, count)
    return np.cumsum(lengths + 4) - lengths, lengths


def _words(number: int, part: Texts, whole: Bytes | None) -> npt.NDArray[np.int32]:
    """The four words of each view: its length, then 12 bytes of the value, or 4 bytes, a buffer number and an offset in
    it.

    See https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout.
    """
    _, data, begins, lengths = part
    views = np.zeros((len(begins), 16), np.uint8)
    words = views.view(np.int32)
    shift = 0 if whole is None else data.ctypes.data - whole.ctypes.data
    words[:, 0], words[:, 2], words[:, 3] = lengths, number, begins + shift
    if len(begins):
        views[:, 4:8] = data.take(begins[:, None] + np.arange(4), mode="clip")
    short = np.flatnonzero(lengths <= INLINE)
    if len(short):
        inline = data.take(begins[short, None] + np.arange(INLINE), mode="clip")
        inline[np.arange(INLINE) >= lengths[short, None]] = 0
        views[short, 4:] = inline
    return words
