"""Which files of a directory need no rewriting: their row groups fit, and they are encoded as asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.parquet as pq

from pqcache.parquet.codecs import codec_name
from pqcache.parquet.rewrite.file_writer import straddles
from pqcache.parquet.rewrite.options import COMPAT_CODEC, RewriteOptions
from pqcache.parquet.rewrite.row_group_writer import MIN_FILL

_OLD_ENCODINGS = frozenset(("PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"))


def row_group_bytes(group: pq.RowGroupMetaData) -> int:
    """Return the bytes a row group takes on disk: its column chunks, page headers and dictionaries included."""
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def row_group_start(group: pq.RowGroupMetaData) -> int:
    """Return where in its file a row group begins; 0 for one without columns."""
    if not group.num_columns:
        return 0
    first = group.column(0)
    return int(first.dictionary_page_offset or first.data_page_offset)


def count_unchanged_files(
    metadata: Sequence[pq.FileMetaData], options: RewriteOptions, made_alike: Sequence[bool] = ()
) -> int:
    """Return how many of the first files of a directory need no rewriting.

    Every row group must be within the limit, unless it is a single row, fill 95 % of it, unless it is the last that
    holds rows, and not lie across a boundary, where there is a block size. Files without rows and empty row groups
    do not fit, except in a file that is alone; nor does a file whose schema is not the first's, or one that is
    encoded otherwise than ``options`` ask for. ``made_alike`` says of each file whether it
    was made with the same options but for the row-group size.
    """
    if len(metadata) == 1 and metadata[0].num_rows == 0:
        return 1
    last = next((number for number in reversed(range(len(metadata))) if metadata[number].num_rows), -1)
    for number, file in enumerate(metadata):
        if not file.num_rows or not file.schema.equals(metadata[0].schema):
            return number
        if not (made_alike and made_alike[number]) and not _is_as_asked(file, options):
            return number
        for position in range(file.num_row_groups):
            group = file.row_group(position)
            size = row_group_bytes(group)
            final = number == last and position == file.num_row_groups - 1
            if (
                group.num_rows == 0
                or (size > options.row_group_size and group.num_rows > 1)
                or (size < MIN_FILL * options.row_group_size and not final)
                or straddles(row_group_start(group), size, options.block_size)
            ):
                return number
    return len(metadata)


def _is_as_asked(file: pq.FileMetaData, options: RewriteOptions) -> bool:
    """Return whether a file's footer proves that it is encoded as ``options`` ask for.

    Where a codec did not pay, a column has none; so a file in which none has one tells nothing, and neither does
    any file about the level.
    """
    if options.shuffle is not None or options.compression_level is not None:
        return False
    codec = options.compression or (COMPAT_CODEC if options.compat else None)
    codec = None if codec == "keep" else codec
    if codec is None and not options.compat:
        return True
    groups = [file.row_group(number) for number in range(file.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    if options.compat and not all(_OLD_ENCODINGS.issuperset(chunk.encodings) for chunk in chunks):
        return False
    found = {codec_name(chunk.compression) for chunk in chunks}
    return codec is None or (codec in found and found <= {codec, "none"})
