"""What is received before a connection breaks is kept, whatever the parts in which it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqcache.errors import SourceUnavailable
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync.download.download_file import CHUNK, read_chunks


class Breaking(Source):
    """A source whose connection breaks after some parts of a file."""

    url = "parts"

    def __init__(self, lengths: Sequence[int]) -> None:
        self.parts = [bytes([number + 1]) * length for number, length in enumerate(lengths)]

    def list(self) -> Iterator[SourceFile]:
        raise NotImplementedError

    def stat(self, path: str) -> Identity:
        raise NotImplementedError

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        yield from self.parts
        raise SourceUnavailable("", "gone")

    def close(self) -> None:
        raise NotImplementedError


@given(st.lists(st.sampled_from([0, 1, 100, 65_536, CHUNK - 1, CHUNK, CHUNK + 1]), max_size=6))
def test_what_was_received_before_an_error_is_kept(lengths: list[int]) -> None:
    source, got = Breaking(lengths), list[bytes]()
    with pytest.raises(SourceUnavailable, match="gone"):
        got.extend(map(bytes, read_chunks(source, SourceFile("a", Identity(1, 0)), 0, 1)))
    assert b"".join(got) == b"".join(source.parts)
    assert all(len(chunk) == CHUNK for chunk in got[:-1])
