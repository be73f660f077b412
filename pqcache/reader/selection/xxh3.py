"""XXH3 hashes, 64 bits, of many short values at once: those of the xxhash package, without a call for each.

XXH3 has a formula for each class of lengths. Those for up to 16 bytes are short enough that numpy computes them faster
than a call takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

LONGEST = 16  # bytes of what `hash_short` takes
_BLOCK = (
    1 << 13
)  # values hashed at once: what is made of them fits into the processor's cache, and takes no fresh pages
_WORD = (1 << 64) - 1
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# constants of XXH3: parts of its secret, combined as the formulas have them
_FLIP_3, _FLIP_8 = 0x87275A9B, 0xC73AB174C5ECD5A2
_FLIP_LOW, _FLIP_HIGH = 0x6782737BEA4239B9, 0xAF56BC3B0996523A


def hash_of(data: bytes, seed: int = 0) -> int:
    """Return XXH3-64 of some bytes."""
    return int(xxhash.xxh3_64_intdigest(data, seed))


def hash_words(words: Hashes, seed: int = 0) -> Hashes:
    """Return XXH3-64 of the 8 bytes of each number, little-endian."""
    found = np.empty(len(words), np.uint64)
    for low in range(0, len(words), _BLOCK):
        word = words[low : low + _BLOCK]
        found[low : low + _BLOCK] = _of_4_to_8(word & _LOW, word >> _HALF, np.uint64(8), seed)
    return found


def hash_short(data: npt.NDArray[np.uint8], starts: Ints, lengths: Ints, seed: int = 0) -> Hashes:
    """Return XXH3-64 of values of at most 16 bytes, which begin at ``starts`` in ``data``, in ascending order."""
    found = np.empty(len(starts), np.uint64)
    for low in range(0, len(starts), _BLOCK):
        at, size = starts[low : low + _BLOCK], lengths[low : low + _BLOCK]
        begin, end = int(at[0]), int(at[-1] + size[-1])
        padded = np.zeros(end - begin + 8, np.uint8)
        padded[: end - begin] = data[begin:end]
        words = np.ndarray(end - begin + 1, np.dtype("<u8"), padded, 0, (1,))  # a word at each byte
        part = found[low : low + _BLOCK]
        part[:] = hash_of(b"", seed)
        for least, most in ((1, 3), (4, 8), (9, 16)):
            where = np.flatnonzero((size >= least) & (size <= most))
            if len(where):
                part[where] = _of_class(least, words, at[where] - begin, size[where], seed)
    return found


def _of_class(least: int, words: Hashes, at: Ints, size: Ints, seed: int) -> Hashes:
    count = size.astype(np.uint64)
    if least == 1:
        first, middle, last = (words[at + place] & np.uint64(0xFF) for place in (0, size >> 1, size - 1))
        return _of_1_to_3(first << np.uint64(16) | middle << np.uint64(24) | last | count << np.uint64(8), seed)
    if least == 4:
        return _of_4_to_8(words[at] & _LOW, words[at + size - 4] & _LOW, count, seed)
    return _of_9_to_16(words[at], words[at + size - 8], count, seed)


def _number(value: int) -> np.uint64:
    found: np.uint64 = np.uint64(value & _WORD)
    return found


def _of_1_to_3(h: Hashes, seed: int) -> Hashes:
    h = h ^ _number(_FLIP_3 + seed)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC2B2AE3D27D4EB4F)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0x165667B19E3779F9)
    h ^= h >> _HALF
    return h


def _of_4_to_8(first: Hashes, last: Hashes, size: Hashes | np.uint64, seed: int) -> Hashes:
    """Return hashes by the first four bytes, the last four and the number of bytes."""
    seed ^= int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big") << 32
    h: Hashes = (last + (first << _HALF)) ^ _number(_FLIP_8 - seed)
    h ^= (h << np.uint64(49) | h >> np.uint64(15)) ^ (h << np.uint64(24) | h >> np.uint64(40))
    h *= np.uint64(0x9FB21C651E98DF25)
    h ^= (h >> np.uint64(35)) + size
    h *= np.uint64(0x9FB21C651E98DF25)
    h ^= h >> np.uint64(28)
    return h


def _of_9_to_16(first: Hashes, last: Hashes, size: Hashes, seed: int) -> Hashes:
    low, high = first ^ _number(_FLIP_LOW + seed), last ^ _number(_FLIP_HIGH - seed)
    h: Hashes = size + low.byteswap() + high + _folded(low, high)
    h ^= h >> np.uint64(37)
    h *= np.uint64(0x165667919E3779F9)
    h ^= h >> _HALF
    return h


def _folded(a: Hashes, b: Hashes) -> Hashes:
    """Return the lower and the upper half of the 128 bits of ``a * b``, combined by XOR."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a_high * b_low
    cross = (a_low * b_low >> _HALF) + (middle & _LOW) + a_low * b_high  # cannot carry: below 2^64
    upper: Hashes = (middle >> _HALF) + (cross >> _HALF) + a_high * b_high
    upper ^= a * b
    return upper
