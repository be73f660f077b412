"""Ranges of rows of a row group, read from the pages that they lie in and no others.

Parquet's readers decode a column chunk from its first page on. Where it is known which row each page begins with, the
pages of a range and the chunk's dictionary are a column chunk of their own: with a footer for it, they are a file in
memory, which pyarrow decodes. The leaves of a nested column have pages of their own, so its range begins and ends where
all of them have the beginning of a page. A page of lists that begins within a row is made to begin with one.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
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
from pqcache.parquet.pages.list_rows import PageRows, begun_with_row
from pqcache.parquet.pages.page_finder import CountedRows, PageFinder
from pqcache.parquet.pages.page_format import ChunkPart, NotRead
from pqcache.parquet.pages.page_locations import Ints, OffsetIndexes, PageLocations
from pqcache.parquet.pages.page_reader import UNREADABLE, log_decoded_by_arrow
from pqcache.parquet.row_group_stats import first_page
from pqcache.system.buffer_pool import Buffer, BufferPool

log = logging.getLogger("pqcache.parquet")

_TOGETHER = 4 << 20  # bytes of pages that are decoded by one call
_SCHEMA = b"ARROW:schema"
_TEXTS = (pa.string(), pa.binary())  # types that are read as positions in a dictionary where that is asked for
_NO_PAGE = np.zeros(0, np.uint8)


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
    def within(self) -> bool:
        """Whether the pages begin within a row."""
        return self.pages.within is not None and bool(self.pages.within[self.first])

    @property
    def head(self) -> range:
        """The bytes of the chunk's dictionary, with its header; none where these pages do not need it."""
        begin, plain = first_page(self.chunk), self.pages.plain
        needed = plain is None or not plain[self.first : self.past].all()
        return range(begin, int(self.pages.offsets[0]) if needed else begin)


class _Part(NamedTuple):
    """The pages of a column in which rows ``begin`` to ``end`` of its row group lie, the first and last in parts."""

    name: str
    begin: int
    end: int
    leaves: list[_Leaf]

    @property
    def size(self) -> int:
        return sum(leaf.size + len(leaf.head) for leaf in self.leaves)


class PagedFile:
    """Reads ranges of rows of a file whose footer is known. It remembers where pages lie; from any thread.

    ``remembered`` returns where it is kept how many rows begin in the pages of a column of a row group, if it is.
    """

    def __init__(
        self,
        path: Path,
        metadata: pq.FileMetaData,
        schema: pa.Schema,
        memory: BufferPool | None = None,
        remembered: Callable[[str, int], Ints | None] = lambda *_: None,
    ) -> None:
        tail = footer.read_local_tail(path)
        check_footer(tail.footer, str(path), tail.size)  # pages are found by what it says of their chunks
        fields, _ = thrift.decode_first(tail.footer, str(path), until=2)
        self.path, self.metadata, self.schema = path, metadata, schema
        schema_elements = footer.schema_of(fields, str(path))
        self._root = schema_elements[0]
        self._paths = [leaf.path for leaf in footer.leaves_of(schema_elements, str(path))]
        self._physical = [int(e[thrift_fields.TYPE][1]) for e in schema_elements if thrift_fields.TYPE in e]
        self._columns = _columns_of(schema_elements)
        if len(self._columns) != len(schema) or sum(len(c.leaves) for c in self._columns) != metadata.num_columns:
            self._columns = []
        alone = {c.leaves.start: f.name for f, c in zip(schema, self._columns, strict=False) if len(c.leaves) == 1}
        counting = CountedRows(alone, PageRows(memory or BufferPool()), remembered)
        self._pages = PageFinder(path, metadata, OffsetIndexes.of(tail.footer, metadata.num_columns), counting)

    def read(
        self,
        file: int,
        group: int,
        names: Sequence[str],
        low: int,
        high: int,
        memory: BufferPool,
        coded: Collection[str] = (),
    ) -> dict[str, pa.ChunkedArray]:
        """Return rows ``low <= row < high`` of columns of a row group, by name, without those that have to be decoded
        from their beginning.

        ``file`` is the open file, and ``memory`` takes its pages meanwhile. Texts that are ``coded`` are returned as
        positions in their dictionaries.
        """
        parts: dict[tuple[int, int], list[_Part]] = {}
        for name in names:
            part = self._part(file, group, name, low, high)
            if part is not None:
                parts.setdefault((part.begin, part.end), []).append(part)
        found = {}
        for together in (some for alike in parts.values() for some in _bunches(alike)):
            try:
                table = self._decoded(file, together, memory, coded)
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
        """Return the pages of a column of one leaf in which rows ``low`` to ``high`` lie, and the first row that begins
        in them.

        Its rows are ``length`` values each, or of any length for 0. None where it has to be decoded from its beginning.
        """
        part = self._part(file, group, name, low, high)
        if part is None or len(part.leaves) != 1:
            return None
        (leaf,) = part.leaves
        chunk, head, values = leaf.chunk, leaf.head, leaf.pages.values
        if values is None and not length:
            try:
                values = self._values(file, leaf)
            except UNREADABLE as error:
                log_decoded_by_arrow(chunk, error)
                return None
        of_part = ChunkPart(
            path_in_schema=chunk.path_in_schema,
            physical_type=chunk.physical_type,
            compression=chunk.compression,
            encodings=tuple(chunk.encodings),
            file_path=chunk.file_path,
            has_dictionary_page=len(head) > 0,
            dictionary_page_offset=head.start,
            data_page_offset=leaf.begin,
            num_values=(part.end - part.begin) * length
            if values is None
            else int(values[leaf.first : leaf.past].sum()),
            total_compressed_size=leaf.size + len(head),
            total_uncompressed_size=chunk.total_uncompressed_size,
            rows=part.end - part.begin - leaf.within,
            within=leaf.within,
            values_before=0 if values is None else int(values[: leaf.first].sum()),
        )
        return of_part, part.begin + leaf.within

    def _part(self, file: int, group: int, name: str, low: int, high: int) -> _Part | None:
        where = self.schema.get_all_field_indices(name) if self._columns else []
        if len(where) != 1 or low >= high:
            return None
        leaves = self._columns[where[0]].leaves
        row_group = self.metadata.row_group(group)
        try:
            located = [self._pages.of(file, group, leaf) for leaf in leaves]
        except UNREADABLE as error:
            log_decoded_by_arrow(row_group.column(leaves[0]), f"all of it, as it is not known where pages lie: {error}")
            return None
        if len(located) == 1:
            return _part_of_leaf(name, leaves[0], row_group.column(leaves[0]), located[0], low, high)
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

    def _decoded(self, file: int, parts: Sequence[_Part], memory: BufferPool, coded: Collection[str]) -> pa.Table:
        """Return all rows of the pages of columns, which are the same rows of each."""
        leaves = [leaf for part in parts for leaf in part.leaves]
        begun = {leaf.number: self._begun_with_row(file, leaf, memory) for leaf in leaves if leaf.within}
        rows, size = parts[0].end - parts[0].begin, len(footer.MAGIC) + sum(part.size for part in parts)
        data, at = memory.borrow(size + sum(map(len, begun.values()))), len(footer.MAGIC)
        chunks = []
        for leaf in leaves:
            head, first = leaf.head, begun.get(leaf.number, _NO_PAGE)
            begin = at + len(head)
            rest = begin + len(first)
            skipped = int(leaf.pages.sizes[leaf.first]) if len(first) else 0
            end = rest + leaf.size - skipped
            page_format.read_into(file, data[at:begin], head.start)
            data[begin:rest] = first
            page_format.read_into(file, data[rest:end], leaf.begin + skipped)
            values, uncompressed = self._counts(leaf, data[begin:end], len(first))
            chunks.append(self._chunk_at(leaf, at, end - begin, values, uncompressed))
            at = end
        metadata = self._metadata([part.name for part in parts], chunks, rows + 1)  # so that one too many is seen
        types = [self.schema.field(part.name).type for part in parts]
        texts = [part.name for part, kind in zip(parts, types, strict=True) if part.name in coded and kind in _TEXTS]
        reader = pa.BufferReader(pa.py_buffer(data))
        with pq.ParquetFile(reader, metadata=metadata, read_dictionary=texts or None, pre_buffer=False) as alone:
            found = [f.type.value_type if f.name in texts else f.type for f in alone.schema_arrow]
            if found != types:
                raise NotRead("columns of other types")
            table = alone.read_row_group(0, use_threads=False)
        if table.num_rows != rows:
            raise NotRead("pages of other rows than were found")
        return table

    def _values(self, file: int, leaf: _Leaf) -> Ints:
        """Return the values of each page up to the last one of a leaf, 0 of those before the first one."""
        values = np.zeros(leaf.past, np.int64)
        for number in range(leaf.first, leaf.past):
            counts, _, _ = page_format.counts_in(partial(_bytes_at, file, int(leaf.pages.offsets[number])))
            if counts is None:
                raise NotRead("an offset index that contradicts the pages")
            values[number] = counts.values
        return values

    def _begun_with_row(self, file: int, leaf: _Leaf, memory: BufferPool) -> Buffer:
        page = memory.borrow(int(leaf.pages.sizes[leaf.first]))
        page_format.read_into(file, page, leaf.begin)
        column, rows = self.metadata.schema.column(leaf.number), leaf.pages.rows
        repetition, definition = column.max_repetition_level, column.max_definition_level
        count = 1 + int(rows[leaf.first + 1] - rows[leaf.first])
        return begun_with_row(page, leaf.chunk, repetition, definition, count)

    def _chunk_at(self, leaf: _Leaf, at: int, size: int, values: int, uncompressed: int) -> Struct:
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
            head + size,
        )
        meta[thrift_fields.DATA] = (I64, at + head)
        if head:
            meta[thrift_fields.DICTIONARY] = (I64, at)
        return {2: (I64, 0), 3: (STRUCT, meta)}

    def _counts(self, leaf: _Leaf, data: Buffer, begun: int) -> tuple[int, int]:
        """Return the values of pages, and their bytes after decompression; NotRead where the headers say other rows.

        ``begun`` are the bytes of the first page if it is one that was made to begin with a row.
        """
        flat = self.metadata.schema.column(leaf.number).max_repetition_level == 0
        at = values = uncompressed = 0
        sizes = leaf.pages.sizes[leaf.first : leaf.past].tolist()
        rows = np.diff(leaf.pages.rows[leaf.first : leaf.past + 1]).tolist()
        if begun:
            sizes[0], rows[0] = begun, rows[0] + 1
        for size, of_page in zip(sizes, rows, strict=True):
            counts, length, body = page_format.counts_in(partial(_first_bytes, data[at : at + size]))
            if counts is None or length + body != size:
                raise NotRead("an offset index that contradicts the pages")
            if counts.rows not in (None, of_page) or not (
                counts.values == of_page if flat else counts.values >= of_page
            ):
                raise NotRead("pages of other rows than were found")
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


def _part_of_leaf(
    name: str, number: int, chunk: pq.ColumnChunkMetaData, pages: PageLocations, low: int, high: int
) -> _Part:
    """Return the pages of a column of one leaf in which rows ``low`` to ``high`` lie; these may begin within a row."""
    begins, within = pages.rows[:-1], pages.within
    first = int(np.searchsorted(begins, low, side="right")) - 1
    past = int(np.searchsorted(begins, high, side="left"))
    while within is not None and past < len(begins) and begins[past] == high and within[past]:
        past += 1  # it has the rest of the last row
    leaf = _Leaf(number, chunk, pages, first, past)
    return _Part(name, int(begins[first]) - leaf.within, int(pages.rows[past]), [leaf])


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


def _bytes_at(file: int, offset: int, most: int) -> bytes:
    return os.pread(file, most, offset)


def _first_bytes(data: Buffer, most: int) -> bytes:
    return data[:most].tobytes()
