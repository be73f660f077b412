"""Pages: their levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqcache.parquet import thrift
from pqcache.parquet.pages import NotRead, decode_hybrid


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 40)), max_size=8), st.integers(-3, 20))
def test_levels_are_unpacked_if_they_are_as_many_as_they_should_be(
    runs: list[tuple[bool, int, int]], missing: int
) -> None:
    """Runs and packed bits, of two bits a level, written as Encodings.md has it."""
    data, wanted = b"", []
    for packed, level, size in runs:
        if packed:
            levels = [(level + n) % 4 for n in range(8 * size)]
            bits = sum(one << (2 * n) for n, one in enumerate(levels))
            data += _varint(size << 1 | 1) + bits.to_bytes(2 * size, "little")
            wanted += levels
        else:
            data += _varint(size << 1) + bytes([level])
            wanted += [level] * size
    count = max(0, len(wanted) - missing)
    padding = len(wanted) - count
    if not padding or (0 < padding < 8 * runs[-1][2] and runs[-1][0]):  # DuckDB packs 256 levels at a time
        assert decode_hybrid(data, 2, count).tolist() == wanted[:count]
        return
    with pytest.raises(NotRead):
        decode_hybrid(data, 2, count)


@pytest.mark.parametrize(("data", "count"), [(b"\x08", 4), (b"\x03", 8), (b"", 0)])
def test_numbers_of_no_bits_have_their_runs(data: bytes, count: int) -> None:
    assert decode_hybrid(data, 0, count).tolist() == [0] * count
    with pytest.raises(NotRead):
        decode_hybrid(data, 0, count + 8)


def _varint(number: int) -> bytes:
    out = bytearray()
    thrift.put_varint(out, number)
    return bytes(out)
