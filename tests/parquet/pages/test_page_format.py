"""Pages: their levels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pqcache.parquet.footer import thrift
from pqcache.parquet.pages.page_format import unpacked


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 40)), max_size=8), st.integers(0, 500))
def test_levels_are_unpacked(runs: list[tuple[bool, int, int]], count: int) -> None:
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
    assert unpacked(data, 2, count).tolist() == wanted[:count]


def _varint(number: int) -> bytes:
    out = bytearray()
    thrift.put_varint(out, number)
    return bytes(out)
