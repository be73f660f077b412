"""Ranges of rows of a row group, read from the pages that they lie in and no others.

Parquet's readers decode a column chunk from its first page on. Where it is known which row each page begins with, the
pages of a range and the chunk's dictionary are a column chunk of their own: with a footer for it, they are a file in
memory, which pyarrow decodes. The leaves of a nested column have pages of their own, so its range begins and ends where
all of them have the beginning of a page.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.codecs import IN_METADATA
from pqcache.parquet.footer import footer, thrift, thrift_fields
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.footer.thrift import BINARY, I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.page_format import ChunkPart, NotRead
from pqcache.parquet.pages.page_locations import (
    OffsetIndexes,
    PageLocations,
    locations_in_headers,
    locations_in_index,
)
from pqcache.parquet.pages.page_reader import UNREADABLE, log_decoded_by_arrow
from pqcache.parquet.row_group_stats import first_page
from pqcache.system.buffer_pool import Buffer, BufferPool

log = logging.getLogger("pqcache.parquet")

_MOST_LOCATED = 4096  # column chunks whose pages are remembered
_TOGETHER = 4 << 20  # bytes of pages that are decoded by one call
_SCHEMA = b"ARROW:schema"


@dataclass(frozen=True)
class _Column:
    """A top-level column: its schema elements, and the numbers of its leaves."""

    elements: list[Struct]
    leaves: range


class _Leaf(NamedTuple):
    """The pages ``first`` to ``past`` of a leaf of a row group."""

    number: int
    chunk: pq.ColumnChunkMetaData
    pages: PageLocations
    first: int
    past: int

    @property
    def begin(self) -> int:
        return int(self.pages.offsets[self.first])

    @property
    def size(self) -> int:
        return int(self.pages.sizes[self.first : self.past].sum())

    @property
    def head(self) -> range:
        """The bytes of the chunk's dictionary, with its header."""
        return range(first_page(self.chunk), int(self.pages.offsets[0]))


class _Part(NamedTuple):
    """The pages of a column in which rows ``begin`` to ``end`` of its row group lie."""

    name: str
    begin: int
    end: int
    leaves: list[_Leaf]

    @property
    def size(self) -> int:
        return sum(leaf.size + len(leaf.head) for leaf in self.leaves)


class PagedFile:
    """Reads ranges of rows of a file whose footer is known. It remembers where pages lie; from any thread."""

    def __init__(self, path: Path, metadata: pq.FileMetaData, schema: pa.Schema) -> None:
        tail = footer.read_local_tail(path)
        check_footer(tail.footer, str(path), tail.size)  # pages are found by what it says of their chunks
        fields, _ = thrift.decode_first(tail.footer, str(path), until=2)
        self.path, self.metadata, self.schema = path, metadata, schema
        schema_elements = footer.schema_of(fields, str(path))
        self._root = schema_elements[0]
        self._paths = [leaf.path for leaf in footer.leaves_of(schema_elements, str(path))]
        self._physical = [int(e[thrift_fields.TYPE][1]) for e in schema_elements if thrift_fields.TYPE in e]
        self._columns = _columns_of(schema_elements)
        self._indexes = OffsetIndexes.of(tail.footer, metadata.num_columns)
        self._located: dict[tuple[int, int], PageLocations] = {}  # by row group and leaf
        if len(self._columns) != len(schema) or sum(len(c.leaves) for c in self._columns) != metadata.num_columns:
            self._columns = []

    def read(
        self, file: int, group: int, names: Sequence[str], low: int, high: int, memory: BufferPool
    ) -> dict[str, pa.ChunkedArray]:
        """Return rows ``low <= row < high`` of columns of a row group, by name, without those that have to be decoded
        from their beginning.

        ``file`` is the open file, and ``memory`` takes its pages meanwhile.
        """
        parts: dict[tuple[int, int], list[_Part]] = {}
        for name in names:
            part = self._part(file, group, name, low, high)
            if part is not None:
                parts.setdefault((part.begin, part.end), []).append(part)
        found = {}
        for together in (some for alike in parts.values() for some in _bunches(alike)):
            try:
                table = self._decoded(file, together, memory)
            except UNREADABLE as error:
                for part in together:
                    log_decoded_by_arrow(part.leaves[0].chunk, f"all of it, as its pages cannot be read alone: {error}")
                continue
            begin = together[0].begin
            found.update({p.name: table.column(i).slice(low - begin, high - low) for i, p in enumerate(together)})
        return found

    def chunk_part(
        self, file: int, group: int, name: str, low: int, high: int, length: int
    ) -> tuple[ChunkPart, int] | None:
        """Return the pages of a column of one leaf in which rows ``low`` to ``high`` lie, and the first row in them.

        Its rows are ``length`` values each. None where it has to be decoded from its beginning.
        """
        part = self._part(file, group, name, low, high)
        if part is None or len(part.leaves) != 1:
            return None
        (leaf,) = part.leaves
        chunk, head = leaf.chunk, leaf.head
        of_part = ChunkPart(
            path_in_schema=chunk.path_in_schema,
            physical_type=chunk.physical_type,
            compression=chunk.compression,
            encodings=tuple(chunk.encodings),
            file_path=chunk.file_path,
            has_dictionary_page=len(head) > 0,
            dictionary_page_offset=head.start,
            data_page_offset=leaf.begin,
            num_values=(part.end - part.begin) * length,
            total_compressed_size=leaf.size + len(head),
            total_uncompressed_size=chunk.total_uncompressed_size,
        )
        return of_part, part.begin

    def locations(self, file: int, group: int, leaf: int) -> PageLocations:
        """Return where the pages of a leaf of a row group lie; NotRead where that is not known."""
        found = self._located.get((group, leaf))
        if found is None:
            row_group = self.metadata.row_group(group)
            chunk, rows = row_group.column(leaf), row_group.num_rows
            if chunk.file_path or chunk.compression not in IN_METADATA:
                raise NotRead("another file or an unknown codec")
            found = self._in_index(file, group, leaf)
            if found is None:
                lists = self.metadata.schema.column(leaf).max_repetition_level > 0
                found = locations_in_headers(file, chunk, rows, lists)
            if len(self._located) >= _MOST_LOCATED:
                self._located.clear()
            self._located[group, leaf] = found
        return found

    def _in_index(self, file: int, group: int, leaf: int) -> PageLocations | None:
        index = self._indexes.read(file, group, leaf)
        if index is None:
            return None
        row_group = self.metadata.row_group(group)
        try:
            return locations_in_index(index, row_group.column(leaf), row_group.num_rows)
        except NotRead as error:  # of a file that is still arriving it may not be there yet
            log.debug("%s: %s: pages are found by their headers", self.path, error)
            return None

    def _part(self, file: int, group: int, name: str, low: int, high: int) -> _Part | None:
        where = self.schema.get_all_field_indices(name) if self._columns else []
        if len(where) != 1 or low >= high:
            return None
        leaves = self._columns[where[0]].leaves
        row_group = self.metadata.row_group(group)
        try:
            located = [self.locations(file, group, leaf) for leaf in leaves]
        except UNREADABLE as error:
            log_decoded_by_arrow(row_group.column(leaves[0]), f"all of it, as it is not known where pages lie: {error}")
            return None
        begins = located[0].rows
        for pages in located[1:]:
            begins = np.intersect1d(begins, pages.rows)
        begin = int(begins[np.searchsorted(begins, low, side="right") - 1])
        end = int(begins[np.searchsorted(begins, high, side="left")])
        found = []
        for leaf, pages in zip(leaves, located, strict=True):
            first = int(np.searchsorted(pages.rows[:-1], begin, side="left"))
            past = int(np.searchsorted(pages.rows[:-1], end, side="left"))
            found.append(_Leaf(leaf, row_group.column(leaf), pages, first, past))
        return _Part(name, begin, end, found)

    def _decoded(self, file: int, parts: Sequence[_Part], memory: BufferPool) -> pa.Table:
        """Return all rows of the pages of columns, which are the same rows of each."""
        rows, size = parts[0].end - parts[0].begin, len(footer.MAGIC) + sum(part.size for part in parts)
        data, at = memory.borrow(size), len(footer.MAGIC)
        chunks = []
        for leaf in (leaf for part in parts for leaf in part.leaves):
            head = leaf.head
            begin = at + len(head)
            page_format.read_into(file, data[at:begin], head.start)
            page_format.read_into(file, data[begin : begin + leaf.size], leaf.begin)
            values, uncompressed = self._counts(leaf, data[begin : begin + leaf.size])
            chunks.append(self._chunk_at(leaf, at, values, uncompressed))
            at = begin + leaf.size
        metadata = self._metadata([part.name for part in parts], chunks, rows)
        with pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)), metadata=metadata, pre_buffer=False) as alone:
            expected = [self.schema.field(part.name).type for part in parts]
            if alone.schema_arrow.types != expected:
                raise NotRead("columns of other types")
            table = alone.read_row_group(0, use_threads=False)
        if table.num_rows != rows:
            raise NotRead("pages of another number of rows than the offset index says")
        return table

    def _chunk_at(self, leaf: _Leaf, at: int, values: int, uncompressed: int) -> Struct:
        """Return the column chunk of the pages of a leaf that lie, with the dictionary before them, at byte ``at``."""
        chunk, head = leaf.chunk, len(leaf.head)
        encodings = [thrift_fields.PLAIN, thrift_fields.RLE] + ([thrift_fields.RLE_DICTIONARY] if head else [])
        meta = thrift_fields.column_metadata(
            self._physical[leaf.number],
            self._paths[leaf.number],
            IN_METADATA[chunk.compression].number,
            encodings,
            values,
            uncompressed + head,
            head + leaf.size,
        )
        meta[thrift_fields.DATA] = (I64, at + head)
        if head:
            meta[thrift_fields.DICTIONARY] = (I64, at)
        return {2: (I64, 0), 3: (STRUCT, meta)}

    def _counts(self, leaf: _Leaf, data: Buffer) -> tuple[int, int]:
        """Return the values of pages, and their bytes after decompression; NotRead where the headers say other rows."""
        flat = self.metadata.schema.column(leaf.number).max_repetition_level == 0
        at = values = uncompressed = 0
        sizes = leaf.pages.sizes[leaf.first : leaf.past].tolist()
        rows = np.diff(leaf.pages.rows[leaf.first : leaf.past + 1]).tolist()
        for size, of_page in zip(sizes, rows, strict=True):
            counts, length, body = page_format.counts_in(partial(_first_bytes, data[at : at + size]))
            if counts is None or length + body != size:
                raise NotRead("an offset index that contradicts the pages")
            if counts.rows not in (None, of_page) or not (
                counts.values == of_page if flat else counts.values >= of_page
            ):
                raise NotRead("pages of other rows than the offset index says")
            values, uncompressed, at = values + counts.values, uncompressed + counts.uncompressed + length, at + size
        return values, uncompressed

    def _metadata(self, names: Sequence[str], chunks: Sequence[Struct], rows: int) -> pq.FileMetaData:
        """Return the footer of a file of one row group with these columns."""
        schema: list[Struct] = [self._root | {5: (I32, len(names))}]
        fields = []
        for name in names:
            number = self.schema.get_field_index(name)
            schema += self._columns[number].elements
            fields.append(self.schema.field(number))
        total = sum(chunk[3][1][thrift_fields.UNCOMPRESSED][1] for chunk in chunks)
        group: Struct = {1: (LIST, Items(STRUCT, list(chunks))), 2: (I64, total), 3: (I64, rows)}
        writer = (self.metadata.created_by or "").encode()  # decoders know what some writers did wrong
        template: Struct = {1: (I32, 2)} | ({6: (BINARY, writer)} if writer else {})
        arrow = base64.b64encode(pa.schema(fields).serialize().to_pybytes())
        end = footer.footer_and_magic(footer.make_footer(template, schema, [group], rows, {_SCHEMA: arrow}))
        return pq.read_metadata(pa.BufferReader(footer.MAGIC + end))


def _columns_of(schema: list[Struct]) -> list[_Column]:
    """Return the top-level columns of a schema; none where it has elements that are neither leaves nor groups."""
    found, first = [], 0
    for elements in footer.trees(schema):
        if any((5 in element and element[5][1] > 0) == (thrift_fields.TYPE in element) for element in elements):
            return []
        count = sum(thrift_fields.TYPE in element for element in elements)
        found.append(_Column(elements, range(first, first + count)))
        first += count
    return found


def _bunches(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield columns of the same rows in turn, a few at a time, so that few pages are in memory at once."""
    some: list[_Part] = []
    size = 0
    for part in parts:
        if some and size + part.size > _TOGETHER:
            yield some
            some, size = [], 0
        some.append(part)
        size += part.size
    if some:
        yield some


def _first_bytes(data: Buffer, most: int) -> bytes:
    return data[:most].tobytes()
