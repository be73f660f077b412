"""Reads columns straight from their pages where that is faster than pyarrow: lists, and long rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError
from pqcache.parquet.footer.footer import read_local_tail
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.pages.byte_arrays import views_of
from pqcache.parquet.pages.leaf_column import LeafColumn, leaf_of
from pqcache.parquet.pages.page_format import Chunk, MoreValues
from pqcache.parquet.pages.page_reader import Lists, Reader, has_nulls, log_decoded_by_arrow
from pqcache.parquet.pages.row_ranges import PagedFile
from pqcache.parquet.schema_merge import is_text
from pqcache.reader.columns.batch_layout import LONG, is_long
from pqcache.reader.columns.coded_texts import are_coded
from pqcache.reader.columns.column_data import MORE_KEPT, ColumnData, as_rows, cut, from_arrow
from pqcache.reader.columns.column_forms import ColumnForm, storage_type
from pqcache.system.buffer_pool import Arena, BufferPool
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.reader")

Leaves = list[tuple[ColumnForm, LeafColumn]]


class PagedRows(NamedTuple):
    """Rows ``low <= row < high`` of a row group of a file whose pages are known."""

    file: PagedFile
    low: int
    high: int


class PageColumns:
    """Reads columns of row groups from their pages, into ``memory``; a column it cannot read so is left to pyarrow."""

    def __init__(self, forms: Sequence[ColumnForm], memory: BufferPool) -> None:
        self._forms = [form for form in forms if _is_faster(form)]
        self._reader = Reader(memory)
        self._leaves: dict[int, Leaves] = {}  # by file; without a lock, as the process may fork
        self.long = sum(form.kind == "fixed" for form in self._forms)  # columns whose rows are all long

    def clear(self) -> None:
        """Forget what is known of files."""
        self._leaves.clear()

    def read(
        self,
        file: pq.ParquetFile,
        file_number: int,
        path: Path,
        row_group: int,
        arenas: Mapping[str, Arena],
        piece: PagedRows | None = None,
    ) -> tuple[dict[str, ColumnData], int]:
        """Return columns of a row group, all of its rows, by name; long rows in ``arenas``, which are by column.

        With ``piece`` these are only its rows. Beside the columns is the number of those with long rows, all of which
        would be read so if their pages were others.
        """
        leaves = self._leaves_of(file, file_number, path)
        if not leaves:
            return {}, self.long
        found: dict[str, ColumnData] = {}
        long = self.long
        metadata = file.metadata.row_group(row_group)
        descriptor = open_regular(path)
        try:
            for form, leaf in leaves:
                chunk = metadata.column(leaf.number)
                if form.kind != "fixed" and not _are_long(form, chunk, metadata.num_rows):
                    continue  # short rows are decoded faster by pyarrow
                long += form.kind != "fixed"
                try:
                    if piece is None:
                        column = self._column(descriptor, chunk, form, leaf, arenas.get(form.name))
                    else:
                        column = self._column_of_piece(descriptor, chunk, row_group, form, leaf, piece)
                except MoreValues as error:  # of which pyarrow would return as many as the footer says
                    reason = f"row group {row_group} has {error} in column {form.name!r}"
                    raise ParquetError(path, reason, "it is damaged: fetch or write it again") from error
                if column is not None:
                    found[form.name] = column
                else:
                    log.debug("%s: row group %d: column %r is read by pyarrow: %s", path, row_group, form.name, _PAGES)
        finally:
            os.close(descriptor)
        return found, long

    def coded_texts(self, file: pq.ParquetFile, file_number: int, path: Path, row_group: int) -> frozenset[str]:
        """Return the columns of a row group whose texts are all, or nearly all, in a dictionary; see `decoded`."""
        texts = [(form.name, leaf) for form, leaf in self._leaves_of(file, file_number, path) if _is_text(form)]
        if not texts:
            return frozenset()
        metadata = file.metadata.row_group(row_group)
        return frozenset(name for name, leaf in texts if are_coded(metadata.column(leaf.number)))

    def _column_of_piece(
        self,
        descriptor: int,
        chunk: pq.ColumnChunkMetaData,
        row_group: int,
        form: ColumnForm,
        leaf: LeafColumn,
        piece: PagedRows,
    ) -> ColumnData | None:
        """Return the rows of a piece, read from the pages that they lie in; None where that cannot be."""
        file, low, high = piece
        of_lists = _is_list(form)
        if of_lists and has_nulls(chunk):
            log_decoded_by_arrow(chunk, "nulls, or empty lists")
            return None
        found = file.chunk_part(descriptor, row_group, form.name, low, high, 0 if of_lists else _list_length(form) or 1)
        if found is None:
            return None
        part, first = found
        try:
            column = self._column(descriptor, part, form, leaf, None)
        except MoreValues as error:  # than the offset index says
            log_decoded_by_arrow(part, error)
            return None
        if of_lists and column is not None and len(column) != part.rows:
            log_decoded_by_arrow(part, "pages of other rows than were found")
            return None
        if column is None or first + len(column) < high:
            return None
        return _cut_piece(column, low - first, high - first, self._reader.memory)

    def _column(
        self, descriptor: int, chunk: Chunk, form: ColumnForm, leaf: LeafColumn, into: Arena | None
    ) -> ColumnData | None:
        if _is_list(form):
            lists = self._reader.lists(descriptor, chunk, leaf)
            array = None if lists is None else _as_arrow(lists, storage_type(form.type))
            return None if array is None else from_arrow(array, form)
        if form.kind == "bytes":
            arrays = self._reader.byte_arrays(descriptor, chunk, leaf)
            return None if arrays is None else ColumnData(form, views_of(arrays))
        values = self._reader.values(descriptor, chunk, leaf, _list_length(form), into)
        return None if values is None or values.nbytes % form.width else ColumnData(form, as_rows(values, form.width))

    def _leaves_of(self, file: pq.ParquetFile, file_number: int, path: Path) -> Leaves:
        """Return the columns of a file that can be read from their pages."""
        leaves = self._leaves.get(file_number)
        if leaves is None:
            leaves = []
            schema = file.schema_arrow
            for form in self._forms:
                if len(schema.get_all_field_indices(form.name)) != 1:
                    continue
                kind = schema.field(form.name).type
                kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
                expected = storage_type(form.type) if form.stored is None else pa.binary(form.stored.width)
                leaf = leaf_of(file.metadata, form.name, kind) if kind == expected else None
                if leaf is None:
                    log.debug("%s: column %r is read by pyarrow: it is stored as %s", path, form.name, kind)
                else:
                    leaves.append((form, leaf))
            if leaves:  # pages are found by what the footer says of their chunks
                tail = read_local_tail(path)
                check_footer(tail.footer, str(path), tail.size)
            self._leaves[file_number] = leaves
        return leaves


_LONG_LIST = 16  # values; the levels of shorter lists cost more than the rest
MANY_VALUES = 100_000  # of a column chunk of lists; what is done once for fewer takes longer than to decode them
_PAGES = "its pages have an encoding, a codec or nulls that are not read here"


def _is_faster(form: ColumnForm) -> bool:
    """Return whether a column may be read faster from its pages than by pyarrow."""
    return bool(form.dense or _is_text(form) or _is_list(form) or is_long(form))


def _is_text(form: ColumnForm) -> bool:
    return bool(is_text(storage_type(form.type)))


def _is_list(form: ColumnForm) -> bool:
    """Return whether a column has lists of any length with items of ``form.width`` bytes, which are stored as such."""
    return form.kind != "fixed" and form.width > 0 and form.stored is None and not _is_text(form)


def _are_long(form: ColumnForm, chunk: pq.ColumnChunkMetaData, rows: int) -> bool:
    """Return whether texts or lists are long enough on average, and lists many, to be read faster from their pages."""
    if _is_list(form):
        return bool(chunk.num_values >= max(MANY_VALUES, _LONG_LIST * rows))
    return bool(chunk.total_uncompressed_size >= LONG * chunk.num_values)


def _cut_piece(column: ColumnData, start: int, stop: int, memory: BufferPool) -> ColumnData:
    """Return a range of rows; those of one width in ``memory`` where many more would remain in memory with them."""
    piece = cut(column, start, stop)
    if not isinstance(piece.values, np.ndarray) or len(column) <= MORE_KEPT * len(piece):
        return piece
    values = memory.borrow(piece.values.nbytes).view(piece.values.dtype).reshape(piece.values.shape)
    np.copyto(values, piece.values)
    return ColumnData(piece.form, values, piece.valid)


def _as_arrow(lists: Lists, kind: pa.DataType) -> pa.Array | None:
    """Return lists as an Arrow array of type ``kind``; None where its offsets are too small for them."""
    offsets = lists.ends if pa.types.is_large_list(kind) else lists.ends.astype(np.int32)
    if offsets[-1] != len(lists.values):
        return None
    items = pa.Array.from_buffers(kind.value_type, len(lists.values), [None, pa.py_buffer(lists.values)])
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[items])


def _list_length(form: ColumnForm) -> int:
    """Return the length of a column's lists as they are stored; 0 for what is not stored as lists, or of any length."""
    if form.stored is not None:
        return 0
    kind = storage_type(form.type)
    return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else form.dense
