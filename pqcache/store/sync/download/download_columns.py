"""Download only the wanted columns and row groups of a remote Parquet file, as byte ranges, into a local one.

The end of the file is read first; from its footer follow the bytes of every column chunk. Those wanted are copied
as they are, one behind the other, and get a footer of their own: nothing is decoded unless rows are to be
filtered (see `pqcache.store.sync.download.filter_rows`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import CHECK_TABLE, ParquetError, UsageError
from pqcache.filters.expression import Condition, condition_columns
from pqcache.filters.pruning import TruthValues, prune_row_groups
from pqcache.filters.sql import parse_condition
from pqcache.parquet.arrow_sizes import least_width
from pqcache.parquet.column_mapping import TableColumn
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.footer import MAGIC
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.footer.thrift import I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.mapped_footer import as_in_table, in_spelling
from pqcache.parquet.projection import ByteRange, Projection, number_of, project
from pqcache.parquet.rewrite.files import write_errors
from pqcache.parquet.row_group_stats import columns_table, footer_in, row_group_columns
from pqcache.store.drivers.base import FileShape, Source, ended_early
from pqcache.store.hive import parent
from pqcache.store.manifest import SourceFile
from pqcache.store.sync.download.filter_rows import MatchingRows, condition_schema, write_matching
from pqcache.store.sync.download.subset import Subset
from pqcache.system.disk import fsync_path

_NULLS = 16 << 20  # bytes of nulls that are written at once
_GAP = 64 << 10  # bytes that are cheaper to read and discard than to skip with another request


@dataclass(frozen=True, kw_only=True)
class FileEnd:
    """The end of a remote file: what is known of it before any column is read.

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
    """Write the columns and rows of ``file`` that ``subset`` asks for to ``target``, durably.

    Without a condition on its own columns and without deleted rows, or where min and max decide it, the chunks are
    copied byte for byte. Otherwise row groups that cannot match are not downloaded, those of which every row must
    match are copied, and the rest is decoded and filtered. No row left makes a file without rows. Memory is bounded by
    the footer and, while rows are filtered, by a row group of the new file.

    Of a table's file, ``subset`` names columns as the table does, and rows that the table has deleted are left out.

    What is downloaded lies in ``<target's name>.<key>`` until it is complete; called again after an error, with equal
    arguments, it continues there. While rows are filtered, that needs space beside ``target``.

    Args:
        source: where ``file`` is.
        file: as it was listed; its size is believed.
        target: the file to make; one that exists is replaced.
        subset: the columns to keep, in the file's order, and the condition. Columns that the file lacks and that are
            among its partition columns are skipped: they are in its path. Of partition columns the values of the path
            win over those of the file. Columns of ``subset.types`` that the file lacks are null in it.
        on_bytes: called with the number of bytes received since the last call.
        stopped: asked between reads; true raises KeyboardInterrupt.

    Raises:
        UsageError: a column is neither in the file nor in the dataset, or the condition makes no sense for it.
        ParquetError: not Parquet, or damaged; names the file.
        SourceUnavailable: the source ended early; worth another try.
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
    """The end of a file, as its table sees it, and a flag for each column."""
    end, shape = read_end(source.url_of(file.path), file.identity.size, read), source.shape_of(file.path)
    if shape is not None and shape.columns is not None:
        end = _as_in_table(end, shape.columns)
    if subset.ignore_case:
        fields = in_spelling(end.fields, subset.spelling, end.name)
        end = replace(end, fields=fields, columns=_columns_of(fields, end.name))
    return end, _wanted(end, subset.columns, subset.partitions.get(parent(file.path), {}), subset.types)


def project_file(
    source: Source, file: SourceFile, subset: Subset, read: Callable[[int, int], Iterator[bytes]]
) -> tuple[FileEnd, Projection]:
    """The end of a file whose rows are all wanted, and the file of its wanted columns.

    ``read(offset, length)`` reads the file. Raises as ``download_columns`` does.
    """
    end, wanted = _read_wanted(source, file, subset, read)
    groups = range(len(footer.row_groups_of(end.fields, end.name)))
    return end, project(end.fields, wanted, groups, end.limit, end.name)


def read_end(name: str, size: int, read: Callable[[int, int], Iterator[bytes]]) -> FileEnd:
    """Read footer and tail with ``read(offset, length)``.

    What is not Parquet, encrypted, or contradicts itself raises ParquetError.
    """
    tail = footer.read_tail(lambda offset, length: b"".join(read(offset, length)), size, name)
    fields = thrift.decode(tail.footer, name)
    if 8 in fields:
        raise ParquetError(name, "columns are encrypted, which cannot be read", "decrypt it first")
    check_footer(tail.footer, name, size)
    columns = _columns_of(fields, name)
    return FileEnd(name=name, tail=tail.data, start=tail.start, limit=tail.limit, fields=fields, columns=columns)


def _as_in_table(end: FileEnd, columns: Sequence[TableColumn]) -> FileEnd:
    """Rename columns to their names in the table."""
    fields = as_in_table(end.fields, columns, end.name)
    return replace(end, fields=fields, columns=_columns_of(fields, end.name))


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
            known = ", ".join(end.columns) or "none"
            raise UsageError(end.name, f"there is no column {name}", f"there are: {known}")
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
    """A name for what is fetched: bytes of other versions or columns never mix with it."""
    digest = hashlib.sha256(thrift.encode(end.fields))
    digest.update(repr((end.limit, projection.ranges)).encode())
    digest.update(thrift.encode(projection.fields))
    return digest.hexdigest()[:16]


def _copy(projection: Projection, part: Path, end: FileEnd, read: Callable[[int, int], Iterator[bytes]]) -> None:
    """Write the projected file to ``part``, durably; what is there already is kept."""
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
    """Yield a range of the file, reusing what was read with its footer."""
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
    """Yield offset and length of each read, with the ranges in it; near ones are read at once."""
    merged: list[ByteRange] = []
    for byte_range in ranges:
        if merged and not 0 <= byte_range.offset - merged[-1].end <= _GAP:
            yield merged[0].offset, merged[-1].end - merged[0].offset, merged
            merged = []
        merged.append(byte_range)
    if merged:
        yield merged[0].offset, merged[-1].end - merged[0].offset, merged
