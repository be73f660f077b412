"""Which rows of each row group an epoch reads: the rows that satisfy a filter, or rows that were looked up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from pqcache.store.selected_rows import Ints


class Selection(Protocol):
    """Chooses among the rows of a row group, once ``columns`` of it are decoded.

    How many rows it chooses is known before that (``View.selected``), so that an order can be made without reading.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in the files that it looks at, whether or not they are among those that are read."""

    @property
    def fingerprint(self) -> str:
        """A name for what is chosen, so that a state can say what it belongs to."""

    def positions(self, group: int, parts: Iterable[pa.Table]) -> Ints:
        """Return the chosen rows of row group ``group`` of the index: their positions, in ascending order.

        ``parts`` are all its rows, in order, in one table or more: ``columns`` as they are in the file, without
        those that it lacks.
        """


@dataclass(frozen=True)
class Intersection:
    """The rows that both of two selections choose."""

    first: Selection
    second: Selection

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of both."""
        return tuple(dict.fromkeys([*self.first.columns, *self.second.columns]))

    @property
    def fingerprint(self) -> str:
        """A name for both."""
        return f"{self.first.fingerprint}-{self.second.fingerprint}"

    def positions(self, group: int, parts: Iterable[pa.Table]) -> Ints:
        """Return the rows that are in both."""
        parts = list(parts)
        return np.intersect1d(self.first.positions(group, parts), self.second.positions(group, parts), True)
