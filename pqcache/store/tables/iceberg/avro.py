"""Checks Avro files before pyiceberg reads them, which takes a cut file for a complete one and has no limits."""

from __future__ import annotations

import zlib

_MAGIC = b"Obj\x01"
_CODEC = b"avro.codec"
_MAX_BLOCKS = 1 << 30  # bytes of all blocks, decompressed
_SYNC = 16  # bytes of the marker behind the header and each block


class _Bytes:
    """Bytes that are taken one after the other; taking more than there are raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._data)

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        end = self._position + count
        if count < 0 or end > len(self._data):
            raise ValueError(f"it ends after {len(self._data):,} bytes")
        taken, self._position = self._data[self._position : end], end
        return taken

    def take_number(self) -> int:
        """Return the next number, which Avro writes 7 bits at a time and in zigzag."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
        raise ValueError("a number in it is too long")


def check_avro(data: bytes) -> None:
    """Raise ValueError unless ``data`` is all of an Avro file: a header and blocks, each with its marker behind it."""
    rest = _Bytes(data)
    if rest.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no Avro file")
    codec = b""
    while count := rest.take_number():
        if count < 0:
            rest.take_number()
        for _ in range(abs(count)):
            key, value = (rest.take(rest.take_number()) for _ in range(2))
            codec = value if key == _CODEC else codec
    marker = rest.take(_SYNC)
    left = _MAX_BLOCKS
    while not rest.is_at_end:
        count = rest.take_number()
        size = _size_of(rest.take(rest.take_number()), codec, left)
        if not 0 < count <= size:  # an entry of a manifest has a byte at least
            raise ValueError(f"a block of {size:,} bytes cannot have {count:,} entries")
        left -= size
        if rest.take(_SYNC) != marker:
            raise ValueError("a block of it is damaged")


def _size_of(block: bytes, codec: bytes, limit: int) -> int:
    """Return how large a block is when it is decompressed; other codecs than deflate are taken as they are."""
    if codec != b"deflate":
        return len(block) if codec in (b"", b"null") else limit
    inflate = zlib.decompressobj(-15)
    try:
        size = len(inflate.decompress(block, limit))
    except zlib.error:
        raise ValueError("a block of it is damaged") from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it has more than {_MAX_BLOCKS:,} bytes")
    return size
