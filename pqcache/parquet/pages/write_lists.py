"""Pages of lists of one length, whose levels are known before a value is looked at.

A writer that takes any list finds out for each value where its list begins and that it is not null, which takes longer
than the values themselves. So these are written as if they were no lists, and get the same few bytes of levels
in every page. The format is parquet.thrift and Encodings.md of https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.binary_views import offsets_of
from pqcache.parquet.codecs import CODECS
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import footer, thrift, thrift_fields
from pqcache.parquet.footer.thrift import I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.pages.page_format import Chunk, data_page_header, encode_run
from pqcache.system.buffer_pool import BufferPool

_SHORTEST, _LARGEST = 16, 1 << 28  # values of a list; bytes of a list
_PAGE, _ROWS = 1 << 19, 20_000  # bytes and rows of a page: what is compressed remains in the processor's cache
_TOGETHER = 8  # pages encoded in one go
_HEADER = 64  # bytes, at most: there are no statistics in it
_PHYSICAL = {pa.float32(): 4, pa.float64(): 5, pa.int64(): 2, pa.uint64(): 2}  # others are INT32


def length_of(field: pa.Field, column: pa.ChunkedArray, encodings: Encodings) -> int:
    """The number of items in each list of a column that is written here; 0 for any other column."""
    kind = field.type
    if not (pt.is_list(kind) or pt.is_large_list(kind)) or not len(column) or column.null_count:
        return 0
    value, path = kind.value_type, _path(field)
    if not (pt.is_integer(value) or pt.is_float32(value) or pt.is_float64(value)):
        return 0
    if path in encodings.dictionary or path in encodings.statistics or encodings.codecs.get(path) not in CODECS:
        return 0
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    lengths = [np.diff(offsets_of(chunk)) for chunk in chunks]
    length = int(lengths[0][0])
    if length < _SHORTEST or length * value.bit_width // 8 > _LARGEST or any((own != length).any() for own in lengths):
        return 0
    return 0 if any(_values(chunk).null_count for chunk in chunks) else length


def _values(chunk: pa.Array) -> pa.Array:
    ends = offsets_of(chunk)
    return chunk.values.slice(int(ends[0]), int(ends[-1] - ends[0]))


def _path(field: pa.Field) -> str:
    return f"{field.name}.list.{field.type.value_field.name}"


def pages_of_lists(
    field: pa.Field, column: pa.ChunkedArray, length: int, encodings: Encodings, memory: BufferPool
) -> Chunk:
    codec, special = CODECS[encodings.codecs[_path(field)]], encodings.special.get(_path(field))
    compress = None
    if codec.arrow is not None:
        compress = pa.Codec(codec.arrow, encodings.level if codec.has_levels else None)
    deepest = 1 + field.nullable + field.type.value_field.nullable
    data: list[memoryview] = []
    places: list[Struct] = []
    at = row = uncompressed = encoding = 0
    pages = _cut(column, length)
    for first in range(0, len(pages), _TOGETHER):
        waiting: list[bytes] = []
        for count, encoding, body in _flat(pages[first : first + _TOGETHER], special, memory):
            levels = _repetitions(count // length, length) + encode_run(count, deepest)
            plain_size = stored = len(levels) + len(body)
            if compress is not None:
                waiting.append(compress.compress(b"".join((levels, body)), asbytes=True))
                stored = len(waiting[-1])
            head = data_page_header(count, encoding, plain_size, stored)
            places.append({1: (I64, at), 2: (I32, len(head) + stored), 3: (I64, row)})
            at, row, uncompressed = (
                at + len(head) + stored,
                row + count // length,
                uncompressed + len(head) + plain_size,
            )
            if compress is None:
                data += [memoryview(head + levels), body]
            else:
                waiting.insert(-1, head)
        if waiting:
            kept = memory.borrow(sum(map(len, waiting)))
            kept[:] = np.frombuffer(b"".join(waiting), np.uint8)
            data.append(kept.data)
    total = len(column) * length
    sizes: Struct = {
        2: (LIST, Items(I64, [len(column), total - len(column)])),
        3: (LIST, Items(I64, [0] * deepest + [total])),
    }
    path = [part.encode() for part in (field.name, "list", field.type.value_field.name)]
    physical = _PHYSICAL.get(field.type.value_type, 1)
    meta = thrift_fields.column_metadata(
        physical, path, codec.number, [thrift_fields.RLE, encoding], total, uncompressed, at
    )
    meta = thrift_fields.with_page_statistics(meta, encoding, len(places), sizes)
    offsets: Struct = {1: (LIST, Items(STRUCT, places))}
    return Chunk(rows=row, fields={2: (I64, 0), 3: (STRUCT, meta)}, data=data, size=at, offsets=offsets)


def _cut(column: pa.ChunkedArray, length: int) -> list[pa.Array]:
    parts = [_values(chunk) for chunk in column.chunks if len(chunk)]
    rows = min(max(1, _PAGE // (length * parts[0].type.bit_width // 8)), _ROWS)
    if len(column) < len(parts) * rows // 2:
        parts = [pa.concat_arrays(parts)]
    return [part.slice(first, rows * length) for part in parts for first in range(0, len(part), rows * length)]


def _flat(pages: list[pa.Array], special: str | None, memory: BufferPool) -> Iterator[tuple[int, int, memoryview]]:
    schema = pa.schema([pa.field("", pages[0].type, nullable=False)])
    plain = Encodings(special={"": special} if special else {})
    file = plain.file(pa.table([pa.chunked_array(pages)], schema), memory, batch=max(map(len, pages)))
    begin = len(footer.MAGIC)
    for _ in pages:
        header, size = thrift.decode_first(bytes(file[begin : begin + _HEADER]), "a page")
        about, end = header[5][1], begin + size + header[2][1]
        yield about[1][1], about[2][1], file[begin + size : end]
        begin = end


@lru_cache(64)
def _repetitions(rows: int, length: int) -> bytes:
    """Repetition levels: 0 for the first value of each list and 1 for the others, as runs."""
    run = bytearray((1 << 1, 0))
    thrift.put_varint(run, (length - 1) << 1)
    run.append(1)
    return (rows * len(run)).to_bytes(4, "little") + run * rows
