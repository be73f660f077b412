"""Rejects footers that contradict themselves (see `_row_groups`) or would make pyarrow end the process.

Those C++ errors can't be caught. Opening a file is safe, and so is reading its rows. But `RowGroupMetaData.column`,
`ColumnChunkMetaData.compression` and `.statistics` end the process if a column chunk contradicts its schema: another
type, an unknown codec, a minimum shorter than its type, level histograms of the wrong length, missing or encrypted
metadata. So row groups are inspected first (see `walk_struct`). Anything that pyarrow's parser would read differently,
such as a list with elements of another kind, is refused too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError
from pqcache.parquet import footer, thrift
from pqcache.parquet.footer import not_parquet, read_local_tail
from pqcache.parquet.thrift import (
    BINARY,
    COMPRESSED,
    DATA,
    DICTIONARY,
    I32,
    I64,
    LIST,
    STRUCT,
    UNCOMPRESSED,
    VALUES,
    Check,
    inside,
    items_at,
    key,
    read_integer,
    read_varint,
    skip_value,
    walk_struct,
)

_REQUIRED = (VALUES, UNCOMPRESSED, COMPRESSED, DATA)
_MAX_RECENT = 16  # schemas remembered, as files of a table share one, and decoding it takes as long as the rest
_LAST_CODEC = 7
_WIDTHS = {0: 1, 1: 4, 2: 8, 4: 4, 5: 8}  # of the physical types whose minima pyarrow decodes
_DECIMAL = 5  # as converted type and as logical type
_FLOAT16 = 15
_PAGE_VALUES_BITS = 31  # of the number of values in a page
_PAGE_HEADER = 16  # bytes, at least
_ADVICE = "write it again at the source, or move it away"


@dataclass(frozen=True, kw_only=True)
class _ColumnRules:
    """Rules for the chunks of a column: physical type, least bytes of a minimum, number of levels."""

    path: str
    kind: int
    width: int
    repetitions: int
    definitions: int


class _Encrypted(ValueError):
    """A column chunk is encrypted."""


@dataclass
class KnownSchema:
    """A remembered schema: files of a table usually share one.

    Attributes:
        data: the bytes of a footer up to the end of its schema.
        elements: the schema elements.
        columns: the rules for the chunks of each leaf column.
        arrow: the Arrow schema that pyarrow last made of it, preceded by the other inputs that it depends on.
    """

    data: bytes
    elements: list[thrift.Struct]
    columns: list[_ColumnRules]
    arrow: tuple[object, pa.Schema] | None = None


@dataclass
class _File:
    """A footer being checked.

    Attributes:
        size: the file's, None if unknown.
        rows, group_rows: as the footer says; -1 until they are found.
        groups, rows_of_groups: how many row groups, and rows in them, were read so far.
        columns: a column of the row group by (number of values, whether it has no lists).
    """

    known: KnownSchema
    size: int | None
    rows: int = -1
    group_rows: int = -1
    groups: int = 0
    rows_of_groups: int = 0
    columns: dict[tuple[int, bool], str] = field(default_factory=dict)


@dataclass(slots=True)
class _ChunkNumbers:
    """A column chunk being checked: its numbers by field, and whether it lies in another file."""

    rules: _ColumnRules
    numbers: dict[int, int] = field(default_factory=dict)
    elsewhere: bool = False


_recent: list[KnownSchema] = []


def check_footer(data: bytes, name: str, size: int | None) -> KnownSchema:
    """Raise ParquetError if the footer ``data`` contradicts itself or would make pyarrow end the process.

    ``name`` is the file to blame, and ``size`` its size, None for a footer without a file. Returns the schema, usually
    the same object for files with equal schemas.
    """
    try:
        known = next((known for known in _recent if data.startswith(known.data)), None)
        if known is None:
            known = _schema_of(data, name)
            _recent.insert(0, known)
            del _recent[_MAX_RECENT:]
        file = _File(known, size)
        walk_struct(data, len(known.data), _FILE, file, 2)
        if file.rows != file.rows_of_groups:
            raise ValueError(f"the file has {file.rows:,} rows, its row groups {file.rows_of_groups:,}")
        return known
    except _Encrypted:
        raise ParquetError(name, "columns are encrypted, which cannot be read", "decrypt it first") from None
    except IndexError:
        raise ParquetError(name, "the Parquet footer ends in the middle", _ADVICE) from None
    except ValueError as error:
        raise ParquetError(name, f"the Parquet footer is damaged ({error})", _ADVICE) from None


def read_footer(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    """A local file's footer and Arrow schema; raises ParquetError if it isn't Parquet."""
    tail = read_local_tail(path)
    return footer_in(tail.data, str(path), size=tail.size)


def footer_in(
    end: bytes, name: str, int96: str | None = None, *, size: int | None
) -> tuple[pq.FileMetaData, pa.Schema]:
    """The footer and Arrow schema of a file from its last bytes; ``int96`` is INT96's unit in the schema.

    ``size`` is the file's size, None for a footer without a file. Raises ParquetError about ``name`` if the file isn't
    Parquet, or if its footer contradicts itself or would crash pyarrow.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(end), coerce_int96_timestamp_unit=int96) as file:
            metadata = file.metadata
            known = check_footer(end[-8 - int.from_bytes(end[-8:-4], "little") : -8], name, size)
            about = int96, metadata.metadata
            arrow = known.arrow  # which other threads may replace
            if arrow is None or arrow[0] != about:
                arrow = known.arrow = about, file.schema_arrow
            return metadata, arrow[1]
    except (pa.ArrowException, OSError, ValueError) as error:  # also names that are not text
        raise not_parquet(name, error) from error


def _schema_of(data: bytes, name: str) -> KnownSchema:
    fields, end = thrift.decode_first(data, name, until=2)
    schema = footer.schema_of(fields, name)
    if 4 in fields:
        raise ValueError("its row groups are before its schema")
    leaves = [leaf for leaf in footer.leaves_of(schema, name) if 1 in schema[leaf.element]]  # others: empty structs
    return KnownSchema(data[:end], schema, [_rules_of(schema[leaf.element], leaf) for leaf in leaves])


def _rules_of(element: thrift.Struct, leaf: footer.SchemaLeaf) -> _ColumnRules:
    kind = element[1][1]
    width = _WIDTHS.get(kind, 0)
    logical = element[10][1] if 10 in element and element[10][0] == STRUCT else {}
    if kind == thrift.FIXED_LEN_BYTE_ARRAY and (
        element.get(6) == (I32, _DECIMAL) or {_DECIMAL, _FLOAT16} & logical.keys()
    ):
        width = (
            max(0, element[2][1]) if 2 in element else 0
        )  # of other types nobody needs them, and some writers truncate them
    if not {1, 2}.issuperset(leaf.shape):
        raise ValueError("a column is neither optional nor repeated nor required")
    return _ColumnRules(
        path=b".".join(leaf.path).decode("utf-8", "replace"),
        kind=kind,
        width=width,
        repetitions=leaf.shape.count(2) + 1,
        definitions=len(leaf.shape) + 1,
    )


# ---- FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, Statistics and SizeStatistics of parquet.thrift
#
# Where counts and sizes contradict one another, pyarrow would read only some of the rows, or too many. The rows of a
# file are those of its row groups. A column without lists has as many values as its row group has rows, and one with
# lists at least as many. No column chunk reaches beyond the file, and none holds more values than pages of its size
# can. Quirks of old writers are accepted: they leave out optional fields, and the sizes of some chunks are too small
# (PARQUET-816).


def _row_groups(data: bytes, at: int, file: _File) -> int:
    count, kind, at = items_at(data, at)
    _expect(kind, STRUCT, count)
    for _ in range(count):
        file.group_rows, file.columns = -1, {}
        at = walk_struct(data, at, _GROUP, file)
        rows = file.group_rows
        if rows < 0:
            raise ValueError(f"row group {file.groups} has {rows:,} rows")
        for (values, flat), path in file.columns.items():
            if values != rows and (flat or values < rows or not rows):
                raise ValueError(f"row group {file.groups} has {rows:,} rows, its column {path} {values:,} values")
        file.groups += 1
        file.rows_of_groups += rows
    return at


def _chunks(data: bytes, at: int, file: _File) -> int:
    columns = file.known.columns
    count, kind, at = items_at(data, at)
    _expect(kind, STRUCT, count)
    if count != len(columns):
        raise ValueError(f"a row group has {count:,} columns, the schema {len(columns):,}")
    for rules in columns:
        at = _chunk(data, at, rules, file)
    return at


def _chunk(data: bytes, at: int, rules: _ColumnRules, file: _File) -> int:
    chunk = _ChunkNumbers(rules)
    at = walk_struct(data, at, _CHUNK, chunk)
    found = chunk.numbers
    if not found:
        raise ValueError("a column chunk without metadata")
    if not found.get(VALUES):
        found[DATA] = 0  # there are no pages, and writers put any number
    if any(found.get(number, -1) < 0 for number in _REQUIRED):
        raise ValueError(f"column {rules.path} has a size, count or offset that is missing or negative")
    values, size = found[VALUES], found[COMPRESSED]
    begin, dictionary = (0, 0) if chunk.elsewhere else (found[DATA], found.get(DICTIONARY, 0))
    end = size + (dictionary if 0 < dictionary < begin else begin)  # 0 and -1 also mean that there is none
    if file.size is not None and end > file.size and values:
        raise ValueError(
            f"column {rules.path} of row group {file.groups} ends at byte {end:,} of a file of {file.size:,} bytes"
        )
    if values >> _PAGE_VALUES_BITS > size // _PAGE_HEADER:
        raise ValueError(f"column {rules.path} of row group {file.groups} has {values:,} values in {size:,} bytes")
    file.columns.setdefault((values, rules.repetitions == 1), rules.path)
    return at


def _elsewhere(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
    chunk.elsewhere = True
    return skip_value(data, at, BINARY, 0)


def _put(name: str) -> Check:
    """A check that sets an attribute."""

    def check(data: bytes, at: int, about: object) -> int:
        number, at = read_integer(data, at)
        setattr(about, name, number)
        return at

    return check


def _number(number: int) -> Check:
    def check(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
        chunk.numbers[number], at = read_integer(data, at)
        return at

    return check


def _type(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
    rules = chunk.rules
    if data[at] == rules.kind << 1:
        return at + 1
    kind, at = read_varint(data, at)
    if kind != rules.kind << 1:
        raise ValueError(f"a column chunk has type {kind >> 1}, the schema {rules.kind}")
    return at


def _codec(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
    if data[at] <= _LAST_CODEC << 1 and not data[at] & 1:
        return at + 1
    codec, at = read_varint(data, at)
    if codec & 1 or codec >> 1 > _LAST_CODEC:
        raise ValueError("unknown codec")
    return at


def _extreme(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
    size = data[at]
    at += 1
    if size > 127:
        size, at = read_varint(data, at - 1)
    if size < chunk.rules.width:
        raise ValueError(f"a minimum or maximum of {size} bytes for a type of {chunk.rules.width}")
    return at + size


def _unencoded(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
    if chunk.rules.kind != thrift.BYTE_ARRAY:
        raise ValueError("a size of byte arrays for another type")
    return skip_value(data, at, I64, 0)


def _histogram(of: str) -> Check:
    def check(data: bytes, at: int, chunk: _ChunkNumbers) -> int:
        levels = getattr(chunk.rules, of)
        count, kind, at = items_at(data, at)
        _expect(kind, I64, count)
        if count not in (0, levels):
            raise ValueError(f"a histogram of {count:,} levels instead of {levels}")
        for _ in range(count):
            at = skip_value(data, at, I64, 0)
        return at

    return check


def _encrypted(data: bytes, at: int, about: object) -> int:
    raise _Encrypted


def _list_of(wanted: int) -> Check:
    """Check a list that pyarrow reads as one of ``wanted``, regardless of the kind it declares."""

    def check(data: bytes, at: int, about: object) -> int:
        count, kind, at = items_at(data, at)
        _expect(kind, wanted, count)
        for _ in range(count):
            at = skip_value(data, at, wanted, 0)
        return at

    return check


def _expect(kind: int, wanted: int, count: int) -> None:
    if count and kind != wanted:
        raise ValueError(f"a list of kind {kind} instead of {wanted}")


def _twice(data: bytes, at: int, about: object) -> int:
    raise ValueError("two schemas")


_FILE = {
    key(2, LIST): _twice,
    key(3, I64): _put("rows"),
    key(4, LIST): _row_groups,
    key(5, LIST): _list_of(STRUCT),
    key(7, LIST): _list_of(STRUCT),
}
_GROUP = {key(1, LIST): _chunks, key(3, I64): _put("group_rows"), key(4, LIST): _list_of(STRUCT)}
_STATISTICS = {key(number, BINARY): _extreme for number in (1, 2, 5, 6)}
_SIZES = {key(1, I64): _unencoded, key(2, LIST): _histogram("repetitions"), key(3, LIST): _histogram("definitions")}
_COLUMN = {
    key(1, I32): _type,
    key(2, LIST): _list_of(I32),
    key(3, LIST): _list_of(BINARY),
    key(4, I32): _codec,
    **{key(number, I64): _number(number) for number in (*_REQUIRED, DICTIONARY)},
    key(8, LIST): _list_of(STRUCT),
    key(12, STRUCT): inside(_STATISTICS),
    key(13, LIST): _list_of(STRUCT),
    key(16, STRUCT): inside(_SIZES),
}
_CHUNK = {key(1, BINARY): _elsewhere, key(3, STRUCT): inside(_COLUMN), key(8, STRUCT): _encrypted}
