"""How many bytes rows will take on disk, before they are encoded: foreseen from a sample, then learned."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from pqcache.parquet.decode import Floats
from pqcache.parquet.encodings import Encodings, Size, sizes

_MIN_MARGIN, _FIRST_MARGIN, _MAX_MARGIN = 0.0005, 0.0075, 0.03
_NOISE = 0.02  # what two row groups of one kind differ by
_MAX_DICTIONARY = 1 << 20  # pyarrow's dictionary_pagesize_limit; past it, a column goes on plain


class Guess:
    """What is known of the bytes that rows will take: ``k`` by column, and how far to trust it.

    Rows are guessed to take the sum over the columns of ``k * weight``.
    """

    def __init__(self, k: Floats) -> None:
        self.k = k
        self.learned = False  # from a row group, not from a sample
        self.margin = _FIRST_MARGIN
        self.spread = _FIRST_MARGIN / 2

    def of(self, weights: Floats) -> float:
        """Return the bytes that rows of these weights are guessed to take."""
        return float(np.dot(self.k, weights))

    def learn(self, weights: Floats, taken: Floats, missed: bool) -> None:
        """Set ``k`` to what it should have been; half way only, where it was as good as right."""
        found = np.where(weights > 0, taken / np.maximum(weights, 1e-9), self.k)
        noise = np.abs(found - self.k) < _NOISE * found
        trusted = self.learned and not missed
        self.k = np.where(noise & trusted, (self.k + found) / 2, found)
        self.learned = True

    def judge(self, guessed: float, size: int) -> None:
        """Widen or narrow the margin by how far off a guess was, unless it was a first guess."""
        if self.learned and guessed:
            error = min(_MAX_MARGIN, abs(size / guessed - 1))
            self.spread = max(error, 0.8 * self.spread)
            self.margin = min(_MAX_MARGIN, max(_MIN_MARGIN, 1.5 * self.spread))


def foreseen(sample: pa.Table, encodings: Encodings, limit: int) -> tuple[int, list[float]]:
    """Return how many rows like ``sample``'s fill ``limit`` bytes, and what each leaf column takes of them.

    A row group is a hundred times the sample, and columns do not grow in proportion: a dictionary is paid once,
    or grows with the rows and its indices with it. What a quarter of the sample takes tells which.
    """
    few = sample.slice(0, sample.num_rows // 4)
    large = sizes(sample, encodings)
    small = sizes(few, encodings)
    rows = sample.num_rows * limit / max(1, sum(size.total for size in large))
    if few.num_rows == 0 or rows <= sample.num_rows:
        return sample.num_rows, [float(size.total) for size in large]
    leaves: list[float] = []
    for _ in range(2):  # how many rows depends on how they grow
        leaves = [_grown(a, b, few.num_rows, sample.num_rows, rows) for a, b in zip(small, large, strict=True)]
        rows *= limit / max(1.0, sum(leaves))
    scale = limit / max(1.0, sum(leaves))
    return round(rows), [leaf * scale for leaf in leaves]


def _grown(small: Size, large: Size, few: int, many: int, rows: float) -> float:
    """Return what a leaf takes at ``rows`` rows, given what it took at ``few`` and ``many``."""
    times = max(1.0, rows / many)
    data_small, data_large = small.total - small.dictionary, large.total - large.dictionary
    mean = data_large / many
    if not large.dictionary or not small.dictionary:
        slope = (data_large - data_small) / (many - few)
        return data_large + (rows - many) * (slope if 0 < slope < mean else mean)
    # Distinct values grow like a power of the rows (0: all were seen, 1: all are new). With every doubling of the
    # dictionary each index takes another bit.
    power = min(1.0, max(0.0, math.log(large.dictionary / small.dictionary) / math.log(many / few)))
    dictionary = min(large.dictionary * times**power, max(large.dictionary, _MAX_DICTIONARY))
    packing = min(1.0, large.total / max(1, large.uncompressed))
    more = power * math.log2(times) / 8 * large.values / many * packing
    return float(dictionary + rows * (mean + more))
