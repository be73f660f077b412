"""The footer of a remote file, from its last bytes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.footer import thrift
from pqcache.parquet.footer.footer import Tail, footer_and_magic, read_tail
from pqcache.parquet.row_group_stats import footer_in
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.manifest import SourceFile


def read_remote_footer(source: Source, file: SourceFile, int96: str = "ns") -> tuple[pq.FileMetaData, pa.Schema]:
    """Only the end of the file is read; INT96 times get the unit ``int96``."""
    url, size = source.url_of(file.path), file.identity.size
    return footer_in(read_remote_tail(source, file).data, url, int96, size=size)


def read_remote_tail(source: Source, file: SourceFile) -> Tail:
    """The end of a file, with its footer as a table's file sees it."""

    def read(offset: int, length: int) -> bytes:
        return read_range(source, file.path, offset, length)

    url = source.url_of(file.path)
    tail, shape = read_tail(read, file.identity.size, url), source.shape_of(file.path)
    if shape is None or shape.columns is None:
        return tail
    from pqcache.parquet.mapped_footer import as_in_table  # and what rewrites files, which few tables need

    fields = as_in_table(thrift.decode(tail.footer, url), shape.columns, url)
    return Tail(footer_and_magic(fields), tail.limit, tail.limit)
