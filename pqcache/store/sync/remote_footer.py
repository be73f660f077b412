"""The footer of a remote file, from its last bytes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.row_group_stats import footer_in
from pqcache.store.drivers.base import Source, file_url
from pqcache.store.manifest import SourceFile

_TAIL = 64 << 10  # most footers fit


def read_remote_footer(source: Source, file: SourceFile, int96: str = "ns") -> tuple[pq.FileMetaData, pa.Schema]:
    """Return a file's footer and Arrow schema, with ``int96`` as INT96's unit; only the end of the file is read."""
    size = file.identity.size
    tail = b"".join(source.read(file.path, max(0, size - _TAIL), min(size, _TAIL)))
    length = int.from_bytes(tail[-8:-4], "little") + 8 if tail[-4:] == b"PAR1" else 0
    if len(tail) < length <= size - 4:
        tail = b"".join(source.read(file.path, size - length, length))
    return footer_in(b"PAR1" + tail[-length:] if length else tail, file_url(source, file.path), int96)
