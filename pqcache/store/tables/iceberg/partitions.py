"""The partition directories of a table's files: those of columns whose values are partitions, as Hive writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from pqcache.store.hive import NULL
from pqcache.store.tables.iceberg.columns import arrow_type
from pqcache.store.tables.table import partition_path

_IN_PATHS = (
    BooleanType, DateType, DecimalType, IntegerType, LongType, StringType, TimestampType, TimestamptzType,
)  # fmt: skip
_MAX_NAME = 255  # bytes, of most file systems


@dataclass(frozen=True)
class _PathColumn:
    """A column in the paths of files: its name, its type, and its position among their partition values."""

    name: str
    type: pa.DataType
    position: int


class Partitioning:
    """The partition directories of the files of a table, each by the spec that it was written with.

    A column that a file's spec has the values of (an identity transform) is a directory. All others are in the files
    alone, which hidden partitions always are, and so is a value that a path cannot give back as it was: an empty text,
    one too long, a number that is not exact as text.
    """

    def __init__(self, metadata: TableMetadata, schema: Schema) -> None:
        now = {field.source_id: order for order, field in enumerate(metadata.spec().fields)}
        self._columns = {
            spec.spec_id: sorted(
                _columns_of(spec, metadata, schema), key=lambda column: now.get(column[0], len(now) + column[0])
            )
            for spec in metadata.partition_specs
        }

    def directory(self, file: DataFile) -> str:
        """Return the directory of a data file, empty where it has none."""
        values: dict[str, str | None] = {}
        for _, column in self._columns.get(file.spec_id, ()):
            value = file.partition[column.position]
            text = None if value is None else _text(value, column.type)
            if text != "" and len(partition_path({column.name: text}).encode()) <= _MAX_NAME:
                values[column.name] = text
        return partition_path(values)


def _columns_of(spec: PartitionSpec, metadata: TableMetadata, schema: Schema) -> list[tuple[int, _PathColumn]]:
    """Return the columns in the paths of a spec's files, each with its field ID."""
    top = {field.field_id: field for field in schema.fields}
    found = []
    for position, field in enumerate(spec.fields):
        source = top.get(field.source_id)
        if source is None or not isinstance(field.transform, IdentityTransform):
            continue
        if isinstance(source.field_type, _IN_PATHS) and _is_stable(field.source_id, metadata):
            found.append((field.source_id, _PathColumn(source.name, arrow_type(source.field_type), position)))
    return found


def _is_stable(field_id: int, metadata: TableMetadata) -> bool:
    """Return whether a column's partition values mean the same in all of a table's schemas."""
    kinds: set[type[IcebergType]] = set()
    for schema in metadata.schemas:
        kinds |= {type(field.field_type) for field in schema.fields if field.field_id == field_id}
    return len(kinds) == 1 or kinds == {IntegerType, LongType}


@lru_cache(1 << 14)
def _text(value: Any, kind: pa.DataType) -> str:
    """Return the text of a partition value that reads as the same value; empty where there is none."""
    if pa.types.is_string(kind):
        return "" if value == NULL else str(value)
    try:
        typed = pa.scalar(value, kind)
        text = typed.cast(pa.string())
        return str(text) if text.cast(kind) == typed else ""
    except (pa.ArrowException, ValueError, OverflowError):
        return ""
