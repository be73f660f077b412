"""The compact protocol of thrift, stepped over instead of decoded: only values that have a check are looked at.

Decoding a footer takes longer than everything else that is done with it. An index past the end raises IndexError, and
what is not of the protocol ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pqcache.parquet.footer.thrift import BINARY, BOOL, BYTE, DOUBLE, I16, I64, LIST, MAP, SET, STRUCT, read_varint

_FALSE = 2
_MAX_DEPTH = 32
_MAX_NUMBER = (1 << 15) - 1  # of a field: pyarrow's parser has 16 bits for it

Check = Callable[[bytes, int, Any], int]
"""Checks the value that begins there, with what is known of its struct, and returns where it ends."""
Checks = Mapping[int, Check]
"""What is checked of a struct, by the field's number and kind (see `key`)."""


def key(number: int, kind: int) -> int:
    """Return a field's number and kind as one number."""
    return number << 4 | kind


def walk_struct(data: bytes, at: int, checks: Checks, about: Any, number: int = 0, depth: int = 0) -> int:
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
            at = skip_value(data, at, kind, depth)
    if abs(number) > _MAX_NUMBER:
        raise ValueError(f"a field {number:,}")
    return at + 1


def skip_value(data: bytes, at: int, kind: int, depth: int) -> int:
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
        return walk_struct(data, at, {}, None, depth=depth + 1)
    if kind in (LIST, SET):
        count, kind, at = items_at(data, at)
        for _ in range(count):
            at = skip_value(data, at, kind, depth + 1)
        return at
    if kind == MAP:
        count, at = read_varint(data, at)
        kinds = data[at] if count else 0
        at += count > 0
        for _ in range(min(count, len(data))):
            at = skip_value(data, skip_value(data, at, kinds >> 4, depth + 1), kinds & 15, depth + 1)
        return at
    if kind in (BOOL, _FALSE, BYTE):  # a bool has a byte of its own only inside a list or map
        return at + 1
    if kind == DOUBLE:
        return at + 8
    raise ValueError(f"a value of unknown kind {kind}")


def items_at(data: bytes, at: int) -> tuple[int, int, int]:
    """Return how many elements a list has, their kind, and where the first begins."""
    count, kind = data[at] >> 4, data[at] & 15
    at += 1
    if count == 15:
        count, at = read_varint(data, at)
    if count > len(data) - at:  # an element takes a byte at least
        raise IndexError
    return count, kind, at
