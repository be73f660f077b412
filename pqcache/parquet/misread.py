"""Columns that pyarrow misreads.

A leaf annotated UNKNOWN, as newer writers annotate INTERVAL, comes out as null in every row. INT96 timestamps outside
the years 1677 to 2262 wrap when read as nanoseconds, and those of Julian day 0 become 1970-01-01. To check them, their
stored bytes are read, with a changed footer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import leaves_in, leaves_of, top_level_names
from pqcache.parquet.footer import MAGIC, read_local_tail
from pqcache.parquet.statistics import stated_nulls
from pqcache.parquet.thrift import (
    FIXED_LEN_BYTE_ARRAY,
    I32,
    INT96,
    STATISTICS,
    STRUCT,
    TYPE,
    Items,
    Struct,
)

_NS_PER_US = 1000
_US_PER_DAY = 86_400_000_000
_UNIX_DAY = 2_440_588  # the Julian day of 1970-01-01
_NS_RANGE_US = (2**63 - 1) // _NS_PER_US
_MAX_DAYS = (2**63 - 1) // _US_PER_DAY - 106_752  # from 1970, minus more days than any time of day
UNREADABLE = "holds INT96 times of Julian day 0 or after the year 290,000, which readers decode wrongly"
REPAIR = "repair them at the source"
_STORED = np.dtype([("nanoseconds", "<i8"), ("day", "<u4")])
INT96_BYTES = 12
_ANNOTATIONS = (6, 10)  # of a schema element: converted_type and logicalType


@dataclass(frozen=True, kw_only=True)
class Int96Values:
    """Whether some INT96 times need special care.

    Attributes:
        finer: some need nanoseconds.
        farther: some lie outside the years 1677 to 2262, which nanoseconds can't express.
        unreadable: pyarrow misreads some in any unit: Julian day 0 becomes 1970-01-01, and times after the year
            290,000 wrap.
    """

    finer: bool = False
    farther: bool = False
    unreadable: bool = False


def int96_leaves(metadata: pq.FileMetaData) -> list[int]:
    schema = metadata.schema
    return [number for number in range(len(schema)) if schema.column(number).physical_type == "INT96"]


def int96_unit(found: Sequence[tuple[str, Int96Values]]) -> str:
    """The unit that holds every INT96 value of the named files: "us", or else "ns".

    Microseconds come first: Spark and Hive use them, and they span 290,000 years around 1970.

    Raises:
        ParquetError: neither unit holds all values.
    """
    unreadable = next((name for name, values in found if values.unreadable), None)
    if unreadable is not None:
        raise ParquetError(unreadable, UNREADABLE, REPAIR)
    finer = next((name for name, values in found if values.finer), None)
    farther = next((name for name, values in found if values.farther), None)
    if finer and farther:
        raise ParquetError(
            finer,
            f"has INT96 times finer than a microsecond and {farther} has some outside the "
            "years 1677 to 2262: no 64-bit time holds both",
            "round or repair them at the source",
        )
    return "ns" if finer else "us"


def int96_values(batches: Iterable[pa.RecordBatch]) -> Int96Values:
    """Examine INT96 times in columns that are read as their stored bytes."""
    finer = farther = unreadable = False
    for batch in batches:
        for leaf in _stored_times(batch):
            stored = np.frombuffer(leaf.buffers()[1] or b"", _STORED, len(leaf), leaf.offset * _STORED.itemsize)
            days = stored["day"].astype(np.int64) - _UNIX_DAY
            far = np.abs(days) > _MAX_DAYS
            us = np.where(far, 0, days) * _US_PER_DAY + stored["nanoseconds"] // _NS_PER_US
            finer = finer or bool((stored["nanoseconds"] % _NS_PER_US).any())
            farther = farther or bool((np.abs(us) > _NS_RANGE_US).any() or far.any())
            unreadable = unreadable or bool(far.any() or (stored["day"] == 0).any())
    return Int96Values(finer=finer, farther=farther, unreadable=unreadable)


def _stored_times(batch: pa.RecordBatch) -> Iterator[pa.Array]:
    for leaf in chain.from_iterable(map(leaves_of, batch.columns)):
        if leaf.type == pa.binary(_STORED.itemsize):
            yield leaf.drop_null()


def stored_bytes_metadata(data: bytes, leaves: Collection[int], name: str) -> pq.FileMetaData:
    """The footer ``data`` with ``leaves`` declared as stored bytes: INT96 as 12 bytes, others without annotation.

    pyarrow reads a file this way if opened with this footer. A damaged footer is blamed on ``name``.
    """
    fields = thrift.decode(data, name)
    schema = footer.schema_of(fields, name)
    all_leaves = footer.leaves_of(schema, name)
    int96 = set()
    for number in leaves:
        position = all_leaves[number].element
        element = {field: entry for field, entry in schema[position].items() if field not in _ANNOTATIONS}
        if element[TYPE][1] == INT96:
            int96.add(number)
            element |= {1: (I32, FIXED_LEN_BYTE_ARRAY), 2: (I32, INT96_BYTES)}
        schema[position] = dict(sorted(element.items()))
    groups = [_with_bytes(group, int96, set(leaves), name) for group in footer.row_groups_of(fields, name)]
    rows = fields[3][1]
    fields.pop(thrift.COLUMN_ORDERS, None)
    end = MAGIC + footer.footer_and_magic(footer.make_footer(fields, schema, groups, rows, {}))
    with pq.ParquetFile(pa.BufferReader(end)) as file:
        return file.metadata


def local_stored_bytes_metadata(path: Path, leaves: Collection[int]) -> pq.FileMetaData:
    return stored_bytes_metadata(read_local_tail(path).footer, leaves, str(path))


def _with_bytes(group: Struct, int96: Collection[int], leaves: Collection[int], name: str) -> Struct:
    """Drop the statistics of the chunks of ``leaves``, and declare those of ``int96`` as fixed-size bytes."""
    kind, chunks = group[1]
    found = []
    for number, (chunk, meta) in enumerate(zip(chunks.values, footer.columns_of(group, name), strict=True)):
        if number in leaves:
            meta = {field: entry for field, entry in meta.items() if field != STATISTICS}
            if number in int96:
                meta[TYPE] = (I32, FIXED_LEN_BYTE_ARRAY)
            chunk = {**chunk, 3: (STRUCT, meta)}
        found.append(chunk)
    return {**group, 1: (kind, Items(STRUCT, found))}


def check_read_right(
    path: Path,
    metadata: pq.FileMetaData,
    schema: pa.Schema,
    columns: Collection[str] | None = None,
    row_groups: Sequence[int] | None = None,
    nanoseconds: bool = True,
) -> None:
    """Raise ParquetError if pyarrow would misread ``columns`` (None for all) of these row groups.

    ``metadata`` and ``schema`` are the file's. ``nanoseconds`` says that INT96 timestamps are read as nanoseconds.
    Columns are decoded unless statistics rule a misreading out.
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
                        f"column {_path_of(metadata, leaf)!r} holds values of an unsupported type, like INTERVAL",
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
                        "run 'pqcache repartition', which writes them as microseconds",
                    )
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be decoded ({first_line(error)})", "fetch it again") from error


def doubtful_columns(metadata: pq.FileMetaData, schema: pa.Schema, nanoseconds: bool = True) -> frozenset[str]:
    """The columns whose types may be misread, which `check_read_right` examines."""
    names = {field.name for field in schema if may_be_doubtful(field.type, nanoseconds)}
    if not names:
        return frozenset()
    misread = {*int96_leaves(metadata)} if nanoseconds else set()
    leaves = enumerate(top_level_names(metadata, schema))
    return frozenset(
        name for leaf, name in leaves if name in names and (leaf in misread or _is_unknown(metadata, leaf))
    )


def may_be_doubtful(kind: pa.DataType, nanoseconds: bool = True) -> bool:
    """Whether columns of an Arrow type may be among `doubtful_columns`."""
    return any(pt.is_null(leaf) or (nanoseconds and pt.is_timestamp(leaf)) for leaf in leaves_in(kind))


def _path_of(metadata: pq.FileMetaData, leaf: int) -> str:
    return str(metadata.schema.column(leaf).path)


def _is_unknown(metadata: pq.FileMetaData, leaf: int) -> bool:
    return str(metadata.schema.column(leaf).logical_type.type) == "UNKNOWN"


def _may_hold_values(metadata: pq.FileMetaData, leaf: int, groups: Sequence[int]) -> bool:
    """Whether the statistics leave room for a value other than null."""
    chunks = [metadata.row_group(group).column(leaf) for group in groups]
    return any((stated_nulls(chunk) or 0) < chunk.num_values for chunk in chunks)


def _batches(file: pq.ParquetFile, leaf: int, groups: Sequence[int]) -> Iterator[pa.RecordBatch]:
    path = file.metadata.schema.column(leaf).path
    yield from file.iter_batches(row_groups=list(groups), columns=[path], use_threads=False)


def _holds_values(batch: pa.RecordBatch) -> bool:
    return any(leaf.null_count < len(leaf) for column in batch.columns for leaf in leaves_of(column))
