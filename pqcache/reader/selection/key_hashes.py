"""Hashes of a column's values for splits: equal values have equal hashes, in whatever type a file stores them.

The hash is XXH3 with 64 bits of a value's canonical form, which docs/splits.md specifies. Numbers, dates and times are
8 bytes, hashed in numpy without a call for each value; texts and bytes are hashed as they are.
"""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pqcache.errors import UsageError
from pqcache.parquet.schema_merge import is_text, without_views
from pqcache.reader.kinds import storage_type

Hashes = npt.NDArray[np.uint64]

_MICROS = {"s": 10**6, "ms": 10**3, "us": 1}  # in one of the unit; nanoseconds are divided
_DAY = 86_400 * 10**6
_NAN = np.uint64(0x7FF8000000000000)
_SECRET = 0xC73AB174C5ECD5A2  # of XXH3 for 4 to 8 bytes
_BLOCK = 1 << 13  # values hashed at once: they fit into the processor's cache, and take no fresh pages


def hash_of(data: bytes, seed: int = 0) -> int:
    """Return XXH3-64 of some bytes."""
    return int(xxhash.xxh3_64_intdigest(data, seed))


def hash_words(words: Hashes, seed: int = 0) -> Hashes:
    """Return XXH3-64 of the 8 bytes of each number, little-endian; a call for each takes ten times as long."""
    seed ^= int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big") << 32
    secret = np.uint64((_SECRET - seed) & (1 << 64) - 1)
    found = np.empty(len(words), np.uint64)
    for low in range(0, len(words), _BLOCK):
        word = words[low : low + _BLOCK]
        h = (word << np.uint64(32) | word >> np.uint64(32)) ^ secret
        h ^= (h << np.uint64(49) | h >> np.uint64(15)) ^ (h << np.uint64(24) | h >> np.uint64(40))
        h *= np.uint64(0x9FB21C651E98DF25)
        h ^= (h >> np.uint64(35)) + np.uint64(8)
        h *= np.uint64(0x9FB21C651E98DF25)
        found[low : low + _BLOCK] = h ^ h >> np.uint64(28)
    return found


def check_key(name: str, kind: pa.DataType) -> None:
    """Raise UsageError for a type whose values have no canonical form."""
    bare = storage_type(kind)
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
    texts = values
    if not pa.types.is_fixed_size_binary(texts.type):
        texts = texts.cast(without_views(texts.type)).cast(pa.large_binary())
    texts = texts.drop_null()
    hashes = map(xxhash.xxh3_64_intdigest, texts.to_pylist(), repeat(seed))
    found = np.zeros(len(values), np.uint64)
    found[values.is_valid().to_numpy(zero_copy_only=False)] = np.fromiter(hashes, np.uint64, len(texts))
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
