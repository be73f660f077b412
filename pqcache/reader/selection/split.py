"""``split=``: the rows whose key's hash is in an interval, so that a row always stays in the same part.

The hash is XXH3 with 64 bits of a value's canonical form, which docs/splits.md specifies: equal values have equal
hashes, whichever type a file stores them in. Numbers, dates and times are 8 bytes, hashed in numpy without a call per
value; texts and bytes are hashed as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pqcache.errors import UsageError
from pqcache.parquet.arrow import is_text, without_views
from pqcache.reader.columns import storage_type
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.selection import Bools, ChosenColumn, Counts, Selection, digest_of
from pqcache.store.key_lookup import Ints
from pqcache.units import is_number, is_whole

Hashes = npt.NDArray[np.uint64]

_FORM = 1  # of the canonical form of values
_MICROS = {"s": 10**6, "ms": 10**3, "us": 1}  # in one of the unit; nanoseconds are divided
_DAY = 86_400 * 10**6
_NAN = np.uint64(0x7FF8000000000000)
_SECRET = 0xC73AB174C5ECD5A2  # of XXH3 for 4 to 8 bytes
_BLOCK = 1 << 13  # values hashed at once: they fit into the processor's cache, and take no fresh pages


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows whose key has a hash in an interval: ``ParquetDataset(..., split=Split("user_id", 0.0, 0.9))``.

    The hash of a key, as a number from 0 to 1, depends only on its value and the salt. So a row is in the same part
    every night, on every node and in every layout of the files, and all rows of a key are in one part. Disjoint
    intervals share no row. docs/splits.md says how values are hashed.

    ``key``         a column, or a field of a struct (``user.id``), of numbers, booleans, text, binary, dates or times.
                    None: each row separately, by its file and number in it, which is only stable within a snapshot
    ``low``, ``high``   the interval, from ``low`` up to, but not including, ``high``; 0 and 1 are the ends
    ``salt``        text that selects another hash, for a division independent of the first
    ``outside``     take the rows outside the interval instead

    >>> train = Split("user_id", 0.0, 0.9)
    >>> train.complement()
    Split(key='user_id', low=0.9, high=1.0, salt='', outside=False)
    >>> [(fold.low, fold.high) for fold in Split.folds("user_id", 4)]
    [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)]

    Invalid numbers raise UsageError here, invalid names and types when it is used.
    """

    key: str | None = field(kw_only=False)
    low: float = field(default=0.0, kw_only=False)
    high: float = field(default=1.0, kw_only=False)
    salt: str = ""
    outside: bool = False

    def __post_init__(self) -> None:
        if self.key is not None and not isinstance(self.key, str):
            raise UsageError("split", f"key={self.key!r}: name one column, or give None for single rows")
        for name in ("low", "high"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise UsageError("split", f"{name}={value!r}: give a number from 0 to 1")
            object.__setattr__(self, name, float(value))
        if not self.low < self.high:
            raise UsageError("split", f"low={self.low} and high={self.high}: low must be less than high")
        if not isinstance(self.salt, str):
            raise UsageError("split", f"salt={self.salt!r}: give text")

    def complement(self) -> Split:
        """The split of all other rows; UsageError if the interval is all of 0 to 1."""
        if self.outside:
            return replace(self, outside=False)
        if self.low == 0 and self.high == 1:
            raise UsageError("split", "it takes all rows, so its complement has none")
        if self.low == 0:
            return replace(self, low=self.high, high=1.0)
        if self.high == 1:
            return replace(self, low=0.0, high=self.low)
        return replace(self, outside=True)

    @staticmethod
    def folds(key: str | None, k: int, salt: str = "") -> list[Split]:
        """``k`` splits of equal size that share no row; train on ``folds[i].complement()``."""
        if not is_whole(k) or k < 2:
            raise UsageError("Split.folds", f"k={k!r}: give a whole number of at least 2")
        return [Split(key, i / k, (i + 1) / k, salt=salt) for i in range(k)]

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and last hash of the interval, both included."""
        low, high = (math.ceil(Fraction(end) * (1 << 64)) for end in (self.low, self.high))
        return low, high - 1

    def chooses(self, hashes: Hashes) -> Bools:
        """Which hashes are in this part."""
        first, last = self.bounds
        inside: Bools = (hashes >= np.uint64(first)) & (hashes <= np.uint64(last))
        return ~inside if self.outside else inside


def split_rows(found: Selection, split: Split, known: Counts | None) -> Selection:
    data, seed = found.data, hash_of(split.salt.encode()) if split.salt else 0
    key = None if split.key is None else ChosenColumn(data, split.key, "split")
    if key is not None:
        check_key(key.name, key.type)
    about = None if key is None else [*key.path, *([str(key.type)] if key.in_paths else [])]
    name = digest_of(["split", _FORM, about, *split.bounds, split.outside, split.salt])
    if key is not None and key.in_paths:
        chosen = split.chooses(key_hashes(key.values_of(found.row_groups), seed))
        return found.with_counts(np.where(chosen, found.counts, 0), name)
    firsts, files = first_rows_of(data), data.index.numbers("file")

    def test(group: int, first: int, part: pa.Table) -> Bools:
        if key is not None:
            return split.chooses(key_hashes(key.values(group, part, np.arange(part.num_rows)), seed))
        path = data.index.paths[int(files[group])].encode("utf-8", "surrogateescape")
        numbers = np.arange(part.num_rows, dtype=np.uint64) + np.uint64(firsts[group] + first)  # in the file
        return split.chooses(hash_words(numbers, hash_of(path, seed)))

    part = found.testing(test, name, () if key is None else key.columns)
    return replace(part, counts=part.counted(found.row_groups, known))


def first_rows_of(data: LocalDataset) -> Ints:
    """For each row group of the index, the number of its first row in its file."""
    files, rows = data.index.numbers("file"), data.index.rows
    before = np.cumsum(rows) - rows
    return np.asarray(before - before[np.searchsorted(files, files)], np.int64)


def hash_of(data: bytes, seed: int = 0) -> int:
    return int(xxhash.xxh3_64_intdigest(data, seed))


def hash_words(words: Hashes, seed: int = 0) -> Hashes:
    """XXH3-64 of the 8 bytes of each number, little-endian; much faster than a call for each."""
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
    """Hash each value; a null hashes like an empty string."""
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
    """The hashes of texts; those of nulls are arbitrary."""
    texts = values
    if not pa.types.is_fixed_size_binary(texts.type):
        texts = texts.cast(without_views(texts.type)).cast(pa.large_binary())
    texts = texts.drop_null()
    hashes = map(xxhash.xxh3_64_intdigest, texts.to_pylist(), repeat(seed))
    found = np.zeros(len(values), np.uint64)
    found[values.is_valid().to_numpy(zero_copy_only=False)] = np.fromiter(hashes, np.uint64, len(texts))
    return found


def _words(values: pa.Array) -> Hashes:
    """The 8 bytes of each value of a fixed-width type, as a number; arbitrary for nulls."""
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
    if pa.types.is_date32(kind):
        return numbers * _DAY
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    return numbers // 1000 if unit == "ns" else numbers * _MICROS[unit]


def _whole_or_float(numbers: npt.NDArray[np.float64]) -> Hashes:
    """Integral numbers as integers, others as the bits of a double."""
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
