"""The compact protocol of thrift, in which Parquet's footers, page headers and page indexes are written.

See https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Unknown fields are kept, so
footers survive a round trip byte for byte; maps, which Parquet doesn't use, are refused. Input is untrusted: malformed
data raises `ParquetError`, in time and memory proportional to its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pqcache.errors import ParquetError

BOOL, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 3, 4, 5, 6, 7, 8, 9, 10, 12
_FALSE = 2
_VARINTS = (I16, I32, I64)
_MAX_DEPTH = 32  # a footer nests eight deep
_MAX_VALUES = 8_000_000  # bounds the memory for a hostile footer, at some hundred bytes per object


class Items(NamedTuple):
    """A thrift list or set: the kind of its elements, and the elements."""

    kind: int
    values: list[Any]


Struct = dict[int, tuple[int, Any]]
"""A thrift struct: field id -> (kind, value), in the order of the bytes.

A value is an int, bool, bytes (also for DOUBLE: its eight bytes), `Items` or another `Struct`.
"""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at byte ``at`` and its end.

    Raises IndexError if ``data`` ends within it, ValueError for more than 64 bits.
    """
    byte = data[at]
    at += 1
    if byte < 0x80:  # most are
        return byte, at
    result, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")


def read_integer(data: bytes, at: int) -> tuple[int, int]:
    """Like `read_varint`, for numbers that may be negative."""
    number, at = read_varint(data, at)
    return (number >> 1) ^ -(number & 1), at


class _Decoder:
    """Decodes the compact protocol, checking every length before it is used."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.left = _MAX_VALUES

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise IndexError
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def value(self, kind: int, depth: int) -> Any:
        if kind in _VARINTS:
            number, self.at = read_integer(self.data, self.at)
            return number
        if kind == BINARY:
            size, self.at = read_varint(self.data, self.at)
            return self.take(size)
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (BOOL, _FALSE, BYTE):  # a bool has a byte of its own only inside a list
            return self.take(1)[0]
        if kind == DOUBLE:
            return self.take(8)
        if kind in (LIST, SET):
            return self.items(depth + 1)
        raise ValueError(f"a value of unknown kind {kind}")

    def spend(self, count: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"values nested more than {_MAX_DEPTH} deep")
        self.left -= count
        if self.left < 0:
            raise ValueError(f"more than {_MAX_VALUES:,} values")

    def items(self, depth: int) -> Items:
        count, kind, self.at = items_at(self.data, self.at)
        self.spend(count, depth)
        return Items(kind, [self.value(kind, depth) for _ in range(count)])

    def struct(self, depth: int, until: int | None = None) -> Struct:
        result: Struct = {}
        data, field = self.data, 0
        self.spend(0, depth)
        while True:
            head = data[self.at]
            self.at += 1
            self.left -= 1
            if self.left < 0:
                raise ValueError(f"more than {_MAX_VALUES:,} values")
            if head == 0:
                return result
            if head >> 4:
                field += head >> 4
            else:
                field, self.at = read_integer(data, self.at)
            kind = head & 15
            if field in result:
                raise ValueError(f"field {field} twice in one struct")
            if kind in (BOOL, _FALSE):
                result[field] = (BOOL, kind == BOOL)
            else:
                result[field] = (kind, self.value(kind, depth))
            if field == until:
                return result


def put_varint(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _put_int(out: bytearray, number: int) -> None:
    number = (number << 1) ^ (number >> 63)
    if number < 0x80:  # most are
        out.append(number)
    else:
        put_varint(out, number)


def _put_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in _VARINTS:
        _put_int(out, value)
    elif kind == BINARY:
        put_varint(out, len(value))
        out += value
    elif kind == STRUCT:
        if isinstance(value, bytes):  # encoded before
            out += value
        else:
            _put_struct(out, value)
    elif kind in (LIST, SET):
        _put_items(out, *value)
    elif kind == DOUBLE:
        out += value
    else:
        out.append(value)


def _put_items(out: bytearray, kind: int, values: list[Any]) -> None:
    if len(values) < 15:
        out.append(len(values) << 4 | kind)
    else:
        out.append(0xF0 | kind)
        put_varint(out, len(values))
    for value in values:
        _put_value(out, kind, value)


def _put_struct(out: bytearray, fields: Struct) -> None:
    before = 0
    for field, (kind, value) in fields.items():
        wire = kind if kind != BOOL else BOOL if value else _FALSE
        if 0 < field - before <= 15:
            out.append((field - before) << 4 | wire)
        else:
            out.append(wire)
            _put_int(out, field)
        if kind != BOOL:
            _put_value(out, kind, value)
        before = field
    out.append(0)


def encode(fields: Struct) -> bytes:
    out = bytearray()
    _put_struct(out, fields)
    return bytes(out)


def decode(data: bytes, name: str, until: int | None = None) -> Struct:
    """Decode the struct at the start of ``data``, or its fields up to and including ``until``.

    Malformed data raises a `ParquetError` about ``name``.
    """
    return decode_first(data, name, until)[0]


def decode_first(data: bytes, name: str, until: int | None = None) -> tuple[Struct, int]:
    """Like `decode`, with the number of bytes read."""
    decoder = _Decoder(data)
    try:
        return decoder.struct(0, until), decoder.at
    except IndexError:
        raise ParquetError(name, "the Parquet footer ends in the middle", "fetch the file again") from None
    except ValueError as error:
        raise ParquetError(name, f"the Parquet footer is damaged ({error})", "fetch the file again") from None


# ---- Walking over the protocol instead of decoding it: only values with a check are read
#
# Decoding takes longer than anything else that is done with a footer. Truncated data raises IndexError, other
# violations of the protocol raise ValueError.

_MAX_NUMBER = (1 << 15) - 1  # of a field: pyarrow's parser has 16 bits for it

Check = Callable[[bytes, int, Any], int]
"""Checks the value at a position, given the state of the check so far, and returns where it ends."""
Checks = Mapping[int, Check]
"""Checks of a struct's fields by number and kind (see `key`)."""


def key(number: int, kind: int) -> int:
    """Pack a field's number and kind into one number."""
    return number << 4 | kind


def walk_struct(data: bytes, at: int, checks: Checks, about: Any, number: int = 0, depth: int = 0) -> int:
    """The end of a struct whose next field, after field ``number``, begins at ``at``."""
    while head := data[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            if number > _MAX_NUMBER:
                break
            number, at = read_integer(data, at)
        kind = head & 15
        check = checks.get(number << 4 | kind)
        if check is not None:
            at = check(data, at, about)
        elif I16 <= kind <= I64:
            while data[at] > 127:
                at += 1
            at += 1
        elif kind > _FALSE:
            at = skip_value(data, at, kind, depth)
    if abs(number) > _MAX_NUMBER:
        raise ValueError(f"a field {number:,}")
    return at + 1


def inside(checks: Checks) -> Check:
    """A check of a struct by ``checks`` of its fields."""
    return lambda data, at, about: walk_struct(data, at, checks, about)


def inside_each(checks: Checks, begin: Callable[[Any], object] | None = None) -> Check:
    """A check of a list of structs by ``checks`` of their fields; ``begin`` is called before each struct."""

    def check(data: bytes, at: int, about: Any) -> int:
        count, _, at = items_at(data, at)
        for _ in range(count):
            if begin is not None:
                begin(about)
            at = walk_struct(data, at, checks, about)
        return at

    return check


def number_at(place: int) -> Check:
    """A check that puts a number into a list of numbers."""

    def check(data: bytes, at: int, numbers: list[int]) -> int:
        numbers[place], at = read_integer(data, at)
        return at

    return check


def skip_value(data: bytes, at: int, kind: int, depth: int) -> int:
    """The end of the value at ``at``."""
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
        return walk_struct(data, at, {}, None, depth=depth + 1)
    if kind in (LIST, SET):
        count, kind, at = items_at(data, at)
        for _ in range(count):
            at = skip_value(data, at, kind, depth + 1)
        return at
    if kind in (BOOL, _FALSE, BYTE):  # a bool has a byte of its own only inside a list
        return at + 1
    if kind == DOUBLE:
        return at + 8
    raise ValueError(f"a value of unknown kind {kind}")


def items_at(data: bytes, at: int) -> tuple[int, int, int]:
    """A list's number of elements, their kind, and where the first begins."""
    count, kind = data[at] >> 4, data[at] & 15
    at += 1
    if count == 15:
        count, at = read_varint(data, at)
    if count > len(data) - at:  # an element takes a byte at least
        raise IndexError
    return count, kind, at


# ---- Fields and enum values of parquet.thrift in https://github.com/apache/parquet-format

# of FileMetaData
COLUMN_ORDERS = 7
# of ColumnChunk: offset and length of a page index
OFFSET_INDEX, COLUMN_INDEX = (4, 5), (6, 7)
# of ColumnMetaData: the last three are statistics of values, pages and levels
TYPE, ENCODINGS, PATH, CODEC, VALUES, UNCOMPRESSED, COMPRESSED = range(1, 8)
DATA, DICTIONARY, STATISTICS, PAGES, SIZES = 9, 11, 12, 13, 16
# values of enums: physical types, encodings, page types and orders
INT96, BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY = 3, 6, 7
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
ASCENDING, DESCENDING = 1, 2  # of a ColumnIndex's BoundaryOrder


def column_metadata(
    physical: int, path: Sequence[bytes], codec: int, encodings: list[int], values: int, uncompressed: int, size: int
) -> Struct:
    """The ColumnMetaData of a chunk that begins at 0 with a data page."""
    return {
        TYPE: (I32, physical),
        ENCODINGS: (LIST, Items(I32, encodings)),
        PATH: (LIST, Items(BINARY, list(path))),
        CODEC: (I32, codec),
        VALUES: (I64, values),
        UNCOMPRESSED: (I64, uncompressed),
        COMPRESSED: (I64, size),
        DATA: (I64, 0),
    }
