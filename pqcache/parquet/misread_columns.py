"""Refuses columns of which pyarrow would return other values than a file holds.

A leaf with the annotation UNKNOWN, as INTERVAL has it in files of newer writers, is null in all rows to pyarrow. INT96
time stamps outside the years 1677 to 2262 wrap when they are read as nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.footer.stored_bytes import local_stored_bytes_metadata
from pqcache.parquet.int96_unit import REPAIR, UNREADABLE, int96_values
from pqcache.parquet.nested import leaves_in, leaves_of
from pqcache.parquet.row_group_stats import top_level_names


def check_read_right(
    path: Path,
    metadata: pq.FileMetaData,
    schema: pa.Schema,
    columns: Collection[str] | None = None,
    row_groups: Sequence[int] | None = None,
    nanoseconds: bool = True,
) -> None:
    """Raise ParquetError if pyarrow returns other values of ``columns`` (None: all) than these row groups hold.

    ``metadata`` and ``schema`` are the file's. With ``nanoseconds`` INT96 time stamps are read as such. Statistics
    decide where they can; otherwise the columns are decoded.
    """
    names = doubtful_columns(metadata, schema, nanoseconds)
    names = names if columns is None else names.intersection(columns)
    if not names:
        return
    groups = range(metadata.num_row_groups) if row_groups is None else row_groups
    tops = top_level_names(metadata, schema)
    leaves = [number for number, name in enumerate(tops) if name in names]
    unknown = [leaf for leaf in leaves if _is_unknown(metadata, leaf) and _may_hold_values(metadata, leaf, groups)]
    int96 = [leaf for leaf in leaves if nanoseconds and metadata.schema.column(leaf).physical_type == "INT96"]
    if not unknown and not int96:
        return
    try:
        with pq.ParquetFile(
            pa.OSFile(str(path)), metadata=local_stored_bytes_metadata(path, [*unknown, *int96]), pre_buffer=False
        ) as file:
            for leaf in unknown:
                if any(map(_holds_values, _batches(file, leaf, groups))):
                    raise ParquetError(
                        path,
                        f"column {_path_of(metadata, leaf)!r} holds values of a type that is not read here, like "
                        "INTERVAL",
                        "leave it out, or cast it to text or numbers at the source",
                    )
            for leaf in int96:
                found = int96_values(_batches(file, leaf, groups))
                if found.unreadable:
                    raise ParquetError(path, f"column {_path_of(metadata, leaf)!r} {UNREADABLE}", REPAIR)
                if found.farther:
                    raise ParquetError(
                        path,
                        f"column {_path_of(metadata, leaf)!r} holds INT96 times outside the years 1677 to 2262, which "
                        "nanoseconds cannot hold",
                        "run 'pqcache repartition' without --keep-int96, which writes them as microseconds",
                    )
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be decoded ({first_line(error)})", "fetch it again") from error


def doubtful_columns(metadata: pq.FileMetaData, schema: pa.Schema, nanoseconds: bool = True) -> frozenset[str]:
    """Return the columns of a file that `check_read_right` has to look at, by their types in Arrow and in Parquet."""
    names = {field.name for field in schema if may_be_doubtful(field.type, nanoseconds)}
    if not names:
        return frozenset()
    leaves = enumerate(top_level_names(metadata, schema))
    return frozenset(name for leaf, name in leaves if name in names and _is_misread(metadata, leaf, nanoseconds))


def _is_misread(metadata: pq.FileMetaData, leaf: int, nanoseconds: bool) -> bool:
    column = metadata.schema.column(leaf)
    return (nanoseconds and column.physical_type == "INT96") or _is_unknown(metadata, leaf)


def may_be_doubtful(kind: pa.DataType, nanoseconds: bool = True) -> bool:
    """Return whether a column of a type in Arrow may be one that `check_read_right` has to look at."""
    return any(pt.is_null(leaf) or (nanoseconds and pt.is_timestamp(leaf)) for leaf in leaves_in(kind))


def _path_of(metadata: pq.FileMetaData, leaf: int) -> str:
    return str(metadata.schema.column(leaf).path)


def _is_unknown(metadata: pq.FileMetaData, leaf: int) -> bool:
    return str(metadata.schema.column(leaf).logical_type.type) == "UNKNOWN"


def _may_hold_values(metadata: pq.FileMetaData, leaf: int, groups: Sequence[int]) -> bool:
    """Return whether statistics leave open that there are values which are not null."""
    for group in groups:
        chunk = metadata.row_group(group).column(leaf)
        statistics = chunk.statistics
        if chunk.num_values and not (
            statistics is not None and statistics.has_null_count and statistics.null_count >= chunk.num_values
        ):
            return True
    return False


def _batches(file: pq.ParquetFile, leaf: int, groups: Sequence[int]) -> Iterator[pa.RecordBatch]:
    path = file.metadata.schema.column(leaf).path
    yield from file.iter_batches(row_groups=list(groups), columns=[path], use_threads=False)


def _holds_values(batch: pa.RecordBatch) -> bool:
    return any(leaf.null_count < len(leaf) for column in batch.columns for leaf in leaves_of(column))
