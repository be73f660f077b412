"""The bytes that columns take once decoded, found without decoding a data page.

Footers count values, which gives the size of numbers and lists. Recent writers also state the total length of the texts
in a column chunk (SizeStatistics). With older ones, a text in a dictionary is stored once and decoded for each of its
values. The lengths of the dictionary's texts, and the number of values outside it by the page headers, then give an
estimate and an upper bound. `count_decoded` counts exactly, by reading the codes.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import MALFORMED, ParquetError, first_line
from pqcache.parquet import thrift
from pqcache.parquet.arrow import is_text, leaves_of, top_level_names, without_views
from pqcache.parquet.footer import not_parquet
from pqcache.parquet.pages import NotRead, Page, decompress_page, pages_in, text_lengths
from pqcache.parquet.statistics import first_page, serialized, stated_nulls
from pqcache.parquet.thrift import I64, LIST, STRUCT, inside, inside_each, key, read_varint, walk_struct
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.parquet")

Read = Callable[[int, int, bool], bytes]
"""Reads bytes of a file, given the offset, the size, and whether the bytes behind will be wanted too."""

DECODED = ("decoded", "most")  # index columns of a column whose rows differ in size
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}  # encodings of values and levels
_ONCE = _PLAIN | {"DELTA_LENGTH_BYTE_ARRAY"}  # that repeat no value
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_END = 4  # bytes that say where a text or a list ends
_MOST_ENTRIES, _MOST_DICTIONARY = 1 << 17, 16 << 20  # of a dictionary whose texts are examined
_ALIKE = 1.25  # times the average: texts of a dictionary without longer ones count as equally long
_FEW_LONG = 4  # times the median: a higher average is due to a few long texts, which may be rare
_AHEAD = 256 << 10  # bytes
_SMALL = 4 << 10  # bytes not worth knowing more exactly
_PAGE_HEADERS = 1.1  # times the bytes of pages
_ROWS, _BYTES = 1 << 16, 8 << 20  # of a batch, at most, when texts are counted
_BUFFER = 1 << 16  # bytes of a chunk that are read ahead meanwhile
_OF_PREFIXES = 256  # rows of a batch of values that share parts


class DecodedSize(NamedTuple):
    """Estimated ``bytes`` in Arrow and an upper bound, ``most``; equal if the size is known, None if unknown."""

    bytes: int | None
    most: int | None


_UNKNOWN = DecodedSize(None, None)
_Stated = list[list[int | None]]  # bytes of texts by row group and column


class StoredRowGroup(NamedTuple):
    """Row group ``number`` of a file with a known footer and Arrow schema."""

    path: Path
    metadata: pq.FileMetaData
    schema: pa.Schema
    number: int

    @property
    def rows(self) -> int:
        return int(self.metadata.row_group(self.number).num_rows)


class _Leaf(NamedTuple):
    """A leaf of a column: bytes of a value (0 for texts), and the numbers of lists and nullable fields around it."""

    column: str
    width: int
    lists: int
    nullable: int


def decoded_columns(
    metadata: pq.FileMetaData,
    schema: pa.Schema,
    fields: Iterable[pa.Field] | None = None,
    read: Read | None = None,
    row_groups: Sequence[int] | None = None,
    follow: bool = True,
) -> dict[str, list[int | None]]:
    """The index columns `DECODED` of columns whose rows differ in size; ``read`` reads the file's pages.

    Without ``read``, sizes that the footer doesn't state are None. With ``follow``, the pages of a chunk are followed,
    which takes many short reads; otherwise all its texts count as if they were in the dictionary.
    """
    names = [field.name for field in (schema if fields is None else fields) if varies(field.type)]
    columns: dict[str, list[int | None]] = {f"{name}:{what}": [] for name in names for what in DECODED}
    for sizes in _sizes(metadata, schema, names, read, row_groups, follow) if names else ():
        for name in names:
            columns[f"{name}:decoded"].append(sizes[name].bytes)
            columns[f"{name}:most"].append(sizes[name].most)
    return columns


def varies(kind: pa.DataType) -> bool:
    kind = without_views(_stored(kind))
    return bool(pa.types.is_nested(kind) or is_text(kind))


def decoded_size(group: StoredRowGroup, names: Sequence[str]) -> DecodedSize:
    """The size of columns of a local row group, by footer and dictionaries."""
    names = [name for name in names if name in group.schema.names]
    with reading(group.path) as read:
        (sizes,) = _sizes(group.metadata, group.schema, names, read, [group.number])
    return _total(list(sizes.values()))


@contextmanager
def reading(path: Path) -> Iterator[Read]:
    """Yields a function that reads ranges of the file; raises ParquetError if it can't be opened."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise not_parquet(path, error) from error
    try:
        yield reading_ahead(lambda offset, size: os.pread(file, size, offset), _AHEAD)
    finally:
        os.close(file)


def reading_ahead(fetch: Callable[[int, int], bytes], ahead: int) -> Read:
    """A `Read` that fetches ``ahead`` bytes at once if the bytes behind will be wanted too.

    A file just copied isn't in the page cache, and dictionaries of short chunks lie close together.
    """
    begin, block = 0, b""

    def read(offset: int, size: int, more: bool) -> bytes:
        nonlocal begin, block
        if not begin <= offset <= offset + size <= begin + len(block):
            if not more:
                return fetch(offset, size)
            begin, block = offset, fetch(offset, max(size, ahead))
        return block[offset - begin : offset - begin + size]

    return read


def _sizes(
    metadata: pq.FileMetaData,
    schema: pa.Schema,
    names: Sequence[str],
    read: Read | None,
    row_groups: Sequence[int] | None,
    follow: bool = True,
) -> Iterator[dict[str, DecodedSize]]:
    groups = range(metadata.num_row_groups) if row_groups is None else row_groups
    if not len(groups):
        return
    leaves, stated = _leaves_of(metadata, schema, names), None
    for number in groups:
        group, found = metadata.row_group(number), defaultdict[str, list[DecodedSize]](list)
        for position, leaf in leaves.items():
            chunk, texts = group.column(position), None
            if _may_repeat(chunk) and not leaf.width:
                stated = _stated_texts(metadata) if stated is None else stated
                texts = stated[number][position]
            found[leaf.column].append(_size_of_chunk(chunk, leaf, group.num_rows, texts, read, follow))
        yield {name: _total(found[name]) for name in names}


def _total(sizes: Sequence[DecodedSize]) -> DecodedSize:
    each = zip(*sizes, strict=True) if sizes else ((0,), (0,))
    return DecodedSize(*(None if None in some else sum(some) for some in each))


def _leaves_of(metadata: pq.FileMetaData, schema: pa.Schema, names: Sequence[str]) -> dict[int, _Leaf]:
    tops, found = top_level_names(metadata, schema), dict[int, _Leaf]()
    for name in names:
        field, positions = schema.field(name), [position for position, top in enumerate(tops) if top == name]
        leaves = list(_leaves(name, field.type, field.nullable))
        if len(leaves) != len(positions):  # an Arrow type with other leaves in Parquet
            first = metadata.row_group(0)
            widths = [_WIDTHS.get(first.column(position).physical_type, 0) for position in positions]
            leaves = [_Leaf(name, width, 1, 1) for width in widths]
        found |= zip(positions, leaves, strict=True)
    return found


def _leaves(name: str, kind: pa.DataType, nullable: bool, lists: int = 0, above: int = 0) -> Iterator[_Leaf]:
    kind, above = _stored(kind), above + nullable
    if pa.types.is_struct(kind):
        for field in kind.fields:
            yield from _leaves(name, field.type, field.nullable, lists, above)
    elif pa.types.is_map(kind):
        yield from _leaves(name, kind.key_type, False, lists + 1, above)
        yield from _leaves(name, kind.item_type, kind.item_field.nullable, lists + 1, above)
    elif pa.types.is_nested(kind):
        yield from _leaves(name, kind.value_type, kind.value_field.nullable, lists + 1, above)
    else:
        yield _Leaf(name, _width(kind), lists, above)


def _stored(kind: pa.DataType) -> pa.DataType:
    while isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type
    return kind


def _width(kind: pa.DataType) -> int:
    if is_text(without_views(kind)):
        return 0
    return 1 if pa.types.is_boolean(kind) or pa.types.is_null(kind) else int(kind.bit_width) // 8


def _may_repeat(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether texts, or parts of them, may be stored once and decoded several times."""
    return chunk.physical_type == "BYTE_ARRAY" and bool(
        chunk.has_dictionary_page or not _ONCE.issuperset(chunk.encodings)
    )


def _size_of_chunk(
    chunk: pq.ColumnChunkMetaData,
    leaf: _Leaf,
    rows: int,
    stated: int | None,
    read: Read | None = None,
    follow: bool = True,
) -> DecodedSize:
    values, nulls = chunk.num_values, stated_nulls(chunk)
    ends = rows + (leaf.lists - 1) * values if leaf.lists else 0
    which = leaf.nullable * (values // 8 + 1) if nulls or (nulls is None and not leaf.width) else 0
    other = values * (leaf.width or _END) + ends * _END + which
    if leaf.width:
        return DecodedSize(other, other)
    if stated is None and not _may_repeat(chunk):
        lengths = 0
        if nulls is not None and not leaf.lists and _PLAIN.issuperset(chunk.encodings):
            lengths = _END * (values - nulls)  # each text is preceded by its length
        stated = max(0, chunk.total_uncompressed_size - lengths)
    if stated is not None:
        return DecodedSize(other + stated, other + stated)
    texts = _UNKNOWN if read is None else _texts(chunk, leaf, values - (nulls or 0), read, follow)
    return DecodedSize(*(None if size is None else size + other for size in texts))


def _texts(chunk: pq.ColumnChunkMetaData, leaf: _Leaf, values: int, read: Read, follow: bool) -> DecodedSize:
    """Bytes of the ``values`` texts of a chunk with a dictionary.

    Each text of the dictionary counts once. The rest is estimated as if all texts were repeated equally often, except
    for a few long ones, which may be rare.
    """
    if not chunk.has_dictionary_page:  # texts that share their beginnings
        return _UNKNOWN
    begin, end = first_page(chunk), first_page(chunk) + chunk.total_compressed_size
    try:
        dictionary = next(_pages(read, begin, end, True))
        size, count, lengths = dictionary.uncompressed, dictionary.values, None
        if not dictionary.is_dictionary or _END * count > size:
            raise NotRead("dictionary size differs from its header")
        coded, plain, pages = chunk.num_values, 0, chunk.total_uncompressed_size - size
        bits = max(1, count - 1).bit_length() + leaf.nullable.bit_length() + leaf.lists.bit_length()
        if pages > _PAGE_HEADERS * coded * bits / 8 + _SMALL:  # more than codes: other values are there too
            behind = dictionary.body + dictionary.size
            coded, plain = _left_in_dictionary(behind, end, read) if follow else (coded, pages)
        coded = min(values, coded)
        if 0 < count != coded and count <= _MOST_ENTRIES and max(dictionary.size, size) <= _MOST_DICTIONARY:
            body = np.frombuffer(read(dictionary.body, dictionary.size, True), np.uint8)
            lengths = text_lengths(decompress_page(chunk, body, size), count)
    except (pa.ArrowException, OSError, StopIteration, *MALFORMED, struct.error) as error:
        log.debug("column %s: its dictionary is not looked at: %s", chunk.path_in_schema, error)
        return _UNKNOWN
    once, coming_back = size - _END * count, coded - count
    if not coming_back:  # each text comes once
        return DecodedSize(once + plain, once + plain)
    typical = once / max(1, count)
    if lengths is not None:
        lengths.partition(count // 2)
        typical = min(typical, _FEW_LONG * int(lengths[count // 2]))
    found = (once + int(coming_back * typical) if coming_back > 0 else int(coded * typical)) + (plain if follow else 0)
    if lengths is None:
        return DecodedSize(found, None)
    most = coded * int(lengths[count // 2 :].max()) + plain
    return DecodedSize(most if most <= _ALIKE * found + _SMALL else found, most)


def _pages(read: Read, begin: int, end: int, more: bool) -> Iterator[Page]:
    return pages_in(lambda at, most: read(at, min(most, end - at), more), begin, end - begin)


def _left_in_dictionary(begin: int, end: int, read: Read) -> tuple[int, int]:
    """Count dictionary codes, and the bytes of pages that have fallen back to plain values."""
    values = plain = 0
    for page in _pages(read, begin, end, False):
        if page.encoding == thrift.PLAIN:
            plain += page.uncompressed
        else:
            values += page.values
    return values, plain


def _stated_texts(metadata: pq.FileMetaData) -> _Stated:
    """Bytes of texts by row group and column, None unless the footer states them."""
    found: _Stated = []
    walk_struct(serialized(metadata), 0, _FOOTER, found)
    return found


def _texts_of_chunk(data: bytes, at: int, found: _Stated) -> int:
    number, at = read_varint(data, at)
    if not number & 1:  # it is not negative
        found[-1][-1] = number >> 1
    return at


_CHUNK = {key(3, STRUCT): inside({key(thrift.SIZES, STRUCT): inside({key(1, I64): _texts_of_chunk})})}
_COLUMNS = inside_each(_CHUNK, lambda found: found[-1].append(None))
_FOOTER = {key(4, LIST): inside_each({key(1, LIST): _COLUMNS}, lambda found: found.append([]))}


def count_decoded(group: StoredRowGroup, names: Sequence[str]) -> int:
    """The bytes of columns of a row group in Arrow, or slightly more; texts are counted exactly."""
    names = [name for name in names if name in group.schema.names]
    row_group = group.metadata.row_group(group.number)
    total = 0
    for position, leaf in _leaves_of(group.metadata, group.schema, names).items():
        chunk, counted = row_group.column(position), None
        if not leaf.width and _may_repeat(chunk):
            counted = sum(size for _, size in _text_parts(group, chunk))
        size = _size_of_chunk(chunk, leaf, row_group.num_rows, counted)
        assert size.bytes is not None
        total += size.bytes
    return total


def longest_rows(group: StoredRowGroup, name: str) -> float:
    """The average bytes of a row in the part of a row group with the column's longest texts."""
    chunks, leaves = group.metadata.row_group(group.number), _leaves_of(group.metadata, group.schema, [name])
    texts = [chunks.column(position) for position, leaf in leaves.items() if not leaf.width]
    return sum(max((size / rows for rows, size in _text_parts(group, chunk)), default=0.0) for chunk in texts)


def _text_parts(group: StoredRowGroup, chunk: pq.ColumnChunkMetaData) -> Iterator[tuple[int, int]]:
    """Yield rows and text bytes of consecutive parts of a chunk."""
    rows = max(1, min(_ROWS, group.rows * _BYTES // max(1, chunk.total_uncompressed_size)))
    if not chunk.has_dictionary_page:
        rows = min(rows, _OF_PREFIXES)
    path = chunk.path_in_schema
    coded = [path] if chunk.has_dictionary_page else []
    try:
        with pq.ParquetFile(
            group.path, metadata=group.metadata, read_dictionary=coded, pre_buffer=False, buffer_size=_BUFFER
        ) as file:
            for batch in file.iter_batches(rows, [group.number], [path], use_threads=False):
                yield batch.num_rows, sum(map(_texts_in, batch.columns))
    except (pa.ArrowException, OSError) as error:
        reason = f"row group {group.number} cannot be decoded ({first_line(error)})"
        raise ParquetError(group.path, reason, "write it again at the source") from error


def _texts_in(array: pa.Array) -> int:
    return sum(map(_texts_of_leaf, leaves_of(array)))


def _texts_of_leaf(array: pa.Array) -> int:
    import pyarrow.compute as pc  # slow to import, and a sync needs none of it

    if isinstance(array, pa.ExtensionArray):
        return _texts_in(array.storage)
    kind = array.type
    if pa.types.is_dictionary(kind):
        values = array.dictionary
        values = values.storage if isinstance(values, pa.ExtensionArray) else values
        lengths = pc.fill_null(pc.binary_length(_not_views(values)), 0).to_numpy(zero_copy_only=False)
        numbers = array.indices.drop_null().to_numpy()
        return int(np.bincount(numbers, minlength=len(lengths)) @ lengths.astype(np.int64)) if len(numbers) else 0
    if not len(array) or pa.types.is_null(kind):
        return 0
    return int(pc.sum(pc.binary_length(_not_views(array))).as_py() or 0)


def _not_views(texts: pa.Array) -> pa.Array:
    if pa.types.is_string_view(texts.type) or pa.types.is_binary_view(texts.type):
        return texts.cast(pa.large_binary())
    return texts
