"""Sets of byte ranges against sets of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pqcache.store.sync.fill.intervals import Intervals

spans = st.tuples(st.integers(0, 30), st.integers(0, 30))


@given(st.lists(st.tuples(st.booleans(), spans)), spans)
def test_as_sets_of_numbers(changes: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    found, expected = Intervals(), set[int]()
    for add, (start, end) in changes:
        if add:
            found.add(start, end)
            expected |= set(range(start, end))
        else:
            found.remove(start, end)
            expected -= set(range(start, end))
    assert found.total == len(expected)
    missing = list(found.missing(*asked))
    assert [number for start, end in missing for number in range(start, end)] == sorted(set(range(*asked)) - expected)
    assert all(one[1] < two[0] for one, two in pairwise(missing))
    assert found.has(*asked) == (not missing)
    assert list(found.copy().missing(0, 31)) == list(found.missing(0, 31))
