"""Hashes of rows: each place has one of its own, and sums of them are those of the rows, in whatever order."""

from __future__ import annotations

import numpy as np

from pqcache.reader.row_hashes import MODULUS, Sums, hashes_at, hashes_of, sums_of, total

ROWS = 140_000  # of a row group, in several blocks


def test_each_place_has_its_own() -> None:
    places = [("a\0x", 0), ("a\0x", 1), ("a\0y", 0), ("b\0x", 0), ("a\0x", 10), ("a\0x1", 0)]
    found = np.concatenate([hashes_of(*place, 0, 20_000) for place in places])
    assert len(np.unique(found)) == len(found)
    bits = np.unpackbits(found.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 0.01, "all bits are random"


def test_parts_have_the_hashes_of_the_whole() -> None:
    whole = hashes_of("a", 3, 0, ROWS)
    for low, high in ((0, 1), (65_535, 65_537), (70_000, 135_000), (ROWS, ROWS)):
        assert np.array_equal(hashes_of("a", 3, low, high), whole[low:high])
    rows = np.random.default_rng(0).permutation(ROWS)[:1000]
    assert np.array_equal(hashes_at("a", 3, rows), whole[rows])
    assert len(hashes_at("a", 3, rows[:0])) == 0


def test_sums() -> None:
    hashes = hashes_of("a", 0, 0, 1000)
    numbers = hashes.tolist()
    assert max(numbers) > MODULUS // 2
    wanted = Sums(1000, sum(numbers) % MODULUS, sum(n * n for n in numbers) % MODULUS)
    shuffled = np.random.default_rng(0).permutation(hashes)
    assert total([sums_of(shuffled[:300]), sums_of(shuffled[300:300]), sums_of(shuffled[300:])]) == wanted
    assert wanted.plus(sums_of(hashes[:10]), -1) == sums_of(hashes[10:])
