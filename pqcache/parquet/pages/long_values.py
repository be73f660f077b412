"""Long strings and binary as views into the pages they are stored in, which are not copied until they are written.

A plain page of binary values is their bytes, each with its length before it, in the file that is read as in the one
that is written. So what goes from one to the other are stretches of pages. See
https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout: a view is the length, and either up
to 12 bytes or the first four, the number of the buffer and where in it the bytes begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.parquet.binary_views import INLINE, LONG
from pqcache.parquet.pages.byte_arrays import ByteArrays
from pqcache.parquet.pages.leaf_column import LeafColumn, leaf_of
from pqcache.parquet.pages.page_reader import UNREADABLE, Reader, log_decoded_by_arrow
from pqcache.parquet.schema_merge import is_text
from pqcache.system.buffer_pool import BufferPool

_READABLE = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}  # a column's encodings, levels among them


def views_of(rows: ByteArrays, kind: pa.DataType | None = None) -> pa.Array:
    """Return rows of bytes as views, binary or of ``kind``, into the pages they lie in."""
    count = len(rows.begins)
    views = np.zeros((count, 16), np.uint8)
    views[:, :4] = rows.lengths.astype("<i4").view(np.uint8).reshape(-1, 4)
    views[:, 12:] = rows.begins.astype("<i4").view(np.uint8).reshape(-1, 4)
    ends = [first for first, _ in rows.pages[1:]] + [count]
    for number, ((first, data), end) in enumerate(zip(rows.pages, ends, strict=True)):
        views[first:end, 8:12] = np.array([number], "<i4").view(np.uint8)
        begins, lengths = rows.begins[first:end], rows.lengths[first:end]
        heads = begins[:, None] + np.arange(4)
        views[first:end, 4:8] = data.take(heads, mode="clip")
        for row in np.flatnonzero(lengths <= INLINE):
            begin, length = int(begins[row]), int(lengths[row])
            views[first + row, 4:] = 0
            views[first + row, 4 : 4 + length] = data[begin : begin + length]
    pages = [pa.py_buffer(data) for _, data in rows.pages]
    return pa.Array.from_buffers(kind or pa.binary_view(), count, [None, pa.py_buffer(views), *pages])


Decoded = Callable[[int, str], Iterator[pa.Array]]
"""Decodes a column of a row group, some rows at a time, with a reader of its own: readers share how many these are."""

TakeRows = Callable[[int], pa.ChunkedArray]
"""Takes so many rows of a column, the next ones; fewer where there are no more."""


@dataclass(frozen=True)
class LongColumns:
    """Columns that are read as views, with their types as such, and what reads them."""

    kinds: dict[str, pa.DataType]
    reader: Reader

    def without(self, schema: pa.Schema) -> pa.Schema:
        """Return ``schema`` without these columns."""
        return pa.schema([field for field in schema if field.name not in self.kinds], schema.metadata)

    def takers(
        self, file: pq.ParquetFile, descriptor: int, groups: Sequence[int], decoded: Decoded
    ) -> dict[str, TakeRows]:
        """Return for each of the columns what takes its rows in these row groups of the open ``file``."""
        found = {}
        for name, kind in self.kinds.items():
            leaf = leaf_of(file.metadata, name, file.schema_arrow.field(name).type)
            assert leaf is not None  # see `_is_long`
            views = self._views(file.metadata, descriptor, groups, leaf, name, decoded)
            found[name] = _taker(views, kind)
        return found

    def _views(
        self,
        metadata: pq.FileMetaData,
        descriptor: int,
        groups: Sequence[int],
        leaf: LeafColumn,
        name: str,
        decoded: Decoded,
    ) -> Iterator[pa.Array]:
        """Yield the rows of a column of an open file page by page; what the pages do not show is ``decoded``."""
        kind = self.kinds[name]
        for group in groups:
            chunk = metadata.row_group(group).column(leaf.number)
            done = 0
            try:
                for page in self.reader.byte_pages(descriptor, chunk, leaf):
                    yield views_of(page, kind)
                    done += len(page.begins)
            except UNREADABLE as error:
                log_decoded_by_arrow(chunk, error)
            if done == chunk.num_values:
                continue
            for array in decoded(group, name):
                skipped = min(done, len(array))
                done -= skipped
                if skipped < len(array):
                    yield array[skipped:].cast(kind)


def long_columns_of(files: Sequence[tuple[pq.FileMetaData, pa.Schema]], schema: pa.Schema) -> LongColumns | None:
    """Return the columns of ``schema`` worth reading as views: they hold long values in all row groups of ``files``.

    There have to be other columns, which say how many rows there are.
    """
    kinds = {}
    for field in schema:
        if is_text(field.type) and all(_is_long(metadata, own, field) for metadata, own in files):
            text = pt.is_string(field.type) or pt.is_large_string(field.type)
            kinds[field.name] = pa.string_view() if text else pa.binary_view()
    clear = len(set(schema.names)) == len(schema) and not any("." in name for name in schema.names)
    return (
        LongColumns(kinds, Reader(BufferPool(), checked=True)) if kinds and clear and len(kinds) < len(schema) else None
    )


def _is_long(metadata: pq.FileMetaData, own: pa.Schema, field: pa.Field) -> bool:
    where = own.get_all_field_indices(field.name)
    if len(where) != 1 or own.field(where[0]).type != field.type or any("." in name for name in own.names):
        return False
    leaf = leaf_of(metadata, field.name, field.type)
    if leaf is None or leaf.repetition:
        return False
    chunks = (metadata.row_group(group).column(leaf.number) for group in range(metadata.num_row_groups))
    return all(
        chunk.total_uncompressed_size >= LONG * chunk.num_values and _READABLE.issuperset(chunk.encodings)
        for chunk in chunks
    )


def _taker(arrays: Iterator[pa.Array], kind: pa.DataType) -> TakeRows:
    """Return what takes so many rows, the next ones, off ``arrays``; fewer where there are no more."""
    left: deque[pa.Array] = deque()

    def take(count: int) -> pa.ChunkedArray:
        found: list[pa.Array] = []
        while count and (array := left.popleft() if left else next(arrays, None)) is not None:
            found.append(array[:count])
            if len(array) > count:
                left.append(array[count:])
            count -= len(found[-1])
        return pa.chunked_array(found, kind)

    return take
