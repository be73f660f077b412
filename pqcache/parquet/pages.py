"""Pages of column chunks: their headers, bytes and levels, and the codecs that they are compressed with.

Fields are those of parquet.thrift in https://github.com/apache/parquet-format, and levels are described in its
Encodings.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pqcache.parquet import thrift
from pqcache.parquet.thrift import I32, STRUCT, Check, Checks, Struct, inside, key, number_at, walk_struct

Bytes = npt.NDArray[np.uint8]
File: TypeAlias = "int | Bytes"
"""A descriptor, or the bytes of a file."""
ReadAt: TypeAlias = "Callable[[int, int], bytes]"
"""Reads bytes of a file: (offset, most)."""

TYPE, UNCOMPRESSED, COMPRESSED, DATA, DICTIONARY, DATA_V2 = 1, 2, 3, 5, 7, 8  # of PageHeader
COUNT, ENCODING, DEFINITIONS, REPETITIONS = 1, 2, 3, 4  # of DataPageHeader
_LZ4_BLOCK = 1 << 22  # bytes
_SHORT_TEXT = 260  # bytes, with its length
_MIN_RUN, _RUN_COST = 4, 5  # bytes of bits worth replacing by a run, and the bytes of that run
_WORTH_RUNS = 8  # runs take longer to write, so they must save an eighth of the bits


class Codec(NamedTuple):
    """A codec and its names.

    ``name`` is used by ``--compression``, ``metadata`` by pyarrow's `ColumnChunkMetaData.compression`, ``arrow`` by
    `pyarrow.Codec` (None for no codec), and ``number`` by CompressionCodec in parquet.thrift.
    """

    name: str
    number: int
    metadata: str
    arrow: str | None
    has_levels: bool = True


_ALL = (
    Codec("none", 0, "UNCOMPRESSED", None, has_levels=False),
    Codec("snappy", 1, "SNAPPY", "snappy", has_levels=False),
    Codec("gzip", 2, "GZIP", "gzip"),
    Codec("brotli", 4, "BROTLI", "brotli"),
    Codec("zstd", 6, "ZSTD", "zstd"),
    Codec("lz4", 7, "LZ4", "lz4_raw", has_levels=False),
)
CODECS = {codec.name: codec for codec in _ALL}
IN_METADATA = {codec.metadata: codec for codec in _ALL}


def codec_name(metadata: str) -> str:
    """Unknown codecs keep their name, in lower case."""
    known = IN_METADATA.get("LZ4" if metadata == "LZ4_RAW" else metadata)
    return metadata.lower() if known is None else known.name


class NotRead(ValueError):
    """A column chunk is damaged or unsupported; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A column chunk encoded on its own. Offsets count from the start of ``data``; ``columns`` is its ColumnIndex."""

    rows: int
    fields: Struct
    data: list[memoryview]
    size: int
    offsets: Struct | None
    columns: bytes | Struct | None = None


class MoreValues(NotRead):
    """Pages hold more values than the footer says; most readers would drop some."""


def read_into(file: int, place: Bytes, offset: int) -> None:
    if len(place) and os.preadv(file, [place.data], offset) != len(place):
        raise NotRead("the file ends within a page")


# fields of `Page`, by position
_KIND, _UNCOMPRESSED, _SIZE, _CHECKSUM, _VALUES, _ENCODING, _ROWS, _NULLS, _DEFINITIONS, _REPETITIONS, _STORED = range(
    11
)


class Page(NamedTuple):
    """The header of a page, with `NONE` for missing fields, and the offset of its ``body`` in the file.

    ``size`` and ``checksum`` are of the body as stored. ``definitions`` and ``repetitions`` are the encodings of levels
    in version 1, and their bytes in version 2, which never compresses them.
    """

    kind: int
    uncompressed: int
    size: int
    checksum: int
    values: int
    encoding: int
    rows: int
    nulls: int
    definitions: int
    repetitions: int
    stored: int  # 1 if a page of version 2 isn't compressed
    body: int

    @property
    def is_dictionary(self) -> bool:
        return self.kind == thrift.DICTIONARY_PAGE


def _is_stored(data: bytes, at: int, numbers: list[int]) -> int:
    numbers[_STORED] = 1
    return at


def _i32(*places: int) -> dict[int, Check]:
    return {key(field, I32): number_at(place) for field, place in enumerate(places, 1)}


_V1 = _i32(_VALUES, _ENCODING, _DEFINITIONS, _REPETITIONS)
_V2 = _i32(_VALUES, _NULLS, _ROWS, _ENCODING, _DEFINITIONS, _REPETITIONS) | {key(7, 2): _is_stored}  # 2: false
_HEADER: Checks = {
    **_i32(_KIND, _UNCOMPRESSED, _SIZE, _CHECKSUM),
    key(DATA, STRUCT): inside(_V1),
    key(DICTIONARY, STRUCT): inside(_i32(_VALUES, _ENCODING)),
    key(DATA_V2, STRUCT): inside(_V2),
}
NONE = -(1 << 32)  # no number of 32 bits
_KINDS = (thrift.DATA_PAGE, thrift.DICTIONARY_PAGE, thrift.DATA_PAGE_V2)
_HEADS = (256, 1 << 16, 1 << 24)  # bytes: enough for nearly all page headers, and for long statistics


def pages_in(file: File | ReadAt, at: int, size: int) -> Iterator[Page]:
    """Yield the pages in ``size`` bytes from ``at``, reading only their headers."""
    end = at + size
    while at < end:
        page = _page_at(file, at)
        if page.kind not in _KINDS or min(page.uncompressed, page.size, page.values) < 0:
            raise NotRead("damaged page header, or unknown kind of page")
        if page.body + page.size > end:
            raise NotRead("a page reaches beyond its chunk")
        yield page
        at = page.body + page.size


def _page_at(file: File | ReadAt, at: int) -> Page:
    for most in _HEADS:
        data = _bytes_at(file, at, most)
        numbers = [NONE] * (_STORED + 1)
        try:
            length = walk_struct(data, 0, _HEADER, numbers)
        except IndexError:
            if len(data) < most:
                break
            continue
        if length <= len(data):
            return Page._make((*numbers, at + length))
    raise NotRead("the file ends within a page header")


def _bytes_at(file: File | ReadAt, at: int, most: int) -> bytes:
    if callable(file):
        return file(at, most)
    return os.pread(file, most, at) if isinstance(file, int) else file[at : at + most].tobytes()


def read_bytes(file: File, at: int, size: int) -> Bytes:
    if isinstance(file, int):
        place = memory(size)
        read_into(file, place, at)
        return place
    if at + size > len(file):
        raise NotRead("the file ends within a page")
    return file[at : at + size]


def memory(size: int) -> Bytes:
    """Allocate from Arrow's pool, which reuses freed memory."""
    return np.frombuffer(pa.allocate_buffer(size), np.uint8)


def decompress_page(chunk: pq.ColumnChunkMetaData, body: Bytes, size: int) -> Bytes:
    """Decompress to exactly ``size`` bytes; pyarrow's codecs don't report truncation."""
    codec, wrong = IN_METADATA[chunk.compression].arrow, NotRead("page size differs from its header")
    if codec is None:
        if len(body) != size:
            raise wrong
        return body
    if not 0 <= size <= chunk.total_uncompressed_size:  # a damaged header must not ask for gigabytes
        raise wrong
    if codec == "snappy" and thrift.read_varint(body[:5].tobytes(), 0)[0] != size:  # pyarrow doesn't compare it
        raise wrong
    if codec in ("snappy", "zstd"):
        data = pa.Codec(codec).decompress(pa.py_buffer(body), size)
    elif codec == "lz4_raw":
        data = pa.Codec("lz4").decompress(b"".join((_frame(size, len(body)), body.data, bytes(4))), size)
    else:
        data = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(body)), codec).read_buffer(size + 1)
    if data.size != size:
        raise wrong
    return np.frombuffer(data, np.uint8)


def _frame(size: int, compressed: int) -> bytes:
    """The head of an LZ4 frame around a raw block: frames state the decompressed size, which reveals truncation.

    See https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md. A block has at most 4 MB.
    """
    if max(size, compressed) > _LZ4_BLOCK:
        raise NotRead("LZ4 block is too large")
    about = struct.pack("<BBQ", 0b0110_1000, 7 << 4, size)  # one block of up to 4 MB, and the content's size
    return b"\x04\x22\x4d\x18" + about + struct.pack("<BI", xxhash.xxh32_intdigest(about) >> 8 & 0xFF, compressed)


def levels_of(body: Bytes, encoding: int) -> tuple[bytes, Bytes]:
    """Split a page into its length-prefixed levels and the rest."""
    if encoding != thrift.RLE or len(body) < 4:
        raise NotRead("levels aren't RLE-encoded")
    end = 4 + int.from_bytes(body[:4].tobytes(), "little")
    if end > len(body):
        raise NotRead("levels reach beyond their page")
    return body[4:end].tobytes(), body[end:]


def text_lengths(data: Bytes, count: int) -> npt.NDArray[np.int64]:
    """The lengths of ``count`` consecutive length-prefixed texts."""
    if len(data) < _SHORT_TEXT * count:  # three zeros mark a length below 256, unless a text has some
        zeros = data == 0
        places = np.flatnonzero(zeros[1:-2] & zeros[2:-1] & zeros[3:])
        if len(places) == count:
            lengths = data[places].astype(np.int64)
            if not places[0] and np.array_equal(places + 4 + lengths, np.append(places[1:], len(data))):
                return lengths
    at, found, length_at, content = 0, list[int](), struct.Struct("<I").unpack_from, data.data
    for _ in range(count):
        (length,) = length_at(content, at)
        found.append(length)
        at += 4 + length
    if at != len(data):
        raise NotRead("values don't fill their page")
    return np.array(found, np.int64)


def decode_hybrid(data: bytes, width: int, count: int) -> npt.NDArray[Any]:
    """Decode ``count`` numbers of ``width`` bits from the hybrid of runs and packed bits.

    ``data`` must end with them, except that packed bits come eight numbers at a time.
    """
    kind = _kind_of(width)
    parts: list[npt.NDArray[Any]] = []
    at = done = 0
    while at < len(data):
        length, numbers, at = read_run(data, at, width, count - done)
        parts.append(np.full(length, numbers, kind) if isinstance(numbers, int) else numbers)
        done += length
    if done != count:
        raise NotRead("fewer levels or indices than values")
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def read_run(data: bytes, at: int, width: int, left: int) -> tuple[int, int | npt.NDArray[Any], int]:
    """The length of the run at byte ``at``, its number or numbers, and the start of the next run.

    ``left`` numbers remain; some writers pad the last packed bits.
    """
    kind = _kind_of(width)
    head, at = thrift.read_varint(data, at)
    length = head >> 1
    if head & 1:
        end = at + length * width
        if not length or not left or (8 * length >= left + 8 and end != len(data)):
            raise NotRead("more levels or indices than values")
        if not width:
            return min(8 * length, left), 0, end
        bits = np.unpackbits(np.frombuffer(data, np.uint8, end - at, at), bitorder="little")
        numbers = (bits if width == 1 else bits.reshape(-1, width) @ (1 << np.arange(width)).astype(kind))[:left]
        return len(numbers), numbers, end
    if not 0 < length <= left:
        raise NotRead("more levels or indices than values")
    end = at + -(-width // 8)
    if end > len(data):
        raise NotRead("levels or indices end within a run")
    return length, int.from_bytes(data[at:end], "little"), end


def _kind_of(width: int) -> type[np.uint8 | np.uint32]:
    if not 0 <= width <= 32:
        raise NotRead("levels have more than 32 bits")
    return np.uint8 if width <= 8 else np.uint32


def data_page_header(count: int, encoding: int, size: int, stored: int | None = None) -> bytes:
    about = numbers({COUNT: count, ENCODING: encoding, DEFINITIONS: thrift.RLE, REPETITIONS: thrift.RLE})
    sizes = page_sizes(thrift.DATA_PAGE, size, stored)
    return thrift.encode(sizes | {DATA: (thrift.STRUCT, about)})


def dictionary_page_header(count: int, size: int) -> Struct:
    about = numbers({COUNT: count, ENCODING: thrift.PLAIN})
    return page_sizes(thrift.DICTIONARY_PAGE, size) | {DICTIONARY: (thrift.STRUCT, about)}


def page_sizes(kind: int, size: int, stored: int | None = None) -> Struct:
    return numbers({TYPE: kind, UNCOMPRESSED: size, COMPRESSED: size if stored is None else stored})


def encode_run(count: int, level: int) -> bytes:
    """Levels of ``count`` equal values as one run, preceded by its length in bytes."""
    run = bytearray()
    thrift.put_varint(run, count << 1)
    run.append(level)
    return len(run).to_bytes(4, "little") + run


def encode_flags(flags: Bytes) -> bytes:
    """Encode levels of 0 or 1 as bits, with runs for long repetitions, preceded by their length in bytes."""
    packed = np.packbits(flags, bitorder="little")
    edges = np.flatnonzero(packed[1:] != packed[:-1]) + 1
    begins = np.concatenate(((0,), edges))
    lengths = np.concatenate((edges, (len(packed),))) - begins
    first = packed[begins]
    long = (lengths >= _MIN_RUN) & ((first == 0) | (first == 255))
    if lengths[long].sum() - _RUN_COST * long.sum() < len(packed) / _WORTH_RUNS:
        long[:] = False
    levels, at = bytearray(), 0

    def put_bits(end: int) -> None:
        if at < end:
            thrift.put_varint(levels, (end - at) << 1 | 1)
            levels.extend(packed[at:end].tobytes())

    for begin, length in zip(begins[long].tolist(), lengths[long].tolist(), strict=True):
        put_bits(begin)
        at = begin + length
        thrift.put_varint(levels, (min(8 * at, len(flags)) - 8 * begin) << 1)
        levels.append(packed[begin] & 1)
    put_bits(len(packed))
    return len(levels).to_bytes(4, "little") + levels


def numbers(fields: dict[int, int]) -> Struct:
    return {key: (thrift.I32, value) for key, value in fields.items()}
