"""Rejects footers on which pyarrow would end the process, with a C++ error that nothing catches.

Opening a file is safe, and so is reading its rows. But `RowGroupMetaData.column`, `ColumnChunkMetaData.compression`
and `.statistics` end the process where a column chunk contradicts its schema: another type, a codec that does not
exist, a minimum shorter than its type, level histograms of the wrong length, metadata that are missing or encrypted.
So the row groups are looked through first. They are not decoded, which would take longer than everything else that is
done with a footer: bytes are stepped over, and only what matters is looked at. What pyarrow's parser would read
otherwise than it is written here, like a list whose elements are not of the kind that they should be, is refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pqcache.errors import ParquetError
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.thrift import BINARY, BOOL, BYTE, DOUBLE, I16, I32, I64, LIST, MAP, SET, STRUCT, read_varint

_FALSE = 2
_MAX_DEPTH = 32
_MAX_NUMBER = (1 << 15) - 1  # of a field: pyarrow's parser has 16 bits for it
_MAX_RECENT = (
    16  # schemas that are remembered: files of a table have the same, and decoding it takes as long as the rest
)
_LAST_CODEC = 7
_BYTE_ARRAY, _FIXED_LEN_BYTE_ARRAY = 6, 7
_WIDTHS = {0: 1, 1: 4, 2: 8, 4: 4, 5: 8}  # of the physical types whose minima pyarrow decodes
_DECIMAL = 5  # as converted type and as logical type
_FLOAT16 = 15
_ADVICE = "write it again at the source, or move it away"


_Check = Callable[[bytes, int, Any], int]
"""Checks the value that begins there, with what is known of its struct, and returns where it ends."""
_Checks = Mapping[int, _Check]
"""What is checked of a struct, by the field's number and kind (see `_key`)."""


@dataclass(frozen=True, kw_only=True)
class _ColumnRules:
    """What a column's chunks have to agree with: its physical type, the least bytes of a minimum, and its levels.

    ``lists`` are the bytes of the last list of each check that passed: most chunks of a column have the same ones.
    """

    kind: int
    width: int
    repetitions: int
    definitions: int
    lists: dict[_Check, bytes] = field(default_factory=dict)


class _Encrypted(ValueError):
    """A column chunk is encrypted."""


@dataclass
class _KnownSchema:
    """The bytes of a footer up to the end of its schema, and what follows for the chunks of each leaf column.

    ``lists`` are as those of `_ColumnRules`.
    """

    data: bytes
    columns: list[_ColumnRules]
    lists: dict[_Check, bytes] = field(default_factory=dict)


_recent: list[_KnownSchema] = []


def check_footer(data: bytes, name: str) -> bytes:
    """Raise ParquetError if pyarrow would end the process when asked what the footer ``data`` says of a column chunk.

    ``name`` is the file to blame. Return the beginning of ``data``, with all of its schema: for files that are alike
    mostly one and the same object.
    """
    try:
        known = next((known for known in _recent if data.startswith(known.data)), None)
        if known is None:
            known = _schema_of(data, name)
            _recent.insert(0, known)
            del _recent[_MAX_RECENT:]
        _fields(data, len(known.data), _FILE, known, 2)
        return known.data
    except _Encrypted:
        raise ParquetError(name, "columns are encrypted, which cannot be read", "decrypt it first") from None
    except IndexError:
        raise ParquetError(name, "the Parquet footer ends in the middle", _ADVICE) from None
    except ValueError as error:
        raise ParquetError(name, f"the Parquet footer is damaged ({error})", _ADVICE) from None


def _schema_of(data: bytes, name: str) -> _KnownSchema:
    fields, end = thrift.decode_first(data, name, until=2)
    schema = footer.schema_of(fields, name)
    if 4 in fields:
        raise ValueError("its row groups are before its schema")
    leaves = [leaf for leaf in footer.leaves_of(schema, name) if 1 in schema[leaf.element]]  # others: empty structs
    return _KnownSchema(data[:end], [_rules_of(schema[leaf.element], leaf) for leaf in leaves])


def _rules_of(element: thrift.Struct, leaf: footer.SchemaLeaf) -> _ColumnRules:
    kind = element[1][1]
    width = _WIDTHS.get(kind, 0)
    logical = element[10][1] if 10 in element and element[10][0] == STRUCT else {}
    if kind == _FIXED_LEN_BYTE_ARRAY and (element.get(6) == (I32, _DECIMAL) or {_DECIMAL, _FLOAT16} & logical.keys()):
        width = max(0, element[2][1]) if 2 in element else 0  # nobody asks for others, and some writers cut them off
    if not {1, 2}.issuperset(leaf.shape):
        raise ValueError("a column that is neither optional nor repeated nor required")
    return _ColumnRules(kind=kind, width=width, repetitions=leaf.shape.count(2) + 1, definitions=len(leaf.shape) + 1)


# ---- The compact protocol, stepped over. An index past the end raises IndexError.


def _fields(data: bytes, at: int, checks: _Checks, about: Any, number: int = 0, depth: int = 0) -> int:
    """Return where the struct ends whose next field begins at ``at``, after field ``number``."""
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            if number > _MAX_NUMBER:
                break
            number, at = read_varint(data, at)
            number = (number >> 1) ^ -(number & 1)
        kind = head & 15
        check = checks.get(number << 4 | kind)
        if check is not None:
            at = check(data, at, about)
        elif I16 <= kind <= I64:
            while data[at] > 127:
                at += 1
            at += 1
        elif kind > _FALSE:
            at = _skipped(data, at, kind, depth)
    if abs(number) > _MAX_NUMBER:
        raise ValueError(f"a field {number:,}")
    return at + 1


def _skipped(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return where the value ends that begins at ``at``."""
    if I16 <= kind <= I64:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == BINARY:
        size, at = read_varint(data, at)
        return at + size
    if depth > _MAX_DEPTH:
        raise ValueError(f"values nested more than {_MAX_DEPTH} deep")
    if kind == STRUCT:
        return _fields(data, at, {}, None, depth=depth + 1)
    if kind in (LIST, SET):
        count, kind, at = _items(data, at)
        for _ in range(count):
            at = _skipped(data, at, kind, depth + 1)
        return at
    if kind == MAP:
        count, at = read_varint(data, at)
        kinds = data[at] if count else 0
        at += count > 0
        for _ in range(min(count, len(data))):
            at = _skipped(data, _skipped(data, at, kinds >> 4, depth + 1), kinds & 15, depth + 1)
        return at
    if kind in (BOOL, _FALSE, BYTE):  # a bool has a byte of its own only inside a list or map
        return at + 1
    if kind == DOUBLE:
        return at + 8
    raise ValueError(f"a value of unknown kind {kind}")


def _items(data: bytes, at: int) -> tuple[int, int, int]:
    """Return how many elements a list has, their kind, and where the first begins."""
    count, kind = data[at] >> 4, data[at] & 15
    at += 1
    if count == 15:
        count, at = read_varint(data, at)
    if count > len(data) - at:  # an element takes a byte at least
        raise IndexError
    return count, kind, at


# ---- FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, Statistics and SizeStatistics of parquet.thrift


def _row_groups(data: bytes, at: int, known: _KnownSchema) -> int:
    count, kind, at = _items(data, at)
    _expect(kind, STRUCT, count)
    for _ in range(count):
        at = _fields(data, at, _GROUP, known)
    return at


def _chunks(data: bytes, at: int, known: _KnownSchema) -> int:
    count, kind, at = _items(data, at)
    _expect(kind, STRUCT, count)
    if count != len(known.columns):
        raise ValueError(f"a row group has {count:,} columns, the schema {len(known.columns):,}")
    seen: list[bool] = []
    for rules in known.columns:
        at = _fields(data, at, _CHUNK, (rules, seen))
        if not seen:
            raise ValueError("a column chunk without metadata")
        seen.clear()
    return at


def _metadata(data: bytes, at: int, about: tuple[_ColumnRules, list[bool]]) -> int:
    rules, seen = about
    seen.append(True)
    return _fields(data, at, _COLUMN, rules)


def _type(data: bytes, at: int, rules: _ColumnRules) -> int:
    if data[at] == rules.kind << 1:
        return at + 1
    kind, at = read_varint(data, at)
    if kind != rules.kind << 1:
        raise ValueError(f"a column chunk has type {kind >> 1}, the schema {rules.kind}")
    return at


def _codec(data: bytes, at: int, rules: _ColumnRules) -> int:
    if data[at] <= _LAST_CODEC << 1 and not data[at] & 1:
        return at + 1
    codec, at = read_varint(data, at)
    if codec & 1 or codec >> 1 > _LAST_CODEC:
        raise ValueError("a codec that does not exist")
    return at


def _statistics(data: bytes, at: int, rules: _ColumnRules) -> int:
    return _fields(data, at, _STATISTICS, rules)


def _extreme(data: bytes, at: int, rules: _ColumnRules) -> int:
    size = data[at]
    at += 1
    if size > 127:
        size, at = read_varint(data, at - 1)
    if size < rules.width:
        raise ValueError(f"a minimum or maximum of {size} bytes for a type of {rules.width}")
    return at + size


def _sizes(data: bytes, at: int, rules: _ColumnRules) -> int:
    return _fields(data, at, _SIZES, rules)


def _unencoded(data: bytes, at: int, rules: _ColumnRules) -> int:
    if rules.kind != _BYTE_ARRAY:
        raise ValueError("a size of byte arrays for another type")
    return _skipped(data, at, I64, 0)


def _repetitions(data: bytes, at: int, rules: _ColumnRules) -> int:
    return _histogram(data, at, rules.repetitions)


def _definitions(data: bytes, at: int, rules: _ColumnRules) -> int:
    return _histogram(data, at, rules.definitions)


def _histogram(data: bytes, at: int, levels: int) -> int:
    count, kind, at = _items(data, at)
    _expect(kind, I64, count)
    if count not in (0, levels):
        raise ValueError(f"a histogram of {count:,} levels where there are {levels}")
    if data[at : at + count].isascii():  # each number is one byte
        return at + count
    for _ in range(count):
        while data[at] > 127:
            at += 1
        at += 1
    return at


def _encrypted(data: bytes, at: int, about: object) -> int:
    raise _Encrypted


def _list_of(wanted: int) -> _Check:
    """Return the check of a list that pyarrow reads as one of ``wanted``, whatever kind it says it has.

    Bytes that begin as a list which passed before are the same list: no encoding is the beginning of another.
    """

    def check(data: bytes, at: int, about: _KnownSchema | _ColumnRules) -> int:
        known = about.lists.get(check)
        if known is not None and data.startswith(known, at):
            return at + len(known)
        count, kind, end = _items(data, at)
        _expect(kind, wanted, count)
        for _ in range(count):
            end = _skipped(data, end, wanted, 0)
        about.lists[check] = data[at:end]
        return end

    return check


def _expect(kind: int, wanted: int, count: int) -> None:
    if count and kind != wanted:
        raise ValueError(f"a list of kind {kind} instead of {wanted}")


def _twice(data: bytes, at: int, about: object) -> int:
    raise ValueError("two schemas")


def _key(number: int, kind: int) -> int:
    return number << 4 | kind


_FILE = {
    _key(2, LIST): _twice,
    _key(4, LIST): _row_groups,
    _key(5, LIST): _list_of(STRUCT),
    _key(7, LIST): _list_of(STRUCT),
}
_GROUP = {_key(1, LIST): _chunks, _key(4, LIST): _list_of(STRUCT)}
_CHUNK = {_key(3, STRUCT): _metadata, _key(8, STRUCT): _encrypted}
_COLUMN = {
    _key(1, I32): _type,
    _key(2, LIST): _list_of(I32),
    _key(3, LIST): _list_of(BINARY),
    _key(4, I32): _codec,
    _key(8, LIST): _list_of(STRUCT),
    _key(12, STRUCT): _statistics,
    _key(13, LIST): _list_of(STRUCT),
    _key(16, STRUCT): _sizes,
}
_STATISTICS = {_key(number, BINARY): _extreme for number in (1, 2, 5, 6)}
_SIZES = {_key(1, I64): _unencoded, _key(2, LIST): _repetitions, _key(3, LIST): _definitions}
