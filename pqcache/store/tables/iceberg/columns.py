"""The columns of an Iceberg table: as an Arrow schema, and as files of any age know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
from pyiceberg.schema import Schema, index_by_id, index_name_by_id
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import MappedField, parse_mapping_from_json
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UnknownType,
    UUIDType,
)

from pqcache.errors import UsageError
from pqcache.parquet.column_mapping import ColumnKind, TableColumn

NAME_MAPPING = "schema.name-mapping.default"
_ARROW: Mapping[type[IcebergType], pa.DataType] = {
    BooleanType: pa.bool_(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    DateType: pa.date32(),
    TimeType: pa.time64("us"),
    TimestampType: pa.timestamp("us"),
    TimestamptzType: pa.timestamp("us", "UTC"),
    TimestampNanoType: pa.timestamp("ns"),
    TimestamptzNanoType: pa.timestamp("ns", "UTC"),
    StringType: pa.string(),
    BinaryType: pa.binary(),
    UUIDType: pa.uuid(),
    UnknownType: pa.null(),
}


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return a table's schema in the types in which Arrow reads its files."""
    return pa.schema([_arrow_field(field) for field in schema.fields])


def arrow_type(kind: IcebergType) -> pa.DataType:
    """Return the type in which Arrow reads a column; of what Arrow does not know, that of its bytes."""
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, FixedType):
        return pa.binary(len(kind))
    if isinstance(kind, StructType):
        return pa.struct([_arrow_field(field) for field in kind.fields])
    if isinstance(kind, ListType):
        return pa.list_(_arrow_field(kind.element_field))
    if isinstance(kind, MapType):
        return pa.map_(arrow_type(kind.key_type), _arrow_field(kind.value_field))
    return _ARROW.get(type(kind), pa.binary())


def table_columns(metadata: TableMetadata, schema: Schema) -> tuple[TableColumn, ...] | None:
    """Return how files know the columns of ``schema``; None where every file is known to have just its names.

    That is known where the table has kept all its schemas, none of them has a column that ``schema`` lacks or names
    otherwise, and its files were written by engines that know its columns. A table of version 3 may have columns of
    its own in files, and one of version 1 may have lost its schemas.
    """
    mapping = metadata.properties.get(NAME_MAPPING)
    names = index_name_by_id(schema)
    kept = sorted(known.schema_id for known in metadata.schemas) == list(range(len(metadata.schemas)))
    same = all(index_name_by_id(known).items() <= names.items() for known in metadata.schemas)
    if metadata.format_version == 2 and mapping is None and kept and same:
        return None
    stored = {} if mapping is None else dict(_names(parse_mapping_from_json(mapping).root))
    return tuple(_column(field, stored) for field in schema.fields)


def check_defaults(metadata: TableMetadata, schema: Schema, url: str) -> None:
    """Raise UsageError where a file may lack a column whose value in it would not be null."""
    known = [index_by_id(other) for other in metadata.schemas]
    first = min(other.schema_id for other in metadata.schemas) == 0
    for number, field in index_by_id(schema).items():
        if field.initial_default is not None and not (first and all(number in other for other in known)):
            raise UsageError(
                url,
                f"column {schema.find_column_name(number)!r} was added with a default value for rows that lack it "
                "(initial-default), and pqcache has nulls there",
                "have the engine write the table's files again, or take them as they are with --as-files",
            )


def _arrow_field(field: NestedField) -> pa.Field:
    return pa.field(field.name, arrow_type(field.field_type), field.optional)


def _names(fields: Iterable[MappedField]) -> Iterable[tuple[int, frozenset[str]]]:
    """Yield the IDs of fields and their names in files without IDs, also of those inside of them."""
    for field in fields:
        if field.field_id is not None:
            yield field.field_id, frozenset(field.names)
        yield from _names(field.fields)


def _column(field: NestedField, stored: Mapping[int, frozenset[str]]) -> TableColumn:
    kind, inside = ColumnKind.LEAF, tuple[NestedField, ...]()
    if isinstance(field.field_type, StructType):
        kind, inside = ColumnKind.STRUCT, field.field_type.fields
    elif isinstance(field.field_type, ListType):
        kind, inside = ColumnKind.LIST, (field.field_type.element_field,)
    elif isinstance(field.field_type, MapType):
        kind, inside = ColumnKind.MAP, (field.field_type.key_field, field.field_type.value_field)
    return TableColumn(
        name=field.name,
        field_id=field.field_id,
        stored=stored.get(field.field_id, frozenset()),
        kind=kind,
        fields=tuple(_column(of, stored) for of in inside),
    )
