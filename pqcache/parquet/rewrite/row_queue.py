"""Decoded rows that wait to be encoded: how many there are, what they weigh, and where to cut them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.arrow_sizes import Floats, weigh
from pqcache.parquet.binary_views import without_views
from pqcache.parquet.rewrite.source_reader import RowBatch, row_batch

_NEAR = 0.001  # of what there is space for: estimates are not that good


class RowQueue:
    """Rows that wait to be written: batches in order, and what they weigh."""

    def __init__(self, stream: Iterator[RowBatch]) -> None:
        self.stream = stream
        self.batches: deque[RowBatch] = deque()
        self.total: Floats | float = 0.0
        self.rows = 0
        self.bytes = 0
        self.exhausted = False

    def _pull(self) -> bool:
        batch = next(self.stream, None)
        if batch is None:
            self.exhausted = True
            return False
        if batch.table.num_rows:
            self.batches.append(batch)
            self.total = self.total + batch.weights
            self.rows += batch.table.num_rows
            self.bytes += batch.nbytes
        return True

    def fill(self, goal: float, factors: Floats, max_rows: int, max_bytes: int) -> None:
        """Take batches in, one at least, until they are estimated to exceed ``goal``, or are too many to be held."""
        while not self.exhausted and not self.full(max_rows, max_bytes):
            if self.rows and float(np.dot(factors, self.total)) > goal:
                return
            self._pull()

    def full(self, max_rows: int, max_bytes: int) -> bool:
        """Return whether as much is there as may be held."""
        return self.rows > max_rows or self.bytes > max_bytes

    def weights(self, rows: int) -> Floats:
        """Return the weights of the first ``rows`` rows."""
        result: Floats = np.zeros(len(self.batches[0].weights))
        for batch in self.batches:
            if rows <= 0:
                break
            entire = rows >= batch.table.num_rows
            result = result + (
                batch.weights if entire else weigh(batch.table.slice(0, rows), batch.ratios, batch.widths)
            )
            rows -= batch.table.num_rows
        return result

    def cut(self, goal: float, factors: Floats, max_rows: int, max_bytes: int) -> int:
        """Return how many rows, one at least, are estimated to take at most ``goal`` bytes."""
        rows = held = 0
        estimate = 0.0
        for batch in self.batches:
            more = float(np.dot(factors, batch.weights))
            held += batch.nbytes
            if rows and held > max_bytes:
                break
            if estimate + more > goal:
                rows += _fitting(batch, factors, goal - estimate)
                break
            estimate += more
            rows += batch.table.num_rows
        return max(1, min(rows, max_rows))

    def first(self, rows: int) -> pa.Table:
        """Return the first ``rows`` rows."""
        parts = []
        for batch in self.batches:
            parts.append(batch.table.slice(0, rows))
            rows -= parts[-1].num_rows
            if not rows:
                break
        table = pa.concat_tables(parts)
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
        return table

    def take(self, rows: int) -> list[RowBatch]:
        """Take the first ``rows`` rows out, and return them."""
        taken: list[RowBatch] = []
        while rows:
            batch = self.batches.popleft()
            if batch.table.num_rows > rows:
                for part, numbers in (
                    (batch.table.slice(rows), batch.numbers[rows:]),
                    (batch.table.slice(0, rows), batch.numbers[:rows]),
                ):
                    self.batches.appendleft(row_batch(part, batch.ratios, numbers, batch.done, batch.widths))
                continue
            taken.append(batch)
            rows -= batch.table.num_rows
        self._count()
        return taken

    def put_back(self, batches: Sequence[RowBatch]) -> None:
        """Put what `take` returned in front again."""
        self.batches.extendleft(reversed(batches))
        self._count()

    def _count(self) -> None:
        self.rows = sum(batch.table.num_rows for batch in self.batches)
        self.bytes = sum(batch.nbytes for batch in self.batches)
        self.total = np.sum([batch.weights for batch in self.batches], axis=0) if self.batches else 0.0

    def ratios(self) -> Floats:
        """Return the mean of the batches' ratios."""
        rows = [batch.table.num_rows for batch in self.batches]
        result: Floats = np.average([batch.ratios for batch in self.batches], axis=0, weights=rows)
        return result

    def sample(self, size: float, places: int) -> pa.Table:
        """Return about ``size`` Arrow bytes in slices spread over all rows."""
        share = min(1.0, size / max(1, self.bytes))
        rows = max(1, int(self.rows * share / places))
        step = self.rows / places
        if rows >= step:
            return without_views(self.first(self.rows))
        queued = pa.concat_tables([batch.table for batch in self.batches])
        table = without_views(pa.concat_tables([queued.slice(int(turn * step), rows) for turn in range(places)]))
        return table.unify_dictionaries().combine_chunks()


def _fitting(batch: RowBatch, factors: Floats, space: float) -> int:
    """Return how many of a batch's first rows are estimated to take at most ``space`` bytes; not all of them do."""
    low, high = 0, batch.table.num_rows  # low rows fit, high do not
    below, above = 0.0, float(np.dot(factors, batch.weights))
    halve = False
    while high - low > 1 and above - below > _NEAR * space:
        share = 0.5 if halve else (space - below) / (above - below)  # rows are about as large as one another
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        taken = float(np.dot(factors, weigh(batch.table.slice(0, middle), batch.ratios, batch.widths)))
        halve = not halve and min(middle - low, high - middle) < (high - low) // 4
        if taken <= space:
            low, below = middle, taken
        else:
            high, above = middle, taken
    return low
