"""Footers of projected files: some columns and row groups as a file of their own, and columns renamed."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa

from pqcache.errors import MALFORMED, ParquetError
from pqcache.parquet import footer, thrift
from pqcache.parquet.footer import MAGIC
from pqcache.parquet.schema import ARROW_SCHEMA, PANDAS, SPARK, decode_schema, encode_schema
from pqcache.parquet.thrift import BINARY, I16, I32, I64, LIST, STRUCT, Items, Struct

log = logging.getLogger("pqcache.parquet")

# PARQUET-816: these writers left the dictionary's page header out of a chunk's size, so readers read a bit more.
_SHORT_CHUNKS = re.compile(rb"parquet-mr version 1\.([01]\b|2\.[0-8]\b)")
_SHORT_BY = 100


class ByteRange(NamedTuple):
    """Bytes of a file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Projection:
    """Some columns and row groups of a file as a file of their own.

    Attributes:
        ranges: the bytes to copy from the file, in order.
        size: the offset of the new file's footer.
        fields: the new file's footer.
    """

    ranges: tuple[ByteRange, ...]
    size: int
    fields: Struct


def project(
    fields: Struct,
    wanted: Sequence[bool],
    groups: Sequence[int],
    limit: int,
    name: str,
    start: int = len(MAGIC),
    ordinal: int = 0,
) -> Projection:
    """Make a file of the ``wanted`` top-level columns of the row groups ``groups``.

    Args:
        fields: the file's footer.
        wanted: whether to keep each top-level column.
        groups: positions of the row groups to keep, ascending.
        limit: the offset of the footer, the end of all pages.
        name: the file to blame.
        start: the offset of the first page in the new file.
        ordinal: the position of the first row group in the new file.

    Raises:
        ParquetError: the footer contradicts itself.
    """
    schema = footer.schema_of(fields, name)
    all_leaves = footer.leaves_of(schema, name)
    columns = footer.trees(schema)
    elements: list[Struct] = [schema[0] | {5: (I32, sum(wanted))}]
    for keep, column in zip(wanted, columns, strict=False):
        elements += column if keep else []
    leaves = [number for number, leaf in enumerate(all_leaves) if wanted[leaf.column]]
    extra = bytes_after_chunks(_bytes(fields, 6) or b"")
    all_groups = footer.row_groups_of(fields, name)
    ranges: list[ByteRange] = []
    placed: list[bytes] = []
    position = start
    rows = 0
    for number in groups:
        if len(footer.columns_of(all_groups[number], name)) != len(all_leaves):
            raise _damaged(name, f"row group {number} lacks column chunks, or has surplus ones")
        group, more = _place_row_group(all_groups[number], leaves, position, ordinal + len(placed), limit, extra, name)
        rows += number_of(group, 3, name)
        placed.append(thrift.encode(group))
        ranges += more
        position += sum(byte_range.length for byte_range in more)
        if position - start > limit + extra * len(ranges):
            raise _damaged(name, "its column chunks overlap")
    template = with_orders_of(fields, leaves, len(all_leaves))
    keyvalues = _keyvalues(fields, wanted, [_bytes(column[0], 4) or b"" for column in columns])
    return Projection(tuple(ranges), position, footer.make_footer(template, elements, placed, rows, keyvalues))


def bytes_after_chunks(created_by: bytes) -> int:
    """How many bytes past the end of a chunk readers have to read, in files of this writer."""
    return _SHORT_BY if _SHORT_CHUNKS.match(created_by) else 0


def with_orders_of(fields: Struct, leaves: Sequence[int], count: int) -> Struct:
    """Keep the column_orders of these leaves, or drop all unless there are ``count``."""
    orders = _structs(fields, 7)
    found = {field: entry for field, entry in fields.items() if field != 7}
    return found | ({7: (LIST, Items(STRUCT, [orders[leaf] for leaf in leaves]))} if len(orders) == count else {})


def _place_row_group(
    group: Struct, leaves: Sequence[int], position: int, ordinal: int, limit: int, extra: int, name: str
) -> tuple[Struct, list[ByteRange]]:
    """Move the pages of some leaves to ``position``; also return their present ranges."""
    chunks, metas = group[1][1].values, footer.columns_of(group, name)
    ranges = {leaf: _byte_range(metas[leaf], limit, extra, name) for leaf in leaves}
    ordered = sorted(leaves, key=lambda leaf: ranges[leaf].offset)
    moved: dict[int, Struct] = {}
    at = position
    for leaf in ordered:
        moved[leaf] = footer.shift_chunk(chunks[leaf], at - ranges[leaf].offset, None, name)
        at += ranges[leaf].length
    result = with_chunks(group, leaves, [moved[leaf] for leaf in leaves], name)
    if 5 in result:
        result[5] = (I64, position)
    if 6 in result:
        result[6] = (I64, at - position)
    result = footer.with_ordinal(result, ordinal)
    return dict(sorted(result.items())), [ranges[leaf] for leaf in ordered]


def _byte_range(meta: Struct, limit: int, extra: int, name: str) -> ByteRange:
    """The range of a chunk's pages, with its dictionary."""
    size = number_of(meta, 7, name)
    offsets = [number_of(meta, field, name) for field in (9, 11) if field == 9 or field in meta]
    starts = [offset for offset in offsets if offset > 0]  # 0 has been seen to mean "no dictionary"
    if size < 0 or (size and (not starts or min(starts) < len(MAGIC))):
        raise _damaged(name, "a column chunk has no place")
    start = min(starts, default=len(MAGIC))
    if start + size > limit:
        raise _damaged(name, f"a column chunk ends at {start + size:,}, behind the footer's start at {limit:,}")
    return ByteRange(start, min(size + extra, limit - start) if size else 0)


def with_chunks(group: Struct, leaves: Sequence[int], chunks: Sequence[Struct], name: str) -> Struct:
    """Keep only ``chunks``, those of the remaining ``leaves``, at their old offsets."""
    metas = footer.columns_of(group, name)
    result = {field: entry for field, entry in group.items() if field != 4}
    result[1] = (LIST, Items(STRUCT, list(chunks)))
    result[2] = (I64, sum(number_of(metas[leaf], 6, name) for leaf in leaves))
    if sorting := _kept_sorting(group, leaves):
        result[4] = (LIST, Items(STRUCT, sorting))
    return dict(sorted(result.items()))


def _kept_sorting(group: Struct, leaves: Sequence[int]) -> list[Struct]:
    position_of = {leaf: position for position, leaf in enumerate(leaves)}
    kept: list[Struct] = []
    for sorting in _structs(group, 4):
        position = position_of.get(sorting.get(1, (I32, -1))[1])
        if position is None:
            break
        kept.append({**sorting, 1: (I32, position)})
    return kept


def keyvalues_of(fields: Struct) -> dict[bytes, bytes | None]:
    return {_bytes(pair, 1) or b"": _bytes(pair, 2) for pair in _structs(fields, 5)}


def _keyvalues(fields: Struct, wanted: Sequence[bool], names: Sequence[bytes]) -> dict[bytes, bytes | None]:
    """Key-values whose schemas are cut to the wanted columns."""
    result = keyvalues_of(fields)
    for key, cut in ((ARROW_SCHEMA, _cut_arrow_schema), (SPARK, _cut_spark_schema)):
        value = result.get(key)
        if value is not None:
            result[key] = cut(value, wanted, names)
            if result[key] is None:
                del result[key]
    return result


def _cut_arrow_schema(value: bytes, wanted: Sequence[bool], names: Sequence[bytes]) -> bytes | None:
    schema = decode_schema(value)
    if schema is None or [name.encode() for name in schema.names] != list(names):
        return None  # it describes another schema, so no reader used it
    fields = [field for field, keep in zip(schema, wanted, strict=True) if keep]
    return encode_schema(pa.schema(fields, metadata=schema.metadata))


def _cut_spark_schema(value: bytes, wanted: Sequence[bool], names: Sequence[bytes]) -> bytes | None:
    """Cut Spark's schema too: Spark would return nulls for columns missing from the file."""
    kept = {name.decode("utf-8", "replace") for name, keep in zip(names, wanted, strict=True) if keep}
    try:
        schema: dict[str, Any] = json.loads(value)
        schema["fields"] = [field for field in schema["fields"] if field["name"] in kept]
        return json.dumps(schema, separators=(",", ":")).encode()
    except MALFORMED:
        return value


def number_of(fields: Struct, field: int, name: str) -> int:
    """A required integer field."""
    kind, value = fields.get(field, (0, None))
    if kind not in (I16, I32, I64):
        raise _damaged(name, f"field {field} is missing or not a number")
    return int(value)


def _bytes(fields: Struct, field: int) -> bytes | None:
    kind, value = fields.get(field, (0, None))
    return bytes(value) if kind == BINARY else None


def _structs(fields: Struct, field: int) -> list[Struct]:
    kind, value = fields.get(field, (0, None))
    return list(value.values) if kind == LIST and value.kind == STRUCT else []


def _damaged(name: str, what: str) -> ParquetError:
    return ParquetError(name, f"the Parquet footer is damaged ({what})", "fetch the file again")


# ---- A file's footer as its table sees it: columns under the table's names, without those that the table has dropped
#
# Delta tables with column mapping, and Iceberg tables, know a column of a file by ID or by a name of its own, so
# they can rename or drop it without writing files. Here only the footer changes.


class ColumnKind(Enum):
    """A column's inner fields: a struct's fields, a list's element, a map's key and value, or none."""

    LEAF = "leaf"
    STRUCT = "struct"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a table, or a field inside one, and how files know it.

    Attributes:
        name: its name in the table.
        field_id: its ID in files with IDs; None if it is known by name.
        stored: its names in files without IDs.
        kind: the meaning of ``fields``.
        fields: those of a struct, the element of a list, or key and value of a map; names matter in structs only.
    """

    name: str
    field_id: int | None = None
    stored: frozenset[str] = frozenset()
    kind: ColumnKind = ColumnKind.LEAF
    fields: tuple[TableColumn, ...] = ()


Spelling = Mapping[tuple[str, ...], str]
"""The name of each column, or field of structs, by its path in lower case."""

_REPEATED = (I32, 2)
_NAMES_IN_KEYVALUES = (ARROW_SCHEMA, PANDAS, SPARK)


@dataclass(frozen=True)
class _Element:
    """A schema element with those below it; ``leaf`` is the position of a leaf among all leaves."""

    fields: Struct
    children: tuple[_Element, ...] = ()
    leaf: int | None = None

    @property
    def name(self) -> str:
        return bytes(self.fields.get(4, (BINARY, b""))[1]).decode("utf-8", "replace")

    def flat(self) -> Iterator[_Element]:
        yield self
        for child in self.children:
            yield from child.flat()


@dataclass(frozen=True)
class _Matcher:
    """Finds the columns of a table in ``file``, by field ID or by name."""

    file: str
    by_id: bool

    def matched(self, elements: Sequence[_Element], columns: Sequence[TableColumn]) -> tuple[_Element, ...]:
        """Elements among ``columns``, in the file's order, under the table's names."""
        found = []
        for element in elements:
            column = next((column for column in columns if self._is(column, element)), None)
            if column is not None:
                named = {**element.fields, 4: (BINARY, column.name.encode())}
                found.append(self._with_fields(replace(element, fields=named), column))
        names = [element.name for element in found]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ParquetError(self.file, f"has two columns for {twice!r} of its table", "write the file again")
        return tuple(found)

    def _is(self, column: TableColumn, element: _Element) -> bool:
        if self.by_id and column.field_id is not None:
            return 9 in element.fields and int(element.fields[9][1]) == column.field_id
        return element.name in column.stored

    def _with_fields(self, element: _Element, column: TableColumn) -> _Element:
        if column.kind is ColumnKind.LEAF or not element.children:
            return element
        if column.kind is ColumnKind.STRUCT:
            kept = self.matched(element.children, column.fields)
            if not kept:
                reason = f"column {column.name!r} has none of the table's fields"
                raise ParquetError(self.file, reason, "write the table again with its engine")
            return replace(element, fields={**element.fields, 5: (I32, len(kept))}, children=kept)
        wrapper = element.children[0]
        if column.kind is ColumnKind.LIST and not _wraps_element(wrapper):
            return replace(element, children=(self._with_fields(wrapper, column.fields[0]),))
        inner = [self._with_fields(child, of) for child, of in zip(wrapper.children, column.fields, strict=False)]
        return replace(element, children=(replace(wrapper, children=(*inner, *wrapper.children[len(inner) :])),))


def as_in_table(fields: Struct, columns: Sequence[TableColumn], name: str) -> Struct:
    """Reduce the footer ``fields`` to the columns of a table, under its names and at the same offsets.

    Columns that the file lacks aren't added. Raises ParquetError about the file ``name`` if its footer is damaged, if
    columns can't be found by field ID or name, or if the file or a struct has none of them.
    """
    schema = footer.schema_of(fields, name)
    tree = _tree(schema, name)
    by_id = any(9 in element for element in schema)
    if not by_id and not any(column.stored for column in columns):
        reason = "has no field IDs, and its table doesn't map columns to names"
        raise ParquetError(name, reason, "write the file again with the engine of the table")
    kept = _Matcher(name, by_id).matched(tree, columns)
    if tree and not kept:
        raise ParquetError(name, "has none of its table's columns", "write the file again")
    return _with_columns(fields, schema, kept, name)


def in_spelling(fields: Struct, spelling: Spelling, name: str) -> Struct:
    """Spell columns and struct fields in the footer ``fields`` as other files do.

    Names of the same file that differ only in case stay as they are.
    """
    schema = footer.schema_of(fields, name)
    kept = _spelled(_tree(schema, name), spelling, ())
    return _with_columns(fields, schema, kept, name, spelling)


def _spelled(elements: Sequence[_Element], spelling: Spelling, above: tuple[str, ...]) -> tuple[_Element, ...]:
    counts, found = Counter(element.name.lower() for element in elements), []
    for element in elements:
        path = (*above, element.name.lower())
        if counts[path[-1]] == 1 and path in spelling:
            element = replace(element, fields={**element.fields, 4: (BINARY, spelling[path].encode())})
        if element.children and not {6, 10} & element.fields.keys():  # a struct, and no list or map
            element = replace(element, children=_spelled(element.children, spelling, path))
        found.append(element)
    return tuple(found)


def _arrow_in_spelling(value: bytes | None, spelling: Spelling) -> bytes | None:
    def spelled(fields: Sequence[pa.Field], above: tuple[str, ...]) -> list[pa.Field]:
        counts, found = Counter(field.name.lower() for field in fields), []
        for field in fields:
            path = (*above, field.name.lower())
            name = spelling.get(path, field.name) if counts[path[-1]] == 1 else field.name
            kind = pa.struct(spelled(field.type.fields, path)) if pa.types.is_struct(field.type) else field.type
            found.append(field.with_name(name).with_type(kind))
        return found

    schema = decode_schema(value or b"")
    return None if schema is None else encode_schema(pa.schema(spelled(list(schema), ()), schema.metadata))


def _with_columns(
    fields: Struct, schema: Sequence[Struct], kept: Sequence[_Element], name: str, spelling: Spelling | None = None
) -> Struct:
    elements = [element for column in kept for element in column.flat()]
    written = [schema[0] | {5: (I32, len(kept))}, *(element.fields for element in elements)]
    if written == schema:
        return fields
    leaves = [element.leaf for element in elements if element.leaf is not None]
    paths = [leaf.path for leaf in footer.leaves_of(written, name)]
    groups = [_with_leaves(group, leaves, paths, name) for group in footer.row_groups_of(fields, name)]
    known = keyvalues_of(fields)
    keyvalues = {key: value for key, value in known.items() if key not in _NAMES_IN_KEYVALUES}
    if spelling is not None and (arrow := _arrow_in_spelling(known.get(ARROW_SCHEMA), spelling)) is not None:
        keyvalues[ARROW_SCHEMA] = arrow
    log.debug("%s: %d columns are those of its table", name, len(kept))
    template = with_orders_of(fields, leaves, len(footer.leaves_of(schema, name)))
    return footer.make_footer(template, written, groups, number_of(fields, 3, name), keyvalues)


def _tree(schema: Sequence[Struct], name: str) -> tuple[_Element, ...]:
    footer.leaves_of(schema, name)  # raises where the elements are not a tree
    position, leaf = 1, 0

    def take() -> _Element:
        nonlocal position, leaf
        fields = schema[position]
        position += 1
        count = fields.get(5, (I32, 0))[1]
        if not count:
            leaf += 1
            return _Element(fields, leaf=leaf - 1)
        return _Element(fields, tuple(take() for _ in range(count)))

    columns = []
    while position < len(schema):
        columns.append(take())
    return tuple(columns)


def _wraps_element(element: _Element) -> bool:
    """Whether the repeated group of a list wraps the element or is the element itself.

    See the rules for lists of old writers in LogicalTypes.md of https://github.com/apache/parquet-format.
    """
    alone = element.fields.get(3) == _REPEATED and len(element.children) == 1
    return alone and element.name != "array" and not element.name.endswith("_tuple")


def _with_leaves(group: Struct, leaves: Sequence[int], paths: Sequence[Sequence[bytes]], name: str) -> Struct:
    metas = footer.columns_of(group, name)
    if max(leaves, default=-1) >= len(metas):
        raise ParquetError(name, "the Parquet footer lacks column chunks, or has surplus ones", "fetch the file again")
    chunks = []
    for leaf, path in zip(leaves, paths, strict=True):
        meta = {**metas[leaf], 3: (LIST, Items(BINARY, list(path)))}
        chunks.append({**group[1][1].values[leaf], 3: (STRUCT, meta)})
    result = with_chunks(group, leaves, chunks, name)
    if 6 in result:
        result[6] = (I64, sum(number_of(metas[leaf], 7, name) for leaf in leaves))
    return result
