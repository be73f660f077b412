"""How many nulls a column chunk has by its footer, where the program that wrote it is known to count them."""

from __future__ import annotations

import re

import pyarrow.parquet as pq

_ARROW = re.compile(r"parquet-cpp(-arrow)? version (\d+)")
_COUNTS_DICTIONARIES = 5  # Arrow's first version that does (ARROW-12513)


def counts_dictionaries(created_by: str | None) -> bool:
    """Return whether a writer counts the nulls of dictionary columns; Arrow before 5.0 says that there are none.

    >>> counts_dictionaries("parquet-cpp-arrow version 4.0.1"), counts_dictionaries("parquet-mr version 1.12.0")
    (False, True)
    """
    match = _ARROW.match(created_by or "")
    if match is None:
        return True
    return match[1] is not None and int(match[2]) >= _COUNTS_DICTIONARIES  # older ones were parquet-cpp 1.5


def null_count(chunk: pq.ColumnChunkMetaData, statistics: pq.Statistics, dictionaries: bool) -> int | None:
    """Return the nulls of a chunk, None where that is not known; ``dictionaries``: see `counts_dictionaries`."""
    if not statistics.has_null_count:
        return None
    nulls = int(statistics.null_count)
    doubtful = not nulls and not dictionaries and chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page
    return None if doubtful else nulls
