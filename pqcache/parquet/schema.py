"""One schema for files whose schemas drifted apart, and data converted to it without loss.

``merge_schemas`` finds the narrowest schema for all values of all files, or says which two files disagree.
``working_schema`` turns it into types that can be cut, measured and written batch by batch.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError, TypeClash, UsageError, first_line
from pqcache.parquet.arrow import (
    is_list,
    is_text,
    leaves_in,
    plain_list,
    plain_lists,
    with_changed_types,
    with_types_like,
    without_views,
)
from pqcache.parquet.dense import dense_of

# Key-values of a footer
ARROW_SCHEMA, PANDAS, SPARK = b"ARROW:schema", b"pandas", b"org.apache.spark.sql.parquet.row.metadata"
UNITS = ("s", "ms", "us", "ns")  # of times, the coarsest first
_SHOWN = 200  # characters of a value in a message
_FLOATS = (pa.float16(), pa.float32(), pa.float64())


def encode_schema(schema: pa.Schema) -> bytes:
    """Encode as in a footer under ``ARROW:schema``."""
    return base64.b64encode(schema.serialize().to_pybytes())


def decode_schema(value: bytes) -> pa.Schema | None:
    """Inverse of `encode_schema`; None for anything else."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
        sorted(schema.names)  # raises for a name that is not text
        return schema
    except (pa.ArrowException, OSError, ValueError):
        return None


class _Differ(Exception):
    """Two types have no common type; holds the dotted path below the column, and the types or names there."""

    def __init__(self, path: str, *types: pa.DataType, names: tuple[str, str] | None = None) -> None:
        super().__init__(path, *types)
        self.path, self.types, self.names = path, types, names


def _signed_bits(integer: pa.DataType) -> int:
    """The width of the signed integer for all values; comparing these makes joins independent of order."""
    return int(integer.bit_width if pt.is_signed_integer(integer) else 2 * integer.bit_width)


def _wider_int(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Beside signed integers, uint64 becomes int64: see `always_fits`."""
    if pt.is_signed_integer(a) == pt.is_signed_integer(b):
        return max(a, b, key=lambda t: t.bit_width)
    return {16: pa.int16(), 32: pa.int32()}.get(max(_signed_bits(a), _signed_bits(b)), pa.int64())


def _wider_float(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """The narrowest float for both; 64-bit integers become double, as in pandas: see `always_fits`."""
    number, integer = (a, b) if a in _FLOATS else (b, a)
    bits = max(number.bit_width, 2 * _signed_bits(integer))
    return {16: pa.float16(), 32: pa.float32()}.get(bits, pa.float64())


def _wider_decimal(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    a, b = (t if pt.is_decimal(t) else pa.decimal128(_digits(t), 0) for t in (a, b))
    scale = max(a.scale, b.scale)
    precision = max(a.precision - a.scale, b.precision - b.scale) + scale
    if precision <= 38:
        return pa.decimal128(precision, scale)
    return pa.decimal256(precision, scale) if precision <= 76 else None


def _digits(integer: pa.DataType) -> int:
    return {8: 3, 16: 5, 32: 10}.get(_signed_bits(integer), 20)


def _wider_bytes(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not all(is_text(t) or pt.is_fixed_size_binary(t) for t in map(without_views, (a, b))):
        return None
    text = all(pt.is_string(t) or pt.is_large_string(t) for t in map(without_views, (a, b)))
    if any(pt.is_large_string(t) or pt.is_large_binary(t) for t in (a, b)):
        return pa.large_string() if text else pa.large_binary()
    return pa.string() if text else pa.binary()


def differing_in_case(known: Iterable[str], new: Iterable[str]) -> tuple[str, str] | None:
    """The first pair of names, each on one side only, that differ only in case."""
    known, new = set(known), set(new)
    left = {name.lower(): name for name in known - new}
    return next(((left[name.lower()], name) for name in sorted(new - known) if name.lower() in left), None)


def spelling_of(schemas: Iterable[pa.Schema], known: Iterable[str] = ()) -> dict[tuple[str, ...], str]:
    """The first spelling of each column and struct field, by its path in lower case."""
    found: dict[tuple[str, ...], str] = {(name.lower(),): name for name in known}

    def note(fields: Iterable[pa.Field], above: tuple[str, ...]) -> None:
        for field in fields:
            path = (*above, field.name.lower())
            found.setdefault(path, field.name)
            if pt.is_struct(field.type):
                note(field.type.fields, path)

    for schema in schemas:
        note(schema, ())
    return found


def _pairs(a: Sequence[pa.Field], b: Sequence[pa.Field]) -> list[tuple[pa.Field | None, pa.Field | None]]:
    """Match fields of two structs or schemas by name: those of ``a`` in order, then the others of ``b``."""
    if [f.name for f in a] == [f.name for f in b]:
        return list(zip(a, b, strict=True))
    for fields in (a, b):
        doubled = [name for name, count in Counter(f.name for f in fields).items() if count > 1]
        if doubled:
            raise _Differ(f".{doubled[0]} (which occurs twice)")
    if names := differing_in_case([f.name for f in a], [f.name for f in b]):
        raise _Differ(f".{names[1]}", names=names)
    others = {field.name: field for field in b}
    pairs: list[tuple[pa.Field | None, pa.Field | None]] = [(field, others.pop(field.name, None)) for field in a]
    return pairs + [(None, field) for field in others.values()]


def _optional(field: pa.Field) -> pa.Field:
    """Make a field, and the fields of a struct, nullable, as they are null for files that lack it."""
    if pt.is_struct(field.type):
        field = field.with_type(pa.struct(list(map(_optional, field.type.fields))))
    elif pt.is_fixed_size_list(field.type):  # its nulls have items, unlike those of other lists
        field = field.with_type(pa.list_(_optional(field.type.value_field), field.type.list_size))
    return field.with_nullable(True)


def _merged_field(a: pa.Field | None, b: pa.Field | None) -> pa.Field:
    if a is None or b is None:
        return _optional(b if a is None else a)
    try:
        if dense_of(a) != dense_of(b):
            raise _Differ("", a.type, b.type)
        kind = _merged_type(a.type, b.type)
    except _Differ as error:
        raise _Differ(f".{a.name}{error.path}", *error.types, names=error.names) from None
    field = a.with_type(kind).with_nullable(a.nullable or b.nullable or pt.is_null(a.type) or pt.is_null(b.type))
    if b.metadata and not a.metadata:
        field = field.with_metadata(b.metadata)
    return field


def _merged_type(a: pa.DataType, b: pa.DataType) -> pa.DataType:
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
    elif all(pt.is_decimal(t) or pt.is_integer(t) for t in (a, b)):
        found = _wider_decimal(a, b)
    elif pt.is_dictionary(a) or pt.is_dictionary(b):
        values = [t.value_type if pt.is_dictionary(t) else t for t in (a, b)]
        found = _merged_type(*values)
        if pt.is_dictionary(a) and pt.is_dictionary(b):
            found = pa.dictionary(pa.int32(), found, a.ordered and b.ordered)
    elif pt.is_date(a) and pt.is_date(b):
        found = pa.date64()
    elif pt.is_timestamp(a) and pt.is_timestamp(b) and a.tz == b.tz:
        found = pa.timestamp(max(a.unit, b.unit, key=UNITS.index), a.tz)
    elif pt.is_time(a) and pt.is_time(b):
        unit = max(a.unit, b.unit, key=UNITS.index)
        found = pa.time64(unit) if unit in ("us", "ns") else pa.time32(unit)
    elif pt.is_duration(a) and pt.is_duration(b):
        found = pa.duration(max(a.unit, b.unit, key=UNITS.index))
    elif pt.is_struct(a) and pt.is_struct(b):
        found = pa.struct([_merged_field(x, y) for x, y in _pairs(a.fields, b.fields)])
    elif pt.is_map(a) and pt.is_map(b):
        found = pa.map_(_merged_field(a.key_field, b.key_field), _merged_field(a.item_field, b.item_field))
    elif is_list(a) and is_list(b):
        item = _merged_field(a.value_field, b.value_field)
        if pt.is_fixed_size_list(a) and pt.is_fixed_size_list(b) and a.list_size == b.list_size:
            found = pa.list_(item, a.list_size)
        else:
            large = any(pt.is_large_list(t) or pt.is_large_list_view(t) for t in (a, b))
            found = pa.large_list(item) if large else pa.list_(item)
    else:
        found = _wider_bytes(a, b)
    if found is None:
        raise _Differ("", a, b)
    return found


def joined_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    try:
        return _merged_type(a, b)
    except _Differ:
        return None


def always_fits(kind: pa.DataType, into: pa.DataType) -> bool:
    """Whether the joined type holds every value of this type, so that values needn't be checked.

    A 64-bit integer may not be exact as a double, an unsigned one may overflow int64, and a time in seconds may be out
    of range in nanoseconds.
    """
    kind, into = (t.value_type if pt.is_dictionary(t) else t for t in (kind, into))
    if kind == into or pt.is_null(kind):
        return True
    if pt.is_struct(kind) and pt.is_struct(into):
        inside = {field.name: field.type for field in into.fields}
        return all(always_fits(field.type, inside[field.name]) for field in kind.fields)
    if pt.is_map(kind) and pt.is_map(into):
        return always_fits(kind.key_type, into.key_type) and always_fits(kind.item_type, into.item_type)
    if is_list(kind) and is_list(into):
        return always_fits(kind.value_type, into.value_type)
    if pt.is_integer(kind):
        return bool(kind.bit_width < 64 or pt.is_decimal(into))
    return not (pt.is_timestamp(kind) or pt.is_duration(kind) or pt.is_time(kind))


def cast_exactly(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Cast to the joined type; raises Arrow's error instead of rounding or truncating a value."""
    if pt.is_null(column.type):
        nulls = pa.nulls(len(column), kind)
        return pa.chunked_array([nulls]) if isinstance(column, pa.ChunkedArray) else nulls
    if _has_list_views(column.type) and not _has_list_views(kind):
        chunked = isinstance(column, pa.ChunkedArray)
        lists = [without_list_views(chunk) for chunk in (column.chunks if chunked else [column])]
        column = pa.chunked_array(lists, plain_lists(column.type)) if chunked else lists[0]
    if isinstance(column.type, pa.BaseExtensionType) and not isinstance(kind, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    if pt.is_dictionary(column.type) and not pt.is_dictionary(kind):
        column = column.cast(column.type.value_type)
    return column if column.type == kind else column.cast(kind)


def unfit_value(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> str | None:
    """The first value that doesn't fit the joined type, as text; None if all do."""
    try:
        cast_exactly(column, kind)
    except pa.ArrowException as error:
        reason = first_line(error)
    else:
        return None
    first, last = 0, len(column)
    while last - first > 1:
        middle = (first + last) // 2
        try:
            cast_exactly(column.slice(first, middle - first), kind)
            first = middle
        except pa.ArrowException:
            last = middle
    if not pt.is_nested(column.type):
        with suppress(ValueError, OverflowError, pa.ArrowException):  # a time outside Python's range
            return str(column[first])
    number = re.search(r"(?:value |timestamp: )(-?\d+)", reason)
    return reason if number is None else number[1]


def unfit_reason(name: str, column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> str | None:
    """The reason of the error about a column with a value that doesn't fit; None if all do."""
    value = unfit_value(column, kind)
    if value is None:
        return None
    shown = value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}..."
    return f"column {name!r} is {column.type} and holds {shown}, which does not fit {kind}"


def _has_list_views(kind: pa.DataType) -> bool:
    return bool(pt.is_nested(kind)) and plain_lists(kind) != kind


def without_list_views(array: pa.Array) -> pa.Array:
    """Convert list views to lists, also inside. Arrow's own cast leaves the offsets too short."""
    kind = array.type
    if not _has_list_views(kind):
        return array
    wanted, mask = plain_lists(kind), array.is_null() if array.null_count else None
    if pt.is_struct(kind):
        children = [without_list_views(array.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=wanted.fields, mask=mask)
    if pt.is_fixed_size_list(kind):
        items = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return pa.FixedSizeListArray.from_arrays(without_list_views(items), type=wanted, mask=mask)
    if pt.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        offsets = pa.array(array.offsets.to_numpy() - first, pa.int32())
        parts = [without_list_views(part.slice(first, last - first)) for part in (array.keys, array.items)]
        return pa.MapArray.from_arrays(offsets, *parts, type=wanted, mask=mask)
    offsets = np.concatenate([[0], np.cumsum(array.value_lengths().fill_null(0).to_numpy())])
    made, width = (pa.LargeListArray, pa.int64()) if pt.is_large_list(wanted) else (pa.ListArray, pa.int32())
    return made.from_arrays(pa.array(offsets, width), without_list_views(array.flatten()), type=wanted, mask=mask)


def with_fields(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Add struct fields of ``other``, also inside, as nullable ones."""
    if not (pt.is_struct(kind) and pt.is_struct(other)):
        return kind
    inside = {field.name.lower(): field for field in other.fields}
    fields = []
    for field in kind.fields:
        more = inside.pop(field.name.lower(), None)
        fields.append(field if more is None else field.with_type(with_fields(field.type, more.type)))
    return pa.struct([*fields, *map(_optional, inside.values())])


def with_table_columns(files: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Add the table's columns that no file has yet, and use its number types if they are wider."""
    fields = [field.with_type(_as_wide(field.type, table, field.name)) for field in files]
    missing = [_optional(field) for field in table if field.name not in files.names]
    return pa.schema([*fields, *missing], files.metadata) if len(table) else files


def check_names(path: str, schema: pa.Schema) -> None:
    """Raise ParquetError if a file has two columns of one name."""
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise ParquetError(path, f"has two columns named {twice!r}", "rename one at the source")


def with_time_zones(files: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Give times the time zones of the table's columns: INT96 times have none and are in UTC."""
    known = {field.name: field.type for field in table}
    fields = [f.with_type(with_types_like(f.type, known.get(f.name, f.type), _zoned)) for f in files]
    return pa.schema(fields, files.metadata)


def _zoned(kind: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    if pt.is_timestamp(kind) and pt.is_timestamp(wanted) and kind.tz is None and wanted.tz is not None:
        return pa.timestamp(kind.unit, wanted.tz)
    return kind


def _as_wide(kind: pa.DataType, table: pa.Schema, name: str) -> pa.DataType:
    """The column's type in ``table`` if it is a number type for all values of ``kind``, else ``kind``."""
    wanted = table.field(name).type if name in table.names else kind
    number = pt.is_integer(wanted) or pt.is_floating(wanted) or pt.is_decimal(wanted)
    return wanted if number and joined_type(kind, wanted) == wanted and always_fits(kind, wanted) else kind


def merge_schemas(
    named: Iterable[tuple[str, pa.Schema]],
    owner: Callable[[str], str] | None = None,
    clashes: dict[str, TypeClash] | None = None,
) -> pa.Schema:
    """Merge schemas into one that holds every row of every file without loss.

    Columns are matched by name, in the order of the first file, followed by new ones. Of equal keys in the key-value
    metadata, the first file's value stays.

    Args:
        named: file names and schemas, in order.
        owner: names a file with a given column, if the first schema is that of many files.
        clashes: collects errors by column instead of raising them; the schema leaves these columns out.

    Raises:
        TypeClash: a column's types have no common type.
        ParquetError: names in a file aren't unique.
    """
    schema: pa.Schema | None = None
    first, origin = "", dict[str, str]()
    for path, other in named:
        if schema is None:
            schema, first, origin = other, path, dict.fromkeys(other.names, path)
            continue
        if other.equals(schema, check_metadata=True):
            continue
        while names := differing_in_case(schema.names, other.names):
            place = _place(names[0], first, origin, owner)
            rest = [n for n in dict.fromkeys([*schema.names, *other.names]) if n not in names]
            clash = TypeClash(
                path,
                f"column {names[1]!r} differs only in case from {names[0]!r} in {place}",
                "rename one of them, or merge them with 'pqcache sync --ignore-case'",
                column=names[1],
                files=(path, place),
                types=(other.field(names[1]).type, schema.field(names[0]).type),
                others=tuple(rest),
                names=(names[1], names[0]),
            )
            if clashes is None:
                raise clash
            clashes |= dict.fromkeys(names, clash)
            other = other.remove(other.get_field_index(names[1]))
        try:
            pairs = _pairs(list(schema), list(other))
        except _Differ as error:
            reason = f"columns differ and a name isn't unique: {error.path[1:]}"
            raise ParquetError(f"{first} and {path}", reason, "make the files agree") from None
        fields = []
        for known, new in pairs:
            try:
                fields.append(_merged_field(known, new))
            except _Differ as error:
                assert known is not None
                assert new is not None
                place = _place(known.name, first, origin, owner)
                clash = _clash(path, place, known, new, error, [n for n in schema.names if n != known.name])
                if clashes is None:
                    raise clash from None
                clashes.setdefault(known.name, clash)
                fields.append(known)
        before = {field.name: field.type for field in schema}
        origin |= {f.name: path for f in fields if before.get(f.name) != f.type}
        schema = pa.schema(fields, metadata={**(other.metadata or {}), **(schema.metadata or {})} or None)
    if schema is None:
        return pa.schema([])
    return schema if not clashes else pa.schema([f for f in schema if f.name not in clashes], schema.metadata)


def _place(column: str, first: str, origin: Mapping[str, str], owner: Callable[[str], str] | None) -> str:
    """An earlier file that has the column."""
    return owner(column) if owner is not None and origin[column] == first else origin[column]


def _clash(path: str, other: str, known: pa.Field, new: pa.Field, differ: _Differ, others: Sequence[str]) -> TypeClash:
    if (here := dense_of(new)) != (there := dense_of(known)):
        texts = [str(field.type) if dense is None else dense.text for field, dense in ((new, here), (known, there))]
        reason = f"column {new.name!r} is stored as {texts[0]}, and as {texts[1]} in {other}"
        advice = f"make them alike with 'pqcache repartition --dense {new.name}'"
    elif differ.names is not None:
        inside = f"{known.name}{differ.path.removeprefix(f'.{known.name}')}"
        reason = f"field {inside!r} differs only in case from {differ.names[0]!r} in {other}"
        advice = "rename one of them, or merge them with 'pqcache sync --ignore-case'"
    else:
        types = differ.types or (known.type, new.type)
        column = (known.name + differ.path.removeprefix(f".{known.name}")) if differ.path else known.name
        reason = f"column {column!r} is {types[1]}, which does not fit {types[0]} in {other}"
        advice = "write one of the two files again with the other's type"
    return TypeClash(
        path,
        reason,
        advice,
        column=new.name,
        files=(path, other),
        types=(new.type, known.type),
        others=tuple(others),
        names=differ.names or (),
    )


def _working_type(kind: pa.DataType, top: bool, stored: bool = False) -> pa.DataType:
    if stored and isinstance(kind, pa.BaseExtensionType):
        return _working_type(kind.storage_type, top, stored)
    if pt.is_dictionary(kind):
        value = _working_type(kind.value_type, False, stored)
        return pa.dictionary(pa.int32(), value, kind.ordered) if top else value
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        return without_views(kind)
    return with_changed_types(plain_list(kind), lambda inner: _working_type(inner, False, stored))


def working_schema(schema: pa.Schema) -> pa.Schema:
    """``schema`` in types that give the same Parquet but can be measured and joined in pieces.

    Views don't tell the size of a slice, nested dictionaries can't be unified, and a narrow dictionary index overflows
    when the dictionaries of many files meet in one row group. Metadata is left out, as it goes to the footer.
    """
    return pa.schema([field.with_type(_working_type(field.type, True)) for field in schema])


def condition_schema_of(schema: pa.Schema) -> pa.Schema:
    """``schema`` as conditions see it: in the types of `working_schema`, with extension types as their storage.

    Arrow can't compare extension types, nor make an empty table of columns with such types inside.
    """
    return pa.schema([field.with_type(_working_type(field.type, True, stored=True)) for field in schema])


def cast_to_schema(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """Convert a table of the file ``name`` to ``schema``, made by `merge_schemas` and `working_schema`."""
    if table.schema.equals(schema, check_metadata=True):  # comparing metadata, as names of list items count only then
        return table
    columns = []
    by_position = table.schema.names == schema.names
    for number, field in enumerate(schema):
        position = number if by_position else table.schema.get_field_index(field.name)
        if position < 0:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            continue
        column = table.column(position)
        try:
            columns.append(cast_exactly(column, field.type))
        except pa.ArrowException as error:
            reason = unfit_reason(field.name, column, field.type) or first_line(error)
            others = tuple(other for other in schema.names if other != field.name)
            advice = "make the files agree at the source"
            raise TypeClash(name, reason, advice, column=field.name, others=others) from error
    return pa.Table.from_arrays(columns, schema=schema)


# ---- Time units of columns in a cache, which new files don't change


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeUnits:
    """Fixed time units: those ``chosen``, by column, and otherwise those of the schema ``before``."""

    before: pa.Schema = dataclasses.field(default_factory=lambda: pa.schema([]))
    chosen: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, files: pa.Schema) -> pa.Schema:
        """Apply the fixed units; UsageError if one is chosen for a column that isn't a time."""
        for name, unit in self.chosen.items():
            kind = files.field(name).type if name in files.names else None
            if kind is None or not any(map(_unit_of, leaves_in(kind))):
                reason = f"no column {name!r}" if kind is None else f"column {name!r} is {kind}, not a time"
                raise UsageError(f"--time-units {name}={unit}", reason, "name a column of times")

        def fix(kind: pa.DataType, fixed: pa.DataType) -> pa.DataType:
            unit = _unit_of(fixed)
            return _in_unit(kind, unit) if _unit_of(kind) and unit else kind

        return pa.schema([f.with_type(with_types_like(f.type, self._fixed(f), fix)) for f in files], files.metadata)

    def check(self, path: str, file: pa.Schema, int96: Callable[[], Collection[str]]) -> None:
        """Raise ParquetError if a file has times in a finer unit than before, unless one was chosen.

        ``int96`` returns the INT96 columns, which have no unit and are read in any that holds their values.
        """
        finer: dict[str, tuple[str, str]] = {}
        for column in file:
            if column.name not in self.chosen:
                for here, there in _pairs_of_units(column.type, self._fixed(column)):
                    if UNITS.index(here) > UNITS.index(there):
                        finer[column.name] = here, there
        if finer and (names := [name for name in finer if name not in int96()]):
            kind, (here, there) = file.field(names[0]).type, finer[names[0]]
            change, keep = (",".join(f"{name}={finer[name][which]}" for name in names) for which in (0, 1))
            raise ParquetError(
                path,
                f"column {names[0]!r} is {kind}, and {here} is finer than the unit {there} of its times so far",
                f"--time-units {keep} keeps the unit if the values fit, --time-units {change} changes it, also in "
                "tensors, and --skip-bad publishes the rest",
            )

    def _fixed(self, column: pa.Field) -> pa.DataType:
        if column.name in self.chosen:
            return _all_in_unit(column.type, self.chosen[column.name])
        return self.before.field(column.name).type if column.name in self.before.names else column.type


def changed_units(before: pa.Schema, now: pa.Schema) -> list[str]:
    changed: dict[str, str] = {}
    for column in now:
        was = before.field(column.name).type if column.name in before.names else column.type
        for here, there in _pairs_of_units(column.type, was):
            if here != there:
                changed[column.name] = (
                    f"the times of column {column.name!r} were in {there} and are in {here} from now on"
                )
    return list(changed.values())


def _pairs_of_units(kind: pa.DataType, other: pa.DataType) -> list[tuple[str, str]]:
    """Pairs of time units at the same place in both types."""
    pairs: list[tuple[str, str]] = []

    def compare(here: pa.DataType, there: pa.DataType) -> pa.DataType:
        unit, unit_there = _unit_of(here), _unit_of(there)
        if unit and unit_there:
            pairs.append((unit, unit_there))
        return here

    with_types_like(kind, other, compare)
    return pairs


def _unit_of(kind: pa.DataType) -> str | None:
    """None for types other than times."""
    is_time = pt.is_timestamp(kind) or pt.is_time(kind) or pt.is_duration(kind)
    return str(kind.unit) if is_time else None


def _in_unit(kind: pa.DataType, unit: str) -> pa.DataType:
    if pt.is_timestamp(kind):
        return pa.timestamp(unit, kind.tz)
    if pt.is_duration(kind):
        return pa.duration(unit)
    return pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)


def _all_in_unit(kind: pa.DataType, unit: str) -> pa.DataType:
    if pt.is_nested(kind):
        return with_changed_types(kind, lambda inner: _all_in_unit(inner, unit))
    return kind if _unit_of(kind) is None else _in_unit(kind, unit)
