"""How many bytes rows will take on disk, before they are encoded: extrapolated from a sample, then learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pqcache.parquet.arrow_sizes import Floats
from pqcache.parquet.encodings import EncodedSize, Encodings, encoded_sizes

_FIRST_SPREAD = 0.1  # of an estimate that follows from a sample
_FIRST_MARGIN, _MAX_FIRST = 0.01, 0.5  # left empty by the first part, at least and at most: the next one fills it
_LATER_MARGIN, _MAX_LATER = 0.1, 0.3  # by a later part, which costs little when it has to be done again
_FIRST_DICTIONARY_SPREAD = 0.005
_SURE, _UNSURE = 0.0005, 0.03  # margins of columns that are encoded in one chunk
_WEIGHTY = 0.1  # of a row group: what a part must have for its ``factors`` to be taken as it is
_NOISE = 0.02  # what two row groups of one kind differ by
_MAX_DICTIONARY = 1 << 20  # pyarrow's dictionary_pagesize_limit; past it, a column goes on plain


class SizeEstimate:
    """What is known of the bytes that rows will take: ``factors`` by column, and how far to trust it.

    Rows are estimated to take the sum over the columns of ``factor * weight``.
    """

    def __init__(self, factors: Floats) -> None:
        self.factors = factors
        self.learned = False  # from a complete row group, not from a sample
        self.spread = _FIRST_SPREAD  # how far off estimates were of late: of parts,
        self.dictionary_spread = _FIRST_DICTIONARY_SPREAD  # and of columns that are encoded in one chunk
        self.unsteady = 0.0  # how far they were off, or would have been without a look at a sample of the rows

    def of(self, weights: Floats, columns: Sequence[int]) -> float:
        """Return the bytes that ``columns`` of rows of these weights are estimated to take."""
        return float(np.dot(self.factors[columns], weights[columns]))

    def margin(self, first: bool) -> float:
        """Return the share of the space that is left empty beside a part."""
        if first:
            return min(_MAX_FIRST, _FIRST_MARGIN + 4 * self.spread)
        return min(_MAX_LATER, max(_LATER_MARGIN, 2 * self.spread))

    @property
    def dictionary_margin(self) -> float:
        """The share that columns encoded in one chunk may take more than estimated."""
        return min(_UNSURE, max(_SURE, 1.5 * self.dictionary_spread))

    def learn_part(self, weights: Floats, taken: Floats, columns: Sequence[int], share: float) -> None:
        """Learn from a part of ``columns`` that took ``share`` of a row group: the more, the larger it is."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if estimated and size:
            error = abs(size / estimated - 1)
            part = min(1.0, share / _WEIGHTY)
            self.spread = max(part * error, (1 - 0.3 * part) * self.spread)
            self.unsteady = max(part * error, (1 - 0.2 * part) * self.unsteady)
            self.factors[columns] += part * (self._found(weights, taken) - self.factors)[columns]

    def look(self, weights: Floats, taken: Floats, columns: Sequence[int]) -> None:
        """Estimate ``columns`` anew from a sample of the rows that are next."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if estimated and size:
            self.unsteady = max(abs(size / estimated - 1), 0.9 * self.unsteady)
            self.factors[columns] = self._found(weights, taken)[columns]

    def learn_dictionary(self, weights: Floats, taken: Floats, columns: Sequence[int]) -> None:
        """Learn from ``columns`` of a complete row group; half way only, where the estimate was as good as right."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if self.learned and estimated:
            self.dictionary_spread = max(min(_UNSURE, abs(size / estimated - 1)), 0.8 * self.dictionary_spread)
        found = self._found(weights, taken)
        noise = np.abs(found - self.factors) < _NOISE * found
        self.factors[columns] = np.where(noise & self.learned, (self.factors + found) / 2, found)[columns]
        self.learned = True

    def _found(self, weights: Floats, taken: Floats) -> Floats:
        found: Floats = np.where(weights > 0, taken / np.maximum(weights, 1e-9), self.factors)
        return found


def estimate_from_sample(sample: pa.Table, encodings: Encodings, limit: int) -> tuple[int, list[float]]:
    """Return how many rows like ``sample``'s fill ``limit`` bytes, and what each leaf column takes of them.

    A row group is a hundred times the sample, and columns do not grow in proportion: a dictionary is paid once,
    or grows with the rows and its indices with it. What a quarter of the sample takes tells which.
    """
    few = sample.slice(0, sample.num_rows // 4)
    large = encoded_sizes(sample, encodings)
    small = encoded_sizes(few, encodings)
    rows = sample.num_rows * limit / max(1, sum(size.total for size in large))
    if few.num_rows == 0 or rows <= sample.num_rows:
        return sample.num_rows, [float(size.total) for size in large]
    leaves: list[float] = []
    for _ in range(2):  # how many rows depends on how they grow
        leaves = [_grown(a, b, few.num_rows, sample.num_rows, rows) for a, b in zip(small, large, strict=True)]
        rows *= limit / max(1.0, sum(leaves))
    scale = limit / max(1.0, sum(leaves))
    return round(rows), [leaf * scale for leaf in leaves]


def _grown(small: EncodedSize, large: EncodedSize, few: int, many: int, rows: float) -> float:
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
