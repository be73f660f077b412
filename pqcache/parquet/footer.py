"""Parquet footers: read, taken apart and assembled.

A footer is one thrift struct, ``FileMetaData`` of parquet.thrift in https://github.com/apache/parquet-format. Input is
untrusted: malformed footers raise `ParquetError`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pqcache.errors import ParquetError, first_line, open_error
from pqcache.parquet.thrift import BINARY, FIXED_LEN_BYTE_ARRAY, I16, I32, I64, LIST, STRUCT, Items, Struct, encode
from pqcache.system.disk import open_regular

MAGIC = b"PAR1"

_MAX_FOOTER = 1 << 28  # bytes; parsed, it takes several times as many
TAIL = 64 << 10  # bytes that are read first, enough for most footers
_MAX_SCHEMA_DEPTH = 512


class Tail(NamedTuple):
    """The end of a Parquet file: ``data`` begins at offset ``start``, and the footer in it at offset ``limit``.

    Behind the footer are its length and the magic.
    """

    data: bytes
    start: int
    limit: int

    @property
    def size(self) -> int:
        return self.start + len(self.data)

    @property
    def footer(self) -> bytes:
        """The footer's bytes, without length and magic."""
        return self.data[self.limit - self.start : -8]


def read_tail(read: Callable[[int, int], bytes], size: int, name: object, expected: int = TAIL) -> Tail:
    """Read the end of a file of ``size`` bytes, with the whole footer, by ``read(offset, length)``.

    ``expected`` bytes are read first. Raises `ParquetError` about ``name`` if the file isn't Parquet, is truncated or
    encrypted.
    """
    if size == 0:
        advice = "write it again at the source, or remove it there"
        raise ParquetError(name, "has no bytes: its writer was killed, or is still writing", advice)
    start = max(0, size - expected)
    data = read(start, size - start)
    if data[-4:] == b"PARE":
        raise ParquetError(name, "the footer is encrypted, which cannot be read", "decrypt it first")
    if size < 12:
        raise not_parquet(name, f"{size} bytes are too few")
    if data[-4:] != MAGIC:
        raise not_parquet(name, "no PAR1 at its end")
    length = int.from_bytes(data[-8:-4], "little")
    limit = size - 8 - length
    if limit < len(MAGIC) or length > _MAX_FOOTER:
        raise not_parquet(name, f"a footer of {length:,} bytes in a file of {size:,}")
    if limit < start:
        data = read(limit, start - limit) + data
        start = limit
    return Tail(data, start, limit)


def read_local_tail(path: Path) -> Tail:
    try:
        file = open_regular(path)
        try:
            size = os.fstat(file).st_size
            return read_tail(lambda offset, length: os.pread(file, length, offset), size, path)
        finally:
            os.close(file)
    except OSError as error:
        raise not_parquet(path, error) from error


def not_parquet(name: object, reason: BaseException | str) -> ParquetError:
    if isinstance(reason, PermissionError):
        return ParquetError(name, "permission denied", "make it readable for this user")
    if isinstance(reason, OSError) and (known := open_error(reason)) is not None:
        return ParquetError(name, *known)
    if "too deeply nested" in str(reason):
        return ParquetError(name, "has columns nested deeper than Arrow reads", "flatten them at the source")
    return ParquetError(
        name,
        f"not a Parquet file, or truncated ({first_line(reason)})",
        "write it again at the source, or move it away",
    )


def footer_and_magic(footer: Struct) -> bytes:
    data = encode(footer)
    return data + struct.pack("<I", len(data)) + MAGIC


# ---- FileMetaData: 1 version, 2 schema, 3 num_rows, 4 row_groups, 5 key_value_metadata, 6 created_by,
#      7 column_orders. RowGroup: 1 columns, 2 total_byte_size, 3 num_rows, 4 sorting_columns, 5 file_offset,
#      6 total_compressed_size, 7 ordinal. ColumnChunk: 1 file_path, 2 file_offset, 3 meta_data,
#      4-5 offset index, 6-7 column index, 8-9 encryption. ColumnMetaData: 3 path_in_schema,
#      7 total_compressed_size, 9 data_page_offset, 10 index_page_offset, 11 dictionary_page_offset,
#      14-15 bloom filter.


def schema_of(footer: Struct, name: str) -> list[Struct]:
    """Schema elements, depth first, including the root."""
    kind, elements = footer.get(2, (0, None))
    if kind != LIST or elements.kind != STRUCT or not elements.values:
        raise ParquetError(name, "the Parquet footer has no schema", "fetch the file again")
    return list(elements.values)


def row_groups_of(footer: Struct, name: str) -> list[Struct]:
    kind, groups = footer.get(4, (LIST, Items(STRUCT, [])))
    if kind != LIST or (groups.values and groups.kind != STRUCT):
        raise ParquetError(name, "the Parquet footer has no list of row groups", "fetch the file again")
    return list(groups.values)


def _field(fields: Struct, number: int, kind: int, name: str) -> Any:
    found, value = fields.get(number, (0, None))
    if found != kind:
        raise ParquetError(name, f"the Parquet footer lacks field {number}", "fetch the file again")
    return value


def _number(fields: Struct, number: int, kind: int, name: str) -> int:
    return int(_field(fields, number, kind, name)) if number in fields else 0


def _chunks_of(group: Struct, name: str) -> list[Struct]:
    chunks = _field(group, 1, LIST, name)
    if chunks.values and chunks.kind != STRUCT:
        raise ParquetError(name, "the Parquet footer has no list of column chunks", "fetch the file again")
    return list(chunks.values)


def columns_of(group: Struct, name: str) -> list[Struct]:
    return [_field(chunk, 3, STRUCT, name) for chunk in _chunks_of(group, name)]


def shift_row_group(
    group: Struct, delta: int, ordinal: int, paths: Sequence[Sequence[bytes]] | None, name: str
) -> Struct:
    """Describe a row group whose pages move by ``delta`` bytes, as number ``ordinal``.

    Page indexes and bloom filters lie outside the row group and are dropped. ``paths`` are new path_in_schema values.
    Raises `ParquetError` for a chunk that is encrypted or in another file.
    """
    chunks = [
        shift_chunk(chunk, delta, None if paths is None else paths[number], name)
        for number, chunk in enumerate(_chunks_of(group, name))
    ]
    result = dict(group)
    result[1] = (LIST, Items(STRUCT, chunks))
    if (position := _number(result, 5, I64, name)) > 0:
        result[5] = (I64, position + delta)
    return with_ordinal(result, ordinal)


def shift_chunk(chunk: Struct, delta: int, path: Sequence[bytes] | None, name: str) -> Struct:
    if 1 in chunk or 8 in chunk or 9 in chunk:
        raise ParquetError(name, "a column chunk is encrypted or in another file, so it cannot be moved")
    meta = dict(_field(chunk, 3, STRUCT, name))
    for offset in (9, 10, 11):
        # some writers store offset 0 for "no dictionary"
        position = _number(meta, offset, I64, name)
        if offset in meta and (position > 0 or offset == 9):
            meta[offset] = (I64, position + delta)
        else:
            meta.pop(offset, None)
    for gone in (14, 15):
        meta.pop(gone, None)
    if path is not None:
        meta[3] = (LIST, Items(BINARY, list(path)))
    kept = {field: entry for field, entry in chunk.items() if field not in (4, 5, 6, 7)}
    if (position := _number(kept, 2, I64, name)) > 0:
        kept[2] = (I64, position + delta)
    kept[3] = (STRUCT, meta)
    return kept


def with_ordinal(group: Struct, ordinal: int) -> Struct:
    """The field is optional, and an i16."""
    found = {field: entry for field, entry in group.items() if field != 7}
    return found | ({7: (I16, ordinal)} if ordinal < 1 << 15 else {})


def make_footer(
    template: Struct,
    schema: Sequence[Struct],
    groups: Sequence[Struct | bytes],
    rows: int,
    keyvalues: Mapping[bytes, bytes | None],
) -> Struct:
    """The footer of a file of ``groups``, with version, created_by and column orders of ``template``.

    ``groups`` may be encoded already, which takes less memory.
    """
    fields: Struct = {
        **template,
        2: (LIST, Items(STRUCT, list(schema))),
        3: (I64, rows),
        4: (LIST, Items(STRUCT, list(groups))),
    }
    fields.pop(5, None)
    if keyvalues:
        pairs: list[Struct] = [
            {1: (BINARY, key)} | ({} if value is None else {2: (BINARY, value)}) for key, value in keyvalues.items()
        ]
        fields[5] = (LIST, Items(STRUCT, pairs))
    return dict(sorted(fields.items()))


class SchemaLeaf(NamedTuple):
    """A leaf of a schema: positions of its element and its column, its path, and the shape of its levels."""

    element: int
    column: int
    path: tuple[bytes, ...]
    shape: tuple[int, ...]
    """Repetition types on the way down that add a level: 1 for optional, 2 for repeated."""


def leaves_of(schema: Sequence[Struct], name: str) -> list[SchemaLeaf]:
    leaves: list[SchemaLeaf] = []
    open_groups: list[tuple[int, tuple[bytes, ...], tuple[int, ...]]] = []
    column = -1
    for number, element in enumerate(schema):
        children = _number(element, 5, I32, name)
        if number == 0:
            path: tuple[bytes, ...] = ()
            shape: tuple[int, ...] = ()
        else:
            while open_groups and open_groups[-1][0] == 0:
                open_groups.pop()
            if not open_groups:
                raise ParquetError(name, "the Parquet schema is not a tree", "fetch the file again")
            left, path, shape = open_groups[-1]
            open_groups[-1] = (left - 1, path, shape)
            column += not path
            path = (*path, _field(element, 4, BINARY, name))
            repetition = _number(element, 3, I32, name)
            shape = (*shape, repetition) if repetition else shape
        if number == 0 or children:
            if children < 0 or len(open_groups) > _MAX_SCHEMA_DEPTH:
                raise ParquetError(name, "the Parquet schema is damaged", "fetch the file again")
            open_groups.append((children, path, shape))
        else:
            leaves.append(SchemaLeaf(number, column, path, shape))
    if any(left for left, _, _ in open_groups):
        raise ParquetError(name, "the Parquet schema is not a tree", "fetch the file again")
    return leaves


def trees(schema: Sequence[Struct]) -> list[list[Struct]]:
    """Group the elements of a schema by top-level column."""
    found: list[list[Struct]] = []
    left = 0
    for element in schema[1:]:
        if not left:
            found.append([])
            left = 1
        found[-1].append(element)
        left += int(element.get(5, (I32, 0))[1]) - 1
    return found


_TYPE_FIELDS = (1, 2, 6, 7, 8, 10)  # type, type_length, converted_type, scale, precision, logicalType


def with_names_of(written: Sequence[Struct], wanted: Sequence[Struct], name: str) -> list[Struct] | None:
    """The schema ``wanted`` for data stored under ``written``, or None if it doesn't describe the data.

    Arrow normalizes schemas: two-level lists, ENUM, group names and legacy annotations come out different, although
    levels and values are the same. If every leaf has the same levels, the source's own elements remain true. A leaf
    whose physical type did change (INT96, storage of decimals) keeps its name and field id, and takes its type from
    ``written``.
    """
    ours, theirs = leaves_of(written, name), leaves_of(wanted, name)
    if [leaf.shape for leaf in ours] != [leaf.shape for leaf in theirs]:
        return None
    schema = list(wanted)
    for our, their in zip(ours, theirs, strict=True):
        mine, other = written[our.element], wanted[their.element]
        if _stored_type(mine) != _stored_type(other):
            kept = {field: entry for field, entry in other.items() if field not in _TYPE_FIELDS}
            kept |= {field: mine[field] for field in _TYPE_FIELDS if field in mine}
            schema[their.element] = dict(sorted(kept.items()))
    return schema


def _stored_type(element: Struct) -> tuple[Any, Any]:
    """A leaf's physical type, with its length if that matters: some writers set one for numbers too."""
    kind = element.get(1)
    return kind, element.get(2) if kind == (I32, FIXED_LEN_BYTE_ARRAY) else None
