"""Deletion vectors, which Delta and Iceberg store alike: the positions of a file's deleted rows as a Roaring bitmap."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

FRAME = 8  # bytes around a vector in a file: its length before it, a CRC-32 after it
_MAGIC = bytes.fromhex("d1d33964")
_PLAIN, _WITH_RUNS = 12346, 12347
_MAX_CONTAINERS = 1 << 16  # of 65,536 rows each
_MAX_ARRAY = 4096  # rows of a container that is not a bitmap
_MAX_ROWS = 1 << 26

Positions = npt.NDArray[np.int64]


def unframed(blob: bytes) -> bytes:
    """Return the vector in a part of a file, with its frame; raises ValueError where it is damaged."""
    vector = blob[4:-4]
    if int.from_bytes(blob[:4], "big") != len(vector) or zlib.crc32(vector) != int.from_bytes(blob[-4:], "big"):
        raise ValueError("its length or its checksum is wrong")
    return vector


def deleted_positions(vector: bytes) -> Positions:
    """Return the positions in a vector, ascending; raises ValueError where it is damaged.

    It is a magic number and a 64-bit Roaring bitmap in the portable format
    (https://github.com/RoaringBitmap/RoaringFormatSpec).
    """
    place = len(_MAGIC)

    def take(kind: str, count: int) -> Any:
        nonlocal place
        found = np.frombuffer(vector, kind, count, place) if count else np.empty(0, kind)
        place += found.nbytes
        return found if kind == "u1" else found.astype(np.int64)

    if vector[:place] != _MAGIC:
        raise ValueError("it is not a deletion vector")
    parts, total = [np.empty(0, np.int64)], 0
    for _ in range(int(take("<u8", 1)[0])):
        high, cookie = take("<u4", 2).tolist()
        size, runs = 1, np.empty(0, np.uint8)
        if cookie & 0xFFFF == _WITH_RUNS:
            size = (cookie >> 16) + 1
            runs = np.unpackbits(take("u1", -(-size // 8)), bitorder="little")
        elif cookie == _PLAIN:
            size = int(take("<u4", 1)[0])
            runs = np.zeros(min(size, _MAX_CONTAINERS), np.uint8)
        if not len(runs) >= size <= _MAX_CONTAINERS or high >> 31:
            raise ValueError("its bitmap is of an unknown kind")
        keys = take("<u2", 2 * size).reshape(-1, 2)
        total += int(keys[:, 1].sum()) + size
        if total > _MAX_ROWS:
            raise ValueError(f"it deletes more than {_MAX_ROWS:,} rows")
        if cookie == _PLAIN or size >= 4:
            take("<u4", size)  # where the containers begin, one behind the other
        for (key, last), is_run in zip(keys.tolist(), runs.tolist(), strict=False):
            if is_run:
                firsts, lengths = take("<u2", 2 * int(take("<u2", 1)[0])).reshape(-1, 2).T
                ends = np.cumsum(lengths + 1)
                if ends[-1:].sum() > 1 << 16:
                    raise ValueError("a run of it is too long")
                rows = np.arange(ends[-1:].sum()) + np.repeat(firsts - ends + lengths + 1, lengths + 1)
            elif last < _MAX_ARRAY:
                rows = take("<u2", last + 1)
            else:
                rows = np.flatnonzero(np.unpackbits(take("u1", 8192), bitorder="little"))
            if len(rows) != last + 1:
                raise ValueError("a part of it has another number of rows than it says")
            parts.append(rows + (high << 32 | key << 16))
    positions = np.concatenate(parts)
    if place != len(vector) or (np.diff(positions) <= 0).any():
        raise ValueError("its rows are not in order, or there is more behind them")
    return positions
