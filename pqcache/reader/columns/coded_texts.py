"""Texts that are all in a dictionary: decoded as positions in it, in a fraction of the time that the texts take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from pqcache.system.disk import check_regular

# with a small buffer what is decoded next is still in the processor's cache, and only that is in memory
OPTIONS: dict[str, Any] = {"filesystem": LocalFileSystem(), "pre_buffer": False, "buffer_size": 1 << 16}
_LENGTH = 4  # bytes before each text that is in no dictionary
_ENCODINGS = {"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"}


def are_coded(chunk: pq.ColumnChunkMetaData) -> bool:
    """Return whether texts are positions in a dictionary: those that are not take four bytes more than their own."""
    statistics = chunk.statistics
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else 0
    few_bytes = chunk.total_uncompressed_size < _LENGTH * (chunk.num_values - nulls)
    return bool(chunk.has_dictionary_page and few_bytes and _ENCODINGS.issuperset(chunk.encodings))


def decoded(file: pq.ParquetFile, path: Path, row_group: int, names: Sequence[str], coded: Collection[str]) -> pa.Table:
    """Return columns of a row group; those that are ``coded`` come last, as positions in their dictionaries."""
    plain, found = [name for name in names if name not in coded], [name for name in names if name in coded]
    table = file.read_row_group(row_group, columns=plain, use_threads=False)
    if not found:
        return table
    check_regular(path)
    with pq.ParquetFile(path, metadata=file.metadata, read_dictionary=found, **OPTIONS) as again:
        texts = again.read_row_group(row_group, columns=found, use_threads=False)
    for name, column in zip(texts.column_names, texts.columns, strict=True):
        table = table.append_column(name, column)
    return table
