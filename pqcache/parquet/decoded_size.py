"""What a row group takes in memory once it is decoded, found out without decoding its texts.

The footer counts the values of each leaf, and so gives the size of numbers. A text in a dictionary is stored once and
decoded for each of its values: it is the numbers in the dictionary that are read, and never more bytes than are stored.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.parquet.footer import thrift_fields
from pqcache.parquet.footer.footer import columns_of, row_groups_of
from pqcache.parquet.footer.thrift import I64, STRUCT, Struct, decode
from pqcache.parquet.nested import leaves_of
from pqcache.parquet.pages import page_format
from pqcache.parquet.row_group_stats import top_level_names
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.parquet")

_ONCE = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}  # encodings that repeat no value
_ROWS, _BYTES = 1 << 16, 8 << 20  # of a batch, at most
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_END = 4  # bytes that say where a text or a list ends
_CODED = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_MOST_ENTRIES = 1 << 17  # of a dictionary that is looked at here
_LITTLE = 1 << 12  # bytes, whose number need not be found out more exactly
_RANGES = 64
_HARDLY = 1.25
_SIZES, _TEXTS = 16, 1  # fields of a chunk's metadata: its size statistics, and in these the bytes of its texts
_MOST_FOOTER = 64 << 10  # bytes
_BUFFER = 1 << 16  # bytes of a chunk that are read ahead
_OF_PREFIXES = 256  # rows of a batch where values are made of parts of others


TextsStated = list[list[int | None]]


class StoredRowGroup(NamedTuple):
    """A row group of a file whose footer is known: its ``number`` there, and the file's columns as Arrow has them."""

    path: Path
    metadata: pq.FileMetaData
    schema: pa.Schema
    number: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.metadata.row_group(self.number).num_rows)


def decoded_bytes(group: StoredRowGroup, names: Sequence[str]) -> dict[str, int]:
    """Return how many bytes each of the columns of a row group takes in Arrow, or somewhat more."""
    total = dict.fromkeys(names, 0)
    with _descriptor(group.path) as descriptor:
        for name, number, chunk in _chunks(group, names):
            total[name] += _fixed(group, number, chunk)
            if chunk.physical_type == "BYTE_ARRAY":
                if not _repeats(chunk):
                    total[name] += chunk.total_uncompressed_size
                elif (bound := _bound_of_texts(descriptor, chunk, by_page=True)) is not None and bound.is_close:
                    total[name] += bound.bytes
                else:
                    total[name] += sum(size for _, size in _text_parts(descriptor, group, number, chunk, _ROWS))
    return total


def stated_bytes(group: StoredRowGroup, texts: TextsStated, names: Sequence[str]) -> dict[str, int]:
    """Return how many bytes columns take in Arrow, as far as the footer says so; others are left out.

    Writers of recent years say how long all texts of a chunk are together: ``texts`` are what `texts_stated` returns.
    """
    total, unknown = dict.fromkeys(names, 0), set[str]()
    for name, number, chunk in _chunks(group, names):
        total[name] += _fixed(group, number, chunk)
        if chunk.physical_type == "BYTE_ARRAY" and not _repeats(chunk):
            total[name] += chunk.total_uncompressed_size
        elif chunk.physical_type == "BYTE_ARRAY":
            size = texts[group.number][number] if texts else None
            total[name] += size or 0
            unknown |= {name} if size is None else set()
    return {name: size for name, size in total.items() if name not in unknown}


def texts_stated(footer: bytes, name: str) -> TextsStated:
    """Return the bytes of all texts of each column chunk of each row group, None where the footer does not say.

    Of a long footer nothing is returned, as to decode it takes longer than to look at dictionaries.
    """
    if len(footer) > _MOST_FOOTER:
        return []
    groups = (columns_of(group, name) for group in row_groups_of(decode(footer, name), name))
    return [[_texts_of_chunk(column) for column in columns] for columns in groups]


def _texts_of_chunk(column: Struct) -> int | None:
    kind, sizes = column.get(_SIZES, (0, None))
    kind, size = sizes.get(_TEXTS, (0, None)) if kind == STRUCT and sizes is not None else (0, None)
    return size if kind == I64 and isinstance(size, int) and size >= 0 else None


def most_decoded_bytes(group: StoredRowGroup, names: Sequence[str]) -> int | None:
    """Return what columns of a row group take in Arrow at most, from footer and dictionaries; None where these differ.

    This is more than `decoded_bytes` where few values are long, and takes less time.
    """
    total = 0
    with _descriptor(group.path) as descriptor:
        for _, number, chunk in _chunks(group, names):
            total += _fixed(group, number, chunk)
            if chunk.physical_type == "BYTE_ARRAY":
                if not _repeats(chunk):
                    total += chunk.total_uncompressed_size
                elif (bound := _bound_of_texts(descriptor, chunk)) is not None:
                    total += bound.bytes
                else:
                    return None
    return total


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Bound(NamedTuple):
    """How many ``bytes`` texts take at most, and whether that is close to what they take.

    ``longest`` and ``average`` are the lengths of the texts in the dictionary.
    """

    bytes: int
    is_close: bool
    longest: int
    average: float


def _bound_of_texts(descriptor: int, chunk: pq.ColumnChunkMetaData, by_page: bool = False) -> _Bound | None:
    """Return what the texts of a chunk with a dictionary take if each is its longest; None for other encodings.

    What is not in the dictionary takes no more than is stored, which is counted page by page if asked for.
    """
    if not chunk.has_dictionary_page or not (_ONCE | _CODED).issuperset(chunk.encodings):
        return None
    try:
        pages = page_format.page_bodies(descriptor, chunk)
        header, at, stored = next(pages)
        count = header[page_format.DICTIONARY][1][page_format.COUNT][1]
        if not 0 <= count <= _MOST_ENTRIES:
            return None
        body = np.frombuffer(os.pread(descriptor, stored, at), np.uint8)
        data = page_format.decompress_page(chunk, body, header[page_format.UNCOMPRESSED][1])
        longest = _longest(data.tobytes(), count)
        coded, plain = _coded_values(pages, chunk) if by_page else (chunk.num_values, chunk.total_uncompressed_size)
    except (pa.ArrowException, page_format.NotRead, LookupError, StopIteration, ValueError, struct.error) as error:
        log.debug("column %s: its dictionary is not looked at: %s", chunk.path_in_schema, error)
        return None
    statistics = chunk.statistics
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else chunk.num_values
    bound, average = coded * longest + plain, (len(data) - _END * count) / max(1, count)
    close = bound - _LITTLE <= _HARDLY * (max(0, coded - nulls) * average + plain)
    return _Bound(bound, close, longest, average)


def _coded_values(pages: Iterator[tuple[Struct, int, int]], chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return how many values of a chunk are in its dictionary, and the bytes of its other pages."""
    found = coded = plain = 0
    for page in _data_pages(pages):
        found += page.values
        if page.encoding == thrift_fields.PLAIN:
            plain += page.bytes
        else:
            coded += page.values
    if found != chunk.num_values:
        raise page_format.NotRead("another number of values than the footer says")
    return coded, plain


def _longest(data: bytes, count: int) -> int:
    """Return the length of the longest of the ``count`` texts of a dictionary; each has its length in front."""
    at = longest = 0
    length_at = struct.Struct("<I").unpack_from
    for _ in range(count):
        length = length_at(data, at)[0]
        at += _END + length
        if length > longest:
            longest = length
    if at != len(data):
        raise page_format.NotRead("values that are not all of their page")
    return int(longest)


def densest_rows(group: StoredRowGroup, names: Sequence[str]) -> float:
    """Return how many times as long as the average row the longest texts next to each other are.

    These are of a 64th of the row group; 1 where they are hardly longer.
    """
    ranges = np.linspace(0, 1, min(_RANGES, max(1, group.rows)) + 1)
    sizes = np.zeros(len(ranges) - 1)
    with _descriptor(group.path) as descriptor:
        for _, number, chunk in _chunks(group, names):
            if chunk.physical_type == "BYTE_ARRAY":
                sizes += _over(ranges, _text_parts(descriptor, group, number, chunk, max(1, group.rows // _RANGES)))
    times = float(sizes.max() / sizes.mean()) if sizes.any() else 1.0
    return times if times > _HARDLY else 1.0


def _text_parts(
    descriptor: int, group: StoredRowGroup, number: int, chunk: pq.ColumnChunkMetaData, rows: int
) -> list[tuple[int, int]]:
    """Return the count and the bytes of consecutive parts of a chunk of texts, in rows or in values.

    The headers of pages say it of those that hold the texts themselves. Of pages that hold numbers of a dictionary the
    numbers are read, some ``rows`` at a time, unless its texts are about equally long.
    """
    try:
        pages = list(_data_pages(page_format.page_bodies(descriptor, chunk)))
    except (page_format.NotRead, LookupError, TypeError) as error:
        log.debug(
            "%s: row group %d: %s is decoded to find long texts: %s",
            group.path,
            group.number,
            chunk.path_in_schema,
            error,
        )
        return list(_text_bytes(group, chunk, rows))
    if _ONCE.issuperset(chunk.encodings) and not chunk.has_dictionary_page:
        return [(page.values, page.bytes) for page in pages]
    bound = _bound_of_texts(descriptor, chunk)
    coded = [page.encoding != thrift_fields.PLAIN for page in pages]
    statistics = chunk.statistics
    without_nulls = statistics is not None and statistics.has_null_count and not statistics.null_count
    if bound is not None and without_nulls and bound.longest <= _HARDLY * bound.average:
        sizes = [bound.longest * page.values if of_it else page.bytes for page, of_it in zip(pages, coded, strict=True)]
        return [(page.values, size) for page, size in zip(pages, sizes, strict=True)]
    first_plain = coded.index(False) if False in coded else len(pages)
    flat = group.metadata.schema.column(number).max_repetition_level == 0
    if not flat or any(coded[first_plain:]) or not chunk.has_dictionary_page:
        return list(_text_bytes(group, chunk, rows))
    until = sum(page.values for page in pages[:first_plain])
    found = list(_text_bytes(group, chunk, rows, until))
    return found + [(page.values, page.bytes) for page in pages[first_plain:]]


def _over(ranges: npt.NDArray[np.float64], parts: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Return the bytes in each of the ranges, given the count and the bytes of consecutive parts."""
    ends = np.cumsum([(0, 0), *parts], axis=0, dtype=np.float64)
    sizes: npt.NDArray[np.float64] = np.diff(np.interp(ranges * max(1.0, ends[-1, 0]), ends[:, 0], ends[:, 1]))
    return sizes


class _DataPage(NamedTuple):
    """What the header of a page says: its number of values, its ``bytes`` after decompression, and its encoding."""

    values: int
    bytes: int
    encoding: int


def _data_pages(pages: Iterator[tuple[Struct, int, int]]) -> Iterator[_DataPage]:
    """Return those of a chunk's pages that hold its values."""
    for header, _, _ in pages:
        for kind, encoding in (
            (page_format.DATA, page_format.ENCODING),
            (page_format.DATA_V2, page_format.ENCODING_V2),
        ):
            if kind in header:
                about = header[kind][1]
                yield _DataPage(about[page_format.COUNT][1], header[page_format.UNCOMPRESSED][1], about[encoding][1])
                break


def _chunks(group: StoredRowGroup, names: Sequence[str]) -> Iterator[tuple[str, int, pq.ColumnChunkMetaData]]:
    row_group, wanted = group.metadata.row_group(group.number), frozenset(names)
    for number, top in enumerate(top_level_names(group.metadata, group.schema)):
        if top in wanted:
            yield top, number, row_group.column(number)


def _fixed(group: StoredRowGroup, number: int, chunk: pq.ColumnChunkMetaData) -> int:
    """Return the bytes of a chunk's values but for texts, of where texts and lists end, and of which are null."""
    kind, leaf, values = chunk.physical_type, group.metadata.schema.column(number), chunk.num_values
    width = leaf.length if kind == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(kind, _END)
    ends = group.rows + (leaf.max_repetition_level - 1) * values if leaf.max_repetition_level else 0
    return int(values * width + ends * _END + leaf.max_definition_level * (values // 8 + 1))


def _repeats(chunk: pq.ColumnChunkMetaData) -> bool:
    """Return whether values of texts may be stored once and decoded more than once, in whole or in part."""
    return bool(chunk.has_dictionary_page or not _ONCE.issuperset(chunk.encodings))


def _text_bytes(
    group: StoredRowGroup, chunk: pq.ColumnChunkMetaData, rows: int, until: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the rows of parts of a row group, at most ``rows`` each, and the bytes of the texts of one of its chunks.

    With ``until`` these are only so many rows.
    """
    left = group.rows if until is None else until
    rows = max(1, min(rows, group.rows * _BYTES // max(1, chunk.total_uncompressed_size)))
    if not chunk.has_dictionary_page:
        rows = min(rows, _OF_PREFIXES)
    path = chunk.path_in_schema
    coded = [path] if chunk.has_dictionary_page else []
    with pq.ParquetFile(
        group.path, metadata=group.metadata, read_dictionary=coded, pre_buffer=False, buffer_size=_BUFFER
    ) as file:
        for batch in file.iter_batches(rows, [group.number], [path], use_threads=False) if left else ():
            batch = batch.slice(0, left)
            yield batch.num_rows, sum(map(_texts, batch.columns))
            left -= batch.num_rows
            if left <= 0:
                break


def _texts(array: pa.Array) -> int:
    return sum(map(_texts_of_leaf, leaves_of(array)))


def _texts_of_leaf(array: pa.Array) -> int:
    if isinstance(array, pa.ExtensionArray):
        return _texts(array.storage)
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
    """Return texts or binary as Arrow's functions take them."""
    if pa.types.is_string_view(texts.type) or pa.types.is_binary_view(texts.type):
        return texts.cast(pa.large_binary())
    return texts
