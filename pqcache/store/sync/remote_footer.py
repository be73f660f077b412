"""The footer of a remote file, from its last bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.footer import MAGIC
from pqcache.parquet.row_group_stats import footer_in
from pqcache.store.drivers.base import Source, file_url
from pqcache.store.manifest import SourceFile

_TAIL = 64 << 10  # most footers fit


def read_tail(read: Callable[[int, int], Iterable[bytes]], size: int) -> bytes:
    """Return the last bytes of a file of ``size`` bytes, with all of its footer if it is Parquet.

    ``read(offset, length)`` yields bytes of the file. It is called once for most files, and twice for a long footer.
    """
    start = max(0, size - _TAIL)
    tail = b"".join(read(start, size - start))
    if tail[-4:] == MAGIC:
        first = size - 8 - int.from_bytes(tail[-8:-4], "little")
        if len(MAGIC) <= first < start:
            tail = b"".join(read(first, start - first)) + tail
    return tail


def read_remote_footer(source: Source, file: SourceFile, int96: str = "ns") -> tuple[pq.FileMetaData, pa.Schema]:
    """Return a file's footer and Arrow schema, with ``int96`` as INT96's unit; only the end of the file is read."""
    tail = read_tail(lambda offset, length: source.read(file.path, offset, length), file.identity.size)
    return footer_in(tail, file_url(source, file.path), int96)
