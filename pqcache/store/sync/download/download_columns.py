"""Downloads only the wanted columns and row groups of a remote Parquet file, as byte ranges, into a local one.

The end of the file is read first; its footer gives the byte range of every column chunk. The wanted chunks are copied
unchanged, one after the other, and get a new footer; nothing is decoded unless rows are filtered.

Filtering: row groups in which every row matches are copied as bytes. The others are decoded in batches, filtered, and
encoded as before: with the same codecs, dictionaries and statistics, schema and key-value metadata.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import CHECK_TABLE, ParquetError, UsageError, first_line, no_column
from pqcache.filters.expression import Condition, condition_columns, expression_of, rows_where
from pqcache.filters.parse import parse_condition
from pqcache.filters.pruning import TruthValues, prune_row_groups
from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import least_width, take_of_table
from pqcache.parquet.footer import MAGIC
from pqcache.parquet.misread import check_read_right
from pqcache.parquet.projection import (
    ByteRange,
    Projection,
    as_in_table,
    in_spelling,
    keyvalues_of,
    number_of,
    project,
)
from pqcache.parquet.rewrite.encode import as_row_group, encode_rows, note_dictionaries
from pqcache.parquet.rewrite.encodings import Encodings, has_integer_decimals
from pqcache.parquet.rewrite.files import (
    WRITERS,
    OutputSchema,
    RowGroupFile,
    footer_schema_of,
    widen_dictionary_indices,
    write_errors,
)
from pqcache.parquet.rewrite.sources import SourceFooter, open_parquet, read_source_footers
from pqcache.parquet.schema import cast_to_schema, condition_schema_of, with_fields, with_time_zones, working_schema
from pqcache.parquet.statistics import columns_table, row_group_columns
from pqcache.parquet.thrift import I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.validation import check_footer, footer_in
from pqcache.store.drivers.base import FileShape, Source, ended_early
from pqcache.store.manifest import SourceFile
from pqcache.store.partition_paths import parent
from pqcache.store.sync.download.subset import Subset
from pqcache.system.disk import fsync_path

_NULLS = 16 << 20  # bytes of nulls that are written at once
_GAP = 64 << 10  # bytes that are cheaper to read and discard than to skip with another request


_BATCH = 4 << 20  # Arrow bytes decoded at once, by an estimate
_MAX_BATCH_ROWS = 32 << 10  # dictionaries can make the estimate far too low
_ROW_GROUP = 32 << 20  # Arrow bytes encoded at once
_COPY = 1 << 20  # bytes copied at once
log = logging.getLogger("pqcache.sync")


@dataclass(frozen=True, kw_only=True)
class FileEnd:
    """The end of a remote file, read before any column.

    Attributes:
        name: the file's URL, for errors.
        tail: the last bytes of the file.
        start: the offset of ``tail`` in the file.
        limit: the offset of the footer.
        fields: the footer.
        columns: the names of the top-level columns.
    """

    name: str
    tail: bytes
    start: int
    limit: int
    fields: Struct
    columns: tuple[str, ...]


def download_columns(
    source: Source,
    file: SourceFile,
    target: Path,
    subset: Subset,
    on_bytes: Callable[[int], None],
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Write the columns and rows of ``file`` selected by ``subset`` to ``target``, durably.

    Without a condition on its own columns and without deleted rows, or if min and max decide the condition, the chunks
    are copied byte for byte. Otherwise row groups that cannot match are not downloaded, those in which every row
    matches are copied, and the rest is decoded and filtered. If no row is left, the file has no rows. Memory is bounded
    by the footer and, while rows are filtered, by a row group of the new file.

    For a table's file, ``subset`` uses the table's column names, and rows deleted by the table are left out.

    The download is ``<target's name>.<key>`` until it is complete; called again after an error with equal arguments, it
    continues there. While rows are filtered, this takes space beside ``target``.

    Args:
        source: where ``file`` is.
        file: as listed; its size is trusted.
        target: the file to make; one that exists is replaced.
        subset: the columns to keep, in the file's order, and the condition. Partition columns missing from the file are
            skipped, as they are in its path; values in the path take precedence over those in the file. Columns of
            ``subset.types`` missing from the file are null.
        on_bytes: called with the number of bytes received since the last call.
        stopped: asked between reads; true raises KeyboardInterrupt.

    Raises:
        UsageError: a column is neither in the file nor in the dataset, or the condition doesn't fit it.
        ParquetError: not Parquet, or damaged; names the file.
        SourceUnavailable: the source ended early; a retry may help.
        PqcacheError: ``target`` cannot be written.
    """

    def read(offset: int, length: int) -> Iterator[bytes]:
        return _received(source, file, offset, length, on_bytes, stopped)

    partitions = subset.partitions.get(parent(file.path), {})
    shape = source.shape_of(file.path) or FileShape()
    end, wanted = _read_wanted(source, file, subset, read)
    present = set(map(str.lower, end.columns))
    nulls = {name: pa.scalar(None, kind) for name, kind in subset.types.items() if name.lower() not in present}
    partitions = {**nulls, **partitions}
    count = len(footer.row_groups_of(end.fields, end.name))
    some, whole = np.ones(count, np.bool_), np.ones(count, np.bool_)  # row groups with wanted rows, and with no others
    used: set[str] = set()
    absent = not any(wanted)  # then one column says how many rows there are
    if absent and (not wanted or (not subset.where and shape.deleted_rows is None)):
        rows = sum(number_of(group, 3, end.name) for group in footer.row_groups_of(end.fields, end.name))
        with write_errors(target):
            write_nulls(subset, rows, target)
        return
    if absent:
        wanted[0] = True
    if subset.where:
        condition = _condition(end, subset, partitions)
        used = {name for name in condition_columns(condition) if name not in partitions}
        truth = prune_row_groups_of_file(end, condition, partitions, used)
        some, whole = truth.some, truth.every
    kept = _kept_rows(end, shape)
    some = some & np.array([rows is None or bool(rows.any()) for rows in kept], np.bool_)
    whole = whole & np.array([rows is None for rows in kept], np.bool_)
    groups = np.flatnonzero(some).tolist()
    every = bool(whole[groups].all())
    needed = wanted if every else [keep or name in used for keep, name in zip(wanted, end.columns, strict=True)]
    projection = project(end.fields, needed, groups, end.limit, end.name)
    part = target.with_name(f"{target.name}.{_key(end, projection)}")
    with write_errors(target):
        _copy(projection, part, end, read)
        if every:
            os.replace(part, target)
            _leave_nulls(absent, subset, target)
            return
    matching = MatchingRows(
        where=subset.where,
        partitions=partitions,
        columns=[keep for keep, copied in zip(wanted, needed, strict=True) if copied],
        every=whole[groups].tolist(),
        kept=[kept[group] for group in groups],
        types=subset.types,
    )
    filtered = part.with_name(f"{part.name}.rows")
    write_matching(part, filtered, matching, end.name, stopped)
    with write_errors(target):
        os.replace(filtered, target)
        part.unlink()
        _leave_nulls(absent, subset, target)


def _leave_nulls(absent: bool, subset: Subset, target: Path) -> None:
    if absent:
        new = target.with_name(f"{target.name}.nulls")
        write_nulls(subset, pq.read_metadata(target).num_rows, new)
        os.replace(new, target)


def write_nulls(subset: Subset, rows: int, target: Path | pa.NativeFile) -> None:
    """Write a durable file of nulls, for a source file that has none of the wanted columns."""
    schema = pa.schema([(name, kind) for name, kind in subset.types.items() if name in (subset.columns or ())])
    most = max(1, _NULLS // max(1, int(sum(least_width(field.type) for field in schema))))
    with pq.ParquetWriter(target, schema) as writer:
        for first in range(0, rows, most):
            count = min(most, rows - first)
            writer.write_table(pa.table([pa.nulls(count, field.type) for field in schema], schema=schema))
    if isinstance(target, Path):
        fsync_path(target)


def _read_wanted(
    source: Source, file: SourceFile, subset: Subset, read: Callable[[int, int], Iterator[bytes]]
) -> tuple[FileEnd, list[bool]]:
    """The end of a file, under its table's names, and whether each column is wanted."""
    end, shape = read_end(source.url_of(file.path), file.identity.size, read), source.shape_of(file.path)
    fields = end.fields
    if shape is not None and shape.columns is not None:
        fields = as_in_table(fields, shape.columns, end.name)
    if subset.ignore_case:
        fields = in_spelling(fields, subset.spelling, end.name)
    if fields is not end.fields:
        end = replace(end, fields=fields, columns=_columns_of(fields, end.name))
    return end, _wanted(end, subset.columns, subset.partitions.get(parent(file.path), {}), subset.types)


def project_file(
    source: Source, file: SourceFile, subset: Subset, read: Callable[[int, int], Iterator[bytes]]
) -> tuple[FileEnd, Projection]:
    """The end of a file whose rows are all wanted, and the projection to its wanted columns.

    ``read(offset, length)`` reads the file. Raises as ``download_columns`` does.
    """
    end, wanted = _read_wanted(source, file, subset, read)
    groups = range(len(footer.row_groups_of(end.fields, end.name)))
    return end, project(end.fields, wanted, groups, end.limit, end.name)


def read_end(name: str, size: int, read: Callable[[int, int], Iterator[bytes]]) -> FileEnd:
    """Read footer and tail with ``read(offset, length)``.

    Raises ParquetError unless the file is Parquet, unencrypted and consistent.
    """
    tail = footer.read_tail(lambda offset, length: b"".join(read(offset, length)), size, name)
    fields = thrift.decode(tail.footer, name)
    if 8 in fields:
        raise ParquetError(name, "columns are encrypted, which cannot be read", "decrypt it first")
    check_footer(tail.footer, name, size)
    columns = _columns_of(fields, name)
    return FileEnd(name=name, tail=tail.data, start=tail.start, limit=tail.limit, fields=fields, columns=columns)


def _columns_of(fields: Struct, name: str) -> tuple[str, ...]:
    schema = footer.schema_of(fields, name)
    footer.leaves_of(schema, name)  # raises where the elements are not a tree
    return tuple(column[0].get(4, (0, b""))[1].decode("utf-8", "replace") for column in footer.trees(schema))


def _kept_rows(end: FileEnd, shape: FileShape) -> list[npt.NDArray[np.bool_] | None]:
    """Mask of the rows of each row group that aren't deleted; None if none is."""
    counts = [number_of(group, 3, end.name) for group in footer.row_groups_of(end.fields, end.name)]
    if shape.deleted_rows is None:
        return [None] * len(counts)
    deleted = shape.deleted_rows()
    if len(deleted) and not 0 <= int(deleted.min()) <= int(deleted.max()) < sum(counts):
        reason = f"its table deletes row {int(deleted.max()):,} of it, and it has {sum(counts):,}"
        raise ParquetError(end.name, reason, CHECK_TABLE)
    kept = np.ones(sum(counts), np.bool_)
    kept[deleted] = False
    parts = np.split(kept, np.cumsum(counts)[:-1]) if counts else []
    return [None if part.all() else part for part in parts]


def prune_row_groups_of_file(
    end: FileEnd, condition: Condition, partitions: Mapping[str, pa.Scalar], used: Collection[str]
) -> TruthValues:
    """Evaluate ``condition`` on the statistics; ``used`` are its columns in the file."""
    groups = footer.row_groups_of(end.fields, end.name)
    wanted = [name in used for name in end.columns]
    if used:  # a footer of these columns alone, because the statistics of hundreds take a while
        fields = project(end.fields, wanted, range(len(groups)), end.limit, end.name).fields
        metadata, schema = _opened(fields, end.name)
        columns = row_group_columns(metadata, schema)
        columns["file"] = [0] * len(groups)
        table = columns_table(columns, schema)
    else:
        table = pa.table({"rows": pa.array([number_of(group, 3, end.name) for group in groups], pa.int64())})
    constants = {name: pa.repeat(value, len(groups)) for name, value in partitions.items()}
    return prune_row_groups(condition, table, constants)


def _received(
    source: Source,
    file: SourceFile,
    offset: int,
    length: int,
    on_bytes: Callable[[int], None],
    stopped: Callable[[], bool],
) -> Iterator[bytes]:
    """Yield exactly ``length`` bytes from ``offset``."""
    left = length
    for data in source.read(file.path, offset, length) if length else ():
        chunk = data[:left]
        left -= len(chunk)
        on_bytes(len(data))
        yield chunk
        if stopped():
            raise KeyboardInterrupt
    if left:
        raise ended_early(source, file, f"{length - left:,} of {length:,} bytes from {offset:,}")


def _wanted(
    end: FileEnd, columns: Sequence[str] | None, partitions: Collection[str], types: Collection[str]
) -> list[bool]:
    if columns is None:
        return [True] * len(end.columns)
    present = set(map(str.lower, end.columns))
    for name in columns:
        if name not in end.columns and (name not in {*partitions, *types} or name.lower() in present):
            raise no_column(end.name, name, end.columns)
    wanted = [name in columns for name in end.columns]
    if not any(wanted) and not any(name in types for name in columns):
        known = ", ".join(end.columns) or "none"
        raise UsageError(end.name, "none of its columns is wanted", f"name one of: {known}")
    return wanted


def _condition(end: FileEnd, subset: Subset, partitions: Mapping[str, pa.Scalar]) -> Condition:
    _, schema = _opened({**end.fields, 4: (LIST, Items(STRUCT, [])), 3: (I64, 0)}, end.name)
    try:
        assert subset.where is not None
        return parse_condition(subset.where, condition_schema(schema, partitions, subset.types))
    except UsageError as error:
        raise error.within(end.name) from error


def _opened(fields: Struct, name: str) -> tuple[pq.FileMetaData, pa.Schema]:
    end = MAGIC + footer.footer_and_magic(fields)
    return footer_in(end, name, "us", size=None)  # INT96 in microseconds, which hold the year 9999


def _key(end: FileEnd, projection: Projection) -> str:
    """A name for the download, so that bytes of other versions or columns never mix with it."""
    digest = hashlib.sha256(thrift.encode(end.fields))
    digest.update(repr((end.limit, projection.ranges)).encode())
    digest.update(thrift.encode(projection.fields))
    return digest.hexdigest()[:16]


def _copy(projection: Projection, part: Path, end: FileEnd, read: Callable[[int, int], Iterator[bytes]]) -> None:
    """Write the projected file to ``part``, durably, continuing after the bytes already there."""
    with part.open("ab") as out:
        held = out.tell()
        if held < len(MAGIC) or held > projection.size:
            held = min(projection.size, held) if held > projection.size else 0
            out.truncate(held)
        if not held:
            out.write(MAGIC)
            held = len(MAGIC)
        for offset, length, ranges in merged_ranges(_remaining(projection.ranges, held - len(MAGIC))):
            position = offset
            pending = iter(ranges)
            byte_range: ByteRange | None = next(pending)
            for data in _read_unless_known(offset, length, end, read):
                view = memoryview(data)
                while byte_range is not None and byte_range.offset < position + len(view):
                    out.write(view[max(0, byte_range.offset - position) : byte_range.end - position])
                    if byte_range.end > position + len(view):
                        break
                    byte_range = next(pending, None)
                position += len(view)
        out.write(footer.footer_and_magic(projection.fields))
        out.flush()
        os.fsync(out.fileno())


def _read_unless_known(
    offset: int, length: int, end: FileEnd, read: Callable[[int, int], Iterator[bytes]]
) -> Iterator[bytes]:
    """Yield a range of the file, reusing the bytes read with its footer."""
    unread = max(0, min(length, end.start - offset))
    if unread:
        yield from read(offset, unread)
    if unread < length:
        first = offset + unread - end.start
        yield end.tail[first : first + length - unread]


def _remaining(ranges: Sequence[ByteRange], done: int) -> Iterator[ByteRange]:
    for byte_range in ranges:
        written = min(done, byte_range.length)
        done -= written
        if written < byte_range.length:
            yield ByteRange(byte_range.offset + written, byte_range.length - written)


def merged_ranges(ranges: Iterable[ByteRange]) -> Iterator[tuple[int, int, list[ByteRange]]]:
    """Yield offset and length of each read, with its ranges; nearby ranges are read at once."""
    merged: list[ByteRange] = []
    for byte_range in ranges:
        if merged and not 0 <= byte_range.offset - merged[-1].end <= _GAP:
            yield merged[0].offset, merged[-1].end - merged[0].offset, merged
            merged = []
        merged.append(byte_range)
    if merged:
        yield merged[0].offset, merged[-1].end - merged[0].offset, merged


def condition_schema(
    schema: pa.Schema, partitions: Mapping[str, pa.Scalar], types: Mapping[str, pa.DataType]
) -> pa.Schema:
    """The columns that a condition may name: the file's, then the partition columns, whose values win.

    Structs also have the fields in ``types``; in older files without them, these are null.
    """
    schema = with_time_zones(schema, pa.schema(list(types.items())))
    known = pa.schema([f.with_type(with_fields(f.type, types[f.name])) if f.name in types else f for f in schema])
    in_file = [column for column in condition_schema_of(known) if column.name not in partitions]
    return pa.schema([*in_file, *(pa.field(name, value.type) for name, value in partitions.items())])


@dataclass(frozen=True, kw_only=True)
class MatchingRows:
    """Which rows and columns of a Parquet file are kept.

    Attributes:
        where: the condition; None if only deleted rows are left out.
        partitions: the values of the partition columns; they win over columns of the file.
        columns: for each top-level column, whether to keep it; the others serve the condition only.
        every: for each row group, whether all its rows are known to match.
        kept: for each row group, which of its rows are not deleted; None if none is deleted.
        types: of columns in other files, which may have more fields.
    """

    where: str | None
    partitions: Mapping[str, pa.Scalar]
    columns: Sequence[bool]
    every: Sequence[bool]
    kept: Sequence[npt.NDArray[np.bool_] | None]
    types: Mapping[str, pa.DataType] = field(default_factory=dict)


def write_matching(source: Path, target: Path, rows: MatchingRows, name: str, stopped: Callable[[], bool]) -> None:
    """Write the rows of ``source`` that ``rows`` keeps to ``target``, durably.

    Args:
        source: a local Parquet file.
        target: the file to make; one that exists is replaced.
        rows: the condition, and the columns to keep.
        name: the file to name in errors.
        stopped: asked between batches; true raises KeyboardInterrupt.

    Raises:
        UsageError: the condition doesn't fit the file.
        ParquetError: the file is damaged.
        PqcacheError: ``target`` cannot be written.
    """
    [opened] = read_source_footers([source])
    try:
        check_read_right(opened.path, opened.metadata, opened.schema, nanoseconds=False)
    except ParquetError as error:
        raise error.renamed(source, name) from error
    matching = _matching(opened.schema, rows, name)
    with write_errors(target):
        target.unlink(missing_ok=True)
    disk = ThreadPoolExecutor(WRITERS, thread_name_prefix="pqcache-disk")
    output = _FilteredFile(opened, target, rows.columns, disk, name)
    if not output.copies and any(rows.every):
        log.debug("%s: row groups that match completely are encoded again: columns are stored otherwise", name)
    try:
        for group, complete in enumerate(rows.every):
            if complete and output.copies:
                output.flush()
                output.copy(group)
                continue
            for table in _tables(opened, group, name, rows.kept[group]):
                if stopped():
                    raise KeyboardInterrupt
                output.add(matching(table).select(output.positions), group)
        output.flush()
        output.finish()
    except BaseException as error:
        output.file.abandon()
        if isinstance(error, pa.ArrowException) and not isinstance(error, OSError):
            raise ParquetError(name, f"cannot be written as Parquet ({error})") from error
        raise
    finally:
        disk.shutdown()


class _FilteredFile:
    """The file that is being written, and its waiting rows.

    ``wanted`` says which top-level columns of ``source`` it holds. ``copies`` says whether row groups can be copied,
    because their columns are stored like those encoded here.
    """

    def __init__(self, source: SourceFooter, target: Path, wanted: Sequence[bool], disk: Executor, name: str) -> None:
        self._source, self._wanted, self._name = source, wanted, name
        self.positions = [number for number, keep in enumerate(wanted) if keep]
        data = footer.read_local_tail(source.path).footer
        self._fields, self._limit = thrift.decode(data, name), source.size - 8 - len(data)
        empty = project(self._fields, wanted, [], self._limit, name).fields
        elements = footer.schema_of(empty, name)
        declared = pa.schema([source.schema.field(n) for n in self.positions], metadata=source.schema.metadata)
        self._output_schema = OutputSchema(
            working=working_schema(declared), declared=declared, elements=elements, keyvalues=keyvalues_of(empty)
        )
        leaves = footer.leaves_of(source.elements, name)
        self._leaves = [number for number, leaf in enumerate(leaves) if wanted[leaf.column]]
        self._as_integer = has_integer_decimals(list(map(source.metadata.schema.column, self._leaves)))
        self._footer_schema = footer_schema_of(self._output_schema, Encodings(decimal_as_integer=self._as_integer))
        self.copies = self._footer_schema.schema == elements
        self.file = RowGroupFile(path=target, footer_schema=self._footer_schema, disk=disk, use_page_cache=True)
        self._encodings: Encodings | None = None
        self._template: thrift.Struct | None = None
        self._waiting: list[pa.Table] = []
        self._size = 0
        self._dictionaries: dict[str, int] = {}

    def add(self, table: pa.Table, group: int) -> None:
        if not table.num_rows:
            return
        if self._encodings is None:
            self._encodings = self._encodings_of(group)
        self._waiting.append(table)
        self._size += table.nbytes
        if self._size >= _ROW_GROUP:
            self.flush()

    def _encodings_of(self, group: int) -> Encodings:
        metadata = self._source.metadata.row_group(group)
        chunks = dict(zip(self._footer_schema.names, map(metadata.column, self._leaves), strict=True))
        codecs = {path: chunk.compression.lower() for path, chunk in chunks.items()}
        known_as = {"uncompressed": "none", "lz4_raw": "lz4"}
        return Encodings(
            codecs={path: known_as.get(codec, codec) for path, codec in codecs.items()},
            dictionary=[path for path, chunk in chunks.items() if chunk.has_dictionary_page],
            statistics=[path for path, chunk in chunks.items() if chunk.is_stats_set],
            decimal_as_integer=self._as_integer,
        )

    def flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            note_dictionaries(table, self._dictionaries)
        assert self._encodings is not None
        self.file.append(as_row_group(encode_rows(table, self._encodings, self._name)))
        self._waiting, self._size = [], 0

    def copy(self, group: int) -> None:
        offset, number = self.file.position, len(self.file.groups)
        found = project(self._fields, self._wanted, [group], self._limit, self._name, offset, number)
        with write_errors(self.file.path), self._source.path.open("rb") as pages:
            out = self.file.open()
            for byte_range in found.ranges:
                pages.seek(byte_range.offset)
                left = byte_range.length
                while left and (data := pages.read(min(left, _COPY))):
                    out.write(data)
                    left -= len(data)
        self.file.groups.append(found.fields[4][1].values[0])
        self.file.rows += self._source.metadata.row_group(group).num_rows
        self.file.position = found.size
        # Which statistics can be trusted follows from who wrote the file: here the more doubtful of the two.
        self._template = found.fields

    def finish(self) -> None:
        if self._template is not None:
            self.file.template = self._template
        self.file.finish(widen_dictionary_indices(self._output_schema, self._dictionaries).keyvalues)


def _tables(source: SourceFooter, group: int, name: str, kept: npt.NDArray[np.bool_] | None) -> Iterator[pa.Table]:
    """Yield the rows that are ``kept``, None for all, in batches of bounded size."""
    metadata = source.metadata.row_group(group)
    width = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
    rows = min(max(1, _BATCH // width), _MAX_BATCH_ROWS)
    schema = working_schema(source.schema)
    found = 0
    try:
        with open_parquet(source.path, source.int96) as file:
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False):
                table = cast_to_schema(pa.Table.from_batches([batch]), schema, name)
                if kept is not None and not (here := kept[found : found + batch.num_rows]).all():
                    table = table.take(pa.array(np.flatnonzero(here)))
                found += batch.num_rows
                yield table
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(name, f"cannot be decoded ({first_line(error)})", "fetch the file again") from error
    if found != metadata.num_rows:
        raise ParquetError(
            name,
            f"fetched row group {group} has {found:,} rows, but {metadata.num_rows:,} by the footer",
            "fetch the file again",
        )


def _matching(schema: pa.Schema, rows: MatchingRows, name: str) -> Callable[[pa.Table], pa.Table]:
    if rows.where is None:
        return lambda table: table
    known = condition_schema(schema, rows.partitions, rows.types)
    condition = parse_condition(rows.where, known)
    columns = pa.schema([known.field(name) for name in condition_columns(condition) if name not in rows.partitions])
    expression = expression_of(condition, rows.partitions)

    def matching(table: pa.Table) -> pa.Table:
        kept = rows_where(cast_to_schema(table.select(columns.names), columns, name), expression)
        return table if len(kept) == table.num_rows else take_of_table(table, np.asarray(kept))

    return matching
