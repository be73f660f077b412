"""Column chunks read page by page, where values lie in their pages as they lie in memory.

A general decoder takes levels and values apart one by one. Where no value is null and all lists are of one length, the
levels of a page say the same thing for every row: they are compared with what they have to be, and the values are
copied. That is eight times as fast for lists of numbers. Long strings and binary need not even be copied. Everything
else is left to pyarrow, what is damaged too: it has the words for that.

Fields are those of parquet.thrift in https://github.com/apache/parquet-format, and levels are described in its
Encodings.md.
"""

from __future__ import annotations

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
import xxhash

from pqcache.errors import ParquetError
from pqcache.memory import Pool
from pqcache.parquet import fields, footer
from pqcache.parquet.footer import Struct

Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_TYPE, _UNCOMPRESSED, _COMPRESSED, _CHECKSUM, _DATA, _DICTIONARY, _DATA_V2 = 1, 2, 3, 4, 5, 7, 8  # of PageHeader
_COUNT, _ENCODING, _DEFINITIONS, _REPETITIONS = 1, 2, 3, 4  # of DataPageHeader
_ENCODING_V2, _DEFINITION_BYTES, _REPETITION_BYTES, _IS_COMPRESSED = 4, 5, 6, 7  # of DataPageHeaderV2
_LEVELS = 64 << 10  # bytes of a page that are not values, at most
_HEADS = (256, 1 << 16)  # bytes: nearly all page headers; those with long statistics
_LZ4_BLOCK = 1 << 22  # bytes
_PATTERNS = 256  # of levels that are remembered, of some kilobytes each

_CODECS = {
    "UNCOMPRESSED": None,
    "SNAPPY": "snappy",
    "LZ4": "lz4_raw",
    "ZSTD": "zstd",
    "GZIP": "gzip",
    "BROTLI": "brotli",
}
_PHYSICAL = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, struct.error)
_STORED: dict[str, np.dtype[Any]] = {
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FLOAT": np.dtype("<f4"),
    "DOUBLE": np.dtype("<f8"),
}


_I32, _I64, _BINARY, _BOOL = (footer.I32,), (footer.I64,), (footer.BINARY,), (1, 2)
_Kinds = dict[int, Any]
"""The kinds that each field may have, or those of the fields of a struct."""
_STATISTICS: _Kinds = {1: _BINARY, 2: _BINARY, 3: _I64, 4: _I64, 5: _BINARY, 6: _BINARY, 7: _BOOL, 8: _BOOL, 9: _I64}
_KINDS: _Kinds = {
    **dict.fromkeys((_TYPE, _UNCOMPRESSED, _COMPRESSED, _CHECKSUM), _I32),
    _DATA: {**dict.fromkeys(range(1, 5), _I32), 5: _STATISTICS},
    _DICTIONARY: {1: _I32, 2: _I32, 3: _BOOL},
    _DATA_V2: {**dict.fromkeys(range(1, 7), _I32), _IS_COMPRESSED: _BOOL, 8: _STATISTICS},
}


class _Other(ValueError):
    """A column chunk of a kind that is not read here, or a damaged one."""


@dataclass(frozen=True)
class Leaf:
    """A column that may be read here: its number among the file's leaves, its values in a page and in memory.

    ``definition`` and ``repetition`` are the largest levels.
    """

    number: int
    stored: np.dtype[Any]
    held: np.dtype[Any]
    definition: int
    repetition: int


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is string or binary of any size."""
    test = pa.types
    return bool(
        test.is_string(kind) or test.is_binary(kind) or test.is_large_string(kind) or test.is_large_binary(kind)
    )


def leaf_of(metadata: pq.FileMetaData, name: str, kind: pa.DataType) -> Leaf | None:
    """Return the leaf of a top-level column of Arrow type ``kind``.

    That may be numbers, bytes of one width, lists of these, strings and binary. None is for what is not read here:
    other types, columns of several leaves and names that might be two things.
    """
    schema = metadata.schema
    paths = [schema.column(number).path for number in range(len(schema))]
    found = [number for number, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
    if len(found) != 1:
        return None
    column = schema.column(found[0])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    dtypes = _dtypes(column.physical_type, kind)
    if dtypes is None:
        return None
    return Leaf(found[0], *dtypes, column.max_definition_level, column.max_repetition_level)


def _dtypes(physical: str, kind: pa.DataType) -> tuple[np.dtype[Any], np.dtype[Any]] | None:
    """Return how a value lies in a page, and how in memory."""
    if physical == "BYTE_ARRAY":
        return (np.dtype("V"), np.dtype("V")) if is_text(kind) else None
    if physical == "FIXED_LEN_BYTE_ARRAY":
        exact: np.dtype[Any] = np.dtype(f"V{kind.byte_width}" if pa.types.is_fixed_size_binary(kind) else "V")
        return (exact, exact) if exact.itemsize else None
    stored = _STORED.get(physical)
    if stored is None or not (pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)):
        return None
    held: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    if (held.kind == "f") != (stored.kind == "f") or held.itemsize > stored.itemsize:
        return None
    return stored, held


@dataclass(frozen=True)
class ByteArrays:
    """Rows of strings or binary where they lie: row i is ``pages[p][1][begins[i]:begins[i] + lengths[i]]``.

    ``pages`` are (first row, bytes), and p is the last page whose first row is not beyond i.
    """

    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    pages: list[tuple[int, Bytes]]


@dataclass
class Reader:
    """Reads column chunks into ``memory``; from any thread. It remembers which levels it has found to be regular.

    ``checked`` compares pages with their checksums, where they have any.
    """

    memory: Pool
    checked: bool = False
    _known: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def values(self, file: int, chunk: pq.ColumnChunkMetaData, leaf: Leaf, length: int) -> Values | None:
        """Return all values of a column chunk of the open ``file``, rows of ``length`` values end to end.

        ``length`` is 0 for a column without lists. None where the values are not to be had this way: some are
        null, or lists are of other lengths, or the chunk is damaged.
        """
        total = chunk.num_values
        if bool(length) != bool(leaf.repetition) or leaf.repetition > 1 or (length and total % length):
            return None
        if chunk.file_path or chunk.compression not in _CODECS:
            return None
        if chunk.has_dictionary_page or not {"PLAIN", "RLE"}.issuperset(chunk.encodings):
            try:
                return self._decoded(file, chunk, leaf, length)
            except UNREADABLE:
                return None
        if not 0 <= total * leaf.stored.itemsize <= chunk.total_uncompressed_size:
            return None
        found = self.memory.lend(total * leaf.held.itemsize).view(leaf.held)
        same, at = leaf.held == leaf.stored, 0
        try:
            if same and _CODECS[chunk.compression] is None and not self.checked:
                self._straight(file, chunk, leaf, length, found.view(np.uint8))
                return found
            for count, data in self._plain(file, chunk, leaf, length):
                data, place = data[: count * leaf.stored.itemsize], found[at : at + count]
                if len(data) < count * leaf.stored.itemsize:
                    return None
                if same:  # as bytes, which need not be aligned
                    np.copyto(place.view(np.uint8), data)
                else:
                    np.copyto(place, data.view(leaf.stored), casting="unsafe")
                at += count
        except UNREADABLE:
            return None
        return found if at == total else None

    def _straight(self, file: int, chunk: pq.ColumnChunkMetaData, leaf: Leaf, length: int, room: Bytes) -> None:
        """Read the values of pages that are neither compressed nor encoded to where they belong, all of ``room``."""
        first, width = 0, leaf.stored.itemsize
        head = np.empty(_LEVELS, np.uint8)
        for header, at, size in _bodies(file, chunk):
            about = header[_DATA if header[_TYPE][1] == fields.DATA_PAGE else _DATA_V2][1]
            place = room[first * width :][: max(0, about[_COUNT][1]) * width]
            levels = size - len(place)
            if not 0 <= levels <= len(head):
                raise _Other
            if os.preadv(file, [head[:levels].data, place.data], at) != size:
                raise _Other
            count, encoding, rest = self._page(header, head[:levels], chunk, leaf, length, first, len(place))
            if encoding != fields.PLAIN or len(rest) or count * width != len(place):
                raise _Other
            first += count
        if first * width != len(room):
            raise _Other

    def _decoded(self, file: int, chunk: pq.ColumnChunkMetaData, leaf: Leaf, length: int) -> Values:
        """Have pyarrow decode the pages of a chunk of lists without their levels, as a column of its own."""
        parts, first, dictionary = [footer.MAGIC], 0, 0
        for header, body in self._pages(file, chunk, False):
            if header[_TYPE][1] == fields.DICTIONARY_PAGE:
                data = _decompressed(chunk, body, header[_UNCOMPRESSED][1])
                sizes = _numbers({_TYPE: fields.DICTIONARY_PAGE, _UNCOMPRESSED: len(data), _COMPRESSED: len(data)})
                head, dictionary = footer.encode(sizes | {_DICTIONARY: header[_DICTIONARY]}), len(footer.MAGIC)
            else:
                count, encoding, data = self._page(header, body, chunk, leaf, length, first)
                if not count:  # pyarrow takes an empty page of such a column for its end
                    continue
                head = data_page_header(count, encoding, len(data))
                first += count
            parts += [head, data.tobytes()]
        if first != chunk.num_values:
            raise _Other
        size = sum(map(len, parts))
        at = len(footer.MAGIC) + (sum(map(len, parts[1:3])) if dictionary else 0)
        parts.append(footer.frame(_alone(_PHYSICAL.index(chunk.physical_type), leaf, first, size, at, dictionary)))
        with pq.ParquetFile(pa.BufferReader(b"".join(parts)), pre_buffer=False) as alone:
            column = alone.read_row_group(0, use_threads=False).column(0)
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if len(values) != first or values.null_count:
            raise _Other
        width = leaf.stored.itemsize
        found = np.frombuffer(values.buffers()[1], np.uint8, first * width, values.offset * width).view(leaf.stored)
        return found if leaf.held == leaf.stored else found.astype(leaf.held)

    def byte_arrays(self, file: int, chunk: pq.ColumnChunkMetaData, leaf: Leaf) -> ByteArrays | None:
        """Return the rows of a column chunk of strings or binary; None as `values` does."""
        try:
            found = list(self.byte_pages(file, chunk, leaf))
        except UNREADABLE:
            return None
        firsts = np.cumsum([0, *(len(some.begins) for some in found)])
        if not found or firsts[-1] != chunk.num_values:
            return None
        pages = [(int(first), some.pages[0][1]) for first, some in zip(firsts, found, strict=False)]
        begins, lengths = (np.concatenate(parts) for parts in zip(*((f.begins, f.lengths) for f in found), strict=True))
        return ByteArrays(begins, lengths, pages)

    def byte_pages(self, file: int, chunk: pq.ColumnChunkMetaData, leaf: Leaf) -> Iterator[ByteArrays]:
        """Yield the rows of a column chunk of strings or binary page by page; raise UNREADABLE where that cannot be."""
        if leaf.repetition or chunk.file_path or chunk.compression not in _CODECS:
            raise _Other
        first, dictionary = 0, None
        for header, body in self._pages(file, chunk, keep=True):
            if header[_TYPE][1] == fields.DICTIONARY_PAGE:
                data = _decompressed(chunk, body, header[_UNCOMPRESSED][1])
                if header[_DICTIONARY][1][_ENCODING][1] not in (fields.PLAIN, fields.PLAIN_DICTIONARY):
                    raise _Other
                dictionary = _walked(data, header[_DICTIONARY][1][_COUNT][1])
                continue
            count, encoding, data = self._page(header, body, chunk, leaf, 0, first)
            del body  # a large one that was compressed
            first += count
            if not count:
                continue
            if encoding == fields.PLAIN:
                yield _walked(data, count)
            elif encoding in (fields.PLAIN_DICTIONARY, fields.RLE_DICTIONARY) and dictionary is not None:
                numbers = unpacked(data[1:].tobytes(), int(data[0]), count)
                if len(numbers) < count:
                    raise _Other
                yield ByteArrays(dictionary.begins[numbers], dictionary.lengths[numbers], dictionary.pages)
            else:
                raise _Other

    def _plain(self, file: int, chunk: pq.ColumnChunkMetaData, leaf: Leaf, length: int) -> Iterator[tuple[int, Bytes]]:
        """Yield the number of values and the bytes of each page, which are there until the next one."""
        if chunk.has_dictionary_page or chunk.file_path or chunk.compression not in _CODECS:
            raise _Other
        first = 0
        for header, body in self._pages(file, chunk, keep=False):
            count, encoding, data = self._page(header, body, chunk, leaf, length, first)
            if encoding != fields.PLAIN:
                raise _Other
            yield count, data
            first += count

    def _pages(self, file: int, chunk: pq.ColumnChunkMetaData, keep: bool) -> Iterator[tuple[Struct, Bytes]]:
        """Yield each page's header and bytes."""
        for header, at, length in _bodies(file, chunk):
            block = self.memory.lend(length) if keep else self.memory.take(length)
            if length and os.preadv(file, [block[:length].data], at) != length:
                raise _Other
            if (
                self.checked
                and _CHECKSUM in header
                and zlib.crc32(block[:length].data) != header[_CHECKSUM][1] & 0xFFFFFFFF
            ):
                raise _Other
            if keep:
                body = [block[:length]]
                del block
                yield header, body.pop()
            else:
                yield header, block[:length]
                self.memory.give(block)

    def _page(
        self,
        header: Struct,
        body: Bytes,
        chunk: pq.ColumnChunkMetaData,
        leaf: Leaf,
        length: int,
        first: int,
        apart: int = 0,
    ) -> tuple[int, int, Bytes]:
        """Return the number of values in a page, their encoding and their bytes; its levels have to be regular.

        ``apart`` are bytes of values that ``body`` lacks.
        """
        kind, size = header[_TYPE][1], header[_UNCOMPRESSED][1]
        if kind == fields.DATA_PAGE:
            about = header[_DATA][1]
            encoding = about[_ENCODING][1]
            body = _decompressed(chunk, body, size - apart)
            repetitions, body = _levels(body, about[_REPETITIONS][1]) if leaf.repetition else (b"", body)
            definitions, body = _levels(body, about[_DEFINITIONS][1]) if leaf.definition else (b"", body)
        elif kind == fields.DATA_PAGE_V2:
            about = header[_DATA_V2][1]
            encoding = about[_ENCODING_V2][1]
            middle = about[_REPETITION_BYTES][1]
            end = middle + about[_DEFINITION_BYTES][1]
            if not 0 <= middle <= end <= len(body):
                raise _Other
            repetitions, definitions, body = body[:middle].tobytes(), body[middle:end].tobytes(), body[end:]
            if about.get(_IS_COMPRESSED, (0, True))[1] and len(body):
                body = _decompressed(chunk, body, size - end)
        else:
            raise _Other
        count = about[_COUNT][1]
        if not 0 <= count <= chunk.num_values - first:
            raise _Other
        key = (count, first % length if length else 0, length, leaf.definition, repetitions, definitions)
        regular = self._known.get(key)
        if regular is None:
            regular = _regular(count, first, length, leaf, repetitions, definitions)
            if len(self._known) >= _PATTERNS:
                self._known.clear()
            self._known[key] = regular
        if not regular:
            raise _Other
        return count, encoding, body


def data_page_header(count: int, encoding: int, size: int, stored: int | None = None) -> bytes:
    """Return the header of a data page of ``count`` values, which takes ``size`` bytes, or compressed ``stored``."""
    about = _numbers({_COUNT: count, _ENCODING: encoding, _DEFINITIONS: fields.RLE, _REPETITIONS: fields.RLE})
    sizes = _numbers({_TYPE: fields.DATA_PAGE, _UNCOMPRESSED: size, _COMPRESSED: size if stored is None else stored})
    return footer.encode(sizes | {_DATA: (footer.STRUCT, about)})


def run_of(count: int, level: int) -> bytes:
    """Return the levels of ``count`` values that have the same one: one run, with its length in bytes before it."""
    run = bytearray()
    footer.put_varint(run, count << 1)
    run.append(level)
    return len(run).to_bytes(4, "little") + run


def _numbers(fields: dict[int, int]) -> Struct:
    return {key: (footer.I32, value) for key, value in fields.items()}


def _alone(physical: int, leaf: Leaf, count: int, size: int, data: int, dictionary: int) -> Struct:
    """Return the footer of a file of one column without levels, whose pages are bytes 4 to ``size``."""
    i32, i64, binary, struct_ = footer.I32, footer.I64, footer.BINARY, footer.STRUCT
    root = {4: (binary, b"schema"), 5: (i32, 1)}
    element = {1: (i32, physical), 2: (i32, leaf.stored.itemsize), 3: (i32, 0), 4: (binary, b"values")}
    length = size - len(footer.MAGIC)
    chunk = {
        **fields.meta_of(physical, [b"values"], 0, [fields.PLAIN], count, length, length),
        fields.DATA: (i64, data),
    }
    if dictionary:
        chunk[fields.DICTIONARY] = (i64, dictionary)
    column = {2: (i64, 0), 3: (struct_, chunk)}
    group = {1: (footer.LIST, footer.Items(struct_, [column])), 2: (i64, size), 3: (i64, count)}
    return {
        1: (i32, 2),
        2: (footer.LIST, footer.Items(struct_, [root, element])),
        3: (i64, count),
        4: (footer.LIST, footer.Items(struct_, [group])),
    }


def _bodies(file: int, chunk: pq.ColumnChunkMetaData) -> Iterator[tuple[Struct, int, int]]:
    """Yield each page's header, where its body begins, and how long that is: no page reaches beyond its chunk."""
    at = chunk.data_page_offset
    if chunk.has_dictionary_page:
        at = min(at, chunk.dictionary_page_offset)
    end = at + chunk.total_compressed_size
    while at < end:
        header, length = _header(file, at)
        at, size = at + length, header[_COMPRESSED][1]
        if not 0 <= size <= end - at:
            raise _Other
        yield header, at, size
        at += size


def _header(file: int, at: int) -> tuple[Struct, int]:
    """Return the page header at byte ``at``, and its length."""
    for size in _HEADS:
        data = os.pread(file, size, at)
        try:
            header, end = footer.decode_first(data, "")
        except ParquetError:
            continue
        if not _is_as_written(header, _KINDS):
            break
        return header, end
    raise _Other


def _is_as_written(found: Struct, kinds: _Kinds) -> bool:
    """Return whether the fields of a page header are of the kinds that they should be; what has others is damaged."""
    for number, (kind, value) in found.items():
        wanted = kinds.get(number)
        if isinstance(wanted, dict):
            if kind != footer.STRUCT or not _is_as_written(value, wanted):
                return False
        elif wanted is None or kind not in wanted:
            return False
    return True


def _decompressed(chunk: pq.ColumnChunkMetaData, body: Bytes, size: int) -> Bytes:
    """Return a page's bytes, which have to be ``size``: damage makes them fewer, and pyarrow's codecs do not say so."""
    codec = _CODECS[chunk.compression]
    if codec is None:
        if len(body) != size:
            raise _Other
        return body
    if not 0 <= size <= chunk.total_uncompressed_size:  # a damaged header must not ask for gigabytes
        raise _Other
    if codec == "snappy":  # whose data begin with their length, which pyarrow does not compare
        if _varint(body[:5].tobytes(), 0)[0] != size:
            raise _Other
        data = pa.Codec(codec).decompress(pa.py_buffer(body), size)
    elif codec == "lz4_raw":
        data = pa.Codec("lz4").decompress(b"".join((_frame(size, len(body)), body.data, bytes(4))), size)
    else:
        data = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(body)), codec).read_buffer(size + 1)
    if data.size != size:
        raise _Other
    return np.frombuffer(data, np.uint8)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at byte ``at``, seven bits in a byte, and where it ends."""
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift > 63:
            return found, at


def _frame(size: int, compressed: int) -> bytes:
    """Return what makes an LZ4 frame of a raw block: a frame says how many bytes come of it, so they are counted.

    See https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md: a block of a frame has at most 4 MB.
    """
    if max(size, compressed) > _LZ4_BLOCK:
        raise _Other
    about = struct.pack("<BBQ", 0b0110_1000, 7 << 4, size)  # one block of up to 4 MB, and the content's size
    return b"\x04\x22\x4d\x18" + about + struct.pack("<BI", xxhash.xxh32_intdigest(about) >> 8 & 0xFF, compressed)


def _walked(data: Bytes, count: int) -> ByteArrays:
    """Return where each of the byte arrays of a plain page is; its length is in front of it."""
    at, view = 4, data.data
    begins = [at]
    length_at, note = struct.Struct("<I").unpack_from, begins.append
    for _ in range(count):
        at += length_at(view, at - 4)[0] + 4
        note(at)
    if at - 4 > len(data):
        raise _Other
    found = np.array(begins, np.int64)
    return ByteArrays(found[:-1], np.diff(found) - 4, [(0, data)])


def _levels(body: Bytes, encoding: int) -> tuple[bytes, Bytes]:
    """Return a page's levels, which come with their length in front, and what is behind them."""
    if encoding != fields.RLE or len(body) < 4:
        raise _Other
    end = 4 + int.from_bytes(body[:4].tobytes(), "little")
    if end > len(body):
        raise _Other
    return body[4:end].tobytes(), body[end:]


def _regular(count: int, first: int, length: int, leaf: Leaf, repetitions: bytes, definitions: bytes) -> bool:
    """Return whether no value is null, and of those of the chunk every ``length``-th one begins a list."""
    if leaf.repetition:
        begins = (np.arange(first, first + count) % length == 0).astype(np.uint8)
        if not np.array_equal(unpacked(repetitions, 1, count), 1 - begins):
            return False
    if leaf.definition:
        levels = unpacked(definitions, leaf.definition.bit_length(), count)
        return len(levels) == count and bool((levels == leaf.definition).all())
    return True


def unpacked(data: bytes, width: int, count: int) -> npt.NDArray[Any]:
    """Return up to ``count`` numbers of ``width`` bits in the hybrid of runs and packed bits; fewer where data ends."""
    if not width:
        return np.zeros(count, np.uint8)
    if width > 32:
        raise _Other
    parts: list[npt.NDArray[Any]] = []
    at = done = 0
    kind = np.uint8 if width <= 8 else np.uint32
    weights = (1 << np.arange(width)).astype(kind)
    whole = -(-width // 8)  # bytes of a run's number
    while done < count and at < len(data):
        head, at = _varint(data, at)
        if head & 1:
            size = min((head >> 1) * width, len(data) - at)
            bits = np.unpackbits(np.frombuffer(data, np.uint8, size, at), bitorder="little")
            part = bits[: len(bits) // width * width].reshape(-1, width) @ weights
            at += size
        else:
            part = np.full(min(head >> 1, count - done), int.from_bytes(data[at : at + whole], "little"), kind)
            at += whole
        if not len(part):
            break
        parts.append(part[: count - done])
        done += len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, kind)
