"""The partition directories of a table's files: those of columns whose values are partitions, as Hive writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, index_by_id
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)

from pqcache.errors import UsageError
from pqcache.store.hive import NULL
from pqcache.store.tables.iceberg.columns import arrow_type
from pqcache.store.tables.table import partition_path
from pqcache.store.urls import printable

_IN_PATHS = (
    BooleanType, DateType, DecimalType, IntegerType, LongType, StringType, TimestampType, TimestamptzType,
)  # fmt: skip
_MAX_NAME = 255  # bytes, of most file systems


@dataclass(frozen=True, kw_only=True)
class _PartitionColumn:
    """A column whose values are partitions.

    Attributes:
        name: its name in the table.
        field_id: its ID.
        position: that among the partition values of a file.
        type: its type in paths; None where its values cannot be in them.
    """

    name: str
    field_id: int
    position: int
    type: pa.DataType | None


class Partitioning:
    """The partition directories of the files of a table, each by the spec that it was written with.

    A column that a file's spec has the values of (an identity transform) is a directory. All others are in the files
    alone, which hidden partitions always are, and so is a value that a path cannot give back as it was: an empty text,
    one too long, a number that is not exact as text. So a new spec leaves the paths of older files as they are.
    """

    def __init__(self, metadata: TableMetadata, schema: Schema) -> None:
        self._columns = {spec.spec_id: _columns_of(spec, metadata, schema) for spec in metadata.partition_specs}

    def directory(self, file: DataFile) -> str:
        """Return the directory of a data file, empty where it has none.

        Raises UsageError where a value is in the metadata that may be nowhere else: engines that take files of Hive's
        into a table leave them as they are, without the partition columns.
        """
        values: dict[str, str | None] = {}
        for column in self._columns.get(file.spec_id, ()):
            value = file.partition[column.position]
            text = None if value is None else _text(value, column.type)
            if text != "" and column.type is not None and _is_name(column.name, text):
                values[column.name] = text
            elif value is not None and not _has(file, column.field_id):
                raise UsageError(
                    printable(file.file_path),
                    f"may lack the column {column.name!r}, whose value in it ({printable(str(value))[:80]}) cannot be "
                    "in a path, and its table's metadata have no statistics of it",
                    "have the engine write the table's files again (Spark: rewrite_data_files)",
                )
        return partition_path(values)


def _columns_of(spec: PartitionSpec, metadata: TableMetadata, schema: Schema) -> list[_PartitionColumn]:
    """Return the columns whose values are in a spec."""
    fields, top = index_by_id(schema), {field.field_id for field in schema.fields}
    return [
        _PartitionColumn(
            name=str(schema.find_column_name(source.field_id)),
            field_id=source.field_id,
            position=position,
            type=_path_type(source, metadata) if source.field_id in top else None,
        )
        for position, field in enumerate(spec.fields)
        if isinstance(field.transform, IdentityTransform) and (source := fields.get(field.source_id)) is not None
    ]


def _path_type(column: NestedField, metadata: TableMetadata) -> pa.DataType | None:
    """Return a column's type in paths; None where it cannot be in them, or was of a kind that reads otherwise there."""
    kinds: set[type[IcebergType]] = set()
    for schema in metadata.schemas:
        kinds |= {type(field.field_type) for field in schema.fields if field.field_id == column.field_id}
    stable = len(kinds) == 1 or kinds == {IntegerType, LongType}
    return arrow_type(column.field_type) if stable and isinstance(column.field_type, _IN_PATHS) else None


def _is_name(column: str, text: str | None) -> bool:
    return len(partition_path({column: text}).encode(errors="surrogatepass")) <= _MAX_NAME


def _has(file: DataFile, field_id: int) -> bool:
    """Return whether the metadata of a file show that the column is in it."""
    return any(known is not None and field_id in known for known in (file.value_counts, file.column_sizes))


@lru_cache(1 << 14)
def _text(value: Any, kind: pa.DataType | None) -> str:
    """Return the text of a partition value that reads as the same value; empty where there is none."""
    if kind is None:
        return ""
    if pa.types.is_string(kind):
        return "" if value == NULL else str(value)
    try:
        typed = pa.scalar(value, kind)
        text = typed.cast(pa.string())
        return str(text) if text.cast(kind) == typed else ""
    except (pa.ArrowException, ValueError, OverflowError):
        return ""
