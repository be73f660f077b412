"""Rows of source files, decoded in order and ahead of their use.

Row groups are read some rows at a time, so memory depends on the size of a batch, not of row groups.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.parquet import footer
from pqcache.parquet.arrow import LONG, Floats, Widths, arrow_bytes, is_text, least_width, widths_of
from pqcache.parquet.dense import DenseChange, change_dense, dense_changes
from pqcache.parquet.fast_decode import UNREADABLE, Leaf, leaf_of, text_pages, view_type, views_of
from pqcache.parquet.pages import NotRead, pages_in
from pqcache.parquet.rewrite.sources import SourceFooter, one_of_each_schema, open_parquet
from pqcache.parquet.schema import cast_to_schema
from pqcache.parquet.statistics import first_page
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.parquet")

_AGAIN = "fetch the file again"
_MAX_RATIO = 4.0
_TINY = 8  # to a batch
_LARGE = 512 << 10  # Arrow bytes of a table that is cheaper to use alone than to copy


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """Some rows of the source files, usually consecutive ones.

    Attributes:
        ratios: compressed over uncompressed bytes of each column at the source.
        numbers: each row's number in all source files.
        done: bytes of the sources read up to this batch.
        widths: of the table's columns, if known.
    """

    table: pa.Table
    ratios: Floats
    numbers: range | npt.NDArray[np.int64]
    done: int
    widths: Widths | None = None

    @cached_property
    def _sizes(self) -> Floats:
        return arrow_bytes(self.table, self.widths or widths_of(self.table.schema))

    @cached_property
    def nbytes(self) -> int:
        return int(self._sizes.sum())

    @cached_property
    def weights(self) -> Floats:
        """Estimated bytes of each column on disk."""
        result: Floats = self._sizes * self.ratios + self.table.num_rows / 8
        return result

    def slice(self, start: int, stop: int) -> RowBatch:
        return replace(self, table=self.table.slice(start, stop - start), numbers=self.numbers[start:stop])


@dataclass(frozen=True, kw_only=True)
class RowGroupRange:
    """Row groups of a source that are read in one go.

    ``first`` is the number of their first row in the file; ``before`` counts rows and bytes of earlier files.
    """

    source: SourceFooter
    groups: list[int]
    first: int
    before: tuple[int, int]
    rows: int
    size: int


def row_group_ranges(sources: Sequence[SourceFooter], target: int) -> Iterator[RowGroupRange]:
    """Yield row groups of ``sources`` in order, small ones together up to ``target`` decoded bytes."""
    # pyarrow can't read a nested dictionary that changes, as it does between row groups.
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


def _nested_dictionary(kind: pa.DataType) -> bool:
    if not pt.is_nested(kind):
        return False
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pt.is_dictionary(child) or _nested_dictionary(child) for child in inner)


def _small_together(row_groups: Sequence[tuple[int, int]], target: int) -> Iterator[tuple[list[int], int, int]]:
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


@dataclass(frozen=True, kw_only=True)
class _SourceKind:
    """Facts about source files of one schema: dense changes, the column of each leaf, least bytes of a row."""

    recast: dict[str, DenseChange]
    columns: npt.NDArray[np.int64]
    least: float


def _kind_of(source: SourceFooter, schema: pa.Schema) -> _SourceKind:
    name = str(source.path)
    return _SourceKind(
        recast=dense_changes(source.schema, schema, name),
        columns=np.array([leaf.column for leaf in footer.leaves_of(source.elements, name)], np.int64),
        least=sum(least_width(column.type) for column in source.schema),
    )


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Decodes source files under ``schema``, in batches of about ``batch_bytes`` Arrow bytes.

    Attributes:
        long_columns: see `long_columns_of`.
    """

    schema: pa.Schema
    batch_bytes: int
    long_columns: Mapping[str, pa.DataType] = field(default_factory=dict)

    def batches(self, spans: Iterable[RowGroupRange]) -> Iterator[RowBatch]:
        """Yield the rows of ``spans`` in order.

        Raises:
            ParquetError: a file is damaged, or a value doesn't fit the schema.
        """
        return join_small_batches(self._decoded(spans), self.batch_bytes)

    def _decoded(self, spans: Iterable[RowGroupRange]) -> Iterator[RowBatch]:
        widths = widths_of(self.schema)
        for _, alike in itertools.groupby(spans, lambda span: id(span.source.schema)):
            kind = ratios = None  # tiny neighbours share ratios, as they will share a batch
            for source, some in itertools.groupby(alike, lambda span: span.source):
                kind = kind or _kind_of(source, self.schema)
                with open_parquet(source.path, source.int96, source.metadata) as file:
                    for span in some:
                        if ratios is None or span.size > self.batch_bytes // _TINY:
                            ratios = _ratios(span, kind.columns, self.schema)
                        rows = 0
                        for table in self._tables(file, span, kind):
                            number = span.before[0] + span.first + rows
                            rows += table.num_rows
                            done = span.before[1] + source.size * (span.first + rows) // max(1, source.rows)
                            numbers = range(number, number + table.num_rows)
                            yield RowBatch(table=table, ratios=ratios, numbers=numbers, done=done, widths=widths)

    def _tables(self, file: pq.ParquetFile, span: RowGroupRange, kind: _SourceKind) -> Iterator[pa.Table]:
        name = str(span.source.path)
        schema = pa.schema([column for column in self.schema if column.name not in self.long_columns])
        cost = max(span.size, span.rows * max(kind.least, 1 / 8))
        rows = 0
        for table, views in self._read(file, span, max(1, int(self.batch_bytes * span.rows / cost))):
            table = change_dense(table, kind.recast, name, span.first + rows)
            table = cast_to_schema(table, schema.with_metadata(self.schema.metadata), name)
            for column, values in views.items():
                position = self.schema.get_field_index(column)
                table = table.add_column(position, self.schema.field(position).with_type(values.type), values)
            rows += table.num_rows
            yield table
        if rows != span.rows:
            raise ParquetError(
                name,
                f"row groups {span.groups[0]} to {span.groups[-1]} hold {rows:,} rows, but {span.rows:,} in the footer",
                _AGAIN,
            )

    def _read(
        self, file: pq.ParquetFile, span: RowGroupRange, rows: int
    ) -> Iterator[tuple[pa.Table, dict[str, pa.ChunkedArray]]]:
        """Yield ``rows`` rows at a time, with the long columns beside them."""
        path, groups = span.source.path, span.groups

        def decode(name: str, group: int) -> Iterator[pa.Array]:
            # a reader of its own, as a reader returns the same number of rows of all columns
            with open_parquet(path, metadata=file.metadata) as other:
                for some in other.iter_batches(batch_size=rows, row_groups=[group], columns=[name], use_threads=False):
                    yield some.column(0)

        try:
            with ExitStack() as stack:
                columns, take = None, dict[str, _Take]()
                if self.long_columns:
                    descriptor = open_regular(path)
                    stack.callback(os.close, descriptor)
                    for name, kind in self.long_columns.items():
                        views = _views(file, descriptor, groups, name, kind, partial(decode, name))
                        take[name] = _taker(views, kind)
                    columns = [name for name in file.schema_arrow.names if name not in take]
                # without threads for columns, as one thread decodes while another encodes
                for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=columns, use_threads=False):
                    long = {name: some(batch.num_rows) for name, some in take.items()}
                    for name, column in long.items():
                        if len(column) != batch.num_rows:
                            raise ParquetError(path, f"column {name} has fewer rows than others", _AGAIN)
                    yield pa.Table.from_batches([batch]), long
                for name, some in take.items():
                    if len(some(1)):
                        raise ParquetError(path, f"column {name} has more rows than others", _AGAIN)
        except (pa.ArrowException, OSError) as error:
            raise ParquetError(path, f"cannot be decoded ({first_line(error)})", _AGAIN) from error


def _ratios(span: RowGroupRange, columns: npt.NDArray[np.int64], schema: pa.Schema) -> Floats:
    """Compressed / uncompressed bytes of each column."""
    source = span.source
    groups = [source.metadata.row_group(number) for number in span.groups]
    chunks = [[group.column(leaf) for leaf in range(group.num_columns)] for group in groups]
    sizes = [[(chunk.total_compressed_size, chunk.total_uncompressed_size) for chunk in some] for some in chunks]
    leaves = np.array(sizes, np.float64).sum(axis=0).reshape(-1, 2).T
    compressed, uncompressed = (np.bincount(columns, some, len(source.schema)) for some in leaves)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = compressed / uncompressed
    found = np.where(np.isfinite(found) & (found > 0), np.minimum(found, _MAX_RATIO), 1.0)
    if source.schema.names == schema.names:
        return found
    by_name = dict(zip(source.schema.names, found, strict=True))
    return np.array([by_name.get(name, 1.0) for name in schema.names])


def join_small_batches(stream: Iterable[RowBatch], target: int) -> Iterator[RowBatch]:
    """Join small neighbours, so that many tiny files cost about as much as one.

    They are joined before they are weighed, which costs time per column, however few the rows.
    """
    waiting: list[RowBatch] = []
    size = 0
    for batch in stream:
        nbytes = batch.table.get_total_buffer_size()
        if waiting and size + nbytes > target:
            yield _join(waiting, size)
            waiting, size = [], 0
        waiting.append(batch)
        size += nbytes
        if size > target // 2:
            yield _join(waiting, size)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting, size)


def _join(waiting: list[RowBatch], size: int) -> RowBatch:
    first, last = waiting[0], waiting[-1]
    if first is last:
        return first
    table = pa.concat_tables([batch.table for batch in waiting]).unify_dictionaries()
    if size < _LARGE * len(waiting):
        table = table.combine_chunks()
    rows = [max(1, batch.table.num_rows) for batch in waiting]
    ratios = np.average([batch.ratios for batch in waiting], axis=0, weights=rows)
    numbers = range(first.numbers[0], first.numbers[0] + table.num_rows)
    return replace(last, table=table, ratios=ratios, numbers=numbers)


# ---- Long strings and binary, as views into their pages that aren't copied until they are written
#
# A plain page of binary values is a sequence of lengths and bytes, in the file that is read as in the one that is
# written, so stretches of pages are copied from one to the other. For the layout of views, see `pqcache.parquet.arrow`.

_READABLE = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}  # encodings of values and levels

_Take = Callable[[int], pa.ChunkedArray]
"""Takes the next rows of a column: as many as requested, or all that are left."""


def long_columns_of(files: Sequence[tuple[pq.FileMetaData, pa.Schema]], schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns of ``schema`` with long values in all row groups of ``files``, and their types as views.

    There must be other columns, which tell the number of rows.
    """
    kinds = {}
    for column in schema:
        if is_text(column.type) and all(_is_long(metadata, own, column) for metadata, own in files):
            kinds[column.name] = view_type(column.type)
    clear = len(set(schema.names)) == len(schema) and not any("." in name for name in schema.names)
    return kinds if clear and len(kinds) < len(schema) else {}


def _is_long(metadata: pq.FileMetaData, own: pa.Schema, column: pa.Field) -> bool:
    where = own.get_all_field_indices(column.name)
    if len(where) != 1 or own.field(where[0]).type != column.type or any("." in name for name in own.names):
        return False
    found = _leaf_of(metadata, column)
    if found is None:
        return False
    chunks = (metadata.row_group(group).column(found[0]) for group in range(metadata.num_row_groups))
    return all(
        chunk.total_uncompressed_size >= LONG * chunk.num_values and _READABLE.issuperset(chunk.encodings)
        for chunk in chunks
    )


def _leaf_of(metadata: pq.FileMetaData, column: pa.Field) -> tuple[int, Leaf] | None:
    schema = metadata.schema
    numbers = [number for number in range(len(schema)) if schema.column(number).path == column.name]
    leaf = leaf_of(schema.column(numbers[0]), column) if len(numbers) == 1 else None
    return None if leaf is None or leaf.repetition else (numbers[0], leaf)


def _views(
    file: pq.ParquetFile,
    descriptor: int,
    groups: Sequence[int],
    name: str,
    kind: pa.DataType,
    decode: Callable[[int], Iterator[pa.Array]],
) -> Iterator[pa.Array]:
    """Yield a column page by page; ``decode`` the rest of a row group if a page can't be viewed."""
    where = _leaf_of(file.metadata, file.schema_arrow.field(name))
    assert where is not None  # see `_is_long`
    number, leaf = where
    for group in groups:
        chunk = file.metadata.row_group(group).column(number)
        done = 0
        try:
            pages = pages_in(descriptor, first_page(chunk), chunk.total_compressed_size)
            for texts in text_pages(descriptor, chunk, leaf, pages, checked=True):
                if done + len(texts.there) > chunk.num_values or not texts.there.all():
                    raise NotRead("there are nulls, or more values than in the footer")
                yield views_of([texts], kind)
                done += len(texts.there)
        except UNREADABLE as error:
            log.debug("column %s: pyarrow decodes the chunk from row %d on: %s", name, done, error)
        if done == chunk.num_values:
            continue
        for array in decode(group):
            skipped = min(done, len(array))
            done -= skipped
            if skipped < len(array):
                yield array[skipped:].cast(kind)


def _taker(arrays: Iterator[pa.Array], kind: pa.DataType) -> _Take:
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


# ---- Several parts of the sources at once, in order

ReadTask = Callable[[], Iterator[RowBatch]]
"""Makes some consecutive batches on any thread."""

_END = object()


def prefetch(tasks: Sequence[ReadTask], limit: int, threads: int = 1) -> Generator[RowBatch, None, None]:
    """Yield the batches of ``tasks`` in order, made by ``threads`` that run ahead by ``limit`` Arrow bytes.

    Each thread has its own share of ``limit``, so that the one with the next batches never waits for another.
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
                    nbytes = batch.nbytes  # counted before the lock is taken
                    with freed:
                        while held[thread] > limit // threads and not stopped:
                            freed.wait()
                        if stopped:
                            return
                        held[thread] += nbytes
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
