"""A 64-bit hash of each row's position, and sums of hashes that identify sets of rows; see docs/proof.md.

The hash of a row is the random word of its position, times a random number of its file and row group, plus another: two
operations per row. Equal sums of hashes and of squared hashes, both modulo 2**64, mean equal rows: for different rows
both sums agree with a probability of about 2**-120.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.reader.columns import kind_of
from pqcache.reader.order import Ints

Hashes = npt.NDArray[np.uint64]

ROW_HASH = "\0row hash"  # the name of the column of hashes
ROW_HASH_FIELD = pa.field(ROW_HASH, pa.uint64(), nullable=False)
ROW_HASH_KIND = kind_of(ROW_HASH_FIELD)
_BLOCK = 1 << 16  # rows that have the numbers of one block; the words are those of each block
MODULUS = 1 << 64


class Sums(NamedTuple):
    """The number of rows, the sum of their hashes and the sum of the squares, modulo 2**64."""

    rows: int = 0
    hashes: int = 0
    squares: int = 0

    def plus(self, other: Sums, times: int = 1) -> Sums:
        """The sums of the rows of both; with ``times=-1``, of these rows without the others."""
        rows, hashes, squares = (a + times * b for a, b in zip(self, other, strict=True))
        return Sums(rows, hashes % MODULUS, squares % MODULUS)


def hashes_of(file: str, row_group: int, low: int, high: int) -> Hashes:
    """The hashes of rows ``low`` up to ``high`` of a row group; ``file`` names its path and content."""
    found = np.empty(high - low, np.uint64)
    words, at = _words(), low
    while at < high:
        block, first = divmod(at, _BLOCK)
        end = min(high, (block + 1) * _BLOCK)
        digest = blake2b(f"{file}\0{row_group}\0{block}".encode(errors="surrogatepass"), digest_size=16).digest()
        factor, added = np.frombuffer(digest, "<u8")
        part = found[at - low : end - low]
        np.multiply(words[first : first + end - at], factor | np.uint64(1), out=part)
        part += added
        at = end
    return found


def hashes_at(file: str, row_group: int, rows: Ints) -> Hashes:
    """The hashes of rows at positions in a row group."""
    return hashes_of(file, row_group, 0, int(rows.max(initial=-1)) + 1)[rows]


def sums_of(hashes: Hashes) -> Sums:
    return Sums(len(hashes), int(np.add.reduce(hashes)), int(hashes.dot(hashes)))


def total(sums: Iterable[Sums]) -> Sums:
    found = Sums()
    for one in sums:
        found = found.plus(one)
    return found


@lru_cache(maxsize=1)
def _words() -> Hashes:
    """Random words, by SplitMix64."""
    words: Hashes = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
