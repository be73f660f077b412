"""How bytes are written: in chunks, past the page cache where the file system can, and always the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqcache.errors import SourceUnavailable
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync.download.download_file import CHUNK, read_chunks
from pqcache.system.disk import DIRECT_IO_BLOCK

LENGTHS = st.lists(st.sampled_from([0, 1, 100, DIRECT_IO_BLOCK, 65_536, CHUNK - 1, CHUNK, CHUNK + 1]), max_size=6)


def parts(lengths: Sequence[int], error: Exception | None = None) -> Iterator[bytes]:
    for number, length in enumerate(lengths):
        yield bytes([number + 1]) * length
    if error is not None:
        raise error


class Parts(Source):
    """A source whose client gives every file in the same parts."""

    url = "parts"

    def __init__(self, given: Iterator[bytes]) -> None:
        self._given = given

    def list(self) -> Iterator[SourceFile]:
        raise NotImplementedError

    def stat(self, path: str) -> Identity:
        raise NotImplementedError

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        yield from self._given

    def close(self) -> None:
        raise NotImplementedError


def chunks_of(given: Iterator[bytes]) -> Iterator[memoryview]:
    return read_chunks(Parts(given), SourceFile("a", Identity(1, 0)), 0, 1)


@given(LENGTHS)
def test_chunks_are_full_but_for_the_last(lengths: list[int]) -> None:
    got = [bytes(chunk) for chunk in chunks_of(parts(lengths))]
    assert b"".join(got) == b"".join(parts(lengths))
    assert all(len(chunk) == CHUNK for chunk in got[:-1])
    assert all(got)


@given(LENGTHS)
def test_what_was_received_before_an_error_is_kept(lengths: list[int]) -> None:
    got: list[bytes] = []
    received = map(bytes, chunks_of(parts(lengths, SourceUnavailable("", "gone"))))
    with pytest.raises(SourceUnavailable, match="gone"):
        got.extend(received)
    assert b"".join(got) == b"".join(parts(lengths))
