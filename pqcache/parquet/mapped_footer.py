"""A file's footer as a table sees it: columns under the table's names, without those that the table has dropped.

Delta tables with column mapping and Iceberg tables know a column by a field ID or by a name of its own in files, so
that it can be renamed or dropped without a file being written. Here only the footer changes: the result describes the
same file.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pqcache.errors import ParquetError
from pqcache.parquet.column_mapping import ColumnKind, TableColumn
from pqcache.parquet.footer import footer
from pqcache.parquet.footer.thrift import BINARY, I32, I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.key_values import ARROW_SCHEMA, PANDAS, SPARK, decode_schema, encode_schema
from pqcache.parquet.projection import keyvalues_of, number_of, with_chunks, with_orders_of

Spelling = Mapping[tuple[str, ...], str]
"""The name of each column, or field of structs, by its path in lower case."""

_REPEATED = (I32, 2)
_NAMES_IN_KEYVALUES = (ARROW_SCHEMA, PANDAS, SPARK)

log = logging.getLogger("pqcache.parquet")


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
    """Finds the columns of a table in one file, ``file``, which has field IDs or not."""

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
                raise ParquetError(self.file, reason, "write the table again with the engine that it is from")
            return replace(element, fields={**element.fields, 5: (I32, len(kept))}, children=kept)
        wrapper = element.children[0]
        if column.kind is ColumnKind.LIST and not _wraps_element(wrapper):
            return replace(element, children=(self._with_fields(wrapper, column.fields[0]),))
        inner = [self._with_fields(child, of) for child, of in zip(wrapper.children, column.fields, strict=False)]
        return replace(element, children=(replace(wrapper, children=(*inner, *wrapper.children[len(inner) :])),))


def as_in_table(fields: Struct, columns: Sequence[TableColumn], name: str) -> Struct:
    """Return the footer ``fields`` with only the columns of a table, under its names and at the same offsets.

    Columns that the file lacks are not added. Raises ParquetError about the file ``name`` if its footer is damaged, if
    the columns can't be found by field ID or name, or if the file or a struct has none of them.
    """
    schema = footer.schema_of(fields, name)
    tree = _tree(schema, name)
    by_id = any(9 in element for element in schema)
    if not by_id and not any(column.stored for column in columns):
        reason = "has no field IDs, and its table doesn't map columns to names"
        raise ParquetError(name, reason, "have the engine that the table is from write the file again")
    kept = _Matcher(name, by_id).matched(tree, columns)
    if tree and not kept:
        raise ParquetError(name, "has none of its table's columns", "write the file again")
    return _with_columns(fields, schema, kept, name)


def in_spelling(fields: Struct, spelling: Spelling, name: str) -> Struct:
    """Return the footer ``fields`` with columns, and fields of structs, as other files spell them.

    Names that differ only in case stay as they are.
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
    """Whether the repeated group of a list wraps its element, rather than being it.

    These are the rules for lists of old writers in LogicalTypes.md of https://github.com/apache/parquet-format.
    """
    alone = element.fields.get(3) == _REPEATED and len(element.children) == 1
    return alone and element.name != "array" and not element.name.endswith("_tuple")


def _with_leaves(group: Struct, leaves: Sequence[int], paths: Sequence[Sequence[bytes]], name: str) -> Struct:
    metas = footer.columns_of(group, name)
    if max(leaves, default=-1) >= len(metas):
        raise ParquetError(name, "the Parquet footer has not one chunk for each column", "fetch the file again")
    chunks = []
    for leaf, path in zip(leaves, paths, strict=True):
        meta = {**metas[leaf], 3: (LIST, Items(BINARY, list(path)))}
        chunks.append({**group[1][1].values[leaf], 3: (STRUCT, meta)})
    result = with_chunks(group, leaves, chunks, name)
    if 6 in result:
        result[6] = (I64, sum(number_of(metas[leaf], 7, name) for leaf in leaves))
    return result
