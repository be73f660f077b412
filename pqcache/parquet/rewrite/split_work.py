"""How the columns and rows of a part of a row group are divided among the threads that encode them.

What a column chunk's bytes are depends on how its rows are cut, so nothing here depends on the machine.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa

from pqcache.parquet.arrow_sizes import Floats
from pqcache.parquet.binary_views import bytes_in
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.pages.write_binary import is_direct
from pqcache.parquet.pages.write_numbers import is_plain

THREADS = 2
_WORTH_A_THREAD, _WORTH_HALVES = 1 << 20, 1 << 20  # Arrow bytes
_UNEVEN = 0.6  # of what the larger share of the columns takes


def split_work(table: pa.Table, sizes: Floats, encodings: Encodings, halves: bool) -> list[tuple[pa.Table, list[int]]]:
    """Return parts of ``table`` that take about as long to encode as one another, and which columns each has.

    Parts have different columns, or, where one column takes nearly all the time and ``halves`` allows it, are the first
    and the last rows of all columns. ``sizes`` are what the columns take on disk, about.
    """
    direct = [
        is_direct(name, column, encodings) or is_plain(name, column, encodings)
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    costs = np.where(direct, 0, sizes)
    nbytes = 0  # a column in many chunks takes long to count: only so far as it matters
    for column, done in zip(table.columns, direct, strict=True):
        if not done and nbytes <= _WORTH_HALVES:
            nbytes += bytes_in(column)
    shares = _shares(costs, THREADS if nbytes > _WORTH_A_THREAD else 1)
    cuts = [0, table.num_rows]
    halves = halves and table.num_rows > 1  # nothing is known of the values of no rows
    if halves and nbytes > _WORTH_HALVES and max(costs[share].sum() for share in shares) > _UNEVEN * costs.sum():
        shares, cuts = [list(range(table.num_columns))], [0, table.num_rows // 2, table.num_rows]
    return [(table.select(share).slice(low, high - low), share) for low, high in pairwise(cuts) for share in shares]


def _shares(sizes: Floats, number: int) -> list[list[int]]:
    """Return columns divided into at most ``number`` shares that are about as large as one another."""
    shares: list[list[int]] = [[] for _ in range(number)]
    totals = [0.0] * number
    for column in np.argsort(-sizes):
        least = totals.index(min(totals))
        shares[least].append(int(column))
        totals[least] += float(sizes[column])
    return [sorted(share) for share in shares if share]
