"""Checks Avro files before pyiceberg reads them: its decoder is compiled, and reads past the end of one that is cut."""

from __future__ import annotations

_MAGIC = b"Obj\x01"
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
    while count := rest.take_number():
        if count < 0:
            rest.take_number()
        for _ in range(2 * abs(count)):  # keys and values
            rest.take(rest.take_number())
    marker = rest.take(_SYNC)
    while not rest.is_at_end:
        rest.take_number()
        rest.take(rest.take_number())
        if rest.take(_SYNC) != marker:
            raise ValueError("a block of it is damaged")
