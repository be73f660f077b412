"""Write the rows of a local Parquet file that satisfy a condition to a new file.

Row groups of which every row matches are copied as bytes. The others are decoded in batches, filtered, and encoded
as they were: with the same codecs, dictionaries and statistics, under the same schema and key-value metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.filters.expression import condition_columns, expression_of, rows_where
from pqcache.filters.sql import parse_condition
from pqcache.parquet.arrow_rows import take_of_table
from pqcache.parquet.encodings import Encodings, has_integer_decimals
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.doubtful import check_read_right
from pqcache.parquet.footer.source_footer import SourceFooter, open_parquet, read_source_footers
from pqcache.parquet.projection import keyvalues_of, project
from pqcache.parquet.rewrite.encode import FooterSchema, as_row_group, encode_rows, note_dictionaries
from pqcache.parquet.rewrite.files import (
    WRITERS,
    OutputSchema,
    RowGroupFile,
    footer_schema_of,
    widen_dictionary_indices,
    write_errors,
)
from pqcache.parquet.schema_merge import (
    cast_to_schema,
    condition_schema_of,
    with_fields,
    with_time_zones,
    working_schema,
)

_BATCH = 4 << 20  # Arrow bytes decoded at once, by an estimate
_MAX_BATCH_ROWS = 32 << 10  # dictionaries can make the estimate far too low
_ROW_GROUP = 32 << 20  # Arrow bytes encoded at once
_COPY = 1 << 20  # bytes copied at once

log = logging.getLogger("pqcache.sync")


def condition_schema(
    schema: pa.Schema, partitions: Mapping[str, pa.Scalar], types: Mapping[str, pa.DataType]
) -> pa.Schema:
    """Return the columns that a condition may name: the file's, then the partition columns, whose values win.

    Structs have the fields that ``types`` know of, too; in a file from before they were added they are null.
    """
    schema = with_time_zones(schema, pa.schema(list(types.items())))
    known = pa.schema([f.with_type(with_fields(f.type, types[f.name])) if f.name in types else f for f in schema])
    in_file = [column for column in condition_schema_of(known) if column.name not in partitions]
    return pa.schema([*in_file, *(pa.field(name, value.type) for name, value in partitions.items())])


@dataclass(frozen=True, kw_only=True)
class MatchingRows:
    """Which rows and columns of a Parquet file are kept.

    Attributes:
        where: the condition; None where rows are left out only since they are deleted.
        partitions: the values of the partition columns; they win over columns of the file.
        columns: for each top-level column, whether to keep it; the others serve the condition only.
        every: for each row group, whether all its rows are known to match.
        kept: for each row group, which of its rows are not deleted; None where none is.
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
        UsageError: the condition makes no sense for the file.
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
    output = _filtered_file(opened, target, rows.columns, disk, name)
    if not output.copies and any(rows.every):
        log.debug("%s: row groups of which every row matches are encoded again: columns are stored otherwise", name)
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


@dataclass(kw_only=True)
class _FilteredFile:
    """The file that is being written, and the rows that wait for it.

    ``wanted`` says which top-level columns of ``source`` it holds, ``positions`` says the same. ``copies`` says
    whether row groups can be copied: their columns are stored as those encoded here.
    """

    source: SourceFooter
    name: str
    wanted: Sequence[bool]
    positions: list[int]
    fields: thrift.Struct
    limit: int
    output_schema: OutputSchema
    footer_schema: FooterSchema
    file: RowGroupFile
    as_integer: bool
    copies: bool
    encodings: Encodings | None = None
    template: thrift.Struct | None = None
    waiting: list[pa.Table] = field(default_factory=list)
    size: int = 0
    dictionaries: dict[str, int] = field(default_factory=dict)

    def add(self, table: pa.Table, group: int) -> None:
        if not table.num_rows:
            return
        if self.encodings is None:
            self.encodings = _encodings_of(
                self.source, group, self.wanted, self.footer_schema, self.as_integer, self.name
            )
        self.waiting.append(table)
        self.size += table.nbytes
        if self.size >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        table = pa.concat_tables(self.waiting)
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            note_dictionaries(table, self.dictionaries)
        assert self.encodings is not None
        self.file.append(as_row_group(encode_rows(table, self.encodings, self.name)))
        self.waiting, self.size = [], 0

    def copy(self, group: int) -> None:
        offset, number = self.file.position, len(self.file.groups)
        found = project(self.fields, self.wanted, [group], self.limit, self.name, offset, number)
        with write_errors(self.file.path), self.source.path.open("rb") as pages:
            out = self.file.open()
            for byte_range in found.ranges:
                pages.seek(byte_range.offset)
                left = byte_range.length
                while left and (data := pages.read(min(left, _COPY))):
                    out.write(data)
                    left -= len(data)
        self.file.groups.append(found.fields[4][1].values[0])
        self.file.rows += self.source.metadata.row_group(group).num_rows
        self.file.position = found.size
        # Which statistics can be trusted follows from who wrote the file: here the more doubtful of the two.
        self.template = found.fields

    def finish(self) -> None:
        if self.template is not None:
            self.file.template = self.template
        self.file.finish(widen_dictionary_indices(self.output_schema, self.dictionaries).keyvalues)


def _filtered_file(
    opened: SourceFooter, target: Path, wanted: Sequence[bool], disk: Executor, name: str
) -> _FilteredFile:
    data = footer.read_local_tail(opened.path).footer
    fields = thrift.decode(data, name)
    limit = opened.size - 8 - len(data)
    empty = project(fields, wanted, [], limit, name).fields
    elements = footer.schema_of(empty, name)
    keyvalues = keyvalues_of(empty)
    positions = [number for number, keep in enumerate(wanted) if keep]
    declared = pa.schema([opened.schema.field(number) for number in positions], metadata=opened.schema.metadata)
    output_schema = OutputSchema(
        working=working_schema(declared), declared=declared, elements=elements, keyvalues=keyvalues
    )
    leaves = [opened.metadata.schema.column(leaf) for leaf in _leaves(opened, wanted, name)]
    as_integer = has_integer_decimals(leaves)
    footer_schema = footer_schema_of(output_schema, Encodings(decimal_as_integer=as_integer))
    return _FilteredFile(
        source=opened,
        name=name,
        wanted=wanted,
        positions=positions,
        fields=fields,
        limit=limit,
        output_schema=output_schema,
        footer_schema=footer_schema,
        file=RowGroupFile(path=target, footer_schema=footer_schema, disk=disk, use_page_cache=True),
        as_integer=as_integer,
        copies=footer_schema.schema == elements,
    )


def _leaves(source: SourceFooter, wanted: Sequence[bool], name: str) -> list[int]:
    leaves = footer.leaves_of(source.elements, name)
    return [number for number, leaf in enumerate(leaves) if wanted[leaf.column]]


def _encodings_of(
    source: SourceFooter, group: int, wanted: Sequence[bool], footer_schema: FooterSchema, as_integer: bool, name: str
) -> Encodings:
    metadata = source.metadata.row_group(group)
    chunks = dict(zip(footer_schema.names, map(metadata.column, _leaves(source, wanted, name)), strict=True))
    codecs = {path: chunk.compression.lower() for path, chunk in chunks.items()}
    known_as = {"uncompressed": "none", "lz4_raw": "lz4"}
    return Encodings(
        codecs={path: known_as.get(codec, codec) for path, codec in codecs.items()},
        dictionary=[path for path, chunk in chunks.items() if chunk.has_dictionary_page],
        statistics=[path for path, chunk in chunks.items() if chunk.is_stats_set],
        decimal_as_integer=as_integer,
    )


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
            f"row group {group} of those fetched holds {found:,} rows, and {metadata.num_rows:,} in the footer",
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
