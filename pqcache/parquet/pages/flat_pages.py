"""Pages that are decoded by pyarrow without their levels: as a file of one column that has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.footer import footer, thrift, thrift_fields
from pqcache.parquet.footer.thrift import Struct
from pqcache.parquet.pages import page_format
from pqcache.parquet.pages.leaf_column import LeafColumn
from pqcache.system.buffer_pool import BufferPool

Bytes = npt.NDArray[np.uint8]

_PHYSICAL = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")


class FlatPages:
    """Pages of a column chunk that are decoded together; its dictionary serves all that follow.

    A few pages at a time, so that what they are decoded from and to remains in the processor's cache.
    """

    def __init__(self, physical: str, leaf: LeafColumn, memory: BufferPool) -> None:
        self._physical, self._leaf, self._memory = _PHYSICAL.index(physical), leaf, memory
        self._dictionary: list[Bytes] = []
        self._pages: list[Bytes] = []
        self._count = 0  # of values
        self._largest = 0  # bytes of a file so far
        self.size = 0
        """The bytes of the pages, decoded or not, whichever are more."""

    def add_dictionary(self, header: Struct, data: Bytes) -> None:
        """Add the page of the dictionary, which comes before those that use it."""
        if self._dictionary or self._pages:
            raise page_format.NotRead("a dictionary behind values")
        sizes = page_format.page_sizes(thrift_fields.DICTIONARY_PAGE, len(data))
        about = thrift.encode(sizes | {page_format.DICTIONARY: header[page_format.DICTIONARY]})
        self._dictionary = [np.frombuffer(about, np.uint8), data]

    def add(self, count: int, encoding: int, data: Bytes) -> None:
        """Add a page of ``count`` values."""
        if count:  # pyarrow takes an empty page of such a column for its end
            header = page_format.data_page_header(count, encoding, len(data))
            self._pages += [np.frombuffer(header, np.uint8), data]
            self._count += count
            self.size += max(len(data), count * self._leaf.held.itemsize)

    def decode(self, out: npt.NDArray[Any]) -> None:
        """Write the values of the pages that were added to ``out``, and forget these pages."""
        if self._count != len(out):
            raise page_format.NotRead("another number of values than asked for")
        if self._count:
            np.copyto(out, self.values(), casting="unsafe")
        self._pages, self._count, self.size = [], 0, 0

    def values(self) -> npt.NDArray[Any]:
        """Return the values of the pages that were added, of which there are some, as they are stored."""
        with pq.ParquetFile(pa.BufferReader(pa.py_buffer(self._file())), pre_buffer=False) as alone:
            column = alone.read_row_group(0, use_threads=False).column(0)
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if len(values) != self._count or values.null_count:
            raise page_format.NotRead("pyarrow decodes another number of values")
        width = self._leaf.stored.itemsize
        return np.frombuffer(values.buffers()[1], np.uint8, self._count * width, values.offset * width).view(
            self._leaf.stored
        )

    def _file(self) -> Bytes:
        """Return a Parquet file of the pages."""
        parts = [np.frombuffer(footer.MAGIC, np.uint8), *self._dictionary, *self._pages]
        size = sum(map(len, parts))
        parts.append(np.frombuffer(footer.footer_and_magic(self._footer(size)), np.uint8))
        size += len(parts[-1])
        self._largest = max(self._largest, size)  # so that the same memory serves file after file
        return np.concatenate(parts, out=self._memory.borrow(self._largest)[:size])

    def _footer(self, size: int) -> Struct:
        """Return the footer of a file of one column without levels, whose pages are bytes 4 to ``size``."""
        i32, i64, binary, struct_ = thrift.I32, thrift.I64, thrift.BINARY, thrift.STRUCT
        root = {4: (binary, b"schema"), 5: (i32, 1)}
        width = self._leaf.stored.itemsize
        element = {1: (i32, self._physical), 2: (i32, width), 3: (i32, 0), 4: (binary, b"values")}
        begin = len(footer.MAGIC)
        length = size - begin
        chunk = {
            **thrift_fields.column_metadata(
                self._physical, [b"values"], 0, [thrift_fields.PLAIN], self._count, length, length
            ),
            thrift_fields.DATA: (i64, begin + sum(map(len, self._dictionary))),
        }
        if self._dictionary:
            chunk[thrift_fields.DICTIONARY] = (i64, begin)
        column = {2: (i64, 0), 3: (struct_, chunk)}
        group = {1: (thrift.LIST, thrift.Items(struct_, [column])), 2: (i64, size), 3: (i64, self._count)}
        return footer.make_footer({1: (i32, 2)}, [root, element], [group], self._count, {})
