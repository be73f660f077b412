"""What in a footer would end the process: pyarrow meets it with a C++ error that nothing catches.

Opening a file is safe, and so is reading its rows. But `RowGroupMetaData.column`, `ColumnChunkMetaData.compression`
and `.statistics` end the process where a column chunk contradicts its schema: another type, a codec that does not
exist, a minimum shorter than its type, level histograms of the wrong length, metadata that are missing or encrypted.
So the row groups are looked through first. They are not decoded, which would take longer than everything else that is
done with a footer: bytes are stepped over, and only what matters is looked at. What pyarrow's parser would read
otherwise than it is written here, like a list whose elements are not of the kind that they should be, is refused too.

Where many row groups have one schema, chunks as most writers write them are recognized by two regular expressions,
in a quarter of the time. The protocol is a prefix code: bytes that match a sequence of its fields are these fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from pqcache.errors import ParquetError
from pqcache.parquet import footer, thrift
from pqcache.parquet.thrift import BINARY, BOOL, BYTE, DOUBLE, I16, I32, I64, LIST, MAP, SET, STRUCT

_FALSE = 2
_MAX_DEPTH = 32
_MAX_NUMBER = (1 << 15) - 1  # of a field: pyarrow's parser has 16 bits for it
_KNOWN = 16  # schemas that are remembered: files of a table have the same, and decoding it takes as long as the rest
_OFTEN = 50  # row groups with one schema, from which on it is worth some milliseconds to make regular expressions
_LAST_CODEC = 7
_BYTE_ARRAY, _FIXED_LEN_BYTE_ARRAY = 6, 7
_WIDTHS = {0: 1, 1: 4, 2: 8, 4: 4, 5: 8}  # of the physical types whose minima pyarrow decodes
_DECIMAL = 5  # as converted type and as logical type
_FLOAT16 = 15
_ADVICE = "write it again at the source, or move it away"


class _Leaf(NamedTuple):
    """What a column's chunks have to agree with: its physical type, the least bytes of a minimum, and its levels.

    ``path`` is how its path is written in them.
    """

    kind: int
    width: int
    repetitions: int
    definitions: int
    path: bytes


class _Encrypted(ValueError):
    """A column chunk is encrypted."""


_Match = Callable[[bytes, int], "re.Match[bytes] | None"]


@dataclass
class _Start:
    """The bytes of a footer up to the end of its schema, and the schema's leaves.

    ``met`` counts the row groups that had it, and ``usual`` recognizes the chunk of each leaf from its codec on.
    """

    data: bytes
    leaves: list[_Leaf]
    met: int = 0
    usual: list[_Match] = field(default_factory=list)

    @cached_property
    def usual_orders(self) -> bytes:
        """The list of as many orders, each by the type, as there are leaves."""
        order: thrift.Struct = {1: (STRUCT, {})}
        return thrift.encode({1: (LIST, thrift.Items(STRUCT, [order] * len(self.leaves)))})[1:-1]


_Check = Callable[[bytes, int, Any], int]
"""Checks the value that begins there, with what is known of its struct, and returns where it ends."""
_Checks = Mapping[int, _Check]
"""What is checked of a struct, by the field's number and kind (see `_key`)."""

_known: list[_Start] = []


def check_footer(data: bytes, name: str) -> bytes:
    """Raise ParquetError if pyarrow would end the process when asked what the footer ``data`` says of a column chunk.

    ``name`` is the file to blame. Return the beginning of ``data``, with all of its schema: for files that are alike
    mostly one and the same object.
    """
    try:
        start = next((start for start in _known if data.startswith(start.data)), None)
        if start is None:
            start = _start_of(data, name)
            _known.insert(0, start)
            del _known[_KNOWN:]
        _fields(data, len(start.data), _FILE, start, 2)
        return start.data
    except _Encrypted:
        raise ParquetError(name, "columns are encrypted, which cannot be read", "decrypt it first") from None
    except IndexError:
        raise ParquetError(name, "the Parquet footer ends in the middle", _ADVICE) from None
    except ValueError as error:
        raise ParquetError(name, f"the Parquet footer is damaged ({error})", _ADVICE) from None


def _start_of(data: bytes, name: str) -> _Start:
    fields, end = thrift.decode_first(data, name, until=2)
    schema = footer.schema_of(fields, name)
    if 4 in fields:
        raise ValueError("its row groups are before its schema")
    leaves = [leaf for leaf in footer.leaves_of(schema, name) if 1 in schema[leaf.element]]  # others: empty structs
    return _Start(data[:end], [_leaf_of(schema[leaf.element], leaf) for leaf in leaves])


def _leaf_of(element: thrift.Struct, leaf: footer.Leaf) -> _Leaf:
    kind = element[1][1]
    width = _WIDTHS.get(kind, 0)
    logical = element[10][1] if 10 in element and element[10][0] == STRUCT else {}
    if kind == _FIXED_LEN_BYTE_ARRAY and (element.get(6) == (I32, _DECIMAL) or {_DECIMAL, _FLOAT16} & logical.keys()):
        width = max(0, element[2][1]) if 2 in element else 0  # nobody asks for others, and some writers cut them off
    if not {1, 2}.issuperset(leaf.shape):
        raise ValueError("a column that is neither optional nor repeated nor required")
    path = thrift.encode({3: (LIST, thrift.Items(BINARY, list(leaf.path)))})[1:-1]
    return _Leaf(kind, width, leaf.shape.count(2) + 1, len(leaf.shape) + 1, b"\x19" + path)


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
            number, at = _varint(data, at)
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
        size, at = _varint(data, at)
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
        count, at = _varint(data, at)
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


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer and where it ends."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    result = shift = 0
    while byte > 127:
        result |= (byte & 127) << shift
        shift += 7
        if shift > 28:
            raise ValueError("a length or number of more than 35 bits")
        at += 1
        byte = data[at]
    return result | byte << shift, at + 1


def _items(data: bytes, at: int) -> tuple[int, int, int]:
    """Return how many elements a list has, their kind, and where the first begins."""
    count, kind = data[at] >> 4, data[at] & 15
    at += 1
    if count == 15:
        count, at = _varint(data, at)
    if count > len(data) - at:  # an element takes a byte at least
        raise IndexError
    return count, kind, at


# ---- FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, Statistics and SizeStatistics of parquet.thrift


def _groups(data: bytes, at: int, start: _Start) -> int:
    count, kind, at = _items(data, at)
    _expect(kind, STRUCT, count)
    for _ in range(count):
        at = _fields(data, at, _GROUP, start)
    return at


def _chunks(data: bytes, at: int, start: _Start) -> int:
    count, kind, at = _items(data, at)
    _expect(kind, STRUCT, count)
    if count != len(start.leaves):
        raise ValueError(f"a row group has {count:,} columns, the schema {len(start.leaves):,}")
    start.met += 1
    if start.met > _OFTEN and not start.usual:
        start.usual = [_usual(leaf.kind, leaf.width, leaf.repetitions, leaf.definitions) for leaf in start.leaves]
    seen: list[bool] = []
    for number, leaf in enumerate(start.leaves):
        if start.usual:
            begin = _BEGIN(data, at)
            if begin and begin[1][0] == leaf.kind << 1 and data.startswith(leaf.path, begin.end()):
                rest = start.usual[number](data, begin.end() + len(leaf.path))
                if rest:
                    at = rest.end()
                    continue
        at = _fields(data, at, _CHUNK, (leaf, seen))
        if not seen:
            raise ValueError("a column chunk without metadata")
        seen.clear()
    return at


def _column(data: bytes, at: int, about: tuple[_Leaf, list[bool]]) -> int:
    leaf, seen = about
    seen.append(True)
    return _fields(data, at, _COLUMN, leaf)


def _type(data: bytes, at: int, leaf: _Leaf) -> int:
    kind, at = _varint(data, at)
    if kind != leaf.kind << 1:
        raise ValueError(f"a column chunk has type {kind >> 1}, the schema {leaf.kind}")
    return at


def _codec(data: bytes, at: int, leaf: _Leaf) -> int:
    codec, at = _varint(data, at)
    if codec & 1 or codec >> 1 > _LAST_CODEC:
        raise ValueError("a codec that does not exist")
    return at


def _statistics(data: bytes, at: int, leaf: _Leaf) -> int:
    return _fields(data, at, _STATISTICS, leaf)


def _extreme(data: bytes, at: int, leaf: _Leaf) -> int:
    size, at = _varint(data, at)
    if size < leaf.width:
        raise ValueError(f"a minimum or maximum of {size} bytes for a type of {leaf.width}")
    return at + size


def _sizes(data: bytes, at: int, leaf: _Leaf) -> int:
    return _fields(data, at, _SIZES, leaf)


def _unencoded(data: bytes, at: int, leaf: _Leaf) -> int:
    if leaf.kind != _BYTE_ARRAY:
        raise ValueError("a size of byte arrays for another type")
    return _skipped(data, at, I64, 0)


def _repetitions(data: bytes, at: int, leaf: _Leaf) -> int:
    return _histogram(data, at, leaf.repetitions)


def _definitions(data: bytes, at: int, leaf: _Leaf) -> int:
    return _histogram(data, at, leaf.definitions)


def _histogram(data: bytes, at: int, levels: int) -> int:
    count, kind, at = _items(data, at)
    _expect(kind, I64, count)
    if count not in (0, levels):
        raise ValueError(f"a histogram of {count:,} levels where there are {levels}")
    for _ in range(count):
        while data[at] > 127:
            at += 1
        at += 1
    return at


def _encrypted(data: bytes, at: int, about: object) -> int:
    raise _Encrypted


def _list_of(wanted: int) -> _Check:
    """Return the check of a list that pyarrow reads as one of ``wanted``, whatever kind it says it has."""

    def check(data: bytes, at: int, about: object) -> int:
        count, kind, at = _items(data, at)
        _expect(kind, wanted, count)
        for _ in range(count):
            at = _skipped(data, at, wanted, 0)
        return at

    return check


def _orders(data: bytes, at: int, start: _Start) -> int:
    """Step over the columns' orders, which all writers write as the only one that there is."""
    end = at + len(start.usual_orders)
    return end if data.startswith(start.usual_orders, at) else _orders_one_by_one(data, at, start)


_orders_one_by_one = _list_of(STRUCT)


def _expect(kind: int, wanted: int, count: int) -> None:
    if count and kind != wanted:
        raise ValueError(f"a list of kind {kind} instead of {wanted}")


def _twice(data: bytes, at: int, about: object) -> int:
    raise ValueError("two schemas")


def _key(number: int, kind: int) -> int:
    return number << 4 | kind


_FILE = {
    _key(2, LIST): _twice,
    _key(4, LIST): _groups,
    _key(5, LIST): _list_of(STRUCT),
    _key(7, LIST): _orders,
}
_GROUP = {_key(1, LIST): _chunks, _key(4, LIST): _list_of(STRUCT)}
_CHUNK = {_key(3, STRUCT): _column, _key(8, STRUCT): _encrypted}
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


# ---- The same as regular expressions, for chunks without bloom filters and key-values, with nothing out of order


def _heads(*kinds: int) -> bytes:
    """Return what matches the first byte of a field of one of these kinds, whatever its number."""
    return b"[" + b"".join(re.escape(bytes([step << 4 | kind])) for step in range(1, 16) for kind in kinds) + b"]"


_NUMBER = rb"[\x80-\xff]*[\x00-\x7f]"
_NUMBERS = _heads(I16, I32, I64) + _NUMBER  # a field
_PLAIN = rb"(?:%s)*\x00" % _NUMBERS  # the fields of a struct that has nothing else
# file_offset, and of the metadata their type and a list of encodings
_BEGIN: _Match = re.compile(
    rb"\x26%s\x1c\x15(.)\x19(?:\x15%s|\x25%s|\x35%s|\x45%s|\x55%s)"
    % (_NUMBER, *(rb"[\x00-\x7f]{%d}" % count for count in range(1, 6))),
    re.DOTALL,
).match


@lru_cache(maxsize=64)
def _usual(kind: int, width: int, repetitions: int, definitions: int) -> _Match:
    """Return what recognizes a chunk from its codec on: nothing is wrong with one that matches."""
    if width:
        value = re.escape(bytes([width])) + b".{%d}" % width if width < 128 else b"(?!)"
    else:
        value = b"(?:" + b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(64)) + b")"
    statistics = rb"(?:%s%s|%s|%s)*\x00" % (_heads(BINARY), value, _NUMBERS, _heads(BOOL, _FALSE))
    some, all_ = (
        rb"(?:\x06|%s%s)" % (re.escape(bytes([levels << 4 | I64])), _NUMBER * levels) if levels < 15 else rb"\x06"
        for levels in (repetitions, definitions)
    )
    sizes = rb"\x29%s(?:\x19%s)?|\x39%s" % (some, all_, all_)
    if kind == _BYTE_ARRAY:
        sizes += rb"|\x16%s(?:\x19%s(?:\x19%s)?|\x29%s)?" % (_NUMBER, some, all_, all_)
    codec = rb"\x15[\x00\x02\x04\x06\x08\x0a\x0c\x0e]"
    values_sizes_page = rb"\x16%s\x16%s\x16%s\x26%s" % ((_NUMBER,) * 4)
    # a dictionary page or none, statistics or none, and the list of encoding_stats
    middle = rb"(?:(?:\x26%s\x1c|\x3c)%s\x19|\x26%s\x29|\x49)" % (_NUMBER, statistics, _NUMBER)
    encodings = rb"(?:\x1c%s|\x2c%s|\x3c%s|\x4c%s)" % tuple(_PLAIN * count for count in range(1, 5))
    end = rb"(?:\x3c(?:%s)?\x00)?\x00%s" % (sizes, _PLAIN)
    return re.compile(codec + values_sizes_page + middle + encodings + end, re.DOTALL).match
