"""Takes rows of Arrow tables without pyarrow.compute where that is easy: its import takes longer than most uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MAX_RUNS = 512  # slices of one table


def rows_at(table: pa.Table, positions: npt.NDArray[np.int64]) -> pa.Table:
    """Return the rows at ``positions``; few runs of neighbours are slices."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    if len(starts) > _MAX_RUNS:
        return table.take(positions)
    lengths = np.diff(starts, append=len(positions))
    runs = [table.slice(int(positions[at]), int(length)) for at, length in zip(starts, lengths, strict=True)]
    return pa.concat_tables(runs) if runs else table.slice(0, 0)
