"""Source files of one partition directory as a stream of batches, decoded ahead of their use.

Memory is bounded by the size of a batch, not by the sources' row groups: those are read some rows at a time.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.arrow_sizes import Floats, Widths, arrow_bytes, least_width, widths_of
from pqcache.parquet.binary_views import LONG
from pqcache.parquet.chunk_reader import UNREADABLE, Leaf, leaf_of, pages_in, text_pages, view_type, views_of
from pqcache.parquet.dense_columns import DenseChange, change_dense, dense_changes
from pqcache.parquet.footer import footer
from pqcache.parquet.footer.source_footer import SourceFooter, one_of_each_schema, open_parquet
from pqcache.parquet.pages.page_format import NotRead
from pqcache.parquet.row_group_stats import first_page
from pqcache.parquet.schema_merge import cast_to_schema, is_text
from pqcache.system.disk import open_regular

Numbers = range | npt.NDArray[np.int64]

_MAX_RATIO = 4.0
_TINY = 8  # to a batch


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Some rows of the source files, most often consecutive ones.

    ``weights`` are the bytes that each top-level column is estimated to take on disk; ``numbers`` counts each row
    through all source files; ``done`` is how many bytes of the sources are behind the reader after this batch.
    """

    table: pa.Table
    ratios: Floats
    weights: Floats
    nbytes: int
    numbers: Numbers
    done: int
    widths: Widths


def row_batch(table: pa.Table, ratios: Floats, numbers: Numbers, done: int, widths: Widths | None = None) -> RowBatch:
    """Return ``table`` as a batch, weighed."""
    widths = widths or widths_of(table.schema)
    sizes = arrow_bytes(table, widths)
    weights: Floats = sizes * ratios + table.num_rows / 8
    return RowBatch(
        table=table, ratios=ratios, weights=weights, nbytes=int(sizes.sum()), numbers=numbers, done=done, widths=widths
    )


@dataclass(frozen=True, kw_only=True)
class RowGroupRange:
    """Row groups of a source that are read in one go.

    ``first`` is the number of their first row in the file, and ``before`` how many rows and bytes other files have
    before this one.
    """

    source: SourceFooter
    groups: list[int]
    first: int
    before: tuple[int, int]
    rows: int
    size: int


def row_group_ranges(sources: Sequence[SourceFooter], target: int) -> Iterator[RowGroupRange]:
    """Yield all rows of ``sources`` in order: row groups one by one, or several that take ``target`` bytes decoded."""
    # Where a nested dictionary changes, which it does between row groups, pyarrow gives up.
    apart = {id(kind.schema) for kind in one_of_each_schema(sources) if any(map(_nested_dictionary, kind.schema.types))}
    rows = size = 0
    for source in sources:
        together = 0 if id(source.schema) in apart else target
        first = 0
        for groups, count, nbytes in _small_together(source.row_groups, together):
            yield RowGroupRange(source=source, groups=groups, first=first, before=(rows, size), rows=count, size=nbytes)
            first += count
        rows += source.rows
        size += source.size


def read_batches(
    some: Sequence[RowGroupRange],
    schema: pa.Schema,
    target: int,
    stored: pa.Schema | None = None,
    long_columns: LongColumns | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of ``some`` in order, under ``schema``, in batches of about ``target`` Arrow bytes.

    ``stored`` is the schema that they are relabelled with in the end, as for time stamps that are written as
    plain numbers. Columns that are ``long_columns`` come as views. The tables of tiny files are joined before
    they are weighed, so that a file costs hardly more than its decoding.

    Raises:
        ParquetError: a file is damaged, or a value does not fit ``schema``; names the file.
    """
    widths = widths_of(stored or schema)
    waiting: list[_DecodedRows] = []
    size = 0
    how = _Decoding(schema=schema, target=target, stored=stored, long_columns=long_columns)
    for rows in _decoded_rows(some, how):
        nbytes = rows.table.get_total_buffer_size() if rows.tiny else target
        if waiting and size + nbytes > target:
            yield _as_batch(waiting, widths)
            waiting, size = [], 0
        waiting.append(rows)
        size += nbytes
        if not rows.tiny:
            yield _as_batch(waiting, widths)
            waiting, size = [], 0
    if waiting:
        yield _as_batch(waiting, widths)


@dataclass(frozen=True, kw_only=True)
class _DecodedRows:
    """Some rows as they were decoded: not yet weighed. ``tiny`` says that they are a small part of a batch."""

    table: pa.Table
    ratios: Floats
    number: int
    done: int
    tiny: bool


def _as_batch(waiting: Sequence[_DecodedRows], widths: Widths) -> RowBatch:
    last = waiting[-1]
    if len(waiting) == 1:
        table = last.table
    else:
        table = pa.concat_tables([rows.table for rows in waiting]).unify_dictionaries().combine_chunks()
    first = waiting[0].number
    return row_batch(table, last.ratios, range(first, first + table.num_rows), last.done, widths)


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    """How source files are decoded: under ``schema``, in tables of about ``target`` bytes.

    ``stored`` and ``long_columns`` are as in `read_batches`.
    """

    schema: pa.Schema
    target: int
    stored: pa.Schema | None
    long_columns: LongColumns | None

    def converted(self, table: pa.Table, kind: _SourceKind, name: str, first: int) -> pa.Table:
        """Return rows as they were decoded, the row number ``first`` of ``name`` and on, under the schema."""
        decoded = self.schema if self.long_columns is None else self.long_columns.without(self.schema)
        table = cast_to_schema(change_dense(table, kind.recast, name, first), decoded, name)
        return table if self.stored is None else table.cast(self.stored)


@dataclass(frozen=True, kw_only=True)
class _SourceKind:
    """What source files of one schema have in common: what is changed, each leaf's column, the least bytes of a row."""

    recast: dict[str, DenseChange]
    columns: npt.NDArray[np.int64]
    least: float

    def cost(self, span: RowGroupRange) -> float:
        """Return the bytes that rows take decoded, at least."""
        return max(span.size, span.rows * max(self.least, 1 / 8))


def _kind_of(source: SourceFooter, schema: pa.Schema) -> _SourceKind:
    name = str(source.path)
    return _SourceKind(
        recast=dense_changes(source.schema, schema, name) if source.rows else {},
        columns=np.array([leaf.column for leaf in footer.leaves_of(source.elements, name)], np.int64),
        least=sum(least_width(field.type) for field in source.schema),
    )


def _decoded_rows(some: Sequence[RowGroupRange], how: _Decoding) -> Iterator[_DecodedRows]:
    """Yield the rows of ``some`` in tables of at most about ``how.target`` Arrow bytes."""
    for _, alike in itertools.groupby(some, lambda span: id(span.source.schema)):
        kind = ratios = None  # tiny neighbours share their weights, as they will share a batch
        for source, spans in itertools.groupby(alike, lambda span: span.source):
            kind = kind or _kind_of(source, how.schema)
            for rows in _rows_of_file(source, spans, how, kind, ratios):
                ratios = rows.ratios
                yield rows


def _rows_of_file(
    source: SourceFooter, spans: Iterable[RowGroupRange], how: _Decoding, kind: _SourceKind, ratios: Floats | None
) -> Iterator[_DecodedRows]:
    """Yield the rows of a source; ``ratios`` are those of the tiny rows before it, if there are some."""
    name = str(source.path)
    with open_parquet(source.path, source.int96, source.metadata) as file:
        for span in spans:
            tiny = span.size <= how.target // _TINY
            if ratios is None or not tiny:
                ratios = _ratios(*_bytes_of(span), source, kind, how.schema)
            rows_at_once = max(1, int(how.target * span.rows / kind.cost(span)))
            rows = 0
            for decoded_table, views in _tables(file, span.groups, rows_at_once, source.path, how.long_columns):
                table = how.converted(decoded_table, kind, name, span.first + rows)
                for column, rows_of in views.items():
                    field = how.schema.field(column).with_type(rows_of.type)
                    table = table.add_column(how.schema.get_field_index(column), field, rows_of)
                number = span.before[0] + span.first + rows
                rows += table.num_rows
                yield _DecodedRows(table=table, ratios=ratios, number=number, done=_done(span, rows), tiny=tiny)
            if rows != span.rows:
                raise ParquetError(
                    name,
                    f"row groups {span.groups[0]} to {span.groups[-1]} hold {rows:,} rows, and {span.rows:,} in "
                    "the footer",
                    "fetch the file again",
                )


def _done(span: RowGroupRange, rows: int) -> int:
    """Return the bytes of the sources that are behind the reader after so many rows of ``span``."""
    file_rows = max(1, span.source.rows)
    return span.before[1] + span.source.size * (span.first + rows) // file_rows


def _small_together(row_groups: Sequence[tuple[int, int]], target: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield the row groups to be read in one go, one or several small ones, with their rows and their bytes."""
    groups: list[int] = []
    rows = size = 0
    for number, (count, nbytes) in enumerate(row_groups):
        if count == 0:
            continue
        if groups and size + nbytes > target:
            yield groups, rows, size
            groups, rows, size = [], 0, 0
        groups.append(number)
        rows += count
        size += nbytes
    if groups:
        yield groups, rows, size


def _nested_dictionary(kind: pa.DataType) -> bool:
    if not pt.is_nested(kind):
        return False
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pt.is_dictionary(child) or _nested_dictionary(child) for child in inner)


def _tables(
    file: pq.ParquetFile, groups: list[int], rows: int, path: Path, long_columns: LongColumns | None
) -> Iterator[tuple[pa.Table, dict[str, pa.ChunkedArray]]]:
    """Yield the rows of some row groups, ``rows`` at a time, the ``long_columns`` separately."""

    def decoded(group: int, name: str) -> Iterator[pa.Array]:
        with open_parquet(path, metadata=file.metadata) as spans:
            for record_batch in spans.iter_batches(
                batch_size=rows, row_groups=[group], columns=[name], use_threads=False
            ):
                yield record_batch.column(0)

    try:
        with ExitStack() as stack:
            columns, take = None, dict[str, TakeRows]()
            if long_columns is not None:
                descriptor = open_regular(path)
                stack.callback(os.close, descriptor)
                take = long_columns.takers(file, descriptor, groups, decoded)
                columns = [name for name in file.schema_arrow.names if name not in take]
            # One thread decodes while another encodes: threads per column as well would cost CPU time.
            for record_batch in file.iter_batches(
                batch_size=rows, row_groups=groups, columns=columns, use_threads=False
            ):
                views = {name: some(record_batch.num_rows) for name, some in take.items()}
                for name, column in views.items():
                    if len(column) != record_batch.num_rows:
                        raise ParquetError(path, f"column {name} has fewer rows than others", "fetch the file again")
                yield pa.Table.from_batches([record_batch]), views
            for name, some in take.items():
                if len(some(1)):
                    raise ParquetError(path, f"column {name} has more rows than others", "fetch the file again")
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be decoded ({first_line(error)})", "fetch the file again") from error


def _bytes_of(span: RowGroupRange) -> tuple[Floats, Floats]:
    """Return the compressed and the uncompressed bytes of each leaf column."""
    groups = [span.source.metadata.row_group(number) for number in span.groups]
    chunks = [[group.column(leaf) for leaf in range(group.num_columns)] for group in groups]
    found = [[(chunk.total_compressed_size, chunk.total_uncompressed_size) for chunk in some] for some in chunks]
    compressed, uncompressed = np.array(found, np.float64).sum(axis=0).reshape(-1, 2).T
    return compressed, uncompressed


def _ratios(
    compressed: npt.NDArray[Any],
    uncompressed: npt.NDArray[Any],
    source: SourceFooter,
    kind: _SourceKind,
    schema: pa.Schema,
) -> Floats:
    """Return compressed / uncompressed bytes for each column of ``schema``, given those of the source's leaves."""
    columns = len(source.schema)
    totals = [np.bincount(kind.columns, sizes, columns) for sizes in (compressed, uncompressed)]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = totals[0] / totals[1]
    found = np.where(np.isfinite(found) & (found > 0), np.minimum(found, _MAX_RATIO), 1.0)
    if source.schema.names == schema.names:
        return found
    by_name = dict(zip(source.schema.names, found, strict=True))
    return np.array([by_name.get(name, 1.0) for name in schema.names])


# ---- Long strings and binary as views into the pages they are stored in, which are not copied until they are written

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


# ---- Batches that are read ahead of their use: several parts of the sources at once, passed on in order

ReadTask = Callable[[], Iterator[RowBatch]]
"""What makes some consecutive batches, on whatever thread has time."""

_LARGE = 512 << 10  # Arrow bytes of a table: to take it by itself is cheaper than to copy it
_END = object()


def prefetch(tasks: Sequence[ReadTask], limit: int, threads: int = 1) -> Generator[RowBatch, None, None]:
    """Yield the batches of ``tasks``, in their order, made on ``threads`` that run ahead by ``limit`` Arrow bytes.

    Each thread has a share of ``limit`` for itself, so that the one whose batches are next never waits for another.
    """
    threads = min(threads, len(tasks))
    ready: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in tasks]
    numbers = itertools.count()
    freed = threading.Condition()
    held = [0] * threads
    stopped = False

    def produce(thread: int) -> None:
        while not stopped and (number := next(numbers)) < len(tasks):
            try:
                for batch in tasks[number]():
                    with freed:
                        while held[thread] > limit // threads and not stopped:
                            freed.wait()
                        if stopped:
                            return
                        held[thread] += batch.nbytes
                    ready[number].put((thread, batch))
                ready[number].put(_END)
            except BaseException as error:  # noqa: BLE001 - raised again where the batches are used
                ready[number].put(error)

    workers = [threading.Thread(target=produce, args=(n,), name="pqcache-decode", daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for batches in ready:
            while (item := batches.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                thread, batch = item
                yield batch
                with freed:
                    held[thread] -= batch.nbytes
                    freed.notify_all()
    finally:
        with freed:
            stopped = True
            freed.notify_all()
        for worker in workers:
            worker.join()


def join_small_batches(stream: Iterator[RowBatch], target: int) -> Iterator[RowBatch]:
    """Yield ``stream`` with tiny neighbours joined, so that many tiny files cost about as much as one."""
    waiting: list[RowBatch] = []
    size = 0
    for batch in stream:
        if waiting and size + batch.nbytes > target:
            yield _join(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
        if size > target // 2:
            yield _join(waiting)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting)


def _join(waiting: list[RowBatch]) -> RowBatch:
    if len(waiting) == 1:
        return waiting[0]
    table = pa.concat_tables([batch.table for batch in waiting]).unify_dictionaries()
    if sum(batch.nbytes for batch in waiting) < _LARGE * len(waiting):
        table = table.combine_chunks()
    rows = np.array([max(1, batch.table.num_rows) for batch in waiting], np.float64)
    ratios = np.average([batch.ratios for batch in waiting], axis=0, weights=rows)
    numbers = range(waiting[0].numbers[0], waiting[0].numbers[0] + table.num_rows)
    return row_batch(table, ratios, numbers, waiting[-1].done, waiting[0].widths)
