"""Hashes of a column's values for splits: equal values have equal hashes, in whatever type a file stores them.

The hash is XXH3 with 64 bits of a value's canonical form, which docs/splits.md specifies. Numbers, dates and times are
8 bytes, hashed in numpy without a call for each value; texts and bytes are hashed as they are.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.parquet.schema_merge import is_text, without_views
from pqcache.reader.selection.xxh3 import LONGEST, hash_of, hash_short, hash_words

Hashes = npt.NDArray[np.uint64]

_MICROS = {"s": 10**6, "ms": 10**3, "us": 1}  # in one of the unit; nanoseconds are divided
_DAY = 86_400 * 10**6
_NAN = np.uint64(0x7FF8000000000000)


def check_key(name: str, kind: pa.DataType) -> None:
    """Raise UsageError for a type whose values have no canonical form."""
    bare = _bare(kind)
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal, _is_bytes)
    temporal = pa.types.is_temporal(bare) and not pa.types.is_interval(bare)
    if not (temporal or any(is_known(bare) for is_known in known) or pa.types.is_null(bare)):
        raise UsageError(
            f"split by {name!r}",
            f"it is {kind}",
            "choose a column of numbers, booleans, text, binary, dates or times, or a field of a struct",
        )


def key_hashes(column: pa.ChunkedArray | pa.Array, seed: int = 0) -> Hashes:
    """Return the hash of each value; all nulls have that of no bytes at all."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return np.concatenate([np.zeros(0, np.uint64), *(_hashes(chunk, seed) for chunk in chunks)])


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(is_text(without_views(kind)) or pa.types.is_fixed_size_binary(kind))


def _bare(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values themselves: not in a dictionary, and not of an extension type."""
    while isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return kind


def _hashes(values: pa.Array, seed: int) -> Hashes:
    if isinstance(values, pa.ExtensionArray):
        return _hashes(values.storage, seed)
    null = hash_of(b"", seed)
    if pa.types.is_dictionary(values.type):
        of_entries = np.append(_hashes(values.dictionary, seed), np.uint64(null))
        return np.asarray(of_entries[values.indices.fill_null(len(of_entries) - 1).to_numpy(zero_copy_only=False)])
    if pa.types.is_null(values.type):
        return np.full(len(values), null, np.uint64)
    if pa.types.is_decimal(values.type):
        return _hashes_of_decimals(values, seed)
    if _is_bytes(values.type):
        found = _hashes_of_bytes(values, seed)
    else:
        found = hash_words(_words(values), seed)
    if values.null_count:
        found[values.is_null().to_numpy(zero_copy_only=False)] = null
    return found


def _hashes_of_bytes(values: pa.Array, seed: int) -> Hashes:
    """Return the hashes of texts; those of nulls are anything."""
    values = values.cast(without_views(values.type))
    if pa.types.is_fixed_size_binary(values.type):
        values = values.cast(pa.binary())
    _, offsets, data = values.buffers()
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    numbers = np.frombuffer(offsets, np.int64 if large else np.int32)[values.offset : values.offset + len(values) + 1]
    lengths = np.diff(numbers)
    if not len(values):
        return np.zeros(0, np.uint64)
    short = lengths <= LONGEST
    found = np.empty(len(values), np.uint64)
    if short.any():
        buffer = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        where = slice(None) if short.all() else np.flatnonzero(short)
        found[where] = hash_short(buffer, numbers[:-1][where].astype(np.int64), lengths[where].astype(np.int64), seed)
    if not short.all():
        where = np.flatnonzero(~short)
        long = values.take(pa.array(where)).cast(pa.large_binary()).fill_null(b"").to_numpy(zero_copy_only=False)
        found[where] = np.fromiter((hash_of(value, seed) for value in long), np.uint64, len(long))
    return found


def _words(values: pa.Array) -> Hashes:
    """Return the 8 bytes of each value of a type of fixed width, as a number; those of nulls are anything."""
    kind = values.type
    if pa.types.is_boolean(kind):
        values = values.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
    if pa.types.is_temporal(kind):
        return np.asarray(_micros(numbers.astype(np.int64), kind).view(np.uint64))
    if numbers.dtype.kind == "f":
        return _whole_or_float(numbers.astype(np.float64))
    return np.asarray(numbers.astype(np.int64 if numbers.dtype.kind == "i" else np.uint64).view(np.uint64))


def _micros(numbers: npt.NDArray[np.int64], kind: pa.DataType) -> npt.NDArray[np.int64]:
    """Return times as microseconds, modulo 2^64."""
    if pa.types.is_date32(kind):
        return numbers * _DAY
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    return numbers // 1000 if unit == "ns" else numbers * _MICROS[unit]


def _whole_or_float(numbers: npt.NDArray[np.float64]) -> Hashes:
    """Return whole numbers as integers, and all others as the bits of a double."""
    found: Hashes = numbers.view(np.uint64).copy()
    found[np.isnan(numbers)] = _NAN
    with np.errstate(invalid="ignore"):
        whole = (np.floor(numbers) == numbers) & (numbers >= -(2.0**63)) & (numbers < 2.0**64)
    small = whole & (numbers < 2.0**63)
    found[small] = numbers[small].astype(np.int64).view(np.uint64)
    large = whole & ~small
    found[large] = numbers[large].astype(np.uint64)
    return found


def _hashes_of_decimals(values: pa.Array, seed: int) -> Hashes:
    try:
        numbers = values.cast(pa.int64())
    except pa.ArrowInvalid:  # fractions, or beyond 64 bits: one at a time, each once
        encoded = values.dictionary_encode()
        words = [_word_of(value) for value in encoded.dictionary.to_pylist()]
        of_entries = np.append(hash_words(np.array(words, np.uint64), seed), np.uint64(hash_of(b"", seed)))
        indices = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
        return np.asarray(of_entries[indices])
    return _hashes(numbers, seed)


def _word_of(value: Decimal) -> int:
    if value == value.to_integral_value() and -(2**63) <= value < 2**64:
        return int(value) & (1 << 64) - 1
    try:
        number: Any = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    return int(_whole_or_float(np.array([number]))[0])
