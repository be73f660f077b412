"""How bytes are written: in chunks, past the page cache where the file system can, and always the same bytes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pqcache
from pqcache.errors import SourceUnavailable
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync.download import download_file as download
from pqcache.store.sync.download.download_file import CHUNK, read_chunks
from pqcache.system.disk import DIRECT_IO_BLOCK, enable_direct_io, write_at
from tests.datasets import rows_of, write_shop

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


def written(path: Path, data: bytes, refuse: bool, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Write ``data`` as a download does; return for each write whether it went past the cache."""
    direct: list[bool] = []
    real = os.pwrite

    def pwrite(descriptor: int, piece: memoryview, offset: int) -> int:
        past = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if past and refuse:
            raise OSError(errno.EINVAL, "Invalid argument")
        direct.append(past)
        return real(descriptor, piece, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    on = enable_direct_io(descriptor)
    offset = 0
    for chunk in chunks_of(iter([data])):
        write_at(descriptor, chunk, offset, on)
        offset += len(chunk)
    os.close(descriptor)
    assert path.read_bytes() == data
    return direct


@pytest.mark.parametrize(
    "length",
    [1, DIRECT_IO_BLOCK, DIRECT_IO_BLOCK + 1, CHUNK - DIRECT_IO_BLOCK, CHUNK, 2 * CHUNK + 5 * DIRECT_IO_BLOCK + 17],
)
@pytest.mark.parametrize("refuse", [False, True])
def test_the_same_bytes_either_way(length: int, refuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(length)
    with open(tmp_path / "probe", "w") as probe:
        able = enable_direct_io(probe.fileno())
    direct = written(tmp_path / "file", data, refuse, monkeypatch)
    if able and not refuse:
        assert direct.count(False) == (1 if length % DIRECT_IO_BLOCK else 0), (
            "only the last, partial block goes through the cache"
        )
    else:
        assert not any(direct)


@pytest.mark.parametrize(("size", "expected"), [(None, True), (1 << 20, False)])
def test_only_what_nobody_reads_next_goes_past_the_cache(
    size: int | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are rewritten as they come are read again at once."""
    asked: list[bool] = []
    real = download.enable_direct_io
    monkeypatch.setattr(download, "enable_direct_io", lambda descriptor: asked.append(True) or real(descriptor))
    monkeypatch.setattr(download, "MIN_DIRECT", 1)
    shop = write_shop(tmp_path / "shop")
    pqcache.sync(str(shop), tmp_path / "cache", row_group_size=size)
    assert bool(asked) == expected
    assert rows_of(tmp_path / "cache" / "current") == rows_of(shop)
