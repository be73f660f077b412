"""The footer of a remote file, from its last bytes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.footer.footer import read_tail
from pqcache.parquet.row_group_stats import footer_in
from pqcache.store.drivers.base import Source, file_url
from pqcache.store.manifest import SourceFile


def read_remote_footer(source: Source, file: SourceFile, int96: str = "ns") -> tuple[pq.FileMetaData, pa.Schema]:
    """Return a file's footer and Arrow schema, with ``int96`` as INT96's unit; only the end of the file is read."""

    def read(offset: int, length: int) -> bytes:
        return b"".join(source.read(file.path, offset, length))

    url = file_url(source, file.path)
    return footer_in(read_tail(read, file.identity.size, url).data, url, int96)
