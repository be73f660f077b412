"""Field ids and enum values of parquet.thrift, and the ColumnMetaData that is written with them.

See https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Sequence

from pqcache.parquet.footer.thrift import BINARY, I32, I64, LIST, Items, Struct

# of ColumnChunk: where an index lies, and how long it is
OFFSET_INDEX, COLUMN_INDEX = (4, 5), (6, 7)
# of ColumnMetaData: the last ones are the statistics of values, of pages and of levels
TYPE, ENCODINGS, PATH, CODEC, VALUES, UNCOMPRESSED, COMPRESSED = range(1, 8)
DATA, DICTIONARY, STATISTICS, PAGES, SIZES = 9, 11, 12, 13, 16
# values of enums: physical types, encodings, page types and orders
INT96, BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY = 3, 6, 7
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
ASCENDING, DESCENDING = 1, 2  # of a ColumnIndex's BoundaryOrder


def column_metadata(
    physical: int, path: Sequence[bytes], codec: int, encodings: list[int], values: int, uncompressed: int, size: int
) -> Struct:
    """Return the ColumnMetaData of a chunk whose first page, a data page, is at 0."""
    return {
        TYPE: (I32, physical),
        ENCODINGS: (LIST, Items(I32, encodings)),
        PATH: (LIST, Items(BINARY, list(path))),
        CODEC: (I32, codec),
        VALUES: (I64, values),
        UNCOMPRESSED: (I64, uncompressed),
        COMPRESSED: (I64, size),
        DATA: (I64, 0),
    }
