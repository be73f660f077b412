"""Decoded rows that wait to be encoded: how many there are, what they weigh, and where to cut them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.binary_views import without_views
from pqcache.parquet.rewrite.source_reader import Piece, piece_of
from pqcache.parquet.sizes import Floats, weigh

_NEAR = 0.001  # of what there is room for: guesses are not that good


class Pending:
    """Rows that wait to be written: pieces in order, and what they weigh."""

    def __init__(self, stream: Iterator[Piece]) -> None:
        self.stream = stream
        self.queue: deque[Piece] = deque()
        self.total: Floats | float = 0.0
        self.rows = 0
        self.bytes = 0
        self.exhausted = False

    def _pull(self) -> bool:
        piece = next(self.stream, None)
        if piece is None:
            self.exhausted = True
            return False
        if piece.table.num_rows:
            self.queue.append(piece)
            self.total = self.total + piece.weights
            self.rows += piece.table.num_rows
            self.bytes += piece.nbytes
        return True

    def fill(self, goal: float, k: Floats, max_rows: int, max_bytes: int) -> None:
        """Take pieces in, one at least, until they are guessed to exceed ``goal``, or are too many to be held."""
        while not self.exhausted and not self.full(max_rows, max_bytes):
            if self.rows and float(np.dot(k, self.total)) > goal:
                return
            self._pull()

    def full(self, max_rows: int, max_bytes: int) -> bool:
        """Return whether as much is there as may be held."""
        return self.rows > max_rows or self.bytes > max_bytes

    def weights(self, rows: int) -> Floats:
        """Return the weights of the first ``rows`` rows."""
        result: Floats = np.zeros(len(self.queue[0].weights))
        for piece in self.queue:
            if rows <= 0:
                break
            whole = rows >= piece.table.num_rows
            result = result + (
                piece.weights if whole else weigh(piece.table.slice(0, rows), piece.ratios, piece.widths)
            )
            rows -= piece.table.num_rows
        return result

    def cut(self, goal: float, k: Floats, max_rows: int, max_bytes: int) -> int:
        """Return how many rows, one at least, are guessed to take at most ``goal`` bytes."""
        rows = held = 0
        guess = 0.0
        for piece in self.queue:
            more = float(np.dot(k, piece.weights))
            held += piece.nbytes
            if rows and held > max_bytes:
                break
            if guess + more > goal:
                rows += _fitting(piece, k, goal - guess)
                break
            guess += more
            rows += piece.table.num_rows
        return max(1, min(rows, max_rows))

    def head(self, rows: int) -> pa.Table:
        """Return the first ``rows`` rows."""
        parts = []
        for piece in self.queue:
            parts.append(piece.table.slice(0, rows))
            rows -= parts[-1].num_rows
            if not rows:
                break
        table = pa.concat_tables(parts)
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
        return table

    def drop(self, rows: int) -> list[Piece]:
        """Take the first ``rows`` rows out, and return them."""
        dropped: list[Piece] = []
        while rows:
            piece = self.queue.popleft()
            if piece.table.num_rows > rows:
                for part, numbers in (
                    (piece.table.slice(rows), piece.numbers[rows:]),
                    (piece.table.slice(0, rows), piece.numbers[:rows]),
                ):
                    self.queue.appendleft(piece_of(part, piece.ratios, numbers, piece.done, piece.widths))
                continue
            dropped.append(piece)
            rows -= piece.table.num_rows
        self._count()
        return dropped

    def back(self, pieces: Sequence[Piece]) -> None:
        """Put what `drop` returned in front again."""
        self.queue.extendleft(reversed(pieces))
        self._count()

    def _count(self) -> None:
        self.rows = sum(piece.table.num_rows for piece in self.queue)
        self.bytes = sum(piece.nbytes for piece in self.queue)
        self.total = np.sum([piece.weights for piece in self.queue], axis=0) if self.queue else 0.0

    def ratios(self) -> Floats:
        """Return the mean of the pieces' ratios."""
        rows = [piece.table.num_rows for piece in self.queue]
        result: Floats = np.average([piece.ratios for piece in self.queue], axis=0, weights=rows)
        return result

    def sample(self, size: float, slices: int) -> pa.Table:
        """Return about ``size`` Arrow bytes in slices spread over all rows."""
        share = min(1.0, size / max(1, self.bytes))
        rows = max(1, int(self.rows * share / slices))
        step = self.rows / slices
        if rows >= step:
            return without_views(self.head(self.rows))
        whole = pa.concat_tables([piece.table for piece in self.queue])
        table = without_views(pa.concat_tables([whole.slice(int(turn * step), rows) for turn in range(slices)]))
        return table.unify_dictionaries().combine_chunks()


def _fitting(piece: Piece, k: Floats, room: float) -> int:
    """Return how many of a piece's first rows are guessed to take at most ``room`` bytes; not all of them do."""
    low, high = 0, piece.table.num_rows  # low rows fit, high do not
    below, above = 0.0, float(np.dot(k, piece.weights))
    halve = False
    while high - low > 1 and above - below > _NEAR * room:
        share = 0.5 if halve else (room - below) / (above - below)  # rows are about as large as one another
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        taken = float(np.dot(k, weigh(piece.table.slice(0, middle), piece.ratios, piece.widths)))
        halve = not halve and min(middle - low, high - middle) < (high - low) // 4
        if taken <= room:
            low, below = middle, taken
        else:
            high, above = middle, taken
    return low
