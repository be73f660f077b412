"""The map of an arriving snapshot: what of its files is there, in memory that the run and all readers have mapped.

One run writes it, any number of readers look at it, and it survives all of them as a file. Bytes are written to a
file before the map says that they are there, so a reader that sees a mark reads valid bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqcache.errors import CacheError
from pqcache.system.disk import open_plain

Marks = npt.NDArray[np.uint8]

_MAGIC = b"PQARRIVE"
_FORMAT = 1
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<u4"),
        ("state", "<u4"),
        ("files", "<u8"),
        ("row_groups", "<u8"),
        ("columns", "<u8"),
        ("total_bytes", "<u8"),
        ("arrived_bytes", "<u8"),
        ("boot", "S16"),
    ]
)


class ArrivalState(IntEnum):
    """What becomes of an arriving snapshot."""

    ARRIVING = 0  # ranges of its files are missing
    COMPLETE = 1  # all bytes are there; files are checked and made durable
    PUBLISHED = 2  # it has moved to ``snapshots/``
    ABANDONED = 3  # it will never be published: what has arrived may be read, nothing else will come


class FileState(IntEnum):
    """What is there of a file of an arriving snapshot."""

    MISSING = 0  # not all of it
    ARRIVED = 1  # all bytes, checked and durable
    CHANGED = 2  # it is not at the source any more as it was listed: its missing bytes will never come


class ArrivalMap:
    """What of an arriving snapshot is there.

    ``files`` has a `FileState` for each file of the row-group index, in its order. ``chunks`` has a row for each row
    group of the index and a column for each column of its ``data_schema``: 1 where the column chunk is there, or where
    the file has none.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        """Map an existing file; what is no map of this format raises CacheError."""
        descriptor = open_plain(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size < _HEADER.itemsize:
                raise _damaged(path)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            data = np.frombuffer(mmap.mmap(descriptor, size, access=access), np.uint8)
        finally:
            os.close(descriptor)
        self._header = data[: _HEADER.itemsize].view(_HEADER)
        header = self._header[0]
        if header["magic"] != _MAGIC or header["format"] != _FORMAT:
            raise _damaged(path)
        files, row_groups, columns = (int(header[name]) for name in ("files", "row_groups", "columns"))
        start = _HEADER.itemsize
        if size != start + files + row_groups * columns:
            raise _damaged(path)
        self.files: Marks = data[start : start + files]
        self.chunks: Marks = data[start + files :].reshape(row_groups, columns)

    @classmethod
    def create(
        cls, path: Path, *, files: int, row_groups: int, columns: int, total_bytes: int, boot: str
    ) -> ArrivalMap:
        """Write a map by which nothing is there yet, and return it writable.

        ``boot`` names the start of the machine: after another one, only files that are ARRIVED are there.
        """
        header = np.zeros(1, _HEADER)
        header["magic"], header["format"], header["boot"] = _MAGIC, _FORMAT, boot.encode()
        header["files"], header["row_groups"], header["columns"] = files, row_groups, columns
        header["total_bytes"] = total_bytes
        path.write_bytes(header.tobytes() + bytes(files + row_groups * columns))
        return cls(path, writable=True)

    @property
    def state(self) -> ArrivalState:
        """What has become of the snapshot."""
        return ArrivalState(int(self._header["state"][0]))

    @state.setter
    def state(self, state: ArrivalState) -> None:
        self._header["state"] = state

    @property
    def boot(self) -> str:
        """The start of the machine, of the run that has written last."""
        return bytes(self._header["boot"][0]).decode("ascii", "replace")

    @boot.setter
    def boot(self, boot: str) -> None:
        self._header["boot"] = boot.encode()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self._header["total_bytes"][0])

    @property
    def arrived_bytes(self) -> int:
        """Bytes that are there."""
        return int(self._header["arrived_bytes"][0])

    @arrived_bytes.setter
    def arrived_bytes(self, count: int) -> None:
        self._header["arrived_bytes"] = count

    @property
    def is_complete(self) -> bool:
        """Whether all bytes of all files are there."""
        return self.state in (ArrivalState.COMPLETE, ArrivalState.PUBLISHED)

    def has(self, row_group: int, columns: Sequence[int]) -> bool:
        """Return whether the chunks of ``columns`` (by position) of a row group of the index are there."""
        return bool(self.chunks[row_group, columns].all())


def _damaged(path: Path) -> CacheError:
    return CacheError(path, "is no map of arriving files that this pqcache reads", "upgrade pqcache, or sync again")
