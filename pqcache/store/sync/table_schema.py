"""The footers of remote files, and the schema of a table of many files.

Files must agree on it before partitions are rewritten one by one. It is computed once, from the footers: a schema for
all values, one unit for INT96 time stamps, and the dense columns.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line
from pqcache.events import OnEvent, ignore
from pqcache.parquet import thrift
from pqcache.parquet.arrow import least_width
from pqcache.parquet.dense import Dense, as_lists, common_dense, dense_in, is_alike, with_dense_columns
from pqcache.parquet.footer import Tail, footer_and_magic, read_tail
from pqcache.parquet.misread import Int96Values, int96_leaves, int96_unit, int96_values, stored_bytes_metadata
from pqcache.parquet.schema import merge_schemas, with_time_zones
from pqcache.parquet.validation import footer_in
from pqcache.store.drivers.base import RangedFile, Source, read_range
from pqcache.store.drivers.local import LocalSource
from pqcache.store.drivers.timeouts import FEW_TRIES, with_retries
from pqcache.store.manifest import FileEntry, Identity, SourceFile
from pqcache.system.threads import in_parallel

T = TypeVar("T")
_JOBS = 16  # footers read at once


@dataclass(frozen=True)
class FileSize:
    """The number of row groups in a file, and an estimate of its rows' bytes in memory."""

    row_groups: int
    decoded: int


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """The schema that all files of a table share.

    Attributes:
        schema: holds every row of every file without loss; lists where columns are dense, and no key-values.
        int96: the unit of INT96 time stamps, or None without any.
        dense: the columns stored dense, alike in every file that has them; None without any.
        sizes: of each file.
        others: the paths of files with another schema, or with INT96 that is not kept.
    """

    schema: pa.Schema
    int96: str | None
    dense: tuple[tuple[str, Dense], ...] | None
    sizes: Mapping[SourceFile, FileSize] = field(default_factory=dict)
    others: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """A digest of everything that decides how a file is written."""
        parts = self.schema.serialize().to_pybytes(), repr((self.int96, self.dense)).encode()
        return hashlib.sha256(b"|".join(parts)).hexdigest()


def read_table_schema(
    source: Source,
    files: Sequence[SourceFile],
    on_event: OnEvent = ignore,
    of_table: pa.Schema | None = None,
) -> TableSchema:
    """Find the schema of ``files`` from their footers; INT96 columns are read, as no footer has their range.

    ``of_table`` is the schema of their Delta or Iceberg table.

    Raises:
        ParquetError: a file is damaged, or types do not mix without loss; names the two files and the types.
        SourceError: a file cannot be read.
    """

    zones = pa.schema([]) if of_table is None else of_table

    def of_each(call: Callable[[SourceFile], T], some: Sequence[SourceFile]) -> list[T]:
        calls = [partial(with_retries, partial(call, file), file.path, FEW_TRIES, on_event) for file in some]
        return in_parallel(calls, _JOBS)

    found = of_each(lambda file: _schema_of(source, file, "us"), files)
    leaves = {file: some for file, (_, some, _) in zip(files, found, strict=True) if some}
    unit = None
    if leaves:
        values = of_each(lambda file: _int96_values(source, file, leaves[file]), list(leaves))
        unit = int96_unit([(source.url_of(file.path), some) for file, some in zip(leaves, values, strict=True)])
    if unit == "ns":
        found = of_each(lambda file: _schema_of(source, file, "ns"), files)
    found = [(with_time_zones(schema, zones), int96, size) for schema, int96, size in found]
    schemas = SchemaSet()
    for file, (schema, _, _) in zip(files, found, strict=True):
        schemas.add(source.url_of(file.path), schema)
    distinct = [schema for _, schema in schemas.distinct.values()]
    dense = tuple(sorted(common_dense(distinct).items())) if any(map(dense_in, distinct)) else None
    stored = with_dense_columns(schemas.schema, dict(dense or ()))
    alike = {key for key, (_, schema) in schemas.distinct.items() if is_alike(schema, stored)}
    return TableSchema(
        schema=schemas.schema,
        int96=unit,
        dense=dense,
        sizes={file: size for file, (_, _, size) in zip(files, found, strict=True)},
        others=frozenset(
            file.path
            for file, (schema, int96, _) in zip(files, found, strict=True)
            if int96 or SchemaSet.key(schema) not in alike
        ),
    )


def local_table_schema(root: Path, entries: Sequence[FileEntry], of_table: pa.Schema | None = None) -> TableSchema:
    files = [SourceFile(entry.path, Identity(entry.size, 0)) for entry in entries]
    return read_table_schema(LocalSource(str(root), {}), files, of_table=of_table)


def uniform_table_schema(schema: pa.Schema) -> TableSchema:
    """Schema of a table whose files all have ``schema``, without INT96."""
    return TableSchema(
        schema=as_lists(schema).remove_metadata(), int96=None, dense=tuple(sorted(dense_in(schema).items())) or None
    )


class SchemaSet:
    """The distinct schemas of many files, and one that holds all their rows; ``of_table`` is their table's."""

    def __init__(self, of_table: pa.Schema | None = None) -> None:
        self._of_table = pa.schema([]) if of_table is None else of_table
        self.distinct: dict[bytes, tuple[str, pa.Schema]] = {}
        self.schema = pa.schema([])

    @staticmethod
    def key(schema: pa.Schema) -> bytes:
        """Equal for equal schemas."""
        # without key-values: that of pandas differs from file to file
        return bytes(schema.remove_metadata().serialize().to_pybytes())

    def add(self, name: str, schema: pa.Schema) -> None:
        """Add a schema; if types do not mix without loss, raises ParquetError with two files and the types."""
        schema = with_time_zones(schema, self._of_table)
        key = self.key(schema)
        if key in self.distinct:
            return
        before = [("", self.schema)] if self.distinct else []
        self.distinct[key] = name, schema.remove_metadata()
        try:
            self.schema = merge_schemas([*before, (name, as_lists(schema.remove_metadata()))])
        except ParquetError:
            named = [(name, as_lists(schema)) for name, schema in self.distinct.values()]
            del self.distinct[key]
            merge_schemas(named)  # which names the two files
            raise


def _schema_of(source: Source, file: SourceFile, unit: str) -> tuple[pa.Schema, list[int], FileSize]:
    """A file's Arrow schema, its INT96 leaf columns, and its size."""
    metadata, schema = read_remote_footer(source, file, unit)
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    size = max(size, int(metadata.num_rows * sum(least_width(field.type) for field in schema)))
    int96 = int96_leaves(metadata) if metadata.num_rows else []
    return schema, int96, FileSize(metadata.num_row_groups, size)


def _int96_values(source: Source, file: SourceFile, leaves: Sequence[int]) -> Int96Values:
    name = source.url_of(file.path)
    try:
        read = partial(read_range, source, file.path)
        remote = RangedFile(read, file.identity.size)
        metadata = stored_bytes_metadata(read_remote_tail(source, file).footer, leaves, name)
        paths = [metadata.schema.column(leaf).path for leaf in leaves]
        stream = pa.PythonFile(io.BufferedReader(remote, 1 << 20), "r")
        with pq.ParquetFile(stream, metadata=metadata, pre_buffer=True) as opened:
            return int96_values(opened.iter_batches(columns=paths))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, and not of a damaged page
            raise
        raise ParquetError(name, f"cannot be decoded ({first_line(error)})", "write it again at the source") from error


def read_remote_footer(source: Source, file: SourceFile, int96: str = "ns") -> tuple[pq.FileMetaData, pa.Schema]:
    """Read a remote file's footer and schema from its end; INT96 times get the unit ``int96``."""
    url, size = source.url_of(file.path), file.identity.size
    return footer_in(read_remote_tail(source, file).data, url, int96, size=size)


def read_remote_tail(source: Source, file: SourceFile) -> Tail:
    """The end of a file, with its footer under its table's names."""

    def read(offset: int, length: int) -> bytes:
        return read_range(source, file.path, offset, length)

    url = source.url_of(file.path)
    tail, shape = read_tail(read, file.identity.size, url), source.shape_of(file.path)
    if shape is None or shape.columns is None:
        return tail
    from pqcache.parquet.projection import as_in_table

    fields = as_in_table(thrift.decode(tail.footer, url), shape.columns, url)
    return Tail(footer_and_magic(fields), tail.limit, tail.limit)
