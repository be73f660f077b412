"""The keys of a key index as 64-bit numbers, of which equal keys have equal ones.

Integers, dates, times and booleans are used as numbers, so different keys have different codes. Strings, binary and
decimals become two independent 64-bit hashes, of which 106 bits are kept: two different keys have equal codes with a
probability of one in 2 ** 106.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import UsageError, first_line
from pqcache.filters.expression import Operand, number_against_text
from pqcache.parquet.schema import cast_exactly
from pqcache.parquet.types import is_text

Codes = npt.NDArray[np.uint64]
_SIGN = np.uint64(1 << 63)
_BLOCK = 1 << 14  # values hashed at once: what is made of them fits the processor's cache
_WORD = np.dtype("<u8")
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # the first n bytes of a word


@dataclass(frozen=True)
class Keys:
    """Keys as numbers: ``first`` of each, ``second`` only where they are hashed; those not ``valid`` are null."""

    first: Codes
    second: Codes | None
    valid: npt.NDArray[np.bool_] | None

    def __len__(self) -> int:
        return len(self.first)


def key_type(column: str, kind: pa.DataType) -> pa.DataType:
    """The type that values are cast to; types whose values are the same share one.

    Types that cannot be looked up raise UsageError.
    """
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_uint64(kind):
        return kind
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_decimal256(kind):
        return pa.decimal256(76, kind.scale)
    if pa.types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if pa.types.is_boolean(kind) or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)):
        return pa.date32() if pa.types.is_date(kind) else kind
    why = "numbers that are rounded are no keys" if pa.types.is_floating(kind) else "values of this type are no keys"
    raise UsageError(
        f"--key {column}", f"is {kind}, and {why}", "choose integers, strings, binary, decimals, dates or times"
    )


def is_hashed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_decimal(kind))


def keys_of(values: pa.Array, kind: pa.DataType) -> Keys:
    values = cast_exactly(values, kind)
    valid = None if not values.null_count else values.is_valid().to_numpy(zero_copy_only=False)
    if is_hashed(kind):
        return Keys(*_hashed(values, kind), valid)
    if pa.types.is_boolean(kind):
        values = values.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    width, start = values.type.bit_width // 8, values.offset
    numbers = np.frombuffer(values.buffers()[1], f"{'u' if pa.types.is_uint64(kind) else 'i'}{width}", -1)
    numbers = numbers[start : start + len(values)]
    if pa.types.is_uint64(kind):
        return Keys(numbers, None, valid)
    return Keys(numbers.astype(np.int64).view(np.uint64) ^ _SIGN, None, valid)  # ascending as the values are


def keys_to_find(column: str, values: Any, kind: pa.DataType, operand: Operand | None = None) -> Keys:
    """Return the keys that are looked up: a value, or a list, numpy or Arrow array of values, each once.

    Values that cannot be in the column because of their type, and nulls, raise UsageError; ``operand`` is the column
    where it is known.
    """
    array = _as_array(column, values, kind)
    if array.null_count:
        raise UsageError(f"lookup of {column}", "None is no key, as nulls are in no index", "leave it out")
    if not len(array):
        return Keys(np.zeros(0, np.uint64), np.zeros(0, np.uint64) if is_hashed(kind) else None, None)
    if not _alike(array.type, kind):
        if is_text(kind) and (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            sought = operand or Operand(column, (), kind)
            raise number_against_text(str(array[0]), sought, "lookup('{name}', '{value}')").within(
                f"lookup of {column}"
            )
        raise UsageError(f"lookup of {column}", f"its keys are {_named(kind)}, and these values are {array.type}")
    try:
        found = keys_of(array, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise UsageError(f"lookup of {column}", f"not all values fit {_named(kind)}: {first_line(error)}") from error
    _, once = np.unique(found.first, return_index=True)
    return Keys(found.first[once], None if found.second is None else found.second[once], None)


def _as_array(column: str, values: Any, kind: pa.DataType) -> pa.Array:
    """One Arrow array, without dictionaries."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        values = list(values) if hasattr(values, "__iter__") and not isinstance(values, str | bytes) else [values]
    if isinstance(values, list) and values and all(isinstance(value, np.datetime64) for value in values):
        values = np.array(values)  # Arrow takes days of numpy's in an array only
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    try:
        try:
            array = values if isinstance(values, pa.Array) else pa.array(values)
        except OverflowError:  # beyond int64, which is what Arrow takes integers for
            array = pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"lookup of {column}", f"the values are not of one type: {first_line(error)}") from error
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _alike(value: pa.DataType, kind: pa.DataType) -> bool:
    """Whether values of the two types can be equal."""
    if pa.types.is_timestamp(kind):
        return bool(pa.types.is_timestamp(value)) and (value.tz is None) == (kind.tz is None)
    try:
        value = key_type("", value)
    except UsageError:
        return False
    if pa.types.is_decimal(kind):
        return bool(pa.types.is_decimal(value) or pa.types.is_integer(value))
    for same in (pa.types.is_integer, pa.types.is_time, pa.types.is_duration):
        if same(kind):
            return bool(same(value))
    return bool(value == kind)


def _named(kind: pa.DataType) -> str:
    return str(kind).removeprefix("large_")


def scramble(codes: Codes, seed: int = 0) -> Codes:
    """One-to-one: the last step of MurmurHash3 by Austin Appleby."""
    h: Codes = codes ^ np.uint64(seed)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def _hashed(values: pa.Array, kind: pa.DataType) -> tuple[Codes, Codes]:
    """Two hashes of each value's bytes; nulls have arbitrary ones."""
    count = len(values)
    if pa.types.is_decimal(kind):
        width = kind.bit_width // 8
        data = np.frombuffer(values.buffers()[1], np.uint8)[values.offset * width :]
        ends = np.arange(count + 1, dtype=np.int64) * width
    else:
        ends = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + count + 1]
        buffer = values.buffers()[2]
        data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)
    first, second = np.empty(count, np.uint64), np.empty(count, np.uint64)
    for low in range(0, count, _BLOCK):
        part = slice(low, min(low + _BLOCK, count))
        starts, lengths = ends[part], np.diff(ends[low : part.stop + 1])
        h1 = lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        h2 = h1 ^ np.uint64(0xD1B54A32D192ED03)
        for active, word in _words(data, starts, lengths):
            h1[active] = _step(h1[active] ^ word, 0x9FB21C651E98DF25, 32)
            h2[active] = _step(h2[active] + word, 0xA0761D6478BD642F, 29)
        first[part], second[part] = scramble(h1), scramble(h2, 0x589965CC75374CC3)
    return first, second


def _step(h: Codes, factor: int, shift: int) -> Codes:
    h *= np.uint64(factor)
    h ^= h >> np.uint64(shift)
    h *= np.uint64(factor)
    return h


def _words(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[Any, Codes]]:
    """Yield words of eight bytes, zero-padded, and for which values they are."""
    if not len(starts):
        return
    begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
    padded = np.zeros(end - begin + 8, np.uint8)
    padded[:-8] = data[begin:end]
    every = np.ndarray(end - begin + 1, _WORD, padded, 0, (1,))  # a word at each byte
    at, left = starts - begin, lengths
    active: Any = slice(None)
    while len(at):
        least, most = int(left.min()), int(left.max())
        if most <= 0:
            return
        if least <= 0:
            more = np.flatnonzero(left > 0)
            active = more if isinstance(active, slice) else active[more]
            at, left = at[more], left[more]
        word = every[at]
        if least < 8:
            word &= _MASKS[np.minimum(left, 8)]
        yield active, word
        at, left = at + 8, left - 8
