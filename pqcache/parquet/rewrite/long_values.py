"""Long strings and binary as views into the pages they are stored in, which are not copied until they are written.

A plain page of binary values is their bytes, each with its length before it, in the file that is read as in the one
that is written. So what goes from one to the other are stretches of pages. See
https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout: a view is the length, and either up
to 12 bytes or the first four, the number of the buffer and where in it the bytes begin.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.binary_views import LONG
from pqcache.parquet.chunk_reader import UNREADABLE, Leaf, leaf_of, pages_in, text_pages, view_type, views_of
from pqcache.parquet.pages.page_format import NotRead
from pqcache.parquet.row_group_stats import first_page
from pqcache.parquet.schema_merge import is_text

log = logging.getLogger("pqcache.parquet")

_READABLE = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}  # a column's encodings, levels among them


Decoded = Callable[[int, str], Iterator[pa.Array]]
"""Decodes a column of a row group, some rows at a time, with a reader of its own: readers share how many these are."""

TakeRows = Callable[[int], pa.ChunkedArray]
"""Takes so many rows of a column, the next ones; fewer where there are no more."""


@dataclass(frozen=True)
class LongColumns:
    """Columns that are read as views, with their types as such."""

    kinds: dict[str, pa.DataType]

    def without(self, schema: pa.Schema) -> pa.Schema:
        """Return ``schema`` without these columns."""
        return pa.schema([field for field in schema if field.name not in self.kinds], schema.metadata)

    def takers(
        self, file: pq.ParquetFile, descriptor: int, groups: Sequence[int], decoded: Decoded
    ) -> dict[str, TakeRows]:
        """Return for each of the columns what takes its rows in these row groups of the open ``file``."""
        found = {}
        for name, kind in self.kinds.items():
            views = self._views(file, descriptor, groups, name, decoded)
            found[name] = _taker(views, kind)
        return found

    def _views(
        self, file: pq.ParquetFile, descriptor: int, groups: Sequence[int], name: str, decoded: Decoded
    ) -> Iterator[pa.Array]:
        """Yield the rows of a column of an open file page by page; what the pages do not show is ``decoded``."""
        kind, where = self.kinds[name], _leaf_of(file.metadata, file.schema_arrow.field(name))
        assert where is not None  # see `_is_long`
        number, leaf = where
        for group in groups:
            chunk = file.metadata.row_group(group).column(number)
            done = 0
            try:
                pages = pages_in(descriptor, first_page(chunk), chunk.total_compressed_size)
                for texts in text_pages(descriptor, chunk, leaf, pages, checked=True):
                    if done + len(texts.there) > chunk.num_values or not texts.there.all():
                        raise NotRead("nulls, or more values than the footer says")
                    yield views_of([texts], kind)
                    done += len(texts.there)
            except UNREADABLE as error:
                log.debug("column %s: pyarrow decodes the chunk from row %d on: %s", name, done, error)
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
            kinds[field.name] = view_type(field.type)
    clear = len(set(schema.names)) == len(schema) and not any("." in name for name in schema.names)
    return LongColumns(kinds) if kinds and clear and len(kinds) < len(schema) else None


def _is_long(metadata: pq.FileMetaData, own: pa.Schema, field: pa.Field) -> bool:
    where = own.get_all_field_indices(field.name)
    if len(where) != 1 or own.field(where[0]).type != field.type or any("." in name for name in own.names):
        return False
    found = _leaf_of(metadata, field)
    if found is None:
        return False
    chunks = (metadata.row_group(group).column(found[0]) for group in range(metadata.num_row_groups))
    return all(
        chunk.total_uncompressed_size >= LONG * chunk.num_values and _READABLE.issuperset(chunk.encodings)
        for chunk in chunks
    )


def _leaf_of(metadata: pq.FileMetaData, field: pa.Field) -> tuple[int, Leaf] | None:
    """Return the number and the leaf of a column of strings or binary, in a file of names without dots."""
    schema = metadata.schema
    numbers = [number for number in range(len(schema)) if schema.column(number).path == field.name]
    leaf = leaf_of(schema.column(numbers[0]), field) if len(numbers) == 1 else None
    return None if leaf is None or leaf.repetition else (numbers[0], leaf)


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
