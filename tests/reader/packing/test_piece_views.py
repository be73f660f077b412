"""Views that are made of numbers are those that Arrow makes, and may point to more bytes than one buffer has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pqcache.reader.packing import piece_views
from pqcache.reader.packing.piece_views import array_of, view_buffers, view_words


@pytest.mark.parametrize("step", [1 << 30, 64, 10])
def test_views_are_the_bytes_at_their_places(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(piece_views, "_STEP", step)
    monkeypatch.setattr(piece_views, "_REACH", 2 * step - 1)
    rng = np.random.default_rng(0)
    data, padding = (rng.integers(0, 256, size).astype(np.uint8) for size in (1000, 40))
    most = min(step, 40)
    lengths = rng.integers(0, most + 1, 300)
    begins = rng.integers(0, len(data) - lengths + 1)
    begins[:2], lengths[:2] = (0, len(data) - most), most  # at both ends
    begins[2], lengths[2] = len(data), 0
    buffers = view_buffers(data)
    of_padding = np.array([0, 12, 13, 40]) if most == 40 else np.array([0, 3, 7, 10])
    words = np.concatenate(
        [view_words(data, begins, lengths), view_words(padding, np.zeros(4, np.int64), of_padding, len(buffers))]
    )
    found = array_of(words, [*buffers, *view_buffers(padding)])
    found.validate(full=True)
    expected = [data[begin : begin + length].tobytes() for begin, length in zip(begins, lengths, strict=True)]
    expected += [padding[:length].tobytes() for length in of_padding]
    assert found.to_pylist() == expected
    if step == 1 << 30:
        assert found.cast(pa.large_binary()).equals(pa.array(expected, pa.large_binary()))


def test_no_bytes_and_no_views() -> None:
    nothing = np.zeros(0, np.uint8)
    assert view_buffers(nothing) == []
    words = view_words(nothing, np.zeros(3, np.int64), np.zeros(3, np.int64))
    assert array_of(words, []).to_pylist() == [b"", b"", b""]
    assert array_of(view_words(nothing, np.zeros(0, np.int64), np.zeros(0, np.int64)), []).to_pylist() == []
