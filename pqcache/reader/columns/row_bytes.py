"""The bytes of rows of different lengths: end to end, or as several views for each row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


@dataclass(frozen=True, kw_only=True, eq=False)
class ViewEnds:
    """Where the views of packed `ViewLists` end, in bytes: row i has views ``rows[i]`` to ``rows[i + 1]``.

    Those that were cut have their first row at ``first`` of ``whole``. ``made`` is for what is made of all of them
    once, by name.
    """

    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    first: int = 0
    whole: ViewEnds | None = None
    made: dict[str, Any] = field(default_factory=dict)

    def cut(self, start: int, stop: int) -> ViewEnds:
        """Return those of a range of rows."""
        rows = self.rows[start : stop + 1]
        ends = self.ends[rows[0] : rows[-1] + 1]
        return ViewEnds(rows=rows - rows[0], ends=ends - ends[0], first=self.first + start, whole=self.whole or self)


@dataclass(slots=True)  # not frozen, which takes three times as long to make
class PackedBytes:
    """The bytes of all rows end to end: row i is ``data[ends[i]:ends[i + 1]]``, and ``ends`` begins with 0.

    Nothing of it changes. ``views`` are there where each row is several views.
    """

    ends: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]
    views: ViewEnds | None = None

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, and of where they and their views end."""
        ends = 0 if self.views is None else self.views.rows.nbytes + self.views.ends.nbytes
        return self.ends.nbytes + self.data.nbytes + ends


@dataclass(frozen=True)
class ViewLists:
    """Rows of which each is several binary views, whose bytes lie end to end when they are packed.

    Row i is ``views[ends[i]:ends[i + 1]]``, and ``ends`` begins with 0.
    """

    ends: npt.NDArray[np.int64]
    views: pa.Array

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def nbytes(self) -> int:
        """The bytes of the views and of what they point to, and of where rows end."""
        return int(self.ends.nbytes + self.views.nbytes)
