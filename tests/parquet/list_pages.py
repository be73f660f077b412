"""Files with a column of lists whose pages begin anywhere, also within a row, as some writers leave them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.parquet import footer, thrift
from pqcache.parquet import pages as page_format
from pqcache.parquet.pages import IN_METADATA
from pqcache.parquet.thrift import BINARY, I32, I64, LIST, STRUCT, Items, Struct

Row = list[Any] | None
_REQUIRED, _OPTIONAL, _REPEATED = range(3)
_SCHEMA: list[Struct] = [
    {4: (BINARY, b"schema"), 5: (I32, 2)},
    {1: (I32, 2), 3: (I32, _REQUIRED), 4: (BINARY, b"id")},
    {3: (I32, _OPTIONAL), 4: (BINARY, b"t"), 5: (I32, 1), 6: (I32, 3)},
    {3: (I32, _REPEATED), 4: (BINARY, b"list"), 5: (I32, 1)},
    {1: (I32, 1), 3: (I32, _OPTIONAL), 4: (BINARY, b"element")},
]
_ITEM = 3  # the definition level of a value that is there


def levels_and_values(rows: Sequence[Row]) -> tuple[list[int], list[int], list[int]]:
    """Return the repetition levels of rows, their definition levels, and their values, which lack nulls."""
    repetitions, definitions, values = [], [], []
    for row in rows:
        items = row or [None]
        repetitions += [0] + [1] * (len(items) - 1)
        for item in items:
            definitions.append(_ITEM if item is not None else 2 if row else 0 if row is None else 1)
        values += [item for item in row or () if item is not None]
    return repetitions, definitions, values


def hybrid(numbers: Sequence[int], width: int, packed: int = 0) -> bytes:
    """Return numbers in the hybrid of runs and packed bits; the first ``packed`` times 8 as bits."""
    data, at = bytearray(), min(8 * packed, len(numbers))
    if at:
        thrift.put_varint(data, packed << 1 | 1)
        some = np.array([*numbers[:at]] + [0] * (8 * packed - at), np.uint32)
        bits = (some[:, None] >> np.arange(width)) & 1
        data += np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()
    while at < len(numbers):
        stop = at + 1
        while stop < len(numbers) and numbers[stop] == numbers[at]:
            stop += 1
        thrift.put_varint(data, stop - at << 1)
        data += numbers[at].to_bytes(-(-width // 8), "little")
        at = stop
    return bytes(data)


def write_lists(
    path: Path, rows: Sequence[Row], cuts: Sequence[int], coded: int = 0, packed: int = 0, codec: str = "SNAPPY"
) -> list[int]:
    """Write a column ``id`` of row numbers and a column ``t`` of lists, and return where the pages of ``t`` begin.

    ``cuts`` are the values before which its pages begin. The first ``coded`` pages hold numbers of a dictionary.
    """
    data, about = bytearray(footer.MAGIC), IN_METADATA[codec]

    def put(header: Struct, body: bytes) -> None:
        stored = pa.Codec(about.arrow).compress(body, asbytes=True) if about.arrow else body
        sizes = page_format.page_sizes(header[page_format.TYPE][1], len(body), len(stored))
        data.extend(thrift.encode(dict(sorted((header | sizes).items()))) + stored)

    def put_page(count: int, encoding: int, body: bytes) -> None:
        counts = page_format.numbers({1: count, 2: encoding, 3: thrift.RLE, 4: thrift.RLE})
        put({**page_format.numbers({page_format.TYPE: 0}), page_format.DATA: (STRUCT, counts)}, body)

    ids = np.arange(len(rows), dtype="<i8").tobytes()
    put_page(len(rows), thrift.PLAIN, ids)
    chunks, begins = [_chunk(2, [b"id"], about.number, len(rows), 4, len(data))], []
    begin, (repetitions, definitions, values) = len(data), levels_and_values(rows)
    distinct = sorted(set(values))
    if coded:
        header = page_format.dictionary_page_header(len(distinct), 0)
        put(header, np.array(distinct, "<i4").tobytes())
    first = len(data)
    edges, done = [0, *sorted({cut for cut in cuts if 0 < cut < len(repetitions)}), len(repetitions)], 0
    for page, (low, high) in enumerate(itertools.pairwise(edges)):
        begins.append(len(data))
        found = values[done : done + definitions[low:high].count(_ITEM)]
        done += len(found)
        levels = [hybrid(repetitions[low:high], 1, packed), hybrid(definitions[low:high], 2)]
        body = b"".join(len(some).to_bytes(4, "little") + some for some in levels)
        if page < coded:
            width = max(1, (len(distinct) - 1).bit_length())
            numbers = hybrid([distinct.index(value) for value in found], width)
            put_page(high - low, thrift.RLE_DICTIONARY, body + bytes([width]) + numbers)
        else:
            put_page(high - low, thrift.PLAIN, body + np.array(found, "<i4").tobytes())
    path_of = [b"t", b"list", b"element"]
    chunks.append(_chunk(1, path_of, about.number, len(repetitions), first, len(data), begin if coded else 0))
    group: Struct = {1: (LIST, Items(STRUCT, chunks)), 2: (I64, len(data)), 3: (I64, len(rows))}
    data += footer.footer_and_magic(footer.make_footer({1: (I32, 2)}, _SCHEMA, [group], len(rows), {}))
    path.write_bytes(data)
    return begins


def _chunk(
    physical: int, path: list[bytes], codec: int, values: int, first: int, end: int, dictionary: int = 0
) -> Struct:
    size = end - (dictionary or first)
    meta = thrift.column_metadata(physical, path, codec, [0, 3, 8], values, 1 << 20, size)
    meta[thrift.DATA] = (I64, first)
    if dictionary:
        meta[thrift.DICTIONARY] = (I64, dictionary)
    return {2: (I64, 0), 3: (STRUCT, meta)}
