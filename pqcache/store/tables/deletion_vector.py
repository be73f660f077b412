"""Deletion vectors, which Delta and Iceberg store alike: the positions of a file's deleted rows as a Roaring bitmap.

pqcache's drivers read them when the file is downloaded. deltalake only returns the vectors of a whole table, and only
from files beside the table's, and pyiceberg accepts damaged ones.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt

from pqcache.errors import CHECK_TABLE, SourceError
from pqcache.units import printable

FRAME = 8  # bytes around a vector in a file: its length before it, a CRC-32 after it
_MAX_SIZE = 1 << 28  # bytes
_MAGIC = bytes.fromhex("d1d33964")
_PLAIN, _WITH_RUNS = 12346, 12347
_MAX_CONTAINERS = 1 << 16  # of 65,536 rows each
_MAX_ARRAY = 4096  # rows of a container that is not a bitmap
_MAX_ROWS = 1 << 26
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"

Positions = npt.NDArray[np.int64]
ReadBytes = Callable[[str, int, int], bytes]  # path or URL of a file as in the log, offset, length


@dataclass(frozen=True, kw_only=True)
class DeletionVector:
    """The location of a vector, as in the log of a table.

    Attributes:
        rows: how many rows it deletes.
        size: its length in bytes.
        place: its file, by path or URL as in the log; if ``is_inline``, the vector itself in Z85.
        offset: the offset of its frame in that file.
        is_inline: it is in the log.
    """

    rows: int
    size: int
    place: str
    offset: int = 0
    is_inline: bool = False

    def read(self, file: str, read: ReadBytes) -> Positions:
        """Read the positions of the deleted rows of ``file``, ascending; raises SourceError about it."""
        try:
            vector = _decoded(self.place)[: self.size] if self.is_inline else self._unframed(read)
            positions = _positions(vector)
            if len(positions) != self.rows:
                raise ValueError(f"it deletes {len(positions):,} rows, and {self.rows:,} in the log")
        except ValueError as error:
            raise _damaged(file, error, "" if self.is_inline else f", at {self.offset:,} of {self.place},") from error
        return positions

    def _unframed(self, read: ReadBytes) -> bytes:
        framed = read(self.place, self.offset, min(self.size, _MAX_SIZE) + FRAME)
        vector = framed[4:-4]
        if int.from_bytes(framed[:4], "big") != len(vector) or zlib.crc32(vector) != int.from_bytes(framed[-4:], "big"):
            raise ValueError("its length or its checksum is wrong")
        if len(vector) != self.size:
            raise ValueError(f"it has {len(vector):,} bytes, and {self.size:,} in the log")
        return vector


def vector_of_delta(file: str, about: Mapping[str, Any]) -> DeletionVector:
    """Parse the description of a vector of ``file`` in a Delta log; raises SourceError."""
    try:
        kind, place = about["storageType"], str(about["pathOrInlineDv"])
        if kind == "u":  # relative to the table: a prefix and a UUID
            prefix, name = place[:-20], f"deletion_vector_{UUID(bytes=_decoded(place[-20:]))}.bin"
            place = f"{prefix}/{name}" if prefix else name
        return DeletionVector(
            rows=about["cardinality"],
            size=int(about["sizeInBytes"]),
            place=place,
            offset=int(about.get("offset") or 0),
            is_inline=kind == "i",
        )
    except ValueError as error:
        raise _damaged(file, error) from error


def _damaged(file: str, error: ValueError, where: str = "") -> SourceError:
    reason = f"its deletion vector{printable(where)} is damaged: {error}"
    return SourceError(file, reason, CHECK_TABLE)


def _decoded(text: str) -> bytes:
    return base64.b85decode(text.translate(str.maketrans(_Z85, _BASE85)))


def _positions(vector: bytes) -> Positions:
    """Decode a vector to ascending positions; raises ValueError if it is damaged.

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
