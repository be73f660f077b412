"""One schema for files that drifted apart, and data converted to it without loss.

``merge_schemas`` finds the narrowest schema that holds every value of every file, or says which two files disagree.
``working_schema`` is that schema in types that can be cut, measured and written batch by batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError, TypeClash
from pqcache.parquet.dense_columns import dense_in
from pqcache.parquet.nested import with_changed_types

_UNITS = ("s", "ms", "us", "ns")
_FLOATS = {pa.float16(): 11, pa.float32(): 24, pa.float64(): 53}  # bits of an integer that each holds exactly


class _Differ(Exception):
    """Two types have no common one; the argument is the dotted path below the column."""


def _wider_int(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if pt.is_signed_integer(a) == pt.is_signed_integer(b):
        return max(a, b, key=lambda t: t.bit_width)
    signed, unsigned = (a, b) if pt.is_signed_integer(a) else (b, a)
    bits = max(signed.bit_width, 2 * unsigned.bit_width)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)


def _wider_float(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the narrowest float, no narrower than the one given, that holds every value of the integer type too."""
    number, integer = (a, b) if a in _FLOATS else (b, a)
    bits = integer.bit_width - pt.is_signed_integer(integer)
    return next((t for t, exact in _FLOATS.items() if t.bit_width >= number.bit_width and exact >= bits), None)


def _wider_decimal(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    scale = max(a.scale, b.scale)
    precision = max(a.precision - a.scale, b.precision - b.scale) + scale
    if precision <= 38:
        return pa.decimal128(precision, scale)
    return pa.decimal256(precision, scale) if precision <= 76 else None


def _wider_text(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    for small, large, view in (
        (pa.string(), pa.large_string(), pa.string_view()),
        (pa.binary(), pa.large_binary(), pa.binary_view()),
    ):
        if {a, b} <= {small, large, view}:
            return large
    return None


def _merged_fields(a: Sequence[pa.Field], b: Sequence[pa.Field]) -> list[pa.Field]:
    """Return the fields of two structs or schemas, by name: ``a``'s in order, then those only ``b`` has."""
    if [f.name for f in a] == [f.name for f in b]:
        return [_merged_field(x, y) for x, y in zip(a, b, strict=True)]
    for fields in (a, b):
        doubled = [name for name, count in Counter(f.name for f in fields).items() if count > 1]
        if doubled:
            raise _Differ(f".{doubled[0]} (which occurs twice)")
    others = {field.name: field for field in b}
    merged = [_merged_field(field, others.pop(field.name)) if field.name in others else _optional(field) for field in a]
    return merged + [_optional(field) for field in others.values()]


def _optional(field: pa.Field) -> pa.Field:
    """Return a field that may be null, and so may those of a struct: where a file lacks it, all of them are."""
    if pt.is_struct(field.type):
        field = field.with_type(pa.struct(list(map(_optional, field.type.fields))))
    elif pt.is_fixed_size_list(field.type):  # a null has items, unlike one of other lists
        field = field.with_type(pa.list_(_optional(field.type.value_field), field.type.list_size))
    return field.with_nullable(True)


def _merged_field(a: pa.Field, b: pa.Field) -> pa.Field:
    try:
        kind = _merged_type(a.type, b.type)
    except _Differ as error:
        raise _Differ(f".{a.name}{error}") from None
    field = a.with_type(kind).with_nullable(a.nullable or b.nullable or pt.is_null(a.type) or pt.is_null(b.type))
    if b.metadata and not a.metadata:
        field = field.with_metadata(b.metadata)
    return field


def _merged_type(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Return the narrowest type that holds every value of ``a`` and ``b``, or raise `_Differ`."""
    if a == b or pt.is_null(b):
        return a
    if pt.is_null(a):
        return b
    found: pa.DataType | None = None
    if pt.is_integer(a) and pt.is_integer(b):
        found = _wider_int(a, b)
    elif a in _FLOATS and b in _FLOATS:
        found = max(a, b, key=lambda t: t.bit_width)
    elif (a in _FLOATS and pt.is_integer(b)) or (b in _FLOATS and pt.is_integer(a)):
        found = _wider_float(a, b)
    elif pt.is_decimal(a) and pt.is_decimal(b):
        found = _wider_decimal(a, b)
    elif pt.is_dictionary(a) or pt.is_dictionary(b):
        values = [t.value_type if pt.is_dictionary(t) else t for t in (a, b)]
        found = _merged_type(*values)
        if pt.is_dictionary(a) and pt.is_dictionary(b):
            found = pa.dictionary(pa.int32(), found, a.ordered and b.ordered)
    elif pt.is_timestamp(a) and pt.is_timestamp(b) and a.tz == b.tz:
        found = pa.timestamp(max(a.unit, b.unit, key=_UNITS.index), a.tz)
    elif pt.is_time(a) and pt.is_time(b):
        unit = max(a.unit, b.unit, key=_UNITS.index)
        found = pa.time64(unit) if unit in ("us", "ns") else pa.time32(unit)
    elif pt.is_duration(a) and pt.is_duration(b):
        found = pa.duration(max(a.unit, b.unit, key=_UNITS.index))
    elif pt.is_struct(a) and pt.is_struct(b):
        found = pa.struct(_merged_fields(a.fields, b.fields))
    elif pt.is_map(a) and pt.is_map(b):
        found = pa.map_(_merged_field(a.key_field, b.key_field), _merged_field(a.item_field, b.item_field))
    elif _is_list(a) and _is_list(b):
        item = _merged_field(a.value_field, b.value_field)
        if pt.is_fixed_size_list(a) and pt.is_fixed_size_list(b) and a.list_size == b.list_size:
            found = pa.list_(item, a.list_size)
        else:
            found = pa.large_list(item) if pt.is_large_list(a) or pt.is_large_list(b) else pa.list_(item)
    else:
        found = _wider_text(a, b)
    if found is None:
        raise _Differ("")
    return found


def without_views(kind: pa.DataType) -> pa.DataType:
    """Return a type with strings and binary in place of views, of which Arrow joins and takes little."""
    if pt.is_string_view(kind):
        return pa.string()
    return pa.binary() if pt.is_binary_view(kind) else with_changed_types(kind, without_views)


def with_fields(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type with the fields that only ``other`` has, where both are structs, also inside; they may be null."""
    if not (pt.is_struct(kind) and pt.is_struct(other)):
        return kind
    inside = {field.name.lower(): field for field in other.fields}
    fields = []
    for field in kind.fields:
        more = inside.pop(field.name.lower(), None)
        fields.append(field if more is None else field.with_type(with_fields(field.type, more.type)))
    return pa.struct([*fields, *map(_optional, inside.values())])


def promoted(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return a schema to which Arrow converts both; raises Arrow's errors where there is none.

    Views, which newer writers say that strings are, become strings where the other schema has none.
    """
    try:
        return pa.unify_schemas([one, other], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        plain = [pa.schema([f.with_type(without_views(f.type)) for f in s], s.metadata) for s in (one, other)]
        return pa.unify_schemas(plain, promote_options="permissive")


def unify(schemas: Iterable[tuple[str, pa.Schema]], owner: Callable[[str], str] | None = None) -> pa.Schema:
    """Return one schema for all files; types that do not widen without loss raise ParquetError by file.

    Where the first schema is that of many files, ``owner`` returns one of them that has a column.
    """
    result: pa.Schema | None = None
    first = ""
    origin: dict[str, str] = {}  # the file that each column has its type from
    for path, schema in schemas:
        if result is None:
            result, first = schema, path
            origin = dict.fromkeys(schema.names, path)
            continue
        here, there = dense_in(schema), dense_in(result)
        for name in here.keys() & there.keys():
            if here[name] != there[name]:
                raise ParquetError(
                    path,
                    f"column {name!r} is stored as {here[name].text}, and as {there[name].text} in {first}",
                    f"make them alike with 'pqcache repartition --dense {name}'",
                )
        try:
            before, result = result, promoted(result, schema)
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            names = {name: owner(name) if owner and of == first else of for name, of in origin.items()}
            clash = _clash(path, schema, result, names)
            advice = "write one of them again with the other's types"
            raise clash or ParquetError(path, f"its schema does not fit {first} ({error})", advice) from error
        if before != result:
            origin |= {f.name: path for f in result if f.name not in origin or before.field(f.name).type != f.type}
    return result if result is not None else pa.schema([])


def _clash(path: str, schema: pa.Schema, known: pa.Schema, origin: Mapping[str, str]) -> TypeClash | None:
    """Return the error for the first column whose type in a file does not fit that of the others."""
    for field in schema:
        if field.name not in known.names:
            continue
        other = known.field(field.name)
        try:
            promoted(pa.schema([other]), pa.schema([field]))
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            files = (path, origin[field.name])
            reason = f"column {field.name!r} is {field.type}, which does not fit {other.type} in {files[1]}"
            advice = "write one of the two files again with the other's type"
            return TypeClash(path, reason, advice, column=field.name, files=files, types=(field.type, other.type))
    return None


def with_table_columns(files: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Return the schema of files as that of their table: with the columns that none has yet, and its wider numbers.

    All other types are as in the files.
    """
    fields = [field.with_type(_as_wide(field.type, table, field.name)) for field in files]
    missing = [_optional(field) for field in table if field.name not in files.names]
    return pa.schema([*fields, *missing], files.metadata) if len(table) else files


def with_time_zones(files: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Return the schema of files with the time zones that the columns of their ``table`` have.

    Times without a zone in such a column are in UTC: those stored as INT96 can have none.
    """
    fields = [f.with_type(_zoned(f.type, table.field(f.name).type)) if f.name in table.names else f for f in files]
    return pa.schema(fields, files.metadata) if len(table) else files


def _zoned(kind: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    if pt.is_timestamp(kind) and pt.is_timestamp(wanted):
        return kind if kind.tz is not None or wanted.tz is None else pa.timestamp(kind.unit, wanted.tz)
    if pt.is_struct(kind) and pt.is_struct(wanted):
        inside = {field.name: field.type for field in wanted.fields}
        return pa.struct([f.with_type(_zoned(f.type, inside.get(f.name, f.type))) for f in kind.fields])
    if pt.is_map(kind) and pt.is_map(wanted):
        kinds = iter((wanted.key_type, wanted.item_type))
        return with_changed_types(kind, lambda inner: _zoned(inner, next(kinds)))
    if _is_list(kind) and _is_list(wanted):
        return with_changed_types(kind, lambda inner: _zoned(inner, wanted.value_type))
    return kind


def _as_wide(kind: pa.DataType, table: pa.Schema, name: str) -> pa.DataType:
    """Return the type of a column of ``table`` where it is a number that holds each of ``kind``, else ``kind``."""
    wanted = table.field(name).type if name in table.names else kind
    if wanted == kind or not all(pt.is_primitive(t) or pt.is_decimal(t) for t in (kind, wanted)):
        return kind
    try:
        both = _merged_type(kind, wanted)
    except _Differ:
        return kind
    number = pt.is_integer(wanted) or pt.is_floating(wanted) or pt.is_decimal(wanted)
    return wanted if number and both == wanted else kind


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is string or binary of any size."""
    return bool(pt.is_string(kind) or pt.is_binary(kind) or pt.is_large_string(kind) or pt.is_large_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def merge_schemas(named: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return the schema that holds every row of every file without loss.

    Columns are matched by name; the first file's order rules and new columns follow. Key-value metadata is the
    first file's, with the keys that only later files have.

    Args:
        named: file name and schema, in order.

    Raises:
        ParquetError: a column's types have no common one; names the two files and the types.
    """
    name, schema = named[0]
    origin = dict.fromkeys(schema.names, name)
    for other_name, other in named[1:]:
        if not other.equals(schema, check_metadata=True):
            try:
                fields = _merged_fields(list(schema), list(other))
            except _Differ as error:
                column = str(error)[1:]
                top = next((n for n in schema.names if column == n or column.startswith(f"{n}.")), None)
                if top is None or top not in other.names:
                    raise ParquetError(
                        f"{origin.get(column, name)} and {other_name}",
                        f"the columns differ, and a name is not unique: {column}",
                        "make the files agree",
                    ) from None
                raise TypeClash(
                    f"{origin[top]} and {other_name}",
                    f"column {column} has types that do not mix without loss: {schema.field(top).type} and "
                    f"{other.field(top).type}",
                    "make the files agree at the source",
                    column=top,
                    files=(other_name, origin[top]),
                    types=(other.field(top).type, schema.field(top).type),
                ) from None
            metadata = {**(other.metadata or {}), **(schema.metadata or {})}
            before = {field.name: field.type for field in schema}
            schema = pa.schema(fields, metadata=metadata or None)
            for field in schema:
                if field.name not in before or before[field.name] != field.type:
                    origin[field.name] = other_name
    return schema


def _working_type(kind: pa.DataType, top: bool, stored: bool = False) -> pa.DataType:
    if stored and isinstance(kind, pa.BaseExtensionType):
        return _working_type(kind.storage_type, top, stored)
    if pt.is_dictionary(kind):
        value = _working_type(kind.value_type, False, stored)
        return pa.dictionary(pa.int32(), value, kind.ordered) if top else value
    if pt.is_string_view(kind):
        return pa.string()
    if pt.is_binary_view(kind):
        return pa.binary()
    if pt.is_list_view(kind):
        kind = pa.list_(kind.value_field)
    elif pt.is_large_list_view(kind):
        kind = pa.large_list(kind.value_field)
    return with_changed_types(kind, lambda inner: _working_type(inner, False, stored))


def working_schema(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` in types that write the same Parquet but can be measured and joined in pieces.

    Views do not tell the size of a slice, nested dictionaries cannot be unified, and a narrow dictionary index
    overflows when many files' dictionaries meet in one row group. Metadata is left out: it goes to the footer.
    """
    return pa.schema([field.with_type(_working_type(field.type, True)) for field in schema])


def condition_schema_of(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` as conditions see it: in the types of `working_schema`, extension types as they are stored.

    Arrow neither compares these nor makes an empty table of columns that hold them inside.
    """
    return pa.schema([field.with_type(_working_type(field.type, True, stored=True)) for field in schema])


def cast_to_schema(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """Return ``table`` under ``schema``, from `merge_schemas` and `working_schema`; ``name`` is the file to blame."""
    if table.schema.equals(schema, check_metadata=True):  # without metadata, names of list items count for nothing
        return table
    columns = []
    by_position = table.schema.names == schema.names
    for number, field in enumerate(schema):
        position = number if by_position else table.schema.get_field_index(field.name)
        if position < 0:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            continue
        column = table.column(position)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise ParquetError(
                    name,
                    f"column {field.name} cannot be converted from {column.type} to {field.type} without loss "
                    f"({error})",
                    "make the files agree at the source",
                ) from error
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
